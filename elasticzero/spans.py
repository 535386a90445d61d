"""Defines spans of a tensor's elements, and the named rules that partition tensors over the ranks.

A span is a half-open range of a tensor's elements, flattened in row-major order. A partition is a
rule and never a table: the span of any rank follows from the rule, the shapes and the world size.
So its description grows with tensors plus ranks, and not with their product.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
"""Names of the ways to distribute training state; `parallel` implements them."""

ShardOver = Literal["world", "node"]
"""Names the ranks among which a strategy divides state.

world: all ranks, of which each holds a shard of its own.
node: the ranks of one node; every node holds all shards.
"""

REDUNDANCIES = ("snapshot", "mirror")
"""Names of what a lost node's part of divided state is read from: the last snapshot that all nodes
held, or a copy that another node's worker keeps up to date in each step."""

Rule = Literal["even", "fsdp_rows", "whole"]
"""Names the rule that distributes a group of tensors over `world_size` ranks.

even: the tensors are laid end to end in the group's order and cut in `world_size` chunks of
ceil(total / world_size) elements; the last chunks may be short or empty.
fsdp_rows: each tensor's rows (its first dimension) are cut in chunks of ceil(rows / world_size),
as torch.chunk and FSDP2 do; a rank holds the elements of its rows.
whole: each tensor lies whole with the one rank that the group names for it.
"""


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Represents the elements `[start, stop)` of one flattened tensor."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"span [{self.start}, {self.stop}) is not a range")

    def __len__(self) -> int:
        return self.stop - self.start

    def __bool__(self) -> bool:
        return self.stop > self.start


EMPTY = Span(0, 0)


def intersect(a: Span, b: Span) -> Span:
    """Returns the elements in both; `EMPTY` if there are none."""
    start, stop = max(a.start, b.start), min(a.stop, b.stop)
    return Span(start, stop) if start < stop else EMPTY


def chunk(total: int, world_size: int, rank: int, replicas: int = 1) -> Span:
    """Returns rank `rank`'s part of `total` items, cut in chunks of ceil(total / world_size).

    Args:
        total: Number of items.
        world_size: Number of ranks.
        rank: The rank.
        replicas: Number of rows of world_size / replicas ranks each. The items are cut in one chunk
            for each place in a row, and each chunk is cut once more, among the ranks of all rows at
            that place.
    """
    if replicas > 1:
        row, place = divmod(rank, world_size // replicas)
        outer = chunk(total, world_size // replicas, place)
        inner = chunk(len(outer), replicas, row)
        return Span(outer.start + inner.start, outer.start + inner.stop)
    size = -(-total // world_size)
    return Span(min(rank * size, total), min((rank + 1) * size, total))


def chunks_within(
    total: int, world_size: int, replicas: int, within: Span
) -> Iterator[tuple[int, Span]]:
    """Yields (rank, its chunk) of every rank whose chunk of `total` items has one of `within`.

    Args:
        total: Number of items.
        world_size: Number of ranks.
        replicas: Number of rows of ranks, as of `chunk`.
        within: The items that are asked for; nothing is yielded where it is empty.
    """
    shards = world_size // replicas
    size = -(-total // shards)
    for place in range(within.start // size, (within.stop - 1) // size + 1) if within else ():
        for row in range(replicas):
            part = chunk(total, world_size, row * shards + place, replicas)
            if intersect(part, within):
                yield row * shards + place, part


def even(
    numels: Sequence[int], world_size: int, rank: int, replicas: int = 1
) -> Iterator[tuple[int, Span]]:
    """Applies the rule `even`, which cuts the tensors of a group, laid end to end, in one chunk a
    rank.

    Args:
        numels: Number of elements of each tensor.
        world_size: Number of ranks.
        rank: The rank.
        replicas: Number of rows of ranks, as of `chunk`.

    Returns:
        (index of the tensor in the group, its span) for each tensor of which `rank` holds elements.
    """
    part = chunk(sum(numels), world_size, rank, replicas)
    offset = 0
    for index, numel in enumerate(numels):
        held = intersect(part, Span(offset, offset + numel))
        if held:
            yield index, Span(held.start - offset, held.stop - offset)
        offset += numel
        if offset >= part.stop:
            return


def fsdp_rows(shape: Sequence[int], world_size: int, rank: int, replicas: int = 1) -> Span:
    """Applies the rule `fsdp_rows`, which cuts a tensor by its first dimension, to one tensor.

    Args:
        shape: The tensor's shape; one without dimensions lies with rank 0.
        world_size: Number of ranks.
        rank: The rank.
        replicas: Number of rows of ranks, as of `chunk`.

    Returns:
        The span of the tensor's elements that `rank` holds.
    """
    if not shape:
        return Span(0, 1) if rank == 0 else EMPTY
    rows = chunk(shape[0], world_size, rank, replicas)
    width = math.prod(shape[1:])
    return Span(rows.start * width, rows.stop * width) if rows and width else EMPTY


def dealt(
    rule: Rule,
    shapes: Sequence[Sequence[int]],
    owners: Sequence[int],
    world_size: int,
    rank: int,
    replicas: int = 1,
) -> dict[int, Span]:
    """Applies a rule to a group of tensors.

    Args:
        rule: The rule.
        shapes: Shape of each tensor.
        owners: The rank of each, under the rule `whole`.
        world_size: Number of ranks.
        rank: The rank.
        replicas: Number of rows of ranks, as of `chunk`.

    Returns:
        The span of each tensor of which `rank` holds elements, by its index in the group.
    """
    if rule == "even":
        return dict(even([math.prod(shape) for shape in shapes], world_size, rank, replicas))
    if rule == "fsdp_rows":
        rows = (fsdp_rows(shape, world_size, rank, replicas) for shape in shapes)
        return {index: span for index, span in enumerate(rows) if span}
    wholes = enumerate(zip(shapes, owners, strict=True))
    return {index: Span(0, math.prod(shape)) for index, (shape, r) in wholes if r == rank}


def covering(target: Span, held: Iterable[tuple[int, Span]]) -> list[tuple[int, Span]]:
    """Returns the parts of `target`, disjoint and in order, each with the first holder that has it.

    Args:
        target: The elements to cover.
        held: (holder, span) in order of preference.

    Raises:
        ValueError: No holder has an element; the error names the first such one.
    """
    parts: list[tuple[int, Span]] = []
    missing = [target] if target else []
    for holder, span in held:
        if not missing:
            break
        left: list[Span] = []
        for gap in missing:
            part = intersect(gap, span)
            if not part:
                left.append(gap)
                continue
            parts.append((holder, part))
            left += [s for s in (Span(gap.start, part.start), Span(part.stop, gap.stop)) if s]
        missing = left
    if missing:
        raise ValueError(f"nobody holds elements [{missing[0].start}, {missing[0].stop})")
    return sorted(parts, key=lambda part: part[1])
