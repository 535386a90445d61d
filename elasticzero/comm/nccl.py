"""NCCL's settings, errors and abort.

The GPU runs a collective while the script goes on. A collective whose peer has died never ends. An
aborted one ends as if it had succeeded, with arbitrary values, also on the ranks beside the one
that aborted. So results count only once it is known that no rank aborted before they ended, and
nothing but this package may abort.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import Any

from elasticzero.comm.torch_internals import nccl_backends

_SETTINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
"""Torch's own watchdog would abort at a peer's death, or end the process."""
_DEFAULTS = {
    "TORCH_FR_BUFFER_SIZE": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
}
"""When a peer dies torch writes records of collectives, for which a group's end waits 15 s, and
after 8 minutes it ends the process; who wants that can."""


def disable_torch_watchdog() -> None:
    """Call before the first group of NCCL is made in this process."""
    os.environ.update(_SETTINGS)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)


def failed() -> bool:
    """Whether NCCL reports an error of any group: a peer's end, a network's.

    False where torch cannot say (before 2.7).
    """
    with suppress(AttributeError):
        for backend in nccl_backends():
            if backend.get_error().name != "SUCCESS":
                return True
    return False


def abort() -> None:
    """End every collective that runs, of the script's own groups too; from any thread.

    They end within milliseconds; this takes up to a second, for NCCL's own threads look that seldom
    whether they are to end (2.28).
    """
    threads = [threading.Thread(target=_abort, args=(b,), daemon=True) for b in nccl_backends()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _abort(backend: Any) -> None:
    with suppress(RuntimeError):
        backend.abort()
