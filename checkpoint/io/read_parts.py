"""Cuts a load into parts of a few megabytes, and reads one part into its tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from elasticzero.checkpoint.format.checksums import BLOCK_BYTES
from elasticzero.checkpoint.format.dtypes import byte_view, is_as_stored
from elasticzero.checkpoint.format.layout import itemsize
from elasticzero.checkpoint.format.plan import Copy
from elasticzero.checkpoint.format.shards import ShardReader
from elasticzero.spans import Span

READ_PART_BYTES = 16 << 20
"""Approximate number of bytes that are read in one go."""
READ_STAGING_BYTES = 8 << 20
"""Size of a thread's buffer, which fills tensors that are not plain host memory."""

Fill = tuple[Copy, torch.Tensor]


@dataclass(frozen=True, slots=True)
class ReadPart:
    """Lists bytes of one shard that are read in one go, front to back."""

    rank: int
    fills: list[Fill]


class ReaderState:
    """Holds what one thread reuses from part to part."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None
        self._shard: ShardReader | None = None
        self._clone: ShardReader | None = None

    def reader_of(self, shard: ShardReader) -> ShardReader:
        """Returns this thread's own reader of the shard."""
        if self._clone is None or self._shard is not shard:
            self._shard, self._clone = shard, shard.clone()
        return self._clone

    def staging(self, size: int) -> torch.Tensor:
        """Returns `size` bytes of host memory, at most `READ_STAGING_BYTES`."""
        if self._buffer is None:
            self._buffer = torch.empty(READ_STAGING_BYTES, dtype=torch.uint8)
        return self._buffer[:size]


def split_reads(shard: ShardReader, fills: list[Fill]) -> Iterator[list[Fill]]:
    """Yields parts of about `READ_PART_BYTES` in the file's order, cut at the ends of checksum
    blocks."""
    part: list[Fill] = []
    size = 0
    limit = sys.maxsize
    for copy, tensor in sorted(fills, key=lambda fill: _first_byte(shard, fill[0])):
        rest, width = copy, tensor.element_size()
        while rest.span_in_shard:
            start = _first_byte(shard, rest)
            stop = start + len(rest.span_in_shard) * width
            if limit == sys.maxsize and size + stop - start > READ_PART_BYTES:
                limit = -(-(start + READ_PART_BYTES - size) // BLOCK_BYTES) * BLOCK_BYTES
            if stop <= limit:
                part.append((rest, tensor))
                size += stop - start
                break
            head, rest = _split(rest, max(0, limit - start) // width)
            if head.span_in_shard:
                part.append((head, tensor))
            yield part
            part, size, limit = [], 0, sys.maxsize
    if part:
        yield part


def _split(copy: Copy, count: int) -> tuple[Copy, Copy]:
    """Returns the first `count` elements of a copy, and the rest."""
    tensor, shard = copy.span_in_tensor, copy.span_in_shard
    head = replace(
        copy,
        span_in_tensor=Span(tensor.start, tensor.start + count),
        span_in_shard=Span(shard.start, shard.start + count),
    )
    rest = replace(
        copy,
        span_in_tensor=Span(tensor.start + count, tensor.stop),
        span_in_shard=Span(shard.start + count, shard.stop),
        offset_in_target=copy.offset_in_target + count,
    )
    return head, rest


def fill_all(shard: ShardReader, fills: list[Fill], state: ReaderState) -> int:
    """Reads every copy's elements into their tensors; returns the number of bytes.

    Args:
        shard: Shard that the copies are read from.
        fills: Copies, each with the tensor that it fills.
        state: Buffers of the thread that reads.

    Raises:
        CheckpointDamaged: Bytes are missing, or differ from what was written.
    """
    straight = []
    size = 0
    for copy, tensor in fills:
        start, count = copy.offset_in_target, len(copy.span_in_shard)
        size += count * tensor.element_size()
        if tensor.device.type == "cpu" and is_as_stored(tensor):
            is_whole = start == 0 and count == tensor.numel()
            part = tensor if is_whole else tensor.detach().reshape(-1)[start : start + count]
            straight.append((copy.name, copy.span_in_shard, byte_view(part)))
        else:
            _fill_staged(shard, copy, tensor, state)
    shard.fill(straight)
    return size


def _fill_staged(shard: ShardReader, copy: Copy, tensor: torch.Tensor, state: ReaderState) -> None:
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else None
    width = tensor.element_size()
    size = READ_STAGING_BYTES // width
    start, count = copy.offset_in_target, len(copy.span_in_shard)
    for done in range(0, count, size):
        step = min(size, count - done)
        staged = state.staging(step * width)
        at = copy.span_in_shard.start + done
        shard.read_into(copy.name, Span(at, at + step), byte_view(staged))
        values = staged.view(tensor.dtype)
        if flat is not None:
            flat[start + done : start + done + step].copy_(values)
        else:
            _scatter(tensor.detach(), start + done, values)


def _first_byte(shard: ShardReader, copy: Copy) -> int:
    entry = shard.entries[copy.name]
    return entry.start + copy.span_in_shard.start * itemsize(entry.dtype)


def _scatter(tensor: torch.Tensor, start: int, values: torch.Tensor) -> None:
    """Writes values to row-major positions from `start` on of a tensor laid out in another
    order.

    Args:
        tensor: Tensor to fill, which is not contiguous.
        start: Index of the first element, in row-major order.
        values: The elements, one-dimensional, on any device.
    """
    positions = torch.arange(start, start + values.numel(), device=tensor.device)
    where = torch.unravel_index(positions, tensor.shape)
    tensor[where] = values.to(tensor.device)
