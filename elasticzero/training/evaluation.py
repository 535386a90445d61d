"""Evaluates a model on a dataset, with a result that does not depend on the world."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from elasticzero.comm.process_group import ProcessGroups
from elasticzero.data.loader import BatchReader
from elasticzero.data.sampling import share_of
from elasticzero.data.seeding import SeededRequest, seed_generators
from elasticzero.data.slices import slice_seed
from elasticzero.errors import UserError
from elasticzero.state.auxiliary import AuxiliaryState
from elasticzero.state.rng import preserve_rng
from elasticzero.training.argument_checks import length_of

Result = float | dict[str, float]
EvaluationFn = Callable[[Any], Any]


def evaluate(
    reader: BatchReader,
    fn: EvaluationFn,
    batch_size: int,
    groups: ProcessGroups | None,
    check: Callable[[], None],
) -> Result:
    """Returns the mean over all samples of the means that `fn` returns for batches.

    Batches, and what is drawn at random for each, follow from the dataset and `batch_size` alone;
    each is computed by one rank, and the sums are made in their order in float64. groups: None for
    one process alone. check: raises when the generation has ended.
    """
    rank, world_size = (
        (0, 1) if groups is None else (groups.rank_info.rank, groups.rank_info.world_size)
    )
    samples = length_of(reader.dataset)
    if samples < 1 or batch_size < 1:
        raise UserError(f"session.evaluate: {samples} samples in batches of {batch_size}")
    count = -(-samples // batch_size)
    share = list(share_of(count, rank, world_size))
    spans = [(i * batch_size, min((i + 1) * batch_size, samples)) for i, _ in share]
    batches = replace(reader, seeded=True).batches(
        SeededRequest(slice_seed(0, 0, 0, span[0], "read"), list(range(*span))) for span in spans
    )
    names: list[str] | None = None
    table: Tensor | None = None
    scalar = False
    for (index, counts), span, batch in zip(share, spans, batches, strict=True):
        check()
        seed_generators(slice_seed(0, 0, 0, span[0], "compute"))
        value = fn(batch)
        scalar = not isinstance(value, Mapping)
        values = {"": value} if scalar else dict(value)
        if table is None or names is None:
            names = sorted(values)
            table = torch.zeros(count, len(names), dtype=torch.float64)
        elif sorted(values) != names:
            raise UserError(f"session.evaluate: fn gave {sorted(values)} after {names}")
        if counts:
            table[index] = torch.tensor([_number(values[name]) for name in names]).double()
    assert table is not None and names is not None
    if groups is not None:
        table = groups.sum(
            table
        )  # every entry comes from the rank that has it; the others give zero
    sizes = [min((i + 1) * batch_size, samples) - i * batch_size for i in range(count)]
    means = {
        name: math.fsum(v * n for v, n in zip(table[:, k].tolist(), sizes, strict=True)) / samples
        for k, name in enumerate(names)
    }
    return means[""] if scalar else means


def _number(value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise UserError(
            f"session.evaluate: fn gave a tensor of shape {tuple(value.shape)}; it must give the "
            "batch's mean, one number or a dict of them"
        )
    return float(value)


@contextmanager
def evaluating(
    model: nn.Module, auxiliary: AuxiliaryState, groups: ProcessGroups | None
) -> Iterator[None]:
    """Runs the block in eval mode, without gradients and with rank 0's buffers; restores all
    three."""
    modes = {module: module.training for module in model.modules()}
    buffers = auxiliary.buffers
    own = {name: buffer.clone() for name, buffer in buffers.items()}
    with ExitStack() as stack:
        stack.enter_context(preserve_rng(auxiliary.device))
        stack.enter_context(torch.no_grad())
        try:
            model.eval()
            if groups is not None:
                groups.broadcast(buffers)
            yield
        finally:
            for module, training in modes.items():
                module.training = training
            for name, buffer in buffers.items():
                buffer.copy_(own[name])
