"""Writes the sections of the page that are tables. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from elasticzero.ops.page.markup import element, escaped, section, table
from elasticzero.ops.report.html.sections import MOST_ROWS, log_text, tag
from elasticzero.ops.report.html.sentences import (
    checkpoint_lead,
    fault_kinds,
    step_times_lead,
)
from elasticzero.ops.report.model import (
    CheckpointSummary,
    FaultSummary,
    RunSummary,
    SnapshotSummary,
)
from elasticzero.ops.report.notes import names_text
from elasticzero.text import many_text, share_text, size_text, span_text

MOST_DETAILS = 4000
"""Maximum number of characters of a traceback, of which the last ones are shown."""
T = TypeVar("T")


def _newest(items: Sequence[T], thing: str) -> tuple[Sequence[T], str]:
    """Returns the last items of a long list, and a sentence that says so."""
    if len(items) <= MOST_ROWS:
        return items, ""
    return items[-MOST_ROWS:], f" The last {MOST_ROWS} of {many_text(len(items), thing)} are shown."


def rounds_section(summary: RunSummary) -> str:
    """Returns the section on what the job's islands have averaged; empty: its nodes are none."""
    averaged = summary.averaged
    if averaged is None:
        return ""
    lead = (
        f"The islands have averaged what they had learnt in {many_text(averaged.rounds, 'round')}, "
        f"which have {many_text(averaged.samples, 'sample')}. Each is a job in itself: all that "
        f"follows is about {averaged.shown}, the one that ended last."
    )
    head = ("Island", "Rounds", "Samples", "Share", "Late by, on average")
    rows = [
        (
            escaped(one.island),
            f"{one.rounds:,}",
            f"{one.samples:,}",
            share_text(one.samples / max(1, averaged.samples)),
            f"{one.late:.1f} rounds",
        )
        for one in averaged.islands
    ]
    return section(
        "rounds", "Rounds of the islands", escaped(lead), table(head, rows, (1, 2, 3, 4))
    )


def fault_section(summary: RunSummary) -> str:
    """Returns the section on faults, what each cost, and how long training paused."""
    if not summary.faults:
        return section("faults", "Faults", "No fault ended a generation, as far as the logs go.")
    shown, note = _newest(summary.faults, "fault")
    lost = sum(fault.steps_lost for fault in summary.faults)
    pauses = [fault.pause_s for fault in summary.faults if fault.pause_s is not None]
    pause = f" Training paused for {span_text(sum(pauses))} in all." if pauses else ""
    lead = (
        f"{many_text(len(summary.faults), 'fault')} ended a generation "
        f"({fault_kinds(summary.faults)}); {many_text(lost, 'finished step')} had to be done "
        f"again.{pause}{note}"
    )
    head = ("At", "Gen.", "Fault", "Cause", "Nodes lost", "Steps lost", "Pause")
    rows = [
        (
            span_text(max(0.0, fault.at_s)),
            str(fault.generation),
            tag("fault", fault.label),
            log_text(fault.cause) + _details(fault),
            escaped(names_text(fault.lost)),
            f"{fault.steps_lost:,}",
            _pause(fault),
        )
        for fault in shown
    ]
    return section("faults", "Faults", escaped(lead), table(head, rows, numbers=(0, 1, 5, 6)))


def _pause(fault: FaultSummary) -> str:
    if fault.pause_s is not None:
        return span_text(fault.pause_s)
    return "no step followed" if fault.survived else "the job did not go on"


def _details(fault: FaultSummary) -> str:
    if not fault.details.strip():
        return ""
    text = fault.details.strip()
    cut = f"…{text[-MOST_DETAILS:]}" if len(text) > MOST_DETAILS else text
    return element("details", element("summary", "traceback"), element("pre", escaped(cut)))


def checkpoint_section(summary: RunSummary) -> str:
    """Returns the section on checkpoints and snapshots."""
    saved, checkpoint_note = _newest(summary.checkpoints, "checkpoint")
    taken, snapshot_note = _newest(summary.snapshots, "node")
    parts = []
    if saved:
        parts += [element("h3", "Checkpoints"), _checkpoint_table(saved)]
    if taken:
        parts += [element("h3", "Snapshots"), _snapshot_table(taken)]
    lead = escaped(checkpoint_lead(summary) + checkpoint_note + snapshot_note)
    return section("checkpoints", "Checkpoints and snapshots", lead, *parts)


def _checkpoint_table(saved: Sequence[CheckpointSummary]) -> str:
    head = ("Step", "At", "Save took", "Size", "Nodes that wrote")
    unknown = " (no log says that it was committed)"
    rows = [
        (
            f"{checkpoint.step:,}",
            span_text(max(0.0, checkpoint.at_s)),
            span_text(checkpoint.seconds),
            size_text(checkpoint.bytes),
            f"{checkpoint.nodes}{'' if checkpoint.committed else unknown}",
        )
        for checkpoint in saved
    ]
    return table(head, rows, numbers=(0, 1, 2, 3, 4))


def _snapshot_table(taken: Sequence[SnapshotSummary]) -> str:
    head = ("Node", "Snapshots", "Last of step", "Wait for each", "Longest wait", "Size", "Failed")
    rows = [
        (
            escaped(snapshot.node),
            f"{'≈ ' if snapshot.estimated else ''}{snapshot.count:,}",
            f"{snapshot.last_step:,}",
            span_text(snapshot.mean_stall_s),
            span_text(snapshot.longest_stall_s),
            size_text(snapshot.mean_bytes),
            f"{snapshot.failed:,}",
        )
        for snapshot in taken
    ]
    return table(head, rows, numbers=(1, 2, 3, 4, 5, 6))


def step_time_section(summary: RunSummary) -> str:
    """Returns the section on the step times of nodes; empty if no two nodes can be compared."""
    if not summary.step_times:
        return ""
    shown = summary.step_times[:MOST_ROWS]
    left_out = len(summary.step_times) - len(shown)
    note = f" {left_out:,} faster nodes are left out." if left_out else ""
    head = (
        "Node",
        "Steps compared",
        "Median step",
        "95% below",
        "Waited for data",
        "To the mean",
        "Own compute",
        "To the median",
        "",
    )
    rows = [
        (
            escaped(times.node),
            f"{times.steps:,}",
            span_text(times.median_s),
            span_text(times.slowest_s),
            span_text(times.wait_s),
            f"{100 * (times.ratio - 1):+.1f}%",
            span_text(times.compute_s) if times.compute_s is not None else "–",
            f"{times.compute_ratio:.2f} ×" if times.compute_ratio is not None else "–",
            tag("fault", "slow") if times.is_slow else "",
        )
        for times in shown
    ]
    lead = escaped(step_times_lead(summary) + note)
    listed = table(head, rows, numbers=(1, 2, 3, 4, 5, 6, 7))
    return section("nodes", "Step times of nodes", lead, listed)


def incident_section(summary: RunSummary) -> str:
    """Returns the section on trouble that ended no generation; empty if there was none."""
    if not summary.incidents:
        return ""
    shown, note = _newest(summary.incidents, "entry")
    head = ("First at", "Times", "What", "Nodes", "In the agents' words")
    rows = [
        (
            span_text(max(0.0, incident.first_s)),
            f"{incident.count:,}",
            escaped(incident.kind),
            escaped(names_text(incident.nodes)),
            log_text(incident.text),
        )
        for incident in shown
    ]
    lead = f"These notices and troubles ended no generation by themselves.{note}"
    return section(
        "incidents", "Notices and other trouble", escaped(lead), table(head, rows, (0, 1))
    )
