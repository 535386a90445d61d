"""Renders what benchmarks/gpu.py measured, from its JSON document, as tables with verdicts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ratio import Ratio

CAPTURE_EVERY = 10
"""Steps between two snapshots of the contenders that take them by number."""
SETTLING_STEPS = 2
"""First steps of a turn, which take memory from the device again and do not count."""
TURN_STEPS = SETTLING_STEPS + CAPTURE_EVERY
"""Steps of a turn: those that count have one snapshot in them."""
CONTENDERS = (
    *("plain", "DDP", "DDP+ZRO", "FSDP2", "ddp", "zero1", "zero2", "zero3"),
    *("plain+compile", "ddp+compile", "ddp+capture", "zero1+capture"),
)
"""Torch's own and our strategies; `+capture` takes a snapshot each CAPTURE_EVERY steps."""
STRATEGIES = ("ddp", "zero2")
"""These are the strategies whose recovery is measured."""
CASES = {
    "worker": "SIGKILL to a worker: next step after",
    "node": "SIGKILL to a node: next step after",
    "drain": "drain: training pauses",
    "join": "a node joins: training pauses",
}
STEP_S = 0.03
"""A step of the training that is struck, nearly all of which is its pause."""
GOALS_S = {"worker": 0.7, "node": 0.7, "drain": STEP_S + 0.1, "join": STEP_S + 0.1}
CAPTURE_GOAL_MS = 2.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """A contender, one to which it is compared, and the greatest ratio that meets the goal."""

    name: str
    reference: str
    most: float = math.inf
    compares_memory: bool = False
    """True: its peak of memory must be no greater than the reference's."""


COMPARISONS = (
    Comparison("DDP", "plain"),
    Comparison("ddp", "plain", 1.03),
    Comparison("ddp", "DDP", 1.0, True),
    Comparison("zero1", "DDP", 1.03),
    Comparison("zero1", "DDP+ZRO", math.inf, True),
    Comparison("zero2", "DDP", 1.03),
    Comparison("zero2", "DDP+ZRO", math.inf, True),
    Comparison("zero3", "FSDP2", 1.0, True),
    Comparison("ddp+compile", "plain+compile", 1.03),
)


def turn(seconds: Sequence[float]) -> dict[str, float]:
    """Returns the figures of one turn's steps, without those in which memory settles."""
    steps = seconds[SETTLING_STEPS:]
    return {
        "median_s": statistics.median(steps),
        "mean_s": statistics.fmean(steps),
        "longest_s": max(steps),
    }


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def verdict(met: bool, rehearsal: bool) -> str:
    """Returns the verdict on a goal; a rehearsal on a CPU has none."""
    return "" if rehearsal else "met" if met else "NOT met"


def compared(comparison: Comparison, document: Mapping[str, Any]) -> list[str]:
    """Returns the cells of one comparison: reference, ratio, range, goal, verdict and memory."""
    names = (comparison.name, comparison.reference)
    steps = [[one["median_s"] for one in document["turns"][name]] for name in names]
    rounds = min(map(len, steps))
    ratio = Ratio.of(steps[0][:rounds], steps[1][:rounds])
    rehearsal = document["device"] == "cpu"
    cells = [comparison.reference, f"{ratio.median:.3f}", f"{ratio.low:.3f} to {ratio.high:.3f}"]
    if math.isinf(comparison.most):
        cells += ["", ""]
    else:
        cells += [f"≤ {comparison.most:g}", verdict(ratio.low <= comparison.most, rehearsal)]
    peaks = [document["peak_bytes"].get(name) for name in names]
    if not comparison.compares_memory or None in peaks:
        return [*cells, "", ""]
    share = peaks[0] / peaks[1]
    return [*cells, f"{share:.3f}", verdict(share <= 1.0, rehearsal)]


def steps_table(document: Mapping[str, Any]) -> str:
    """Returns what a step and its memory cost, each contender beside its references."""
    headings = ["one rank", "step, ms", "peak, MiB", "against", "ratio", "95 % range", "wanted"]
    headings += ["", "memory", ""]
    rows = []
    for name, turns in document["turns"].items():
        peak = document["peak_bytes"].get(name)
        median_ms = statistics.median(one["median_s"] for one in turns) * 1e3
        first = [name, f"{median_ms:.2f}", "" if peak is None else f"{peak >> 20:,}"]
        matching = [
            compared(comparison, document)
            for comparison in COMPARISONS
            if comparison.name == name and document["turns"].get(comparison.reference)
        ]
        for cells in matching or [[""] * 7]:
            rows.append([*first, *cells])
            first = [""] * 3
    return table(headings, rows)


def captures_table(document: Mapping[str, Any]) -> str:
    """Returns for how long a snapshot stops the step in which it is taken."""
    headings = ["a snapshot each 10 steps", "stops a step for, ms", "wanted", ""]
    rows = []
    for name, turns in document["turns"].items():
        if not name.endswith("+capture"):
            continue
        stop_ms = statistics.median(one["longest_s"] - one["median_s"] for one in turns) * 1e3
        met = verdict(stop_ms <= CAPTURE_GOAL_MS, document["device"] == "cpu")
        rows.append([name.partition("+")[0], f"{stop_ms:.1f}", f"≤ {CAPTURE_GOAL_MS:g}", met])
    return table(headings, rows) if rows else ""


def recovery_table(document: Mapping[str, Any]) -> str:
    """Returns the seconds of each case, by strategy, beside the goal."""
    recovery = document["recovery"]
    if not recovery:
        return ""
    rows = []
    for case, text in CASES.items():
        cells, met = [], True
        for strikes in recovery.values():
            strike = strikes.get(case)
            if strike is None:
                cells.append("not measured")
                met = False
                continue
            met = met and strike["seconds"] <= GOALS_S[case]
            again = strike["recomputed"]
            cells.append(f"{strike['seconds']:.2f} s" + f", {again} steps again" * bool(again))
        mark = verdict(met, document["device"] == "cpu")
        rows.append([text, *cells, f"≤ {GOALS_S[case]:.2f} s", mark])
    where = "the GPU" if document["device"] == "cuda" else "the CPU"
    return table([f"two ranks that share {where}", *recovery, "wanted", ""], rows)


def tables(document: Mapping[str, Any]) -> str:
    """Returns all tables of a document, and what was not measured."""
    parts = [steps_table(document) if document["turns"] else "", captures_table(document)]
    parts.append(recovery_table(document))
    parts += [f"Not measured: {what}: {reason}." for what, reason in document["missing"].items()]
    return "\n\n".join(filter(None, parts))
