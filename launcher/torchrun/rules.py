"""Decides what one node of a torchrun rendezvous does next.

Pure. torchrun stops and starts its workers itself, and requests a place when it wants them to
train. So there are no alarms and no reports here, only `members/`, `world` and `done`. A node
requests a place by registering as a new incarnation, which tells the others that it has left its
old place.

Rules of a node that requests a place; the first that applies counts:
 T1  etcd has never answered: wait for it, for `connect_timeout_s`.
 T2  The rendezvous is closed: refused. A newcomer first gives the nodes of a closed one a TTL and a
     second to be gone; then it opens the rendezvous again, as a new run.
 T3  The request is not registered yet: register.
 T4  `world` names this registration: take the place.
 T5  `world` is full and all of its members are registered: wait as a spare, without a limit.
 T6  The request is older than `join_timeout_s`: refused.
 T7  A member of `world` is still registered in its place: wait for it to leave. It does, for it
     sees the nodes that wait.
 T8  A member is missing and may be well, because etcd was not: wait until that is known.
 T9  Fewer than MIN nodes request a place: wait.
 T10 There is room for more, and a node came a moment ago: wait for others. A moment is
     `last_call_timeout_s` when all are new, and `GROW_SETTLE_S` when new ones join old ones.
 T11 This node will be the first of the next world: write it.
A node that has a place (`lost`, `newcomers`) requests a new one when a member of its world has left
or is gone, when a node waits for which there is room, or when the rendezvous failed elsewhere.
Invariant: a world names only registrations that requested a place and have none yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from elasticzero.ipc.assignment import Resume
from elasticzero.launcher.protocol.documents import Done, Member, World
from elasticzero.launcher.protocol.leader import leases_are_conclusive
from elasticzero.launcher.protocol.placement import order_members
from elasticzero.launcher.protocol.view import StoreHealth
from elasticzero.text import count_text, list_text

GROW_SETTLE_S = 0.5
STRATEGY = "torchrun"
"""Strategy in `world`: the state is the script's own affair."""
NAMES_SHOWN = 4

Refusal = Literal["closed", "over", "timeout", "connection", "state"]
"""Reasons: closed; over, and never needed; no place in time; no etcd; invalid documents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundLimits:
    """Holds the values of `--nnodes` and `--rdzv-conf`; times in seconds."""

    min_nodes: int
    max_nodes: int
    join_timeout_s: float = 600.0
    """Seconds after which a node without a place gives up, unless it is a spare."""
    last_call_timeout_s: float = 30.0
    """Seconds that a first world below MAX waits after the last node that came."""
    close_timeout_s: float = 30.0
    """Maximum seconds for which the node tries to write that the rendezvous is closed."""
    connect_timeout_s: float = 60.0
    """Maximum seconds to wait for a first answer of etcd."""
    lease_ttl_s: float = 5.0
    """Seconds without a sign of a node after which it is gone."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise ValueError(f"nodes {self.min_nodes}:{self.max_nodes}: not MIN:MAX, MIN from 1")
        if self.lease_ttl_s < 2:
            raise ValueError(f"lease_ttl={self.lease_ttl_s:g}: etcd grants no lease below 2 s")
        times = ("join_timeout_s", "last_call_timeout_s", "close_timeout_s", "connect_timeout_s")
        for name in times:
            if getattr(self, name) < 0:
                raise ValueError(f"{name.removesuffix('_s')}={getattr(self, name):g}: below 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundView:
    """Holds all that one node can see; it is never changed in place."""

    me: Member
    etcd: str
    """Endpoints of etcd, for messages."""
    members: Mapping[str, Member] | None = None
    """Registrations, oldest first; None: etcd has not answered yet."""
    world: World | None = None
    done: Done | None = None
    requested_s: float | None = None
    """Time since which this node requests a place; None: it does not."""
    registered: bool = False
    """True if `me` was registered since the request."""
    newcomer: bool = True
    """True if the node was never registered before."""
    placed: bool = False
    """True if the node has had a place in this run."""
    last_join_s: float = 0.0
    """Time at which the newest registration was first seen here."""
    missing_since_s: Mapping[str, float] = field(default_factory=dict)
    """Members of the world without a registration, and since when."""
    store: StoreHealth = field(default_factory=StoreHealth)
    token: str = ""
    """Token for the next world, drawn by the caller."""


@dataclass(frozen=True, slots=True)
class Register:
    """Puts the registration into the store."""


@dataclass(frozen=True, slots=True)
class Reopen:
    """Deletes what an earlier run of the same id left."""


@dataclass(frozen=True, slots=True)
class WriteRound:
    """Writes the next world."""

    world: World


@dataclass(frozen=True, slots=True)
class AssignPlace:
    """Gives the caller its place."""

    world: World
    index: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Tells the caller that it gets no place."""

    kind: Refusal


Action = Register | Reopen | WriteRound | AssignPlace | Refuse


@dataclass(frozen=True, slots=True)
class Turn:
    """Holds the next action, and its reason."""

    action: Action | None
    reason: str
    spare: bool = False
    """True if the node waits though nothing is wrong: its time to join has not begun."""


def decide(view: RoundView, now_s: float, limits: RoundLimits) -> Turn:
    """Returns the next action of this node, by the rules of this file.

    Args:
        view: What the node sees.
        now_s: Present time.
        limits: Numbers of nodes, and times.
    """
    if view.requested_s is None:
        return Turn(None, "this node requests no place")
    waited_s, world = now_s - view.requested_s, view.world
    if view.members is None:
        if waited_s >= limits.connect_timeout_s:
            return Turn(Refuse("connection"), _no_etcd(view, waited_s, "connect_timeout"))
        return Turn(None, f"waiting for etcd at {view.etcd}")
    if view.done is not None:
        return _closed(view, view.done, waited_s, limits)
    index = world.find(view.me.node, view.me.incarnation) if world is not None else None
    if view.registered and world is not None and index is not None:
        return Turn(AssignPlace(world, index), f"generation {world.generation}: {world.reason}")
    if view.registered and world is not None and _is_full(view, world, limits):
        reason = f"all {limits.max_nodes} places are taken; waiting as a spare"
        return Turn(None, reason, spare=True)
    if waited_s >= limits.join_timeout_s:
        return _late(view, waited_s, limits)
    if not view.registered:
        return Turn(Register(), "registering")
    return _next_world(view, now_s, limits)


def _closed(view: RoundView, done: Done, waited_s: float, limits: RoundLimits) -> Turn:
    """Refuses a place in a closed rendezvous, or has a newcomer open it again as a new run (T2).

    Args:
        view: What the node sees.
        done: Says how the rendezvous was closed.
        waited_s: Seconds since the request.
        limits: Numbers of nodes, and times.
    """
    if not view.newcomer:
        unneeded = done.outcome != "failed" and not view.placed
        return Turn(Refuse("over" if unneeded else "closed"), _why_closed(view, done))
    others = list(view.members or {})
    if not others:
        return Turn(Reopen(), "an earlier run of this id is over; beginning a new one")
    if waited_s <= limits.lease_ttl_s + 1.0:
        return Turn(None, f"an earlier run is over; waiting for {_names(others)} to be gone")
    return Turn(Refuse("closed"), _why_closed(view, done))


def _why_closed(view: RoundView, done: Done) -> str:
    return f"the rendezvous at etcd {view.etcd} is closed: {done.reason}"


def _no_etcd(view: RoundView, waited_s: float, option: str) -> str:
    return (
        f"etcd at {view.etcd} did not answer within {waited_s:.0f} s (--rdzv-conf {option}=S): "
        "check --rdzv-endpoint, and that etcd runs and is in reach from this node"
    )


def _late(view: RoundView, waited_s: float, limits: RoundLimits) -> Turn:
    """Refuses a request that has waited for too long, and says what it waited for (T6).

    Args:
        view: What the node sees.
        waited_s: Seconds since the request.
        limits: Numbers of nodes, and times.
    """
    if not view.store.reachable:
        return Turn(Refuse("connection"), _no_etcd(view, waited_s, "join_timeout"))
    node_count, in_place = len(view.members or {}), _still_in_place(view, view.world)
    missing = f"{_names(in_place)} did not leave the generation before" if in_place else ""
    reason = (
        f"no place within {waited_s:.0f} s (--rdzv-conf join_timeout=S) at etcd {view.etcd}: "
        f"{missing or f'{node_count} of at least {limits.min_nodes} nodes are here'}"
    )
    return Turn(Refuse("timeout"), reason)


def _next_world(view: RoundView, now_s: float, limits: RoundLimits) -> Turn:
    """Waits until it is known which nodes are there, then has the first write a world (T7 to T11).

    Args:
        view: What the node sees.
        now_s: Present time.
        limits: Numbers of nodes, and times.
    """
    world, members = view.world, view.members or {}
    if in_place := _still_in_place(view, world):
        assert world is not None
        return Turn(
            None,
            f"waiting for {_names(in_place)} to leave generation {world.generation}",
        )
    unsure = [
        node
        for node, since_s in view.missing_since_s.items()
        if not _member_is_lost(view, since_s, now_s, limits)
    ]
    if unsure:
        return Turn(None, f"{_names(unsure)} may be gone; waiting to be sure")
    had_places = {member.node for member in world.members} if world is not None else set()
    staying = [member for member in members.values() if member.node in had_places]
    joiners = [member for member in members.values() if member.node not in had_places]
    chosen = order_members(world, joiners, staying, limits.max_nodes)
    if len(chosen) < limits.min_nodes:
        return Turn(None, f"{len(chosen)} of at least {limits.min_nodes} nodes are here")
    pause_s = limits.last_call_timeout_s
    if staying:
        pause_s = min(GROW_SETTLE_S, pause_s) if joiners else 0.0
    if len(chosen) < limits.max_nodes and now_s - view.last_join_s < pause_s:
        attendance = f"{len(chosen)} of at most {limits.max_nodes} nodes are here"
        return Turn(None, f"{attendance}; waiting {pause_s:g} s for more")
    if chosen[0].node != view.me.node or chosen[0].incarnation != view.me.incarnation:
        return Turn(None, f"waiting for {chosen[0].node} to write the next generation")
    following = World(
        generation=world.generation + 1 if world is not None else 1,
        token=view.token,
        members=chosen,
        strategy=STRATEGY,
        resume=Resume(tier="fresh"),
        reason=_why(world, chosen),
    )
    return Turn(WriteRound(following), following.reason)


def lost(view: RoundView, now_s: float, limits: RoundLimits) -> list[str]:
    """Returns the nodes without which the world in which this node has a place cannot go on.

    That is this node itself, if the world has gone on without it; or the node whose failure closed
    it.

    Args:
        view: What the node sees.
        now_s: Present time.
        limits: Numbers of nodes, and times.
    """
    world = view.world
    if view.done is not None:
        return [view.done.reason] if view.done.outcome == "failed" else []
    if world is None or not world.names(view.me):
        return [view.me.node]
    members = view.members or {}
    missing = view.missing_since_s
    return [
        member.node
        for member in world.members
        if (
            members[member.node].incarnation != member.incarnation
            if member.node in members
            else member.node in missing
            and _member_is_lost(view, missing[member.node], now_s, limits)
        )
    ]


def newcomers(view: RoundView, lost_nodes: Sequence[str], limits: RoundLimits) -> list[str]:
    """Returns the nodes that wait and for which the world of this node has room.

    Args:
        view: What the node sees.
        lost_nodes: Members of the world that are lost, whose places are free.
        limits: Numbers of nodes, and times.
    """
    world = view.world
    if world is None or view.done is not None:
        return []
    had_places = {member.node for member in world.members}
    waiting = [node for node in view.members or {} if node not in had_places]
    return waiting[: max(0, limits.max_nodes - len(had_places) + len(lost_nodes))]


def _still_in_place(view: RoundView, world: World | None) -> list[str]:
    """Returns the members of the world whose very registration exists: they have not left their
    places."""
    members = view.members or {}
    return [
        member.node
        for member in (world.members if world is not None else ())
        if member.node in members and members[member.node].incarnation == member.incarnation
    ]


def _is_full(view: RoundView, world: World, limits: RoundLimits) -> bool:
    """Returns whether no node can be added to the members that are still registered.

    Args:
        view: What the node sees.
        world: The present world.
        limits: Numbers of nodes, and times.
    """
    return len(_still_in_place(view, world)) == len(world.members) >= limits.max_nodes


def _member_is_lost(view: RoundView, since_s: float, now_s: float, limits: RoundLimits) -> bool:
    """Returns whether a member that is no longer registered is gone.

    A node that is not of that world has not seen since when etcd is well, and waits a TTL too.

    Args:
        view: What the node sees.
        since_s: Time since which the member has not been registered.
        now_s: Present time.
        limits: Numbers of nodes, and times.
    """
    world, ttl_s = view.world, limits.lease_ttl_s
    was_member = world is not None and any(member.node == view.me.node for member in world.members)
    conclusive = leases_are_conclusive(view.store, now_s, ttl_s)
    return conclusive and (was_member or now_s - since_s >= ttl_s)


def _why(world: World | None, chosen: Sequence[Member]) -> str:
    """Returns why the next world is made."""
    if world is None:
        return f"{count_text(len(chosen), 'node')} came together"
    before, after = [m.node for m in world.members], [m.node for m in chosen]
    parts = []
    if gone := [node for node in before if node not in after]:
        parts.append(f"{_names(gone)} gone")
    if came := [node for node in after if node not in before]:
        parts.append(f"{_names(came)} joined")
    return "; ".join(parts) or "the workers are started again"


def _names(nodes: Sequence[str]) -> str:
    return list_text(nodes, NAMES_SHOWN)
