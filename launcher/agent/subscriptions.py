"""Chooses what one agent watches in the store, and reads what cannot be watched.

A thousand agents share one store, so each watches what its present role needs, and no more.
"""

from __future__ import annotations

from contextlib import suppress
from math import inf

from elasticzero.errors import StoreUnavailable
from elasticzero.launcher.protocol.documents import Member, Report, World
from elasticzero.launcher.protocol.leader import PROOF_STEPS, is_leader
from elasticzero.launcher.protocol.planned.proposal import possible
from elasticzero.launcher.protocol.policy import JobPolicy, with_operator_overrides
from elasticzero.launcher.protocol.view import View
from elasticzero.launcher.store.api import Entry, PrefixState, Store
from elasticzero.launcher.store.decoding import is_member
from elasticzero.launcher.store.membership import Membership
from elasticzero.launcher.store.watch_cache import (
    ALARM,
    CONTROL,
    DONE,
    MEMBERS,
    NEXT,
    WORLD,
    WatchCache,
    reports_of,
)

SEARCH_AGAIN_S = 1.0
"""Minimum seconds between two searches for the oldest registration, and before the first search of
a node that came after others."""
SEARCH_SPREAD_S = 0.05
"""Seconds by which each node searches later for every node that came before it."""
WATCH_STAGGER_S = 0.01
"""Seconds between the searches of two members, in a round that the first members do not end."""
MANY, WATCH_DELAY_A_NODE_S, WATCH_STAGGER_A_NODE_S = 100, 0.005, 0.0002
"""In a world of more nodes than MANY, searches begin later for each node beyond, and each leaves
the store so much time for each node. A search makes the store send something of all nodes, and
everything that they report then. If a round of a thousand nodes was slow, searches by all of them
would make it endless. Nor do the first members but the leader follow the reports of so many, before
they lead."""
QUIET_S = 30.0
"""Maximum seconds without a step after which the first of the other members watches the member
before it: the first members may all be gone. It is less where steps take less: a TTL, or twice the
longest step."""
QUIET_STAGGER_S, QUIET_SPREAD_S = 0.5, 10.0
"""Seconds by which one member begins after another, and within which all have begun."""
REPORT_AGAIN_S = 5.0
LASTING = ("stopped", "finished")
"""Phases in which others wait for this agent's report; it is read every REPORT_AGAIN_S then, in
case the store has lost it."""
SURPLUS_TTLS = 2.0
"""Number of TTLs outside the world after which a node checks whether it is one too many; the loss
of a node whose place it could take is known by then."""
STANDBY = 3
"""Number of first members that watch the registrations, to act if those before them are gone."""


class Subscriptions:
    """Follows in the store what one agent's role needs."""

    def __init__(self, store: Store, observer: WatchCache, membership: Membership) -> None:
        """Creates subscriptions to nothing.

        Args:
            store: The job's part of etcd.
            observer: Follows prefixes of the store for this agent.
            membership: The node's registration.
        """
        self._store = store
        self._observer = observer
        self._membership = membership
        self._find_oldest_after_s: float | None = None
        """Time before which the oldest registration is not searched for; None: not known yet."""
        self._oldest: Entry | None = None
        """Oldest registration, as far as is known."""
        self._surplus: tuple[tuple[int, int], bool] | None = None
        """Number of nodes that may be here, this registration's revision, and whether as many came
        before; the answer stays true for these two."""
        self._find_room_after_s = 0.0
        self._last_put_report: Report | None = None
        """This agent's report, as it was put last."""
        self._read_report_after_s = 0.0
        """Time before which that report is not read."""
        self._has_read = False
        """True if the last update has read something, which the next view shows."""
        self._own_report: tuple[str, PrefixState] | None = None
        """Key of this agent's report, and what was last read there."""

    def lost_data(self) -> None:
        """Forgets which node came first, for the store has lost its data."""
        self._oldest = self._find_oldest_after_s = self._surplus = None

    def update(self, view: View, now_s: float, policy: JobPolicy) -> None:
        """Follows what `view` shows to be needed next, and reads what is due.

        Args:
            view: What this agent sees.
            now_s: Present time, on the clock of the view's times.
            policy: Limits and times, without operators' changes.
        """
        self._has_read = False
        if view.outside_s is not None and policy.spares is not None:
            self._find_room(view, now_s, policy)
        self._read_own_report(view, now_s)
        self._follow(view, now_s, policy)

    def due_s(self, view: View, now_s: float, policy: JobPolicy) -> float:
        """Returns the time at which `update` has something to do again for a view that does not
        change; infinite: it has not.

        Args:
            view: What this agent sees.
            now_s: Present time, on the clock of the view's times.
            policy: Limits and times, without operators' changes.
        """
        times_s = [now_s if self._has_read else self._own_report_due_s(view)]
        world = view.world
        index = world.find(view.me.node, view.me.incarnation) if world is not None else None
        if index is None:
            if self._oldest_is_gone(view.me.node):
                times_s.append(self._find_oldest_after_s or now_s)
            if view.outside_s is not None and policy.spares is not None:
                times_s.append(self._room_due_s(view, now_s, policy))
        elif world is not None and index >= STANDBY:
            begins_s = _late_s(view, world, index, policy), _quiet_s(view, index, now_s, policy)
            times_s += [at_s for at_s in begins_s if at_s >= now_s]
        return min(times_s)

    def is_oldest(self, node: str) -> bool:
        """Returns whether the registration of `node` is the oldest, as far as is known."""
        return self._oldest is not None and self._oldest.key == f"{MEMBERS}{node}"

    def is_surplus(self, view: View, now_s: float, policy: JobPolicy) -> bool:
        """Returns whether MAX nodes and all spares that may wait came before this node, and are
        here.

        Args:
            view: What this agent sees.
            now_s: Present time, on the clock of the view's times.
            policy: Limits and times, without operators' changes.
        """
        room = _room(view, policy)
        case = (room, self._membership.revision)
        waited = now_s >= _has_waited_s(view, now_s, policy)
        return waited and self._surplus == (case, True)

    def own_report(self, key: str) -> PrefixState | None:
        """Returns what was last read at `key`, the key of this agent's report; None: nothing was
        read."""
        if self._own_report is None or self._own_report[0] != key:
            return None
        return self._own_report[1]

    def _read_own_report(self, view: View, now_s: float) -> None:
        """Reads this agent's report now and then, if others wait for it and it is not watched."""
        report = view.my_report
        if report is None or view.world is None or report is not self._last_put_report:
            self._last_put_report, self._own_report = report, None
            self._read_report_after_s = now_s + REPORT_AGAIN_S
            return
        prefix = reports_of(view.world.generation)
        if self._observer.get(prefix) is not None or now_s < self._read_report_after_s:
            return
        self._read_report_after_s = now_s + REPORT_AGAIN_S
        if report.phase in LASTING:
            key = f"{prefix}{view.me.node}"
            with suppress(StoreUnavailable):
                self._own_report = (key, self._store.read(key))
                self._has_read = True

    def _own_report_due_s(self, view: View) -> float:
        """Returns the time at which this agent's report is read next; infinite: it is not."""
        report, world = view.my_report, view.world
        if report is None or world is None or report.phase not in LASTING:
            return inf
        watched = self._observer.get(reports_of(world.generation)) is not None
        return inf if watched else self._read_report_after_s

    def _follow(self, view: View, now_s: float, policy: JobPolicy) -> None:
        """Watches what this agent's role needs, and no more: a thousand agents share one store.

        Args:
            view: What this agent sees.
            now_s: Present time, on the clock of the view's times.
            policy: Limits and times, of which the TTL of a lease and `alive_s` count.
        """
        prefixes = {WORLD, CONTROL, DONE, ALARM}
        world = view.world
        if world is None:
            prefixes.add(self._find_oldest(view.me.node, now_s))
        else:
            if possible(world, policy):
                prefixes.add(NEXT)
            index = world.find(view.me.node, view.me.incarnation)
            in_round_s = now_s - view.round_s if view.round_s is not None else -1.0
            stands_by = index is not None and index < STANDBY
            late = index is not None and now_s > _late_s(view, world, index, policy)
            if index is None and not view.leaving:
                prefixes.add(self._find_oldest(view.me.node, now_s))
            alone = False
            if index is not None and not stands_by and now_s > _quiet_s(view, index, now_s, policy):
                before = world.members[index - 1]
                prefixes.add(f"{MEMBERS}{before.node}")
                alone = self._is_gone(before)
            if stands_by or late or alone:
                prefixes.add(MEMBERS)
            leaver = (view.leaving or view.surplus) and (index is None or in_round_s >= 0)
            ready = stands_by and in_round_s >= 0 and len(world.members) <= MANY
            if leads(view) or index == 0 or leaver or late or ready:
                prefixes.add(reports_of(world.generation))
        self._observer.follow(prefixes)

    def _is_gone(self, member: Member) -> bool:
        """Returns whether a member whose key is followed is no longer registered."""
        key = f"{MEMBERS}{member.node}"
        if self._observer.get(key) is None:
            return False
        registered = self._observer.member(key)
        return registered is None or registered.incarnation != member.incarnation

    def _find_oldest(self, node: str, now_s: float) -> str:
        """Returns the prefix that shows when another registration becomes the oldest.

        To find it the store goes through all registrations, for every agent that requests it: no
        agent does so before the oldest one that it has seen is gone. Most come to a world without a
        search: the first node searches at once, the others after a while, one after another.
        """
        if not self._oldest_is_gone(node):
            return self._prefix_of_oldest(node)
        if self._find_oldest_after_s is None:
            before = self._count_earlier_nodes()
            wait_s = SEARCH_AGAIN_S + SEARCH_SPREAD_S * before if before else 0.0
            self._find_oldest_after_s = now_s + wait_s
        if now_s >= self._find_oldest_after_s:
            self._find_oldest_after_s = now_s + SEARCH_AGAIN_S
            with suppress(StoreUnavailable):
                self._oldest = next(iter(self._read_oldest(1)), None)
                self._has_read = True
        return self._prefix_of_oldest(node)

    def _read_oldest(self, count: int) -> list[Entry]:
        """Returns the oldest registrations, at most so many.

        What stands among them and is none has no agent, and perhaps no lease: no node waits for it.
        """
        limit = count
        while True:
            entries = list(self._store.read(MEMBERS, limit=limit).entries.values())
            nodes = [entry for entry in entries if is_member(entry)][:count]
            if len(nodes) == count or len(entries) < limit:
                return nodes
            limit = 2 * limit + 1

    def _find_room(self, view: View, now_s: float, policy: JobPolicy) -> None:
        """Reads which nodes came first, to find whether this node is one too many.

        The store is asked once for each MAX, when a node lost before this one came is gone.

        Args:
            view: What this agent sees.
            now_s: Present time, on the clock of the view's times.
            policy: Limits and times, without operators' changes.
        """
        if now_s < _has_waited_s(view, now_s, policy):
            return
        room = _room(view, policy)
        case = (room, self._membership.revision)
        counted = self._surplus is not None and self._surplus[0] == case
        if not counted and now_s >= self._find_room_after_s:
            self._find_room_after_s = now_s + SEARCH_AGAIN_S
            useless = {drain.node for drain in view.control.drain}  # they take nobody's place
            useless |= {s.node for s in (view.world.strikes if view.world is not None else ())}
            with suppress(StoreUnavailable):
                first = self._read_oldest(room + len(useless))
                before = [entry.key.removeprefix(MEMBERS) for entry in first]
                ahead = sum(node not in useless for node in before)
                self._surplus = (case, view.me.node not in before and ahead >= room)
                self._has_read = True

    def _room_due_s(self, view: View, now_s: float, policy: JobPolicy) -> float:
        """Returns the time at which it may be found that this node is one too many; infinite: it is
        not.

        Args:
            view: What this agent sees.
            now_s: Present time, on the clock of the view's times.
            policy: Limits and times, without operators' changes.
        """
        if self._surplus == ((_room(view, policy), self._membership.revision), False):
            return inf
        return max(self._find_room_after_s, _has_waited_s(view, now_s, policy))

    def _count_earlier_nodes(self) -> int:
        """Returns how many nodes were registered when this one was, as far as the store can
        tell."""
        try:
            return self._store.count(MEMBERS, self._membership.revision) - 1
        except StoreUnavailable:
            return 0

    def _prefix_of_oldest(self, node: str) -> str:
        """Returns the oldest node's key; where that is this node, all registrations, for it
        leads."""
        if self._oldest is None:
            return WORLD
        return MEMBERS if self.is_oldest(node) else self._oldest.key

    def _oldest_is_gone(self, node: str) -> bool:
        if self._oldest is None:
            return True
        snapshot = self._observer.get(self._prefix_of_oldest(node))
        if snapshot is None:
            return False
        registration = snapshot.entries.get(self._oldest.key)
        if registration is None or registration.create_revision != self._oldest.create_revision:
            return True
        return registration is not self._oldest and not is_member(registration)


def leads(view: View) -> bool:
    """Returns whether this agent may have to write the next world."""
    outside = view.outside_s is not None
    return is_leader(view) or (outside and view.oldest)


def _room(view: View, policy: JobPolicy) -> int:
    """Returns how many nodes may be here: those of a full world, and the spares."""
    policy = with_operator_overrides(policy, view.control)
    return policy.max_nodes + (policy.spares or 0)


def _has_waited_s(view: View, now_s: float, policy: JobPolicy) -> float:
    """Returns the time from which on this node has been outside the world for so long that the loss
    of a member is known.

    Args:
        view: What this agent sees.
        now_s: Present time, on the clock of the view's times.
        policy: Limits and times, of which the TTL of a lease counts.
    """
    since_s = max(view.outside_s or now_s, view.store.outage_end_s)
    return since_s + SURPLUS_TTLS * policy.lease_ttl_s


def _late_s(view: View, world: World, index: int, policy: JobPolicy) -> float:
    """Returns the time after which the member at `index` watches all others in a round that the
    first members do not end; infinite: no round is open.

    Args:
        view: What this agent sees.
        world: World of the view.
        index: Index of this node in the world's order; later members begin later.
        policy: Limits and times, of which `alive_s` counts.
    """
    if view.round_s is None:
        return inf
    wait_s = 0.0 if view.control.stop else 4 * policy.alive_s
    return view.round_s + wait_s + _stagger_s(world, index)


def _stagger_s(world: World, index: int) -> float:
    """Returns the seconds by which this member begins to watch the others later than the first
    member."""
    nodes = len(world.members)
    delay_s = WATCH_DELAY_A_NODE_S * max(0, nodes - MANY)
    return delay_s + max(WATCH_STAGGER_S, WATCH_STAGGER_A_NODE_S * nodes * (nodes > MANY)) * index


def _quiet_s(view: View, index: int, now_s: float, policy: JobPolicy) -> float:
    """Returns the time after which the member at `index` watches the one before it, for the workers
    of its world have made no step for long.

    If that one is gone, it watches them all. So the first member that is left always does, and
    beside it hardly any other: not a thousand of them, each of which would read a thousand
    registrations whenever the job evaluates for long.

    Args:
        view: What this agent sees.
        index: Index of this node in the world's order; later members begin later.
        now_s: Present time, on the clock of the view's times.
        policy: Limits and times, of which the TTL of a lease counts.
    """
    workers = view.workers
    known_s = view.world_s if view.world_s is not None else now_s
    first_s = min(QUIET_S, max(policy.lease_ttl_s, PROOF_STEPS * workers.longest_step_s))
    nodes = len(view.world.members) if view.world is not None else 1
    stagger_s = min(QUIET_STAGGER_S, QUIET_SPREAD_S / nodes) * index
    return max(workers.stepped_s, known_s) + first_s + stagger_s
