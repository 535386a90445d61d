"""Registers one node of a torchrun rendezvous, follows the others, and requests a place.

A thread observes, decides and acts; callers that request a place wait for its result. This module
does not import torch. The keys stand under `torchrun:ID`, a name that no job of `elasticzero run`
can have.
"""

from __future__ import annotations

import atexit
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from elasticzero.errors import ElasticZeroError, StoreUnavailable
from elasticzero.launcher.protocol.documents import Done, Member, World, to_bytes
from elasticzero.launcher.protocol.invariants import check_invariants
from elasticzero.launcher.protocol.view import StoreHealth
from elasticzero.launcher.retry import RetryPolicy, retry_call
from elasticzero.launcher.store.api import Condition, LeaseLost, Store, job_prefix
from elasticzero.launcher.store.membership import Membership, bound_socket, new_incarnation
from elasticzero.launcher.store.recovery import StoreRecovery
from elasticzero.launcher.store.watch_cache import DONE, MEMBERS, WORLD, FirstSeen, WatchCache
from elasticzero.launcher.torchrun.rules import (
    STRATEGY,
    Action,
    AssignPlace,
    Refusal,
    Refuse,
    Register,
    Reopen,
    RoundLimits,
    RoundView,
    WriteRound,
    decide,
    lost,
    newcomers,
)
from elasticzero.serialization import RecordError
from elasticzero.spans import STRATEGIES

log = logging.getLogger(__name__)

TURN_S = 0.2
"""Seconds between two turns when nothing changes."""
RETRY_S = 0.5
"""Seconds to pause after the store did not answer."""
JOIN_THREAD_S = 10.0


def rendezvous_prefix(run_id: str) -> str:
    """Returns the prefix of all keys of one rendezvous."""
    return job_prefix(f"torchrun:{run_id}")


class RendezvousRefused(ElasticZeroError):
    """Says that a node requested a place and will not get one."""

    def __init__(self, kind: Refusal, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class NodePlacement:
    """Holds a node's place in a world."""

    world: World
    index: int
    socket: socket.socket | None
    """On the first node, a socket bound to the port where the others expect its store."""

    @property
    def size(self) -> int:
        return len(self.world.members)

    @property
    def host(self) -> str:
        return self.world.members[0].host

    @property
    def port(self) -> int:
        return self.world.members[0].store_port


@dataclass(frozen=True, slots=True)
class Change:
    """Says why the world of this node must be replaced."""

    lost: tuple[str, ...] = ()
    newcomers: tuple[str, ...] = ()


class RendezvousNode:
    """Registers this node at its first request, and renews the registration until it leaves."""

    def __init__(
        self,
        store: Store,
        etcd: str,
        host: str,
        limits: RoundLimits,
        log_line: Callable[[str], None] = log.info,
    ) -> None:
        """Creates a node that is not registered.

        Args:
            store: The rendezvous' store.
            etcd: Endpoints of etcd, for messages.
            host: Address at which other nodes reach this one.
            limits: Numbers of nodes, and times.
            log_line: Receives lines for people.
        """
        self.limits = limits
        self.host = host
        self._store, self._etcd, self._log_line = store, etcd, log_line
        bind = partial(bound_socket, host)
        store_socket = bind()
        me = Member(
            node=f"{socket.gethostname()}-{secrets.token_hex(4)}",
            incarnation=new_incarnation(),
            host=host,
            http_port=0,
            store_port=store_socket.getsockname()[1],
            nproc=1,
        )
        ttl_s = int(limits.lease_ttl_s)
        self._membership = Membership(store, me, ttl_s, store_socket, bind=bind)
        self._wake, self._over = threading.Event(), threading.Event()
        self._observer = WatchCache(store, self._wake.set, strategies=(*STRATEGIES, STRATEGY))
        self._recovery = StoreRecovery(
            store, self._observer, self._membership, None, None, self._log_reason
        )
        self._missing = FirstSeen()
        self._known_registrations: frozenset[tuple[str, str]] = frozenset()
        self._last_join_s = self._retry_s = 0.0
        self._newcomer, self._registered, self._placed = True, False, False
        self._logged_reason = ""
        self._result_ready = threading.Condition()
        self._requested_s: float | None = None
        self._new_request = False
        self._result: NodePlacement | RendezvousRefused | None = None
        self._trains = False
        self._change = Change()
        self._thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        return self._membership.me.node

    def next_placement(self) -> NodePlacement:
        """Leaves the place this node has, and waits for one in a new world; raises
        `RendezvousRefused`."""
        if self._over.is_set():
            raise RendezvousRefused(
                "closed", f"{self.name} has left the rendezvous at etcd {self._etcd}"
            )
        if self._thread is None:
            atexit.register(self.leave)
            self._thread = threading.Thread(target=self._run, name="rendezvous", daemon=True)
            self._thread.start()
        with self._result_ready:
            self._requested_s, self._new_request = time.monotonic(), True
            self._result, self._trains, self._change = None, False, Change()
            self._wake.set()
            self._result_ready.wait_for(lambda: self._result is not None)
            result = self._result
        assert result is not None
        if isinstance(result, RendezvousRefused):
            raise result
        return result

    def begin(self) -> None:
        """Notes that all of the world have met: from now on the end of this node is the end of the
        run."""
        self._trains = True

    def change(self) -> Change:
        """Returns what has happened to the world of this node; sends no request, so it may be
        called often."""
        return self._change

    def closed(self) -> bool:
        """Returns whether the rendezvous is closed, as far as this node can see; raises
        `StoreUnavailable` if it has no answer."""
        if self._observer.get(DONE) is None:
            return DONE in self._store.read(DONE).entries
        return self._observer.done() is not None

    def close_rendezvous(self, done: Done) -> None:
        """Writes that the run is over; raises `StoreUnavailable` if the store stays away."""
        absent = Condition(key=DONE, mod_revision=0)
        retry_call(
            lambda: self._store.write({DONE: to_bytes(done)}, conditions=[absent]),
            RetryPolicy(
                first_pause_s=RETRY_S,
                max_pause_s=RETRY_S,
                spread=0.0,
                timeout_s=self.limits.close_timeout_s,
            ),
            retryable=lambda error: isinstance(error, StoreUnavailable),
        )

    def ends_the_run(self) -> bool:
        """Returns whether the end of this node ends the run: it trains in the present world."""
        world = self._observer.world()[0] if self._trains else None
        return world is not None and world.names(self._membership.me)

    def leave(self) -> None:
        """Gives up the registration and everything else; the others see it at once."""
        self._over.set()
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_THREAD_S)
        atexit.unregister(self.leave)
        self._trains = False
        self._membership.close()
        self._store.close()

    def _run(self) -> None:
        while not self._over.is_set():
            self._wake.wait(TURN_S)
            self._wake.clear()
            if self._over.is_set():
                return
            try:
                self._turn(time.monotonic())
            except (StoreUnavailable, LeaseLost) as error:
                self._log_reason(str(error))
                self._retry_s = time.monotonic() + RETRY_S
            except Exception as error:  # noqa: BLE001  the top of a thread
                self._set_result(self._broken(error))

    def _broken(self, error: Exception) -> RendezvousRefused:
        log.debug("a turn failed", exc_info=True)
        return RendezvousRefused(
            "state",
            f"what stands at etcd {self._etcd} for this rendezvous cannot be used "
            f"({type(error).__name__}: {error}); choose another --rdzv-id",
        )

    def _turn(self, now_s: float) -> None:
        self._observer.follow({MEMBERS, WORLD, DONE})
        broken = self._observer.unreadable(World) or self._observer.unreadable(Done)
        if broken is not None:
            raise RecordError(f"the key {broken.key} of the rendezvous cannot be read")
        with self._result_ready:
            if self._new_request:
                self._new_request = self._registered = False
                self._membership.renew_incarnation()
            requested_s = self._requested_s
        self._recovery.poll(now_s)
        self._keep_registered(now_s)
        view = self._view(requested_s, now_s)
        if requested_s is None:
            gone = lost(view, now_s, self.limits)
            self._change = Change(tuple(gone), tuple(newcomers(view, gone, self.limits)))
            return
        turn = decide(view, now_s, self.limits)
        self._log_reason(turn.reason)
        if turn.spare:
            self._requested_s = now_s
        match turn.action:
            case AssignPlace(world, index):
                self._placed, self._change = True, Change()
                first = self._membership.take_store_socket() if index == 0 else None
                self._set_result(NodePlacement(world, index, first))
            case Refuse(kind):
                self._over.set()
                self._membership.close()
                self._set_result(RendezvousRefused(kind, turn.reason))
            case action if now_s >= self._retry_s:
                self._write(action, requested_s)

    def _write(self, action: Action | None, requested_s: float) -> None:
        match action:
            case Register() if self._membership.register():
                self._registered, self._newcomer = True, False
                self._observer.put(MEMBERS, self._store.read(MEMBERS))
            case Reopen():
                done = self._observer.get(DONE)
                if done is not None and DONE in done.entries:
                    revision = done.entries[DONE].mod_revision
                    still = Condition(key=DONE, mod_revision=revision)
                    self._store.write({}, deletes=[DONE, WORLD], conditions=[still])
                for prefix in (DONE, WORLD):
                    self._observer.put(prefix, self._store.read(prefix))
            case WriteRound():
                self._reread_and_write(requested_s)
            case _:
                pass

    def _reread_and_write(self, requested_s: float) -> None:
        """Writes the next world, if a fresh read of the store leads to it too."""
        self._observer.put(MEMBERS, self._store.read(MEMBERS))
        now_s = time.monotonic()
        action = decide(self._view(requested_s, now_s), now_s, self.limits).action
        if isinstance(action, WriteRound):
            before, revision = self._observer.world()
            check_invariants(before, action.world)
            conditions = [
                Condition(key=WORLD, mod_revision=revision),
                Condition(key=DONE, mod_revision=0),
                self._membership.still_registered(),
            ]
            self._store.write({WORLD: to_bytes(action.world)}, conditions=conditions)
            self._observer.put(WORLD, self._store.read(WORLD))

    def _set_result(self, result: NodePlacement | RendezvousRefused) -> None:
        """Answers the caller that waits for a place."""
        with self._result_ready:
            if self._requested_s is not None and not self._new_request:
                self._requested_s, self._result = None, result
                self._result_ready.notify_all()

    def _log_reason(self, reason: str) -> None:
        if reason != self._logged_reason:
            self._logged_reason = reason
            self._log_line(f"{self.name}: {reason}")

    def _keep_registered(self, now_s: float) -> None:
        """Renews a lapsed registration, as the same incarnation, while it has a place or requests
        one."""
        world, _ = self._observer.world()
        named = world is not None and world.names(self._membership.me)
        if named or self._registered:
            self._membership.check(now_s, named=True, world_revision=0)

    def _view(self, requested_s: float | None, now_s: float) -> RoundView:
        members = self._observer.members()
        world, _ = self._observer.world()
        complete = all(self._observer.get(prefix) is not None for prefix in (MEMBERS, WORLD, DONE))
        registrations = frozenset((m.node, m.incarnation) for m in (members or {}).values())
        if registrations - self._known_registrations:
            self._last_join_s = now_s
        self._known_registrations = registrations
        placed = world.members if world is not None and members is not None else ()
        missing = [member.node for member in placed if member.node not in (members or {})]
        return RoundView(
            me=self._membership.me,
            etcd=self._etcd,
            members=members if complete else None,
            world=world,
            done=self._observer.done(),
            requested_s=requested_s,
            registered=self._registered,
            newcomer=self._newcomer,
            placed=self._placed,
            last_join_s=self._last_join_s,
            missing_since_s=self._missing.update(missing, now_s),
            store=StoreHealth(
                reachable=self._store.reachable,
                outage_end_s=max(self._store.last_outage_end_s, self._membership.outage_end_s),
                confirmed_s=self._membership.confirmed_s,
            ),
            token=secrets.token_hex(8),
        )
