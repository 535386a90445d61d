"""Checks what the stop protocol takes for a lack of memory, and how it ends."""

from __future__ import annotations

import pytest
import torch

from elasticzero.ipc.agent_client import STANDALONE, AgentClient, GenerationEnded
from elasticzero.worker import stop_protocol
from elasticzero.worker.stop_protocol import StopState, is_out_of_memory, run_stop_protocol

CPU = "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError(CPU), True),
        (MemoryError(), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_errors_of_memory_are_told_from_others(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) == expected


class Exited(BaseException):
    """The end of the process."""


def test_the_process_ends_whatever_comes_of_its_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second SIGINT may come while it waits for them."""
    settled: list[bool] = []

    def exit_now(code: int) -> None:
        raise Exited(code)

    def settle() -> None:
        settled.append(True)
        raise KeyboardInterrupt

    monkeypatch.setattr(stop_protocol, "exit_now", exit_now)
    monkeypatch.setattr(stop_protocol, "SAVE_WAIT_S", 0.0)
    link = AgentClient(None, STANDALONE)
    with pytest.raises(Exited):
        run_stop_protocol(link, GenerationEnded("a peer was lost"), StopState(settle=settle))
    assert settled == [True]
