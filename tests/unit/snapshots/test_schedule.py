"""The rules of when state is captured, one line each, and all orders of a few words."""

from __future__ import annotations

import itertools

import pytest

from elasticzero.comm.control import ControlWord
from elasticzero.ipc.assignment import Resume
from elasticzero.snapshots.schedule import CaptureSchedule, Due

READY = CaptureSchedule(start=0, every=5, ready=True)


def after(*control_words: ControlWord, ledger: CaptureSchedule = READY) -> CaptureSchedule:
    for word in control_words:
        ledger = ledger.after_exchange(word)
    return ledger


@pytest.mark.parametrize(
    ("ledger", "step", "checkpoint", "snapshots", "due"),
    [
        pytest.param(READY, 7, False, True, "snapshot", id="P3: a new generation, at once"),
        pytest.param(
            CaptureSchedule(start=0, every=5), 7, False, True, "nothing", id="memory not ready"
        ),
        pytest.param(
            CaptureSchedule(start=0), 7, True, True, "checkpoint", id="saved all the same"
        ),
        pytest.param(READY, 7, False, False, "nothing", id="a strategy without use for them"),
        pytest.param(
            CaptureSchedule(start=0, every=5, ready=True, taken=5, held=5),
            9,
            False,
            True,
            "nothing",
            id="P3: not yet",
        ),
        pytest.param(
            CaptureSchedule(start=0, every=5, ready=True, taken=5, held=5),
            10,
            False,
            True,
            "snapshot",
            id="P3: due",
        ),
        pytest.param(
            CaptureSchedule(start=0, every=5, ready=True, taken=5, held=0),
            10,
            False,
            True,
            "nothing",
            id="P1: one in flight",
        ),
        pytest.param(
            CaptureSchedule(start=0, every=5, ready=True, taken=5, held=5, saving=5),
            10,
            False,
            True,
            "nothing",
            id="P1: one being saved",
        ),
        pytest.param(
            CaptureSchedule(start=0, every=5, ready=True, taken=5, held=5, saving=5),
            10,
            True,
            True,
            "nothing",
            id="P2: not while another is being saved",
        ),
        pytest.param(
            CaptureSchedule(start=0, every=5, ready=True, taken=8, held=5),
            10,
            True,
            True,
            "checkpoint",
            id="P2: a snapshot in flight gives way",
        ),
        pytest.param(
            CaptureSchedule(start=0, every=0, ready=True, taken=5, held=5),
            900,
            False,
            True,
            "nothing",
            id="no interval yet",
        ),
    ],
)
def test_what_is_due(
    ledger: CaptureSchedule, step: int, checkpoint: bool, snapshots: bool, due: Due
) -> None:
    assert ledger.due(step, checkpoint=checkpoint, snapshots=snapshots) == due


def test_a_snapshot_is_held_once_every_node_says_so() -> None:
    taken = READY.captured(6, checkpoint=False)
    assert taken.copying
    assert after(ControlWord(held=5), ledger=taken).held is None
    held = after(ControlWord(held=6), ledger=taken)
    assert (held.held, held.copying) == (6, False)


def test_p4_what_a_node_cannot_hold_is_dropped_the_rest_stays() -> None:
    held = after(ControlWord(held=6), ledger=READY.captured(6, checkpoint=False))
    given_up = after(ControlWord(held=6, not_held=11), ledger=held.captured(11, checkpoint=False))
    assert (given_up.taken, given_up.held) == (6, 6)
    assert given_up.due(12, checkpoint=False, snapshots=True) == "snapshot"


def test_an_old_failure_does_not_give_up_a_newer_snapshot() -> None:
    taken = READY.captured(11, checkpoint=False)
    assert after(ControlWord(not_held=6), ledger=taken).taken == 11


def test_a_save_is_over_only_by_a_word_of_its_own_step() -> None:
    saving = READY.captured(10, checkpoint=True)
    assert after(ControlWord(saved=9), ledger=saving).saving == 10
    assert after(ControlWord(saved=10), ledger=saving).saving is None


def test_rank_0_s_interval_counts_from_the_word_all_have_read() -> None:
    assert after(ControlWord(every=40)).every == 40
    assert after(ControlWord(every=40), ControlWord()).every == 40


def test_no_order_of_messages_loses_a_held_snapshot() -> None:
    control_words = [
        ControlWord(held=k, not_held=u) for k, u in itertools.product((0, 3, 6), (-1, 3, 6))
    ]
    for order in itertools.permutations(control_words, 4):
        ledger, best = READY, -1
        for step, word in enumerate(order, 3):
            if ledger.due(step, checkpoint=False, snapshots=True) == "snapshot":
                assert not ledger.copying
                ledger = ledger.captured(step, checkpoint=False)
            ledger = ledger.after_exchange(word)
            held = -1 if ledger.held is None else ledger.held
            assert held >= best and (ledger.taken is None or ledger.taken >= held)
            best = held


def test_what_every_node_holds_stays_until_the_world_that_was_entered_holds_something() -> None:
    """A snapshot that was in flight does not count, nor does the state of the boundary: it is on
    no other node."""
    ram = Resume(tier="ram", step=3, generation=4)
    first = CaptureSchedule.begun(3, 5, ram)
    assert (first.states_to_keep(5), first.held_step) == ({(4, 3)}, 3)
    second = first.captured(8, checkpoint=False).entered(9, 5)
    assert (second.states_to_keep(6), second.held_step) == ({(4, 3)}, 3)
    assert (second.start, second.every, second.copying, second.ready) == (9, 5, False, False)
    held = after(ControlWord(held=10), ledger=second.captured(10, checkpoint=False))
    assert (held.states_to_keep(6), held.held_step) == ({(6, 10)}, 10)
    third = held.entered(12, 6).entered(13, 7)
    assert (third.states_to_keep(8), third.held_step) == ({(6, 10)}, 10)


def test_a_world_that_is_entered_before_any_snapshot_goes_back_to_where_training_began() -> None:
    entered = CaptureSchedule.begun(7, 5, Resume(tier="storage", step=7)).entered(9, 1)
    assert (entered.states_to_keep(2), entered.held_step) == (set(), 7)
