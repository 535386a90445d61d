"""Makes the plan and the reader of a loop over batches of what a script gives `session.batches`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from elasticzero.data.datasets import as_stream, check_unused, length_of, parts_of
from elasticzero.data.loader import BatchReader, RankSchedule
from elasticzero.data.position import DataPosition
from elasticzero.data.sampler_order import order_by
from elasticzero.data.sampling import BatchPlan, SampleOrder
from elasticzero.data.streams.loader import StreamReader
from elasticzero.data.streams.plan import StreamPlan
from elasticzero.data.streams.source import stream_order
from elasticzero.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopArguments:
    """Holds the arguments of `session.batches`, which describes them."""

    dataset: Any
    global_batch: int | None
    epochs: int | None
    steps: int | None
    micro_batch: int | Literal["auto"] | None = None
    virtual_batch: int | None = None
    shuffle: bool = True
    seed: int = 0
    sampler: Any = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    num_workers: int = 0
    drop_last: bool = False
    first_world: int = 0
    """Number of ranks from which the global batch follows; 0: it is given."""
    never_one: bool = False
    """No micro-batch has one sample, as far as that can be had."""

    def resolved(self, first_world: Callable[[], int]) -> LoopArguments:
        """Returns the arguments with those of a `DataLoader` in place of the loader.

        Args:
            first_world: Returns the number of ranks with which the first loop over a loader began,
                each of which takes a batch of it; called only where the global batch follows from
                it.

        Raises:
            UserError: There is no size of a global batch.
        """
        if not isinstance(self.dataset, DataLoader):
            if self.global_batch is None:
                raise UserError(
                    "session.batches needs global_batch=, the samples of a step over all ranks"
                )
            return self
        check_unused(self.dataset)
        parts = parts_of(self.dataset)
        alone = self.virtual_batch is None and self.micro_batch is None
        world = first_world() if self.global_batch is None else 0
        return replace(
            self,
            dataset=parts.dataset,
            global_batch=self.global_batch or parts.batch_size * world,
            first_world=world,
            micro_batch=parts.batch_size if alone else self.micro_batch,
            shuffle=parts.shuffle,
            seed=self.seed if parts.seed is None else parts.seed,
            sampler=self.sampler if self.sampler is not None else parts.sampler,
            collate_fn=self.collate_fn or parts.collate_fn,
            num_workers=self.num_workers or parts.num_workers,
            drop_last=self.drop_last or parts.drop_last,
        )

    def steps_in_all(self) -> int:
        """Returns the number of global batches from the loop's beginning to its end.

        Raises:
            UserError: Only the stream itself knows where it ends.
        """
        steps = self._plan().steps_from(DataPosition())
        if steps is None:
            raise UserError(
                "session.steps_in: the samples of a stream are not counted before it is read; "
                "give steps= alone"
            )
        return steps

    def schedule(self, rank: int, world_size: int, micro_batch_limit: int | None) -> RankSchedule:
        """Returns what one rank computes of the loop.

        Args:
            rank: The rank.
            world_size: Number of ranks.
            micro_batch_limit: The most samples for which memory has sufficed, under `auto`; None:
                it was never short.
        """
        return RankSchedule(
            plan=self._plan(),
            rank=rank,
            world_size=world_size,
            micro_batch=self.micro_batch,
            micro_batch_limit=micro_batch_limit,
            virtual_batch=self.virtual_batch,
            first_world=self.first_world,
        )

    def _plan(self) -> BatchPlan | StreamPlan:
        assert self.global_batch is not None
        loop: dict[str, Any] = {
            "global_batch": self.global_batch,
            "epochs": self.epochs,
            "steps": self.steps,
            "drop_last": self.drop_last,
            "never_one": self.never_one,
        }
        stream = as_stream(self.dataset)
        if stream is not None:
            if self.sampler is not None:
                raise UserError("session.batches was given a stream and sampler=: leave it out")
            return StreamPlan(order=stream_order(stream, self.seed, self.shuffle), **loop)
        samples = length_of(self.dataset)
        if self.sampler is not None:
            return BatchPlan(order=order_by(self.sampler, self.seed), **loop)
        order = SampleOrder(samples=samples, seed=self.seed, shuffle=self.shuffle)
        return BatchPlan(order=order, **loop)

    def reader(
        self, device: torch.device, sum_over_ranks: Callable[[Tensor], Tensor] | None
    ) -> BatchReader | StreamReader:
        """Returns what reads the dataset on one rank.

        Args:
            device: The device of the batches.
            sum_over_ranks: As of `StreamReader`.
        """
        stream = as_stream(self.dataset)
        if stream is not None:
            return StreamReader(
                dataset=self.dataset,
                stream=stream,
                device=device,
                sum_over_ranks=sum_over_ranks,
                collate_fn=self.collate_fn,
                num_workers=self.num_workers,
            )
        return BatchReader(
            dataset=self.dataset,
            device=device,
            collate_fn=self.collate_fn,
            num_workers=self.num_workers,
            seeded=self.virtual_batch is not None,
        )
