"""Defines the state of a rank's work on a global batch, and every transition of it. Pure.

The state has four parts, each an enum, and one table (`TRANSITIONS`) moves them:

 StepPhase      how far the script has come with the micro-batch that it was given.
 StepOutcome    what has become of the global batch since the last boundary.
 StepCondition  whether parameters and optimizer state are those of the last boundary.
 LoopPart       whether the script is inside of a loop over `session.batches`.

Where the table has a sentence for an event, the script made a call out of turn: `StepState.after`
raises `UserError` with it, and the state stays as it is. An event that the table does not list for
a part leaves that part as it is. What a call must not differ in from the calls before it, such as
`only=`, is no matter of the table: the method that is named like the call refuses it. After a step
`session.backward(only=…)` is another turn with the same global batch (`StepEvent.TURN`), so that
GANs train two optimizers in one step.

Invariant: the optimizers change parameters only in a global batch whose last micro-batch has ended,
and what is counted since the last boundary (`StepOutcome`) is never taken for its state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from elasticzero.data.position import GlobalBatch, MicroBatch
from elasticzero.errors import UserError


class _Member(Enum):
    """Is hashed by identity: an enum's own hash runs in Python, dozens of times a step."""

    __hash__ = object.__hash__


class StepPhase(_Member):
    """Says how far the script has come with its micro-batch."""

    BETWEEN = auto()
    """It has none: between two global batches, or outside of a loop."""
    FORWARD = auto()
    """It was given one, and has not computed its gradient."""
    BACKWARD = auto()
    """The backward of it has begun; if it fails, it may be begun again."""
    BACKWARD_DONE = auto()
    """The gradient of it is added to that of the global batch."""
    ENDED = auto()
    """`session.step` was called for it."""


class StepOutcome(_Member):
    """Says what has become of the global batch since the last boundary."""

    OPEN = auto()
    """No optimizer was stepped with it, and it is not left out."""
    SKIPPED = auto()
    """It counts, and no optimizer was stepped with it."""
    APPLIED = auto()
    """It counts, and an optimizer was stepped with it."""


class StepCondition(_Member):
    """Says whether parameters and optimizer state are those of the last boundary."""

    UNLOADED = auto()
    """The state that the generation starts from is not loaded."""
    CLEAN = auto()
    """Parameters and optimizer state are those of the last boundary."""
    CHANGING = auto()
    """An optimizer takes its step."""
    TORN = auto()
    """Parameters and optimizer state are those of no boundary, or of one that is not known to be
    right."""


class LoopPart(_Member):
    """Says where the script is."""

    OUTSIDE = auto()
    INSIDE = auto()


class StepEvent(_Member):
    """Lists what happens to a step: calls of the script, and what the session does for them."""

    BATCHES = auto()
    """`session.batches` is iterated for the first time."""
    BEGIN = auto()
    """A global batch begins."""
    GIVE = auto()
    """The loop gives a micro-batch."""
    LOOK = auto()
    """`session.micro_batch` is read."""
    TURN = auto()
    """`session.backward(only=…)` is called for other optimizers, or the same."""
    BACKWARD = auto()
    """`session.backward` is called."""
    WEIGH = auto()
    """The loss is valid, and its gradient is computed."""
    BACKWARD_OVER = auto()
    """The gradient is computed."""
    STEP = auto()
    """`session.step` is called."""
    NEXT = auto()
    """The script asks the loop for the next micro-batch."""
    CHANGE = auto()
    """The optimizers begin to step."""
    APPLIED = auto()
    """The optimizers have stepped."""
    TEAR = auto()
    """The global batch is skipped or rolled back, or the ranks' states differ."""
    SKIPPED = auto()
    """The global batch is left out."""
    LOADED = auto()
    """The state that the generation starts from is in place."""
    KEPT = auto()
    """The state proves to be that of the boundary after all."""
    REACH = auto()
    """A boundary is reached."""
    BOUNDARY = auto()
    """The state of the boundary is whole."""
    OPEN = auto()
    """The loop begins to give micro-batches."""
    CLOSE = auto()
    """The loop has ended, or was left."""
    FORGET = auto()
    """The loop has ended by itself, so that the script has no global batch any more."""


def _once(call: str) -> str:
    return (
        f"session.{call} is called once for each micro-batch, inside the loop over session.batches"
    )


_NO_BACKWARD = "session.backward(loss) was not called before session.step()"
_NO_STEP = (
    "session.step() was not called for this micro-batch; call session.backward(loss) and "
    "session.step() for each, also for those where step() returns False. To accumulate gradients, "
    "give session.batches the whole global_batch= and micro_batch=, and divide no loss"
)

Part = StepPhase | StepOutcome | StepCondition | LoopPart

TRANSITIONS: Mapping[tuple[Part, StepEvent], Part | str] = {
    # The micro-batch in the script's hands.
    **{(phase, StepEvent.BATCHES): StepPhase.BETWEEN for phase in StepPhase},
    **{(phase, StepEvent.REACH): StepPhase.BETWEEN for phase in StepPhase},
    **{(phase, StepEvent.FORGET): StepPhase.BETWEEN for phase in StepPhase},
    **{(phase, StepEvent.BEGIN): StepPhase.BETWEEN for phase in StepPhase},
    (StepPhase.BETWEEN, StepEvent.GIVE): StepPhase.FORWARD,
    (StepPhase.BETWEEN, StepEvent.LOOK): _once("micro_batch"),
    (StepPhase.BETWEEN, StepEvent.BACKWARD): _once("backward"),
    (StepPhase.BETWEEN, StepEvent.STEP): _once("step"),
    (StepPhase.FORWARD, StepEvent.WEIGH): StepPhase.BACKWARD,
    (StepPhase.FORWARD, StepEvent.STEP): _NO_BACKWARD,
    (StepPhase.FORWARD, StepEvent.NEXT): _NO_STEP,
    (StepPhase.BACKWARD, StepEvent.BACKWARD_OVER): StepPhase.BACKWARD_DONE,
    (StepPhase.BACKWARD, StepEvent.STEP): _NO_BACKWARD,
    (StepPhase.BACKWARD, StepEvent.NEXT): _NO_STEP,
    (StepPhase.BACKWARD_DONE, StepEvent.BACKWARD): (
        "session.backward was called twice for one micro-batch: call it once, with the sum of the "
        "losses. A gradient that moves inputs or weights (FGM, SAM) is taken by "
        "torch.autograd.grad, smaller batches by micro_batch= of session.batches; with only=…, "
        "call session.step(only=…) after each"
    ),
    (StepPhase.BACKWARD_DONE, StepEvent.STEP): StepPhase.ENDED,
    (StepPhase.BACKWARD_DONE, StepEvent.NEXT): _NO_STEP,
    (StepPhase.ENDED, StepEvent.GIVE): StepPhase.FORWARD,
    (StepPhase.ENDED, StepEvent.LOOK): _once("micro_batch"),
    (StepPhase.ENDED, StepEvent.TURN): StepPhase.FORWARD,
    (StepPhase.ENDED, StepEvent.BACKWARD): _once("backward"),
    (StepPhase.ENDED, StepEvent.STEP): _once("step"),
    # The global batch since the last boundary.
    (StepOutcome.OPEN, StepEvent.SKIPPED): StepOutcome.SKIPPED,
    (StepOutcome.OPEN, StepEvent.APPLIED): StepOutcome.APPLIED,
    (StepOutcome.SKIPPED, StepEvent.APPLIED): StepOutcome.APPLIED,
    (StepOutcome.SKIPPED, StepEvent.REACH): StepOutcome.OPEN,
    (StepOutcome.APPLIED, StepEvent.REACH): StepOutcome.OPEN,
    # Parameters and optimizer state.
    (StepCondition.UNLOADED, StepEvent.LOADED): StepCondition.CLEAN,
    (StepCondition.CLEAN, StepEvent.CHANGE): StepCondition.CHANGING,
    (StepCondition.CLEAN, StepEvent.TEAR): StepCondition.TORN,
    (StepCondition.CHANGING, StepEvent.APPLIED): StepCondition.TORN,
    (StepCondition.CHANGING, StepEvent.BOUNDARY): StepCondition.CLEAN,
    (StepCondition.CHANGING, StepEvent.TEAR): StepCondition.TORN,
    (StepCondition.TORN, StepEvent.CHANGE): StepCondition.CHANGING,
    (StepCondition.TORN, StepEvent.KEPT): StepCondition.CLEAN,
    (StepCondition.TORN, StepEvent.BOUNDARY): StepCondition.CLEAN,
    # The loop.
    (LoopPart.OUTSIDE, StepEvent.OPEN): LoopPart.INSIDE,
    (LoopPart.INSIDE, StepEvent.BATCHES): LoopPart.OUTSIDE,
    (LoopPart.INSIDE, StepEvent.CLOSE): LoopPart.OUTSIDE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepState:
    """Holds the state of a rank's work on a global batch."""

    phase: StepPhase = StepPhase.BETWEEN
    outcome: StepOutcome = StepOutcome.OPEN
    condition: StepCondition = StepCondition.UNLOADED
    loop_part: LoopPart = LoopPart.OUTSIDE
    loop: int = -1
    """Number of the newest loop over `session.batches`; -1: there was none."""
    left_at: str = ""
    """The place where the script left its last loop early; empty: it did not."""
    batch: GlobalBatch | None = None
    """The global batch; None: none is begun, or its loop has ended by itself."""
    part: MicroBatch | None = None
    """The micro-batch in the script's hands; None: it has none."""
    parts: int = 0
    """Number of micro-batches of the global batch that the script was given."""
    halved: int | None = None
    """Half of the samples of the micro-batch, where that is to be tried if memory is short."""
    only: tuple[str, ...] | None = None
    """The optimizers that the newest backward was for; None: all."""
    names_optimizers: bool = False
    """True once a backward of this generation was for some of the script's optimizers."""
    weights: Mapping[int, float] | None = None
    """Sums of the script's weights for the global batch by slice, or all under 0; None: it gave
    none."""

    @property
    def clean(self) -> bool:
        """Returns whether nothing has changed the state since the last boundary."""
        return self.condition is StepCondition.CLEAN

    @property
    def applying(self) -> bool:
        """Returns whether the optimizers take their step now."""
        return self.condition is StepCondition.CHANGING

    @property
    def counted(self) -> bool:
        """Returns whether a global batch was applied or skipped since the last boundary."""
        return self.outcome is not StepOutcome.OPEN

    @property
    def in_loop(self) -> bool:
        """Returns whether the script is inside of a loop over batches."""
        return self.loop_part is LoopPart.INSIDE

    @property
    def is_share(self) -> bool:
        """Returns whether the micro-batch is of this rank's own share of the global batch: neither
        a slice of it nor without a weight."""
        return self.part is not None and self.part.weight > 0 and not self.part.slices

    @property
    def weighed(self) -> bool:
        """Returns whether a micro-batch of the global batch has a weight, of the script or by
        default."""
        backward_begun = self.phase in (
            StepPhase.BACKWARD,
            StepPhase.BACKWARD_DONE,
            StepPhase.ENDED,
        )
        return backward_begun or self.parts > 1

    @property
    def partial(self) -> bool:
        """Returns whether a part of the global batch's gradient is computed, and its step is not
        applied."""
        if self.part is None or (self.phase is StepPhase.ENDED and self.part.last):
            return False
        return self.weighed

    def after(self, event: StepEvent) -> StepState:
        """Returns the state that `event` leads to.

        Raises:
            UserError: The script made a call out of turn.
        """
        parts = []
        for part in (self.phase, self.outcome, self.condition, self.loop_part):
            entry = TRANSITIONS.get((part, event), part)
            if isinstance(entry, str):
                raise UserError(entry)
            parts.append(entry)
        phase, outcome, condition, loop_part = parts
        assert isinstance(phase, StepPhase)
        assert isinstance(outcome, StepOutcome)
        assert isinstance(condition, StepCondition)
        assert isinstance(loop_part, LoopPart)
        held = self.part if phase is not StepPhase.BETWEEN else None
        if held is self.part and parts == [
            self.phase,
            self.outcome,
            self.condition,
            self.loop_part,
        ]:
            return self
        return replace(
            self, phase=phase, outcome=outcome, condition=condition, loop_part=loop_part, part=held
        )

    # Calls of the script.

    def check_new_loop(self) -> None:
        """Raises `UserError` where no loop may begin."""
        if self.partial:
            raise UserError(
                "the loop over session.batches before this one was left in the middle of a global "
                "batch, after session.backward: leave it where session.step() has returned True"
            )

    def next_loop(self) -> StepState:
        """Returns the state once another loop over `session.batches` has begun."""
        self.check_new_loop()
        return replace(
            self.after(StepEvent.BATCHES), loop=self.loop + 1, batch=None, **_NO_GRADIENT
        )

    def before_next(self, loop: int) -> StepState:
        """Returns the state once loop number `loop` is asked for its next micro-batch."""
        if loop != self.loop:
            raise UserError(
                "this loop over session.batches was followed by another, so it cannot be gone on "
                "with: one loop runs at a time; session.evaluate goes over a second dataset inside "
                "a loop"
            )
        return replace(self.after(StepEvent.NEXT), halved=None)

    def current(self) -> MicroBatch:
        """Returns the micro-batch that the script works on."""
        part = self.after(StepEvent.LOOK).part
        assert part is not None
        return part

    def backward(self, only: tuple[str, ...] | None) -> StepState:
        """Returns the state once `session.backward` is called.

        Another call, for other optimizers or the same, may follow the step of those before, where
        the global batch is one micro-batch on each rank.

        Args:
            only: The optimizers that the call is for; None: all.

        Raises:
            UserError: The call is out of turn.
        """
        state = self
        if self.phase is StepPhase.ENDED and None not in (only, self.only):
            assert self.part is not None
            if not self.part.last or self.parts > 1 or self.part.slices:
                raise UserError(
                    "session.step(only=…) would change weights in the middle of a global batch "
                    "that has several micro-batches, and the result would depend on their size: "
                    "call backward and step once for each, for other optimizers in the next global "
                    "batch, or leave out micro_batch= and virtual_batch="
                )
            state = replace(self.after(StepEvent.TURN), weights=None)
        state = state.after(StepEvent.BACKWARD)
        if state.parts > 1 and only != state.only:
            raise UserError(
                f"session.backward was given only={listed_text(only)} for a micro-batch, and "
                f"only={listed_text(state.only)} for one before it of the same global batch: give "
                "all of them the same"
            )
        return replace(state, only=only)

    def weighing(self, weight: float | None) -> StepState:
        """Returns the state once the gradient is about to be computed.

        Args:
            weight: That of the script; None: it gave none.

        Raises:
            UserError: A global batch has micro-batches with and without a weight.
        """
        if self.weighed and (weight is None) != (self.weights is None):
            raise UserError(
                "session.backward was given weight=… for some micro-batches of a global batch and "
                "not for others: give it for all of them"
            )
        state = self.after(StepEvent.WEIGH)
        if weight is not None:
            number = 0 if self.part is None else self.part.slice or 0
            weights = dict(self.weights or {})
            weights[number] = weights.get(number, 0.0) + weight
            state = replace(state, weights=weights)
        return replace(state, names_optimizers=self.names_optimizers or self.only is not None)

    def step(self, only: tuple[str, ...] | None) -> StepState:
        """Returns the state once `session.step` is called; raises `UserError` out of turn."""
        state = self.after(StepEvent.STEP)
        if only != self.only:
            raise UserError(
                f"session.step was given only={listed_text(only)}, and session.backward before it "
                f"only={listed_text(self.only)}: give both the same"
            )
        return state

    # What the loop does.

    def begin(self, batch: GlobalBatch) -> StepState:
        """Returns the state once a global batch begins."""
        return replace(self.after(StepEvent.BEGIN), batch=batch, **_NO_GRADIENT)

    def give(self, part: MicroBatch, halved: int | None) -> StepState:
        """Returns the state once the script is given a micro-batch.

        Args:
            part: The micro-batch.
            halved: What the field of this name says.
        """
        state = self.after(StepEvent.GIVE)
        return replace(state, part=part, parts=self.parts + 1, halved=halved)

    def enter(self) -> StepState:
        """Returns the state once the newest loop is known to have micro-batches for this rank."""
        return replace(self, left_at="")

    def leave(self, loop: int, place: str) -> StepState:
        """Returns the state once the script has left loop number `loop` early, at this place."""
        return replace(self, left_at=place) if loop == self.loop else self

    def close(self, loop: int) -> StepState:
        """Returns the state once loop number `loop` gives no micro-batch any more. One that another
        loop has followed may be closed at any time, and changes nothing."""
        return self.after(StepEvent.CLOSE) if loop == self.loop else self

    def end(self, loop: int) -> StepState:
        """Returns the state once loop number `loop` has come to its end."""
        if loop != self.loop:
            return self
        return replace(self.after(StepEvent.FORGET), batch=None, **_NO_GRADIENT)

    def check_invariants(self) -> None:
        """Raises `AssertionError` for a state that cannot be."""
        works = self.phase is not StepPhase.BETWEEN
        assert works == (self.part is not None), "a phase belongs to a micro-batch"
        assert not works or (self.batch is not None and self.parts > 0)
        if self.counted:
            assert self.condition in (StepCondition.TORN, StepCondition.CHANGING), (
                "it is not the boundary's"
            )
        if self.applying:
            assert self.phase is StepPhase.ENDED and self.part is not None and self.part.last
        assert self.weights is None or self.weighed or not works
        assert self.only is None or self.batch is not None
        assert self.loop >= 0 or not (self.in_loop or self.batch)


_NO_GRADIENT: Mapping[str, Any] = {"parts": 0, "only": None, "weights": None}
"""The fields of a global batch of which no gradient is computed."""


def listed_text(only: tuple[str, ...] | None) -> str:
    """Returns the value of `only=` as a script writes it."""
    return "None" if only is None else repr(only[0] if len(only) == 1 else list(only))
