"""Decides whether the step of a global batch is applied, and chooses the loss scale of fp16. Pure.

Rules:
 Q1  All ranks decide from numbers that are equal on all of them: the norm of the whole gradient,
     which is NaN where a loss of any rank is not finite, and the mean loss of the global batch.
 Q2  With a loss scale, a norm that is not finite halves the scale and skips the batch. At the scale
     MIN_SCALE rule Q3 decides instead. GROWTH_STEPS applied steps in a row double the scale.
 Q3  Otherwise `--on-nonfinite` says what becomes of a norm that is not finite.
 Q4  `--on-spike` says what becomes of a loss that is more than K standard deviations above the mean
     of the last N applied steps, once there are N. The deviation counts as SMALLEST_DEVIATION of
     the mean at least, so that a loss that hardly varies has no spikes.
 Q5  Where MOST_SKIPPED batches in a row were skipped, or MOST_ROLLED_BACK for a rollback, training
     stops.
 Q6  A rollback ends the generation, and hands no state over. The next one begins, as after a lost
     worker, from the newest state that memory holds whole, or from the newest checkpoint if that is
     newer; so nothing that is committed is undone. The batch is in `left_out` of every `world` from
     then on, until a state that a generation begins from records it. Training passes over it
     without a forward, and records it as skipped. A generation that began without it (all agents
     that knew of it were lost) meets the batch again, and rolls back again. A rollback is no
     failure: it does not count against --max-restarts.
Invariant: a batch is applied on all ranks or on none, and one that is skipped or left out is
recorded in the position in the data.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any, Literal

from elasticzero.options.settings import OnNonFinite, SpikeLimit

FIRST_SCALE = 2.0**16
MIN_SCALE, MAX_SCALE = 1.0, 2.0**24
GROWTH_STEPS = 2000
"""Number of applied steps in a row after which the loss scale doubles."""
SMALLEST_DEVIATION = 0.01
"""Smallest standard deviation that counts, as a share of the mean loss."""
MOST_SKIPPED = 100
"""Maximum number of batches in a row that are skipped."""
MOST_ROLLED_BACK = 10
"""Maximum number of batches in a row that are left out or skipped before one is rolled back: the
held state itself is then likely to be bad."""


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """Says what becomes of a global batch."""

    action: Literal["apply", "skip", "rollback", "stop"]
    reason: str = ""
    """Completes "step 30 was not applied: …"; empty: the numbers that are not finite do."""


APPLY = StepVerdict("apply")


class StepGuard:
    """Judges the global batches of one generation on one rank."""

    def __init__(
        self,
        on_nonfinite: OnNonFinite = "stop",
        on_spike: SpikeLimit | None = None,
        *,
        scales: bool = False,
    ) -> None:
        """Begins without a step.

        Args:
            on_nonfinite: What becomes of a norm that is not finite (Q3).
            on_spike: What becomes of a loss far above the mean (Q4); None: losses are not watched.
            scales: Whether losses are scaled, as gradients in fp16 need it.
        """
        self._on_nonfinite = on_nonfinite
        self._on_spike = on_spike
        self._scales = scales
        self.scale = FIRST_SCALE if scales else 1.0
        """Factor of the losses, and so of the gradients until their sum over the ranks."""
        self._good_steps = self._in_a_row = 0
        """Steps applied since the scale has changed, and batches skipped since the last step."""
        self._losses: deque[float] = deque(maxlen=on_spike.steps if on_spike else 0)

    @property
    def keeps_state(self) -> bool:
        """Returns whether something of this is part of the training state."""
        return self._scales or self._on_spike is not None or self._on_nonfinite != "stop"

    def judge(self, norm: float, loss: float) -> StepVerdict:
        """Returns what becomes of a global batch; changes the scale and what is recorded.

        Args:
            norm: Norm of the whole gradient, without the scale.
            loss: Mean loss over the global batch.
        """
        if not math.isfinite(norm):
            verdict = self._of_nonfinite()
        elif self._on_spike is None or not (reason := self._spike(loss, self._on_spike)):
            self._applied(loss)
            return APPLY
        else:
            verdict = StepVerdict(self._on_spike.action, reason)
        self._in_a_row += 1
        if verdict.action == "stop":
            return verdict
        most = MOST_SKIPPED if verdict.action == "skip" else MOST_ROLLED_BACK
        if self._in_a_row > most:
            return StepVerdict("stop", f"{most} batches before it were skipped")
        return verdict

    def passed_over(self) -> None:
        """Records that a batch was left out (Q6)."""
        self._in_a_row += 1

    def _of_nonfinite(self) -> StepVerdict:
        """Decides on a norm that is not finite, by the loss scale or `--on-nonfinite` (Q2, Q3)."""
        self._good_steps = 0
        if self._scales and self.scale > MIN_SCALE:
            self.scale /= 2
            return StepVerdict(
                "skip", f"a gradient overflows; the loss scale is now {self.scale:g}"
            )
        if self._on_nonfinite == "stop":
            return StepVerdict("stop")
        return StepVerdict(self._on_nonfinite, "a loss or a gradient is NaN or infinite")

    def _spike(self, loss: float, limit: SpikeLimit) -> str:
        """Returns a description of a loss that is far above the mean (Q4); empty: it is not."""
        if len(self._losses) < limit.steps:
            return ""
        mean = fmean(self._losses)
        deviation = max(pstdev(self._losses, mean), SMALLEST_DEVIATION * abs(mean))
        if loss <= mean + limit.deviations * deviation:
            return ""
        return (
            f"its loss {loss:.4g} is more than {limit.deviations:g} standard deviations of "
            f"{deviation:.3g} above {mean:.4g}, the mean of the last {limit.steps} steps"
        )

    def _applied(self, loss: float) -> None:
        self._in_a_row = 0
        if self._on_spike is not None:
            self._losses.append(loss)
        if self._scales:
            self._good_steps += 1
            if self._good_steps == GROWTH_STEPS:
                self.scale, self._good_steps = min(2 * self.scale, MAX_SCALE), 0

    def state_dict(self) -> dict[str, Any]:
        """Returns what is part of the training state, equal on all ranks."""
        scaling = {"scale": self.scale, "good_steps": self._good_steps} if self._scales else {}
        losses = {"losses": list(self._losses)} if self._on_spike is not None else {}
        return {**scaling, **losses, "in_a_row": self._in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over stored state; what an earlier run did not keep stays as it is."""
        if self._scales and "scale" in state:
            self.scale, self._good_steps = state["scale"], state["good_steps"]
        self._losses.extend(state.get("losses", ()))
        self._in_a_row = state.get("in_a_row", 0)
