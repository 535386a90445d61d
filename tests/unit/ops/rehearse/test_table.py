"""What a user sees of a rehearsal, as text and as a document."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from elasticzero.ops.rehearse.comparison import compare
from elasticzero.ops.rehearse.document import document
from elasticzero.ops.rehearse.results import Facts, Outcome, Verdict
from elasticzero.ops.rehearse.table import render
from elasticzero.rehearsal.records import Moment, RunResult
from tests.unit.ops.rehearse.made_up import controls, moved, plain_job, run, with_value

FACTS = Facts(script="train.py", steps=12, wall_s=94.2)
TABLE = """\
         kill-worker@6    kill-node@6        drain@6            join@6
ddp      equal            within rounding    within rounding    within rounding
zero2    equal            DIFFERS (1)        within rounding    not comparable (2)
zero3    refused (3)      refused            refused            refused
(1) generation 2, before step 7: buffer 'head.calls' was 6 and is 0.
    docs/training.md, "What is kept of modules and generators"
(2) the forward or the data draws at random; give session.batches virtual_batch= to compare.
    docs/training.md, "The same numbers at every world size"
(3) prepare: parameter 'w' has a hook, which zero3 does not call.  docs/training.md, "What holds"
samples: each once. Two undisturbed runs: equal. 15 runs, 1 min 34 s.
"""


def rehearsal() -> list[RunResult]:
    """The runs of two strategies with four faults each, and one refused run of a third."""
    job = plain_job()
    nudged, rounded = moved(job, 7, 1e-6), moved(job, 7, 1e-6)
    runs = []
    for strategy in ("ddp", "zero2"):
        runs += controls(job, nudged, strategy=strategy)
        for fault, before, after in (
            ("kill-worker", 2, 2),
            ("kill-node", 2, 1),
            ("drain", 2, 1),
            ("join", 2, 3),
        ):
            second = (job if before == after else rounded).generation(2, after, 6, 12)
            if (strategy, fault) == ("zero2", "kill-node"):
                second[0] = with_value(second[0], ("buffer", "head.calls"), 0, job.dtype)
            if (strategy, fault) == ("zero2", "join"):
                second = [replace(record, draws=True) for record in second]
            records = job.generation(1, before, 0, 6) + second
            runs.append(run(fault, records, strategy=strategy))
    sentence = "parameter 'w' has a hook, which zero3 does not call"
    return [*runs, run("none", [], strategy="zero3", exit_code=64, refusal=sentence)]


def test_the_table_has_a_row_for_each_strategy_and_numbered_notes() -> None:
    runs = rehearsal()
    assert render(compare(runs), runs, FACTS) == TABLE


def test_rows_have_their_ranks_where_there_are_several_worlds() -> None:
    job = plain_job()
    runs = []
    for world in (2, 3):
        records = job.generation(1, world, 0, 6) + job.generation(2, world, 6, 12)
        runs += [*controls(job, world=world), run("kill-worker", records, world=world)]
    facts = replace(FACTS, wall_s=5.0, remarks=("The script has left out.txt.",))
    assert render(compare(runs), runs, facts) == (
        "                kill-worker@6\n"
        "ddp, 2 ranks    equal\n"
        "ddp, 3 ranks    equal\n"
        "samples: each once. Two undisturbed runs: equal. 8 runs, 5 s.\n"
        "The script has left out.txt.\n"
    )


def test_equal_notes_have_one_number() -> None:
    runs = [run(fault, [], strategy=strategy) for strategy in ("ddp", "zero1")
            for fault in ("drain", "join", "kill-node")]  # fmt: skip
    same, other = Verdict(Outcome.FAILED, "x.", "docs"), Verdict(Outcome.FAILED, "y.", "docs")
    judged = [same, other, same, same, same, other]
    verdicts = {(r.strategy, r.fault, r.world): v for r, v in zip(runs, judged, strict=True)}
    lines = render(verdicts, runs, FACTS).splitlines()
    assert lines[1:5] == [
        "ddp      FAILED (1)    FAILED (2)    FAILED (1)",
        "zero1    FAILED (1)    FAILED        FAILED (2)",
        "(1) x.  docs",
        "(2) y.  docs",
    ]


def test_a_long_note_has_its_paragraph_below_it() -> None:
    (first, *_) = runs = [run("drain", [])]
    verdict = Verdict(Outcome.FAILED, "long " * 30, "docs/rehearse.md")
    verdicts = {(first.strategy, first.fault, first.world): verdict}
    assert render(verdicts, runs, FACTS).splitlines()[2:4] == [
        f"(1) {'long ' * 30}",
        "    docs/rehearse.md",
    ]


@pytest.mark.parametrize("fault", ["none again", "nudged"])
def test_a_control_that_failed_has_a_line_of_its_own(fault: str) -> None:
    runs = [r for r in rehearsal() if r.strategy == "ddp" and r.fault != fault]
    runs.append(run(fault, [], exit_code=70, failure="MemoryError"))
    lines = render(compare(runs), runs, FACTS).splitlines()
    assert [line for line in lines if line.startswith(f"ddp, 2 ranks, {fault}: FAILED (")]
    assert [line for line in lines if "start: MemoryError." in line]


def test_undisturbed_runs_that_differ_are_said_below_the_table() -> None:
    job = plain_job()
    first, again, nudged = controls(job)
    again = replace(again, records=tuple(moved(job, 3, 0.1).undisturbed(2)))
    records = job.generation(1, 2, 0, 6) + job.generation(2, 2, 6, 12)
    runs = [first, again, nudged, run("kill-worker", records)]
    text = render(compare(runs), runs, FACTS)
    assert "Two undisturbed runs: DIFFER." in text
    assert "(1) two undisturbed runs differ: step 3: optimizer state['w']['exp_avg'] " in text


def test_a_name_that_a_terminal_would_obey_is_escaped() -> None:
    runs = [run("drain", [], failure="\x1b[2J", exit_code=70)]
    assert "\x1b" not in render(compare(runs), runs, FACTS)


def test_the_document_has_what_the_table_says() -> None:
    runs = rehearsal()
    verdicts = compare(runs)
    made = json.loads(json.dumps(document(verdicts, runs, FACTS)))
    assert {k: made[k] for k in ("version", "script", "passed", "steps", "wall_s")} == {
        "version": 1,
        "script": "train.py",
        "passed": False,
        "steps": 12,
        "wall_s": 94.2,
    }
    assert (made["samples"], made["undisturbed"]) == ("each once", "equal")
    assert len(made["runs"]) == len(runs)
    (differing,) = [r for r in made["runs"] if r["outcome"] == "DIFFERS"]
    assert differing == {
        "strategy": "zero2",
        "world": 2,
        "fault": "kill-node",
        "fault_step": 6,
        "exit_code": 0,
        "outcome": "DIFFERS",
        "note": "generation 2, before step 7: buffer 'head.calls' was 6 and is 0.",
        "docs": 'docs/training.md, "What is kept of modules and generators"',
    }
    (nudged, *_) = [r for r in made["runs"] if r["fault"] == "nudged"]
    assert (nudged["outcome"], nudged["note"]) == (None, "")


def test_start_records_have_no_step_of_their_own() -> None:
    """The made-up records are of the kind that a probe writes."""
    starts = [r for r in plain_job().generation(2, 2, 6, 7) if r.moment is Moment.START]
    assert [(r.step, r.loss, r.samples) for r in starts] == [(6, "", ()), (6, "", ())]
