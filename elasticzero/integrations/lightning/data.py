"""Presents the micro-batches of a session to Lightning as batches, one for each step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any, cast

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from elasticzero.errors import UserError
from elasticzero.integrations.lightning.progress import FitProgress
from elasticzero.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Says how long a trainer trains, and the seed of the order of samples."""

    epochs: int
    steps: int | None
    seed: int


class StepLoader:
    """Gives the first micro-batch of each step; `more` gives its others.

    Its length is the number of steps in an epoch, the same in every world.
    """

    def __init__(
        self, loader: DataLoader[Any], session: Session, progress: FitProgress, limits: Limits
    ) -> None:
        """Begins no loop yet.

        Args:
            loader: the trainer's loader, whose arguments `session.batches` takes over.
            session: the session that trains.
            progress: how far the trainer is, and the samples of a global batch.
            limits: where the loop ends, and the seed of its order.
        """
        self.dataset = loader.dataset
        self._loader, self._session, self._progress = loader, session, progress
        self._limits = limits
        self._micro_batches: Iterator[Any] | None = None

    def __len__(self) -> int:
        if isinstance(self._loader.dataset, IterableDataset):
            if self._limits.steps is None:
                raise UserError("a stream has no length: give Trainer(max_steps=…)")
            return self._limits.steps
        whole = math.floor if self._loader.drop_last else math.ceil
        return max(1, whole(len(cast(Sized, self._loader.sampler)) / self._progress.global_batch))

    def __iter__(self) -> Iterator[Any]:
        while True:
            self._progress.share()
            if self._micro_batches is None:
                self._micro_batches = self._begin()
            try:
                yield next(self._micro_batches)
            except StopIteration:
                return

    def more(self) -> Any:
        """Returns the next micro-batch of the step."""
        assert self._micro_batches is not None
        return next(self._micro_batches)

    def _begin(self) -> Iterator[Any]:
        return self._session.batches(
            self._loader,
            global_batch=self._progress.global_batch,
            micro_batch=self._loader.batch_size,
            epochs=self._limits.epochs,
            steps=self._limits.steps,
            seed=self._limits.seed,
        )


def only_loader(dataloader: Any, *, others: bool) -> DataLoader[Any]:
    """Returns the one loader that a trainer trains on.

    Args:
        dataloader: what the trainer was given for training.
        others: whether the trainer was given other loaders.

    Raises:
        UserError: it is anything but one `DataLoader` with a batch size.
    """
    if others or not isinstance(dataloader, DataLoader) or dataloader.batch_size is None:
        description = "several" if others else f"a {type(dataloader).__name__}"
        raise UserError(
            f"the Elastic strategy trains on one DataLoader with a batch_size, and was given "
            f"{description}: make one dataset of all"
        )
    return dataloader


def share_of_rank(loader: DataLoader[Any], rank: int, world_size: int) -> DistributedSampler[Any]:
    """Returns the sampler of a rank's part of a dataset for validation, as Lightning's ddp has it.

    Some samples are on two ranks where their number does not divide.

    Args:
        loader: has the dataset.
        rank: that of this process.
        world_size: number of ranks among which the samples are divided.
    """
    return DistributedSampler(loader.dataset, world_size, rank, shuffle=False)
