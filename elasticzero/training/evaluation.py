"""Evaluates a model on a dataset, with a result that does not depend on the world."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from elasticzero.comm.barriers import Call
from elasticzero.comm.process_group import ProcessGroups
from elasticzero.data.datasets import as_stream, length_of, parts_of
from elasticzero.data.loader import BatchReader, to_device
from elasticzero.data.sampling import share_of
from elasticzero.data.seeding import SeededRequest, seed_generators
from elasticzero.data.slices import slice_seed
from elasticzero.data.streams.dealing import readers_of
from elasticzero.data.streams.reader import any_sample, batches_of_readers
from elasticzero.data.streams.source import Stream, stream_order
from elasticzero.errors import UserError
from elasticzero.state.auxiliary import AuxiliaryState
from elasticzero.state.rng import preserve_rng

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
    each is computed by one rank, and the sums are made in their order in float64. All ranks call
    this together.

    Args:
        reader: Reads the dataset, which may be a stream or a loader.
        fn: Returns a batch's mean: one number, or several by name.
        batch_size: Number of samples of a batch; a loader's own counts in its place.
        groups: The process groups; None for one process alone.
        check: Raises when the generation has ended.

    Raises:
        UserError: There is no sample, `batch_size` is below 1, or `fn` returns no number.
    """
    rank, world_size = (
        (0, 1) if groups is None else (groups.rank_info.rank, groups.rank_info.world_size)
    )
    if isinstance(reader.dataset, DataLoader):
        parts = parts_of(reader.dataset)
        collate_fn = reader.collate_fn or parts.collate_fn
        reader = replace(reader, dataset=parts.dataset, collate_fn=collate_fn)
        batch_size = parts.batch_size
    stream = as_stream(reader.dataset)
    if stream is not None:
        return _evaluate_stream(stream, reader, fn, batch_size, groups, check)
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
    for (index, counts), span, batch in zip(share, spans, batches, strict=True):
        check()
        seed_generators(slice_seed(0, 0, 0, span[0], "compute"))
        names, means = _means(fn, batch, names)
        if table is None:
            table = torch.zeros(count, len(names), dtype=torch.float64)
        if counts:
            table[index] = means
    assert table is not None and names is not None
    if groups is not None:
        table = groups.sum(
            table
        )  # every entry comes from the rank that has it; the others give zero
    sizes = [min((i + 1) * batch_size, samples) - i * batch_size for i in range(count)]
    return _result(
        {
            name: math.fsum(v * n for v, n in zip(table[:, k].tolist(), sizes, strict=True))
            / samples
            for k, name in enumerate(names)
        }
    )


def _evaluate_stream(
    stream: Stream,
    reader: BatchReader,
    fn: EvaluationFn,
    batch_size: int,
    groups: ProcessGroups | None,
    check: Callable[[], None],
) -> Result:
    """Returns what `evaluate` does, for a stream that has an end.

    A batch has samples of one reader; each reader is read by one rank, and its sums are made there
    in their order. All ranks compute equally many batches: one without a batch computes its last
    one again, or any sample, which does not count.

    Args:
        stream: The stream.
        reader: Makes batches of its samples, on a device.
        fn: Returns a batch's mean: one number, or several by name.
        batch_size: The most samples of a batch.
        groups: The process groups; None for one process alone.
        check: Raises when the generation has ended.
    """
    rank, world_size = (
        (0, 1) if groups is None else (groups.rank_info.rank, groups.rank_info.world_size)
    )
    order = stream_order(stream, seed=0, shuffle=False)
    sums = torch.zeros(order.readers, 1, dtype=torch.float64)
    names: list[str] | None = None
    batches = batches_of_readers(
        stream, order, readers_of(rank, world_size, order.readers), batch_size
    )
    last = [any_sample(stream, order)]
    while True:
        numbered = next(batches, None)
        if groups is not None:
            ranks_read = groups.barrier(Call.EVALUATE, int(numbered is not None))
        else:
            ranks_read = int(numbered is not None)
        if not ranks_read:
            break
        check()
        number, samples = numbered if numbered is not None else (rank, last)
        last = samples
        seed_generators(slice_seed(0, 0, number, int(sums[number % order.readers, 0]), "compute"))
        batch = to_device((reader.collate_fn or default_collate)(samples), reader.device)
        names, means = _means(fn, batch, names)
        if sums.shape[1] == 1:
            sums = torch.cat([sums, torch.zeros(order.readers, len(names)).double()], 1)
        if numbered is not None:
            sums[number, 0] += len(samples)
            sums[number, 1:] += means * len(samples)
    if groups is not None:
        sums = groups.sum(sums)
    count = math.fsum(sums[:, 0].tolist())
    assert names is not None
    return _result(
        {name: math.fsum(sums[:, k + 1].tolist()) / count for k, name in enumerate(names)}
    )


def _means(fn: EvaluationFn, batch: Any, names: list[str] | None) -> tuple[list[str], Tensor]:
    """Computes one batch.

    Args:
        fn: Returns the batch's mean: one number, or several by name.
        batch: The batch.
        names: The names for the batch before; None: this is the first one.

    Returns:
        The sorted names, where a number without a name has an empty one, and their values in
        float64.

    Raises:
        UserError: `fn` gave other names than before, or no number.
    """
    value = fn(batch)
    values = dict(value) if isinstance(value, Mapping) else {"": value}
    keys = sorted(values)
    if names is not None and keys != names:
        raise UserError(f"session.evaluate: fn gave {keys} after {names}")
    return keys, torch.tensor([_number(values[name]) for name in keys], dtype=torch.float64)


def _result(means: dict[str, float]) -> Result:
    return means[""] if list(means) == [""] else means


def _number(value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise UserError(
            f"session.evaluate: fn gave a tensor of shape {tuple(value.shape)}; it must give the "
            "batch's mean, one number or a dict of them"
        )
    return float(value)


@contextmanager
def evaluating(
    model: nn.Module, auxiliary: AuxiliaryState, share_buffers: Callable[[], None]
) -> Iterator[None]:
    """Runs the block in eval mode, without gradients and with rank 0's buffers; restores all three.

    Args:
        model: The model.
        auxiliary: The small state, of which the buffers are replaced meanwhile.
        share_buffers: Gives all ranks rank 0's buffers.
    """
    modes = {module: module.training for module in model.modules()}
    own_buffers = auxiliary.buffers.copy()
    with ExitStack() as stack:
        stack.enter_context(preserve_rng(auxiliary.device))
        stack.enter_context(torch.no_grad())
        try:
            model.eval()
            share_buffers()
            yield
        finally:
            put_back_modes(modes)
            auxiliary.buffers.put(own_buffers)


def put_back_modes(modes: Mapping[nn.Module, bool]) -> None:
    """Gives modules their modes of before, by their own `train` where they have one.

    Such a `train` may change weights, as one that merges adapters in eval mode does.

    Args:
        modes: Whether each module was in training mode, parents before their children.
    """
    for module, training in modes.items():
        if type(module).train is not nn.Module.train:
            module.train(training)
    for module, training in modes.items():
        module.training = training
