"""What one agent sees: everything it knows, gathered into the frozen `View` that `decide` is given.

It remembers since when things have been so, follows in the store what the agent's present role
wants it to see, and looks at memory and storage no more often than that can matter.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from elasticzero.checkpoint.ram.store import HeldSnapshot
from elasticzero.errors import StoreUnavailable
from elasticzero.launcher.protocol.documents import Holding, Member, Report, World
from elasticzero.launcher.protocol.leader import PROOF_STEPS, is_leader
from elasticzero.launcher.protocol.policy import JobPolicy, with_operator_overrides
from elasticzero.launcher.protocol.view import StoreHealth, View, WorkerGroupState
from elasticzero.launcher.snapshots.checkpoint_probe import CheckpointState
from elasticzero.launcher.store.api import Entry, Store
from elasticzero.launcher.store.membership import Membership
from elasticzero.launcher.store.watch_cache import (
    ALARM,
    CONTROL,
    DONE,
    MEMBERS,
    WORLD,
    FirstSeen,
    WatchCache,
    reports_of,
)

LOOK_AGAIN_S = 1.0
"""The oldest registration is not looked for more often; nor earlier by who came after others."""
LOOK_SPREAD_S = 0.05
"""And so much later by each for every one that came before it."""
LOOK_STAGGER_S = 0.01
"""In a round that the first members do not end, the others look one after another."""
MANY, PATIENCE_A_NODE_S, LOOK_A_NODE_S = 100, 0.005, 0.0002
"""In a world of more nodes than so many they begin so much later for each node beyond, and each
leaves the store so much time for each node: it asks for something of all of them, and of everything
that they still say. If a round of a thousand nodes was slow, all of them looking would make it
endless."""
QUIET_S = 30.0
"""Without a step for so long every member watches them: the first ones may be gone all at once."""
QUIET_STAGGER_S = 0.5
"""Until then one after another begins, a TTL after the last step."""
MEMORY_AGAIN_S = 0.25
REPORT_AGAIN_S = 5.0
LASTING = ("stopped", "finished")
"""Seconds from one look whether the store still has this agent's report to the next, and the phases
in which others wait for it."""
SURPLUS_TTLS = 2.0
"""A node asks whether it is one too many after so many TTLs outside the world: a lost node whose
place it could take is told of by then."""
STANDBY = 3
"""So many first members watch the registrations, to act if those before them are gone."""


def _draw_token() -> str:
    return secrets.token_hex(8)


class Memory(Protocol):
    """This node's snapshots: see `SnapshotStore`."""

    def held(self) -> Sequence[HeldSnapshot]: ...


class Storage(Protocol):
    """The checkpoint directory: see `CheckpointProbe`."""

    @property
    def possible(self) -> bool: ...

    def invalidate(self) -> None: ...

    def poll(self, bad: Mapping[int, str]) -> CheckpointState: ...


class ClusterObserver:
    """Looks at the store, the registration, memory and storage for one agent."""

    def __init__(
        self,
        store: Store,
        observer: WatchCache,
        membership: Membership,
        snapshots: Memory,
        storage_look: Storage,
        draw_token: Callable[[], str] = _draw_token,
    ) -> None:
        self._store = store
        self._observer = observer
        self._membership = membership
        self._snapshots = snapshots
        self._storage_look = storage_look
        self._draw_token = draw_token
        self._began_s = self._last_join_s = 0.0
        self._missing, self._alarm, self._round, self._outside = (FirstSeen() for _ in range(4))
        self._world, self._struck = FirstSeen(), FirstSeen()
        self._noted: Mapping[str, Member] | None = None
        """The registrations that `_joined` was made of, and with which world `_unseen`."""
        self._joined: frozenset[tuple[str, str]] = frozenset()
        self._unseen: tuple[World | None, tuple[str, ...]] = (None, ())
        """A world, and its members without a registration."""
        self._token = (0, "")
        self._my_reports: dict[int, Report] = {}
        self._look_at_report_s: float | None = None
        self._put_at = (0, 0)
        """History and revision at which the last of them was put."""
        self.bad_steps: set[int] = set()
        """Checkpoints found damaged."""
        self._found: dict[int, str] = {}
        """What workers said of them."""
        self._looked_at_memory_s = 0.0
        self._look_for_oldest_s: float | None = None
        """Not before then; None: that is not known yet."""
        self._oldest: Entry | None = None
        """The oldest registration, as far as is known."""
        self._surplus: tuple[tuple[int, int], bool] | None = None
        """How many may be here and this registration's revision, and whether as many came before;
        for these two it stays so."""
        self._look_for_room_s = 0.0
        self._lost_s = 0.0
        """When the store was found to have lost its data, the last time."""
        self._restored = False
        """It holds what it held some time ago, as far as is known."""
        self._lapses = 0
        """Leases that this node had lost when it was last looked."""
        self._answers: tuple[tuple[Mapping[str, Report] | None, str], Any] = ((None, ""), None)
        """The reports of a generation, its token, and those that are about it."""

    def lost_data(self, now_s: float) -> None:
        """The store has lost its data: what this agent said is gone, and who came first is
        unknown."""
        self._my_reports = {}
        self._oldest = self._look_for_oldest_s = self._surplus = None
        self._lost_s, self._restored = now_s, True

    def restored(self, so: bool) -> None:
        """Whether the store holds what it held some time ago, or nothing of the job at all."""
        self._restored = so

    def begin(self, now_s: float) -> None:
        """The node is registered: the time to wait for others counts from now."""
        self._began_s = self._last_join_s = now_s

    def reported(self, generation: int, report: Report, revision: int = 0) -> None:
        """This agent's report of a generation was put, at that revision."""
        self._my_reports = {generation: report}
        self._put_at = (self._store.history, revision)
        self._look_at_report_s = None

    def _forget_lost_report(self, generation: int, now_s: float) -> None:
        """Where this agent's report of a generation is not in the store, which may have lost its
        data unnoticed, it is to be put again: others wait for it."""
        key = f"{reports_of(generation)}{self._membership.me.node}"
        found = self._observer.get(reports_of(generation))
        if self._look_at_report_s is None:
            self._look_at_report_s = now_s + REPORT_AGAIN_S
        if found is None and now_s >= self._look_at_report_s:
            self._look_at_report_s = now_s + REPORT_AGAIN_S
            if self._my_reports[generation].phase in LASTING:
                with suppress(StoreUnavailable):
                    found = self._store.read(key)
        if found is None or (found.history, found.revision) < self._put_at:
            return
        entry = found.entries.get(key)
        if entry is None or (found.history, entry.mod_revision) != self._put_at:
            self._my_reports = {}

    def saved(self, step: int) -> None:
        """A checkpoint was written: it is damaged no more, and may be the newest."""
        self.bad_steps.discard(step)
        self._storage_look.invalidate()

    def view(
        self, workers: WorkerGroupState, leaving: bool, now_s: float, limits: JobPolicy
    ) -> View:
        """All that this agent sees now; also follows what its role wants it to see next."""
        world, _ = self._observer.world()
        observer = self._observer
        me = self._membership.me
        if self._membership.lapses != self._lapses:
            self._lapses = self._membership.lapses
            self._my_reports = {}  # the store was away for long; it may hold less than it did
        index = world.find(me.node, me.incarnation) if world is not None else None
        generation = world.generation if world is not None else 0
        mine = workers.generation == generation
        stopped = not workers.running and not workers.sealing
        alarm = observer.alarm(generation)
        if generation in self._my_reports:
            self._forget_lost_report(generation, now_s)
        opened = index is not None and mine and (alarm is not None or workers.at_boundary)
        told_of = opened or (index is not None and leaving and not self._store.reachable)
        outside = world is not None and index is None
        members = observer.members()
        missing = self._note_members(world, members, now_s)
        view = View(
            me=me,
            members=members,
            oldest=self._is_oldest(me.node),
            began_s=self._began_s,
            last_join_s=self._last_join_s,
            world=world,
            world_s=self._world.since(generation, world is not None, now_s),
            outside_s=self._outside.since(generation, outside, now_s),
            alarm=alarm,
            alarm_s=self._alarm.since(generation, alarm is not None, now_s),
            round_s=self._round.since(generation, opened, now_s),
            reports=self._reports_about(world),
            my_report=self._my_reports.get(generation),
            done=observer.done(),
            control=observer.control(),
            remnants=self._restored and now_s - self._lost_s < 2 * limits.lease_ttl_s + 1.0,
            leaving=leaving,
            workers=workers,
            holdings=self._holdings(generation, now_s) if told_of and stopped else (),
            missing_since_s=self._missing.update(missing, now_s),
            struck_s=self._struck_since(world, now_s),
            store=StoreHealth(
                reachable=self._store.reachable,
                well_since_s=max(self._store.last_outage_end_s, self._membership.well_since_s),
                confirmed_s=self._membership.confirmed_s,
            ),
            can_save=self._storage_look.possible,
            bad_steps=tuple(sorted(self.bad_steps)),
            token=self._next_token(generation + 1),
        )
        if outside and limits.spares is not None:
            view = replace(view, surplus=self._is_surplus(view, now_s, limits))
        leads = is_leader(view) or (outside and view.oldest)
        if leads and (world is None or opened or outside):
            seen = self._storage(view)
            view = replace(
                view,
                storage_step=seen.step,
                damage=seen.damage,
                storage_pending=seen.pending,
                bad_steps=tuple(sorted(self.bad_steps)),
            )
        self._follow(view, index, leads, now_s, limits)
        return view

    def _reports_about(self, world: World | None) -> Mapping[str, Report] | None:
        """The reports of this very world, not of another one of the same number."""
        if world is None:
            return self._observer.reports(0)
        found = self._observer.reports(world.generation)
        if self._answers[0][0] is not found or self._answers[0][1] != world.token:
            told = found
            if found is not None and any(r.world not in ("", world.token) for r in found.values()):
                told = {n: r for n, r in found.items() if r.world in ("", world.token)}
            self._answers = ((found, world.token), told)
        result: Mapping[str, Report] | None = self._answers[1]
        return result

    def _struck_since(self, world: World | None, now_s: float) -> dict[str, float]:
        """By node: since when it has as many strikes as it has now."""
        strikes = world.strikes if world is not None else ()
        if not strikes:
            return self._struck.update((), now_s)
        since = self._struck.update([f"{s.count} {s.node}" for s in strikes], now_s)
        return {key.partition(" ")[2]: since_s for key, since_s in since.items()}

    def _next_token(self, generation: int) -> str:
        """What a world of this agent would be told apart by from another's of the same number."""
        if self._token[0] != generation:
            self._token = (generation, f"g{generation:06d}-{self._draw_token()}")
        return self._token[1]

    def _note_members(
        self, world: World | None, members: Mapping[str, Member] | None, now_s: float
    ) -> tuple[str, ...]:
        """Notes who has come; the members of the world without a registration."""
        same = members is self._noted
        if not same:
            known = frozenset((m.node, m.incarnation) for m in (members or {}).values())
            if known - self._joined:
                self._last_join_s = now_s
            self._noted, self._joined = members, known
        if not same or self._unseen[0] is not world:
            missing: tuple[str, ...] = ()
            if world is not None and members is not None:
                missing = tuple(m.node for m in world.members if not _is_registered(m, members))
            self._unseen = (world, missing)
        return self._unseen[1]

    def _follow(
        self, view: View, index: int | None, leads: bool, now_s: float, limits: JobPolicy
    ) -> None:
        """Watch what this agent's role needs, and no more: a thousand agents share one store."""
        prefixes = {WORLD, CONTROL, DONE, ALARM}
        world = view.world
        if world is None:
            prefixes.add(self._look_for_oldest(view.me.node, now_s))
        else:
            in_round_s = now_s - view.round_s if view.round_s is not None else -1.0
            stands_by = index is not None and index < STANDBY
            wait_s = 0.0 if view.control.stop else 4 * limits.alive_s
            late = index is not None and in_round_s > wait_s + _stagger_s(world, index)
            if index is None and not view.leaving:
                prefixes.add(self._look_for_oldest(view.me.node, now_s))
            if stands_by or late or (index is not None and _is_quiet(view, index, now_s, limits)):
                prefixes.add(MEMBERS)
            leaver = (view.leaving or view.surplus) and (index is None or in_round_s >= 0)
            if leads or index == 0 or leaver or late or (stands_by and in_round_s >= 0):
                prefixes.add(reports_of(world.generation))
        self._observer.follow(prefixes)

    def _look_for_oldest(self, node: str, now_s: float) -> str:
        """The prefix that shows when another registration becomes the oldest.

        To find it the store goes through all registrations, for every agent that asks: none asks
        before the oldest that it knows is gone. Most come to a world without asking: who came
        first looks at once, the others after a while, one after another.
        """
        if not self._oldest_is_gone(node):
            return self._prefix_of_oldest(node)
        if self._look_for_oldest_s is None:
            before = self._came_before_me()
            wait_s = LOOK_AGAIN_S + LOOK_SPREAD_S * before if before else 0.0
            self._look_for_oldest_s = now_s + wait_s
        if now_s >= self._look_for_oldest_s:
            self._look_for_oldest_s = now_s + LOOK_AGAIN_S
            with suppress(StoreUnavailable):
                entries = self._store.read(MEMBERS, limit=1).entries
                self._oldest = next(iter(entries.values()), None)
        return self._prefix_of_oldest(node)

    def _is_surplus(self, view: View, now_s: float, limits: JobPolicy) -> bool:
        """Whether MAX nodes and all spares that may wait are here, of those who came before.

        The store is asked once for each MAX, when a node lost before this one came is gone.
        """
        limits = with_operator_overrides(limits, view.control)
        room = limits.max_nodes + (limits.spares or 0)
        since_s = max(view.outside_s or now_s, view.store.well_since_s)
        if now_s - since_s < SURPLUS_TTLS * limits.lease_ttl_s:
            return False
        case = (room, self._membership.revision)
        known = self._surplus is not None and self._surplus[0] == case
        if not known and now_s >= self._look_for_room_s:
            self._look_for_room_s = now_s + LOOK_AGAIN_S
            useless = {drain.node for drain in view.control.drain}  # they take nobody's place
            useless |= {s.node for s in (view.world.strikes if view.world is not None else ())}
            with suppress(StoreUnavailable):
                first = self._store.read(MEMBERS, limit=room + len(useless)).entries
                before = [key.removeprefix(MEMBERS) for key in first]
                ahead = sum(node not in useless for node in before)
                self._surplus = (case, view.me.node not in before and ahead >= room)
        return self._surplus == (case, True)

    def _came_before_me(self) -> int:
        """How many were registered when this node did, as far as the store knows."""
        try:
            return self._store.count(MEMBERS, self._membership.revision) - 1
        except StoreUnavailable:
            return 0

    def _is_oldest(self, node: str) -> bool:
        return self._oldest is not None and self._oldest.key == f"{MEMBERS}{node}"

    def _prefix_of_oldest(self, node: str) -> str:
        """Its own key; all registrations where it is this node's, for that node leads."""
        if self._oldest is None:
            return WORLD
        return MEMBERS if self._is_oldest(node) else self._oldest.key

    def _oldest_is_gone(self, node: str) -> bool:
        if self._oldest is None:
            return True
        snapshot = self._observer.get(self._prefix_of_oldest(node))
        if snapshot is None:
            return False
        found = snapshot.entries.get(self._oldest.key)
        return found is None or found.create_revision != self._oldest.create_revision

    def _holdings(self, generation: int, now_s: float) -> tuple[Holding, ...]:
        """What memory holds; once it was told, looked at now and then, for the workers that could
        add to it are gone, and only a replica may still come."""
        said = self._my_reports.get(generation)
        told = said is not None and said.phase == "stopped"
        if said is not None and told and now_s - self._looked_at_memory_s < MEMORY_AGAIN_S:
            return said.holdings
        self._looked_at_memory_s = now_s
        return tuple(
            Holding(
                generation=held.generation,
                step=held.step,
                world_size=held.world_size,
                ranks=tuple(held.ranks),
            )
            for held in self._snapshots.held()
        )

    def _storage(self, view: View) -> CheckpointState:
        """The newest good checkpoint, and what is wrong with the newest of all."""
        failures = [r.failure for r in (view.reports or {}).values() if r.failure is not None]
        bad = {f.bad_step: f.message for f in failures if f.bad_step is not None}
        self.bad_steps |= bad.keys()
        self._found |= bad
        return self._storage_look.poll({step: self._found[step] for step in self.bad_steps})


def _stagger_s(world: World, index: int) -> float:
    """How much later than the first of all this member looks at the others."""
    nodes = len(world.members)
    delay_s = PATIENCE_A_NODE_S * max(0, nodes - MANY)
    return delay_s + max(LOOK_STAGGER_S, LOOK_A_NODE_S * nodes * (nodes > MANY)) * index


def _is_quiet(view: View, index: int, now_s: float, limits: JobPolicy) -> bool:
    """Whether the workers of a world that is known for long have made no step for so long that the
    member at `index` looks at the others too."""
    workers = view.workers
    known_s = view.world_s if view.world_s is not None else now_s
    turn_s = max(limits.lease_ttl_s, PROOF_STEPS * workers.longest_step_s)
    turn_s += QUIET_STAGGER_S * index
    return now_s - max(workers.stepped_s, known_s) > min(QUIET_S, turn_s)


def _is_registered(member: Member, members: Mapping[str, Member]) -> bool:
    """Whether this very registration stands: a new one of the same name is another node."""
    found = members.get(member.node)
    return found is not None and found.incarnation == member.incarnation
