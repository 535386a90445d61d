"""Records where training stands in the data, and names what a step takes of it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from elasticzero.data.tag_requests import TagRequests
from elasticzero.ipc.assignment import LeftOutBatch
from elasticzero.ipc.rounds import IslandProgress
from elasticzero.options.settings import DataChange
from elasticzero.serialization import OMIT_DEFAULT
from elasticzero.spans import Span

KEPT_DATASETS = 256
"""Maximum number of datasets whose use is recorded besides the present one's."""
UNKNOWN = -1
"""Stands for the number of samples of a stream's reader that has not ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Records the use of a dataset whose loop has ended."""

    dataset: int
    epoch: int
    offset: int
    order: Any = None
    stream: Any = field(default=None, metadata=OMIT_DEFAULT)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPosition:
    """Records the use of the data at a boundary."""

    loop: int = 0
    """Number of the loop over `session.batches` in the script, from 0."""
    epoch: int = 0
    """Epoch of this loop's dataset, counted over all loops over it."""
    offset: int = 0
    """Number of samples of the epoch already used. If it is all of them, the epoch's last step is
    applied and `on_epoch_end` has not run; once it has run, the next epoch begins at 0."""
    steps: int = 0
    """Number of global batches of this loop already used."""
    order: Any = None
    """The inputs of the order: `[samples, seed, shuffle]`, or those of a stream."""
    global_batch: int = field(default=0, metadata=OMIT_DEFAULT)
    """Number of samples of the loop's global batches; 0: it is not known."""
    stream: Any = field(default=None, metadata=OMIT_DEFAULT)
    """Where a stream's readers go on in this epoch (`data/streams/plan.py`); None: at their
    beginning, or the dataset is no stream."""
    dataset: int = 0
    """Number of the loop's dataset object, from 0, in the order in which loops first used them."""
    first_epoch: int = 0
    """The epoch in which the loop began."""
    others: tuple[Mark, ...] = ()
    """The other datasets, the last used ones last; `KEPT_DATASETS` at most."""
    micro_batch: int | None = None
    """Most samples of a micro-batch of automatic size; None: memory has sufficed so far."""
    first_world: int = field(default=0, metadata=OMIT_DEFAULT)
    """Number of ranks with which the first loop began whose global batch follows from it; 0: none
    has."""
    stopped: str | None = None
    """Reason for which the script ended training for all ranks; None: it did not."""
    skipped: tuple[LeftOutBatch, ...] = ()
    """The global batches that were used without a step of the optimizer, in all loops."""
    tagging: TagRequests = field(default=(), metadata=OMIT_DEFAULT)
    """Checkpoints that the script has asked for under tags, and that are not known to be saved."""
    island: IslandProgress | None = field(default=None, metadata=OMIT_DEFAULT)
    """How far an island is in the rounds; None: it is in none."""

    def skipped_with(self, batch: GlobalBatch) -> tuple[LeftOutBatch, ...]:
        """Returns what is skipped once this batch of the present dataset is."""
        skipped = LeftOutBatch(
            dataset=self.dataset, epoch=batch.epoch, start=batch.start, stop=batch.stop
        )
        return (*self.skipped, skipped)

    def mark(self, dataset: int) -> Mark:
        """Returns the record of a dataset's use."""
        if dataset == self.dataset:
            return Mark(
                dataset=dataset,
                epoch=self.epoch,
                offset=self.offset,
                order=self.order,
                stream=self.stream,
            )
        unused = Mark(dataset=dataset, epoch=0, offset=0)
        return next((mark for mark in self.others if mark.dataset == dataset), unused)


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """Describes the work at the boundary after an epoch's last step."""

    run: Callable[[], object] | None
    """The script's `on_epoch_end`."""
    after: DataPosition
    """Position in the data once the function has run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """Names the positions `[start, stop)` of one epoch that one optimizer step uses on all
    ranks."""

    epoch: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Names the samples that one rank puts through the model at once."""

    positions: Span
    weight: int
    """Number of samples that count; 0 for a filler, which only keeps ranks in step."""
    last: bool
    """True for the last micro-batch of its global batch."""
    slice: int | None = None
    """Number of the slice in its global batch, from 0; None: it is a filler, or no slice."""
    runs: tuple[Span, ...] = ()
    """The slices of each rank, contiguous and in the order of ranks; empty: the global batch is not
    cut into slices."""

    @property
    def slices(self) -> int:
        """Returns the number of slices in the global batch; 0: it is not cut into slices."""
        return self.runs[-1].stop if self.runs else 0


class Order(Protocol):
    """Says what the order of a dataset's samples depends on."""

    @property
    def seed(self) -> int: ...

    @property
    def shuffle(self) -> bool: ...

    @property
    def described(self) -> Mapping[str, Any]:
        """Returns what the order depends on, by name."""

    @property
    def inputs(self) -> list[Any]:
        """Returns what the order depends on, as the position in the data has it."""


class LoopPlan(Protocol):
    """Divides the epochs of a loop into global batches, and those among the ranks."""

    @property
    def order(self) -> Order:
        """Returns the order of the dataset's samples."""

    @property
    def global_batch(self) -> int:
        """Returns the number of samples of a global batch."""

    @property
    def epochs(self) -> int | None:
        """Returns the number of epochs of the loop; None: steps alone end it."""

    @property
    def steps(self) -> int | None:
        """Returns the most global batches of the loop; None: epochs alone end it."""

    @property
    def drop_last(self) -> bool:
        """Returns whether an epoch's last global batch is left out where it is smaller."""

    @property
    def never_one(self) -> bool:
        """Returns whether no micro-batch has one sample, as far as that can be had."""

    def start(
        self,
        position: DataPosition,
        loop: int,
        dataset: int = 0,
        allowed: Collection[DataChange] = (),
    ) -> DataPosition:
        """Returns the position at which loop number `loop` begins.

        A loop continues where the loop before it over the same dataset has ended, in the middle of
        an epoch too; with another order (seed, shuffle, length) the next epoch begins instead.

        Args:
            position: Where training resumes.
            loop: Number of the loop in the script, from 0.
            dataset: Number of the loop's dataset object.
            allowed: Changes with which training may continue inside the loop.

        Raises:
            UserError: Training would continue inside a loop with a change that is not `allowed`.
        """

    def next(self, position: DataPosition) -> tuple[GlobalBatch, DataPosition] | None:
        """Returns (the global batch at `position`, the position after it), or None at the end."""

    def ends_epoch(self, position: DataPosition) -> bool:
        """Returns whether no global batch of the position's epoch is left."""

    def wrapped(self, position: DataPosition) -> DataPosition:
        """Returns the same position, moved to the beginning of the next epoch if its epoch has
        ended."""

    def steps_from(self, position: DataPosition) -> int | None:
        """Returns the number of global batches from `position` to the end of the loop; None: it is
        unknown."""

    def share(self, batch: GlobalBatch, rank: int, world_size: int) -> tuple[Span, int]:
        """Divides a global batch among the ranks.

        Args:
            batch: The global batch.
            rank: The rank.
            world_size: Number of ranks.

        Returns:
            (the part of `batch` that belongs to `rank`, the largest number of samples that a rank
            has)
        """

    def slices(
        self, batch: GlobalBatch, rank: int, world_size: int, size: int
    ) -> Iterator[MicroBatch]:
        """Yields a rank's slices of a global batch, equally many on all ranks.

        Args:
            batch: The global batch.
            rank: The rank.
            world_size: Number of ranks.
            size: Number of samples of a slice; the last one may be shorter.
        """

    def check_slices(self, size: int, world_size: int) -> None:
        """Raises `UserError` unless all ranks can have slices of `size` samples."""

    def indices(self, batch: GlobalBatch) -> list[int]:
        """Returns the dataset indices of `batch`; raises `UserError` if its samples have none."""
