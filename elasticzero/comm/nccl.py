"""Finds a worker's GPU, sets up NCCL, reads its errors and aborts its collectives.

The GPU runs a collective while the script goes on. A collective whose peer has died never ends. An
aborted one ends as if it had succeeded, with arbitrary values, also on the ranks beside the one
that aborted. So results count only once all ranks have confirmed that none aborted before they
ended, and nothing but this package may abort.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from elasticzero.errors import OperatorError
from elasticzero.torch_internals.groups import nccl_backends

ABORT_S = 2.0
"""Time in seconds after which an abort counts as hanging."""
_SETTINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_DIST_USE_NCCL2": "0"}
"""Settings that are always made: torch's own watchdog would abort at a peer's death, or end the
process; and so would that of the backend `nccl2`, which may go by the name `nccl` from torch 2.14
on, and has no setting against it."""
_DEFAULTS = {
    "TORCH_FR_BUFFER_SIZE": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
}
"""Settings that a user may override. When a peer dies torch writes records of collectives, for
which a group's end waits 15 s, and after 8 minutes it ends the process."""


def device_of(local_rank: int) -> torch.device:
    """Returns the GPU of a worker's own if there are any, else the CPU.

    Raises `OperatorError` if there are too few, unless NCCL is told that ranks may share one.

    Args:
        local_rank: Index of the worker on its node.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        raise OperatorError(
            f"worker {local_rank} of this node has no GPU of its own: the node has {count}. "
            f"Give --nproc-per-node {count} or less, or set CUDA_VISIBLE_DEVICES= to train on the "
            "CPU"
        )
    return torch.device("cuda", local_rank % count)


def set_up(device: torch.device) -> None:
    """Has this thread use a GPU, and disables torch's watchdog; call it before a group of NCCL is
    made in this thread.

    Args:
        device: The GPU.
    """
    torch.cuda.set_device(device)
    disable_torch_watchdog()


def disable_torch_watchdog() -> None:
    """Disables torch's watchdog; call it before the first group of NCCL is made in this process."""
    odd = {name: value for name, value in _SETTINGS.items() if os.environ.get(name) != value}
    os.environ.update(odd)  # other threads may read the environment
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)


def connect_at_once() -> None:
    """Has NCCL connect the ranks of a communicator as it is made, not in its first collective; call
    it before the first group of NCCL is made in this process."""
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")


def failed(groups: Iterable[dist.ProcessGroup]) -> bool:
    """Returns whether NCCL reports an error of one of these groups: the end of a peer, or a network
    fault.

    Returns False if torch cannot tell (before 2.7).
    """
    with suppress(AttributeError):
        for backend in nccl_backends(groups):
            if backend.get_error().name != "SUCCESS":
                return True
    return False


def connect_beside(group: dist.ProcessGroup, device: torch.device) -> None:
    """Makes this rank's communicator of a group beside what the GPU and other threads do; returns
    once all ranks have made theirs. All ranks call this together, once each has heard of all
    others.

    No collective is made: a kernel that waits for other ranks would have no common order with those
    of the training, and each could wait for the other. The main threads make the first one.

    Args:
        group: A group of NCCL's that has made no collective, and that torch has no record of.
        device: This rank's GPU.

    Raises:
        DistError: A rank is lost.
    """
    for backend in nccl_backends([group]):
        backend.eager_connect_single_device(device)


def abort(groups: Iterable[dist.ProcessGroup]) -> None:
    """Ends every running collective of these groups; any thread may call it.

    They end within milliseconds. This call takes up to a second, because NCCL's own threads check
    for it rarely (2.28).
    """
    backends = nccl_backends(groups)
    threads = [threading.Thread(target=_abort, args=(b,), daemon=True) for b in backends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _abort(backend: Any) -> None:
    with suppress(RuntimeError):
        backend.abort()
