"""Makes the document that `elasticzero rehearse --json` prints. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elasticzero.ops.rehearse.comparison import samples_text
from elasticzero.ops.rehearse.results import Facts, Verdicts, is_passed
from elasticzero.ops.rehearse.table import undisturbed_text
from elasticzero.rehearsal.records import RunResult

VERSION = 1
"""The version of the document; fields may be added within one."""


def document(verdicts: Verdicts, results: Sequence[RunResult], facts: Facts) -> dict[str, Any]:
    """Returns a JSON object with what the table says, a run after the other.

    Args:
        verdicts: The verdict on each run.
        results: The runs, in the order in which they were made.
        facts: What is told besides.
    """
    return {
        "version": VERSION,
        "script": facts.script,
        "passed": is_passed(verdicts),
        "steps": facts.steps,
        "wall_s": round(facts.wall_s, 3),
        "samples": samples_text(results),
        "undisturbed": undisturbed_text(verdicts, results),
        "runs": [_run(run, verdicts) for run in results],
        "remarks": list(facts.remarks),
    }


def _run(run: RunResult, verdicts: Verdicts) -> dict[str, Any]:
    """Returns a run with its verdict; the outcome of a run that has none is None."""
    verdict = verdicts.get((run.strategy, run.fault, run.world))
    return {
        "strategy": run.strategy,
        "world": run.world,
        "fault": run.fault,
        "fault_step": run.fault_step,
        "exit_code": run.exit_code,
        "outcome": verdict.outcome.value if verdict else None,
        "note": verdict.note if verdict else "",
        "docs": verdict.docs if verdict else "",
    }
