"""Phases of recoveries, from one generation to the next."""

from __future__ import annotations

from elasticzero.ipc.messages import Restored
from elasticzero.launcher.observability.recovery.record import RecoveryRecord

RESTORED = Restored(step=4, tier="ram", connect_s=0.1, build_s=0.2, restore_s=0.3)


def test_a_recovery_is_told_at_its_first_step() -> None:
    seen: list[tuple[str, str, float]] = []
    record = RecoveryRecord(lambda cause, phase, s: seen.append((cause, phase, round(s, 6))))
    record.round_opened("failure", "rank 1 failed", 10.0, 9.0)
    assert record.round_is_open
    record.starting(10.5, lost=3)
    assert not record.round_is_open
    record.attached(10.6)
    record.restored(RESTORED, 11.2)
    event = record.stepped(11.5)
    assert event is not None
    assert (event["kind"], event["reason"], event["steps_lost"]) == ("failure", "rank 1 failed", 3)
    assert event["seconds"] == 1.0 + 0.5 + 0.1 + 0.1 + 0.2 + 0.3 + 0.3
    assert seen[0] == ("failure", "detect", 1.0)
    assert seen[-1] == ("failure", "first_step", 0.3)
    assert record.stepped(11.6) is None


def test_the_first_generation_is_no_recovery() -> None:
    causes: set[str] = set()
    record = RecoveryRecord(lambda cause, phase, s: causes.add(cause))
    record.starting(0.0, lost=0)
    record.attached(0.1)
    record.restored(RESTORED, 0.5)
    assert record.stepped(0.6) is None
    assert causes == {"start"}


def test_a_phase_that_was_not_seen_is_null() -> None:
    record = RecoveryRecord(lambda cause, phase, s: None)
    record.round_opened("grow", "node d comes", 10.0, 0.0)
    record.starting(10.5, lost=0)
    record.restored(RESTORED, 11.0)
    event = record.stepped(11.5)
    assert event is not None
    assert (event["detect_s"], event["start_s"]) == (None, None)
