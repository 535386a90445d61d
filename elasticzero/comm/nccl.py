"""Sets up NCCL, reads its errors and aborts its collectives.

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

import torch.distributed as dist

from elasticzero.torch_internals.groups import nccl_backends

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


def disable_torch_watchdog() -> None:
    """Disables torch's watchdog; call it before the first group of NCCL is made in this process."""
    os.environ.update(_SETTINGS)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)


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
