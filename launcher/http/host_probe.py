"""Finds out which agents are gone or suspended, in threads beside the agent's loop.

An agent serves HTTP from before it registers until it ends. So where its host answers that nothing
listens there, the agent's process is gone, and its workers with it. Where its host takes the
connection, and no answer comes, the process is suspended or its loop stands still: its workers may
train on.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from elasticzero.concurrency import run_parallel
from elasticzero.launcher.protocol.documents import Member

CONFIRM_S = 0.1
"""Seconds between two refusals that count together as one: time for the answer of an agent that
lives behind a firewall which refuses connections."""
CONNECT_LIMIT_S = 0.4
"""Maximum seconds for which a host may leave a connection unanswered."""
ASK_AGAIN_S = 0.5
"""Seconds between the answers of agents that are asked whether they run, and the next question."""
THREADS = 16
"""Number of hosts that are connected to at a time."""


class HostProbe:
    """Connects to agents on request, in one thread at a time for each question."""

    def __init__(self, wake: Callable[[], None], answers: Callable[[Member], bool]) -> None:
        """Creates a probe that knows of no host.

        Args:
            wake: Called when an agent is found to be gone.
            answers: Asks an agent whether it runs, and waits for the answer for a limited time.
        """
        self._wake = wake
        self._answers = answers
        self._lock = threading.Lock()
        self._refusing: set[str] = set()
        self._probing = False
        self._until_s = 0.0
        self._unanswered_s: dict[str, float] = {}
        """By incarnation: since when an agent has not answered, on the clock of its caller."""
        self._asking = False
        self._ask_after_s = 0.0

    def unanswered_since(self, members: Mapping[str, Member], now_s: float) -> Mapping[str, float]:
        """Returns which agents answer no request, and since when, and begins to ask them again.

        Args:
            members: Registrations by incarnation. One that is left out is forgotten.
            now_s: Present time, on the clock of the result's times.
        """
        with self._lock:
            for gone in self._unanswered_s.keys() - members:
                del self._unanswered_s[gone]
            if members and not self._asking and time.monotonic() >= self._ask_after_s:
                self._asking = True
                threading.Thread(
                    target=self._ask, args=(members, now_s), name="elasticzero-answers", daemon=True
                ).start()
            return dict(self._unanswered_s)

    def _ask(self, members: Mapping[str, Member], began_s: float) -> None:
        answers: Sequence[bool] = ()
        try:
            answers = run_parallel(members.values(), self._answers, threads=THREADS)
        finally:
            with self._lock:
                for key, answered in zip(members, answers, strict=False):
                    if answered:
                        self._unanswered_s.pop(key, None)
                    else:
                        self._unanswered_s.setdefault(key, began_s)
                self._asking, self._ask_after_s = False, time.monotonic() + ASK_AGAIN_S

    def refusing(self, addresses: Mapping[str, str]) -> Collection[str]:
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
