"""Makes the deadlines of tests longer on a slow or busy machine.

A fixed piece of work is timed every few seconds. What a test waits for, and the time that it may
take itself, are longer by as much as that work took the last few times. A test that hangs where no
Python runs, as in a call of torch's, does not see pytest's timeout: its process then ends, having
said where all its threads are, and pytest-xdist ends the run, which names the test.
"""

from __future__ import annotations

import faulthandler
import time
from collections import deque
from collections.abc import Callable, Iterator

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

QUIET_S = 0.008
"""Seconds that the work takes on a quiet core of the machine that the deadlines were made on."""
AGAIN_S = 2.0
"""Seconds after which the machine is measured again."""
MOST = 6.0
"""The largest multiple of a deadline: a test that hangs must end some day."""
GRACE_S = 60.0
"""Seconds after its timeout at which the process of a test ends that has not seen it."""
_slowness: deque[float] = deque(maxlen=5)
_measured_s = 0.0


def timed_work() -> float:
    """Returns the seconds that a fixed piece of work takes now."""
    began_s = time.perf_counter()
    total = 0
    for number in range(100_000):
        total += number & 7
    return time.perf_counter() - began_s


def measure() -> None:
    """Measures the machine, unless it was measured a moment ago."""
    global _measured_s
    if not _slowness or time.monotonic() - _measured_s > AGAIN_S:
        _slowness.append(timed_work() / QUIET_S)
        _measured_s = time.monotonic()


def patience(seconds: float) -> float:
    """Returns the deadline that stands for so many seconds on a quiet machine."""
    return seconds * min(MOST, max(1.0, *_slowness)) if _slowness else seconds


def wait_until(so: Callable[[], object], what: str, within_s: float = 30.0) -> None:
    """Waits until something holds that others bring about; a long while, and then fails.

    Args:
        so: Returns whether it holds.
        what: Says what is waited for.
        within_s: The deadline, in seconds of a quiet machine.
    """
    end_s = time.monotonic() + patience(within_s)
    while not so():
        assert time.monotonic() < end_s, f"in vain for this: {what}"
        time.sleep(0.002)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Gives each test a timeout that fits the machine as it is now."""
    measure()
    marker = item.get_closest_marker("timeout")
    if marker is None:
        seconds = float(item.config.getoption("timeout") or item.config.getini("timeout") or 0)
    else:
        seconds = float(marker.args[0] if marker.args else marker.kwargs["timeout"])
    if not seconds:
        return (yield)
    item.add_marker(pytest.mark.timeout(patience(seconds)), append=False)
    stderr = item.config.stash[fault_handler_stderr_fd_key]
    faulthandler.dump_traceback_later(patience(seconds) + GRACE_S, exit=True, file=stderr)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
