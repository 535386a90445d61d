"""What a thread can say of where the main thread is."""

from __future__ import annotations

import functools
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from elasticzero.ipc.thread_location import (
    PACKAGE,
    main_thread,
    place_in_traceback,
    place_of,
    place_of_error,
    waits,
)


def test_the_line_of_the_script_is_named_from_another_thread() -> None:
    locations: list[tuple[str, bool]] = []
    thread = threading.Thread(target=lambda: locations.append(main_thread()))
    thread.start()
    thread.join()
    ((place, waiting),) = locations
    assert place.startswith("test_thread_location.py:")
    assert place.endswith(" in test_the_line_of_the_script_is_named_from_another_thread")
    assert not waiting


class Noting(torch.autograd.Function):
    """Notes its caller's frame, which is torch's engine."""

    seen: types.FrameType | None = None

    @staticmethod
    def forward(_: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(_: object, gradient: Tensor) -> Tensor:
        Noting.seen = sys._getframe()
        return gradient


def test_a_backward_may_wait_for_peers_its_hooks_do_not() -> None:
    """Nor does other code of the script within it."""
    noted: Tensor = Noting.apply(torch.ones(1, requires_grad=True))  # type: ignore[no-untyped-call]
    noted.sum().backward()
    first_frame = Noting.seen
    assert first_frame is not None
    assert not waits(first_frame)
    assert place_of(first_frame).endswith(" in backward")
    frame: types.FrameType | None = first_frame
    while frame is not None and "/torch/autograd/" not in frame.f_code.co_filename:
        frame = frame.f_back
    assert frame is not None
    assert waits(frame)
    assert place_of(frame).startswith("test_thread_location.py:")


CALLS = "def call():\n    return work()\n"
ENDS = """def call():
    try:
        work()
    except Exception as error:
        return place(error)
"""


def compiled(file: str, text: str, work: Callable[[], object]) -> Callable[[], object]:
    """A function of that file which calls `work`."""
    names: dict[str, Any] = {"__name__": "module", "work": work, "place": place_of_error}
    exec(compile(text, file, "exec"), names)
    call: Callable[[], object] = names["call"]
    return call


def refusing(*files: str) -> Callable[[], object]:
    """Functions of these files, each of which calls the next; the last call is refused."""
    call: Callable[[], object] = functools.partial(int, "refused")
    for file in reversed(files):
        call = compiled(file, CALLS, call)
    return compiled(f"{PACKAGE}entry_point.py", ENDS, call)


def test_an_error_has_the_line_of_the_innermost_script() -> None:
    loops, session = f"{PACKAGE}training/batch_loops.py", f"{PACKAGE}session.py"
    assert refusing("/job/train.py", loops, "/job/end.py", session)() == "end.py:2 in call"
    assert refusing(f"{PACKAGE}worker/join.py")() == ""


def test_an_error_in_a_framework_has_the_line_that_started_it() -> None:
    """What leads to the generation's end is not in the error's traceback."""
    script = "/job/train.py"
    adapter = refusing(f"{PACKAGE}integrations/transformers/loop.py")
    assert compiled(script, CALLS, adapter)() == "train.py:2 in call"


def test_the_place_in_a_traceback_is_that_of_the_script() -> None:
    """The innermost line may be torch's own."""
    trace = f"""\
Traceback (most recent call last):
  File "/home/u/train.py", line 12, in train
    model(batch)
  File "/home/u/model.py", line 3, in <module>
    F.relu(x)
  File "{torch.nn.functional.__file__}", line 1234, in relu
    raise ValueError
ValueError
"""
    assert place_in_traceback(trace) == "model.py:3"
    assert place_in_traceback("") == ""
    try:
        raise KeyError(1)
    except KeyError as error:
        text = "".join(traceback.format_exception(error))
        assert place_in_traceback(text) == place_of_error(error)
        assert place_in_traceback(text).startswith("test_thread_location.py:")
