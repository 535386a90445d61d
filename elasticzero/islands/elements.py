"""Finds the elements of a model that a rank of an island has, and those that it writes. Pure.

A rank has a parameter whole, or rows of it, and may step a 32-bit copy of some of its elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from elasticzero.parallel.optimizers.state import MASTER
from elasticzero.spans import Span
from elasticzero.state.model import MODEL, OPTIMIZER, LocalTensor, RankState


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """Holds the elements of parameters and buffers that a rank has, by the tensor's name."""

    held: Mapping[str, Sequence[LocalTensor]]
    """All of them: those of the model, and those of 32-bit copies."""
    written: Mapping[str, Sequence[LocalTensor]]
    """Elements that no other rank of the island writes. Where the rank has a 32-bit copy they are
    that copy's."""


def elements_of(
    state: RankState, buffers: Mapping[str, Tensor], world_size: int, rank: int
) -> Elements:
    """Returns the elements that a rank has.

    Args:
        state: The state of its strategy, whose tensors share memory with the model's.
        buffers: The buffers that are averaged, by name, which all ranks have whole.
        world_size: Number of ranks of the island.
        rank: This rank.
    """
    state.add_even({MODEL + name: buffer for name, buffer in buffers.items()})
    spans = state.written(world_size, rank)
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


def _part(local: LocalTensor | None, span: Span | None) -> Iterator[LocalTensor]:
    if local is not None and span:
        flat = local.tensor.view(-1)[span.start - local.start : span.stop - local.start]
        yield LocalTensor(flat, span.start)
