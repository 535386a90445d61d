"""Tracks what the script has done of a global batch, and refuses calls out of turn."""

from __future__ import annotations

import time

from elasticzero.data.position import DataPosition, GlobalBatch, LoopPlan, MicroBatch
from elasticzero.errors import UserError
from elasticzero.step_clock import StepClock


class StepProgress:
    """Tracks the global batch and micro-batch that the script works on."""

    def __init__(self, plan: LoopPlan | None = None, *, on_gpu: bool = False) -> None:
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
        return self.plan.indices(self.batch)

    def total(self, step: int, after: DataPosition) -> int:
        """Returns the steps of the whole run if this loop is its last, and 0 if that is unknown.

        after: the position after `step`.
        """
        left = self.plan.steps_from(after) if self.plan is not None else None
        return step + left if left is not None else 0


def _listed(only: tuple[str, ...] | None) -> str:
    return "None" if only is None else repr(only[0] if len(only) == 1 else list(only))
