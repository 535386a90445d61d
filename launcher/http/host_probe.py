"""Finds out which hosts refuse connections to their agent, in a thread beside the agent's loop.

An agent serves HTTP from before it registers until it ends. So where its host answers that nothing
listens there, the agent's process is gone, and its workers with it. This file stands alone because
it speaks no HTTP: the address of an agent's server is all that it takes from it.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping

from elasticzero.concurrency import run_parallel

CONFIRM_S = 0.1
"""Seconds between two refusals that count together as one: time for the answer of an agent that
lives behind a firewall which refuses connections."""
CONNECT_LIMIT_S = 0.4
"""Maximum seconds for which a host may leave a connection unanswered."""
THREADS = 16
"""Number of hosts that are connected to at a time."""


class HostProbe:
    """Connects to agents on request, in one thread at a time."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """Creates a probe that knows of no host.

        Args:
            wake: Called when an agent is found to be gone.
        """
        self._wake = wake
        self._lock = threading.Lock()
        self._refusing: set[str] = set()
        self._probing = False
        self._until_s = 0.0

    def poll(self, addresses: Mapping[str, str]) -> Collection[str]:
        """Returns which agents are known to be gone, and begins to find out about the others.

        Args:
            addresses: `host:port` by incarnation, since another agent may come to the same
                address. An incarnation that is left out is forgotten.
        """
        with self._lock:
            self._refusing.intersection_update(addresses)
            others = {
                key: address for key, address in addresses.items() if key not in self._refusing
            }
            if others and not self._probing and time.monotonic() >= self._until_s:
                self._probing = True
                threading.Thread(
                    target=self._probe, args=(others,), name="elasticzero-refusals", daemon=True
                ).start()
            return frozenset(self._refusing)

    def _probe(self, addresses: Mapping[str, str]) -> None:
        dead = self._refused(addresses)
        if dead:
            time.sleep(CONFIRM_S)
            dead = self._refused(dead)
        with self._lock:
            self._refusing |= dead.keys()
            self._probing, self._until_s = False, time.monotonic() + CONFIRM_S
        if dead:
            self._wake()

    def _refused(self, addresses: Mapping[str, str]) -> dict[str, str]:
        answers = run_parallel(addresses.values(), _is_refused, threads=THREADS)
        return {
            key: addresses[key] for key, refused in zip(addresses, answers, strict=True) if refused
        }


def _is_refused(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_LIMIT_S).close()
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError, OverflowError):  # no answer, no such name or port: not known
        return False
    return False
