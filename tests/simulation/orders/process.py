"""One agent's process: the real loop, over a connection to etcd that answers at once.

The process gives way before each of its writes, and after each turn of its loop. So others' events
come between any two of its writes. All that it receives is part of its digest: two processes with
equal digests are in equal states, for the code draws nothing and reads no clock of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import greenlet

from elasticzero.errors import ElasticZeroError, ExitCode, RunEnded, StoreUnavailable, UserError
from elasticzero.launcher.agent.core import AgentCore, StoreSide
from elasticzero.launcher.agent.observer import ClusterObserver
from elasticzero.launcher.agent.store_writer import StoreWriter
from elasticzero.launcher.agent.subscriptions import Subscriptions
from elasticzero.launcher.protocol.actions import Decision, SaveHeldSnapshot
from elasticzero.launcher.protocol.documents import Member, Proposal, World
from elasticzero.launcher.protocol.view import View
from elasticzero.launcher.snapshots.checkpoint_probe import CheckpointState
from elasticzero.launcher.store.api import Condition, Lease, LeaseLost, PrefixState
from elasticzero.launcher.store.data_loss import History
from elasticzero.launcher.store.job_run import RunStore, stored_run
from elasticzero.launcher.store.job_token import agree_on_token
from elasticzero.launcher.store.membership import Membership
from elasticzero.launcher.store.recovery import StoreRecovery
from elasticzero.launcher.store.watch_cache import DONE, WatchCache
from tests.simulation.agents import TOKEN, Port
from tests.simulation.etcd import Etcd, bucket_name
from tests.simulation.orders.workers import Memory, Workers

if TYPE_CHECKING:
    from tests.simulation.orders.pair import Pair

TTL_S = 2


class Connection:
    """A `Store` whose answers come at once, and whose writes wait for their turn."""

    reachable = True

    def __init__(
        self,
        etcd: Etcd,
        clock: Callable[[], float],
        before_write: Callable[[], None] = lambda: None,
        receive: Callable[..., None] = lambda *received: None,
    ) -> None:
        """before_write: gives way. receive: takes all that etcd answers."""
        self._etcd = etcd
        self._clock = clock
        self._before_write = before_write
        self._receive = receive
        self.history = History(self._lost_data)
        self.last_outage_end_s = 0.0
        self.watches: list[Watch] = []
        self.kept: KeptLease | None = None
        """The lease of the registration."""

    def read(self, prefix: str, *, limit: int = 0) -> PrefixState:
        state = self._etcd.read(prefix, limit)
        self._answered(self._etcd.revision)
        self._receive("read", prefix, state.revision, tuple(state.entries.values()))
        return replace(state, history=self.history.number)

    def count(self, prefix: str, revision: int) -> int:
        result = self._etcd.count(prefix, revision)
        self._receive("count", prefix, result)
        return result

    def write(
        self,
        puts: Mapping[str, bytes],
        *,
        deletes: Sequence[str] = (),
        conditions: Sequence[Condition] = (),
        lease: Lease | None = None,
    ) -> int | None:
        self._before_write()
        self._etcd.writer = self
        try:
            revision = self._etcd.write(puts, deletes, conditions, lease.id if lease else 0)
        except LeaseLost:
            self._receive("lease is gone")
            raise
        finally:
            self._etcd.writer = None
        self._answered(self._etcd.revision, wrote=bool(revision and puts))
        self._receive("wrote", revision, self._etcd.revision)
        return revision

    def watch(self, prefix: str, changed: Callable[[PrefixState], None]) -> Watch:
        return Watch(self, prefix, changed)

    def lease(self, ttl_s: int, *, on_lost: Callable[[], None] | None = None) -> KeptLease:
        self.kept = KeptLease(self._etcd, ttl_s, self._clock())
        return self.kept

    def bucket(self, prefix: str) -> Any:
        return self._etcd.bucket(bucket_name(prefix))

    def close(self) -> None:
        for watch in list(self.watches):
            watch.close()

    def _answered(self, revision: int, *, wrote: bool = False) -> None:
        position, cluster = self.history.position(), self._etcd.cluster
        self.history.judge_response(position, cluster, revision, wrote=wrote)

    def _lost_data(self) -> None:
        """The watches begin anew."""
        self.last_outage_end_s = self._clock()
        for watch in self.watches:
            watch.poke()


class Watch:
    """Tells the state of a prefix when its turn comes."""

    def __init__(
        self, connection: Connection, prefix: str, changed: Callable[[PrefixState], None]
    ) -> None:
        self.prefix = prefix
        self.pending = True
        self._connection = connection
        self._changed = changed
        connection.watches.append(self)
        connection.bucket(prefix).watches.append(self)

    def poke(self) -> None:
        self.pending = True

    def tell(self) -> None:
        self.pending = False
        self._changed(self._connection.read(self.prefix))

    def close(self) -> None:
        self._connection.watches.remove(self)
        self._connection.bucket(self.prefix).watches.remove(self)


class KeptLease:
    """A lease that is renewed at each tick, unless its process does not run."""

    def __init__(self, etcd: Etcd, ttl_s: int, now_s: float) -> None:
        self._etcd = etcd
        self.id = etcd.grant(ttl_s)
        self.ttl_s = ttl_s
        self.lost = False
        self.confirmed_s = now_s
        self._closed = False

    @property
    def ends(self) -> bool:
        """etcd has ended it, and its owner is not told."""
        return not self.lost and not self._closed and not self._etcd.has_lease(self.id)

    def tick(self, now_s: float, *, runs: bool) -> None:
        """A time that is longer than its TTL passes."""
        if self.lost or self._closed:
            return
        if not runs:
            self._etcd.revoke(self.id)
        elif self._etcd.renew(self.id):
            self.confirmed_s = now_s

    def close(self, *, revoke: bool) -> None:
        self._closed = True
        if revoke:
            self._etcd.revoke(self.id)


class NoStorage:
    """There is no checkpoint directory."""

    possible = False

    def invalidate(self) -> None:
        return

    def poll(self, bad: Mapping[int, str]) -> CheckpointState:
        return CheckpointState()


class NoProbe:
    def refusing(self, addresses: Mapping[str, str]) -> Sequence[str]:
        return ()

    def unanswered_since(self, members: Mapping[str, Member], now_s: float) -> Mapping[str, float]:
        return {}


class Process:
    """An agent of one node; it belongs to the run of the job that it found."""

    def __init__(self, pair: Pair, node: str, number: int) -> None:
        """number: how many agents the node had before, and this one."""
        self.pair = pair
        self.node = node
        self.name = f"{node}{number}"
        self.run = 0
        """Number of its run; 0: it has not read it."""
        self.exit_code: ExitCode | None = None
        self.reason = ""
        self.digest = 0
        self.memory = Memory()
        self.worker_group: Workers | None = None
        self.saved_held: SaveHeldSnapshot | None = None
        self._draws = 0
        self._woken = True
        self._writes = False
        """It is before a write."""
        self._turned_s = pair.now_s
        self.connection = Connection(
            pair.etcd, lambda: pair.now_s, self._before_write, self.receive
        )
        self._core: AgentCore | None = None
        self._membership: Membership | None = None
        self._hub = greenlet.getcurrent()
        self._task = greenlet.greenlet(self._run, self._hub)

    # -- what the order of events is made of

    @property
    def lives(self) -> bool:
        return self.exit_code is None

    @property
    def due(self) -> bool:
        """Its loop has something to do: it was woken, time has passed, or it is before a write."""
        return self.lives and (self._writes or self._woken or self._turned_s < self.pair.now_s)

    @property
    def pending(self) -> tuple[bool, ...]:
        return (self._woken, *(watch.pending for watch in self.connection.watches))

    def go_on(self) -> None:
        """Until its next write, or the end of its turn."""
        self.receive("turn", self.pair.now_s)
        self._task.switch()

    def is_told(self) -> None:
        """Its watches tell what they have."""
        for watch in list(self.connection.watches):
            if watch.pending:
                watch.tell()

    def loses_lease(self) -> None:
        """etcd answers its keepalive."""
        assert self.connection.kept is not None
        self.connection.kept.lost = True
        self.receive("lease")

    def receive(self, *received: object) -> None:
        self.digest = hash((self.digest, received))

    def notice(self, reason: str) -> None:
        """This node is to leave."""
        self.receive("notice", reason)
        if self._core is not None:
            self._core.leave(reason)

    def end(self) -> None:
        """The process is gone, if it is not yet."""
        if self._task:
            self._task.throw()

    def _before_write(self) -> None:
        self._writes = True
        self._hub.switch()
        self._writes = False

    def _rest(self) -> None:
        """Until it is woken, or time passes."""
        self._turned_s = self.pair.now_s
        self._hub.switch()

    def _sleep(self, seconds: float) -> None:
        """Until time passes: a tick is longer than any pause."""
        self._woken = False
        self._rest()

    # -- the process

    def _run(self) -> None:
        try:
            self._begin()
            assert self._core is not None
            while self._core.exit_code is None:
                self._woken = False
                self._core.turn()
                if self._core.exit_code is None:
                    self._rest()
            self._exit(self._core.exit_code)
        except RunEnded:
            self._exit(ExitCode.SUPERSEDED)
        except UserError as error:
            self.reason = str(error)
            self._exit(ExitCode.USAGE)

    def _begin(self) -> None:
        """Registers the node in the run that etcd has."""
        pair = self.pair
        if self.connection.read(DONE).entries:
            raise UserError("the job is over")
        stored = stored_run(self.connection)
        self.run = stored.number
        store = RunStore(self.connection, stored)
        agreed = agree_on_token(store, TOKEN)
        me = Member(self.node, self._draw(), self.node, 9400, 1, 1, run=self.run)
        membership = self._membership = Membership(
            store,
            me,
            TTL_S,
            Port(1),  # type: ignore[arg-type]
            bind=lambda: Port(1),  # type: ignore[arg-type,return-value]
            draw_incarnation=self._draw,
        )
        while True:
            with suppress(StoreUnavailable):  # each of its leases had lapsed before it was used
                membership.join(pair.note, clock=lambda: pair.now_s, sleep=self._sleep)
                break
            self._sleep(0.0)
        cache = WatchCache(store, self.wake, pair.read_document, run=self.run)
        subscriptions = Subscriptions(store, cache, membership)
        observer = ClusterObserver(
            store,
            cache,
            membership,
            subscriptions,
            self.memory,
            NoStorage(),
            NoProbe(),
            self._draw,
        )
        side = StoreSide(
            cache=cache,
            membership=membership,
            subscriptions=subscriptions,
            observer=observer,
            writer=StoreWriter(store, cache, membership, observer),
            recovery=StoreRecovery(store, cache, membership, observer, agreed, self._note),
        )
        self._core = AgentCore(pair.policy, self, self, side, self, lambda: pair.now_s)
        self._core.begin()

    def _exit(self, code: ExitCode) -> None:
        self.exit_code = code
        if self.worker_group is not None:
            self.worker_group.kill()
        if self._membership is not None:
            self._membership.close()
        self.connection.close()
        self.memory.keep_only(())
        self.pair.exited(self)

    def _draw(self) -> str:
        self._draws += 1
        return f"{self.name}-{self._draws}"

    def _note(self, text: str) -> None:
        self.pair.note(f"{self.name}: {text}")

    # -- what the loop reports

    def time_spent(self, view: View, following: World) -> None:
        return

    def decided(self, view: View, decision: Decision) -> None:
        if decision.reason != self.reason:
            self.reason = decision.reason
            actions = ", ".join(type(action).__name__ for action in decision.actions)
            self._note(f"{decision.reason}  [{actions}]")

    def store_failed(self, error: ElasticZeroError) -> None:
        self._note(str(error))

    def turn_failed(self, error: Exception, failures: int) -> None:
        raise error

    def exits(self, reason: str, *, failed: bool = False) -> None:
        return

    # -- what the loop asks of this node

    def wake(self) -> None:
        self._woken = True

    def stop_workers(self, reason: str) -> None:
        raise AssertionError(f"{self.name}: {reason}")

    def poll(self, now_s: float) -> None:
        return

    def saving(self) -> bool:
        return False

    def unsealed(self) -> bool:
        return False

    def save_held(self, held: SaveHeldSnapshot) -> None:
        raise AssertionError(f"{self.name} saves {held} where there is no storage")

    def keep_only(self, keep: Set[tuple[int, int]]) -> None:
        self.memory.keep_only(keep)

    def retire(self, world: World) -> None:
        if self.worker_group is not None:
            self.worker_group.kill()

    def prepare_workers(self, world: World, proposal: Proposal) -> None:
        raise AssertionError("nodes leave by a stop here")

    def enter(self, world: World, now_s: float) -> None:
        raise AssertionError("no workers have entered a world inside their loops")

    def start(self, world: World, index: int, now_s: float) -> None:
        if index == 0 and self._membership is not None:
            self._membership.take_store_socket()
        self.worker_group = Workers(world, index, self.memory)
        self.pair.starts(self, self.worker_group)
