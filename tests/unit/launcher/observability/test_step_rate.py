"""How fast training comes on."""

from __future__ import annotations

import pytest

from elasticzero.launcher.observability.step_rate import RECENT_STEPS, StepRate


def test_nothing_is_said_before_there_is_anything() -> None:
    rate = StepRate()
    assert rate.generation_age_s(5.0) is None
    rate.begin(0.0)
    assert rate.steps_per_s() is None
    assert rate.step_age_s(5.0) is None
    assert rate.generation_age_s(5.0) == 5.0


def test_speed_is_that_of_the_last_steps_of_this_generation() -> None:
    rate = StepRate()
    rate.begin(0.0)
    for step in range(1, 11):
        rate.stepped(float(step))
    assert rate.steps_per_s() == pytest.approx(1.0)
    for step in range(11, 11 + RECENT_STEPS):
        rate.stepped(10.0 + (step - 10) * 0.5)
    assert rate.steps_per_s() == pytest.approx(2.0)
    assert rate.step_age_s(30.0) == pytest.approx(30.0 - 10.0 - RECENT_STEPS * 0.5)
    rate.begin(40.0)
    assert rate.steps_per_s() is None


def test_samples_a_second_are_those_of_the_same_steps() -> None:
    rate = StepRate()
    rate.begin(0.0)
    assert rate.samples_per_s() is None
    for step in range(1, 6):
        rate.stepped(float(step), 8 if step < 5 else 4)
    assert rate.samples_per_s() == pytest.approx((3 * 8 + 4) / 4)
