"""An image holds tensors as they were, and writes them where they belong and nowhere else."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticzero.checkpoint.ram.device_image import DeviceImage, room

DTYPES = (torch.float64, torch.complex64, torch.float32, torch.int32, torch.bfloat16, torch.uint8)
"""Wide ones first, as in a shard."""
FILL = 77


@st.composite
def placed(draw: st.DrawFn) -> tuple[int, dict[int, torch.Tensor]]:
    """The size of a memory, and tensors by place: some are left out, as what is there already."""
    count, start, tensors = draw(st.integers(1, 12)), 0, {}
    for number in sorted(draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))):
        shape = draw(st.sampled_from([(), (1,), (3,), (4, 5), (2, 3, 7)]))
        elements = torch.randint(0, 100, shape).to(DTYPES[number])
        if draw(st.booleans()) and elements.dim() == 2:
            elements = elements.t()
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
        there = tensor.contiguous().reshape(-1).view(torch.uint8)
        expected[start : start + tensor.nbytes] = there
    memory = torch.full((size,), FILL, dtype=torch.uint8)
    image = DeviceImage(memory, tensors, None)
    for tensor in tensors.values():
        tensor.zero_()
    assert bool((memory == FILL).all())
    image.await_written()
    assert torch.equal(memory, expected)


def test_the_cpu_has_no_room_for_images() -> None:
    assert room(torch.device("cpu")) == 0
