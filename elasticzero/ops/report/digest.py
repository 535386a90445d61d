"""Sorts the events of one agent's log into its lives. Pure.

Events of newer versions are passed over. An event that lacks a field or has a value of another
type counts as a line that could not be read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeGuard

from elasticzero.launcher.goodput import TimeSpent, followed
from elasticzero.ops.report.life import (
    MOST_INCIDENTS,
    AgentLife,
    OwnPart,
    SeenContribution,
    SeenFailure,
    SeenIncident,
    SeenRound,
    SeenSave,
    SeenWorld,
)
from elasticzero.serialization import decode

UNREADABLE: Mapping[str, Any] = {}
"""Stands for a line that is no event."""
CONSEQUENCE = "peer"
"""Blame of a failure that only follows from that of another rank."""
INCIDENTS: Mapping[str, tuple[str, str]] = {
    "store_trouble": ("etcd did not answer", "message"),
    "store_recovery": ("etcd lost its data", "message"),
    "save_failed": ("a save failed", "error"),
    "saved": ("a checkpoint was not saved", "error"),
    "kept": ("a snapshot was not taken", "error"),
    "notice": ("a node was told to leave", "reason"),
    "error": ("an agent ended with an error", "message"),
    "tracker": ("a tracker failed", "error"),
    "data_changed": ("a loop went on with a change", "message"),
    "shares_changed": ("ranks got other shares", "message"),
    "residual_lost": ("parts of gradients were lost", "message"),
}
"""Kinds of events that may tell of trouble, with its name and the field that describes it."""


def parsed(lines: Iterable[bytes]) -> Iterator[Mapping[str, Any]]:
    """Yields the event of each line of a log; `UNREADABLE` for a line that has none."""
    for line in lines:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            event = UNREADABLE
        yield event if isinstance(event, dict) else UNREADABLE


def digest(node: str, events: Iterable[Mapping[str, Any]], every: int = 1) -> list[AgentLife]:
    """Returns the lives of a node's agents, oldest first, from the events of the node's log.

    Args:
        node: name of the node.
        events: the events of its log, in order.
        every: number of steps of which the log has the events of one.
    """
    lives: list[AgentLife] = []
    unread = 0
    for event in events:
        at_s, name = event.get("time", math.nan), event.get("event")
        if not _is_number(at_s) or not math.isfinite(at_s) or not isinstance(name, str):
            unread += 1
            continue
        if not lives or name == "serving" or (name != "error" and lives[-1].exit is not None):
            lives.append(AgentLife(node, at_s, at_s))
        life = lives[-1]
        try:
            _take(life, name, event, at_s, every)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
            unread += 1
        life.ended_s = max(life.ended_s, at_s)
    if lives:
        lives[-1].unread = unread
    return lives


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _take(life: AgentLife, name: str, event: Mapping[str, Any], at_s: float, every: int) -> None:
    match name:
        case "step":
            event = _take_step(life, event, at_s)
        case "log":
            _take_loss(life, event, at_s)
            return
        case "captured" if event["local_rank"] != 0:
            return
        case "captured":
            event = _take_capture(life, event, every)
        case "world":
            _take_world(life, event, at_s)
        case "recovery":
            life.recoveries[int(event["generation"])] = dict(event)
        case "failed" | "looked":
            _take_failure(life, event, at_s)
        case "saved":
            _take_save(life, event, at_s)
        case _:
            _take_state(life, name, event, at_s)
    if name in INCIDENTS:
        _take_incident(life, *INCIDENTS[name], event, at_s)
    life.account = followed(life.account, event)


def _take_state(life: AgentLife, name: str, event: Mapping[str, Any], at_s: float) -> None:
    """Takes in an event that changes what the agent or its workers do.

    Args:
        life: the life that the event belongs to.
        name: name of the event.
        event: fields of the event.
        at_s: Unix time at which it was written, by the clock of the agent's machine.
    """
    match name:
        case "registered":
            life.registered_s = at_s
        case "round":
            generation = int(event["generation"])
            seen = SeenRound(at_s, str(event["kind"]), str(event["reason"]))
            life.rounds.setdefault(generation, seen)
        case "averaged":
            place = int(event["history"]), int(event["fragment"]), int(event["round"])
            life.averaged[place] = tuple(
                SeenContribution(str(p["island"]), int(p["samples"]), int(p["staleness"]))
                for p in event["contributors"]
            )
        case "start":
            _part_of(life, int(event["generation"])).started_s = at_s
        case "restored":
            _part_of(life, int(event["generation"])).restored_s = at_s
        case "plain":
            life.plain = True
            _part_of(life, int(event["generation"])).restored_s = at_s
        case "paced":
            life.snapshots.every = int(event["every"])
        case "kept":
            life.snapshots.failed += event["error"] is not None
            if event["error"] is None:
                life.snapshots.last_step = max(life.snapshots.last_step, int(event["step"]))
        case "exit":
            life.exit = dict(event)
        case "error":
            life.error = str(event["message"])
        case _:
            pass


def _part_of(life: AgentLife, generation: int) -> OwnPart:
    return life.parts.setdefault(generation, OwnPart())


def _take_step(life: AgentLife, event: Mapping[str, Any], at_s: float) -> Mapping[str, Any]:
    """Takes in a step.

    Args:
        life: the life that the step belongs to.
        event: fields of the event.
        at_s: Unix time of the step's end, by the clock of the agent's machine.

    Returns:
        The event, in which the wait for data stands for the steps before it too that the log lacks.
    """
    step, generation = int(event["step"]), int(event["generation"])
    step_s, wait_s = float(event["step_s"]), float(event["data_wait_s"])
    part = _part_of(life, generation)
    count = max(1, step - part.last_step) if part.last_step_s is not None else 1
    if part.first_step_s is None:
        part.first_step_s = at_s
    part.last_step_s, part.last_step = at_s, max(part.last_step, step)
    life.total_steps = max(life.total_steps, int(event.get("total", 0)))
    own_s = event.get("compute_s")
    compute_s = float(own_s) if _is_number(own_s) else math.nan
    life.steps.extend((generation, step, at_s, step_s, wait_s, compute_s))
    return {**event, "data_wait_s": wait_s * count} if count > 1 else event


def _take_loss(life: AgentLife, event: Mapping[str, Any], at_s: float) -> None:
    loss = event.get("loss")
    if _is_number(loss) and math.isfinite(loss):
        life.losses.extend((life.generation, int(event["step"]), at_s, float(loss)))


def _take_capture(life: AgentLife, event: Mapping[str, Any], every: int) -> Mapping[str, Any]:
    """Takes in a copy of the state.

    Args:
        life: the life that the copy belongs to.
        event: fields of the event.
        every: number of steps of which the log has the events of one.

    Returns:
        The event, in which the wait stands for the copies too that the log lacks.
    """
    seconds = float(event["seconds"])
    if event["checkpoint"] or event["direct"]:
        return event
    totals = life.snapshots
    totals.count += every
    totals.stall_s += seconds * every
    totals.longest_s = max(totals.longest_s, seconds)
    totals.bytes += float(event["bytes"]) * every
    return {**event, "seconds": seconds * every} if every > 1 else event


def _take_world(life: AgentLife, event: Mapping[str, Any], at_s: float) -> None:
    spent = event.get("time_spent")
    world = SeenWorld(
        at_s=at_s,
        generation=int(event["generation"]),
        members=tuple(map(str, event["members"])),
        world_size=int(event["world_size"]),
        resume_step=int(event["resume_step"]),
        tier=str(event["tier"]),
        reason=str(event["reason"]),
        spent=decode(TimeSpent, spent, "time_spent") if spent is not None else None,
    )
    life.worlds[world.generation] = world
    life.generation = world.generation


def _take_failure(life: AgentLife, event: Mapping[str, Any], at_s: float) -> None:
    if event["blame"] == CONSEQUENCE:
        return
    life.failures.append(
        SeenFailure(
            at_s=at_s,
            generation=int(event.get("generation", life.generation)),
            node=life.node,
            rank=int(event["rank"]),
            step=int(event["step"]),
            blame=str(event["blame"]),
            message=str(event["message"]),
            traceback=str(event.get("traceback") or ""),
        )
    )


def _take_save(life: AgentLife, event: Mapping[str, Any], at_s: float) -> None:
    if event["error"] is not None:
        return
    step = int(event["step"])
    life.saves[step] = SeenSave(
        at_s, step, float(event["seconds"]), int(event["bytes"]), bool(event["committed"])
    )


def _take_incident(
    life: AgentLife, kind: str, described: str, event: Mapping[str, Any], at_s: float
) -> None:
    text = event.get(described)
    if text is None:
        return
    incident = life.incidents.get((kind, str(text)))
    if incident is not None:
        incident.count, incident.last_s = incident.count + 1, at_s
    elif len(life.incidents) < MOST_INCIDENTS:
        life.incidents[kind, str(text)] = SeenIncident(at_s, at_s)
