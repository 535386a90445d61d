"""Carries out what a script does with a global batch: `session.backward` and `session.step`."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection

import torch
from torch import Tensor

from elasticzero.comm.gather import Contribution, gather_rows
from elasticzero.comm.process_group import ProcessGroups
from elasticzero.data.position import DataPosition, GlobalBatch, LoopPlan, MicroBatch
from elasticzero.data.seeding import seed_generators
from elasticzero.data.slices import Use, slice_seed
from elasticzero.errors import UserError
from elasticzero.ipc.agent_client import AgentClient
from elasticzero.ipc.messages import Stepped
from elasticzero.parallel.gradients import GradientFunction, GradientHook
from elasticzero.parallel.optimizers.groups import Optimizers
from elasticzero.parallel.optimizers.script_optimizers import OutsideParameters
from elasticzero.rank_groups import same_number
from elasticzero.state.buffers import BufferCopy, ModelBuffers
from elasticzero.step_clock import StepClock
from elasticzero.torch_internals.tensors import is_sum_over
from elasticzero.training.step_machine import StepEvent, StepPhase, StepState
from elasticzero.training.step_tracker import StepTracker
from elasticzero.training.training_state import TrainingState

log = logging.getLogger(__name__)

SUM_OF_SAMPLES = (
    "the loss is a sum over the samples of a rank's micro-batch, but session.backward takes it for "
    "their mean, so that another number of ranks gives another gradient: give it the mean, times "
    "global_batch if a sum is meant, or weight= for another divisor than the number of samples"
)


class SliceStates:
    """Sets the state in which a rank computes the slices of a loop with `virtual_batch=`.

    Random generators are seeded for each slice. Each slice begins with the buffers of the boundary
    before its global batch, and those that the first slice leaves are the next boundary's: rank 0
    always computes that one, and its buffers are broadcast. Where that slice has no samples, the
    buffers stay as they are.
    """

    def __init__(self, seed: int, dataset: int, buffers: ModelBuffers) -> None:
        """Keeps no buffers yet.

        Args:
            seed: The loop's seed.
            dataset: The number of its dataset object.
            buffers: The model's buffers, which each slice starts with as they were at the
                boundary.
        """
        self._seed = seed
        self._dataset = dataset
        self._buffers = buffers
        self._kept = BufferCopy()
        """The buffers after the first slice."""

    def begin(self, batch: GlobalBatch, part: MicroBatch, boundary: BufferCopy) -> None:
        """Prepares for a slice.

        Args:
            batch: The global batch.
            part: The micro-batch that is the slice.
            boundary: The buffers of the boundary before the batch.
        """
        self._buffers.put(boundary)
        if part.slice == 0 and not part.weight:
            self._keep()
        self._seed_for(batch, part.positions.start, "compute")

    def end(self, batch: GlobalBatch, part: MicroBatch) -> None:
        """Takes the buffers of the first slice, and gives them back after the last one."""
        if part.slice == 0 and part.weight:
            self._keep()
        if part.last:
            self._buffers.put(self._kept)
            self._kept = BufferCopy()
            self._seed_for(batch, batch.start, "after")

    def _keep(self) -> None:
        self._kept = self._buffers.copy()

    def _seed_for(self, batch: GlobalBatch, start: int, use: Use) -> None:
        seed_generators(slice_seed(self._seed, self._dataset, batch.epoch, start, use))


class BatchWork:
    """Computes and applies the gradient of one global batch at a time, as the script calls."""

    def __init__(
        self,
        link: AgentClient,
        groups: ProcessGroups | None,
        tracker: StepTracker,
        *,
        on_gpu: bool,
    ) -> None:
        """Starts outside of a loop.

        Args:
            link: The client of the agent.
            groups: The process groups; None for one process alone.
            tracker: The state of the step, which the calls move.
            on_gpu: Whether batches are on a GPU.
        """
        self.tracker = tracker
        self.clock = StepClock(on_gpu=on_gpu)
        """Measures the times of the global batch."""
        self._link = link
        self._groups = groups
        self._plan: LoopPlan | None = None
        self._slices: SliceStates | None = None
        """The state of the slices of the loop that runs; None: it has none."""
        self._hook: GradientHook | None = None
        """Is called with the gradients of each step; None: the script gave no function."""
        self._whole = False
        """True if a rank's part of a global batch is one micro-batch in every world."""
        self._contribution = Contribution()
        """Says whether the micro-batch's loss counts, for what it has gathered."""
        self._outside: OutsideParameters | None = None
        """Knows what the first loss reaches besides the model; None: there was no loss, or there is
        one process."""
        self._has_looked_for_sum = False
        """True once it is known whether the first loss is a sum over samples."""
        self._unsent: Stepped | None = None
        """The newest step, which the agent has not been sent yet."""

    def open_loop(self, plan: LoopPlan, slices: SliceStates | None, *, whole: bool) -> None:
        """Begins with the global batches of a loop.

        Args:
            plan: The loop's plan.
            slices: The state of its slices; None: its global batches are not cut.
            whole: Whether a rank's part of a global batch is one micro-batch in every world.
        """
        self._plan, self._slices, self._whole = plan, slices, whole
        self.tracker.record(StepEvent.OPEN)

    def end_loop(self, loop: int) -> None:
        """Drops what loop number `loop` needed, which has come to its end."""
        state = self.tracker.move(lambda state: state.end(loop))
        if state.loop == loop:
            self._plan = self._slices = None

    def begin(self, batch: GlobalBatch) -> None:
        """Begins a global batch."""
        self.tracker.move(lambda state: state.begin(batch))
        self.clock.reset()

    def give(
        self, training: TrainingState, part: MicroBatch, *, halved: int | None, waited_s: float
    ) -> None:
        """Prepares for the micro-batch that the script is given next.

        Args:
            training: The training state.
            part: The micro-batch.
            halved: Half of its samples, where that is to be tried if memory is short.
            waited_s: Time in seconds for which training waited for its samples.
        """
        state = self.tracker.move(lambda state: state.give(part, halved))
        self.clock.waited(waited_s)
        self.clock.start()
        training.strategy.expect(part)
        if training.probe is not None and self._plan is not None and state.batch is not None:
            training.probe.give(self._plan, state.batch, part)
        self._contribution = Contribution()
        if self._slices is not None:
            assert state.batch is not None
            self._slices.begin(state.batch, part, training.boundary_copy().buffers)

    def gather(self, rows: Tensor) -> Tensor:
        """Returns the rows that all ranks give for their part of the global batch, in its order.

        Raises:
            UserError: The call is out of turn, or the part is several micro-batches, here or in
                another world, or ranks give different tensors.
        """
        part = self.tracker.now.part
        if part is None:
            raise UserError(
                "session.gather is called inside the loop over session.batches, for the rows of a "
                "micro-batch, and before session.step()"
            )
        if not self._whole:
            raise UserError(
                "session.gather needs each rank's part of a global batch to be one micro-batch in "
                "every world: leave out micro_batch= and virtual_batch=, and give session.batches "
                "the dataset itself in place of a DataLoader, which has a micro_batch"
            )
        if not rows.dim():
            raise UserError("session.gather takes a tensor with rows, of the samples, not a number")
        if part.weight == 0:
            rows = rows[:0]  # of a filler
        if self._groups is None:
            return rows
        return gather_rows(rows, self._groups, self._contribution)

    def indices(self) -> list[int]:
        """Returns the dataset indices of the whole global batch."""
        batch = self.tracker.now.batch
        if batch is None or self._plan is None:
            raise UserError(
                "session.batch_indices exists only inside the loop over session.batches"
            )
        return self._plan.indices(batch)

    def backward(
        self,
        training: TrainingState,
        loss: Tensor,
        weight: float | Tensor | None,
        only: str | Collection[str] | None,
    ) -> None:
        """Carries out `session.backward`.

        Args:
            training: The training state.
            loss: The micro-batch's mean loss: one number.
            weight: The divisor of the mean; None: the micro-batch's number of samples.
            only: Names of the optimizers whose parameters get gradients; None: all.

        Raises:
            UserError: The loss has another shape, or the call is out of turn.
        """
        optimizers = training.strategy.optimizers
        names = optimizers.named(only)
        is_another_turn = self.tracker.now.phase is StepPhase.ENDED
        is_begun_again = self.tracker.now.phase is StepPhase.BACKWARD
        state = self.tracker.move(lambda state: state.backward(names))
        if is_another_turn:
            self.clock.start()
        batch, part = _work_of(state)
        if loss.numel() != 1:
            raise UserError(f"the loss has shape {tuple(loss.shape)}; it must be one number")
        self._link.check()
        is_of_world = weight is None and part.slice is None and part.weight > 1
        if is_of_world and not self._has_looked_for_sum:
            self._has_looked_for_sum = True
            if is_sum_over(loss, part.weight):
                log.warning(SUM_OF_SAMPLES)
        amount = float(part.weight if weight is None else weight)
        if part.weight == 0 or amount == 0:
            amount = 0.0
        self._contribution.counts = amount != 0
        script_weight = None if weight is None else amount
        self.tracker.move(lambda state: state.weighing(script_weight))
        training.begin_backward()
        self._require_equal_only(optimizers)
        training.gradients.show()
        if state.parts == 1 and not is_begun_again:
            training.gradients.require_none()
        scale = training.strategy.residual.scale = training.guard.scale
        if self._groups is not None and self._outside is None:
            self._outside = OutsideParameters(training.strategy.model, loss)
        training.strategy.backward(loss, amount / len(batch) * scale, names)
        training.gradients.hide(complete=part.last and weight is None and scale == 1.0)
        self.tracker.record(StepEvent.BACKWARD_OVER)

    def on_gradients(self, training: TrainingState, function: GradientFunction) -> GradientHook:
        """Carries out `session.on_gradients`, which describes the function and the result."""
        if self._hook is not None:
            raise UserError("session.on_gradients was called twice: give it one function")
        self._hook = GradientHook(function, lambda: training.step_count)
        return self._hook

    def step(
        self,
        training: TrainingState,
        max_norm: float | None,
        only: str | Collection[str] | None,
    ) -> bool:
        """Carries out `session.step`.

        Args:
            training: The training state.
            max_norm: Limit of the norm of the whole gradient; None: no limit.
            only: Names of the optimizers that are stepped; None: all.

        Returns:
            True if the micro-batch was its global batch's last, and the step is applied.
        """
        names = training.strategy.optimizers.named(only)
        state = self.tracker.move(lambda state: state.step(names))
        self.clock.stop()
        batch, part = _work_of(state)
        if self._slices is not None:
            self._slices.end(batch, part)
        if not part.last:
            return False
        self._link.check()
        training.gradients.show(before_step=True)
        if not training.at.counted:  # else optimizers have stepped since the boundary
            training.values.learn()
        training.take_changes()
        factor = self._weight_factor(batch, part) / training.guard.scale
        self._finish(training, factor, max_norm)
        training.values.learn_compared(training.strategy.changed_names())
        applied = training.apply()
        self._record_step(training, batch)
        return applied

    def _finish(self, training: TrainingState, factor: float, max_norm: float | None) -> None:
        """Completes the gradients of a step.

        Args:
            training: The training state.
            factor: What the gradients are multiplied by.
            max_norm: The limit of their norm; None: there is none.
        """
        strategy, probe = training.strategy, training.probe
        if probe is None:
            strategy.finish(factor, max_norm, self._hook)
            return
        hook = probe.hook(self._hook, training.step_under_way)
        strategy.finish(factor, max_norm, hook)
        probe.complete(strategy.norm, strategy.loss)

    def _require_equal_only(self, optimizers: Optimizers) -> None:
        """Raises `UserError` unless this backward is for the same optimizers on all ranks, which
        call this together once one was for some of them."""
        groups, state = self._groups, self.tracker.now
        if groups is None or not state.names_optimizers:
            return
        only = state.only
        bits = [1 << i for i, name in enumerate(optimizers.by_name) if only is None or name in only]
        number = sum(bits) % same_number.MODULUS
        pair = torch.tensor(same_number.with_square(number), dtype=torch.float64)
        total, squares = groups.sum(pair).tolist()
        if not same_number.is_same(number, groups.rank_info.world_size, (total, squares)):
            raise UserError(
                "ranks gave session.backward different only= in one turn; rank "
                f"{groups.rank_info.rank} gave {only!r}: let what decides on it be the same on all "
                "ranks, such as the step or a loss that is summed over them"
            )

    def _weight_factor(self, batch: GlobalBatch, part: MicroBatch) -> float:
        """Returns the factor from a mean over samples to a mean over the script's weights."""
        if (weights := self.tracker.now.weights) is None:
            return 1.0
        table = torch.zeros(max(1, part.slices), dtype=torch.float64)
        for index, weight in weights.items():
            table[index] = weight
        if self._groups is not None:
            table = self._groups.sum(table)
        total = math.fsum(table.tolist())
        if total <= 0:
            raise UserError(f"the weights of a global batch sum to {total:g}; it must be positive")
        return len(batch) / total

    def _record_step(self, training: TrainingState, batch: GlobalBatch) -> None:
        """Reports a global batch that was applied or skipped; where the script steps some of its
        optimizers, and may step others, once it comes back for more."""
        now_s, clock = time.monotonic(), self.clock
        self._unsent = Stepped(
            step=training.step,
            at_s=now_s,
            step_s=now_s - clock.began_s,
            data_wait_s=clock.data_wait_s,
            samples=len(batch),
            total=self._steps_in_all(training.step, training.next_position),
            gradient_norm=training.gradient_norm,
            compute_s=clock.seconds,
            held=training.stager.held_step,
            wire_bytes=training.strategy.traffic.counts,
        )
        if self.tracker.now.only is None:
            self.report(training)

    def _steps_in_all(self, step: int, after: DataPosition) -> int:
        """Returns the steps of the whole run if this loop is its last, and 0 if that is unknown.

        Args:
            step: Number of global batches that are applied or skipped.
            after: The position after `step`.
        """
        left = self._plan.steps_from(after) if self._plan is not None else None
        return step + left if left is not None else 0

    def report(self, training: TrainingState) -> None:
        """Sends the agent the newest step, unless that is done."""
        stepped, self._unsent = self._unsent, None
        if stepped is not None:
            training.stager.stepped(stepped.step_s)
            self._link.send(stepped)


def _work_of(state: StepState) -> tuple[GlobalBatch, MicroBatch]:
    """Returns the global batch and the micro-batch that a call is about."""
    assert state.batch is not None
    assert state.part is not None
    return state.batch, state.part
