"""Models of where state lies: a node's shared memory, and the checkpoint directory.

A state is named by (generation, step): the generation that computed or captured it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from elasticzero.checkpoint.ram.store import HeldSnapshot
from elasticzero.launcher.protocol.view import DamagedCheckpoint
from elasticzero.launcher.snapshots.checkpoint_probe import CheckpointState
from tests.simulation.timeline import Timeline

if TYPE_CHECKING:
    from tests.simulation.agents import Agent

State = tuple[int, int]
"""Generation and step."""
SnapshotName = tuple[int, int, int]
"""Generation, step, and the world size it was written for."""
LOOK_FRESH_S = 0.3


class NodeMemory:
    """What one node holds: drafts until they are sealed, then shards."""

    def __init__(self) -> None:
        self.drafts: dict[SnapshotName, set[int]] = {}
        self.shards: dict[SnapshotName, set[int]] = {}

    def held(self) -> list[HeldSnapshot]:
        return [
            HeldSnapshot(generation=g, step=s, ranks=tuple(sorted(ranks)), world_size=size)
            for (g, s, size), ranks in sorted(self.shards.items())
        ]

    def has(self, name: SnapshotName, rank: int) -> bool:
        return rank in self.shards.get(name, ())

    def keep_only(self, states: Collection[State]) -> None:
        self.drafts = {n: r for n, r in self.drafts.items() if n[:2] in states}
        self.shards = {n: r for n, r in self.shards.items() if n[:2] in states}

    def write(self, name: SnapshotName, rank: int, keep: Collection[State]) -> None:
        """A worker leaves a draft; all but `keep` makes room."""
        self.keep_only({*keep, name[:2]})
        if rank not in self.shards.get(name, ()):
            self.drafts.setdefault(name, set()).add(rank)

    def seal(self, names: Iterable[SnapshotName]) -> None:
        for name in list(names):
            ranks = self.drafts.pop(name, None)
            if ranks:
                self.shards.setdefault(name, set()).update(ranks)

    def add(self, name: SnapshotName, ranks: Iterable[int]) -> None:
        """A replica, pulled whole."""
        self.shards.setdefault(name, set()).update(ranks)


@dataclass(slots=True)
class Checkpoint:
    generation: int
    """Whose state it is."""
    at_s: float
    """When its manifest was made."""
    damaged: str = ""
    damaged_s: float = 0.0
    hidden: bool = False
    """Only who reads it finds the damage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One node's part of a save."""

    agent: Agent
    name: SnapshotName
    token: str
    """Of the generation."""
    ranks: tuple[int, ...]
    replacing: bool
    """The step is known to be damaged."""
    bad_steps: tuple[int, ...] = ()
    parts: set[int] = field(default_factory=set)
    """Ranks whose shards are written; all nodes of the save have the same set."""
    lasts: Callable[[], bool] = lambda: True
    """Whether the save is not given up."""
    over: Callable[[bool], None] = lambda well: None
    """Told whether the step stands, or this part could not be written."""


class Storage:
    """The checkpoint directory that all nodes share."""

    def __init__(self, timeline: Timeline, *, possible: bool) -> None:
        self.timeline = timeline
        self.possible = possible
        self.away = False
        """It takes no writes."""
        self._back_s = 0.0
        """When it last came back."""
        self.steps: dict[int, Checkpoint] = {}
        self.gone: dict[int, Checkpoint] = {}
        """Steps that are not there any more, damaged since then."""
        self.committed: Callable[[int, int], None] = lambda generation, step: None
        """Told of every checkpoint."""
        self.before_manifest: Callable[[Agent, int], None] | None = None
        """Called with the agent whose save is about to make a manifest, in phases, and the step."""
        self.before_removal: Callable[[Agent, int], bool] | None = None
        """Called with the agent that is about to remove a file, in phases, and the file's step;
        whether something happens meanwhile."""
        self.before_persist: Callable[[Part], None] | None = None
        """Called with each part of a save that workers have asked for."""
        self.before_part: Callable[[Part], bool] | None = None
        """Called with each part of a held snapshot that is about to be written; whether its agent
        has met with something before that."""
        self._parts: dict[SnapshotName, set[int]] = {}

    def well_for(self, seconds: float) -> bool:
        """Whether it has taken writes for so long."""
        return not self.away and self.timeline.now_s - self._back_s > seconds

    def late_s(self, seconds: float) -> float:
        """For how much of so long at most a save from memory has waited for late answers."""
        return 0.0

    def commit(self, generation: int, step: int, *, replacing: bool = False) -> None:
        """The manifest of a step is made: exclusively, unless it replaces a damaged one."""
        if step in self.steps and not replacing:
            return
        self.steps[step] = Checkpoint(generation, self.timeline.now_s)
        self.committed(generation, step)

    def persist(self, part: Part) -> None:
        """A node's part of a save is written."""
        if self.before_persist is not None:
            self.before_persist(part)
        if self.away:
            part.over(False)
            return
        part.parts.update(part.ranks)
        if len(part.parts) == part.name[2]:
            self.commit(part.name[0], part.name[1], replacing=part.replacing)
            part.over(True)

    def save_part(self, part: Part) -> None:
        """Some ranks' shards of a snapshot, saved though its workers are gone."""
        if self.away or (self.before_part is not None and self.before_part(part)):
            return
        parts = self._parts.setdefault(part.name, set())
        parts.update(part.ranks)
        if len(parts) == part.name[2]:
            self.commit(part.name[0], part.name[1], replacing=part.replacing)

    def recorded(self, step: int) -> Checkpoint | None:
        """A step that is there, or was."""
        return self.steps.get(step) or self.gone.get(step)

    def has_all(self, name: SnapshotName) -> bool:
        return len(self._parts.get(name, ())) == name[2]

    def go_away(self, seconds: float) -> None:
        """Take no writes for so long."""
        self.away = True
        self.timeline.after(seconds, self._come_back)

    def _come_back(self) -> None:
        self.away, self._back_s = False, self.timeline.now_s

    def damage(self, *, hidden: bool) -> None:
        """The newest checkpoint is damaged."""
        if self.steps:
            newest = self.steps[max(self.steps)]
            newest.damaged, newest.hidden = "block 3 is not what was written", hidden
            newest.damaged_s = self.timeline.now_s

    def good(self, step: int) -> bool:
        return step in self.steps and not self.steps[step].damaged

    def newest_good(self, *, before_s: float) -> int | None:
        """Of those that stood by then."""
        good = [s for s, c in self.steps.items() if not c.damaged and c.at_s < before_s]
        return max(good, default=None)


class SlowLook:
    """One agent's look at the storage: the answer comes later, and counts for a while."""

    def __init__(self, storage: Storage, random: Random, wake: Callable[[], None]) -> None:
        self._storage = storage
        self._random = random
        self._wake = wake
        self._seen: CheckpointState | None = None
        self.told: int | None = None
        """The newest good checkpoint, as it was told last; None: none, or not yet."""
        self._until_s = 0.0
        self._looking = False
        self._known: frozenset[int] = frozenset()

    @property
    def possible(self) -> bool:
        return self._storage.possible

    def invalidate(self) -> None:
        self._until_s = 0.0

    def poll(self, bad: Mapping[int, str]) -> CheckpointState:
        if not self._storage.possible:
            return CheckpointState()
        timeline = self._storage.timeline
        fresh = timeline.now_s < self._until_s and bad.keys() <= self._known
        self.told = self._seen.step if fresh and self._seen is not None else None
        if fresh and self._seen is not None:
            return self._seen
        if not self._looking:
            self._looking = True
            slow = self._random.random() < 0.05
            takes_s = self._random.uniform(1.0, 4.0) if slow else self._random.uniform(0.002, 0.05)
            timeline.after(takes_s, self._answer, dict(bad), max(LOOK_FRESH_S, takes_s))
        return CheckpointState(pending="looking at the checkpoints")

    def _answer(self, bad: dict[int, str], lasts_s: float) -> None:
        self._seen = self._look(bad)
        self._known = frozenset(bad)
        self._until_s = self._storage.timeline.now_s + lasts_s
        self._looking = False
        self._wake()

    def _look(self, bad: dict[int, str]) -> CheckpointState:
        damage = None
        for step in sorted(self._storage.steps, reverse=True):
            checkpoint = self._storage.steps[step]
            why = bad.get(step) or ("" if checkpoint.hidden else checkpoint.damaged)
            if not why:
                return CheckpointState(step=step, damage=damage)
            damage = damage or DamagedCheckpoint(step, why)
        return CheckpointState(damage=damage)
