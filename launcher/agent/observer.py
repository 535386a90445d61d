"""Builds the `View` that `decide` is given, from everything that one agent has read.

It remembers since when each state has lasted, and requests nothing from the store: it reads the
cache that `Subscriptions` fills. It examines memory and storage no more often than that can matter.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from elasticzero.checkpoint.ram.store import HeldSnapshot
from elasticzero.launcher.agent.subscriptions import Subscriptions, leads
from elasticzero.launcher.protocol.documents import Holding, Member, Proposal, Report, World
from elasticzero.launcher.protocol.leader import answers_of, is_leader
from elasticzero.launcher.protocol.policy import JobPolicy
from elasticzero.launcher.protocol.view import StoreHealth, View, WorkerGroupState
from elasticzero.launcher.snapshots.checkpoint_probe import CheckpointState
from elasticzero.launcher.store.api import Store
from elasticzero.launcher.store.membership import Membership
from elasticzero.launcher.store.watch_cache import (
    WORLD,
    FirstSeen,
    WatchCache,
    reports_of,
)

NOT_ASKED = CheckpointState(pending="storage was not asked")
MEMORY_AGAIN_S = 0.25
MOST_ASKED = 64
"""Maximum number of members without a registration that are asked at a time whether they run. After
an outage of the store all are without one, and none is asked before it has been well for a TTL."""


def _draw_token() -> str:
    return secrets.token_hex(8)


class Memory(Protocol):
    """Lists this node's snapshots: see `SnapshotStore`."""

    def held(self) -> Sequence[HeldSnapshot]: ...


class StorageProbe(Protocol):
    """Reads the checkpoint directory: see `CheckpointProbe`."""

    @property
    def possible(self) -> bool: ...

    def invalidate(self) -> None: ...

    def poll(self, bad: Mapping[int, str]) -> CheckpointState: ...


class Probe(Protocol):
    """Finds out which agents are gone or suspended: see `HostProbe`."""

    def refusing(self, addresses: Mapping[str, str]) -> Collection[str]: ...

    def unanswered_since(
        self, members: Mapping[str, Member], now_s: float
    ) -> Mapping[str, float]: ...


class Outages:
    """Chooses the outage of the store that counts for other nodes' time to act.

    An outage in which requests failed counts whenever it ends. A store that is slow, and answers
    all the same, looks as if it came back again and again: of that, the first time in a round
    counts, or the round would never end.
    """

    def __init__(self) -> None:
        self._end_s = 0.0
        """End of the last outage that counts."""
        self._round_s: float | None = None
        self._slow = False
        """True once a slow answer has counted in that round."""
        self._away = False
        """True if the store was away at the last look."""

    def update(self, end_s: float, round_s: float | None, *, reachable: bool) -> float:
        """Returns the end of the last outage that counts.

        Args:
            end_s: End of the last outage, as it is known now.
            round_s: Time at which the present round began; None: none is open.
            reachable: Whether the store answers now.
        """
        if round_s != self._round_s:
            self._round_s, self._slow = round_s, False
        away = self._away or not reachable
        self._away = not reachable
        if end_s > self._end_s and (away or not self._slow):
            self._slow |= round_s is not None and end_s > round_s and not away
            self._end_s = end_s
        return self._end_s


class Answers:
    """Remembers when the last answer came to the alarm of a generation."""

    def __init__(self) -> None:
        self._generation = self._count = 0
        self._last_s: float | None = None

    def update(self, generation: int, count: int, now_s: float) -> float | None:
        """Returns the time at which the last answer was seen to come; None: none came since the
        first look at this generation.

        Args:
            generation: Number of the generation.
            count: Number of its members that have answered.
            now_s: Present time, on the agent's clock.
        """
        if generation != self._generation:
            self._last_s = None
        elif count > self._count:
            self._last_s = now_s
        self._generation, self._count = generation, count
        return self._last_s


class ClusterObserver:
    """Observes the store, the registration, memory and storage for one agent."""

    def __init__(  # noqa: PLR0913 - all that one agent can see
        self,
        store: Store,
        observer: WatchCache,
        membership: Membership,
        subscriptions: Subscriptions,
        snapshots: Memory,
        storage_probe: StorageProbe,
        probe: Probe,
        draw_token: Callable[[], str] = _draw_token,
    ) -> None:
        """Creates an observer that has seen nothing yet.

        Args:
            store: The job's part of etcd.
            observer: What was last read of the store.
            membership: The node's registration.
            subscriptions: What this agent follows in the store.
            snapshots: Snapshots in this node's memory.
            storage_probe: Reads the checkpoint directory.
            probe: Finds out which agents are gone or suspended.
            draw_token: Returns a new random text, which becomes part of a world's token.
        """
        self._store = store
        self._observer = observer
        self._membership = membership
        self._subscriptions = subscriptions
        self._snapshots = snapshots
        self._storage_probe = storage_probe
        self._probe = probe
        self._draw_token = draw_token
        self._began_s = self._last_join_s = 0.0
        self._missing, self._alarm, self._round, self._outside = (FirstSeen() for _ in range(4))
        self._world, self._strikes_seen, self._storage_asked = (FirstSeen() for _ in range(3))
        self._proposed, self._asked = FirstSeen(), FirstSeen()
        self._outages = Outages()
        self._noted: Mapping[str, Member] | None = None
        """Registrations from which `_joined` was made, and with which world `_unseen`."""
        self._joined: frozenset[tuple[str, str]] = frozenset()
        self._unseen: tuple[World | None, tuple[str, ...]] = (None, ())
        """A world, and its members without a registration."""
        self._token = (0, "")
        self._my_reports: dict[int, Report] = {}
        self._put_at = (0, 0)
        """History and revision at which the last of them was put."""
        self.bad_steps: set[int] = set()
        """Steps whose checkpoints were found damaged."""
        self._damage: dict[int, str] = {}
        """Messages of workers about the damage, by step."""
        self._last_seen = NOT_ASKED
        """Holds what storage had in the last view, if it was known."""
        self._memory_read_s = 0.0
        self._lost_s = 0.0
        """Time at which the store was last found to have lost its data."""
        self._answers = Answers()
        self._restored = False
        """True if the store holds an earlier state, as far as is known."""
        self._lapses = 0
        """Number of leases that this node had lost at the last observation."""
        self._reports_of_world: tuple[tuple[Mapping[str, Report] | None, str], Any] = (
            (None, ""),
            None,
        )
        """Reports of a generation, its token, and those of them that are about it."""

    def lost_data(self, now_s: float) -> None:
        """Forgets this agent's reports and the oldest node, for the store has lost its data."""
        self._my_reports = {}
        self._subscriptions.lost_data()
        self._lost_s, self._restored = now_s, True

    def restored(self, so: bool) -> None:
        """Notes whether the store holds an earlier state, or nothing of the job at all."""
        self._restored = so

    def begin(self, now_s: float) -> None:
        """Notes that the node is registered: the time to wait for others counts from now."""
        self._began_s = self._last_join_s = now_s

    def reported(self, generation: int, report: Report, revision: int = 0) -> None:
        """Notes that this agent's report of a generation was put.

        Args:
            generation: Number of the generation.
            report: The report, without the token of its world.
            revision: Revision at which it was put; 0: not known.
        """
        self._my_reports = {generation: report}
        self._put_at = (self._store.history.number, revision)

    def _note_lost_report(self, generation: int) -> None:
        """Forgets this agent's report of a generation where the store does not hold it.

        It is then put again: other nodes wait for it, and the store may have lost its data
        unnoticed.
        """
        prefix = reports_of(generation)
        key = f"{prefix}{self._membership.me.node}"
        reports = self._observer.get(prefix) or self._subscriptions.own_report(key)
        if reports is None or (reports.history, reports.revision) < self._put_at:
            return
        entry = reports.entries.get(key)
        if entry is None or (reports.history, entry.mod_revision) != self._put_at:
            self._my_reports = {}

    def _proposed_since(self, proposal: Proposal | None, now_s: float) -> float | None:
        """Returns since when this agent sees a proposal as it is; None: there is none."""
        if proposal is None:
            return None
        key = f"{proposal.token} {proposal.ready} {bool(proposal.withdrawn)}"
        return self._proposed.update((key,), now_s)[key]

    def saved(self, step: int) -> None:
        """Notes that a checkpoint was written: it is no longer damaged, and may be the newest."""
        self.bad_steps.discard(step)
        self._storage_probe.invalidate()

    def view(
        self,
        workers: WorkerGroupState,
        leaving: bool,
        now_s: float,
        policy: JobPolicy,
        *,
        confirms: bool = False,
    ) -> View:
        """Returns all that this agent can see now; requests nothing from the store.

        Args:
            workers: State of this node's workers.
            leaving: Whether this node is to leave.
            now_s: Present time, on the agent's clock.
            policy: Limits and times, without operators' changes.
            confirms: Whether a decision from the last view is about to be confirmed: what storage
                held then counts, until it has said anew what it holds.
        """
        world, _ = self._observer.world()
        observer = self._observer
        me = self._membership.me
        if self._membership.lapses != self._lapses:
            self._lapses = self._membership.lapses
            self._my_reports = {}  # the store was away for long; it may hold less than it did
        index = world.find(me.node, me.incarnation) if world is not None else None
        generation = world.generation if world is not None else 0
        current = workers.generation == generation
        stopped = not workers.running and not workers.sealing
        alarm = observer.alarm(generation)
        if generation in self._my_reports:
            self._note_lost_report(generation)
        at_boundary = workers.at_boundary and workers.switched != "left"
        opened = index is not None and current and (alarm is not None or at_boundary)
        report, proposal = self._my_reports.get(generation), observer.proposal(world)
        asks_to_leave = report is not None and report.leaving and report.phase == "restored"
        told_of = opened or (index is not None and leaving and not self._store.reachable)
        outside = world is not None and index is None
        members = observer.members()
        missing = self._note_members(world, members, now_s)
        round_s = self._round.since(generation, opened, now_s)
        reachable = self._store.reachable  # before its outage's end, which is noted first
        outage_end_s = max(self._store.last_outage_end_s, self._membership.outage_end_s)
        view = View(
            me=me,
            members=members,
            oldest=self._subscriptions.is_oldest(me.node),
            began_s=self._began_s,
            last_join_s=self._last_join_s,
            world=world,
            world_unread=observer.get(WORLD) is None,
            world_s=self._world.since(generation, world is not None, now_s),
            outside_s=self._outside.since(generation, outside, now_s),
            alarm=alarm,
            alarm_s=self._alarm.since(generation, alarm is not None, now_s),
            round_s=round_s,
            reports=self._reports_about(world),
            my_report=report,
            proposal=proposal,
            proposal_s=self._proposed_since(proposal, now_s),
            asked_s=self._asked.since(generation, asks_to_leave, now_s),
            done=observer.done(),
            control=observer.control(),
            remnants=self._restored and now_s - self._lost_s < 2 * policy.lease_ttl_s + 1.0,
            leaving=leaving,
            workers=workers,
            holdings=self._holdings(generation, now_s) if told_of and stopped else (),
            missing_since_s=self._missing.update(missing, now_s),
            struck_s=self._strikes_since(world, now_s),
            store=StoreHealth(
                reachable=reachable,
                outage_end_s=self._outages.update(outage_end_s, round_s, reachable=reachable),
                confirmed_s=self._membership.confirmed_s,
            ),
            can_save=self._storage_probe.possible,
            bad_steps=tuple(sorted(self.bad_steps)),
            token=self._next_token(generation + 1),
        )
        if outside and policy.spares is not None:
            view = replace(view, surplus=self._subscriptions.is_surplus(view, now_s, policy))
        if leads(view) and opened and alarm is not None and world is not None:
            answers = answers_of(view)
            answered_s = self._answers.update(generation, len(answers), now_s)
            view = replace(view, refusing=self._refusing(answers, world), answered_s=answered_s)
        if world is not None and not told_of and is_leader(view):
            well_s = now_s - view.store.outage_end_s if reachable else 0.0
            asked = missing[:MOST_ASKED] if well_s >= policy.lease_ttl_s else ()
            unanswered_since_s = self._unanswered(asked, world, now_s)
            view = replace(view, unanswered_since_s=unanswered_since_s)
        asks = leads(view) and (world is None or opened or outside)
        seen = self._storage(view, confirms=confirms) if asks else self._ask_nothing()
        asked_s = self._storage_asked.since(generation, seen.pending is not None, now_s)
        if asks:
            view = replace(
                view,
                storage_asked_s=asked_s,
                storage_step=seen.step,
                damage=seen.damage,
                storage_pending=seen.pending,
                bad_steps=tuple(sorted(self.bad_steps)),
            )
        return view

    def _refusing(self, answers: Collection[str], world: World) -> frozenset[str]:
        """Returns the members without an answer whose hosts refuse connections to them."""
        silent = [member for member in world.members if member.node not in answers]
        refusing = self._probe.refusing({m.incarnation: m.address for m in silent})
        return frozenset(member.node for member in silent if member.incarnation in refusing)

    def _unanswered(
        self, missing: Collection[str], world: World, now_s: float
    ) -> Mapping[str, float]:
        """Returns which members without a registration answer no request, and since when.

        It is called also where none is to be asked, so that the probe forgets those that there
        were.

        Args:
            missing: Nodes of these members.
            world: The present world.
            now_s: Present time, on the agent's clock.
        """
        members = {m.incarnation: m for m in world.members if m.node in missing}
        since = self._probe.unanswered_since(members, now_s)
        return {members[key].node: since_s for key, since_s in since.items() if key in members}

    def _reports_about(self, world: World | None) -> Mapping[str, Report] | None:
        """Returns the reports of this very world, not of another one of the same number."""
        if world is None:
            return self._observer.reports(0)
        reports = self._observer.reports(world.generation)
        (last, token), _ = self._reports_of_world
        if last is not reports or token != world.token:
            about_world, tokens = reports, ("", world.token)
            if reports is not None and any(r.world not in tokens for r in reports.values()):
                about_world = {n: r for n, r in reports.items() if r.world in tokens}
            self._reports_of_world = ((reports, world.token), about_world)
        result: Mapping[str, Report] | None = self._reports_of_world[1]
        return result

    def _strikes_since(self, world: World | None, now_s: float) -> dict[str, float]:
        """Returns, by node, since when it has as many strikes as it has now."""
        strikes = world.strikes if world is not None else ()
        if not strikes:
            return self._strikes_seen.update((), now_s)
        since = self._strikes_seen.update([f"{s.count} {s.node}" for s in strikes], now_s)
        return {key.partition(" ")[2]: since_s for key, since_s in since.items()}

    def spend_token(self) -> None:
        """Has another token be drawn for the next world: a proposal gets the present one, and a
        world that does not come from it must not have it."""
        self._token = (0, "")

    def _next_token(self, generation: int) -> str:
        """Returns the token that tells a world of this agent from another's of the same number."""
        if self._token[0] != generation:
            self._token = (generation, f"g{generation:06d}-{self._draw_token()}")
        return self._token[1]

    def _note_members(
        self, world: World | None, members: Mapping[str, Member] | None, now_s: float
    ) -> tuple[str, ...]:
        """Notes which nodes have come; returns the members of the world without a registration.

        Args:
            world: The present world; None: there is none.
            members: Registrations by node; None: they are not watched now.
            now_s: Present time, on the agent's clock.
        """
        same = members is self._noted
        if not same:
            registered = frozenset((m.node, m.incarnation) for m in (members or {}).values())
            if registered - self._joined:
                self._last_join_s = now_s
            self._noted, self._joined = members, registered
        if not same or self._unseen[0] is not world:
            missing: tuple[str, ...] = ()
            if world is not None and members is not None:
                missing = tuple(m.node for m in world.members if not _is_registered(m, members))
            self._unseen = (world, missing)
        return self._unseen[1]

    def _holdings(self, generation: int, now_s: float) -> tuple[Holding, ...]:
        """Returns what memory holds.

        Once that was reported it is read less often, for the workers that could add to it are gone,
        and only a replica may still come.
        """
        report = self._my_reports.get(generation)
        stopped = report is not None and report.phase == "stopped"
        if report is not None and stopped and now_s - self._memory_read_s < MEMORY_AGAIN_S:
            return report.holdings
        self._memory_read_s = now_s
        return tuple(
            Holding(
                generation=held.generation,
                step=held.step,
                world_size=held.world_size,
                ranks=tuple(held.ranks),
            )
            for held in self._snapshots.held()
        )

    def _ask_nothing(self) -> CheckpointState:
        self._last_seen = NOT_ASKED
        return CheckpointState()

    def _storage(self, view: View, *, confirms: bool) -> CheckpointState:
        """Returns the newest good checkpoint, and the damage of the newest of all.

        An answer counts for less time than a slow store takes to answer: a decision that rests on
        one would never be confirmed.

        Args:
            view: What this agent sees, with the reports.
            confirms: Whether the last answer counts, where there is no new one.
        """
        failures = [r.failure for r in (view.reports or {}).values() if r.failure is not None]
        bad = {f.bad_step: f.message for f in failures if f.bad_step is not None}
        self.bad_steps |= bad.keys()
        self._damage |= bad
        seen = self._storage_probe.poll({step: self._damage[step] for step in self.bad_steps})
        last, self._last_seen = self._last_seen, seen
        counts = confirms and last.pending is None and last.step not in self.bad_steps
        return last if seen.pending is not None and counts else seen


def _is_registered(member: Member, members: Mapping[str, Member]) -> bool:
    """Returns whether this very registration exists: a new one of the same name is another node."""
    registration = members.get(member.node)
    return registration is not None and registration.incarnation == member.incarnation
