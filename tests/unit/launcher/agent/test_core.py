"""The loop of an agent, around a store in memory and a node without processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from elasticzero.errors import ElasticZeroError, ExitCode, StoreUnavailable
from elasticzero.ipc.assignment import Resume
from elasticzero.launcher.agent.core import BACKOFF_S, AgentCore, StoreSide
from elasticzero.launcher.agent.observer import ClusterObserver
from elasticzero.launcher.agent.store_writer import StoreWriter
from elasticzero.launcher.agent.subscriptions import Subscriptions
from elasticzero.launcher.http.host_probe import HostProbe
from elasticzero.launcher.protocol.actions import Decision, SaveHeldSnapshot
from elasticzero.launcher.protocol.documents import Member, Run, World, to_bytes
from elasticzero.launcher.protocol.policy import JobPolicy
from elasticzero.launcher.protocol.view import View, WorkerGroupState
from elasticzero.launcher.snapshots.checkpoint_probe import CheckpointProbe
from elasticzero.launcher.store.api import Condition, Lease
from elasticzero.launcher.store.job_run import RUN, RunStore, stored_run
from elasticzero.launcher.store.membership import Membership, bound_socket
from elasticzero.launcher.store.watch_cache import WORLD, WatchCache
from tests.support.memory_store import MemoryServer, MemoryStore
from tests.watching import DEADLINE_S


class FailingStore(MemoryStore):
    """Refuses the writes of worlds as long as it is told to."""

    refuses = False

    def write(
        self,
        puts: Mapping[str, bytes],
        *,
        deletes: Sequence[str] = (),
        conditions: Sequence[Condition] = (),
        lease: Lease | None = None,
    ) -> int | None:
        if self.refuses and WORLD in puts:
            raise StoreUnavailable("the write was refused")
        return super().write(puts, deletes=deletes, conditions=conditions, lease=lease)


class NodeWithoutProcesses:
    """Records what the loop asks of a node, in order."""

    worker_group = None

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.changed = threading.Event()
        self.now_s = time.monotonic()
        self.server = MemoryServer(time.monotonic)
        self.store = FailingStore(self.server)
        store = RunStore(self.store, stored_run(self.store))
        cache = WatchCache(store, self.changed.set, run=store.number)
        me = Member("a", "a-1", "127.0.0.1", 1, 2, 1, run=store.number)
        self.membership = Membership(store, me, 60, bound_socket())
        subscriptions = Subscriptions(store, cache, self.membership)
        look = CheckpointProbe(None, self.changed.set)
        cluster = ClusterObserver(
            store, cache, self.membership, subscriptions, self, look, HostProbe(print)
        )
        side = StoreSide(
            cache=cache,
            membership=self.membership,
            subscriptions=subscriptions,
            observer=cluster,
            writer=StoreWriter(store, cache, self.membership, cluster),
        )
        policy = JobPolicy(min_nodes=1, max_nodes=1)
        self.core = AgentCore(policy, self, self, side, self, lambda: self.now_s)
        assert self.membership.register()
        self.core.begin()

    def cycles_until(self, asked: str) -> None:
        """Runs the loop, 10 ms of its clock a cycle, until the node is asked for this."""
        deadline_s = time.monotonic() + DEADLINE_S
        while asked not in self.asked:
            assert time.monotonic() < deadline_s, self.asked
            self.core.cycle()
            self.now_s += 0.01
            self.changed.wait(0.01)
            self.changed.clear()

    def held(self) -> tuple[Any, ...]:
        return ()

    def keep_only(self, keep: object) -> None:
        self.asked.append("keep")

    def poll(self, now_s: float) -> None:
        return

    def wake(self) -> None:
        self.changed.set()

    def saving(self) -> bool:
        return False

    def unsealed(self) -> bool:
        return False

    def retire(self, world: World) -> None:
        self.asked.append("retire")

    def start(self, world: World, index: int, now_s: float) -> None:
        self.asked.append("start")

    def save_held(self, held: SaveHeldSnapshot) -> None:
        self.asked.append("save")

    def time_spent(self, view: View, following: World) -> None:
        return

    def decided(self, view: View, decision: Decision) -> None:
        assert view.workers == WorkerGroupState()

    def store_failed(self, error: ElasticZeroError) -> None:
        self.asked.append("trouble")

    def exits(self, reason: str) -> None:
        self.asked.append("leave")


@pytest.fixture
def node() -> Iterator[NodeWithoutProcesses]:
    node = NodeWithoutProcesses()
    yield node
    node.membership.close()
    node.store.close()


def test_a_start_retires_workers_then_snapshots(node: NodeWithoutProcesses) -> None:
    """The workers of the older generation go before the memory that they may be writing to."""
    node.cycles_until("start")
    assert node.asked[:3] == ["retire", "keep", "start"]


def test_a_failed_write_is_backed_off_from(node: NodeWithoutProcesses) -> None:
    """No action is done for BACKOFF_S, and the time of others to answer begins anew."""
    node.store.refuses = True
    node.cycles_until("trouble")
    failed_s = node.membership.outage_end_s
    assert node.now_s - failed_s == pytest.approx(0.01)
    while node.now_s < failed_s + BACKOFF_S - 0.02:
        node.core.cycle()
        node.now_s += 0.01
    assert node.asked == ["trouble"]
    node.store.refuses = False
    node.cycles_until("start")
    assert node.asked.count("trouble") == 1


def test_a_node_of_an_earlier_run_gives_way(node: NodeWithoutProcesses) -> None:
    """Its next write is refused: it starts nothing, and exits with a code of its own."""
    node.server.write({RUN: to_bytes(Run(number=2))}, (), (), 0)
    node.cycles_until("leave")
    assert node.core.exit_code is ExitCode.SUPERSEDED
    assert node.asked == ["leave"]
    assert WORLD not in node.store.read(WORLD).entries


def test_a_world_of_a_later_run_ends_a_node(node: NodeWithoutProcesses) -> None:
    """It reads that world before it writes anything."""
    following = World(
        generation=1,
        token="t",
        members=(Member("a", "a-1", "127.0.0.1", 1, 2, 1),),
        strategy="ddp",
        resume=Resume(tier="fresh"),
        reason="",
        run=2,
    )
    put = {WORLD: to_bytes(following), RUN: to_bytes(Run(number=2))}
    node.server.write(put, (), (), 0)
    node.cycles_until("leave")
    assert node.core.exit_code is ExitCode.SUPERSEDED
    assert node.asked == ["leave"], "it starts no workers, though the world names it"


def test_a_node_told_to_leave_exits_and_says_why(node: NodeWithoutProcesses) -> None:
    """It leaves before there is a world."""
    node.core.leave("SIGTERM")
    node.cycles_until("leave")
    assert node.core.exit_code is not None
    assert node.asked.count("leave") == 1


def test_a_node_leaves_where_the_world_is_odd(node: NodeWithoutProcesses) -> None:
    """It wrote the first world over what a later release had written there."""
    node.store.write({WORLD: b"not json"})
    node.cycles_until("leave")
    assert node.core.exit_code is ExitCode.LEFT
    assert node.core.notice is not None
    assert node.core.notice.reason == "the world in etcd cannot be read"
    assert node.store.read(WORLD).entries[WORLD].value == b"not json"


@pytest.mark.parametrize("key", ["done", "control", "alarm/0", "members/zz", "reports/0/zz"])
def test_an_odd_document_keeps_no_job_from_its_world(key: str, node: NodeWithoutProcesses) -> None:
    node.store.write({key: b"not json"})
    node.cycles_until("start")
    assert node.core.exit_code is None
