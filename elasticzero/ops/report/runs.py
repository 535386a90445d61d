"""Chooses the lives of agents that belong to a job's last run, and compares their clocks. Pure.

A directory of logs may hold several runs of one job, and agents that came back. Rules:
 1. Two lives that have read the same world belong to one run.
 2. Two lives of one node that follow each other belong to one run if the first has not seen the end
    of the job, and the generations of the second come after its own. A life without a world belongs
    to the last run if it is as new, and otherwise to none.
 3. The last run is the one whose newest event is the latest.
 4. Islands of one job (`--strategy diloco`) have worlds of their own. The last run is that of the
    island that has ended last, and the lives of the others that were there meanwhile are beside it.
 5. The clock of a node differs by the median of the differences between the times at which it and
    another node have read the same worlds, as members: agents read a world within a second of its
    writing. A difference of less than CLOCK_S is not corrected.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from elasticzero.ops.report.life import AgentLife, SeenWorld

CLOCK_S = 1.0
"""Seconds by which the clocks of two nodes may seem to differ only because agents are slow."""


@dataclass(frozen=True, slots=True)
class JobRun:
    """Holds the lives of all agents of one run of a job."""

    lives: tuple[AgentLife, ...]
    """Lives in the order of their beginnings."""
    clocks_s: Mapping[str, float]
    """Seconds to add to the times of each node, to have them by the clock of one node."""
    earlier: int = 0
    """Number of earlier runs of the job in the same logs."""
    islands: tuple[AgentLife, ...] = ()
    """Lives of the job's other islands that averaged with this one."""

    def at(self, life: AgentLife, at_s: float) -> float:
        """Returns a time of a life by the clock that all share."""
        return at_s + self.clocks_s.get(life.node, 0.0)


def last_run(lives: Sequence[AgentLife]) -> JobRun | None:
    """Returns the last run; None if there are no lives.

    lives: the lives of each node in order, oldest first.
    """
    if not lives:
        return None
    runs = _runs(lives)
    chosen = max(runs, key=lambda run: max(life.ended_s for life in run))
    clocks_s = _clocks(chosen)
    ordered = sorted(chosen, key=lambda life: life.began_s + clocks_s.get(life.node, 0.0))
    others = [run for run in runs if run is not chosen]
    beside = [run for run in others if _averages_with(run, chosen)]
    earlier = sum(1 for run in others if run not in beside and any(life.worlds for life in run))
    islands = tuple(life for run in beside for life in run)
    return JobRun(tuple(ordered), clocks_s, earlier, islands)


def _averages_with(run: Sequence[AgentLife], chosen: Sequence[AgentLife]) -> bool:
    """Returns whether a run is that of another island of the same job, at the same time."""
    began_s, ended_s = min(x.began_s for x in chosen), max(x.ended_s for x in chosen)
    averages = any(x.averaged for x in run) and any(x.averaged for x in chosen)
    return averages and any(x.began_s <= ended_s and x.ended_s >= began_s for x in run)


def _runs(lives: Sequence[AgentLife]) -> list[list[AgentLife]]:
    """Returns the lives by run: rules 1 and 2."""
    group = list(range(len(lives)))

    def find(index: int) -> int:
        while group[index] != index:
            group[index] = group[group[index]]
            index = group[index]
        return index

    first: dict[tuple[object, ...], int] = {}
    for index, life in enumerate(lives):
        for world in life.worlds.values():
            group[find(index)] = find(first.setdefault(world.key, index))
    for index in range(1, len(lives)):
        before, life = lives[index - 1], lives[index]
        follows = min(life.worlds, default=0) > max(before.worlds, default=0) > 0
        if before.node == life.node and before.outcome is None and follows:
            group[find(index)] = find(index - 1)
    by_group: dict[int, list[AgentLife]] = defaultdict(list)
    for index, life in enumerate(lives):
        by_group[find(index)].append(life)
    return _with_loose(list(by_group.values()))


def _with_loose(runs: Sequence[list[AgentLife]]) -> list[list[AgentLife]]:
    """Returns the runs that have a world; the newest has the lives without one that are as new."""
    with_world = [run for run in runs if any(life.worlds for life in run)]
    loose = [run for run in runs if not any(life.worlds for life in run)]
    if not with_world:
        return [[life for run in loose for life in run]]
    last = max(with_world, key=lambda run: max(life.ended_s for life in run))
    began_s = min(life.began_s for life in last)
    last += [life for run in loose for life in run if life.ended_s >= began_s]
    return with_world


def _clocks(lives: Sequence[AgentLife]) -> dict[str, float]:
    """Returns what to add to the times of each node whose clock differs: rule 5."""
    read: dict[tuple[object, ...], dict[str, float]] = defaultdict(dict)
    for life in lives:
        for world in life.worlds.values():
            if life.node in world.members and _was_there(life, world):
                read[world.key].setdefault(life.node, world.at_s)
    counts: dict[str, int] = defaultdict(int)
    for times in read.values():
        for node in times:
            counts[node] += 1
    if not counts:
        return {}
    clocks_s = {max(counts, key=lambda node: counts[node]): 0.0}
    for _ in range(len(counts)):  # a node may share worlds only with one that is compared before
        seen: dict[str, list[float]] = defaultdict(list)
        for times in read.values():
            world_starts = [
                at_s + clocks_s[node] for node, at_s in times.items() if node in clocks_s
            ]
            for node, at_s in times.items() if world_starts else ():
                if node not in clocks_s:
                    seen[node].append(median(world_starts) - at_s)
        if not seen:
            break
        for node, offsets in seen.items():
            clocks_s[node] = value if abs(value := median(offsets)) >= CLOCK_S else 0.0
    return {node: value for node, value in clocks_s.items() if value}


def _was_there(life: AgentLife, world: SeenWorld) -> bool:
    """Returns whether the agent was registered before it read the world."""
    return life.registered_s is None or life.registered_s <= world.at_s
