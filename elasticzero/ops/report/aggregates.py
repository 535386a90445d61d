"""Merges what the logs of several agents say of the same saves, snapshots and troubles. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from elasticzero.ops.report.life import AgentLife
from elasticzero.ops.report.model import (
    CheckpointSummary,
    IncidentSummary,
    NodeLog,
    SnapshotSummary,
)
from elasticzero.ops.report.runs import JobRun


def incidents_of(run: JobRun, began_s: float) -> list[IncidentSummary]:
    """Returns the troubles that ended no generation by themselves, in the order of time.

    began_s: Unix time from which their times count.
    """
    incidents: dict[tuple[str, str], IncidentSummary] = {}
    for life in run.lives:
        for (kind, text), seen in life.incidents.items():
            first_s, last_s = (run.at(life, s) - began_s for s in (seen.first_s, seen.last_s))
            new = IncidentSummary(
                first_s=first_s,
                last_s=last_s,
                count=seen.count,
                kind=kind,
                nodes=(life.node,),
                text=text,
            )
            if (old := incidents.get((kind, text))) is not None:
                new = replace(
                    new,
                    first_s=min(first_s, old.first_s),
                    last_s=max(last_s, old.last_s),
                    count=seen.count + old.count,
                    nodes=tuple(dict.fromkeys((*old.nodes, life.node))),
                )
            incidents[kind, text] = new
    return sorted(incidents.values(), key=lambda incident: incident.first_s)


def checkpoints_of(run: JobRun, began_s: float) -> list[CheckpointSummary]:
    """Returns the checkpoints that were saved, in the order of steps.

    began_s: Unix time from which their times count.
    """
    parts: dict[int, list[tuple[AgentLife, float]]] = defaultdict(list)
    for life in run.lives:
        for step, save in life.saves.items():
            parts[step].append((life, run.at(life, save.at_s) - began_s))
    checkpoints = []
    for step, writers in sorted(parts.items()):
        saves = [life.saves[step] for life, _ in writers]
        checkpoints.append(
            CheckpointSummary(
                at_s=max(at_s for _, at_s in writers),
                step=step,
                seconds=max(save.seconds for save in saves),
                bytes=sum(save.bytes for save in saves),
                nodes=len({life.node for life, _ in writers}),
                committed=any(save.committed for save in saves),
            )
        )
    return checkpoints


def snapshot_totals(run: JobRun, logs: Sequence[NodeLog]) -> list[SnapshotSummary]:
    """Returns what each node says of the snapshots of its first worker."""
    thinned = {log.node for log in logs if log.every > 1}
    lives: dict[str, list[AgentLife]] = defaultdict(list)
    for life in run.lives:
        if life.snapshots.count or life.snapshots.failed:
            lives[life.node].append(life)
    summaries = []
    for node, those in lives.items():
        totals = [life.snapshots for life in those]
        count = sum(total.count for total in totals)
        summaries.append(
            SnapshotSummary(
                node=node,
                count=round(count),
                every=next((total.every for total in reversed(totals) if total.every), 0),
                last_step=max(total.last_step for total in totals),
                mean_stall_s=sum(total.stall_s for total in totals) / count if count else 0.0,
                longest_stall_s=max(total.longest_s for total in totals),
                mean_bytes=sum(total.bytes for total in totals) / count if count else 0.0,
                failed=sum(total.failed for total in totals),
                estimated=node in thinned,
            )
        )
    return summaries
