"""A model of a change of the world inside the loops of workers: what `elasticzero/comm` and the
workers' boundary do with `Prepare`.

The ranks that stay connect the proposed generation beside their training, once all of them were
told of it. A boundary's word that all are prepared binds them all: at the next boundary they go
over, whatever is withdrawn by then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticzero.ipc.messages import FLAG_LEAVE
from elasticzero.launcher.protocol.documents import Member, Proposal
from elasticzero.launcher.protocol.planned.proposal import coming_in
from elasticzero.launcher.protocol.planned.switch import world_after

if TYPE_CHECKING:
    from tests.simulation.training import Group
    from tests.simulation.worker_group import WorkerGroup

CONNECT_S = 8.0
"""So long the ranks that stay wait for each other."""
REFUSES_SHARE = 0.04
"""Of workers: one that cannot be prepared, for a reason of its own."""
TOLD_S = 0.05
"""So much later than the boundary an agent hears of it at most."""


class Preparation:
    """What the ranks of one generation have prepared."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._cluster = group.cluster
        self._told: dict[int, Proposal] = {}
        """By index of the member: the proposal that its workers were told of."""
        self._ready: set[int] = set()
        """Members whose workers are prepared."""
        self._come: dict[str, WorkerGroup] = {}
        """By node: the workers that wait to come in."""
        self._promise: Proposal | None = None
        """What the last word binds all ranks to, at the next boundary."""

    # -- what an agent tells its workers

    def tell(self, worker_group: WorkerGroup, proposal: Proposal) -> None:
        """A node's workers are told to prepare."""
        index, cluster = worker_group.index, self._cluster
        self._told[index] = proposal
        if cluster.random.random() < REFUSES_SHARE:
            cluster.later(0.0, 0.5, worker_group.refuse, "they refuse")
        elif self._leaves(index, proposal):
            self._ready.add(index)
        else:
            until_s = cluster.timeline.now_s + CONNECT_S
            cluster.later(0.02, 0.3, self._connect, worker_group, proposal, until_s)

    def come(self, worker_group: WorkerGroup, proposal: Proposal) -> None:
        """Workers wait to come into a proposed generation."""
        self._come[worker_group.host.name] = worker_group

    def _coming(self, proposal: Proposal) -> list[Member]:
        return coming_in(self._group.world, proposal)

    def _have_come(self, proposal: Proposal) -> bool:
        """Returns whether all workers that come in do their part of connecting."""
        groups = [self._come.get(member.node) for member in self._coming(proposal)]
        return all(
            group is not None
            and group.coming_into is not None
            and group.coming_into.token == proposal.token
            and all(self._group.able(worker) for worker in group.workers)
            for group in groups
        )

    def withdraw(self, index: int) -> None:
        """A node's workers are told to forget it."""
        self._told.pop(index, None)
        self._ready.discard(index)

    def _leaves(self, index: int, proposal: Proposal) -> bool:
        member = self._group.world.members[index]
        return proposal.find(member.node, member.incarnation) is None

    def _connect(self, worker_group: WorkerGroup, proposal: Proposal, until_s: float) -> None:
        if self._told.get(worker_group.index) != proposal:
            return
        staying = [i for i in self._group.worker_groups if not self._leaves(i, proposal)]
        told = all(self._told.get(i) == proposal for i in staying)
        able = all(
            self._group.able(worker)
            for i in staying
            for worker in self._group.worker_groups[i].workers
        )
        if told and able and self._have_come(proposal):
            self._ready.add(worker_group.index)
        elif self._cluster.timeline.now_s >= until_s:
            worker_group.refuse("not all ranks came in time")
        else:
            self._cluster.later(0.02, 0.3, self._connect, worker_group, proposal, until_s)

    # -- boundaries

    def exchange(self, flags: int) -> Proposal | None:
        """A boundary: returns what all ranks go over to now, and makes the word of the next one."""
        before, self._promise = self._promise, None
        if before is not None:
            return before
        proposals = {proposal.token: proposal for proposal in self._told.values()}
        everyone = len(self._ready) == len(self._group.worker_groups)
        if everyone and len(proposals) == 1 and not flags & FLAG_LEAVE:
            (self._promise,) = proposals.values()
        return None

    def switch(self, proposal: Proposal) -> None:
        """All ranks are at the boundary: those that stay go over, and the others leave."""
        old, cluster = self._group, self._cluster
        following = world_after(old.world, proposal, old.step)
        cluster.rules.switches(old.world, following)
        cluster.note(f"workers: all go over to {following.generation} after step {old.step}")
        new = cluster.group(following)
        for index, worker_group in old.worker_groups.items():
            member = old.world.members[index]
            place = proposal.find(member.node, member.incarnation)
            if place is None:
                worker_group.leave_to_others(new, old.step)
            else:
                worker_group.go_over(new, place, old.step)
        old.ends_here()
        new.goes_on(old)
        for member in self._coming(proposal):
            place = proposal.find(member.node, member.incarnation)
            assert place is not None
            self._come[member.node].begin_inside(new, place, old.step)
        if cluster.at_switch is not None:
            cluster.at_switch()
