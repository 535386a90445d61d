"""Reads where gloo's devices listen, and lets gloo finish before a script destroys its process
group, which can hang the process.

`~ProcessGroupGloo` joins the group's thread. That thread drops finished operations, for which it
needs Python's global lock. A destructor that runs with the lock held, as when the last reference is
in a DistributedDataParallel model that goes out of scope, then never returns (torch 2.13: one plain
script in three that destroys its group right after its last step). So the group's threads get time
to drop what has finished, with the lock free, before anything is destroyed.

Each group has a device of its own, which listens at a port that the system chooses. Each rank
publishes that address at the store, and each two ranks connect to one of their devices.

Check after an upgrade of torch: the name of gloo's threads (THREAD_NAME), whether the destructor
still needs the lock, and what a rank publishes (`gloo/transport/tcp/context.cc`, `Rank::bytes`);
`tests/integration/training_shut.py` shuts groups by it.
"""

from __future__ import annotations

import struct
import time
from functools import wraps
from typing import Any

import torch.distributed as dist

from elasticzero.processes import thread_states
from elasticzero.rank_groups.connections import STORAGE_BYTES, Address, address_of

THREAD_NAME = "pt_gloo_runloop"
"""Name of the threads of gloo's groups in torch 2.13. In 2.10 they have none: there all that they
get is the time of QUIET_POLLS checks."""
PAUSE_S = 0.005
"""Time in seconds that the threads get before each check; Python lets a thread keep its lock as
long."""
QUIET_POLLS = 2
"""A thread that sleeps at this many checks in a row has nothing left to drop."""
LIMIT_S = 2.0
_SIZE = struct.Struct("=Q")
_SEQUENCE_BYTES = 8

destroy_process_group = dist.destroy_process_group
"""The function of torch, which waits for nothing."""


def published_address(value: bytes) -> Address | None:
    """Returns where a rank's device listens, by what the rank has published; None: the value is
    something else.

    It is the size and text of a host's name, and the size and bytes of an address: C's
    `sockaddr_storage` and a number. Other numbers follow.
    """
    if len(value) < _SIZE.size:
        return None
    start = _SIZE.size + _SIZE.unpack_from(value)[0]
    if start + 2 * _SIZE.size + STORAGE_BYTES > len(value):
        return None
    if _SIZE.unpack_from(value, start)[0] != STORAGE_BYTES + _SEQUENCE_BYTES:
        return None
    return address_of(value[start + _SIZE.size :])


def wait_before_destroying() -> None:
    """Makes `dist.destroy_process_group` wait until gloo's threads in this process are idle."""

    @wraps(destroy_process_group)
    def wait_and_destroy(*args: Any, **options: Any) -> None:
        _wait_until_idle()
        destroy_process_group(*args, **options)

    c10d: Any = dist.distributed_c10d
    c10d.destroy_process_group = wait_and_destroy
    dist.destroy_process_group = wait_and_destroy


def _wait_until_idle() -> None:
    deadline_s, quiet = time.monotonic() + LIMIT_S, 0
    while quiet < QUIET_POLLS and time.monotonic() < deadline_s:
        time.sleep(PAUSE_S)
        quiet = quiet + 1 if all(state == "S" for state in thread_states(THREAD_NAME)) else 0
