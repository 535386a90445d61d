"""What a thread can say of where the main thread is."""

from __future__ import annotations

import sys
import threading
import types

import torch
from torch import Tensor

from elasticzero.ipc.thread_location import main_thread, place_of, waits


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
