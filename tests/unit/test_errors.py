"""How errors of a script are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from elasticzero.errors import script_traceback


def calling(module: str, work: Callable[[], object]) -> Callable[[], object]:
    """A function of that module which calls `work`."""
    names: dict[str, Any] = {"__name__": module, "work": work}
    exec(compile("def call():\n    work()\n", f"{module}.py", "exec"), names)
    call: Callable[[], object] = names["call"]
    return call


def script() -> None:
    raise ValueError("the script's own")


def raised(call: Callable[[], object]) -> BaseException:
    with pytest.raises(ValueError) as caught:
        call()
    trace = caught.value.__traceback__
    assert trace is not None  # of this function
    return caught.value.with_traceback(trace.tb_next)


def test_a_traceback_begins_with_the_script() -> None:
    inner = calling("elasticzero.entry_point", script)
    error = raised(calling("elasticzero.launcher.workers.forking.server", calling("runpy", inner)))
    text = script_traceback(error)
    assert text.startswith("Traceback (most recent call last):\n")
    assert text.endswith("ValueError: the script's own\n")
    assert text.count("  File ") == 1 and "in script" in text


def test_frames_after_the_scripts_and_of_other_modules_stay() -> None:
    text = script_traceback(raised(calling("elasticzero.session", calling("runpy", script))))
    assert text.count("  File ") == 3
    text = script_traceback(raised(calling("train", calling("elasticzero.entry_point", script))))
    assert text.count("  File ") == 3
