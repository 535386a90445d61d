"""Every second of a job belongs to exactly one class, whatever happens in whatever order."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticzero.launcher.goodput import (
    GROUPS,
    TIME_CLASSES,
    TimeAccount,
    TimeSpent,
    goodput,
    replayed,
)
from elasticzero.serialization import decode, encode


def trained(steps: int, *, step_s: float = 1.0) -> TimeAccount:
    """An account of a job that was formed in 2 s, started in 3 s, and made so many steps."""
    account = TimeAccount(0.0)
    account.started(2.0)
    account.restored(5.0, connect_s=0.5, restore_s=1.0)
    for step in range(1, steps + 1):
        account.stepped(step, 5.0 + step * step_s, data_wait_s=0.1)
    return account


def test_a_generation_from_its_rendezvous_to_its_steps() -> None:
    seconds = trained(10).seconds(15.5)
    assert seconds == pytest.approx(
        {
            "regroup": 2.0,
            "connect": 0.5,
            "restore": 1.0,
            "startup": 1.5,
            "data_wait": 1.0,
            "productive": 9.5,  # with the half second of the step that runs
        }
    )
    assert goodput(seconds) == pytest.approx(9.5 / 15.5)


def test_time_from_the_last_step_to_the_round_is_detection() -> None:
    account = trained(2)
    account.round_opened(9.0)
    account.waits("idle", 9.5)
    account.waits("regroup", 12.0)
    seconds = account.seconds(13.0)
    assert seconds["productive"] == pytest.approx(1.8)
    assert seconds["detect"] == pytest.approx(2.0)
    assert seconds["idle"] == pytest.approx(2.5)
    assert seconds["regroup"] == pytest.approx(2.0 + 0.5 + 1.0)


def test_steps_that_go_on_in_an_open_round_are_productive() -> None:
    """Workers that are asked to stop at a boundary finish their step after the round has opened,
    and their agent receives steps late."""
    account = trained(2)
    account.round_opened(7.5)
    account.stepped(3, 8.0, data_wait_s=0.0)
    seconds = account.seconds(8.25)
    assert seconds["productive"] == pytest.approx(1.8 + 1.0)
    assert "detect" not in seconds
    assert seconds["regroup"] == pytest.approx(2.0 + 0.25)
    account = trained(2)
    account.round_opened(9.0)
    account.stepped(3, 8.0, data_wait_s=0.0)
    seconds = account.seconds(9.5)
    assert seconds["productive"] == pytest.approx(1.8 + 1.0)
    assert seconds["detect"] == pytest.approx(1.0)
    assert seconds["regroup"] == pytest.approx(2.5)


def test_stalls_of_a_step_are_apart() -> None:
    account = trained(1)
    account.stalled("snapshot", 0.2)
    account.stalled("checkpoint", 0.3)
    assert account.seconds(6.4)["snapshot"] == pytest.approx(0.2)
    account.stepped(2, 7.0, data_wait_s=0.1)
    seconds = account.seconds(7.0)
    assert seconds["snapshot"] == pytest.approx(0.2)
    assert seconds["checkpoint"] == pytest.approx(0.3)
    assert seconds["productive"] == pytest.approx(0.9 + 0.4)


def test_a_generation_that_never_trains_is_start_up() -> None:
    account = TimeAccount(0.0)
    account.started(1.0)
    account.round_opened(4.0)
    account.restored(4.5, connect_s=1.0, restore_s=1.0)
    account.started(5.0)
    assert account.seconds(5.0) == pytest.approx({"regroup": 2.0, "startup": 3.0})


def test_a_script_without_visible_steps_is_productive() -> None:
    account = TimeAccount(0.0)
    account.started(1.0)
    account.plain()
    account.round_opened(9.0)
    assert account.seconds(10.0) == pytest.approx({"regroup": 2.0, "productive": 8.0})


def test_the_last_save_is_no_productive_time() -> None:
    account = trained(1)
    account.saved(0.75)
    account.ended(7.0)
    seconds = account.seconds(7.0)
    assert seconds["checkpoint"] == pytest.approx(0.75)
    assert seconds["productive"] == pytest.approx(0.9 + 0.25)


def test_steps_that_are_done_again_are_wasted() -> None:
    account = trained(10)
    account.round_opened(15.0)
    spent = account.spent(15.0, until=100.0, resume_step=7)
    assert spent.seconds["wasted"] == pytest.approx(3 * 0.9)
    assert spent.seconds["productive"] == pytest.approx(7 * 0.9)
    assert spent.steps[-1][0] == 7
    following = TimeAccount(15.0, spent)
    following.started(15.0)
    following.restored(15.0, 0.0, 0.0)
    following.stepped(8, 16.0, 0.0)
    again = following.spent(16.0, until=101.0, resume_step=5)
    assert again.seconds["wasted"] == pytest.approx(5 * 0.9 + 1.0)
    assert again.steps[-1][0] == 5


def test_time_that_no_agent_saw_is_counted_once() -> None:
    spent = trained(10).spent(15.0, until=100.0, resume_step=10)
    later = spent.unseen(until=130.0, step=20)
    assert later.seconds["productive"] - spent.seconds["productive"] == pytest.approx(9.0)
    assert later.seconds["idle"] == pytest.approx(21.0)
    assert spent.unseen(until=90.0, step=20).seconds == {**spent.seconds, "idle": 0.0}
    assert TimeSpent(until=1.0).unseen(until=3.0, step=0).seconds["idle"] == 2.0


NAMES = "start restored step step step snapshot round idle parked plain world regroup saved"
EVENT = st.tuples(st.floats(0.0, 3.0), st.sampled_from(NAMES.split()), st.floats(0.0, 2.0))


@given(st.lists(EVENT, max_size=150), st.integers(0, 40))
def test_classes_add_up_in_any_order_of_events(
    events: list[tuple[float, str, float]], back: int
) -> None:
    now_s, account, step = 0.0, TimeAccount(0.0), 0
    for pause_s, name, value in events:
        now_s += pause_s
        match name:
            case "start":
                account.started(now_s)
            case "restored":
                account.restored(now_s, value, value / 2)
            case "step":
                step += 1
                account.stepped(step, now_s - value / 10, value)  # received late
            case "snapshot":
                account.stalled("snapshot", value)
            case "round":
                account.round_opened(now_s)
            case "idle" | "parked" | "regroup":
                account.waits(name, now_s)
            case "plain":
                account.plain()
            case "saved":
                account.saved(value)
            case "world":
                spent = account.spent(now_s, until=now_s, resume_step=max(0, step - back))
                step = max(0, step - back)
                text = json.dumps(encode(spent))
                account = TimeAccount(now_s, decode(TimeSpent, json.loads(text)))
                assert len(spent.steps) <= GROUPS
        seconds = account.seconds(now_s)
        assert seconds.keys() <= set(TIME_CLASSES)
        assert min(seconds.values(), default=0.0) >= -1e-3
        assert sum(seconds.values()) == pytest.approx(now_s, abs=1e-3)


def test_groups_of_steps_keep_all_their_time() -> None:
    account = trained(1000)
    spent = account.spent(1005.0, until=0.0, resume_step=1000)
    assert len(spent.steps) <= GROUPS
    assert sum(seconds for _, seconds in spent.steps) == pytest.approx(900.0, abs=1e-3)
    for step in (0, 1, 500, 990, 999):
        wasted_s = spent.redone_from(step).seconds.get("wasted", 0.0)
        assert wasted_s == pytest.approx((1000 - step) * 0.9, abs=1e-3)


def test_it_is_counted_how_often_training_went_back() -> None:
    spent = TimeSpent(
        until=1000.0, seconds={"productive": 100.0, "idle": 40.0}, steps=((0, 0.0), (100, 100.0))
    )
    assert spent.returns == spent.redone_from(100).returns == 0
    assert spent.running_since == 900.0
    back = spent.redone_from(99)
    assert back.returns == 1 and back.unseen(2000.0, 100).returns == 1
    assert TimeAccount(0.0, back).spent(5.0, 1005.0, 99).returns == 1
    assert TimeAccount(0.0, back).spent(5.0, 1005.0, 50).returns == 2


def test_an_event_log_gives_the_same_account() -> None:
    def event(time: float, name: str, **fields: Any) -> dict[str, Any]:
        return {"time": time, "event": name, **fields}

    log = [
        event(0.0, "serving"),
        event(0.0, "registered"),
        event(2.0, "start"),
        event(5.0, "restored", connect_s=0.5, restore_s=1.0),
        *(event(5.0 + step, "step", step=step, data_wait_s=0.1) for step in range(1, 3)),
        event(7.25, "captured", local_rank=0, checkpoint=False, direct=False, seconds=0.125),
        event(7.25, "captured", local_rank=1, checkpoint=False, direct=False, seconds=0.5),
        event(9.0, "round"),
        event(9.5, "waiting", why="idle"),
    ]
    account = trained(2)
    account.stalled("snapshot", 0.125)
    account.round_opened(9.0)
    account.waits("idle", 9.5)
    replay = replayed(log)
    assert replay is not None
    assert replay.seconds(11.0) == pytest.approx(account.seconds(11.0))
    spent = account.spent(11.0, until=11.0, resume_step=1)
    replay = replayed([*log, event(11.0, "world", time_spent=encode(spent))])
    assert replay is not None
    assert replay.seconds(12.0) == pytest.approx({**spent.seconds, "regroup": 2.0 + 0.5 + 1.0})
    assert replayed(log[:1]) is None


def test_a_world_that_workers_have_entered_ends_no_class_of_time() -> None:
    """Its time spent is written by another agent, and this one has seen all of it."""
    account = replayed(
        [
            {"event": "registered", "time": 0.0},
            {"event": "start", "time": 1.0},
            {"event": "restored", "time": 2.0, "connect_s": 0.25, "restore_s": 0.25},
            {"event": "step", "time": 3.0, "step": 1, "data_wait_s": 0.0},
            {
                "event": "world",
                "time": 3.5,
                "tier": "live",
                "time_spent": {"until": 3.5, "seconds": {"idle": 100.0}, "steps": []},
            },
            {"event": "step", "time": 4.0, "step": 2, "data_wait_s": 0.0},
        ]
    )
    assert account is not None
    seconds = {kind: s for kind, s in account.seconds(4.0).items() if s}
    assert seconds == {
        "regroup": 1.0,
        "startup": 0.5,
        "connect": 0.25,
        "restore": 0.25,
        "productive": 2.0,
    }
