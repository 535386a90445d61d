"""Chooses what one agent watches in the store, and reads what cannot be watched.

A thousand agents share one store, so each watches what its present role needs, and no more.
"""

from __future__ import annotations

from contextlib import suppress

from elasticzero.errors import StoreUnavailable
from elasticzero.launcher.protocol.documents import Report, World
from elasticzero.launcher.protocol.leader import PROOF_STEPS, is_leader
from elasticzero.launcher.protocol.policy import JobPolicy, with_operator_overrides
from elasticzero.launcher.protocol.view import View
from elasticzero.launcher.store.api import Entry, PrefixState, Store
from elasticzero.launcher.store.membership import Membership
from elasticzero.launcher.store.watch_cache import (
    ALARM,
    CONTROL,
    DONE,
    MEMBERS,
    WORLD,
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
REPORT_AGAIN_S = 5.0
LASTING = ("stopped", "finished")
"""Seconds from one look whether the store still has this agent's report to the next, and the phases
in which others wait for it."""
SURPLUS_TTLS = 2.0
"""A node asks whether it is one too many after so many TTLs outside the world: a lost node whose
place it could take is told of by then."""
STANDBY = 3
"""So many first members watch the registrations, to act if those before them are gone."""


class Subscriptions:
    """Follows in the store what one agent's role needs."""

    def __init__(self, store: Store, observer: WatchCache, membership: Membership) -> None:
        self._store = store
        self._observer = observer
        self._membership = membership
        self._look_for_oldest_s: float | None = None
        """Not before then; None: that is not known yet."""
        self._oldest: Entry | None = None
        """The oldest registration, as far as is known."""
        self._surplus: tuple[tuple[int, int], bool] | None = None
        """How many may be here and this registration's revision, and whether as many came before;
        for these two it stays so."""
        self._look_for_room_s = 0.0
        self._awaited: Report | None = None
        """This agent's report, as it was put last."""
        self._look_at_report_s = 0.0
        """It is not read before then."""
        self._own_report: tuple[str, PrefixState] | None = None
        """The key of this agent's report, and what was read there last."""

    def lost_data(self) -> None:
        """The store has lost its data: which node came first is unknown."""
        self._oldest = self._look_for_oldest_s = self._surplus = None

    def update(self, view: View, now_s: float, policy: JobPolicy) -> None:
        """Follows what `view` shows to be needed next, and reads what is due."""
        if view.outside_s is not None and policy.spares is not None:
            self._look_for_room(view, now_s, policy)
        self._read_own_report(view, now_s)
        self._follow(view, now_s, policy)

    def is_oldest(self, node: str) -> bool:
        """Whether the registration of `node` is the oldest, as far as is known."""
        return self._oldest is not None and self._oldest.key == f"{MEMBERS}{node}"

    def is_surplus(self, view: View, now_s: float, policy: JobPolicy) -> bool:
        """Whether MAX nodes and all spares that may wait are here, of those who came before."""
        room = _room(view, policy)
        case = (room, self._membership.revision)
        return _has_waited(view, now_s, policy) and self._surplus == (case, True)

    def own_report(self, key: str) -> PrefixState | None:
        """What was read at `key`, that of this agent's report, the last time; None: nothing was."""
        if self._own_report is None or self._own_report[0] != key:
            return None
        return self._own_report[1]

    def _read_own_report(self, view: View, now_s: float) -> None:
        """Reads this agent's report now and then, if others wait for it and it is not watched."""
        report = view.my_report
        if report is None or view.world is None or report is not self._awaited:
            self._awaited, self._own_report = report, None
            self._look_at_report_s = now_s + REPORT_AGAIN_S
            return
        prefix = reports_of(view.world.generation)
        if self._observer.get(prefix) is not None or now_s < self._look_at_report_s:
            return
        self._look_at_report_s = now_s + REPORT_AGAIN_S
        if report.phase in LASTING:
            key = f"{prefix}{view.me.node}"
            with suppress(StoreUnavailable):
                self._own_report = (key, self._store.read(key))

    def _follow(self, view: View, now_s: float, policy: JobPolicy) -> None:
        """Watch what this agent's role needs, and no more: a thousand agents share one store."""
        prefixes = {WORLD, CONTROL, DONE, ALARM}
        world = view.world
        if world is None:
            prefixes.add(self._look_for_oldest(view.me.node, now_s))
        else:
            index = world.find(view.me.node, view.me.incarnation)
            in_round_s = now_s - view.round_s if view.round_s is not None else -1.0
            stands_by = index is not None and index < STANDBY
            wait_s = 0.0 if view.control.stop else 4 * policy.alive_s
            late = index is not None and in_round_s > wait_s + _stagger_s(world, index)
            if index is None and not view.leaving:
                prefixes.add(self._look_for_oldest(view.me.node, now_s))
            if stands_by or late or (index is not None and _is_quiet(view, index, now_s, policy)):
                prefixes.add(MEMBERS)
            leaver = (view.leaving or view.surplus) and (index is None or in_round_s >= 0)
            if leads(view) or index == 0 or leaver or late or (stands_by and in_round_s >= 0):
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

    def _look_for_room(self, view: View, now_s: float, policy: JobPolicy) -> None:
        """Reads who came first, to find whether this node is one too many.

        The store is asked once for each MAX, when a node lost before this one came is gone.
        """
        if not _has_waited(view, now_s, policy):
            return
        room = _room(view, policy)
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

    def _came_before_me(self) -> int:
        """How many were registered when this node did, as far as the store knows."""
        try:
            return self._store.count(MEMBERS, self._membership.revision) - 1
        except StoreUnavailable:
            return 0

    def _prefix_of_oldest(self, node: str) -> str:
        """Its own key; all registrations where it is this node's, for that node leads."""
        if self._oldest is None:
            return WORLD
        return MEMBERS if self.is_oldest(node) else self._oldest.key

    def _oldest_is_gone(self, node: str) -> bool:
        if self._oldest is None:
            return True
        snapshot = self._observer.get(self._prefix_of_oldest(node))
        if snapshot is None:
            return False
        found = snapshot.entries.get(self._oldest.key)
        return found is None or found.create_revision != self._oldest.create_revision


def leads(view: View) -> bool:
    """Whether this agent may have to write the next world."""
    outside = view.outside_s is not None
    return is_leader(view) or (outside and view.oldest)


def _room(view: View, policy: JobPolicy) -> int:
    """How many nodes may be here: those of a full world, and the spares."""
    policy = with_operator_overrides(policy, view.control)
    return policy.max_nodes + (policy.spares or 0)


def _has_waited(view: View, now_s: float, policy: JobPolicy) -> bool:
    """Whether this node has been outside the world for so long that a lost one is told of."""
    since_s = max(view.outside_s or now_s, view.store.well_since_s)
    return now_s - since_s >= SURPLUS_TTLS * policy.lease_ttl_s


def _stagger_s(world: World, index: int) -> float:
    """How much later than the first of all this member looks at the others."""
    nodes = len(world.members)
    delay_s = PATIENCE_A_NODE_S * max(0, nodes - MANY)
    return delay_s + max(LOOK_STAGGER_S, LOOK_A_NODE_S * nodes * (nodes > MANY)) * index


def _is_quiet(view: View, index: int, now_s: float, policy: JobPolicy) -> bool:
    """Whether the workers of a world that is known for long have made no step for so long that the
    member at `index` looks at the others too."""
    workers = view.workers
    known_s = view.world_s if view.world_s is not None else now_s
    turn_s = max(policy.lease_ttl_s, PROOF_STEPS * workers.longest_step_s)
    turn_s += QUIET_STAGGER_S * index
    return now_s - max(workers.stepped_s, known_s) > min(QUIET_S, turn_s)
