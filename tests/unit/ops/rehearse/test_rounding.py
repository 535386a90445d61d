"""What rounding explains in another world, what it does not, and what cannot be compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticzero.ops.rehearse.results import Outcome, Verdict
from tests.unit.ops.rehearse.made_up import (
    NOUNS,
    Job,
    controls,
    moved,
    other_value,
    plain_job,
    run,
    same_world,
    verdict_on,
)

STEPS = 12


def other_world(
    job: Job,
    rounded: Job,
    nudge_step: int = 7,
    noise: float = 1e-6,
    **change: Any,
) -> Verdict:
    """The verdict on a run that goes on from step 6 with one rank fewer, as `rounded` does."""
    records = job.generation(1, 3, 0, 6) + rounded.generation(2, 2, 6, STEPS)
    nudged = moved(job, nudge_step, noise)
    runs = controls(job, nudged, world=3, **change)
    return verdict_on([*runs, run("drain", records, world=3, **change)], "drain")


def after_the_fault(share: float, from_step: int = 7) -> Job:
    return moved(plain_job(), from_step, share)


@given(st.floats(1e-9, 7.9e-6), st.integers(7, STEPS))
def test_what_rounding_explains_is_within_rounding(share: float, from_step: int) -> None:
    verdict = other_world(plain_job(), after_the_fault(share, from_step))
    assert verdict == Verdict(Outcome.WITHIN_ROUNDING)


@given(st.floats(1e-5, 1.0), st.integers(7, STEPS))
def test_what_rounding_does_not_explain_differs(share: float, from_step: int) -> None:
    verdict = other_world(plain_job(), after_the_fault(share, from_step))
    assert verdict.outcome is Outcome.DIFFERS
    start = f"generation 2, step {from_step}: optimizer state['w']['exp_avg'] lies "
    assert verdict.note.startswith(start)
    assert verdict.note.endswith("a change of a gradient's last bit moves it by 1e-06.")


def test_another_world_with_equal_values_is_equal() -> None:
    assert other_world(plain_job(), plain_job()) == Verdict(Outcome.EQUAL)


def test_a_few_units_in_the_last_place_are_allowed_without_noise() -> None:
    for dtype, ulp in {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7}.items():
        job = replace(plain_job(), dtype=dtype)
        near = other_world(job, moved(job, 7, ulp), noise=0.0)
        assert near.outcome is Outcome.WITHIN_ROUNDING, dtype
        far = other_world(job, moved(job, 7, 100 * ulp), nudge_step=STEPS, noise=ulp)
        assert far.outcome is Outcome.DIFFERS, dtype


def test_the_noise_counts_from_the_first_step_in_another_world() -> None:
    """A generation may begin before the step at which the gradient was nudged."""
    job = plain_job()
    records = job.generation(1, 3, 0, 6) + moved(job, 5, 1e-6).generation(2, 2, 4, STEPS)
    nudged = moved(job, 7, 1e-6)
    runs = [*controls(job, nudged, world=3), run("kill-node", records, world=3)]
    assert verdict_on(runs, "kill-node") == Verdict(Outcome.WITHIN_ROUNDING)


def test_the_largest_distance_so_far_counts() -> None:
    """The nudged run is back where it was when the other one differs."""
    job = plain_job()
    nudged = replace(job, states=[*job.states[:8], moved(job, 8, 1e-3).states[8], *job.states[9:]])
    records = job.generation(1, 3, 0, 6) + moved(job, 10, 1e-3).generation(2, 2, 6, STEPS)
    runs = [*controls(job, nudged, world=3), run("drain", records, world=3)]
    assert verdict_on(runs, "drain") == Verdict(Outcome.WITHIN_ROUNDING)


@pytest.mark.parametrize("kind", ["tracked", "buffer", "extra state"])
def test_counters_and_texts_must_be_equal_in_another_world(kind: str) -> None:
    job = plain_job()
    (key,) = [key for key in job.states[0] if key[0] == kind]
    states = [
        {**s, key: other_value(s[key])} if step >= 9 else s for step, s in enumerate(job.states)
    ]
    verdict = other_world(job, replace(job, states=states))
    assert verdict.outcome is Outcome.DIFFERS
    assert verdict.note.startswith(f"generation 2, step 9: {NOUNS[kind]} '{key[1]}' is ")


def test_a_counter_that_the_nudge_moves_too_depends_on_rounding() -> None:
    """As the number of bad epochs of a schedule that watches a loss does."""
    key = ("tracked", "plateau.num_bad_epochs")
    job = replace(plain_job(), states=[{**s, key: 0} for s in plain_job().states])
    turned = [{**s, key: 1} if step >= 8 else s for step, s in enumerate(job.states)]
    other = replace(job, states=turned)
    records = job.generation(1, 3, 0, 6) + other.generation(2, 2, 6, STEPS)
    runs = controls(job, other, world=3)
    verdict = verdict_on([*runs, run("drain", records, world=3)], "drain")
    assert verdict == Verdict(Outcome.WITHIN_ROUNDING)


def test_values_that_are_not_finite_in_one_run_alone_differ() -> None:
    job = plain_job()
    key = ("parameter", "w")
    nan = [{**s, key: (float("nan"), 1.0)} if i >= 9 else s for i, s in enumerate(job.states)]
    broken = replace(job, states=nan)
    assert other_world(job, broken).outcome is Outcome.DIFFERS
    assert other_world(broken, job).outcome is Outcome.DIFFERS
    both = [{**s, key: (float("nan"), 2.0)} if i >= 9 else s for i, s in enumerate(job.states)]
    assert other_world(broken, replace(job, states=both)).outcome is Outcome.WITHIN_ROUNDING


@pytest.mark.parametrize(
    ("job", "change", "text"),
    [
        (replace(plain_job(), draws=True), {}, "the forward or the data draws at random; "),
        (plain_job(), {"batch_norm": True}, "BatchNorm's statistics are of one rank's samples; "),
    ],
)
def test_what_depends_on_the_world_is_not_comparable(
    job: Job, change: dict[str, Any], text: str
) -> None:
    verdict = other_world(job, moved(job, 7, 0.1), **change)
    assert verdict.outcome is Outcome.NOT_COMPARABLE
    assert verdict.note.startswith(text)
    sliced = other_world(job, moved(job, 7, 0.1), virtual_batch=True, **change)
    assert sliced.outcome is Outcome.DIFFERS
    lost = replace(job, states=[{**s, ("buffer", "head.calls"): 0} for s in job.states])
    assert other_world(job, lost, **change).outcome is Outcome.DIFFERS


def test_what_follows_a_fault_is_not_comparable_where_gradients_are_encoded() -> None:
    job, moves = plain_job(), moved(plain_job(), 7, 0.1)
    verdict = other_world(job, moves, wire="int8")
    assert verdict.outcome is Outcome.NOT_COMPARABLE
    assert verdict.note.startswith("with --wire int8 other ranks leave out other parts")
    assert other_world(job, moves, wire="fp32").outcome is Outcome.DIFFERS
    lost = replace(job, states=[{**s, ("buffer", "head.calls"): 0} for s in job.states])
    assert other_world(job, lost, wire="int8").outcome is Outcome.DIFFERS
    records = job.generation(1, 2, 0, 6)
    same = records + job.generation(2, 2, 6, STEPS)
    assert same_world(job, same, wire="int8") == Verdict(Outcome.EQUAL)
    other = records + moves.generation(2, 2, 6, STEPS)
    assert same_world(job, other, wire="int8").outcome is Outcome.NOT_COMPARABLE
    assert same_world(job, other).outcome is Outcome.DIFFERS
    runs = controls(job, strategy="zero1")
    runs.append(run("kill-worker", other, wire="int8", strategy="zero1"))
    judged = verdict_on(runs, "kill-worker", "zero1")
    assert judged.outcome is Outcome.DIFFERS, "a snapshot has what was not sent"


def test_draws_are_compared_where_the_world_stays() -> None:
    job = replace(plain_job(), draws=True)
    records = job.generation(1, 2, 0, 6) + job.generation(2, 2, 6, STEPS)
    assert same_world(job, records, batch_norm=True) == Verdict(Outcome.EQUAL)


def test_rounding_is_not_judged_without_a_nudged_run() -> None:
    job = plain_job()
    verdict = other_world(job, moved(job, 7, 0.1), noise=0.0)
    assert verdict.outcome is Outcome.NOT_COMPARABLE
    assert verdict.note.startswith("no run with a nudged gradient tells what rounding does: ")


def test_a_strategy_without_undisturbed_runs_is_compared_with_another_one() -> None:
    job = plain_job()
    rounded = moved(job, 1, 1e-6)
    records = rounded.generation(1, 2, 0, 6) + rounded.generation(2, 2, 6, STEPS)
    runs = [*controls(job, moved(job, 7, 1e-6)), run("kill-worker", records, strategy="zero2")]
    assert verdict_on(runs, "kill-worker", "zero2") == Verdict(Outcome.WITHIN_ROUNDING)
    half = [replace(result, half_parameters=True) for result in runs]
    verdict = verdict_on(half, "kill-worker", "zero2")
    assert verdict.outcome is Outcome.NOT_COMPARABLE
    assert verdict.note.startswith("16-bit parameters have 32-bit masters under zero1 to zero3 ")


def test_another_strategy_may_have_other_names_and_draws_in_the_same_world() -> None:
    job = replace(plain_job(), draws=True)
    named = replace(job, states=[{**s, ("optimizer attribute", "parts"): 3} for s in job.states])
    records = named.generation(1, 2, 0, 6) + named.generation(2, 2, 6, STEPS)
    runs = [*controls(job), run("kill-worker", records, strategy="zero2")]
    assert verdict_on(runs, "kill-worker", "zero2") == Verdict(Outcome.EQUAL)


def test_the_undisturbed_run_of_the_same_strategy_comes_first() -> None:
    job = plain_job()
    other = moved(job, 1, 0.5)
    records = job.generation(1, 2, 0, 6) + job.generation(2, 2, 6, STEPS)
    runs = [*controls(other), run("none", job.undisturbed(2), strategy="zero2")]
    runs += [run("kill-worker", records, strategy="zero2")]
    assert verdict_on(runs, "kill-worker", "zero2") == Verdict(Outcome.EQUAL)


def test_half_parameters_of_zero_strategies_are_compared_with_each_other() -> None:
    job = plain_job()
    rounded = moved(job, 1, 1e-6)
    records = rounded.generation(1, 2, 0, 6) + rounded.generation(2, 2, 6, STEPS)
    kinds: dict[str, Any] = {"half_parameters": True}
    runs = controls(job, moved(job, 7, 1e-6), strategy="zero1", **kinds)
    other = controls(moved(job, 1, 0.5), strategy="ddp", **kinds)
    faulted = run("kill-worker", records, strategy="zero3", **kinds)
    verdict = verdict_on([*other, *runs, faulted], "kill-worker", "zero3")
    assert verdict == Verdict(Outcome.WITHIN_ROUNDING)
