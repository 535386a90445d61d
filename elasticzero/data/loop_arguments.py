"""Makes the plan and the reader of a loop over batches of what a script gives `session.batches`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from elasticzero.data.datasets import as_stream, length_of
from elasticzero.data.loader import BatchReader, RankSchedule
from elasticzero.data.sampling import BatchPlan, SampleOrder
from elasticzero.data.streams.loader import StreamReader
from elasticzero.data.streams.plan import StreamPlan
from elasticzero.data.streams.source import stream_order


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopArguments:
    """Holds the arguments of `session.batches`, which describes them."""

    global_batch: int
    epochs: int | None
    steps: int | None
    micro_batch: int | Literal["auto"] | None
    virtual_batch: int | None
    shuffle: bool
    seed: int
    collate_fn: Callable[[list[Any]], Any] | None
    num_workers: int
    drop_last: bool

    def schedule(
        self, dataset: Any, rank: int, world_size: int, micro_batch_limit: int | None
    ) -> RankSchedule:
        """Returns what one rank computes of the loop over this dataset."""
        stream = as_stream(dataset)
        make_plan: Callable[..., BatchPlan | StreamPlan] = BatchPlan
        order: Any
        if stream is not None:
            make_plan, order = StreamPlan, stream_order(stream, self.seed, self.shuffle)
        else:
            samples = length_of(dataset)
            order = SampleOrder(samples=samples, seed=self.seed, shuffle=self.shuffle)
        plan = make_plan(
            order=order,
            global_batch=self.global_batch,
            epochs=self.epochs,
            steps=self.steps,
            drop_last=self.drop_last,
        )
        return RankSchedule(
            plan=plan,
            rank=rank,
            world_size=world_size,
            micro_batch=self.micro_batch,
            micro_batch_limit=micro_batch_limit,
            virtual_batch=self.virtual_batch,
        )

    def reader(
        self,
        dataset: Any,
        device: torch.device,
        sum_over_ranks: Callable[[Tensor], Tensor] | None,
    ) -> BatchReader | StreamReader:
        """Returns what reads this dataset on one rank; sum_over_ranks: as of `StreamReader`."""
        stream = as_stream(dataset)
        if stream is not None:
            return StreamReader(
                dataset=dataset,
                stream=stream,
                device=device,
                sum_over_ranks=sum_over_ranks,
                collate_fn=self.collate_fn,
                num_workers=self.num_workers,
            )
        return BatchReader(
            dataset=dataset,
            device=device,
            collate_fn=self.collate_fn,
            num_workers=self.num_workers,
            seeded=self.virtual_batch is not None,
        )
