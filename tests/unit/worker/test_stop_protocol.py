"""What the stop protocol takes for a lack of memory."""

from __future__ import annotations

import pytest
import torch

from elasticzero.worker.stop_protocol import is_out_of_memory

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
