"""How the ranks of a generation find each other: at rank 0's store, before anything is set up that
takes all of them.

Scripts do not start alike fast: one node imports from a cold disk, another's process is kept from
the generation before. Who is there waits for the rest for `place.start_timeout_s`; the time to set
the process group up counts from when all are there.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import DistStoreError

from elasticzero.errors import RetryError

RETRY_S, RETRY_MAX_S = 0.02, 0.5
PROBE_S = 2.0
"""One try to reach rank 0's host."""
TOLD_AFTER_S = 10.0
"""So long after it began to wait, a rank says for whom."""
RANKS_SHOWN = 16

Allow = Callable[[float], None]
"""Bounds what comes next, in seconds, instead of what came before: torch's store can block far past
its timeout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where this process stands in the world, and how the world is reached."""

    rank: int
    world_size: int
    local_rank: int = 0
    master_address: str = "127.0.0.1"
    master_port: int = 0
    store_fd: int | None = None
    """Rank 0: an inherited socket bound to `master_port`, not yet listening."""
    token: str = ""
    connect_timeout_s: float = 30.0
    """For what needs no other rank's script: rank 0's host, and the process group of those that are
    there."""
    start_timeout_s: float = 300.0
    """From here until every rank's script is here."""
    collective_timeout_s: float = 600.0


def meet(place: Place, allow: Allow) -> TCPStore:
    """Rank 0's store, where every rank has said by now that it is there.

    Raises `RetryError` when rank 0's host is not reached within `place.connect_timeout_s`, and when
    a rank has not come within `place.start_timeout_s`; a peer that goes away later is an error of
    torch's own.
    """
    deadline_s = time.monotonic() + place.start_timeout_s
    if place.store_fd is None:
        _reach(place, deadline_s)
    allow(place.connect_timeout_s)
    store = _store(place)
    allow(max(0.0, deadline_s - time.monotonic()) + place.connect_timeout_s)
    _wait_for_all(place, store, deadline_s)
    allow(place.connect_timeout_s)
    return store


def _store(place: Place) -> TCPStore:
    timeout = timedelta(seconds=place.connect_timeout_s)
    address, port, size = place.master_address, place.master_port, place.world_size
    if place.store_fd is None:
        return TCPStore(address, port, size, timeout=timeout, wait_for_workers=False)
    return TCPStore(
        address,
        port,
        size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=place.store_fd,
        use_libuv=True,
    )


def _reach(place: Place, deadline_s: float) -> None:
    """Wait until rank 0's store listens: a dead or silent host would block torch's store.

    A host that refuses the connection is there, and rank 0's script may still be starting.
    """
    host, port = place.master_address, place.master_port
    began_s = seen_s = time.monotonic()
    told = False
    while True:
        left_s = seen_s + place.connect_timeout_s - time.monotonic()
        try:
            socket.create_connection((host, port), max(0.05, min(PROBE_S, left_s))).close()
            return
        except ConnectionRefusedError as error:
            problem: OSError = error
            seen_s = now_s = time.monotonic()
        except OSError as error:
            problem, now_s = error, time.monotonic()
        waited_s = now_s - began_s
        pause_s = max(RETRY_S, min(RETRY_MAX_S, waited_s / 10))
        if now_s + pause_s >= min(seen_s + place.connect_timeout_s, deadline_s):
            raise RetryError(f"rank 0 at {host}:{port} was not reached in time: {problem}")
        if waited_s >= TOLD_AFTER_S and not told:
            told = True
            _tell(
                f"rank 0 at {host}:{port} was not reached for {waited_s:.0f} s ({problem}); its "
                f"script may still be starting; if {host} is not its node, give that one --host"
            )
        time.sleep(pause_s)


def _wait_for_all(place: Place, store: TCPStore, deadline_s: float) -> None:
    here = PrefixStore(f"{place.token}/here", store)
    here.set(str(place.rank), "1")
    if here.add("count", 1) == place.world_size:
        here.set("all", "1")
        return
    told: list[int] = []
    while True:
        left_s = deadline_s - time.monotonic()
        try:
            here.wait(["all"], timedelta(seconds=max(0.01, min(TOLD_AFTER_S, left_s))))
            return
        except DistStoreError:
            if time.monotonic() >= deadline_s:
                raise RetryError(
                    f"{here.add('count', 0)} of {place.world_size} ranks were there after "
                    f"{place.start_timeout_s:g} s; the scripts of the others have not come to "
                    "elasticzero.run"
                ) from None
        if place.rank == 0:
            missing = [r for r in range(place.world_size) if not here.check([str(r)])]
            if missing and missing != told:
                told = missing
                names = ", ".join(map(str, missing[:RANKS_SHOWN]))
                more = ", ..." if len(missing) > RANKS_SHOWN else ""
                _tell(f"the scripts of ranks {names}{more} have not come to elasticzero.run yet")


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
