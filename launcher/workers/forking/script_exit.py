"""Ends a worker's process once its script has ended, as Python itself would end it.

The interpreter is not finalized: destructors of native libraries can hang, as in
`elasticzero/comm/gloo.py`. So this does what a finalization owes a script: it runs the exit
functions, and waits for threads that are no daemons, these within a limit.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from elasticzero.ipc.thread_location import main_thread


def exit_process(code: int, rank: str, limit_s: float, ending: Callable[[], None]) -> NoReturn:
    """Runs the exit functions, waits for threads, and ends this process with the script's code.

    Exit functions take the time they need; a line reports each time that `limit_s` has passed.

    Args:
        code: The script's exit code.
        rank: The worker's rank, for messages.
        limit_s: Seconds for which threads may run on; 0: no limit.
        ending: Called once the exit functions have run.
    """
    over = threading.Event()
    if limit_s > 0:
        thread_args = (rank, limit_s, over)
        threading.Thread(target=_report_slow_exit_functions, args=thread_args, daemon=True).start()
    _run_exit_functions()
    over.set()
    ending()
    left = _wait_for_threads(limit_s)
    if left:
        running = "a thread still runs" if len(left) == 1 else f"{len(left)} threads still run"
        _print_error(
            f"rank {rank}: the script has ended, but {running} after {limit_s:g} s "
            f"(--exit-timeout): {', '.join(left)}; the process ends with the script's exit code "
            f"{code}"
        )
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _run_exit_functions() -> None:
    """Runs the exit functions of threading, then those of atexit.

    Executors finish their work by the first; loggers and DataLoader workers use the second.
    """
    import atexit

    for function in reversed(getattr(threading, "_threading_atexits", [])):
        with suppress(BaseException):
            function()
    with suppress(BaseException):
        atexit._run_exitfuncs()  # noqa: SLF001 - Python has no public name


def _wait_for_threads(limit_s: float) -> list[str]:
    """Waits for the threads that Python would wait for; returns the names of those still
    running."""
    deadline_s = time.monotonic() + limit_s
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join(max(0.0, deadline_s - time.monotonic()) if limit_s > 0 else None)
    return [
        thread.name
        for thread in threading.enumerate()
        if not thread.daemon and thread is not threading.current_thread()
    ]


def _report_slow_exit_functions(rank: str, every_s: float, over: threading.Event) -> None:
    began_s = time.monotonic()
    while not over.wait(every_s):
        _print_error(
            f"rank {rank}: the script has ended, and its exit functions still run after "
            f"{time.monotonic() - began_s:.0f} s: the main thread is at {main_thread()[0]}"
        )


def _print_error(text: str) -> None:
    # Not by logging: its shutdown is one of the exit functions, and may be what hangs.
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
