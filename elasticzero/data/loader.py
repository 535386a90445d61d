"""Iterates over micro-batches: reads and collates the samples and moves them to the device."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from elasticzero.data.sampling import (
    BatchPlan,
    DataPosition,
    GlobalBatch,
    MicroBatch,
    micro_batches,
)
from elasticzero.data.seeding import SeededRequest, SeededSamples
from elasticzero.data.slices import slice_seed, slices_of
from elasticzero.data.streams.plan import StreamPlan
from elasticzero.errors import UserError
from elasticzero.processes import die_with_parent
from elasticzero.spans import Span
from elasticzero.step_clock import StepClock

Request = list[int] | SeededRequest
"""Names the samples of one batch: their indices in the dataset, and the seed if there is one."""

_AHEAD_SAMPLES, _AHEAD = 4096, 64
"""Number of samples whose indices are computed at once, and of micro-batches; one batch may exceed
it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReader:
    """Reads samples and makes batches of them on a device."""

    dataset: Any
    device: torch.device
    collate_fn: Callable[[list[Any]], Any] | None = None
    num_workers: int = 0
    seeded: bool = False
    """Batches are named by `SeededRequest` instead of lists of dataset indices."""

    def open(self, schedule: RankSchedule, position: DataPosition) -> OpenBatches:
        """Returns the micro-batches of a rank from a position on."""
        return IndexedBatches(self.batches(schedule.requests(position)))

    def batches(self, requests: Iterator[Request]) -> Iterator[Any]:
        """Yields one batch on the device for each request."""
        dataset: Any = SeededSamples(self.dataset) if self.seeded else self.dataset
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=_OneShotSampler(requests),
            collate_fn=self.collate_fn,
            num_workers=self.num_workers,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=die_with_training_process if self.num_workers else None,
            generator=torch.Generator().manual_seed(0),
        )
        for batch in loader:
            yield to_device(batch, self.device)


class OpenBatches(Protocol):
    """Yields the micro-batches of one rank."""

    def __next__(self) -> Any: ...

    def look_ahead(self, batch: GlobalBatch, after: DataPosition) -> None:
        """Makes sure that the batch after this one can be named; all ranks call this together.

        after: the position after `batch`.
        """

    def close(self) -> None:
        """Ends what loads data."""


class IndexedBatches:
    """Yields the micro-batches of samples that are named by an index."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def __next__(self) -> Any:
        return next(self._batches)

    def look_ahead(self, batch: GlobalBatch, after: DataPosition) -> None:
        """Does nothing: the epoch's order names all batches."""

    def close(self) -> None:
        """Does nothing: the processes end with the last reference to them."""


class _OneShotSampler:
    """Presents an iterator of requests as a batch sampler, which can be iterated once."""

    def __init__(self, requests: Iterator[Request]) -> None:
        self._requests = requests

    def __iter__(self) -> Iterator[Any]:
        return self._requests


def die_with_training_process(_: int) -> None:
    """Makes a data worker die with the training process.

    The worker has copies of the process's connections: if it outlived the process, the peers would
    not notice the process's death.
    """
    die_with_parent(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the training process handles Ctrl-C


def to_device(batch: Any, device: torch.device) -> Any:
    """Returns `batch` with every tensor inside on `device`."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Returns `value` with `function` applied to each tensor in its mappings and sequences."""
    return map_each(Tensor, function, value)


def map_each(kind: type, function: Callable[[Any], Any], value: Any) -> Any:
    """Returns `value` with `function` applied to each object of this kind in its mappings and
    sequences."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, Mapping):
        mapped = {key: map_each(kind, function, entry) for key, entry in value.items()}
        return mapped if type(value) is dict else _same_mapping_type(value, mapped)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_each(kind, function, entry) for entry in value))
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        items = [map_each(kind, function, entry) for entry in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value


def _same_mapping_type(batch: Mapping[Any, Any], moved: dict[Any, Any]) -> Any:
    """Returns the same kind of mapping if it can be made from a dict (transformers'
    BatchEncoding)."""
    try:
        return type(batch)(moved)  # type: ignore[call-arg]
    except TypeError:
        return moved


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSchedule:
    """Lists one rank's micro-batches of a loop from a position on."""

    plan: BatchPlan | StreamPlan
    rank: int
    world_size: int
    micro_batch: int | Literal["auto"] | None = None
    """Number of samples at once on one rank; None: all; auto: as many as memory suffices for."""
    micro_batch_limit: int | None = None
    """The most that memory has sufficed for, under `auto`; None: it was never short."""
    virtual_batch: int | None = None
    """Number of samples in a slice; None: what one rank computes at once depends on the world."""
    left_out: frozenset[GlobalBatch] = frozenset()
    """Global batches that are passed over, of which nothing is read."""

    def __post_init__(self) -> None:
        size, total = self.virtual_batch, self.plan.global_batch
        given = self.micro_batch
        if given not in (None, "auto") and not (isinstance(given, int) and given >= 1):
            raise UserError(f"micro_batch is {given}; it must be at least 1, or auto")
        if size is None and total < self.world_size:
            raise UserError(
                f"global_batch is {total}, smaller than the world of {self.world_size} "
                "ranks: raise it, or run on fewer"
            )
        if size is not None and self.micro_batch is not None:
            raise UserError(
                "session.batches was given both micro_batch= and virtual_batch=; a slice of "
                "virtual_batch samples is the micro-batch: leave out micro_batch="
            )
        if size is not None and isinstance(self.plan, StreamPlan):
            raise UserError(
                "session.batches was given a stream and virtual_batch=: the samples of a slice "
                "would lie on several ranks; leave it out, or give a dataset with an index"
            )
        if size is not None and (size < 1 or total % size):
            raise UserError(
                f"virtual_batch is {size}; global_batch, which is {total}, must be a multiple of it"
            )

    def steps(self, position: DataPosition) -> Iterator[tuple[GlobalBatch, DataPosition]]:
        """Yields each global batch and the position after it."""
        while (found := self.plan.next(position)) is not None:
            yield found
            position = found[1]

    def parts(self, batch: GlobalBatch) -> list[MicroBatch]:
        """Returns this rank's micro-batches of one global batch."""
        if self.virtual_batch is not None:
            return list(slices_of(batch, self.rank, self.world_size, self.virtual_batch))
        mine, largest = self.plan.share(batch, self.rank, self.world_size)
        return list(micro_batches(batch, mine, largest, self.most_samples))

    @property
    def most_samples(self) -> int | None:
        """Returns the most samples of a micro-batch; None: as many as the rank's part has."""
        return self.micro_batch_limit if self.micro_batch == "auto" else self.micro_batch

    def halved(self, part: MicroBatch) -> int | None:
        """Returns half of the samples of a micro-batch; None: its size is not automatic, or it
        cannot be halved."""
        if self.micro_batch != "auto" or len(part.positions) < 2:
            return None
        return len(part.positions) // 2

    def requests(self, position: DataPosition) -> Iterator[Request]:
        """Yields the samples of every micro-batch from `position` to the end."""
        assert isinstance(self.plan, BatchPlan)
        order = self.plan.order
        for epoch, batches in groupby(self.steps(replace(position)), lambda step: step[0].epoch):
            kept = (batch for batch, _ in batches if batch not in self.left_out)
            spans = (part.positions for batch in kept for part in self.parts(batch))
            for first in spans:
                ahead = min(_AHEAD, _AHEAD_SAMPLES // max(1, len(first)))
                some = [first, *islice(spans, max(0, ahead - 1))]
                each_P = [np.arange(span.start, span.stop, dtype=np.uint64) for span in some]
                indices_P = order.at(epoch, np.concatenate(each_P))
                ends = np.cumsum([len(positions_P) for positions_P in each_P])
                for span, part_P in zip(some, np.split(indices_P, ends[:-1]), strict=True):
                    yield self._request(position.dataset, epoch, span, part_P.tolist())

    def _request(self, dataset: int, epoch: int, positions: Span, indices: list[int]) -> Request:
        if self.virtual_batch is None:
            return indices
        seed = slice_seed(self.plan.order.seed, dataset, epoch, positions.start, "read")
        return SeededRequest(seed, indices)


class StepProgress:
    """Tracks the global batch and micro-batch that the script works on."""

    def __init__(self, plan: BatchPlan | StreamPlan | None = None, *, on_gpu: bool = False) -> None:
        self.plan = plan
        self.clock = StepClock(on_gpu=on_gpu)
        """Measures the rank's own time in the global batch."""
        self.batch: GlobalBatch | None = None
        self.part: MicroBatch | None = None
        self.backward = False
        self.stepped = False
        """True once `backward` and `step` were called for the micro-batch."""
        self.only: tuple[str, ...] | None = None
        """The optimizers that the newest backward was for; None: all."""
        self._parts = 0
        """Number of micro-batches of the global batch that the script has got."""
        self.weights: dict[int, float] | None = None
        """Sums of the script's weights for the global batch by slice, or all under 0; None: it gave
        none."""
        self._weighed = False
        """True once a micro-batch of the global batch has got a weight, of the script or by
        default."""
        self.began_s = 0.0
        self.data_wait_s = 0.0

    def begin(self, batch: GlobalBatch) -> None:
        """Records that a global batch begins."""
        self.batch, self.weights, self._weighed = batch, None, False
        self.only, self._parts = None, 0
        self.began_s, self.data_wait_s = time.monotonic(), 0.0
        self.clock.reset()

    def present(self, part: MicroBatch, waited_s: float) -> None:
        """Records that the script gets a micro-batch."""
        self.part, self.backward, self.stepped = part, False, False
        self._parts += 1
        self.data_wait_s += waited_s
        self.clock.start()

    def exclude_time_since(self, since_s: float) -> None:
        """Excludes the time since then from the time of the global batch's step."""
        self.began_s += time.monotonic() - max(since_s, self.began_s)
        self.clock.exclude_since(since_s)

    def add_weight(self, weight: float | None) -> None:
        """Records the script's weight for the micro-batch, or none.

        Raises `UserError` if a global batch has micro-batches with and without a weight.
        """
        if self._weighed and (weight is None) != (self.weights is None):
            raise UserError(
                "session.backward was given weight=… for some micro-batches of a global batch and "
                "not for others: give it for all of them"
            )
        self._weighed = True
        if weight is not None:
            index = 0 if self.part is None else self.part.slice or 0
            self.weights = self.weights or {}
            self.weights[index] = self.weights.get(index, 0.0) + weight

    def begin_backward(self, only: tuple[str, ...] | None) -> tuple[GlobalBatch, MicroBatch]:
        """Returns the micro-batch that a call of `session.backward` is about.

        only: the optimizers that it is for. Another call, for other optimizers or the same, may
        follow the step of those before, where the global batch is one micro-batch on each rank.
        Raises `UserError` out of turn.
        """
        if self.stepped and None not in (only, self.only):
            self._check_whole()
            self.backward = self.stepped = self._weighed = False
            self.weights = None
            self.clock.start()
        batch, part = self.current("backward")
        if self.backward:
            raise UserError(
                "session.backward was called twice for one micro-batch; with only=…, call "
                "session.step(only=…) after each"
            )
        if self._parts > 1 and only != self.only:
            raise UserError(
                f"session.backward was given only={_listed(only)} for a micro-batch, and "
                f"only={_listed(self.only)} for one before it of the same global batch: give all "
                "of them the same"
            )
        self.only = only
        return batch, part

    def _check_whole(self) -> None:
        """Raises `UserError` unless the global batch is one micro-batch on each rank, in any
        world."""
        if self.part is None or (self.part.last and self._parts == 1 and not self.part.slices):
            return
        raise UserError(
            "session.step(only=…) would change weights in the middle of a global batch that has "
            "several micro-batches, and the result would depend on their size: call backward and "
            "step once for each, for other optimizers in the next global batch, or leave out "
            "micro_batch= and virtual_batch="
        )

    def check_step(self, only: tuple[str, ...] | None) -> tuple[GlobalBatch, MicroBatch]:
        """Returns the micro-batch that a call of `session.step` is about; raises `UserError` out of
        turn."""
        found = self.current("step")
        if not self.backward:
            raise UserError("session.backward(loss) was not called before session.step()")
        if only != self.only:
            raise UserError(
                f"session.step was given only={_listed(only)}, and session.backward before it "
                f"only={_listed(self.only)}: give both the same"
            )
        self.clock.stop()
        return found

    def current(self, call: str) -> tuple[GlobalBatch, MicroBatch]:
        """Returns the micro-batch that `session.<call>` is about; raises `UserError` out of
        turn."""
        if self.batch is None or self.part is None or self.stepped:
            raise UserError(
                f"session.{call} is called once for each micro-batch, inside the loop over "
                "session.batches"
            )
        return self.batch, self.part

    @property
    def partial(self) -> bool:
        """Returns whether a part of the global batch's gradient is computed, and its step is not
        applied."""
        if self.batch is None or self.part is None:
            return False
        return not (self.part.last and self.stepped) and (self._weighed or self.backward)

    def indices(self) -> list[int]:
        """Returns the dataset indices of the whole global batch."""
        if self.batch is None or self.plan is None:
            raise UserError(
                "session.batch_indices exists only inside the loop over session.batches"
            )
        if isinstance(self.plan, StreamPlan):
            raise UserError("session.batch_indices: the samples of a stream have no index")
        batch = self.batch
        indices = self.plan.order.indices(batch.epoch, batch.start, batch.stop)
        return [int(index) for index in indices]

    def total(self, step: int, after: DataPosition) -> int:
        """Returns the steps of the whole run if this loop is its last, and 0 if that is unknown.

        after: the position after `step`.
        """
        left = self.plan.steps_from(after) if self.plan is not None else None
        return step + left if left is not None else 0


def _listed(only: tuple[str, ...] | None) -> str:
    return "None" if only is None else repr(only[0] if len(only) == 1 else list(only))
