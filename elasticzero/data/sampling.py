"""Computes the order of samples, each rank's part of a global batch, micro-batches and weights.
Pure.

The order of an epoch is a keyed pseudo-random permutation that is computed at any position without
a table (a Feistel network with cycle walking: Black and Rogaway, "Ciphers with arbitrary finite
domains", 2002). It depends on the seed and the epoch only, never on the world, and takes no memory.
Shapes: N samples of the dataset, P positions asked for, R ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from elasticzero.data.changes import carried_over, epoch_is_over
from elasticzero.data.hashing import mix64
from elasticzero.data.position import (
    KEPT_DATASETS,
    DataPosition,
    GlobalBatch,
    LoopPlan,
    MicroBatch,
)
from elasticzero.data.slices import cut, slices_of
from elasticzero.errors import UserError
from elasticzero.options.settings import DataChange
from elasticzero.spans import Span

Positions = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int64]

ROUNDS = 8
MAX_SAMPLES = 1 << 62


def round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    """Returns the keys of the network's rounds; any integers will do as seed and epoch."""
    key = mix64(mix64(seed + 0x9E3779B97F4A7C15) ^ mix64(epoch + 0xD1B54A32D192ED03))
    return tuple(mix64(key + r * 0x9E3779B97F4A7C15) for r in range(1, ROUNDS + 1))


def permuted(positions_P: Positions, samples: int, seed: int, epoch: int) -> Indices:
    """Returns the samples at these positions of the epoch's order, a permutation of `[0,
    samples)`.

    Args:
        positions_P: Positions in the epoch's order, each in `[0, samples)`.
        samples: Number of samples of the dataset.
        seed: The seed of the order.
        epoch: The epoch, which has an order of its own.
    """
    half_bits = max(1, ((samples - 1).bit_length() + 1) // 2)
    keys = round_keys(seed, epoch)
    values_P = _feistel(positions_P, half_bits, keys)
    outside = np.flatnonzero(values_P >= samples)
    while len(outside):
        values_P[outside] = _feistel(values_P[outside], half_bits, keys)
        outside = outside[values_P[outside] >= samples]
    return values_P.astype(np.int64)


def _feistel(values_P: Positions, half_bits: int, keys: tuple[int, ...]) -> Positions:
    """Applies a permutation of `[0, 4 ** half_bits)` to each value.

    Args:
        values_P: The values.
        half_bits: Number of bits of each half of a value.
        keys: One key for each round.

    Returns:
        The permuted values, in the order of the given ones.
    """
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left_P, right_P = values_P >> shift, values_P & mask
    for key in keys:
        mixed_P = (right_P ^ np.uint64(key)) * np.uint64(0xBF58476D1CE4E5B9)
        mixed_P ^= mixed_P >> np.uint64(29)
        mixed_P *= np.uint64(0x94D049BB133111EB)
        mixed_P ^= mixed_P >> np.uint64(32)
        left_P, right_P = right_P, left_P ^ (mixed_P & mask)
    joined: Positions = (left_P << shift) | right_P
    return joined


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrder:
    """Maps the positions of every epoch to samples."""

    samples: int
    """Number of samples in the dataset."""
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.samples <= MAX_SAMPLES:
            raise UserError(
                f"the dataset has {self.samples} samples; between 1 and {MAX_SAMPLES} are needed"
            )

    @property
    def described(self) -> dict[str, Any]:
        """Returns what the order depends on, by name."""
        return {"samples": self.samples, "seed": self.seed, "shuffle": self.shuffle}

    @property
    def inputs(self) -> list[Any]:
        """Returns what the order depends on, as the position in the data has it."""
        return [*self.described.values()]

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """Returns the dataset indices at positions `[start, stop)` of an epoch.

        Args:
            epoch: The epoch.
            start: The first position.
            stop: The position after the last one.
        """
        return self.at(epoch, np.arange(start, stop, dtype=np.uint64))

    def at(self, epoch: int, positions_P: Positions) -> Indices:
        """Returns the dataset indices at any positions of an epoch."""
        if not self.shuffle:
            return positions_P.astype(np.int64)
        return permuted(positions_P, self.samples, self.seed, epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """Divides the epochs of a loop into global batches."""

    order: SampleOrder
    global_batch: int
    epochs: int | None = None
    steps: int | None = None
    drop_last: bool = False
    never_one: bool = False
    """No micro-batch has one sample, as far as that can be had: a BatchNorm needs two."""

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise UserError(f"global_batch is {self.global_batch}; it must be at least 1")
        if self.epochs is None and self.steps is None:
            raise UserError("session.batches needs epochs=… or steps=…, to know where to end")
        if self.drop_last and self.global_batch > self.order.samples:
            raise UserError(
                f"global_batch {self.global_batch} is larger than the dataset of "
                f"{self.order.samples} samples, and drop_last drops what is left: nothing to do"
            )

    @property
    def steps_in_epoch(self) -> int:
        """Returns the number of global batches of a whole epoch."""
        whole, rest = divmod(self.order.samples, self.global_batch)
        return whole + bool(rest and not self.drop_last)

    def steps_from(self, position: DataPosition) -> int:
        """Returns the number of global batches from `position` to the end of the loop."""
        limits = []
        if self.epochs is not None:
            at = self.wrapped(position)
            left = self.order.samples - at.offset
            in_first = (
                left // self.global_batch if self.drop_last else -(-left // self.global_batch)
            )
            epochs_left = at.first_epoch + self.epochs - at.epoch
            rest = self.steps_in_epoch * (epochs_left - 1)
            limits.append(in_first + rest if epochs_left > 0 else 0)
        if self.steps is not None:
            limits.append(max(0, self.steps - position.steps))
        return min(limits)

    def start(
        self,
        position: DataPosition,
        loop: int,
        dataset: int = 0,
        allowed: Collection[DataChange] = (),
    ) -> DataPosition:
        """Returns the position at which the loop begins, as `LoopPlan.start` describes."""
        return replace(loop_start(self, position, loop, dataset, allowed), stream=None)

    def ends_epoch(self, position: DataPosition) -> bool:
        """Returns whether no global batch of the position's epoch is left."""
        left = self.order.samples - position.offset
        return left <= 0 or (self.drop_last and left < self.global_batch)

    def wrapped(self, position: DataPosition) -> DataPosition:
        """Returns the same position, moved to the beginning of the next epoch if its epoch has
        ended."""
        if not self.ends_epoch(position):
            return position
        return replace(position, epoch=position.epoch + 1, offset=0)

    def share(self, batch: GlobalBatch, rank: int, world_size: int) -> tuple[Span, int]:
        """Returns the positions of `batch` that belong to `rank`, and the largest number of them
        that a rank has."""
        ranks = ranks_with_samples(len(batch), world_size) if self.never_one else world_size
        return share(batch, rank, ranks), -(-len(batch) // ranks)

    def slices(
        self, batch: GlobalBatch, rank: int, world_size: int, size: int
    ) -> Iterator[MicroBatch]:
        """Returns `rank`'s slices of `batch`, of `size` samples each."""
        return slices_of(batch, rank, world_size, size, never_one=self.never_one)

    def check_slices(self, size: int, world_size: int) -> None:
        """Does nothing: any samples can be cut into slices for any number of ranks."""

    def indices(self, batch: GlobalBatch) -> list[int]:
        """Returns the dataset indices of `batch`."""
        indices = self.order.indices(batch.epoch, batch.start, batch.stop)
        return [int(index) for index in indices]

    def next(self, position: DataPosition) -> tuple[GlobalBatch, DataPosition] | None:
        """Returns (the global batch at `position`, the position after it), or None at the end."""
        position = self.wrapped(position)
        epoch, offset = position.epoch, position.offset
        if self.epochs is not None and epoch >= position.first_epoch + self.epochs:
            return None
        if self.steps is not None and position.steps >= self.steps:
            return None
        stop = min(offset + self.global_batch, self.order.samples)
        batch = GlobalBatch(epoch=epoch, start=offset, stop=stop)
        return batch, replace(position, offset=stop, steps=position.steps + 1)


def loop_start(
    plan: LoopPlan,
    position: DataPosition,
    loop: int,
    dataset: int,
    allowed: Collection[DataChange],
) -> DataPosition:
    """Returns where a loop begins or goes on, as `LoopPlan.start` does.

    Args:
        plan: The loop's plan.
        position: Where training resumes.
        loop: Number of the loop in the script, from 0.
        dataset: Number of the loop's dataset object.
        allowed: Changes with which training may continue inside the loop.

    Raises:
        UserError: Training would continue inside a loop with a change that is not `allowed`.
    """
    if position.loop < loop:
        position = _next_loop(position, loop, dataset, plan.order.inputs)
    else:
        position = carried_over(plan, position, allowed)
    order, size = plan.order.inputs, plan.global_batch
    return replace(position, order=order, global_batch=size, dataset=dataset)


def _next_loop(position: DataPosition, loop: int, dataset: int, order: Any) -> DataPosition:
    """Returns where loop number `loop` begins, which follows those that `position` has passed.

    Args:
        position: Where training stands.
        loop: The loop's number.
        dataset: The number of its dataset object.
        order: The inputs of its order.
    """
    mark = position.mark(dataset)
    epoch, offset, stream = mark.epoch, mark.offset, mark.stream
    if offset and (mark.order != order or epoch_is_over(order, stream, offset)):
        epoch, offset, stream = epoch + 1, 0, None
    left = [m for m in position.others if m.dataset not in (dataset, position.dataset)]
    if position.dataset != dataset:
        left.append(position.mark(position.dataset))
    return DataPosition(
        loop=loop,
        epoch=epoch,
        offset=offset,
        stream=stream,
        dataset=dataset,
        first_epoch=epoch,
        first_world=position.first_world,
        others=tuple(left[-KEPT_DATASETS:]),
        stopped=position.stopped,
        micro_batch=position.micro_batch,
        skipped=position.skipped,
        tagging=position.tagging,
    )


def ranks_with_samples(samples: int, world_size: int) -> int:
    """Returns the number of ranks, the first ones, that have a global batch among them where none
    is to have one sample: two each at least, where there are two."""
    return min(world_size, max(1, samples // 2))


def share(batch: GlobalBatch, rank: int, world_size: int) -> Span:
    """Returns the positions of `batch` that belong to `rank`; shares differ by at most one
    sample.

    Args:
        batch: The global batch.
        rank: The rank; one past the last has none.
        world_size: Number of ranks that have samples.
    """
    size = len(batch)
    if rank >= world_size:
        return Span(batch.stop, batch.stop)
    return Span(
        batch.start + rank * size // world_size, batch.start + (rank + 1) * size // world_size
    )


def micro_batches(
    batch: GlobalBatch, part: Span, largest: int, size: int | None, *, never_one: bool = False
) -> Iterator[MicroBatch]:
    """Yields a rank's micro-batches of a global batch.

    Every rank has the same number. A rank with fewer samples than the others fills up with the
    batch's first sample, or its first two, at weight 0.

    Args:
        batch: The global batch.
        part: The rank's part of it.
        largest: The largest number of samples that a rank has of it.
        size: The most samples of a micro-batch; None: all are one.
        never_one: None has one sample, as for `cut`.
    """
    size = size or largest
    count = len(cut(Span(0, largest), size, never_one=never_one))
    parts = cut(part, size, never_one=never_one)
    filler = Span(batch.start, min(batch.start + 1 + never_one, batch.stop))
    for index in range(count):
        positions = parts[index] if index < len(parts) else filler
        weight = len(positions) if index < len(parts) else 0
        yield MicroBatch(positions=positions, weight=weight, last=index == count - 1)


def share_of(batches: int, rank: int, world_size: int) -> Iterator[tuple[int, bool]]:
    """Distributes an evaluation's batches round-robin; yields (index, whether it counts).

    Every rank has the same number. A rank without a batch in the last round computes batch 0 again,
    which does not count.

    Args:
        batches: Number of batches of the evaluation.
        rank: The rank whose batches are yielded.
        world_size: Number of ranks.
    """
    for first in range(0, batches, world_size):
        index = first + rank
        yield (index, True) if index < batches else (0, False)
