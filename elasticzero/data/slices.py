"""Cuts global batches into slices of fixed samples, deals them to ranks, and keys their random
numbers. Pure.

The slices of a global batch, and the seed of each, follow from the loop's arguments alone and never
from the world: another world computes the same slices, on other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from elasticzero.data.sampling import GlobalBatch, MicroBatch
from elasticzero.hashing import mix64
from elasticzero.spans import Span

Use = Literal["read", "compute", "after"]
"""Says what random numbers are for: reading and collating a slice's samples, computing the slice,
and what a script does after a global batch."""
_USES: tuple[Use, ...] = ("read", "compute", "after")


def dealt(count: int, rank: int, world_size: int) -> Span:
    """Returns the slices of `rank`, of `count`: contiguous, and at most one more than another rank
    has. Rank 0 has the first one."""
    return Span(-(-rank * count // world_size), -(-(rank + 1) * count // world_size))


def slices_of(batch: GlobalBatch, rank: int, world_size: int, size: int) -> Iterator[MicroBatch]:
    """Returns `rank`'s slices of `size` samples; the last one of a batch may be shorter.

    Every rank has the same number. A rank with fewer slices than others computes the batch's first
    slice in place of the missing one, at weight 0.
    """
    count = -(-len(batch) // size)
    mine = dealt(count, rank, world_size)
    places = -(-count // world_size)
    for place in range(places):
        index = mine.start + place
        filler = index >= mine.stop
        start = batch.start if filler else batch.start + index * size
        positions = Span(start, min(start + size, batch.stop))
        yield MicroBatch(
            positions=positions,
            weight=0 if filler else len(positions),
            last=place == places - 1,
            slice=None if filler else index,
            slices=count,
        )


def slice_seed(seed: int, dataset: int, epoch: int, start: int, use: Use) -> int:
    """Returns the seed, of 64 bits, of what is drawn for a slice.

    seed: the loop's; any integer will do. dataset: the number of the loop's dataset object. start:
    the position of the slice's first sample in the epoch.
    """
    value = mix64(seed + 0x632BE59BD9B4E019)
    for number in (dataset, epoch, start, _USES.index(use)):
        value = mix64(value + mix64(number + 0x9E3779B97F4A7C15))
    return value
