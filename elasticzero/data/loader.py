"""Iterates over micro-batches: reads and collates the samples and moves them to the device."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from elasticzero.data.position import DataPosition, GlobalBatch, LoopPlan, MicroBatch
from elasticzero.data.sampling import BatchPlan, micro_batches
from elasticzero.data.seeding import SeededRequest, SeededSamples
from elasticzero.data.shares import ShareTable, counts, part_of
from elasticzero.data.slices import slice_seed
from elasticzero.errors import UserError
from elasticzero.processes import die_with_parent
from elasticzero.spans import Span

Request = list[int] | SeededRequest
"""Names the samples of one batch: their indices in the dataset, and the seed if there is one."""

_AHEAD_SAMPLES, _AHEAD = 4096, 64
"""Number of samples whose indices are computed at once, and of micro-batches; one batch may exceed
it."""
_AHEAD_BALANCED = 4
"""Number of micro-batches where ranks' shares follow their speed, or an island is given samples as
it goes: other ones cannot hold for those whose indices are computed."""


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
        requests = Requests(schedule.requests(position))
        return IndexedBatches(self.batches(requests), requests)

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

        Args:
            batch: The global batch that begins.
            after: The position after it.
        """

    def in_world(self, schedule: RankSchedule, position: DataPosition) -> OpenBatches:
        """Returns the micro-batches of the rank in another world; these are not used any more. All
        ranks of that world call this together.

        Args:
            schedule: What the rank computes of the loop there.
            position: Where in the data they begin, which is where these have come to.
        """

    def close(self) -> None:
        """Ends what loads data."""


class Requests:
    """Gives the requests for a loop's batches, which may become those of another world."""

    def __init__(self, requests: Iterator[Request]) -> None:
        self._requests = requests
        self.taken = 0
        """Number of requests that were taken."""

    def __iter__(self) -> Requests:
        return self

    def __next__(self) -> Request:
        request = next(self._requests)
        self.taken += 1
        return request

    def replace(self, requests: Iterator[Request]) -> None:
        """Gives these from now on."""
        self._requests = requests


class IndexedBatches:
    """Yields the micro-batches of samples that are named by an index."""

    def __init__(self, batches: Iterator[Any], requests: Requests) -> None:
        """Takes the batches, and the requests from which a loader makes them, perhaps ahead."""
        self._batches = batches
        self._requests = requests
        self._taken = 0

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._taken += 1
        return batch

    def in_world(self, schedule: RankSchedule, position: DataPosition) -> OpenBatches:
        """Goes on with the same processes, and drops what they have loaded ahead."""
        ahead = self._requests.taken - self._taken
        self._requests.replace(schedule.requests(position))
        for _ in range(ahead):
            next(self)
        return self

    def look_ahead(self, batch: GlobalBatch, after: DataPosition) -> None:
        """Does nothing: the epoch's order names all batches."""

    def close(self) -> None:
        """Does nothing: the processes end with the last reference to them."""


class ClaimedBatches:
    """Yields the micro-batches of an island, which is given samples as it goes."""

    def __init__(self, reader: BatchReader, schedule: RankSchedule) -> None:
        """Begins to read where `look_ahead` first says."""
        self._reader, self._schedule = reader, schedule
        self._batches: OpenBatches | None = None
        self._from: DataPosition | None = None
        """Position before the batch that training is at."""

    def prepare(self, position: DataPosition) -> None:
        """Does nothing: what the island is given names its batches."""

    def begin_at(self, position: DataPosition) -> None:
        """Notes where the next batch begins."""
        self._from = position

    def drop(self) -> None:
        """Drops what was read ahead."""
        self._batches = None

    def __next__(self) -> Any:
        assert self._from is not None
        for _ in range(2):
            if self._batches is None:
                self._batches = self._reader.open(self._schedule, self._from)
            try:
                return next(self._batches)
            except StopIteration:  # the samples that were known are read
                self._batches = None
        raise RuntimeError("an island has no samples for a batch that it has begun")

    def in_world(self, schedule: RankSchedule, position: DataPosition) -> OpenBatches:
        """Reads on as a rank of another world."""
        self._schedule, self._batches = schedule, None
        return self

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
    sequences.

    Args:
        kind: The class whose instances are replaced.
        function: Returns what takes the place of an instance.
        value: Mappings and sequences nested in any way; anything else in them stays as it is.
    """
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

    plan: LoopPlan
    rank: int
    world_size: int
    micro_batch: int | Literal["auto"] | None = None
    """Number of samples at once on one rank; None: all; auto: as many as memory suffices for."""
    micro_batch_limit: int | None = None
    """The most that memory has sufficed for, under `auto`; None: it was never short."""
    virtual_batch: int | None = None
    """Number of samples in a slice; None: what one rank computes at once depends on the world."""
    first_world: int = 0
    """Number of ranks from which the global batch follows; 0: it is given."""
    left_out: frozenset[GlobalBatch] = frozenset()
    """Global batches that are passed over, of which nothing is read."""
    shares: ShareTable | None = field(default=None, compare=False)
    """Parts of the global batches that ranks have by their speed; None: all have equal ones."""

    def __post_init__(self) -> None:
        size, total = self.virtual_batch, self.plan.global_batch
        most = self.micro_batch
        if most not in (None, "auto") and not (isinstance(most, int) and most >= 1):
            raise UserError(f"micro_batch is {most}; it must be at least 1, or auto")
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
        if size is not None and (size < 1 or total % size):
            raise UserError(
                f"virtual_batch is {size}; global_batch, which is {total}, must be a multiple of it"
            )
        if size is not None:
            self.plan.check_slices(size, self.world_size)

    def steps(self, position: DataPosition) -> Iterator[tuple[GlobalBatch, DataPosition]]:
        """Yields each global batch and the position after it."""
        while (step := self.plan.next(position)) is not None:
            yield step
            position = step[1]

    def parts(self, batch: GlobalBatch, step: int) -> list[MicroBatch]:
        """Returns this rank's micro-batches of one global batch.

        Args:
            batch: The global batch.
            step: Its number in the loop, from 1.
        """
        if self.virtual_batch is not None:
            return list(self.plan.slices(batch, self.rank, self.world_size, self.virtual_batch))
        share, largest = self._share(batch, step)
        never_one = self.plan.never_one
        return list(micro_batches(batch, share, largest, self.most_samples, never_one=never_one))

    def _share(self, batch: GlobalBatch, step: int) -> tuple[Span, int]:
        """Returns this rank's positions of a global batch, and the largest number of them that a
        rank has.

        Args:
            batch: The global batch.
            step: Its number in the loop, from 1.
        """
        shares = self.shares.at(step) if self.shares is not None else None
        if shares is not None:
            least = 1 + self.plan.never_one
            counts_R = counts(len(batch), shares, least, self.most_samples or 1)
            if counts_R is not None:
                return part_of(batch, counts_R, self.rank), max(counts_R)
        return self.plan.share(batch, self.rank, self.world_size)

    @property
    def reader_groups(self) -> int | None:
        """Returns the number of groups of a stream's readers, one for each slice of a whole global
        batch; None: it is not cut into slices."""
        return None if self.virtual_batch is None else self.plan.global_batch // self.virtual_batch

    @property
    def whole_parts(self) -> bool:
        """Returns whether a rank's part of a global batch is one micro-batch in every world."""
        if self.virtual_batch is not None or self.micro_batch == "auto":
            return False
        return self.micro_batch is None or self.micro_batch >= self.plan.global_batch

    @property
    def most_samples(self) -> int | None:
        """Returns the most samples of a micro-batch; None: as many as the rank's part has."""
        return self.micro_batch_limit if self.micro_batch == "auto" else self.micro_batch

    @property
    def filler_samples(self) -> int:
        """Returns the samples of a filler for a stream: as many as a micro-batch has, for models
        that cannot take one alone."""
        most = self.virtual_batch or self.most_samples
        return max(most or self.plan.global_batch // self.world_size, 1 + self.plan.never_one)

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
            kept = ((batch, at.steps) for batch, at in batches if batch not in self.left_out)
            spans = (part.positions for batch, at in kept for part in self.parts(batch, at))
            fixed = self.shares is None and type(self.plan) is BatchPlan
            most = _AHEAD if fixed else _AHEAD_BALANCED
            for first in spans:
                ahead = min(most, _AHEAD_SAMPLES // max(1, len(first)))
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
