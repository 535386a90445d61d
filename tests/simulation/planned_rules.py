"""The rules of changes inside the workers' loops: R26 to R28 of `launcher/protocol/invariants.py`,
and R2 for the numbers of generations that workers have entered."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from elasticzero.launcher.protocol.documents import Alarm, Proposal, World
from elasticzero.launcher.protocol.planned.proposal import coming_in, without
from elasticzero.launcher.store.watch_cache import ALARM
from tests.simulation.schedule import CLEAN, HARMLESS

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.training import Group, Worker


class ChangeRules:
    """What was proposed and entered so far, and the checks."""

    def __init__(self, cluster: Cluster, require: Callable[[bool, str, str], None]) -> None:
        self._cluster = cluster
        self._require = require
        self._entered: dict[str, tuple[str, World]] = {}
        """Worlds that workers have entered inside their loops, by token: the token of the world
        before, and the world."""
        self.proposals: dict[str, Proposal] = {}
        """The proposal of each world, by that world's token."""
        self._applied: dict[Worker, tuple[str, int]] = {}
        """By worker: token of the generation in which it has applied its last step, and that."""

    @property
    def entered(self) -> list[World]:
        """The worlds that workers have entered inside their loops."""
        return [world for _, world in self._entered.values()]

    def entered_after(self, world: World) -> World | None:
        """The world that the workers of this one have entered inside their loops, if they have."""
        for before, after in self._entered.values():
            if before == world.token:
                return after
        return None

    def parks(self, world: World) -> bool:
        """Returns whether the proposal of this world has members give up their places."""
        proposal = self.proposals.get(world.token)
        return proposal is not None and set(without(world, proposal)) > set(proposal.leavers)

    def comes_into(self, world: World) -> set[str]:
        """The nodes that the proposal of this world takes in."""
        proposal = self.proposals.get(world.token)
        open_one = proposal is not None and not proposal.withdrawn
        members = coming_in(world, proposal) if proposal is not None and open_one else []
        return {member.node for member in members}

    def numbered(self, generation: int) -> World | None:
        """Of those worlds that of a number."""
        return next((world for world in self.entered if world.generation == generation), None)

    def proposed(self, proposal: Proposal) -> None:
        """R26."""
        former = self.proposals.get(proposal.of)
        lost = self._cluster.etcd.losses > 0
        text = f"generation {proposal.generation - 1} has a second proposal"
        same = former is None or former.token == proposal.token
        self._require(same or lost, "R26", text)
        back = former is not None and bool(former.withdrawn) and not proposal.withdrawn
        self._require(not back or lost, "R26", f"{text}: the first was withdrawn")
        self.proposals[proposal.of] = proposal

    def switches(self, before: World, after: World) -> None:
        """R26: all workers of a generation go over to another one, inside their loops."""
        self._entered[after.token] = (before.token, after)
        proposal = self.proposals.get(before.token)
        so = proposal is not None and proposal.token == after.token
        text = f"workers go over to {after.generation}, which no agent has proposed"
        self._require(so or self._cluster.etcd.losses > 0, "R26", text)

    def alarmed(self, alarm: Alarm, causes: Collection[str]) -> None:
        """R27: a node that the others have gone on without opens no round; and where nodes only
        come and leave, nothing ends a generation that workers have gone over to, and no round is
        opened for the one before."""
        world, plan = self._cluster.world, self._cluster.plan
        host = self._cluster.hosts.get(alarm.node)
        stays = host is None or host.agent is None or not host.agent.is_left_behind
        text = f"{alarm.node} asks who is alive, and the others have gone on without it"
        self._require(stays or alarm.kind != "silence", "R27", text)
        clean = set(causes) <= CLEAN | HARMLESS and not plan.trouble and not plan.crash_at
        if world is None or not clean or self._cluster.etcd.losses:
            return
        left = self.entered_after(world) is not None
        text = f"after {world.generation} and a change inside the loops: {alarm.reason}"
        if left or world.resume.tier == "live":
            self._require(alarm.kind not in ("failure", "lapse", "hang"), "R27", text)
        self._require(not left or alarm.kind != "silence", "R27", text)

    def written(self, after: World) -> None:
        """R27."""
        text = f"generation {after.generation}"
        if after.resume.tier != "live":
            tokens = {proposal.token for proposal in self.proposals.values()}
            self._require(after.token not in tokens, "R27", f"{text} has a proposal's token")
            return
        _, entered = self._entered.get(after.token, ("", None))
        so = entered is not None and entered.resume.step == after.resume.step
        self._require(so, "R27", f"{text} is written, and its workers have not entered it")
        alarmed = f"{ALARM}{after.generation - 1}" in self._cluster.etcd.read(ALARM).entries
        self._require(not alarmed, "R27", f"{text} follows an alarm, and a proposal too")

    def numbers(self, entered: World | None, after: World) -> None:
        """R2, of a generation that workers have entered and no world was written for.

        entered: what the workers of the world before have entered.
        """
        if after.entered:
            so = entered is not None and entered.generation == after.entered
            self._require(so, "R2", f"no workers have entered {after.entered}")
        elif entered is not None and after.resume.tier != "live":
            agents = [self._cluster.hosts[member.node].agent for member in after.members]
            groups = [agent.worker_group for agent in agents if agent is not None]
            numbers = {group.generation for group in groups if group is not None}
            text = f"generation {after.generation} was entered, and its number is given again"
            self._require(entered.generation not in numbers, "R2", text)

    def stepped(self, group: Group) -> None:
        """R28."""
        for worker in group.workers.values():
            token, step = self._applied.get(worker, (group.world.token, group.step - 1))
            text = f"{worker.worker_group.host.name} applies step {group.step} after {step}"
            self._require(group.step == step + 1, "R28", f"{text} of {token}")
            self._applied[worker] = (group.world.token, group.step)
