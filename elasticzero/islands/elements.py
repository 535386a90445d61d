"""Finds the elements of a model that a rank of an island has, and those that it writes. Pure.

A rank has a parameter whole, or rows of it, and may step a 32-bit copy of some of its elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from elasticzero.errors import UserError
from elasticzero.parallel.optimizers.state import MASTER
from elasticzero.spans import Span
from elasticzero.state.model import MODEL, OPTIMIZER, LocalTensor, RankState


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """Holds the elements of parameters and buffers that a rank has, by the tensor's name."""

    held: Mapping[str, Sequence[LocalTensor]]
    """All of them: those of the model, and those of 32-bit copies."""
    written: Mapping[str, Sequence[LocalTensor]]
    """Elements that no other rank of the node writes. Where the rank has a 32-bit copy they are
    that copy's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Says which rank of an island this is."""

    world_size: int
    """Number of ranks of the island."""
    rank: int
    nodes: int
    """Number of nodes of the island."""
    local_world_size: int
    """Number of ranks of this node."""
    local_rank: int


def elements_of(state: RankState, buffers: Mapping[str, Tensor], place: RankPlace) -> Elements:
    """Returns the elements that a rank has.

    Each node writes all elements. Where the island has one node, each rank writes what the strategy
    gives to it; of several, each rank must have all that it may have to write, and writes a part.

    Args:
        state: The state of its strategy, whose tensors share memory with the model's.
        buffers: The buffers that are averaged, by name, which all ranks have whole.
        place: Which rank this is.

    Raises:
        UserError: The island has several nodes, and this rank has not all of a parameter.
    """
    state.add_even({MODEL + name: buffer for name, buffer in buffers.items()})
    if place.nodes == 1:
        spans = state.written(place.world_size, place.rank)
    else:
        spans = _written_on_node(state, place)
    held: dict[str, list[LocalTensor]] = {}
    written: dict[str, list[LocalTensor]] = {}
    for full in state.specs:
        if not full.startswith(MODEL):
            continue
        name = full.removeprefix(MODEL)
        master = f"{OPTIMIZER}{name}/{MASTER}"
        held[name] = [state.held[key] for key in (full, master) if key in state.held]
        source = master if master in state.specs else full
        written[name] = [*_part(state.held.get(source), spans.get(source))]
    return Elements(held=held, written=written)


def _written_on_node(state: RankState, place: RankPlace) -> dict[str, Span]:
    """Returns the elements of each tensor that a rank writes, where each rank has all of them."""
    spans = {}
    for name, spec in state.specs.items():
        if not (name.startswith(MODEL) or name.endswith(f"/{MASTER}")):
            continue
        local, elements = state.held.get(name), math.prod(spec.shape)
        if local is None or local.tensor.numel() != elements:
            raise UserError(
                f"{name} is divided among the ranks of the island, which has several nodes: there "
                "all ranks must have whole parameters, as with inner=ddp, or with zero1 and zero2 "
                "where they have 32 bits; take one of these (--diloco inner=…), or islands of one "
                "node"
            )
        spans[name] = Span(
            elements * place.local_rank // place.local_world_size,
            elements * (place.local_rank + 1) // place.local_world_size,
        )
    return spans


def _part(local: LocalTensor | None, span: Span | None) -> Iterator[LocalTensor]:
    if local is not None and span:
        flat = local.tensor.view(-1)[span.start - local.start : span.stop - local.start]
        yield LocalTensor(flat, span.start)
