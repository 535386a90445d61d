"""An image holds tensors as they were, and writes them where they belong and nowhere else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticzero.checkpoint.ram.device_image import DeviceImage, room

DTYPES = (
    (torch.float64, torch.complex64, torch.int64, torch.uint64),
    (torch.float32, torch.int32, torch.uint32),
    (torch.bfloat16, torch.float16, torch.int16, torch.uint16),
    (torch.uint8, torch.int8, torch.bool, torch.float8_e4m3fn, torch.float8_e8m0fnu),
)
"""Lists dtypes by the size of an element, wide ones first as in a shard."""
FILL = 77


@st.composite
def placed(draw: st.DrawFn) -> tuple[int, dict[int, torch.Tensor]]:
    """The size of a memory, and tensors by place: some are left out, as what is there already."""
    count, start, tensors = draw(st.integers(1, 12)), 0, {}
    for width in sorted(draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))):
        shape = draw(st.sampled_from([(), (1,), (3,), (4, 5), (2, 3, 7)]))
        elements = torch.randint(0, 100, shape).to(draw(st.sampled_from(DTYPES[width])))
        if draw(st.booleans()) and elements.dim() == 2:
            elements = elements.t()
        if draw(st.booleans()) and elements.dim() == 1:
            elements = elements.repeat_interleave(2)[::2]
        if draw(st.booleans()) and elements.is_complex():
            elements = elements.conj()
        if draw(st.integers(0, 3)) or not start:
            tensors[start] = elements
        start += elements.nbytes
    return start, tensors


@settings(deadline=None)
@given(placed())
def test_an_image_writes_what_was_there_when_it_was_made(
    case: tuple[int, dict[int, torch.Tensor]],
) -> None:
    size, tensors = case
    expected = torch.full((size,), FILL, dtype=torch.uint8)
    for start, tensor in tensors.items():
        flat = tensor.resolve_conj().reshape(-1)
        there = torch.empty(flat.shape, dtype=flat.dtype).copy_(flat).view(torch.uint8)
        expected[start : start + tensor.nbytes] = there
    memory = torch.full((size,), FILL, dtype=torch.uint8)
    image = DeviceImage(memory, tensors, None)
    for tensor in tensors.values():
        tensor.copy_(torch.ones(()))
    assert bool((memory == FILL).all())
    image.await_written()
    assert torch.equal(memory, expected)


def test_the_cpu_has_no_room_for_images() -> None:
    assert room(torch.device("cpu"), 0) == 0


def test_the_second_image_has_room_where_the_first_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch keeps the memory of the first for it."""
    device, size = torch.device("cuda", 0), 60
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * size, 1000))
    assert room(device, 0) == size
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (size, 1000))
    assert room(device, size) == size
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (size - 1, 1000))
    assert room(device, size) < size
