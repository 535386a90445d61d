"""Says what each node did over time, by its own log or, without one, by those of others. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elasticzero.errors import ExitCode
from elasticzero.ops.page.charts import Span
from elasticzero.ops.report.life import AgentLife, SeenWorld
from elasticzero.ops.report.runs import JobRun

STATES: Mapping[str, str] = {
    "training": "trains",
    "starting": "workers start",
    "recovering": "agrees on the next generation",
    "waiting": "waits for a place",
}
"""States of a node, each with what it means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Holds the Unix times at which a generation reached its stages, as agents saw them."""

    generation: int
    members: tuple[str, ...]
    began_s: float
    restored_s: float | None
    round_s: float | None
    ended_s: float


def node_states(
    run: JobRun, courses: Sequence[Course], nodes: Sequence[str], began_s: float
) -> dict[str, tuple[Span, ...]]:
    """Returns the states of each node in order, in seconds since `began_s`.

    Args:
        run: the lives of the agents whose logs were read.
        courses: the generations, from which the states of nodes without a log are inferred.
        nodes: names of all nodes that the result has.
        began_s: Unix time from which the states' times count.
    """
    states: dict[str, list[Span]] = {node: [] for node in nodes}
    for life in run.lives:
        shift_s = run.at(life, 0.0) - began_s
        states[life.node] += [(a + shift_s, b + shift_s, what) for a, b, what in _of_life(life)]
    logged = {life.node for life in run.lives}
    for course in courses:
        for node in course.members:
            if node not in logged:
                spans = _of_course(course, course.ended_s)
                states[node] += [(a - began_s, b - began_s, what) for a, b, what in spans]
    return {node: tuple(_in_order(spans)) for node, spans in states.items()}


def _in_order(spans: Sequence[Span]) -> list[Span]:
    """Returns the spans that are not empty, in order, without those before the run began."""
    ordered: list[Span] = []
    until_s = 0.0
    for start_s, end_s, what in sorted(spans):
        if end_s > max(start_s, until_s):
            ordered.append((max(start_s, until_s), end_s, what))
            until_s = end_s
    return ordered


def _of_life(life: AgentLife) -> list[Span]:
    spans: list[Span] = []
    since_s = life.registered_s if life.registered_s is not None else life.began_s
    worlds = sorted(life.worlds.values(), key=lambda world: world.at_s)
    ends = [*(world.at_s for world in worlds[1:]), life.ended_s]
    if life.registered_s is not None:
        spans.append((since_s, worlds[0].at_s if worlds else life.ended_s, "waiting"))
    left_at_s = _left_at(life, worlds)
    for world, end_s in zip(worlds, ends, strict=False):
        if life.node not in world.members:
            if world.at_s < left_at_s:
                spans.append((world.at_s, end_s, "waiting"))
            continue
        part, ended = life.parts.get(world.generation), life.rounds.get(world.generation)
        course = Course(
            generation=world.generation,
            members=world.members,
            began_s=world.at_s,
            restored_s=part.restored_s if part is not None else None,
            round_s=ended.at_s if ended is not None else None,
            ended_s=end_s,
        )
        spans += _of_course(course, end_s)
    return spans


def _left_at(life: AgentLife, worlds: Sequence[SeenWorld]) -> float:
    """Returns when the first generation without the node began, after which its agent left;
    infinity for an agent that did not leave."""
    if life.exit is None or life.exit.get("code") != ExitCode.LEFT:
        return math.inf
    joined = [world.at_s for world in worlds if life.node in world.members]
    later = [world.at_s for world in worlds if world.at_s > max(joined, default=math.inf)]
    return min(later, default=math.inf)


def _of_course(course: Course, end_s: float) -> list[Span]:
    """Returns the states of a member in one generation."""
    round_s = min(end_s, course.round_s) if course.round_s is not None else end_s
    restored_s = min(round_s, course.restored_s) if course.restored_s is not None else round_s
    return [
        (course.began_s, restored_s, "starting"),
        (restored_s, round_s, "training"),
        (round_s, end_s, "recovering"),
    ]
