"""Carries out the decided actions that write to the store.

Each write may be lost or done twice without harm: reports and alarms are overwritten by equal ones;
a world, and the end, are written in one transaction that is conditioned on the revision of `world`
that the decision was based on, on `done` not being there, and on this node's own registration. A
`done` that cannot be read counts as not being there; a world that cannot be read is not replaced.
Each document states the node's run of the job. Every method raises `StoreUnavailable`, and
`RunEnded` once a later run has begun.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from math import inf

from elasticzero.errors import StoreUnavailable
from elasticzero.launcher.agent.observer import ClusterObserver
from elasticzero.launcher.protocol.actions import (
    Action,
    PutReport,
    RaiseAlarm,
    WriteDone,
    WriteProposal,
    WriteWorld,
)
from elasticzero.launcher.protocol.documents import (
    Done,
    Proposal,
    Report,
    World,
    to_bytes,
)
from elasticzero.launcher.protocol.invariants import check_invariants
from elasticzero.launcher.protocol.view import View
from elasticzero.launcher.store.api import Condition, PrefixState, Store, unchanged
from elasticzero.launcher.store.membership import Membership
from elasticzero.launcher.store.watch_cache import (
    ALARM,
    DONE,
    MEMBERS,
    NEXT,
    WORLD,
    WatchCache,
    reports_of,
)

VERIFY_AGAIN_S = 5.0
"""Seconds between two reads of the registration of a node that waits for a place."""


def needs_fresh_view(action: Action) -> bool:
    """Returns whether an action is done only if a fresh read of the store leads to it too.

    That is so of the end of a generation, and of an alarm about a lapsed lease, for a watch may
    show late that the lease is back. It is not so of a world that workers have entered already:
    that follows from nothing in the store.
    """
    match action:
        case WriteWorld(world):
            return world.resume.tier != "live"
        case WriteDone():
            return True
        case RaiseAlarm(alarm):
            return alarm.kind == "lapse"
        case _:
            return False


class StoreWriter:
    """Performs one agent's actions on the store."""

    def __init__(
        self,
        store: Store,
        observer: WatchCache,
        membership: Membership,
        cluster: ClusterObserver,
        *,
        launch_id: str = "",
        token_digest: str = "",
    ) -> None:
        """Writes nothing yet.

        Args:
            store: the job's part of the store.
            observer: what was seen of the store.
            membership: this node's registration.
            cluster: makes the agent's view.
            launch_id: --launch-id of this node; it is part of the end of the job.
            token_digest: digest of the job's token; it is part of each world that is written.
        """
        self._store = store
        self._observer = observer
        self._membership = membership
        self._cluster = cluster
        self._launch_id = launch_id
        self._token_digest = token_digest
        self._verified: PrefixState | None = None
        """Registrations among which this node's own was last looked for."""
        self._verify_after_s: float | None = None
        """Time before which this node's registration is not read; None: it need not be."""

    def adopt(self, token_digest: str) -> None:
        """Replaces the job's token by another one from now on."""
        self._token_digest = token_digest

    @property
    def _run(self) -> int:
        """Returns the number of this node's run of the job."""
        return self._membership.me.run

    def keep_registered(self, now_s: float, *, leaving: bool) -> None:
        """Renews the registration where it has lapsed; a node that leaves does not come back."""
        world, revision = self._observer.world()
        me, proposal = self._membership.me, self._observer.proposal(world)
        named = world is None or world.names(me)
        named |= proposal is not None and proposal.find(me.node, me.incarnation) is not None
        self._note_replaced_registration()
        self._verify_where_in_doubt(now_s, world)
        if named or not leaving:
            self._membership.check(now_s, named=named, world_revision=revision)

    @property
    def due_s(self) -> float:
        """Returns the time at which `keep_registered` reads the registration of a node that waits
        for a place, or is not seen registered; infinite: neither is so."""
        return inf if self._verify_after_s is None else self._verify_after_s

    def _verify_where_in_doubt(self, now_s: float, world: World | None) -> None:
        """Reads this node's registration now and then while the node waits for a place, or is not
        among the registrations that it follows.

        A restored backup may hold its lease and not its registration. No lease tells the node of
        that, and perhaps no revision. No other node can know that a node waits; and a member that
        is not registered keeps others from coming, and writes no world.

        Args:
            now_s: Present time, on the agent's clock.
            world: The present world; None: there is none.
        """
        registrations = self._observer.get(MEMBERS)
        is_missing = registrations is not None and (
            self._membership.key not in registrations.entries
        )
        if world is not None and world.names(self._membership.me) and not is_missing:
            self._verify_after_s = None
            return
        due = self._verify_after_s is not None and now_s >= self._verify_after_s
        if due or self._verify_after_s is None:
            self._verify_after_s = now_s + VERIFY_AGAIN_S
        if due:
            with suppress(StoreUnavailable):
                self._membership.verify()

    def _note_replaced_registration(self) -> None:
        """Has the registration put anew where something else is at its key: what cannot be read, or
        an earlier registration of this agent that a restored backup has brought back."""
        registrations, members = self._observer.get(MEMBERS), self._observer.members()
        if registrations is None or members is None or registrations is self._verified:
            return
        self._verified = registrations
        me = self._membership.me
        registered = members.get(me.node)
        replaced = registered is None or registered.incarnation != me.incarnation
        if replaced and f"{MEMBERS}{me.node}" in registrations.entries:
            with suppress(StoreUnavailable):
                self._membership.verify()

    def write(self, action: RaiseAlarm | PutReport | WriteProposal, view: View) -> None:
        """Writes an alarm, a report or a proposal that was decided from `view`."""
        world = view.world
        generation, token = (world.generation, world.token) if world is not None else (0, "")
        match action:
            case RaiseAlarm():
                self._raise_alarm(generation, action, stands=view.workers.prepared is not None)
            case PutReport(report):
                self._put_report(generation, token, view.me.node, report)
            case WriteProposal(proposal):
                self._write_proposal(generation, proposal)

    def _write_proposal(self, generation: int, proposal: Proposal) -> None:
        """Writes a new proposal, or the withdrawal of one: PL3 in `planned`.

        Args:
            generation: Generation that the proposal changes.
            proposal: The proposal.
        """
        stored, world = self._observer.get(NEXT), self._observer.get(WORLD)
        if stored is None or world is None:
            return  # what stands there is about to be told
        conditions = [
            unchanged(WORLD, world.entries.get(WORLD)),
            unchanged(NEXT, stored.entries.get(NEXT)),
        ]
        if not proposal.withdrawn:
            self._cluster.spend_token()
            conditions.append(Condition(key=f"{ALARM}{generation}", mod_revision=0))
            conditions.append(self._membership.still_registered())
        put = {NEXT: to_bytes(replace(proposal, run=self._run))}
        self._store.write(put, conditions=conditions)
        self._observer.put(NEXT, self._store.read(NEXT))

    def _raise_alarm(self, generation: int, action: RaiseAlarm, *, stands: bool) -> None:
        """Writes an alarm, unless the generation has one, or the node that counts as lost is back:
        an agent may be suspended just before it writes.

        Args:
            generation: Number of the generation.
            action: Holds the alarm.
            stands: Whether `world` must still be that of the generation: its workers may have
                entered the next one (PS2 in `planned`).
        """
        key = f"{ALARM}{generation}"
        put = {key: to_bytes(replace(action.alarm, run=self._run))}
        conditions = [Condition(key=key, mod_revision=0)]
        if action.lost and (members := self._observer.get(MEMBERS)) is not None:
            of_lost = f"{MEMBERS}{action.lost}"
            conditions.append(unchanged(of_lost, members.entries.get(of_lost)))
        if stands and (world := self._observer.get(WORLD)) is not None:
            conditions.append(unchanged(WORLD, world.entries.get(WORLD)))
        self._store.write(put, conditions=conditions)
        if self._observer.alarm(generation) is None:  # mostly the watch has told it by now
            self._observer.put(ALARM, self._store.read(ALARM))

    def _put_report(self, generation: int, token: str, node: str, report: Report) -> None:
        about = replace(report, world=token, run=self._run)
        revision = self._store.write({f"{reports_of(generation)}{node}": to_bytes(about)})
        self._cluster.reported(generation, report, revision or 0)

    def reread(self, view: View, *, ends: bool) -> PrefixState | None:
        """Reads what a decision that needs a fresh view rests on; returns `world` as it is now.

        Args:
            view: View from which the decision was made.
            ends: Whether the decision ends a generation, so that it rests on the reports too.
        """
        generation = view.world.generation if view.world is not None else 0
        for prefix in (reports_of(generation), MEMBERS) if ends else (MEMBERS,):
            self._observer.put(prefix, self._store.read(prefix))
        return self._observer.get(WORLD)

    def end_generation(
        self, action: WriteWorld | WriteDone, view: View, basis: PrefixState | None
    ) -> None:
        """Writes the next world, or the end of the job.

        Args:
            action: Holds the document to write.
            view: View from which it was decided.
            basis: State of `world` before that view was made; the write is refused if it has
                changed since.
        """
        if self._observer.unreadable(World) is not None:
            return
        if isinstance(action, WriteDone):
            done = replace(action.done, launch_id=self._launch_id, run=self._run)
            self._store.write({DONE: to_bytes(done)}, conditions=self._conditions(basis))
            self._observer.put(DONE, self._store.read(DONE))
            return
        world = view.world
        generation = world.generation if world is not None else 0
        check_invariants(world, action.world)
        old = [f"{ALARM}{generation - 1}", reports_of(generation - 1)]
        conditions = self._conditions(basis)
        if action.world.resume.tier == "live":
            conditions.append(Condition(key=f"{ALARM}{generation}", mod_revision=0))
        following = replace(action.world, token_digest=self._token_digest, run=self._run)
        key_value = {WORLD: to_bytes(following)}
        deletes = [f"{MEMBERS}{node}" for node in action.gone]
        deletes += old if generation > 1 else []
        if world is not None and world.entered:  # which has no reports
            deletes += [f"{ALARM}{generation - 2}", reports_of(generation - 2)]
        written = self._store.write(key_value, deletes=deletes, conditions=conditions)
        if written is not None:
            self._observer.put(WORLD, self._store.read(WORLD))

    def _conditions(self, basis: PrefixState | None) -> list[Condition]:
        """Returns the conditions of a write that ends a generation: it is still open, the job is
        too, and this node is registered."""
        entry = basis.entries.get(WORLD) if basis is not None else None
        return [
            unchanged(WORLD, entry),
            unchanged(DONE, self._observer.unreadable(Done)),
            self._membership.still_registered(),
        ]
