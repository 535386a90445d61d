"""Which global batches are applied, and how the loss scale moves."""

from __future__ import annotations

import json
import math

import pytest

from elasticzero.errors import UserError
from elasticzero.options.settings import SpikeLimit, spike_limit
from elasticzero.training.step_guard import (
    FIRST_SCALE,
    GROWTH_STEPS,
    MAX_SCALE,
    MOST_ROLLED_BACK,
    MOST_SKIPPED,
    StepGuard,
)

NAN = math.nan
SPIKE = SpikeLimit(action="skip", deviations=4.0, steps=10)


def test_without_options_a_norm_that_is_not_finite_stops() -> None:
    guard = StepGuard()
    assert guard.judge(1.0, NAN).action == "apply"
    assert guard.judge(NAN, 1.0).action == guard.judge(math.inf, 1.0).action == "stop"
    assert not guard.keeps_state and guard.scale == 1.0


def test_skip_leaves_batches_out_but_not_forever() -> None:
    guard = StepGuard("skip")
    for _ in range(2):
        for _ in range(MOST_SKIPPED):
            assert guard.judge(NAN, NAN).action == "skip"
        assert guard.judge(1.0, 1.0).action == "apply"
    for _ in range(MOST_SKIPPED):
        guard.judge(NAN, NAN)
    verdict = guard.judge(NAN, NAN)
    assert verdict.action == "stop" and str(MOST_SKIPPED) in verdict.reason


def test_a_rollback_stops_where_the_batches_before_were_left_out_too() -> None:
    for count in range(MOST_ROLLED_BACK + 1):
        guard = StepGuard("rollback")
        for _ in range(count):
            guard.passed_over()
        verdict = guard.judge(NAN, NAN)
        assert verdict.action == ("stop" if count == MOST_ROLLED_BACK else "rollback")
        assert str(MOST_ROLLED_BACK) in verdict.reason or verdict.action == "rollback"
    guard.judge(1.0, 1.0)
    assert guard.judge(NAN, NAN).action == "rollback" and guard.keeps_state


@pytest.mark.parametrize(("on_nonfinite", "at_last"), [("stop", "stop"), ("skip", "skip")])
def test_the_scale_halves_and_doubles(on_nonfinite: str, at_last: str) -> None:
    guard = StepGuard(on_nonfinite, scales=True)  # type: ignore[arg-type]  # a text of a parameter
    guard.judge(NAN, 1.0)
    assert guard.scale == FIRST_SCALE / 2
    for _ in range(GROWTH_STEPS - 1):
        guard.judge(1.0, 1.0)
    guard.judge(NAN, 1.0)
    assert guard.scale == FIRST_SCALE / 4, "the steps before count for nothing"
    for _ in range(GROWTH_STEPS):
        assert guard.judge(1.0, 1.0).action == "apply"
    assert guard.scale == FIRST_SCALE / 2
    while guard.scale > 1.0:
        assert guard.judge(NAN, 1.0).action == "skip"
    assert guard.judge(NAN, 1.0).action == at_last
    for _ in range(30 * GROWTH_STEPS):
        guard.judge(1.0, 1.0)
    assert guard.scale == MAX_SCALE


def test_a_spike_is_far_above_the_losses_before_it() -> None:
    guard = StepGuard(on_spike=SPIKE)
    assert guard.judge(1.0, 1e9).action == "apply", "nothing to compare with yet"
    for step in range(10):
        guard.judge(1.0, 2.0 + 0.1 * (step % 2))
    verdict = guard.judge(1.0, 2.3)
    assert verdict.action == "skip" and "its loss 2.3 is more than 4 standard" in verdict.reason
    assert guard.judge(1.0, 2.2).action == "apply"
    assert guard.judge(1.0, -5.0).action == "apply", "lower is no spike"


def test_a_constant_loss_has_no_spikes() -> None:
    guard = StepGuard(on_spike=SPIKE)
    for _ in range(10):
        guard.judge(1.0, 2.0)
    assert guard.judge(1.0, 2.01).action == "apply"
    assert guard.judge(1.0, 2.2).action == "skip"


def test_state_goes_through_json_to_an_equal_guard() -> None:
    one, other = (StepGuard("skip", SPIKE, scales=True) for _ in range(2))
    for step in range(15):
        one.judge(NAN if step in (3, 14) else 1.0, 1.0 + step / 7)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert other.state_dict() == one.state_dict() and other.scale == one.scale
    assert other.judge(1.0, 1e6) == one.judge(1.0, 1e6)
    plain = StepGuard("skip")
    plain.load_state_dict(one.state_dict())
    assert plain.scale == 1.0, "fp16's scale is not bf16's"
    one.load_state_dict({})


@pytest.mark.parametrize(
    "text", ["skip", "skip:3", "keep:3:10", "skip:0:10", "stop:3:1", "skip:x:9"]
)
def test_other_limits_are_refused(text: str) -> None:
    with pytest.raises(
        UserError, match=f"--on-spike {text}: off, stop:K:N, skip:K:N or rollback:K:N"
    ):
        spike_limit("--on-spike", text)


def test_limits_are_read() -> None:
    assert spike_limit("--on-spike", "off") is None
    assert spike_limit("--on-spike", "skip:4:10") == SPIKE and str(SPIKE) == "skip:4:10"
    assert str(spike_limit("--on-spike", "rollback:4:10")) == "rollback:4:10"
