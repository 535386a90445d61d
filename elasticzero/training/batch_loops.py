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
 D5  Lines between loops that training has passed run again, as `schedule.step()` after an epoch's
     loop, and the restored state has what they have changed. Parameters, buffers, options of
     optimizers and tracked objects are put back as they were at the first of these loops when the
     loop is called that goes on. A change of what optimizers keep for parameters is refused: it is
     not copied.
"""

from __future__ import annotations

import logging
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from elasticzero.comm.barriers import Call
from elasticzero.comm.process_group import ProcessGroups
from elasticzero.consistency.configuration import Comparison, in_any_world, of_loop
from elasticzero.data.balancing import Balancer
from elasticzero.data.changes import change_text, needed_changes
from elasticzero.data.loader import BatchReader, OpenBatches, RankSchedule
from elasticzero.data.position import DataPosition, EpochEnd, GlobalBatch, MicroBatch
from elasticzero.data.sampling import BatchPlan
from elasticzero.data.shares import ShareTable
from elasticzero.data.streams.loader import StreamReader
from elasticzero.errors import UserError
from elasticzero.ipc.agent_client import AgentClient
from elasticzero.ipc.messages import DataChanged, LoopExited, SharesChanged
from elasticzero.ipc.thread_location import place_of
from elasticzero.islands.kinds import without_islands
from elasticzero.state.auxiliary import BoundaryCopy
from elasticzero.training.batch_work import BatchWork, SliceStates
from elasticzero.training.islands.island_training import IslandTraining
from elasticzero.training.module_checks import batch_norm_note
from elasticzero.training.step_machine import StepState
from elasticzero.training.training_state import TrainingState

log = logging.getLogger(__name__)

AGAIN_NEW = (
    "this loop goes over a new dataset object, of the same kind and length as the one before it: "
    "its epochs begin at 0, in the same order; to have them go on, make the dataset once, before "
    "the loop over epochs"
)


class Datasets:
    """Numbers dataset objects in the order in which they are first used, by weak references if
    possible."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Callable[[], Any], int]] = {}
        self._count = 0
        self._last: tuple[Any, Callable[[], Any]] | None = None

    def number(self, dataset: Any) -> int:
        entry = self._entries.get(id(dataset))
        if entry is not None and entry[0]() is dataset:
            return entry[1]
        self._entries[id(dataset)] = _reference(dataset), self._count
        self._count += 1
        return self._count - 1

    def looks_recreated(self, dataset: Any, alike: tuple[Any, ...]) -> bool:
        """Returns whether the loop before this one went over another, similar object that is gone.

        Args:
            dataset: The dataset of this loop.
            alike: The properties that both must have in common.
        """
        kind = (type(dataset), *alike)
        before, self._last = self._last, (kind, _reference(dataset))
        return before is not None and before[0] == kind and before[1]() is None


def _reference(dataset: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(dataset)
    except TypeError:  # a list, for example
        return lambda: dataset


class PassedLoops:
    """Keeps what lines between loops that training has passed change from counting twice (D5)."""

    def __init__(self) -> None:
        self._copy: BoundaryCopy | None = None
        """The small state at the first of these loops; None: there was none."""

    def pass_one(self, training: TrainingState) -> None:
        """Records that the script calls a loop that training has passed."""
        if self._copy is None:
            training.values.mark()
            training.values.copy_all()
            training.values.watch(training.strategy.rank_state)
            self._copy = training.auxiliary.capture(training.step, training.position)

    def end(self, training: TrainingState) -> None:
        """Puts back what has changed, at the loop that goes on.

        Raises:
            UserError: What the optimizers keep has changed.
        """
        copy, self._copy = self._copy, None
        if copy is None:
            return
        training.values.put_back()
        if not training.values.are_there(()):
            raise UserError(
                "lines between two loops over session.batches have changed what the optimizer "
                "keeps for parameters, and they run again in each generation that goes on after "
                "them: change it in on_epoch_end=, or give the loops' phases jobs of their own"
            )
        training.values.mark()
        training.auxiliary.buffers.put(copy.buffers)
        present = training.auxiliary.capture(training.step, training.position)
        if not _are_equal(present, copy):
            training.auxiliary.apply(copy.json, copy.tensors)


def _are_equal(present: BoundaryCopy, copy: BoundaryCopy) -> bool:
    if present.json != copy.json or present.tensors.keys() != copy.tensors.keys():
        return False
    return all(torch.equal(tensor, copy.tensors[n]) for n, tensor in present.tensors.items())


class Loops:
    """Runs the loops of one generation on one rank."""

    def __init__(
        self,
        link: AgentClient,
        groups: ProcessGroups | None,
        comparison: Comparison,
        work: BatchWork,
    ) -> None:
        """Begins before the first loop.

        Args:
            link: The client of the agent.
            groups: The process groups; None for one process alone.
            comparison: Compares what the ranks' scripts give for a loop.
            work: Carries out the script's calls for each global batch.
        """
        self._comparison = comparison
        self._work = work
        self._tracker = work.tracker
        self._link = link
        self._groups = groups
        self._datasets = Datasets()
        self._passed = PassedLoops()
        self.islands: IslandTraining | None = None
        """Brings the rounds of islands into the loop; None: there are none."""
        self._epoch: int | None = None
        self._noted = self._noted_norms = False
        """True once `AGAIN_NEW` is printed; once it is known whether the model has a BatchNorm."""

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
        limits = (training.position.micro_batch, self._link.assignment.micro_batch)
        return min((size for size in limits if size is not None), default=None)

    def run(
        self,
        training: TrainingState,
        schedule: RankSchedule,
        reader: BatchReader | StreamReader,
        on_epoch_end: Callable[[], object] | None,
    ) -> Iterator[Any]:
        """Yields the micro-batches of the next loop, from the present position to its end.

        Args:
            training: The training state.
            schedule: What this rank computes of the loop.
            reader: Reads the dataset.
            on_epoch_end: The script's function; None: it gave none.

        Raises:
            UserError: No loop may begin here, or the loop differs from that of other ranks.
        """
        if self._link.assignment.deterministic and schedule.virtual_batch is None:
            raise UserError(
                "--deterministic sums gradients slice by slice: give session.batches "
                "virtual_batch=, the number of samples in a slice"
            )
        self._tracker.now.check_new_loop()
        training.finish_pending_step()
        schedule = self._with_shares(training, self._in_this_world(schedule))
        if self.islands is not None:
            schedule = self.islands.schedule(schedule, on_epoch_end)
        elif training.position.island is not None:
            self._leave_islands(training, schedule)
        loop = self._tracker.move(StepState.next_loop).loop
        dataset = self._datasets.number(reader.dataset)
        order = schedule.plan.order
        renewed = self._datasets.looks_recreated(reader.dataset, tuple(order.inputs))
        if self._epoch is None:
            self._epoch = training.position.epoch
        if loop < training.position.loop:
            self._epoch = training.position.epoch
            self._passed.pass_one(training)
            return
        self._passed.end(training)
        training.auxiliary.set_generators()
        if renewed and order.shuffle and self._link.assignment.rank == 0:
            self._note_new_dataset()
        self._note_batch_norms(training, schedule)
        if training.stopped is None:
            training.agree_to_stop(Call.LOOP)
        if training.stopped is not None:
            return
        if training.probe is not None:
            sliced = schedule.virtual_batch is not None
            training.probe.begin(training.step, virtual_batch=sliced)
        self._tracker.move(StepState.enter)
        before, position = training.position, self._start(training, schedule, loop, dataset)
        position = replace(position, first_world=position.first_world or schedule.first_world)
        if schedule.micro_batch == "auto":
            position = replace(position, micro_batch=schedule.micro_batch_limit)
        training.begin_loop(position)
        training.come_in()
        # Other data follow the end of an epoch.
        if before.loop == loop and position.epoch > before.epoch:
            self._epoch = before.epoch
            training.end_epoch(EpochEnd(on_epoch_end, position))
        self._end_epoch_if_over(training, schedule, on_epoch_end)
        if training.stopped is None:
            yield from self._batches(training, schedule, reader, on_epoch_end, loop)

    def _start(
        self, training: TrainingState, schedule: RankSchedule, loop: int, dataset: int
    ) -> DataPosition:
        """Returns where the loop begins or goes on; all ranks call this together.

        Args:
            training: The training state.
            schedule: What this rank computes of the loop.
            loop: Number of the loop.
            dataset: Number of its dataset object.

        Raises:
            UserError: A change is not allowed, or the ranks differ.
        """
        plan, before, assignment = schedule.plan, training.position, self._link.assignment
        goes_on = before.loop == loop
        needed = needed_changes(plan, before) if goes_on else ()
        allowed = assignment.allow_data_change
        described = of_loop(schedule, loop, assignment, allowed if needed else ())
        self._comparison.require_equal(Call.LOOP, described)
        self._comparison.begin_loop(in_any_world(described, schedule))
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
        """Ends the epoch of the present position if no global batch of it is left.

        Args:
            training: The training state.
            schedule: What this rank computes of the loop.
            on_epoch_end: The script's function; None: it gave none.
        """
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
        loop: int,
    ) -> Iterator[Any]:
        """Yields the micro-batches of a loop, with a boundary before each global batch.

        Args:
            training: The training state.
            schedule: What this rank computes of the loop.
            reader: Reads the dataset.
            on_epoch_end: The script's function; None: it gave none.
            loop: Number of the loop.
        """
        tracker, work, islands = self._tracker, self._work, self.islands
        schedule = self._without_left_out(schedule, training.position.dataset)
        plan = schedule.plan
        data = self._open(training, schedule, reader)
        work.open_loop(plan, _slice_states(training, schedule), whole=schedule.whole_parts)
        balancer = self._balancer(schedule)
        try:
            # What a stream has left may be known only now, and be too little for a larger batch.
            self._end_epoch_if_over(training, schedule, on_epoch_end)
            after = training.position
            while (following := plan.next(after)) is not None or islands is not None:
                training.at_boundary()
                if training.stopped is not None:
                    break
                if islands is not None:
                    following = islands.at_boundary(training, self._note_epoch)
                if following is None:
                    training.at_boundary(last=True)
                    break
                if (placed := self._in_this_world(schedule)) is not schedule:
                    schedule = placed
                    data = data.in_world(schedule, self._start_again(training, schedule))
                    balancer = self._balancer(schedule)
                    # Ranks that have come in know what the stream's readers say now, and no more.
                    following = plan.next(training.position) or following
                batch, after = following
                self._tell_shares(training, balancer.agree(after.steps))
                self._epoch, ends = after.epoch, plan.ends_epoch(after)
                training.begin_step(
                    after, EpochEnd(on_epoch_end, plan.wrapped(after)) if ends else None
                )
                self._begin_batch(data, batch, after)
                if batch in schedule.left_out:
                    training.pass_over()
                    continue
                parts = schedule.parts(batch, after.steps)
                for part in parts:
                    yield self._next_samples(training, schedule, data, part)
                    tracker.move(lambda state: state.before_next(loop))
                balancer.note(after.steps, sum(p.weight for p in parts), work.clock.seconds)
                work.report(training)
            else:
                training.at_boundary(last=True)
        except GeneratorExit:
            place = place_of(sys._getframe())
            tracker.move(lambda state: state.leave(loop, place))
            raise
        finally:
            state = tracker.move(lambda state: state.close(loop))
            data.close()
            if not state.in_loop:  # else another loop runs, and tells of itself
                work.report(training)
                self._link.send(LoopExited())
        work.end_loop(loop)

    def _note_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def _open(
        self,
        training: TrainingState,
        schedule: RankSchedule,
        reader: BatchReader | StreamReader,
    ) -> OpenBatches:
        """Returns the micro-batches of a loop; those of an island follow what the rounds give it.

        Args:
            training: The training state.
            schedule: What this rank computes of the loop.
            reader: Reads the dataset.
        """
        if self.islands is None:
            return reader.open(schedule, training.position)
        return self.islands.open(training, schedule, reader)

    def _next_samples(
        self,
        training: TrainingState,
        schedule: RankSchedule,
        data: OpenBatches,
        part: MicroBatch,
    ) -> Any:
        """Returns the samples of the next micro-batch, for which training may have to wait.

        Args:
            training: The training state.
            schedule: What this rank computes of the loop.
            data: The open batches.
            part: The micro-batch.
        """
        began_s = time.monotonic()
        samples = next(data)
        waited_s = time.monotonic() - began_s
        self._work.give(training, part, halved=schedule.halved(part), waited_s=waited_s)
        return samples

    def _begin_batch(self, data: OpenBatches, batch: GlobalBatch, after: DataPosition) -> None:
        """Begins a global batch, whose data may have to be waited for.

        Args:
            data: The open batches.
            batch: The global batch.
            after: The position after it.
        """
        self._work.begin(batch)
        data.look_ahead(batch, after)
        clock = self._work.clock
        clock.waited(time.monotonic() - clock.began_s)

    def _in_this_world(self, schedule: RankSchedule) -> RankSchedule:
        """Returns the schedule as this rank has it in the present world, which may have been
        entered since the loop began: the same object if not."""
        a = self._link.assignment
        if (schedule.rank, schedule.world_size) == (a.rank, a.world_size):
            return schedule
        shares = None if schedule.shares is None else ShareTable()
        return replace(schedule, rank=a.rank, world_size=a.world_size, shares=shares)

    def _with_shares(self, training: TrainingState, schedule: RankSchedule) -> RankSchedule:
        """Returns the schedule with a table of shares, where these are to follow ranks' speeds.

        Those of a stream's readers do not, nor slices, whose number is the same on all ranks; and
        with zero3 a rank does not know its own time.
        """
        balances = self._link.assignment.on_straggler == "balance" and self._groups is not None
        is_known = training.strategy.tells_waits and schedule.virtual_batch is None
        if not balances or not is_known or not isinstance(schedule.plan, BatchPlan):
            return schedule
        return replace(schedule, shares=ShareTable())

    def _tell_shares(self, training: TrainingState, text: str | None) -> None:
        """Sends a line on other shares of the ranks to the agent of rank 0; None: they are the
        same."""
        if text is not None and self._link.assignment.rank == 0:
            self._link.send(SharesChanged(step=training.step, message=text))

    def _balancer(self, schedule: RankSchedule) -> Balancer:
        """Returns what has the ranks of this world agree on their shares, where they have a
        table of them."""
        exchange = self._groups.exchange if self._groups is not None else _alone
        return Balancer(exchange, schedule.shares, self._link.assignment)

    def _start_again(self, training: TrainingState, schedule: RankSchedule) -> DataPosition:
        """Returns where the data go on in a world that was entered inside of the loop. A stream's
        plan begins anew with what the position says, as in a generation of its own.

        Args:
            training: The training state.
            schedule: What this rank computes of the loop in that world.
        """
        at, allowed = training.position, self._link.assignment.allow_data_change
        return schedule.plan.start(at, at.loop, at.dataset, allowed)

    def _without_left_out(self, schedule: RankSchedule, dataset: int) -> RankSchedule:
        """Returns the schedule that leaves out the batches of this dataset that are to be."""
        batches = [
            GlobalBatch(epoch=batch.epoch, start=batch.start, stop=batch.stop)
            for batch in self._link.assignment.left_out
            if batch.dataset == dataset
        ]
        return replace(schedule, left_out=frozenset(batches))

    def _note_batch_norms(self, training: TrainingState, schedule: RankSchedule) -> None:
        """Prints, once in a job, that statistics of batches depend on the world size, as they do
        where these are not cut into slices."""
        assignment = self._link.assignment
        is_first = assignment.rank == 0 and assignment.resume.tier == "fresh"
        if self._noted_norms or not is_first or self._groups is None or schedule.virtual_batch:
            return
        self._noted_norms = True
        if (note := batch_norm_note(training.strategy.model, self._groups.device)) is not None:
            log.info(note)

    def _leave_islands(self, training: TrainingState, schedule: RankSchedule) -> None:
        """Goes on from the state of an island without islands."""
        training.position, text = without_islands(training.position, schedule.plan)
        if self._link.assignment.rank == 0:
            log.warning("training goes on without islands, %s", text)

    def _note_new_dataset(self) -> None:
        if not self._noted:
            self._noted = True
            log.warning(AGAIN_NEW)


def _alone(message: bytes) -> list[bytes]:
    """Returns what one process alone has from all ranks."""
    return [message]


def _slice_states(training: TrainingState, schedule: RankSchedule) -> SliceStates | None:
    """Returns the state of a loop's slices; None: its global batches are not cut."""
    if schedule.virtual_batch is None:
        return None
    seed, dataset = schedule.plan.order.seed, training.position.dataset
    return SliceStates(seed, dataset, training.auxiliary.buffers)
