"""Says how FSDP2 divides parameters by rows, and brings a rank those that it has in another world.

A rank has memory for as many rows of a parameter as the first one has: FSDP2 gathers as many of
each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from elasticzero.parallel.optimizers.moves import Division, PieceState, Place, bring, plan
from elasticzero.parallel.optimizers.piece_entries import KeptEntry
from elasticzero.spans import Span, chunk, fsdp_rows
from elasticzero.state.model import Spec

VALUES = "values"
"""The key under which messages have the elements of parameters."""


def division(specs: Mapping[str, Spec], ranks: int) -> Division:
    """Returns how ranks divide parameters, of which each has a dimension and an element.

    Args:
        specs: Shape and dtype of each parameter.
        ranks: Number of ranks.
    """
    bounds: dict[tuple[int, ...], list[int]] = {}
    for spec in specs.values():
        if spec.shape not in bounds:
            rows = spec.shape[0]
            firsts = [chunk(rows, ranks, rank).start for rank in range(ranks + 1)]
            bounds[spec.shape] = [first * (spec.numel // rows) for first in firsts]
    return Division({n: Place(0, spec.numel, bounds[spec.shape]) for n, spec in specs.items()})


def room(specs: Mapping[str, Spec], ranks: int, held: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Returns memory for the rows that a rank has of parameters, by name, each flat.

    Args:
        specs: As for `division`.
        ranks: Number of ranks.
        held: Returns the elements of a parameter that a rank has now, beside which they will lie.
    """
    sizes = {name: len(fsdp_rows(spec.shape, ranks, 0)) for name, spec in specs.items()}
    rows: dict[str, Tensor] = {}
    for name, spec in specs.items():
        beside = held(name)
        rows[name] = torch.zeros(
            sizes[name],
            dtype=spec.dtype,
            device=beside.device,
            pin_memory=not beside.is_cuda and beside.is_pinned(),
        )
    return rows


def bring_rows(
    specs: Mapping[str, Spec],
    held: Callable[[str], Tensor],
    ranks: Sequence[int | None],
    group: dist.ProcessGroup,
) -> dict[str, Tensor]:
    """Returns this rank's rows in the next world, as `room` has them; nothing where it leaves. All
    ranks call this together.

    Args:
        specs: As for `division`.
        held: Returns the elements that this rank has of a parameter.
        ranks: As for `moves.plan`.
        group: The group of all ranks.
    """
    rank = group.rank()
    present, following = division(specs, group.size()), division(specs, len(ranks))
    entries = {n: {VALUES: KeptEntry(spec=spec, elementwise=True)} for n, spec in specs.items()}

    def state(name: str, span: Span, elements: Tensor) -> PieceState:
        values = elements.reshape(-1)[: len(span)]
        return PieceState(start=span.start, tensors={VALUES: values}, entries=entries[name])

    rows: dict[str, Tensor] = {}
    spans: dict[str, Span] = {}
    if rank in ranks:
        rows, spans = room(specs, len(ranks), held), following.spans(ranks.index(rank))
    bring(
        plan(rank, present, following, ranks),
        rank,
        lambda name: state(name, present.span(rank, name), held(name)),
        {name: state(name, span, rows[name]) for name, span in spans.items()},
        group,
    )
    return rows
