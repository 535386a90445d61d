"""Lays parameters end to end in flat buckets that are cut into one chunk for each rank.

Chunks are equal where an optimizer works on elements. Where it needs whole parameters, a rank's
chunk is those that are dealt to it.

Rules:
 LB1  A parameter is a view of its bucket, unless a tensor of the script's shares the memory that it
      had before: a list of `p.data` from before `prepare`, a vector for `vector_to_parameters`.
      Such a parameter stays outside, and its values are copied in before each step, and out after.
 LB2  A parameter that the script has given other memory is taken in again, its values first. Where
      the script has tensors of the bucket's memory, the bucket leaves it to them first: they keep
      its values, and the parameters that still lie there are outside.

Shapes: E elements of a bucket with its padding, C elements of one chunk.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from elasticzero.memory_estimate import FLAT_BUCKET_BYTES
from elasticzero.options.wire import EXACT, Wire
from elasticzero.parallel.optimizers.groups import OptimizerGroup
from elasticzero.parallel.optimizers.moves import Place
from elasticzero.parallel.optimizers.pieces import ParameterPiece, PartitionedGroup
from elasticzero.parallel.optimizers.state import working_dtype
from elasticzero.parallel.parameter_changes import lie_at, memory_of, moved
from elasticzero.parallel.wire.codecs import encoding_of
from elasticzero.spans import Span, intersect
from elasticzero.torch_internals.tensors import sharing_tensors

BUCKET_BYTES = FLAT_BUCKET_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class DealtNames:
    """Names the parameters of one bucket, in their order in it."""

    names: list[str]
    owners: list[int] | None = None
    """The rank that has each, in ascending order; None: chunks are equal."""

    def bounds(self, numels: Sequence[int], world_size: int) -> list[int]:
        """Returns the first element of each rank's chunk, and the end of the last one's.

        Args:
            numels: Number of elements of each parameter.
            world_size: Number of ranks in a row.
        """
        ranks = range(world_size + 1)
        if self.owners is None:
            chunk = -(-sum(numels) // world_size)
            return [chunk * rank for rank in ranks]
        sizes = [0] * world_size
        for owner, numel in zip(self.owners, numels, strict=True):
            sizes[owner] += numel
        return [sum(sizes[:rank]) for rank in ranks]

    def places(self, numels: Sequence[int], world_size: int) -> dict[str, Place]:
        """Returns where each parameter lies among the chunks.

        Args:
            numels: Number of elements of each parameter.
            world_size: Number of ranks in a row.
        """
        bounds, starts = self.bounds(numels, world_size), accumulate(numels, initial=0)
        parameters = zip(self.names, starts, numels, strict=False)
        return {name: Place(start, numel, bounds) for name, start, numel in parameters}


@dataclass(slots=True, eq=False)
class FlatBucket:
    """Parameters laid end to end; from here on they are views of `flat_E`, or outside (LB1)."""

    contents: DealtNames
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
    bounds: list[int] = field(init=False)
    """The first element of each rank's chunk, and the end of the last one's."""
    master_C: Tensor | None = None
    """This rank's 32-bit copy of its chunk, where the parameters have 16 bits."""
    shared: Collection[int] = ()
    """Addresses of memory that the script has other tensors of."""
    own_C: Tensor = field(init=False)
    """This rank's chunk."""
    places: list[Tensor] = field(init=False)
    """The parameters' places in `flat_E`."""
    _views: list[Tensor] = field(init=False)
    """All lasting tensors that share the memory of `flat_E`, but for parameters."""
    outside: list[int] = field(init=False)
    """The parameters that have memory of their own, by their index."""

    def __post_init__(self) -> None:
        first, total = self.parameters[0], 0
        self.shapes = [tuple(parameter.shape) for parameter in self.parameters]
        for parameter in self.parameters:
            self.offsets.append(total)
            total += parameter.numel()
        self.numel = total
        numels = [math.prod(shape) for shape in self.shapes]
        self.bounds = self.contents.bounds(numels, self.world_size)
        self.flat_E = first.data.new_empty(self.bounds[-1])
        self.flat_E[self.numel :].zero_()
        self.own_C = self.own_part(self.flat_E)
        self.places = self.views(self.flat_E)
        self._views = [self.flat_E, self.own_C, *self.places]
        values = {i: parameter.data for i, parameter in enumerate(self.parameters)}
        self.take_in(values, self.shared, {memory_of(self.flat_E)})
        if working_dtype(first.dtype) != first.dtype:
            self.master_C = self.own_C.to(working_dtype(first.dtype))

    def take_in(
        self, values: Mapping[int, Tensor], shared: Collection[int], flats: Collection[int]
    ) -> None:
        """Copies the values of some parameters to their places, and makes the parameters views of
        these, unless the script has other tensors of the memory that they have now (LB1).

        Args:
            values: Values of the parameters that do not lie in their places, by index: none of them
                lies in a bucket.
            shared: Addresses of memory that the script has other tensors of.
            flats: Addresses of the memory of all buckets.
        """
        self.outside = []
        for index, value in values.items():
            parameter, place = self.parameters[index], self.places[index]
            memory = memory_of(parameter)
            place.copy_(value)
            if memory in shared and memory not in flats:
                self.outside.append(index)
            else:
                parameter.data = place

    def moved(self) -> list[int]:
        """Returns the parameters that do not lie in their places, by their index."""
        if lie_at(self.parameters, self.places):
            return []
        pairs = zip(self.parameters, self.places, strict=True)
        return [index for index, is_moved in enumerate(moved(pairs)) if is_moved]

    def has_readers(self, inside: int | None = None) -> bool:
        """Tells whether tensors of the script's share the memory of the bucket.

        Args:
            inside: Number of parameters that lie in it; None: none was moved.
        """
        if inside is None:
            inside = len(self.parameters) - len(self.outside)
        return sharing_tensors(self.flat_E) > len(self._views) + inside

    def leave_memory(self) -> None:
        """Takes other memory, with the same values; the old one is the script's, with the
        parameters that lie there (LB2)."""
        flat_E = self.flat_E.clone()
        for view in self._views:
            view.data = flat_E.as_strided(view.shape, view.stride(), view.storage_offset())
        self.outside = list(range(len(self.parameters)))

    def give_out(self) -> None:
        """Copies the values of their places to the parameters that are outside."""
        if self.outside:
            data = [self.parameters[index].data for index in self.outside]
            torch._foreach_copy_(data, [self.places[index] for index in self.outside])

    @property
    def names(self) -> list[str]:
        return self.contents.names

    @property
    def chunk(self) -> int:
        """Counts the elements of this rank's chunk."""
        return self.bounds[self.rank + 1] - self.bounds[self.rank]

    def views(self, flat_E: Tensor) -> list[Tensor]:
        """Returns the parameters' places in `flat_E`, in their shapes."""
        return [
            flat_E[offset : offset + math.prod(shape)].view(shape)
            for offset, shape in zip(self.offsets, self.shapes, strict=True)
        ]

    def chunks(self, flat_E: Tensor) -> list[Tensor]:
        """Returns the chunk of each rank."""
        return [flat_E[start:stop] for start, stop in pairwise(self.bounds)]

    def part(self, flat_E: Tensor, rank: int) -> Tensor:
        """Returns the chunk of one rank."""
        return flat_E[self.bounds[rank] : self.bounds[rank + 1]]

    def own_part(self, flat_E: Tensor) -> Tensor:
        """Returns this rank's chunk."""
        return self.part(flat_E, self.rank)

    def pieces(self) -> Iterator[ParameterPiece]:
        """Yields this rank's pieces, which share memory with its chunk or its masters."""
        for piece in self.pieces_of(self.rank, self.own_C, self.master_C):
            self._views.append(piece.parameter if piece.values is None else piece.values)
            yield piece

    def pieces_of(
        self, rank: int, own_C: Tensor, master_C: Tensor | None
    ) -> Iterator[ParameterPiece]:
        """Yields the pieces of one rank, which share memory with its chunk or its masters.

        Args:
            rank: The rank's place in its row.
            own_C: Its chunk.
            master_C: Its 32-bit copy of the chunk; None: it steps the chunk itself.
        """
        chunk = Span(self.bounds[rank], self.bounds[rank + 1])
        for name, shape, offset in zip(self.names, self.shapes, self.offsets, strict=True):
            part = intersect(chunk, Span(offset, offset + math.prod(shape)))
            if part:
                inside = slice(part.start - chunk.start, part.stop - chunk.start)
                seen = (len(part),) if self.contents.owners is None else shape
                elements = own_C[inside].view(seen)
                yield ParameterPiece(
                    name,
                    part.start - offset,
                    nn.Parameter(elements if master_C is None else master_C[inside].view(seen)),
                    shape,
                    values=None if master_C is None else elements,
                )

    def place(self, piece: ParameterPiece, rank: int) -> int:
        """Returns where a piece of one rank begins in that rank's chunk."""
        return self.offsets[self.names.index(piece.name)] + piece.start - self.bounds[rank]

    def group(self) -> PartitionedGroup:
        """Returns how the optimizer's state of these parameters is dealt."""
        if self.contents.owners is not None:
            owners = tuple(self.contents.owners)
            return PartitionedGroup(rule="whole", names=tuple(self.names), owners=owners)
        owners = tuple(offset // self.chunk for offset in self.offsets)
        return PartitionedGroup(rule="even", names=tuple(self.names), owners=owners)


def deal(
    parameters: dict[str, nn.Parameter],
    group_of: Mapping[str, OptimizerGroup],
    world_size: int,
    size_bytes: int | None = None,
    wire: Wire = EXACT,
) -> Iterator[DealtNames]:
    """Yields the names in each bucket, which is filled in the order of `parameters`.

    A bucket's parameters have one optimizer, dtype and device. Where chunks are equal, the
    optimizer keeps the same for all of them. Whole parameters go to the rank that has the fewest
    elements so far, the largest of a bucket first.

    Args:
        parameters: The parameters by name.
        group_of: The optimizer's group of each parameter, by name.
        world_size: Number of ranks in a row, to which whole parameters are dealt.
        size_bytes: A bucket takes no further parameter beyond it; None: `BUCKET_BYTES`.
        wire: The format of gradients between ranks; what is encoded is apart from what is not.
    """
    loads = [0] * world_size
    for names in _fill(parameters, group_of, size_bytes or BUCKET_BYTES, wire):
        if group_of[names[0]].nature.works_on == "elements":
            yield DealtNames(names=names)
            continue
        owner_of: dict[str, int] = {}
        for name in sorted(names, key=lambda name: -parameters[name].numel()):
            owner_of[name] = loads.index(min(loads))
            loads[owner_of[name]] += parameters[name].numel()
        names = sorted(names, key=owner_of.__getitem__)
        yield DealtNames(names=names, owners=[owner_of[name] for name in names])


def _fill(
    parameters: dict[str, nn.Parameter],
    group_of: Mapping[str, OptimizerGroup],
    size_bytes: int,
    wire: Wire,
) -> Iterator[list[str]]:
    open_buckets: dict[Any, list[str]] = {}
    sizes: dict[Any, int] = {}
    for name in parameters:
        parameter, group = parameters[name], group_of[name]
        kept = [(key, entry.kind) for key, entry in group.schema(name).items()]
        works_on = group.nature.works_on
        kind = (
            *(group.optimizer_name, works_on, parameter.dtype, parameter.device),
            tuple(sorted(kept)) if works_on == "elements" else (),
            encoding_of(wire, parameter) is not None,
        )
        size = parameter.numel() * parameter.element_size()
        if kind in open_buckets and sizes[kind] + size > size_bytes:
            yield open_buckets.pop(kind)
        open_buckets.setdefault(kind, []).append(name)
        sizes[kind] = size + (sizes[kind] if len(open_buckets[kind]) > 1 else 0)
    yield from open_buckets.values()
