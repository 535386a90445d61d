"""Makes a `RunSummary` from the lives of a run's agents. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from typing import Any

from elasticzero.launcher.goodput import goodput
from elasticzero.launcher.observability.events import EVENTS
from elasticzero.ops.report import notes
from elasticzero.ops.report.aggregates import checkpoints_of, incidents_of, snapshot_totals
from elasticzero.ops.report.changes import BEFORE_FIRST, change_of, seconds_by_generation
from elasticzero.ops.report.islands import rounds_summary
from elasticzero.ops.report.life import AgentLife, SeenFailure, SeenRound, SeenWorld
from elasticzero.ops.report.model import (
    ChangeKind,
    FaultSummary,
    GenerationSummary,
    NodeLog,
    Outcome,
    RecoverySummary,
    RunSummary,
)
from elasticzero.ops.report.runs import JobRun
from elasticzero.ops.report.steps import (
    committed_limits,
    loss_points,
    step_points,
    step_times,
)
from elasticzero.ops.report.timeline import Course, node_states

PHASES = tuple(name.removesuffix("_s") for name in EVENTS["recovery"].fields if name.endswith("_s"))
"""Phases of a recovery, in order."""
OUTCOMES: Mapping[str, Outcome] = {
    "finished": "finished",
    "stopped": "stopped",
    "failed": "failed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """Says how and when the run ended, as far as the logs go, and where its time went."""

    outcome: Outcome
    reason: str
    at_s: float
    seconds: Mapping[str, float]

    @property
    def wall_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def began_s(self) -> float:
        return self.at_s - self.wall_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """Merges what all lives say of one generation; times are Unix times by the shared clock."""

    world: SeenWorld
    at_s: float
    round: SeenRound | None
    """End of the generation, at the time when the first agent saw it."""
    restored_s: float | None
    first_step_s: float | None
    last_step_s: float | None
    reached: int


def summarize_run(
    job: str, run: JobRun, logs: Sequence[NodeLog], *, running: bool = False
) -> RunSummary:
    """Returns all that the page says of a run.

    Args:
        job: the job's name.
        run: the lives of the agents whose logs were read.
        logs: how much of each node's log there was.
        running: whether the job was running when its agents were asked.
    """
    stages = _stages(run)
    end = _end(run, running=running)
    began_s = end.began_s
    worlds = [stage.world for stage in stages]
    spent = seconds_by_generation(worlds, end.seconds)
    generations = _generations(stages, end, spent)
    nodes = list(dict.fromkeys([life.node for life in run.lives if life.worlds or life.parts]))
    nodes += [n for world in worlds for n in world.members]
    nodes += [life.node for life in run.lives]
    nodes = list(dict.fromkeys(nodes))
    courses = [
        Course(
            generation=stage.world.generation,
            members=stage.world.members,
            began_s=stage.at_s,
            restored_s=stage.restored_s,
            round_s=stage.round.at_s if stage.round is not None else None,
            ended_s=following.at_s if following is not None else end.at_s,
        )
        for stage, following in zip_longest(stages, stages[1:])
    ]
    limits = committed_limits({world.generation: world.resume_step for world in worlds})
    losses, wasted_losses = loss_points(run, limits, began_s)
    return RunSummary(
        job=job,
        outcome=end.outcome,
        reason=end.reason,
        began=began_s,
        wall_s=end.wall_s,
        final_step=generations[-1].reached if generations else 0,
        total_steps=max((life.total_steps for life in run.lives), default=0),
        plain=any(life.plain for life in run.lives) and not any(life.steps for life in run.lives),
        nodes=tuple(nodes),
        seconds=end.seconds,
        goodput=goodput(end.seconds),
        before_first=spent.get(BEFORE_FIRST, {}) if generations else {},
        generations=tuple(generations),
        recoveries=tuple(_recoveries(run, generations, stages, began_s)),
        faults=tuple(_faults(run, generations, stages, end)),
        incidents=tuple(incidents_of(run, began_s)),
        checkpoints=tuple(checkpoints_of(run, began_s)),
        snapshots=tuple(snapshot_totals(run, logs)),
        step_times=step_times(run),
        states=node_states(run, courses, nodes, began_s),
        steps=step_points(run, began_s),
        losses=losses,
        wasted_losses=wasted_losses,
        averaged=rounds_summary((*run.lives, *run.islands), nodes[0] if nodes else ""),
        notes=tuple(notes.on_logs(run, worlds, logs)),
    )


def _stages(run: JobRun) -> list[_Stage]:
    """Returns the generations in order."""
    stages: dict[int, _Stage] = {}
    for life in run.lives:
        for generation, world in life.worlds.items():
            at_s = run.at(life, world.at_s)
            if generation not in stages or at_s < stages[generation].at_s:
                stages[generation] = _Stage(
                    world=world,
                    at_s=at_s,
                    round=None,
                    restored_s=None,
                    first_step_s=None,
                    last_step_s=None,
                    reached=world.resume_step,
                )
    for life in run.lives:
        for generation in life.parts.keys() | life.rounds.keys():
            if generation in stages:
                stages[generation] = _merged(stages[generation], life, generation, run)
    return [stages[generation] for generation in sorted(stages)]


def _merged(stage: _Stage, life: AgentLife, generation: int, run: JobRun) -> _Stage:
    """Returns the stage with what one more life says of it.

    Args:
        stage: what the lives before say of the generation.
        life: the life, which has a part in the generation or has seen its end.
        generation: number of the generation.
        run: the run, which knows by how much the clocks differ.
    """
    seen = life.rounds.get(generation)
    if seen is not None:
        seen = replace(seen, at_s=run.at(life, seen.at_s))
        if stage.round is not None:
            first_s = min(seen.at_s, stage.round.at_s)
            named = seen if stage.round.kind == "boundary" else stage.round
            seen = replace(named, at_s=first_s)
        stage = replace(stage, round=seen)
    part = life.parts.get(generation)
    if part is None:
        return stage

    def at(at_s: float | None) -> float | None:
        return run.at(life, at_s) if at_s is not None else None

    return replace(
        stage,
        restored_s=_earliest(stage.restored_s, at(part.restored_s)),
        first_step_s=_earliest(stage.first_step_s, at(part.first_step_s)),
        last_step_s=_latest(stage.last_step_s, at(part.last_step_s)),
        reached=max(stage.reached, part.last_step),
    )


def _earliest(*times_s: float | None) -> float | None:
    return min((at_s for at_s in times_s if at_s is not None), default=None)


def _latest(*times_s: float | None) -> float | None:
    return max((at_s for at_s in times_s if at_s is not None), default=None)


def _end(run: JobRun, *, running: bool) -> _End:
    ended = [life for life in run.lives if life.outcome is not None]
    last_s = max(run.at(life, life.ended_s) for life in run.lives)
    if ended:
        fullest = max(ended, key=lambda life: sum(_exit_seconds(life).values()))
        outcome = OUTCOMES.get(str(fullest.outcome), "unknown")
        exit_event = fullest.exit or {}
        reason = str(exit_event.get("reason", ""))
        if early := exit_event.get("end_reason"):
            reason = f"{reason}: {early}"
        at_s = run.at(fullest, fullest.ended_s)
        seconds = _exit_seconds(fullest) or _account_seconds(run, at_s)
        return _End(outcome=outcome, reason=reason, at_s=at_s, seconds=seconds)
    errors = [life.error for life in run.lives if life.error]
    return _End(
        outcome="running" if running else "unknown",
        reason=errors[-1] if errors else "",
        at_s=last_s,
        seconds=_account_seconds(run, last_s),
    )


def _exit_seconds(life: AgentLife) -> dict[str, float]:
    """Returns where the job's time went as the agent said at its end; empty if it did not."""
    stored = life.exit.get("seconds") if life.exit is not None else None
    items = stored.items() if isinstance(stored, Mapping) else ()
    return {str(kind): float(s) for kind, s in items if isinstance(s, (int, float)) and s > 0}


def _account_seconds(run: JobRun, until_s: float) -> dict[str, float]:
    """Returns where the job's time went by the log of the agent that saw most of it."""
    lives = [life for life in run.lives if life.account is not None]
    if not lives:
        first_s = min(run.at(life, life.began_s) for life in run.lives)
        return {"regroup": until_s - first_s} if until_s > first_s else {}
    best = max(lives, key=lambda life: (life.generation, run.at(life, life.ended_s)))
    assert best.account is not None
    totals = best.account.seconds(until_s - run.at(best, 0.0))
    return {kind: seconds for kind, seconds in totals.items() if seconds > 0}


def _generations(
    stages: Sequence[_Stage], end: _End, spent: Mapping[int, Mapping[str, float]]
) -> list[GenerationSummary]:
    summaries: list[GenerationSummary] = []
    for stage, following in zip_longest(stages, stages[1:]):
        world, before = stage.world, summaries[-1] if summaries else None
        kind: ChangeKind = "start"
        label = "start"
        if before is not None:
            ended = stages[len(summaries) - 1].round
            kind, label = change_of(
                ended.kind if ended is not None else None,
                world.reason,
                before.members,
                world.members,
            )
        next_step = following.world.resume_step if following is not None else 0
        ended_s = (following.at_s if following is not None else end.at_s) - end.began_s
        summaries.append(
            GenerationSummary(
                number=world.generation,
                began_s=max(0.0, stage.at_s - end.began_s),
                ended_s=max(0.0, ended_s),
                kind=kind,
                label=label,
                cause=world.reason,
                members=world.members,
                world_size=world.world_size,
                resume_step=world.resume_step,
                reached=max(stage.reached, next_step),
                tier=world.tier,
                steps_redone=max(0, before.reached - world.resume_step) if before else 0,
                seconds=spent.get(world.generation, {}),
            )
        )
    return summaries


def _recoveries(
    run: JobRun, generations: Sequence[GenerationSummary], stages: Sequence[_Stage], began_s: float
) -> list[RecoverySummary]:
    seen: dict[int, Mapping[str, Any]] = {}
    for life in run.lives:
        for generation, event in life.recoveries.items():
            if generation not in seen or _known(event) > _known(seen[generation]):
                seen[generation] = event
    recoveries = []
    for summary, stage in zip(generations, stages, strict=True):
        recovered = seen.get(summary.number)
        if recovered is None:
            continue
        phases = {phase: _seconds(recovered.get(f"{phase}_s")) for phase in PHASES}
        at_s = stage.first_step_s if stage.first_step_s is not None else stage.at_s
        recoveries.append(
            RecoverySummary(
                generation=summary.number,
                at_s=at_s - began_s,
                kind=summary.kind,
                label=summary.label,
                cause=summary.cause,
                steps_lost=summary.steps_redone,
                seconds=sum(s for s in phases.values() if s is not None),
                phases=phases,
            )
        )
    return recoveries


def _known(event: Mapping[str, Any]) -> int:
    return sum(_seconds(event.get(f"{phase}_s")) is not None for phase in PHASES)


def _seconds(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and value >= 0 else None


def _faults(
    run: JobRun, generations: Sequence[GenerationSummary], stages: Sequence[_Stage], end: _End
) -> list[FaultSummary]:
    traces = _traces(run)
    faults: list[FaultSummary] = []
    last_step_s: float | None = None
    for (before, after), (stage, following) in zip(
        pairwise(generations), pairwise(stages), strict=True
    ):
        last_step_s = stage.last_step_s or last_step_s
        if after.kind != "fault":
            continue
        at_s = stage.round.at_s if stage.round is not None else following.at_s
        stepped_s = following.first_step_s
        is_measured = stepped_s is not None and last_step_s is not None
        faults.append(
            FaultSummary(
                at_s=at_s - end.began_s,
                generation=before.number,
                label=after.label,
                cause=after.cause,
                lost=tuple(node for node in before.members if node not in after.members),
                steps_lost=after.steps_redone,
                pause_s=(stepped_s or 0.0) - (last_step_s or 0.0) if is_measured else None,
                survived=True,
                details=traces.get(before.number, ""),
            )
        )
    ended = stages[-1].round if stages else None
    if end.outcome == "failed" or (ended is not None and _is_open_fault(ended, end)):
        number = stages[-1].world.generation if stages else 0
        reason = end.reason or (ended.reason if ended is not None else "the job failed")
        _, label = change_of(ended.kind if ended is not None else "failure", reason, (), ())
        faults.append(
            FaultSummary(
                at_s=(ended.at_s if ended is not None else end.at_s) - end.began_s,
                generation=number,
                label=label if end.outcome == "failed" else "not over yet",
                cause=reason,
                lost=(),
                steps_lost=0,
                pause_s=None,
                survived=False,
                details=traces.get(number, ""),
            )
        )
    return faults


def _traces(run: JobRun) -> dict[int, str]:
    """Returns the traceback of the first failure of each generation."""
    first: dict[int, SeenFailure] = {}
    for life in run.lives:
        for failure in life.failures:
            earliest = first.setdefault(failure.generation, failure)
            if failure.at_s < earliest.at_s:
                first[failure.generation] = failure
    return {generation: failure.traceback for generation, failure in first.items()}


def _is_open_fault(ended: SeenRound, end: _End) -> bool:
    """Returns whether the logs end in a round that a fault has opened."""
    return end.outcome in ("running", "unknown") and change_of(ended.kind, "", (), ())[0] == "fault"
