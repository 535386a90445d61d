"""How fast training comes on, and how much of the time goes into steps that count."""

from __future__ import annotations

import pytest

from elasticzero.launcher.observability.goodput import RECENT_STEPS, GoodputMeter


def test_nothing_is_said_before_there_is_anything() -> None:
    progress = GoodputMeter()
    assert progress.goodput(5.0) is None
    assert progress.generation_age_s(5.0) is None
    progress.begin(0.0)
    assert progress.steps_per_s() is None
    assert progress.step_age_s(5.0) is None
    assert progress.goodput(5.0) is None
    assert progress.generation_age_s(5.0) == 5.0


def test_speed_is_that_of_the_last_steps_of_this_generation() -> None:
    progress = GoodputMeter()
    progress.begin(0.0)
    for step in range(1, 11):
        progress.stepped(step, 1.0, float(step))
    assert progress.steps_per_s() == pytest.approx(1.0)
    for step in range(11, 11 + RECENT_STEPS):
        progress.stepped(step, 0.5, 10.0 + (step - 10) * 0.5)
    assert progress.steps_per_s() == pytest.approx(2.0)
    assert progress.step_age_s(30.0) == pytest.approx(30.0 - 10.0 - RECENT_STEPS * 0.5)
    progress.begin(40.0)
    assert progress.steps_per_s() is None


def test_goodput_leaves_out_pauses_and_repeated_steps() -> None:
    progress = GoodputMeter()
    progress.begin(0.0)
    for step in range(1, 6):
        progress.stepped(step, 1.0, float(step))
    assert progress.goodput(5.0) == pytest.approx(1.0)
    progress.begin(8.0)
    progress.stepped(5, 1.0, 9.0)
    progress.stepped(6, 1.0, 10.0)
    assert progress.goodput(10.0) == pytest.approx(0.6)
