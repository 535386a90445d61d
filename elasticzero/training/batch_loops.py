"""Runs the loops over batches of one generation, and records how far each dataset is used.

Rules:
 D1  Loops are numbered in the order in which they begin, and dataset objects in the order in which
     loops first use them. A script that runs again meets the same numbers: loops that training has
     passed give nothing, and the loop in which training stands goes on there.
 D2  A loop goes on where the last loop over the same dataset object ended, be that by its end, by
     `steps=` or by `break`. So every sample is used once in each epoch of a dataset, over all loops
     and generations; a loop with `epochs=N` ends at the Nth end of an epoch after its beginning.
 D3  An epoch's end is taken at the boundary after its last step, in this order: the ranks agree
     whether the generation ends there; `on_epoch_end` runs; the position moves to the next epoch;
     what is due is captured. The position of a state from before the function ran says so, and the
     next generation runs the function first. So its effect on the training state counts exactly
     once; what it does outside (prints, files) is done again where a process was lost before the
     next capture.
 D4  One loop runs at a time: a loop that another has followed cannot be continued.
"""

from __future__ import annotations

import math
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from elasticzero.comm.barriers import Call
from elasticzero.comm.process_group import ProcessGroups
from elasticzero.consistency.configuration import Comparison, of_loop
from elasticzero.data.changes import change_text, needed_changes
from elasticzero.data.loader import BatchReader, RankSchedule
from elasticzero.data.position import DataPosition, EpochEnd, GlobalBatch, MicroBatch
from elasticzero.data.step_progress import StepProgress
from elasticzero.data.streams.loader import StreamReader
from elasticzero.errors import UserError
from elasticzero.ipc.agent_client import AgentClient
from elasticzero.ipc.messages import DataChanged, LoopExited, Stepped
from elasticzero.ipc.thread_location import place_of
from elasticzero.parallel import same_number
from elasticzero.training.slices import SliceStates
from elasticzero.training.training_state import TrainingState

AGAIN_NEW = (
    "this loop goes over a new dataset object, of the same kind and length as the one before it: "
    "its epochs begin at 0, in the same order; to have them go on, make the dataset once, before "
    "the loop over epochs"
)


class Datasets:
    """Numbers dataset objects in the order in which they are first used, by weak references if
    possible."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Callable[[], Any], int]] = {}
        self._count = 0
        self._last: tuple[Any, Callable[[], Any]] | None = None
        self.note_printed = False

    def number(self, dataset: Any) -> int:
        found = self._known.get(id(dataset))
        if found is not None and found[0]() is dataset:
            return found[1]
        self._known[id(dataset)] = _reference(dataset), self._count
        self._count += 1
        return self._count - 1

    def looks_recreated(self, dataset: Any, alike: tuple[Any, ...]) -> bool:
        """Returns whether the loop before this one went over another, similar object that is gone.

        alike: the properties that both must have in common.
        """
        kind = (type(dataset), *alike)
        before, self._last = self._last, (kind, _reference(dataset))
        return before is not None and before[0] == kind and before[1]() is None


def _reference(dataset: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(dataset)
    except TypeError:  # a list, for example
        return lambda: dataset


class Loops:
    """Runs the loops of one generation on one rank."""

    def __init__(self, link: AgentClient, comparison: Comparison) -> None:
        """Takes the client of the agent, and the comparison of the ranks' scripts."""
        self._comparison = comparison
        self.progress = StepProgress()
        self._link = link
        self._count = 0
        self._datasets = Datasets()
        self._epoch: int | None = None
        self._open: object | None = None
        """Identifies the loop that runs; None: no loop runs."""
        self._names_optimizers = False
        """A backward was for some of the script's optimizers."""
        self._ended: Stepped | None = None
        """The newest step, of which the agent does not know yet."""
        self._slices: SliceStates | None = None
        """The state of the slices of the loop that runs; None: it has none."""

    @property
    def epoch(self) -> int:
        """Returns what `Session.epoch` does."""
        if self._epoch is None:
            raise UserError(
                "session.epoch is there once a loop over session.batches has begun; `for epoch in "
                "range(N)` around it always begins at 0, for loops that training has passed give "
                "nothing"
            )
        return self._epoch

    def micro_batch_limit(self, training: TrainingState) -> int | None:
        """Returns the most samples of a micro-batch of automatic size; None: no limit is known."""
        known = (training.position.micro_batch, self._link.assignment.micro_batch)
        return min((size for size in known if size is not None), default=None)

    def run(
        self,
        training: TrainingState,
        schedule: RankSchedule,
        reader: BatchReader | StreamReader,
        on_epoch_end: Callable[[], object] | None,
    ) -> Iterator[Any]:
        """Yields the micro-batches of the next loop, from the present position to the loop's
        end."""
        if self._link.assignment.deterministic and schedule.virtual_batch is None:
            raise UserError(
                "--deterministic sums gradients slice by slice: give session.batches "
                "virtual_batch=, the number of samples in a slice"
            )
        self._check_batch_was_whole()
        training.finish_pending_step()
        self._open = mine = object()
        self.progress = StepProgress()
        loop, self._count = self._count, self._count + 1
        dataset = self._datasets.number(reader.dataset)
        order = schedule.plan.order
        renewed = self._datasets.looks_recreated(reader.dataset, tuple(order.inputs))
        if self._epoch is None:
            self._epoch = training.position.epoch
        if loop < training.position.loop:
            self._epoch = training.position.epoch
            return
        if renewed and order.shuffle and self._link.assignment.rank == 0:
            self._print_once(AGAIN_NEW)
        if training.stopped is None:
            training.agree_to_stop(Call.LOOP)
        if training.stopped is not None:
            return
        training.left_at = ""
        before, position = training.position, self._start(training, schedule, loop, dataset)
        position = replace(position, first_world=position.first_world or schedule.first_world)
        if schedule.micro_batch == "auto":
            position = replace(position, micro_batch=schedule.micro_batch_limit)
        training.begin_loop(position)
        # Other data follow the end of an epoch.
        if before.loop == loop and position.epoch > before.epoch:
            self._epoch = before.epoch
            training.end_epoch(EpochEnd(on_epoch_end, position))
        self._end_epoch_if_over(training, schedule, on_epoch_end)
        if training.stopped is None:
            yield from self._batches(training, schedule, reader, on_epoch_end, mine)

    def _start(
        self, training: TrainingState, schedule: RankSchedule, loop: int, dataset: int
    ) -> DataPosition:
        """Returns where the loop begins or goes on; all ranks call this together.

        Raises `UserError` for a change that is not allowed, and if the ranks differ.
        """
        plan, before, assignment = schedule.plan, training.position, self._link.assignment
        goes_on = before.loop == loop
        needed = needed_changes(plan, before) if goes_on else ()
        allowed = assignment.allow_data_change
        self._comparison.require_equal(
            Call.LOOP, of_loop(schedule, loop, allowed if needed else ())
        )
        position = plan.start(before, loop, dataset, allowed)
        text = change_text(plan, before, training.step) if goes_on else ""
        if text and assignment.rank == 0:
            self._link.send(DataChanged(step=training.step, allowed=needed, message=text))
        return position

    def _end_epoch_if_over(
        self,
        training: TrainingState,
        schedule: RankSchedule,
        on_epoch_end: Callable[[], object] | None,
    ) -> None:
        """Ends the epoch of the present position if no global batch of it is left."""
        position = training.position
        if schedule.plan.ends_epoch(position):
            self._epoch = position.epoch
            training.end_epoch(EpochEnd(on_epoch_end, schedule.plan.wrapped(position)))

    def _batches(
        self,
        training: TrainingState,
        schedule: RankSchedule,
        reader: BatchReader | StreamReader,
        on_epoch_end: Callable[[], object] | None,
        mine: object,
    ) -> Iterator[Any]:
        on_gpu = reader.device.type == "cuda"
        progress = self.progress = StepProgress(schedule.plan, on_gpu=on_gpu)
        schedule = self._without_left_out(schedule, training.position.dataset)
        data = reader.open(schedule, training.position)
        if schedule.virtual_batch is not None:
            seed, dataset = schedule.plan.order.seed, training.position.dataset
            self._slices = SliceStates(seed, dataset, training.auxiliary.buffers)
        else:
            self._slices = None
        plan, training.in_loop = schedule.plan, True
        try:
            # What a stream has left may be known only now, and be too little for a larger batch.
            self._end_epoch_if_over(training, schedule, on_epoch_end)
            for batch, after in schedule.steps(training.position):
                training.at_boundary()
                if training.stopped is not None:
                    break
                self._epoch = batch.epoch
                ends = (
                    EpochEnd(on_epoch_end, plan.wrapped(after)) if plan.ends_epoch(after) else None
                )
                training.begin_step(batch, after, ends)
                progress.begin(batch)
                data.look_ahead(batch, after)
                progress.data_wait_s = time.monotonic() - progress.began_s
                if batch in schedule.left_out:
                    training.pass_over()
                    continue
                for part in schedule.parts(batch):
                    began_s = time.monotonic()
                    samples = next(data)
                    progress.present(part, time.monotonic() - began_s)
                    training.strategy.expect(part)
                    if self._slices is not None:
                        self._slices.begin(batch, part, training.boundary_copy().buffers)
                    training.halved_micro_batch = schedule.halved(part)
                    yield samples
                    self._check_part(mine)
                    training.halved_micro_batch = None
                self._send_step(training)
            else:
                training.at_boundary(last=True)
        except GeneratorExit:
            if self._open is mine:
                training.left_at = place_of(sys._getframe())
            raise
        finally:
            training.in_loop = False
            data.close()
            self._send_step(training)
            self._link.send(LoopExited())
        self.progress = StepProgress()

    def _without_left_out(self, schedule: RankSchedule, dataset: int) -> RankSchedule:
        """Returns the schedule that leaves out the batches of this dataset that are to be."""
        batches = [
            GlobalBatch(epoch=found.epoch, start=found.start, stop=found.stop)
            for found in self._link.assignment.left_out
            if found.dataset == dataset
        ]
        return replace(schedule, left_out=frozenset(batches))

    def _check_part(self, mine: object) -> None:
        """Checks that the script is done with its micro-batch when it requests the next one."""
        if self._open is not mine:
            raise UserError(
                "this loop over session.batches was followed by another, so it cannot be gone on "
                "with: one loop runs at a time; session.evaluate goes over a second dataset inside "
                "a loop"
            )
        if not self.progress.stepped:
            raise UserError(
                "session.step() was not called for this micro-batch; call "
                "session.backward(loss) and session.step() for each, also for those "
                "where step() returns False"
            )

    def end_part(self, batch: GlobalBatch, part: MicroBatch) -> None:
        """Ends a micro-batch, of which the forward and the backward are over."""
        self.progress.stepped = True
        if self._slices is not None:
            self._slices.end(batch, part)

    def end_step(self, training: TrainingState, batch: GlobalBatch) -> None:
        """Reports a global batch that was applied or skipped; where the script steps some of its
        optimizers, and may step others, once it comes back for more."""
        now_s, progress = time.monotonic(), self.progress
        self._ended = Stepped(
            step=training.step,
            at_s=now_s,
            step_s=now_s - progress.began_s,
            data_wait_s=progress.data_wait_s,
            samples=len(batch),
            total=progress.total(training.step, training.next_position),
            gradient_norm=training.gradient_norm,
            compute_s=progress.clock.seconds,
        )
        if progress.only is None:
            self._send_step(training)

    def _send_step(self, training: TrainingState) -> None:
        ended, self._ended = self._ended, None
        if ended is not None:
            training.stager.stepped(ended.step_s)
            self._link.send(ended)

    def require_equal_only(
        self, only: tuple[str, ...] | None, known: Iterable[str], groups: ProcessGroups | None
    ) -> None:
        """Raises `UserError` unless this backward is for the same optimizers on all ranks, which
        call this together once one was for some of them.

        known: the names of all optimizers.
        """
        self._names_optimizers = self._names_optimizers or only is not None
        if groups is None or not self._names_optimizers:
            return
        bits = [1 << index for index, name in enumerate(known) if only is None or name in only]
        number = sum(bits) % same_number.MODULUS
        given = torch.tensor(same_number.with_square(number), dtype=torch.float64)
        total, squares = groups.sum(given).tolist()
        if not same_number.is_same(number, groups.rank_info.world_size, (total, squares)):
            raise UserError(
                "ranks gave session.backward different only= in one turn; rank "
                f"{groups.rank_info.rank} gave {only!r}: let what decides on it be the same on all "
                "ranks, such as the step or a loss that is summed over them"
            )

    def weight_factor(self, samples: int, groups: ProcessGroups | None) -> float:
        """Returns the factor from a mean over samples to a mean over the script's weights."""
        weights, part = self.progress.weights, self.progress.part
        if weights is None or part is None:
            return 1.0
        table = torch.zeros(max(1, part.slices), dtype=torch.float64)
        for index, weight in weights.items():
            table[index] = weight
        if groups is not None:
            table = groups.sum(table)
        total = math.fsum(table.tolist())
        if total <= 0:
            raise UserError(f"the weights of a global batch sum to {total:g}; it must be positive")
        return samples / total

    def _check_batch_was_whole(self) -> None:
        """Raises `UserError` if a loop was left with the gradient of a part of a global batch."""
        if self.progress.partial:
            raise UserError(
                "the loop over session.batches before this one was left in the middle of a global "
                "batch, after session.backward: leave it where session.step() has returned True"
            )

    def _print_once(self, text: str) -> None:
        if not self._datasets.note_printed:
            self._datasets.note_printed = True
            print(text, file=sys.stderr, flush=True)
