"""What a rank captures, and what it tells the others of captures that failed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticzero.comm.control import ControlWord
from elasticzero.ipc.agent_client import STANDALONE
from elasticzero.ipc.assignment import Resume
from elasticzero.snapshots.capture_state import CaptureState, NodeCaptures

ASSIGNMENT = replace(
    STANDALONE, world_size=4, checkpoint_dir="/checkpoints", snapshot_every=1, generation=3
)
NOTHING = NodeCaptures(held=-1, not_held=-1, saved=-1, unsaved=-1)


def capture_state(step: int = 10, *, shards: int = 4) -> CaptureState:
    state = CaptureState.of(ASSIGNMENT, shards=shards, saving=True, alone=False)
    return state.begun(step, ASSIGNMENT).after_exchange(ControlWord(ready=True))


def word(state: CaptureState, node: NodeCaptures = NOTHING) -> ControlWord:
    return state.control_word(node, flags=0, ready=True, every=0, asks=False)


@pytest.mark.parametrize(
    ("change", "shards", "alone", "snapshots", "saves", "replicated"),
    [
        ({}, 4, False, True, True, False),
        ({}, 1, False, False, True, True),
        ({}, 2, False, False, True, True),
        ({}, 4, True, False, True, False),
        ({"snapshot_every": 0}, 4, False, False, True, False),
        ({"checkpoint_dir": None}, 4, False, True, False, False),
        ({"on_nonfinite": "rollback"}, 1, False, True, True, True),
    ],
)
def test_what_a_strategy_has_use_for(
    change: dict[str, object],
    shards: int,
    alone: bool,
    snapshots: bool,
    saves: bool,
    replicated: bool,
) -> None:
    state = CaptureState.of(
        replace(ASSIGNMENT, **change),  # type: ignore[arg-type]
        shards=shards,
        saving=True,
        alone=alone,
    )
    assert (state.takes_snapshots, state.saves, state.replicated) == (snapshots, saves, replicated)


def test_a_state_from_storage_is_not_saved_again() -> None:
    stored = replace(ASSIGNMENT, resume=Resume(tier="storage", step=10))
    state = CaptureState.of(stored, shards=4, saving=True, alone=False).begun(10, stored)
    assert state.has_captured(10) and not state.is_unsaved(10) and state.is_unsaved(11)
    assert state.owing(10).overdue is None


def test_a_checkpoint_that_falls_due_during_a_save_is_taken_after_it() -> None:
    state = capture_state().owing(12)
    assert state.due(12) == "checkpoint"
    state = replace(state, overdue=None).captured(12, checkpoint=True, in_memory=True)
    assert state.owing(14).due(14) == "nothing", "the save of step 12 runs"
    state = state.owing(14).after_exchange(ControlWord(saved=12, held=12))
    assert state.due(15) == "checkpoint"
    assert replace(state, overdue=None).due(15) == "snapshot"


def test_a_capture_that_failed_is_in_the_next_word() -> None:
    state = capture_state().failed(12, checkpoint=False)
    assert (word(state).not_held, word(state).unsaved) == (12, -1)
    assert state.after_exchange(word(state)).schedule.taken is None, "it is abandoned"
    state = capture_state().failed(12, checkpoint=True)
    assert (word(state).not_held, word(state).unsaved, word(state).saved) == (12, 12, 12)
    assert state.newest_save(NOTHING) == "lost"
    assert replace(state, unsaved=-1).newest_save(NOTHING) == "none"


def test_a_checkpoint_on_storage_leaves_no_snapshot() -> None:
    state = capture_state().captured(12, checkpoint=True, in_memory=False)
    assert (word(state).not_held, word(state).unsaved) == (12, -1)
    assert state.newest_save(NOTHING) == "pending"
    assert state.newest_save(replace(NOTHING, saved=12)) == "none"
    assert state.newest_save(replace(NOTHING, saved=12, unsaved=12)) == "lost"


def test_a_save_that_failed_elsewhere_is_abandoned_here() -> None:
    state = capture_state().captured(12, checkpoint=True, in_memory=True)
    assert state.lost_elsewhere(ControlWord(unsaved=11), NOTHING) is None
    assert state.lost_elsewhere(ControlWord(unsaved=12), NOTHING) == 12
    assert state.lost_elsewhere(ControlWord(unsaved=12), replace(NOTHING, unsaved=12)) is None


@pytest.mark.parametrize("shards", [2, 4])
def test_a_divided_state_replaces_no_snapshot_in_flight(shards: int) -> None:
    state = capture_state(shards=shards).captured(12, checkpoint=False, in_memory=True)
    assert state.can_stop == (shards == 2)
    agreed = replace(state, agreed=True)
    assert agreed.can_stop
    at_stop = state.states_to_keep(ASSIGNMENT, at_stop=True)
    assert at_stop - state.states_to_keep(ASSIGNMENT, at_stop=False) == {(3, 12)}
    assert (3, 12) not in agreed.states_to_keep(ASSIGNMENT, at_stop=True)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["captured", "direct", "failed", "exchange", "end"]), st.booleans()
        ),
        max_size=30,
    )
)
def test_what_is_told_never_shrinks(events: list[tuple[str, bool]]) -> None:
    """A word of an earlier boundary stays true: no step that was not held or not saved is unsaid,
    but for the last save, which is tried again."""
    state, step, before = capture_state(), 10, word(capture_state())
    for kind, checkpoint in events:
        step += 1
        if kind in ("captured", "direct"):
            held = kind == "captured"
            state = state.captured(step, checkpoint=checkpoint, in_memory=held)
        elif kind == "failed":
            state = state.failed(step, checkpoint=checkpoint)
        elif kind == "exchange":
            state = state.after_exchange(word(state, replace(NOTHING, held=step, saved=step)))
        else:
            state = state.save_ended()
        now = word(state)
        assert now.not_held >= before.not_held and now.unsaved >= before.unsaved
        assert now.saved >= now.unsaved, "a save that has failed is over"
        assert state.saved_step is None or state.has_captured(state.saved_step)
        assert {(3, state.schedule.held)} <= state.states_to_keep(ASSIGNMENT, at_stop=False) | {
            (3, None)
        }, "the newest snapshot that every node holds is never overwritten"
        before = now


@pytest.mark.parametrize(("world_size", "snapshots"), [(2, False), (1, True)])
def test_a_world_that_is_entered_goes_on_with_what_is_saved(
    world_size: int, snapshots: bool
) -> None:
    """A rank that is alone has use for snapshots, and of the old world's none is in flight."""
    state = capture_state(shards=1).captured(12, checkpoint=True, in_memory=True)
    live = replace(ASSIGNMENT, world_size=world_size, resume=Resume(tier="live", step=14))
    entered = state.save_ended().entered(14, live, shards=1)
    assert entered.takes_snapshots == snapshots
    assert (entered.saved_step, entered.schedule.start) == (12, 14)
    assert entered.schedule.saving is None and entered.newest_save(NOTHING) == "none"


def test_a_divided_state_keeps_what_every_node_held_in_the_world_before() -> None:
    state = capture_state(shards=4).captured(12, checkpoint=False, in_memory=True)
    state = state.after_exchange(word(state, replace(NOTHING, held=12)))
    live = replace(
        ASSIGNMENT, generation=4, world_size=3, resume=Resume(tier="live", step=14, generation=3)
    )
    entered = state.entered(14, live, shards=3)
    assert entered.takes_snapshots and entered.held_step == 12
    assert entered.states_to_keep(live, at_stop=False) == {(3, 12)}


@pytest.mark.parametrize(
    ("change", "shards"), [({}, 1), ({}, 2), ({"snapshot_every": 0}, 4), ({}, 4)]
)
def test_a_lost_node_costs_the_steps_since_what_all_nodes_hold(
    change: dict[str, object], shards: int
) -> None:
    """Where each node holds the whole state, or no snapshots are taken, they decide nothing."""
    state = CaptureState.of(
        replace(ASSIGNMENT, **change),  # type: ignore[arg-type]
        shards=shards,
        saving=True,
        alone=False,
    ).begun(10, ASSIGNMENT)
    decides = shards == 4 and not change
    assert state.held_step == (10 if decides else None)
    state = state.captured(20, checkpoint=False, in_memory=True)
    assert state.held_step == (10 if decides else None), "some node may not hold it yet"
    state = state.after_exchange(ControlWord(ready=True, held=20))
    assert state.held_step == (20 if decides else None)
