"""Says in sentences what is missing in the logs of a run. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from elasticzero.ops.report.life import SeenWorld
from elasticzero.ops.report.model import NodeLog
from elasticzero.ops.report.runs import JobRun
from elasticzero.text import list_text, many_text, size_text, span_text

NAMES_SHOWN = 8


def names_text(names: Sequence[str]) -> str:
    """Returns names with commas between them, the first of many."""
    return list_text(names, NAMES_SHOWN) if names else "–"


def on_logs(run: JobRun, worlds: Sequence[SeenWorld], logs: Sequence[NodeLog]) -> list[str]:
    """Returns what a reader of the page must know of the logs.

    Args:
        run: the lives of the agents whose logs were read.
        worlds: the worlds of the run, in order.
        logs: how each node's log was read.
    """
    notes = []
    there = {life.node for life in run.lives}
    missing = list(dict.fromkeys(n for w in worlds for n in w.members if n not in there))
    if missing:
        notes.append(
            f"The logs of {many_text(len(missing), 'node')} are missing: {names_text(missing)}. "
            "Their states are inferred from the logs of others; failures and checkpoints of their "
            "own are not on this page."
        )
    if worlds and worlds[0].generation > 1:
        notes.append(
            f"The logs begin at generation {worlds[0].generation}. Totals of time count from the "
            "beginning of the job; all else counts from there."
        )
    for log in logs:
        if log.cut_bytes:
            notes.append(
                f"Of the log of {log.node} the newest {size_text(log.bytes)} were read, and "
                f"{size_text(log.cut_bytes)} before them left out. Waits in that part count as "
                "productive where no total of the agents says otherwise."
            )
    thinned = [log for log in logs if log.every > 1]
    if thinned:
        most = max(log.every for log in thinned)
        notes.append(
            f"The logs are long: of {many_text(len(thinned), 'node')}, one step in {most} or more "
            "often was read. Curves and step times are samples; totals are not affected."
        )
    for node, clock_s in sorted(run.clocks_s.items()):
        late = "behind" if clock_s > 0 else "ahead"
        notes.append(
            f"The clock of {node} is {span_text(abs(clock_s))} {late}; its times were corrected."
        )
    if run.earlier:
        notes.append(
            f"The logs also hold {many_text(run.earlier, 'earlier run')} of this job, which this "
            "page leaves out."
        )
    unread = {life.node: life.unread for life in run.lives if life.unread}
    if unread:
        notes.append(
            f"{many_text(sum(unread.values()), 'line')} could not be read, in the logs of "
            f"{names_text(sorted(unread))}."
        )
    return notes
