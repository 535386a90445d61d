"""The calls of a script for a global batch, in any order, against flags as a dumb alternative."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from elasticzero.data.loader import RankSchedule
from elasticzero.data.position import GlobalBatch, MicroBatch
from elasticzero.data.sampling import BatchPlan, SampleOrder
from elasticzero.errors import UserError
from elasticzero.training.step_machine import (
    TRANSITIONS,
    StepEvent,
    StepOutcome,
    StepPhase,
    StepState,
)
from elasticzero.training.step_tracker import StepTracker

PLAN = BatchPlan(order=SampleOrder(samples=100), global_batch=20, steps=1)
BATCH = GlobalBatch(epoch=0, start=0, stop=20)
Only = tuple[str, ...] | None


def parts(**options: Any) -> list[MicroBatch]:
    return list(RankSchedule(plan=PLAN, rank=0, world_size=2, **options).parts(BATCH, 1))


def at_first(**options: Any) -> StepState:
    """A script that was given the first micro-batch of its first global batch."""
    state = StepState().after(StepEvent.LOADED).next_loop().after(StepEvent.OPEN).begin(BATCH)
    return state.give(parts(**options)[0], None)


def work(state: StepState, only: Only) -> StepState:
    """What `session.backward` and `session.step` do."""
    return state.backward(only).weighing(2.0).after(StepEvent.BACKWARD_OVER).step(only)


def test_optimizers_take_turns_in_a_global_batch_of_one_micro_batch() -> None:
    state = at_first()
    for only in [("a",), ("a",), ("b",)]:
        state = work(state, only)
        assert state.weights == {0: 2.0}, "of this turn alone"
    with pytest.raises(UserError, match="called once for each micro-batch"):
        state.backward(None)
    assert not state.partial


@pytest.mark.parametrize(
    "options", [{"micro_batch": 5}, {"virtual_batch": 20}, {"virtual_batch": 5}]
)
def test_optimizers_take_no_turns_within_several_micro_batches(options: Any) -> None:
    """A slice is one micro-batch in some worlds only."""
    state = work(at_first(**options), ("a",))
    with pytest.raises(UserError, match="in the middle of a global batch"):
        state.backward(("b",))


def test_all_micro_batches_are_for_the_same_optimizers() -> None:
    state = work(at_first(micro_batch=5), ("a",))
    state = state.before_next(0).give(parts(micro_batch=5)[1], None)
    with pytest.raises(UserError, match="was given only='b' for a micro-batch, and only='a' for"):
        state.backward(("b",))
    assert work(state, ("a",)).phase is StepPhase.ENDED


def test_a_step_is_of_the_optimizers_of_its_backward() -> None:
    state = at_first()
    with pytest.raises(UserError, match=r"session.backward\(loss\) was not called before"):
        state.step(None)
    state = state.backward(("a", "b")).weighing(None).after(StepEvent.BACKWARD_OVER)
    for only in (None, ("a",)):
        with pytest.raises(UserError, match=r"before it only=\['a', 'b'\]: give both the same"):
            state.step(only)
    with pytest.raises(UserError, match="called twice for one micro-batch"):
        state.backward(("c",))


def test_a_loop_that_another_has_followed_gives_nothing_more() -> None:
    state = work(at_first(), None).next_loop()
    with pytest.raises(UserError, match="was followed by another"):
        state.before_next(0)
    assert state.leave(0, "train.py:7") == state, "it is not the one that the script has left"
    assert state.leave(1, "train.py:9").left_at == "train.py:9"


def test_a_loop_that_another_has_followed_closes_nothing() -> None:
    state = work(at_first(), None).next_loop()
    assert not state.in_loop, "the new one gives no micro-batch yet"
    state = state.after(StepEvent.OPEN)
    assert state.close(0) == state and not state.close(1).in_loop


@pytest.mark.parametrize("threaded", [False, True])
def test_a_move_that_comes_amid_another_is_not_lost(threaded: bool) -> None:
    """The garbage collector closes a loop in whatever thread and at whatever moment it runs."""
    tracker = StepTracker()
    tracker.move(lambda _: work(at_first(), None))

    def collect() -> None:
        tracker.move(lambda state: state.close(0))

    def next_part(state: StepState) -> StepState:
        if state.in_loop and threaded:
            thread = threading.Thread(target=collect)
            thread.start()
            thread.join()
        elif state.in_loop:
            collect()
        return replace(state.before_next(0), left_at="train.py:5")

    assert tracker.move(next_part) == tracker.now
    assert (tracker.now.in_loop, tracker.now.left_at) == (False, "train.py:5")


def test_every_event_has_an_entry_and_every_part_stays_of_its_kind() -> None:
    without_entry = set(StepEvent) - {event for _, event in TRANSITIONS}
    assert not without_entry
    for (part, _), entry in TRANSITIONS.items():
        assert isinstance(entry, str) or type(entry) is type(part)


# All sequences of calls.


@dataclass(slots=True)
class Flags:
    """The dumb alternative: the flags that the table has replaced, each set where a call set it.

    Its methods return a piece of the sentence that refuses the call; empty: it is accepted.
    """

    part: MicroBatch | None = None
    has_batch: bool = False
    backward: bool = False
    stepped: bool = False
    weighed: bool = False
    has_weights: bool = False
    only: Only = None
    parts: int = 0
    clean: bool = True
    applied: bool = False
    changed: bool = False

    @property
    def partial(self) -> bool:
        if not self.has_batch or self.part is None:
            return False
        return not (self.part.last and self.stepped) and (self.weighed or self.backward)

    def look(self) -> str:
        missing = not self.has_batch or self.part is None or self.stepped
        return "is called once for each micro-batch" if missing else ""

    def call_backward(self, only: Only) -> str:
        if self.stepped and None not in (only, self.only):
            assert self.part is not None
            if not (self.part.last and self.parts == 1 and not self.part.slices):
                return "would change weights in the middle of a global batch"
            self.backward = self.stepped = self.weighed = self.has_weights = False
        if refusal := self.look():
            return refusal
        if self.backward:
            return "was called twice for one micro-batch"
        if self.parts > 1 and only != self.only:
            return "give all of them the same"
        self.only = only
        return ""

    def weigh(self, weight: float | None) -> str:
        if self.weighed and (weight is not None) != self.has_weights:
            return "for some micro-batches of a global batch and not for others"
        self.weighed, self.has_weights = True, weight is not None
        return ""

    def end_backward(self) -> str:
        self.backward = True
        return ""

    def step(self, only: Only) -> str:
        if refusal := self.look():
            return refusal
        if not self.backward:
            return "was not called before session.step()"
        if only != self.only:
            return "give both the same"
        self.stepped = True
        return ""

    def apply(self) -> str:
        self.clean, self.applied, self.changed = False, True, True
        return ""

    def skip(self) -> str:
        self.clean, self.applied = False, True
        return ""

    def next(self) -> str:
        return "" if self.stepped else "session.step() was not called for this micro-batch"

    def boundary(self) -> None:
        self.applied, self.clean = False, True

    def begin(self) -> str:
        self.boundary()
        self.has_batch, self.weighed, self.has_weights, self.changed = True, False, False, False
        self.only, self.parts = None, 0
        return ""

    def give(self, part: MicroBatch) -> str:
        self.part, self.backward, self.stepped = part, False, False
        self.parts += 1
        return ""

    def batches(self) -> str:
        if self.partial:
            return "was left in the middle of a global batch, after session.backward"
        if self.applied:
            self.boundary()
        self.part, self.has_batch = None, False
        self.backward = self.stepped = self.weighed = self.has_weights = False
        self.only, self.parts = None, 0
        return ""


def boundary(state: StepState) -> StepState:
    return state.after(StepEvent.REACH).after(StepEvent.BOUNDARY)


def batches(state: StepState) -> StepState:
    """What `Loops.run` does when a loop begins; all loops have number 0 here."""
    state.check_new_loop()
    state = (boundary(state) if state.counted else state).next_loop()
    return replace(state, loop=0)


def look(state: StepState) -> StepState:
    assert state.current() is state.part
    return state


Call = tuple[str, Callable[[StepState], StepState], Callable[[Flags], str], str]
"""A call's name, what it does to the state and to the flags, and where the script is after it."""


def calls(place: str, flags: Flags, batch: list[MicroBatch]) -> Iterator[Call]:
    """Yields every call that may be next, of the script or of what serves it.

    place: loop (the loop is to give a micro-batch), body (the script has one), outside (it has left
    the loop), backward or step (that call was accepted, and is not over), with the place after it.
    """
    doing, _, back = place.partition(" in ")
    if doing == "loop":
        if 0 < flags.parts < len(batch):
            part = batch[flags.parts]
            yield "give", lambda s: s.give(part, None), lambda f: f.give(part), "body"
        else:
            yield "begin", lambda s: boundary(s).begin(BATCH), Flags.begin, "begun"
    elif doing == "begun":
        yield "give", lambda s: s.give(batch[0], None), lambda f: f.give(batch[0]), "body"
    elif doing == "backward":
        yield "loss of a wrong shape", lambda s: s, lambda f: "", back
        for weight in (None, 1.0):
            yield (
                f"weigh {weight}",
                partial(StepState.weighing, weight=weight),
                partial(Flags.weigh, weight=weight),
                f"gradient in {back}",
            )
    elif doing == "gradient":
        yield "out of memory", lambda s: s, lambda f: "", back
        yield "done", lambda s: s.after(StepEvent.BACKWARD_OVER), Flags.end_backward, back
    elif doing == "step":
        if flags.part is None or not flags.part.last:
            yield "more follow", lambda s: s, lambda f: "", back
            return
        yield "a peer is gone", lambda s: s, lambda f: "", back
        yield (
            "apply",
            lambda s: s.after(StepEvent.CHANGE).after(StepEvent.APPLIED),
            Flags.apply,
            back,
        )
        yield "skip", lambda s: s.after(StepEvent.TEAR).after(StepEvent.SKIPPED), Flags.skip, back
    else:
        for only in (None, ("a",), ("b",)):
            yield (
                f"backward {only}",
                partial(StepState.backward, only=only),
                partial(Flags.call_backward, only=only),
                f"backward in {place}",
            )
            yield (
                f"step {only}",
                partial(StepState.step, only=only),
                partial(Flags.step, only=only),
                f"step in {place}",
            )
        yield "micro_batch", look, Flags.look, place
        yield "batches", batches, Flags.batches, "loop"
        if place == "body":
            yield "next", lambda s: s.before_next(0), Flags.next, "loop"
            yield "break", lambda s: s.leave(0, "train.py:5"), lambda f: "", "outside"


@pytest.mark.parametrize(
    ("options", "answers"), [({}, 8), ({"micro_batch": 5}, 10), ({"virtual_batch": 20}, 9)]
)
def test_all_sequences_of_calls_are_answered_as_flags_answer_them(
    options: dict[str, Any], answers: int
) -> None:
    """Every pair of a state and flags that any sequence leads to is visited once."""
    batch = parts(**options)
    todo = deque([(StepState().after(StepEvent.LOADED), Flags(), "outside")])
    visited, refusals = set[str](), set[str]()
    while todo:
        state, flags, place = todo.popleft()
        for name, move, old_move, place_after in calls(place, flags, batch):
            flags_after = replace(flags)
            refusal = old_move(flags_after)
            try:
                state_after, sentence = move(state), ""
            except UserError as error:
                state_after, sentence = state, str(error)
                place_after = place
            assert bool(refusal) == bool(sentence) and refusal in sentence, (name, state, flags)
            refusals.add(refusal)
            compare(state_after, flags_after)
            if state_after.weights:
                state_after = replace(state_after, weights=dict.fromkeys(state_after.weights, 1.0))
            key = repr((state_after, flags_after, place_after))
            if key not in visited:
                visited.add(key)
                todo.append((state_after, flags_after, place_after))
    assert len(visited) > 100, len(visited)
    assert len(refusals) == answers, refusals


def compare(state: StepState, flags: Flags) -> None:
    state.check_invariants()
    assert (state.clean, state.counted) == (flags.clean, flags.applied), (state, flags)
    assert state.partial == flags.partial, (state, flags)
    assert (state.outcome is StepOutcome.APPLIED) == (flags.applied and flags.changed), (
        state,
        flags,
    )
    if state.phase is not StepPhase.BETWEEN:
        assert (state.part, state.only, state.parts) == (flags.part, flags.only, flags.parts)
        assert (state.weights is not None) == flags.has_weights, (state, flags)
