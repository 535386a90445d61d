"""Copies tensors on their own device, so that they may change while they go into shared memory.

The memory of a GPU copies within itself a hundred times faster than to the host. An image costs
training that copy alone. It needs as much memory of the GPU as its tensors, until it has been
written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

_GRAIN_BYTES = 16
"""A run of tensors lies in the image as far from a multiple of this as in shared memory, which
every dtype's alignment divides."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Says what elements are copied as, by their size in bytes: of these a GPU copies many tensors by
one kernel, and not of every dtype."""


def room(device: torch.device, image_bytes: int) -> int:
    """Returns how many bytes an image may take on a device: half of what torch has not taken of it.

    What torch has taken, it keeps for the peaks of later steps. On the CPU it is 0, since an image
    would cost what it saves.

    Args:
        device: The device.
        image_bytes: Size of the largest image that torch has taken memory for, which counts as not
            taken.
    """
    if device.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    return (free + image_bytes) // 2


@dataclass(slots=True)
class _Run:
    """Holds integers of one dtype that follow each other in shared memory without a gap."""

    start: int
    """Position in shared memory of the first one's first byte."""
    tensors: list[Tensor] = field(default_factory=list)

    @property
    def stop(self) -> int:
        return self.start + sum(tensor.nbytes for tensor in self.tensors)


def _runs(tensors: Mapping[int, Tensor]) -> list[_Run]:
    runs: list[_Run] = []
    stop, dtype = -1, None
    for start, tensor in tensors.items():
        tensor = _as_integers(tensor)
        if start != stop or tensor.dtype != dtype:
            runs.append(_Run(start))
        runs[-1].tensors.append(tensor)
        stop, dtype = start + tensor.nbytes, tensor.dtype
    return runs


def _as_integers(tensor: Tensor) -> Tensor:
    """Returns the bits of a tensor as integers in one dimension; they share its memory if they
    can."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    return flat.view(_INTEGERS[flat.element_size()])


class DeviceImage:
    """Holds tensors as they were when it was made, and writes them into shared memory."""

    def __init__(
        self, memory: Tensor, tensors: Mapping[int, Tensor], stream: torch.cuda.Stream | None
    ) -> None:
        """Copies the tensors on their device.

        On a GPU the copy into shared memory begins as well; it runs beside all later work.

        Args:
            memory: The shared memory, as bytes.
            tensors: The tensors, all on one device, each by the position in `memory` of its first
                byte, in ascending order.
            stream: The stream of a GPU that copies into shared memory; None: the CPU does.

        Raises:
            torch.OutOfMemoryError: The device has no room.
        """
        runs, device = _runs(tensors), next(iter(tensors.values())).device
        places = list(_places(runs))
        image = torch.empty(places[-1].stop, dtype=torch.uint8, device=device)
        for run, place in zip(runs, places, strict=True):
            there = image[place.start : place.stop].view(run.tensors[0].dtype)
            sizes = [tensor.numel() for tensor in run.tensors]
            torch._foreach_copy_(list(there.split(sizes)), run.tensors)
        self._parts = [
            (memory[there.start : there.stop], image[place.start : place.stop])
            for there, place in _joined(runs, places)
        ]
        self._device = device
        self._written: torch.cuda.Event | None = None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                self._copy(non_blocking=True)
                self._written = torch.cuda.Event(blocking=True)
                self._written.record(stream)
            image.record_stream(stream)

    def await_written(self) -> None:
        """Returns once all bytes are in shared memory; any thread may call it, once."""
        if self._written is not None:
            torch.cuda.set_device(self._device)  # else a thread makes a context on the first GPU
            self._written.synchronize()
        else:
            self._copy(non_blocking=False)
        self._parts.clear()

    def _copy(self, *, non_blocking: bool) -> None:
        for place, part in self._parts:
            place.copy_(part, non_blocking=non_blocking)


def _places(runs: list[_Run]) -> Iterator[range]:
    """Yields the place of each run in the image."""
    stop = 0
    for run in runs:
        start = stop + (run.start - stop) % _GRAIN_BYTES
        stop = start + run.stop - run.start
        yield range(start, stop)


def _joined(runs: list[_Run], places: list[range]) -> list[tuple[range, range]]:
    """Returns what can be copied at once: the place in shared memory, and that in the image."""
    joined: list[tuple[range, range]] = []
    for run, place in zip(runs, places, strict=True):
        there = range(run.start, run.stop)
        if joined and joined[-1][0].stop == there.start and joined[-1][1].stop == place.start:
            before, place_before = joined.pop()
            there, place = range(before.start, there.stop), range(place_before.start, place.stop)
        joined.append((there, place))
    return joined
