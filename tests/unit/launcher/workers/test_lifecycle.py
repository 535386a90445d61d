"""A worker's state against a simple model: the set of events that have happened."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from elasticzero.launcher.workers.lifecycle import (
    TRANSITIONS,
    Event,
    Outcome,
    Process,
    Stage,
    WorkerState,
)

BEGINNINGS: tuple[list[Event], ...] = ([], [Event.ATTACHED], [Event.ATTACHED, Event.RESTORED])
ENDINGS: tuple[list[Event], ...] = (
    [],
    [Event.STOPPING],
    [Event.STOPPING, Event.FAILED],
    [Event.FAILED],
    [Event.FAILED, Event.STOPPING],
    [Event.FAILED, Event.STOPPING, Event.FAILED],
    [Event.FINISHED],
    [Event.FINISHED, Event.FAILED],
)
"""Every order in which a worker reports the end of its training."""
LAST: tuple[list[Event], ...] = ([], [Event.WAITING], [Event.EXITED], [Event.WAITING, Event.EXITED])


@st.composite
def histories(draw: st.DrawFn) -> list[Event]:
    """Events in an order that a worker can bring about, some of them repeated."""
    events = [e for part in (BEGINNINGS, ENDINGS, LAST) for e in draw(st.sampled_from(part))]
    return [event for event in events for _ in range(draw(st.integers(1, 2)))]


@given(histories())
def test_a_state_tells_what_has_happened(events: list[Event]) -> None:
    state, seen = WorkerState(), set(events)
    for event in events:
        state = state.after(event)
    assert state.attached == (Event.ATTACHED in seen)
    assert state.restored == (Event.RESTORED in seen)
    assert state.stopping == (Event.STOPPING in seen)
    assert state.finished == (Event.FINISHED in seen)
    assert state.failed == (Event.FAILED in seen)
    assert state.running == (Event.EXITED not in seen)
    assert state.at_work == seen.isdisjoint({Event.EXITED, Event.WAITING})
    assert state.ready_for_another == (state.running and Event.WAITING in seen)
    assert state.needs_signal == seen.isdisjoint({Event.EXITED, Event.ATTACHED, Event.FAILED})


def test_a_plain_script_that_exits_with_success_has_finished() -> None:
    state = WorkerState().after(Event.EXITED).after(Event.FINISHED)
    assert state.finished and not state.attached and not state.running


@given(st.lists(st.sampled_from(list(Event))))
def test_no_order_of_events_takes_anything_back(events: list[Event]) -> None:
    state = WorkerState()
    for event in events:
        after = state.after(event)
        assert after.after(event) == after, "a repeated event changes nothing"
        for fact in ("attached", "restored", "stopping", "finished", "failed"):
            assert getattr(after, fact) or not getattr(state, fact), fact
        assert state.running or not after.running
        state = after


def test_every_part_of_a_state_can_be_reached() -> None:
    reached = {WorkerState()}
    while next_states := {s.after(e) for s, e in product(reached, Event)} - reached:
        reached |= next_states
    assert {s.stage for s in reached} == set(Stage)
    assert {s.outcome for s in reached} == set(Outcome)
    assert {s.process for s in reached} == set(Process)
    assert all(part is not after for (part, _), after in TRANSITIONS.items())
