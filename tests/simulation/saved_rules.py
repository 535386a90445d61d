"""What becomes of the state in memory when a job ends: R19, and R12 for a stop, of
`launcher/protocol/invariants.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticzero.launcher.protocol.documents import Done, World
from tests.simulation.schedule import CLEAN, HARMLESS

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.rules import Rules

SAVED_WITHIN_S = 8.0
"""What the nodes that are left hold is saved so soon, whoever was lost."""
TRIED_SHARE = 0.9
"""Clocks differ: of the time for which a save is tried so much must have passed by any."""


class SavedRules:
    """Checks what an end says of the newest state."""

    def __init__(self, cluster: Cluster, rules: Rules) -> None:
        self._cluster = cluster
        self._rules = rules

    def stopped(self, done: Done, reached: int, causes: list[str]) -> None:
        """R12: what memory held is a checkpoint, unless `done` says that it could not be saved.

        reached: the last step of all; causes: what has struck the job.
        """
        world, storage, step = self._cluster.world, self._cluster.storage, done.step
        kept = not storage.possible or step == 0 or step in storage.steps
        self._rules.require(kept, "R12", f"no checkpoint of {step}")
        clean = set(causes) <= CLEAN | HARMLESS and not self._cluster.plan.trouble
        if clean and storage.possible:
            self._rules.require(step == reached, "R12", f"stopped at {step}, {reached} was reached")
        excused = not storage.possible or "could not be saved" in done.reason
        if world is None or excused:
            return
        if self._all_are_there(world):
            best = self._rules.best_in_memory(world, world)
            text = f"stopped at {done.step}, and memory holds {best}"
            self._rules.require(done.step >= best, "R12", text)

    def failed(self, done: Done) -> None:
        """R19: what memory holds is a checkpoint, unless `done` says that it could not be saved, or
        that no node holds all of it; see `_tried` and `_lacking`."""
        world, storage = self._cluster.world, self._cluster.storage
        if world is None or not storage.possible:
            return
        if "could not be saved" in done.reason:
            self._tried(done, world)
            return
        if "no node that is left holds all of it" in done.reason:
            self._lacking(done, world)
        if self._all_are_there(world):
            best = self._rules.best_in_memory(world, world)
            newest = max(storage.steps, default=0)
            text = f"failed, and memory holds {best}, storage {newest}"
            self._rules.require(newest >= best, "R19", text)

    @property
    def _least_s(self) -> float:
        return TRIED_SHARE * self._cluster.plan.policy.save_timeout_s

    def _tried(self, done: Done, world: World) -> None:
        """It was tried for --save-timeout; and not in vain, if that leaves SAVED_WITHIN_S.

        Of that time does not count what came before the last node was lost; nor does what storage
        took to answer late, for a save can do nothing but wait for its request. A request of
        another save of that node counts as late too, but only the one that was under way, or what
        it asks once all parts are there: otherwise a save that has to go first is no excuse.
        """
        rules, storage, least_s = self._rules, self._cluster.storage, self._least_s
        waited_s = rules.promises.round_s(world)
        text = f"{done.reason}, and that was tried for {waited_s:.1f} s"
        rules.require(waited_s > least_s, "R19", text)
        quiet = rules.promises.quiet_for(SAVED_WITHIN_S) and storage.well_for(least_s)
        answered_s = least_s - storage.late_s(least_s)
        if quiet and answered_s > SAVED_WITHIN_S and self._none_is_away(world):
            best = rules.best_in_memory(world, world)
            text = f"memory held {best} all the time, and {done.reason}"
            rules.require(max(storage.steps, default=0) >= best, "R19", text)

    def _lacking(self, done: Done, world: World) -> None:
        """Nodes that were away, and may come back with what they hold, had --save-timeout for it.

        A node whose agent is gone, or that leaves, does not come back.
        """
        agents = [self._cluster.hosts[member.node].agent for member in world.members]
        back = [a for a in agents if a is not None and not a.dead and not a.leaving]
        back = [agent for agent in back if world.names(agent.membership.me)]
        memories = [agent.host.memory for agent in back]
        best = self._rules.newest_whole(world, [m for x in memories for m in (x.shards, x.drafts)])
        waited_s, step = self._rules.promises.round_s(world), self._unwritten(done)
        text = f"{done.reason} after {waited_s:.1f} s, and nodes that live hold {best}"
        self._rules.require(waited_s > self._least_s or best < step, "R19", text)

    @staticmethod
    def _unwritten(done: Done) -> int:
        """The step of the checkpoint that was not written."""
        return done.failure.step if done.failure is not None else 0

    def _all_are_there(self, world: World) -> bool:
        """Returns whether no member is lost: its agent runs, and its registration stands, which a
        frozen one loses."""
        agents = [self._cluster.hosts[member.node].agent for member in world.members]
        alive = all(agent is not None and not agent.dead for agent in agents)
        registrations = self._rules.registrations
        return alive and all((m.node, m.incarnation) in registrations for m in world.members)

    def _none_is_away(self, world: World) -> bool:
        """Returns whether each member is either lost, or runs and is registered."""
        for member in world.members:
            agent = self._cluster.hosts[member.node].agent
            lost = agent is None or agent.dead
            me = agent.membership.me if agent is not None else member
            lost |= me.incarnation != member.incarnation
            stands = (member.node, member.incarnation) in self._rules.registrations
            if not lost and (not stands or (agent is not None and agent.stands_still)):
                return False
        return True
