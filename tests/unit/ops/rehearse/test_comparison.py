"""What is said of made-up runs: each lost value, step and sample is named, and nothing else is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticzero.ops.rehearse.comparison import compare, samples_text
from elasticzero.ops.rehearse.results import Outcome, Verdict, is_passed
from elasticzero.rehearsal.records import LiveValue, Moment, StepRecord
from tests.unit.ops.rehearse.made_up import (
    KINDS,
    NOUNS,
    Job,
    Key,
    State,
    Value,
    controls,
    live,
    other_value,
    plain_job,
    run,
    same_world,
    verdict_on,
    with_value,
)

STEPS = 12


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Jobs with a few values of any kind, each of which a step may leave as it was."""
    steps = draw(st.integers(4, 9))
    keys = draw(
        st.lists(
            st.tuples(st.sampled_from(KINDS), st.sampled_from(["a", "b.c", "state['w']['x']"])),
            min_size=1,
            max_size=5,
            unique=True,
        )
    )
    number = st.integers(-5, 5)
    vector = st.lists(st.integers(1, 64), min_size=1, max_size=3).map(
        lambda items: tuple(float(item) for item in items)
    )
    columns: dict[Key, list[Any]] = {
        key: draw(
            st.lists(
                draw(st.sampled_from([number, vector, st.text("ab", max_size=2)])),
                min_size=steps + 1,
                max_size=steps + 1,
            )
        )
        for key in keys
    }
    states: list[State] = [
        {key: column[step] for key, column in columns.items()} for step in range(steps + 1)
    ]
    return Job(states, global_batch=draw(st.integers(2, 6)))


@st.composite
def recoveries(draw: st.DrawFn, worlds: Sequence[int]) -> tuple[Job, list[StepRecord], int]:
    """A job, its records through generations in these worlds, and where the second one begins.

    A generation may have made steps that the next one makes again.
    """
    job = draw(jobs())
    records: list[StepRecord] = []
    start, second = 0, 0
    for index, world in enumerate(worlds):
        is_last = index == len(worlds) - 1
        last = job.steps if is_last else draw(st.integers(max(1, start), job.steps - 1))
        records += job.generation(index + 1, world, start, last)
        start = draw(st.integers(1, last))
        second = second or start
    return job, records, second


@settings(max_examples=50)
@given(recoveries((2, 2, 2)))
def test_a_run_that_goes_on_exactly_is_equal(recovery: tuple[Job, list[StepRecord], int]) -> None:
    job, records, _ = recovery
    assert same_world(job, records) == Verdict(Outcome.EQUAL)


@settings(max_examples=50)
@given(recoveries((2, 2)), st.data())
def test_one_other_value_is_named_with_its_step(
    recovery: tuple[Job, list[StepRecord], int], data: st.DataObject
) -> None:
    """The value may be of any record of rank 0 from the boundary on that the second generation
    goes on from; what is undone changes nothing."""
    job, records, start = recovery
    places = [
        i for i, r in enumerate(records) if r.rank == 0 and (r.generation == 2 or r.step >= start)
    ]
    place = data.draw(st.sampled_from(places))
    record = records[place]
    key: Key = data.draw(st.sampled_from(sorted(job.states[0])))
    changed = other_value(job.states[record.step][key])
    records[place] = with_value(record, key, changed, job.dtype)
    verdict = same_world(job, records)
    if record.generation == 1 and record.step > start:
        assert verdict == Verdict(Outcome.EQUAL)
        return
    before_step = record.moment is Moment.START or record.generation == 1
    where = f"before step {start + 1}" if before_step else f"step {record.step}"
    name = key[1] if "'" in key[1] else f"'{key[1]}'"
    assert verdict.outcome is Outcome.DIFFERS
    assert verdict.note.startswith(f"generation 2, {where}: {NOUNS[key[0]]} {name} ")
    assert "other value" not in verdict.note.replace("has other values", "")


@settings(max_examples=50)
@given(recoveries((2, 2)), st.data())
def test_a_value_that_differs_before_the_fault_is_not_the_faults(
    recovery: tuple[Job, list[StepRecord], int], data: st.DataObject
) -> None:
    job, records, start = recovery
    places = [i for i, r in enumerate(records) if r.rank == 0 and r.step < start]
    place = data.draw(st.sampled_from(places))
    record = records[place]
    key: Key = data.draw(st.sampled_from(sorted(job.states[0])))
    changed = other_value(job.states[record.step][key])
    records[place] = with_value(record, key, changed, job.dtype)
    verdict = same_world(job, records)
    where = f"step {record.step}" if record.step else "before step 1"
    assert verdict.outcome is Outcome.NOT_COMPARABLE
    assert verdict.note.startswith(f"the run differs before the fault: {where}: ")


@settings(max_examples=50)
@given(recoveries((2, 3, 1)), st.data())
def test_a_lost_value_is_named_in_any_world(
    recovery: tuple[Job, list[StepRecord], int], data: st.DataObject
) -> None:
    job, records, _ = recovery
    starts = [i for i, r in enumerate(records) if r.moment is Moment.START and r.generation > 1]
    place = data.draw(st.sampled_from([i for i in starts if records[i].rank == 0]))
    record = records[place]
    key: Key = data.draw(st.sampled_from(sorted(job.states[0])))
    records[place] = with_value(record, key, None, job.dtype)
    verdict = same_world(job, records)
    if len(job.states[0]) == 1:
        assert verdict.outcome is Outcome.FAILED, "nothing at all was recorded"
        return
    assert verdict.outcome is Outcome.DIFFERS
    where = f"generation {record.generation}, before step {record.step + 1}: "
    assert verdict.note.startswith(where)
    assert verdict.note.endswith("is missing.")


@settings(max_examples=50)
@given(recoveries((3, 2)), st.data())
def test_a_sample_that_is_lost_or_used_twice_is_named(
    recovery: tuple[Job, list[StepRecord], int], data: st.DataObject
) -> None:
    job, records, start = recovery
    places = [i for i, r in enumerate(records) if r.samples]
    place = data.draw(st.sampled_from(places))
    record = records[place]
    lost = record.samples[0]
    change = data.draw(st.sampled_from(["lost", "twice", "replaced"]))
    samples = {
        "lost": record.samples[1:],
        "twice": (lost, *record.samples),
        "replaced": (1000, *record.samples[1:]),
    }[change]
    records[place] = replace(record, samples=samples)
    runs = [*controls(job, world=3), run("kill-node", records, world=3)]
    verdict = verdict_on(runs, "kill-node")
    if record.generation == 1 and record.step > start:
        assert verdict.outcome is Outcome.EQUAL
        assert samples_text(runs) == "each once"
        return
    text = {
        "lost": f"sample {lost} is missing.",
        "twice": f"sample {lost} is counted once too often.",
        "replaced": f"sample {lost} is missing, and sample 1000 is in its place.",
    }[change]
    assert verdict.outcome is Outcome.DIFFERS
    assert verdict.note == f"generation {record.generation}, step {record.step}: {text}"
    assert samples_text(runs) == "DIFFER"


def with_generator_of(rank: int, records: list[StepRecord]) -> None:
    """Has this rank begin generation 2 with another generator."""
    place = next(
        i
        for i, r in enumerate(records)
        if r.generation == 2 and r.moment is Moment.START and r.rank == rank
    )
    records[place] = with_value(records[place], ("generator", "torch"), "seeded anew", "float64")


def test_the_generators_of_rank_0_must_come_back() -> None:
    job = plain_job()
    records = job.generation(1, 3, 0, 6) + job.generation(2, 2, 6, STEPS)
    with_generator_of(0, records)
    runs = [*controls(job, world=3), run("kill-node", records, world=3)]
    verdict = verdict_on(runs, "kill-node")
    assert verdict.outcome is Outcome.DIFFERS
    assert verdict.note == (
        "generation 2, before step 7: generator 'torch' of rank 0 was '0 after 6' and is 'seeded "
        "anew'."
    )


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("sliced", [False, True])
def test_generators_of_another_rank_may_begin_anew(draws: bool, sliced: bool) -> None:
    """A whole state has those of one rank. It matters where the script draws from them."""
    job = replace(plain_job(), draws=draws)
    records = job.generation(1, 2, 0, 6) + job.generation(2, 2, 6, STEPS)
    with_generator_of(1, records)
    runs = [*controls(job), run("kill-worker", records, virtual_batch=sliced)]
    verdict = verdict_on(runs, "kill-worker")
    assert verdict.outcome is (Outcome.NOT_COMPARABLE if draws and not sliced else Outcome.EQUAL)
    assert ("generators of rank 1 begin anew" in verdict.note) == (draws and not sliced)


@pytest.mark.parametrize(("wrong", "outcome"), [("7", Outcome.DIFFERS), ("6", Outcome.EQUAL)])
def test_what_a_later_rank_begins_with_is_rank_0s(wrong: str, outcome: Outcome) -> None:
    """A rank may leave out what it does not hold, and may have what it had itself before."""
    job = plain_job()
    records = job.generation(1, 2, 0, 6) + job.generation(2, 2, 6, STEPS)
    place = next(i for i, r in enumerate(records) if r.generation == 2 and r.rank == 1)
    value = live("buffer", "head.calls", int(wrong))
    records[place] = replace(records[place], live=(*records[place].live, value))
    verdict = same_world(job, records)
    assert verdict.outcome is outcome
    if outcome is Outcome.DIFFERS:
        assert verdict.note == (
            "generation 2, before step 7: buffer 'head.calls' of rank 1 was 6 and is 7."
        )


def test_several_lost_values_are_counted_and_the_cause_is_named() -> None:
    job = plain_job()
    lost = plain_job()
    wrong: dict[Key, Value] = {
        ("parameter", "w"): (9.0, 9.0),
        ("buffer", "head.calls"): 0,
        ("optimizer", "state['w']['exp_avg']"): (0.0, 0.0),
    }
    lost = replace(lost, states=[{**state, **wrong} for state in lost.states])
    records = job.generation(1, 2, 0, 6) + lost.generation(2, 2, 6, STEPS)
    verdict = same_world(job, records)
    assert verdict == Verdict(
        Outcome.DIFFERS,
        "generation 2, before step 7: buffer 'head.calls' was 6 and is 0; 2 other values differ "
        "too.",
        'docs/training.md, "What is kept of modules and generators"',
    )


def test_a_value_that_is_new_differs() -> None:
    job = plain_job()
    grown = replace(job, states=[{**s, ("optimizer", "momentum"): 0} for s in job.states])
    records = job.generation(1, 2, 0, 6) + grown.generation(2, 2, 6, STEPS)
    note = "generation 2, before step 7: optimizer 'momentum' is 0 and was not there."
    assert same_world(job, records).note == note


def test_a_generation_without_a_step_is_compared_with_the_newest_boundary() -> None:
    job = plain_job()
    records = (
        job.generation(1, 2, 0, 8)
        + job.generation(2, 2, 6, 6)
        + job.generation(3, 2, 6, 6)
        + job.generation(4, 2, 6, STEPS)
    )
    assert same_world(job, records) == Verdict(Outcome.EQUAL)
    place = next(i for i, r in enumerate(records) if r.generation == 3)
    records[place] = with_value(records[place], ("buffer", "head.calls"), 0, "float64")
    note = "generation 3, before step 7: buffer 'head.calls' was 6 and is 0."
    assert same_world(job, records).note == note


def test_the_boundary_is_that_of_the_newest_generation_that_made_it() -> None:
    """The first generation had another value at step 8, which the second one has made again."""
    job = plain_job()
    first = job.generation(1, 2, 0, 8)
    first[-2] = with_value(first[-2], ("buffer", "head.calls"), 99, "float64")
    records = first + job.generation(2, 2, 6, 8) + job.generation(3, 2, 8, STEPS)
    assert same_world(job, records) == Verdict(Outcome.EQUAL)


def test_steps_that_no_later_generation_makes_again_are_undone() -> None:
    job = plain_job()
    records = job.generation(1, 2, 0, STEPS) + job.generation(2, 2, 6, 7)
    note = "the run ended after 7 steps, and the undisturbed run after 12 steps."
    assert same_world(job, records).note == note


def test_a_difference_at_the_last_boundary_before_the_fault_is_not_the_faults() -> None:
    """It came back as it was."""
    job = plain_job()
    records = job.generation(1, 2, 0, 6) + job.generation(2, 2, 6, STEPS)
    key = ("buffer", "head.calls")
    records = [with_value(r, key, 99, "float64") if r.step == 6 else r for r in records]
    verdict = same_world(job, records)
    assert verdict.outcome is Outcome.NOT_COMPARABLE
    assert verdict.note.startswith("the run differs before the fault: step 6: buffer ")


def test_a_cause_is_named_before_what_follows_from_it_in_any_order_of_records() -> None:
    job = plain_job()
    records = job.generation(1, 2, 0, 6) + job.generation(2, 2, 6, STEPS)
    records = [replace(record, live=record.live[::-1]) for record in records]
    place = next(i for i, r in enumerate(records) if r.generation == 2)
    values = [replace(value, digest="lost") for value in records[place].live]
    records[place] = replace(records[place], live=tuple(values))
    note = same_world(job, records).note
    start = "generation 2, before step 7: tracked value 'schedule.last_epoch' (6) has another value"
    assert note == f"{start}; 6 other values differ too."


def test_a_generation_that_begins_again_at_0_is_not_compared_with_the_first() -> None:
    job = plain_job()
    records = job.generation(1, 2, 0, 2) + job.generation(2, 2, 0, STEPS)
    assert same_world(job, records) == Verdict(Outcome.EQUAL)


def test_a_run_without_a_second_generation_has_proven_nothing() -> None:
    job = plain_job()
    verdict = same_world(job, job.undisturbed(2))
    assert verdict.outcome is Outcome.FAILED
    assert verdict.note == "no generation began after the fault, so that nothing was compared."


@pytest.mark.parametrize("moment", ["after step 6", "before step 7"])
def test_a_boundary_without_a_record_has_proven_nothing(moment: str) -> None:
    job = plain_job()
    records = job.generation(1, 2, 0, 6) + job.generation(2, 2, 6, STEPS)
    generation = 1 if moment == "after step 6" else 2
    records = [r for r in records if r.rank or (r.generation, r.step) != (generation, 6)]
    verdict = same_world(job, records)
    assert verdict.outcome is Outcome.FAILED
    assert verdict.note == (
        f"generation 2: no rank has recorded the whole state {moment}, so that nothing was "
        "compared."
    )


def test_a_step_without_a_record_is_named() -> None:
    job = plain_job()
    records = job.generation(1, 2, 0, 6) + job.generation(2, 2, 6, STEPS)
    verdict = same_world(job, [r for r in records if r.step != 9])
    assert verdict.note == "step 9: no rank has recorded the whole state."
    verdict = same_world(job, [r for r in records if r.step != 9 or r.rank != 1])
    assert verdict.outcome is Outcome.NOT_COMPARABLE
    assert verdict.note == "step 9: rank 1 left no record, so that its samples are not known."


def test_a_run_of_fewer_steps_differs() -> None:
    job = plain_job()
    records = job.generation(1, 2, 0, 6) + job.generation(2, 2, 6, 9)
    verdict = same_world(job, records)
    assert verdict.outcome is Outcome.DIFFERS
    assert verdict.note == "the run ended after 9 steps, and the undisturbed run after 12 steps."


@pytest.mark.parametrize(
    ("last", "change", "outcome", "note"),
    [
        (9, {"failure": "KeyError: 'x'\n"}, Outcome.FAILED, "after 9 steps: KeyError: 'x'."),
        (9, {"exit_code": 70}, Outcome.FAILED, "after 9 steps: exit code 70."),
        (
            6,
            {"exit_code": 70},
            Outcome.FAILED,
            "generation 2, before its first step: exit code 70.",
        ),
        (7, {"refusal": "no hooks."}, Outcome.REFUSED, "after 7 steps: no hooks."),
    ],
)
def test_a_run_that_failed_is_judged_by_its_sentence(
    last: int, change: dict[str, Any], outcome: Outcome, note: str
) -> None:
    job = plain_job()
    records = job.generation(1, 2, 0, 6) + job.generation(2, 2, 6, last)
    verdict = same_world(job, records, **change)
    assert (verdict.outcome, verdict.note) == (outcome, note)


def test_a_strategy_that_prepare_refuses_has_a_verdict_on_its_undisturbed_run() -> None:
    refused = run("none", [], strategy="zero3", exit_code=64, refusal="'w' has a hook")
    verdicts = compare([*controls(plain_job()), refused])
    assert verdicts["zero3", "none", 2].note == "prepare: 'w' has a hook."
    assert verdicts["zero3", "none", 2].outcome is Outcome.REFUSED
    assert verdicts["ddp", "none", 2] == Verdict(Outcome.EQUAL)


# Two undisturbed runs


@settings(max_examples=50)
@given(jobs(), st.data())
def test_two_undisturbed_runs_that_differ_make_nothing_comparable(
    job: Job, data: st.DataObject
) -> None:
    first, again, nudged = controls(job)
    places = [i for i, record in enumerate(again.records) if record.rank == 0 or record.loss]
    place = data.draw(st.sampled_from(places))
    record = again.records[place]
    other = replace(record, loss="nan" if record.loss else "")
    if record.rank == 0:
        keys = sorted(key for key in job.states[0] if key[0] != "tracked")
        if not (record.loss or keys):
            return
        if keys:
            key: Key = data.draw(st.sampled_from(keys))
            other = with_value(record, key, other_value(job.states[record.step][key]), job.dtype)
    records = (*again.records[:place], other, *again.records[place + 1 :])
    middle = job.steps // 2
    faulted = job.generation(1, 2, 0, middle) + job.generation(2, 2, middle, job.steps)
    runs = [first, replace(again, records=records), nudged, run("kill-worker", faulted)]
    verdict = verdict_on(runs, "kill-worker")
    assert verdict.outcome is Outcome.NOT_COMPARABLE
    where = f"step {record.step}" if record.step else "before step 1"
    assert verdict.note.startswith(f"two undisturbed runs differ: {where}: ")
    assert compare(runs)["ddp", "none", 2] == verdict


@pytest.mark.parametrize("wrong", ["", "time", "buffer"])
@pytest.mark.parametrize("name", ["log.time", "log['log_history'][0]['eval_runtime']"])
def test_a_tracked_time_is_left_out_and_nothing_else(wrong: str, name: str) -> None:
    """It must come back after a fault all the same."""
    plain, time = plain_job(), ("tracked", name)
    states = list(enumerate(plain.states))
    jobs = [
        replace(plain, states=[{**state, time: s * 10 + number} for s, state in states])
        for number in range(4)
    ]
    if name != "log.time":
        jobs[1] = jobs[0]  # by chance
    faulted = jobs[3].generation(1, 2, 0, 6) + jobs[3].generation(2, 2, 6, 12)
    if wrong:
        other = time if wrong == "time" else ("buffer", "head.calls")
        moment = Moment.START if wrong == "time" else Moment.BOUNDARY
        faulted = [
            with_value(record, other, 99, plain.dtype)
            if (record.generation, record.moment, record.rank) == (2, moment, 0)
            else record
            for record in faulted
        ]
    names = ("none", "none again", "nudged", "kill-worker")
    records = [*(job.undisturbed(2) for job in jobs[:3]), faulted]
    runs = [run(name, made) for name, made in zip(names, records, strict=True)]
    verdicts = compare(runs)
    undisturbed = verdicts["ddp", "none", 2]
    assert undisturbed.outcome is Outcome.EQUAL
    assert undisturbed.note.startswith("two undisturbed runs are equal but for tracked value ")
    assert name in undisturbed.note
    faulty = verdicts["ddp", "kill-worker", 2]
    if not wrong:
        assert faulty.outcome is Outcome.EQUAL, faulty
    else:
        assert faulty.outcome is Outcome.DIFFERS
        assert (name if wrong == "time" else "head.calls") in faulty.note


def test_samples_that_the_script_draws_anew_are_not_held_against_a_fault() -> None:
    job = plain_job()
    first, again, nudged = controls(job)
    records = [replace(r, samples=tuple(s + 100 for s in r.samples)) for r in again.records]
    faulted = job.generation(1, 2, 0, 6) + job.generation(2, 2, 6, STEPS)
    faulted = [replace(r, samples=tuple(s + 200 for s in r.samples)) for r in faulted]
    runs = [first, replace(again, records=tuple(records)), nudged, run("kill-worker", faulted)]
    verdict = verdict_on(runs, "kill-worker")
    assert verdict.outcome is Outcome.NOT_COMPARABLE
    assert verdict.note == "two undisturbed runs differ: their steps have other samples."


def test_nothing_is_comparable_without_undisturbed_runs() -> None:
    job = plain_job()
    faulted = run("kill-worker", job.generation(1, 2, 0, 6) + job.generation(2, 2, 6, STEPS))
    verdict = verdict_on([faulted], "kill-worker")
    assert verdict.note == "there is no undisturbed run to compare with."
    verdict = verdict_on([controls(job)[0], faulted], "kill-worker")
    assert verdict.outcome is Outcome.NOT_COMPARABLE
    assert verdict.note.startswith("there is no second undisturbed run")


def test_losses_that_are_no_numbers_are_equal_as_their_bits_are() -> None:
    job = plain_job()
    records = [replace(r, loss="nan") if r.loss else r for r in job.undisturbed(2)]
    faulted = job.generation(1, 2, 0, 6) + job.generation(2, 2, 6, STEPS)
    faulted = [replace(r, loss="nan") if r.loss else r for r in faulted]
    undisturbed = [run(name, records) for name in ("none", "none again", "nudged")]
    verdict = verdict_on([*undisturbed, run("kill-worker", faulted)], "kill-worker")
    assert verdict == Verdict(Outcome.EQUAL)
    faulted[-1] = replace(faulted[-1], loss=(0.5).hex())
    verdict = verdict_on([*undisturbed, run("kill-worker", faulted)], "kill-worker")
    assert verdict.note == (
        "generation 2, step 12: loss of rank 1 is 0.5, and nan in the undisturbed run."
    )


def test_a_rehearsal_is_passed_where_no_run_differs_or_failed() -> None:
    equal, lost = Verdict(Outcome.EQUAL), Verdict(Outcome.DIFFERS, "x.", "y")
    unknown, refused = Verdict(Outcome.NOT_COMPARABLE, "x."), Verdict(Outcome.REFUSED, "x.")
    failed = Verdict(Outcome.FAILED, "x.")
    assert is_passed({("ddp", "drain", 2): equal, ("zero3", "none", 2): refused})
    assert not is_passed({("ddp", "none", 2): refused, ("zero3", "none", 2): refused})
    assert is_passed({("ddp", "drain", 2): unknown, ("ddp", "none", 2): unknown})
    assert not is_passed({("ddp", "drain", 2): equal, ("ddp", "join", 2): lost})
    assert not is_passed({("ddp", "drain", 2): equal, ("ddp", "nudged", 2): failed})


def test_samples_of_streams_are_not_compared() -> None:
    job = plain_job()
    records = [replace(r, samples=()) for r in job.undisturbed(2)]
    faulted = job.generation(1, 2, 0, 6) + job.generation(2, 2, 6, STEPS)
    faulted = [replace(r, samples=()) for r in faulted]
    undisturbed = [run(name, records) for name in ("none", "none again", "nudged")]
    runs = [*undisturbed, run("kill-worker", faulted)]
    assert verdict_on(runs, "kill-worker") == Verdict(Outcome.EQUAL)
    assert samples_text(runs) == "not recorded"


def test_texts_in_sentences_stay_short() -> None:
    job = plain_job()
    records = job.generation(1, 2, 0, 6) + job.generation(2, 2, 6, STEPS)
    place = next(i for i, r in enumerate(records) if r.generation == 2)
    long = LiveValue("extra state", "head", "other", "x" * 500)
    kept = [v for v in records[place].live if v.kind != "extra state"]
    records[place] = replace(records[place], live=(*kept, long))
    note = same_world(job, records).note
    assert note.endswith(f"extra state 'head' was 'state 6' and is {'x' * 57}...")
