"""Cuts global batches into slices of fixed samples, deals them to ranks, and keys their random
numbers. Pure.

The slices of a global batch, and the seed of each, follow from the loop's arguments alone and never
from the world: another world computes the same slices, on other ranks.

Shapes: G groups of a stream's readers (`streams/dealing.py`, I4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from elasticzero.data.hashing import mix64
from elasticzero.data.position import GlobalBatch, MicroBatch
from elasticzero.spans import Span

Use = Literal["read", "compute", "after"]
"""Says what random numbers are for: reading and collating a slice's samples, computing the slice,
and what a script does after a global batch."""
_USES: tuple[Use, ...] = ("read", "compute", "after")


def run_of(count: int, rank: int, world_size: int) -> Span:
    """Returns the run of `count` slices, or groups of readers, that `rank` has: at most one more
    than another rank has. Rank 0 has the first one.

    Args:
        count: Number of slices, or of groups.
        rank: The rank.
        world_size: Number of ranks.
    """
    return Span(-(-rank * count // world_size), -(-(rank + 1) * count // world_size))


@lru_cache(maxsize=64)
def _runs(count: int, world_size: int) -> tuple[Span, ...]:
    return tuple(run_of(count, rank, world_size) for rank in range(world_size))


def cut(positions: Span | GlobalBatch, size: int, *, never_one: bool = False) -> list[Span]:
    """Cuts positions in parts of `size`, of which the last one may be shorter.

    Args:
        positions: The positions; none are no part.
        size: Number of positions of a part.
        never_one: No part has one position, unless `size` is 1 or there is only one: the last two
            are one shorter and one longer, or of parts of two positions the last has three.
    """
    bounds = [*range(positions.start, positions.stop, size), positions.stop]
    if never_one and size > 1 and len(bounds) > 2 and bounds[-1] - bounds[-2] == 1:
        if size > 2:
            bounds[-2] -= 1
        else:
            del bounds[-2]
    return [Span(start, stop) for start, stop in pairwise(bounds)]


def slices_of(
    batch: GlobalBatch, rank: int, world_size: int, size: int, *, never_one: bool = False
) -> Iterator[MicroBatch]:
    """Returns `rank`'s slices of `size` samples; the last one of a batch may be shorter.

    Every rank has the same number. A rank with fewer slices than others computes the batch's first
    slice in place of the missing one, at weight 0.

    Args:
        batch: The global batch.
        rank: The rank whose slices are returned.
        world_size: Number of ranks.
        size: Number of samples of a slice.
        never_one: No slice has one sample, as for `cut`.
    """
    slices = cut(batch, size, never_one=never_one)
    return _parts(slices.__getitem__, _runs(len(slices), world_size), rank)


def slices_of_groups(
    batch: GlobalBatch,
    samples_G: Sequence[int],
    rank: int,
    world_size: int,
    size: int,
    *,
    never_one: bool = False,
) -> Iterator[MicroBatch]:
    """Returns `rank`'s slices of a batch whose samples come from groups of readers.

    Each group is cut by itself into slices of `size` samples, of which the last may be shorter. A
    group without samples is one slice of weight 0, so that rank 0, which has the first group,
    always has the first slice. The positions are places in the order of groups, which no world
    changes. The rest is as for `slices_of`.

    Args:
        batch: The global batch.
        samples_G: Number of the batch's samples of each group.
        rank: The rank whose slices are returned.
        world_size: Number of ranks.
        size: Number of samples of a slice.
        never_one: No slice has one sample, as for `cut`, unless a group has one only.
    """
    slices: list[Span] = []
    firsts, start = [0], batch.start
    for samples in samples_G:
        stop = start + samples
        group = Span(start, stop)
        slices += cut(group, size, never_one=never_one) or [group]
        firsts.append(len(slices))
        start = stop
    groups = _runs(len(samples_G), world_size)
    runs = tuple(Span(firsts[run.start], firsts[run.stop]) for run in groups)
    return _parts(slices.__getitem__, runs, rank)


def _parts(
    positions_of: Callable[[int], Span], runs: tuple[Span, ...], rank: int
) -> Iterator[MicroBatch]:
    """Yields a rank's slices, and fillers in place of missing ones.

    Args:
        positions_of: Returns the positions of a slice by its number.
        runs: The slices of each rank.
        rank: The rank.
    """
    run, places = runs[rank], max(map(len, runs))
    for place in range(places):
        index = run.start + place
        filler = index >= run.stop
        positions = positions_of(0 if filler else index)
        yield MicroBatch(
            positions=positions,
            weight=0 if filler else len(positions),
            last=place == places - 1,
            slice=None if filler else index,
            runs=runs,
        )


def slice_seed(seed: int, dataset: int, epoch: int, start: int, use: Use) -> int:
    """Returns the seed, of 64 bits, of what is drawn for a slice.

    Args:
        seed: The loop's seed; any integer will do.
        dataset: The number of the loop's dataset object.
        epoch: The epoch.
        start: The position of the slice's first sample in the epoch.
        use: What is drawn.
    """
    value = mix64(seed + 0x632BE59BD9B4E019)
    for number in (dataset, epoch, start, _USES.index(use)):
        value = mix64(value + mix64(number + 0x9E3779B97F4A7C15))
    return value
