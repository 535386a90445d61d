"""Lays parameters end to end in flat buckets that are cut into one equal chunk for each rank.

Shapes: E elements of a bucket with its padding, C elements of one chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from elasticzero.memory_estimate import FLAT_BUCKET_BYTES
from elasticzero.parallel.optimizers import Schema, working_dtype
from elasticzero.parallel.partitioned import ParameterPiece, PartitionedGroup
from elasticzero.spans import Span, intersect

BUCKET_BYTES = FLAT_BUCKET_BYTES


@dataclass(slots=True, eq=False)
class FlatBucket:
    """Parameters laid end to end; from here on they are views of `flat_E`."""

    names: list[str]
    parameters: list[nn.Parameter]
    rank: int
    """This rank's place in its row of the mesh."""
    world_size: int
    """Number of ranks in a row."""
    flat_E: Tensor = field(init=False)
    shapes: list[tuple[int, ...]] = field(init=False)
    """Holds the parameters' shapes, since a parameter that is being gathered waits when asked."""
    offsets: list[int] = field(default_factory=list)
    """The first element of each parameter."""
    numel: int = field(init=False)
    """The elements without padding."""
    master_C: Tensor | None = None
    """This rank's 32-bit copy of its chunk, where the parameters have 16 bits."""

    def __post_init__(self) -> None:
        first, total = self.parameters[0], 0
        self.shapes = [tuple(parameter.shape) for parameter in self.parameters]
        for parameter in self.parameters:
            self.offsets.append(total)
            total += parameter.numel()
        self.numel = total
        chunk = -(-total // self.world_size)
        self.flat_E = first.data.new_zeros(chunk * self.world_size)
        for parameter, view in zip(self.parameters, self.views(self.flat_E), strict=True):
            view.copy_(parameter.data)
            parameter.data = view
        if working_dtype(first.dtype) != first.dtype:
            self.master_C = self.mine(self.flat_E).to(working_dtype(first.dtype))

    @property
    def chunk(self) -> int:
        """Counts the elements of one rank's chunk."""
        return self.flat_E.numel() // self.world_size

    def views(self, flat_E: Tensor) -> list[Tensor]:
        """Returns the parameters' places in `flat_E`, in their shapes."""
        return [
            flat_E[offset : offset + math.prod(shape)].view(shape)
            for offset, shape in zip(self.offsets, self.shapes, strict=True)
        ]

    def part(self, flat_E: Tensor, rank: int) -> Tensor:
        """Returns the chunk of one rank."""
        return flat_E[rank * self.chunk : (rank + 1) * self.chunk]

    def mine(self, flat_E: Tensor) -> Tensor:
        """Returns this rank's chunk."""
        return self.part(flat_E, self.rank)

    def pieces(self) -> Iterator[ParameterPiece]:
        """Yields this rank's pieces, which share memory with its chunk or its masters."""
        yield from self.pieces_of(self.rank, self.mine(self.flat_E), self.master_C)

    def pieces_of(
        self, rank: int, own_C: Tensor, master_C: Tensor | None
    ) -> Iterator[ParameterPiece]:
        """Yields the pieces of one rank, which share memory with its chunk or its masters."""
        mine = Span(rank * self.chunk, (rank + 1) * self.chunk)
        for name, shape, offset in zip(self.names, self.shapes, self.offsets, strict=True):
            part = intersect(mine, Span(offset, offset + math.prod(shape)))
            if part:
                inside = slice(part.start - mine.start, part.stop - mine.start)
                yield ParameterPiece(
                    name,
                    part.start - offset,
                    nn.Parameter((own_C if master_C is None else master_C)[inside]),
                    shape,
                    values=None if master_C is None else own_C[inside],
                )

    def place(self, piece: ParameterPiece, rank: int) -> int:
        """Returns where a piece of one rank begins in that rank's chunk."""
        return self.offsets[self.names.index(piece.name)] + piece.start - rank * self.chunk

    def group(self) -> PartitionedGroup:
        """Returns how the optimizer's state of these parameters is dealt."""
        owners = tuple(offset // self.chunk for offset in self.offsets)
        return PartitionedGroup(rule="even", names=tuple(self.names), owners=owners)


def deal(
    parameters: dict[str, nn.Parameter], schemas: Mapping[str, Schema]
) -> Iterator[Sequence[str]]:
    """Yields the names in each bucket, in the reverse order of `parameters`: a backward has the
    gradients of the last layers first.

    schemas: what the optimizer keeps for each parameter; a bucket's parameters have one dtype, one
    device and the same keys.
    """
    open_buckets: dict[Any, list[str]] = {}
    sizes: dict[Any, int] = {}
    for name in reversed(parameters):
        parameter = parameters[name]
        kind = (parameter.dtype, parameter.device, tuple(sorted(schemas[name])))
        size = parameter.numel() * parameter.element_size()
        if kind in open_buckets and sizes[kind] + size > BUCKET_BYTES:
            yield open_buckets.pop(kind)
        open_buckets.setdefault(kind, []).append(name)
        sizes[kind] = size + (sizes[kind] if len(open_buckets[kind]) > 1 else 0)
    yield from open_buckets.values()
