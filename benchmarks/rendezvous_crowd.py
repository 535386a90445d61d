"""Many membership clients in one process, for rendezvous.py: `rendezvous_crowd.py JSON`.

Each client is what an agent is to the store: an `EtcdStore`, `WatchCache`, `Membership`, and
the loop of an agent around them, `AgentCore`. Two of them share nothing, but the connection of
their process to etcd where that is asked for. Workers are pretended: they start at once, train for
ever, and take STOP_S to stop.

Orders come on stdin, one a line (go, fail, mark, boundary N); what happened goes out on stdout, a
JSON object a line, with times of the machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

import json
import os
import queue
import random
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from elasticzero.checkpoint.ram.store import HeldSnapshot
from elasticzero.errors import ElasticZeroError, StoreUnavailable
from elasticzero.launcher.agent.core import AgentCore, StoreSide
from elasticzero.launcher.agent.main import STORE_RETRY
from elasticzero.launcher.agent.observer import ClusterObserver
from elasticzero.launcher.agent.store_writer import StoreWriter
from elasticzero.launcher.agent.subscriptions import Subscriptions
from elasticzero.launcher.protocol.actions import Decision, PutReport, SaveHeldSnapshot
from elasticzero.launcher.protocol.documents import Failure, Member, Proposal, World
from elasticzero.launcher.protocol.policy import JobPolicy
from elasticzero.launcher.protocol.view import (
    GroupOrder,
    GroupOutcome,
    GroupStage,
    View,
    WorkerGroupState,
)
from elasticzero.launcher.retry import retry_call
from elasticzero.launcher.snapshots.checkpoint_probe import CheckpointProbe
from elasticzero.launcher.store.api import job_prefix
from elasticzero.launcher.store.etcd.access import Access, Endpoint
from elasticzero.launcher.store.etcd.channels import open_channels
from elasticzero.launcher.store.etcd.store import EtcdStore
from elasticzero.launcher.store.membership import Membership, bound_socket, new_incarnation
from elasticzero.launcher.store.watch_cache import DONE, WatchCache
from elasticzero.processes import collect_garbage_less_often
from elasticzero.serialization import decode

THREADS = 8
"""Each takes care of its share of the clients, one at a time."""
REST_S, BUSY_S, LONG_ROUND_S = 0.25, 0.02, 5.0
"""How often a client turns while it knows of no later timer, as agents do; BUSY_S is for whom the
others wait, in a round that is not long."""
LOOK_S = 60.0
"""A thread looks at least so often whose time has come."""
STOP_S = 0.05
"""Workers that end leave their state in memory first."""
STEP = 7
"""The step whose snapshot every node holds when a generation ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CrowdOptions:
    """What one process is told to be."""

    endpoint: str
    job: str
    first: int
    """Number of its first client; they are called n0000, n0001, …"""
    clients: int
    nodes: int
    """Of the job: so many make the first world."""
    least: int
    """So many are enough for a later one."""
    ttl_s: int
    share: bool
    """All clients of a process share one connection."""


class PretendedWorkers:
    """A node's one worker, of one generation."""

    def __init__(self, ask: Callable[[int], None]) -> None:
        """ask: has all workers of a generation come to a boundary, as the control word would."""
        self._workers = WorkerGroupState()
        self._ends_s = float("inf")
        self._ask = ask

    @property
    def generation(self) -> int:
        return self._workers.generation

    def unanswered_since(self, members: Mapping[str, Member], now_s: float) -> Mapping[str, float]:
        return {}

    def refusing(self, addresses: Mapping[str, str]) -> Collection[str]:
        """Stands for connections to agents: the hosts of those that are lost say nothing."""
        return ()

    def start(self, generation: int, now_s: float) -> None:
        self._ends_s = float("inf")
        self._workers = WorkerGroupState(
            generation=generation,
            running=1,
            stage=GroupStage.RESTORED,
            stepped_s=now_s,
            step=STEP,
        )

    def lose_a_peer(self, rank: int, now_s: float) -> None:
        """What happens to every worker when one of its group dies."""
        failure = Failure(rank=rank, blame="peer", message="connection closed by peer", step=STEP)
        self._workers = replace(self._workers, failure=failure)
        self._end(now_s)

    def withdraw(self, reason: str) -> None:
        raise AssertionError("the workers were told to prepare for nothing")

    def stop(self, reason: str, now_s: float) -> None:
        self._workers = replace(self._workers, aborted_s=now_s)
        self._end(now_s)

    def leave_at_boundary(self, now_s: float) -> None:
        """All ranks have left their loop together, for a node is to join."""
        if self._ends_s == float("inf"):
            self._workers = replace(self._workers, outcome=GroupOutcome.AT_BOUNDARY)
            self._end(now_s)

    def _end(self, now_s: float) -> None:
        if self._ends_s == float("inf"):
            self._workers = replace(self._workers, stepped_s=now_s)  # until now there were steps
            self._ends_s = now_s + STOP_S

    def view(self, now_s: float) -> WorkerGroupState:
        if now_s >= self._ends_s:
            return replace(self._workers, running=0)
        stepping = self._ends_s == float("inf")
        return replace(self._workers, stepped_s=now_s) if stepping else self._workers

    @property
    def progress_monitor(self) -> PretendedWorkers:
        return self

    def dump_stacks(
        self, limit_s: float | None, now_s: float, suspended_s: float | None = None
    ) -> None:
        raise AssertionError("no worker hangs")

    def request(self, flags: int) -> None:
        self._workers = replace(self._workers, requested=flags, order=GroupOrder.STOP_AT_BOUNDARY)
        self._ask(self.generation)

    def kill(self, *, spare_saving: bool = False) -> None:
        """Their node has no place in the next world, for it was too slow to answer."""
        self._workers = replace(self._workers, order=GroupOrder.KILL)
        self._ends_s = 0.0

    def kill_unresponsive(self) -> None:
        raise AssertionError("no worker is deaf")

    def kill_suspended(self) -> None:
        """No worker is stopped."""

    def due_s(self, now_s: float) -> float:
        """When it ends, if that is to come."""
        return self._ends_s if self._ends_s > now_s else float("inf")

    def held(self) -> tuple[HeldSnapshot, ...]:
        """What their node's memory holds when they have ended: the whole state, as under ddp."""
        return (HeldSnapshot(generation=self.generation, step=STEP, ranks=(0,), world_size=1),)


class SharedChannels:
    """One connection to etcd for many stores, none of which may end it.

    Agents have a connection each, and a process of their own for it.
    """

    def __init__(self) -> None:
        self._channels: list[Any] = []

    def __call__(self, endpoints: Sequence[Endpoint], access: Access) -> list[Any]:
        if not self._channels:
            self._channels = open_channels(endpoints, access)
        return self._channels


class Client:
    """One agent without its processes."""

    def __init__(self, number: int, crowd: Crowd) -> None:
        options = crowd.options
        self.name = f"n{number:04d}"
        self.policy = JobPolicy(
            min_nodes=options.nodes,
            max_nodes=options.nodes,
            lease_ttl_s=options.ttl_s,
            changes_inside="off",
        )
        self._after = replace(self.policy, min_nodes=options.least)
        self._crowd = crowd
        channels = crowd.channels if options.share else None
        self.store = EtcdStore([options.endpoint], job_prefix(options.job), channels=channels)
        self.observer = WatchCache(self.store, self.wake)
        sock = bound_socket()
        me = Member(
            node=self.name,
            incarnation=new_incarnation(),
            host="10.0.0.1",
            http_port=29400,
            store_port=sock.getsockname()[1],
            nproc=1,
        )
        self.membership = Membership(self.store, me, options.ttl_s, sock)
        self.workers = PretendedWorkers(crowd.ask_for_boundary)
        self._told: dict[str, set[int]] = {"knows": set(), "reported": set()}
        """Holds the worlds that it has told of: the first (1), and any after that (2)."""
        look = CheckpointProbe(None, self.wake)
        subscriptions = Subscriptions(self.store, self.observer, self.membership)
        cluster = ClusterObserver(
            *(self.store, self.observer, self.membership, subscriptions),
            *(self.workers, look, self.workers),
        )
        side = StoreSide(
            cache=self.observer,
            membership=self.membership,
            subscriptions=subscriptions,
            observer=cluster,
            writer=StoreWriter(self.store, self.observer, self.membership, cluster),
        )
        self.core = AgentCore(self.policy, self, self, side, self, time.monotonic)
        self._trouble = False
        self.due_s = 0.0
        self.rests_until_s = 0.0
        """Nothing that wakes it before then has it turn."""
        self._tries = 0
        self.queued = False
        self.joined_s = 0.0
        self.thread = 0

    def wake(self) -> None:
        self._crowd.wake(self)

    def connect(self) -> None:
        """What every agent does before it registers: see that the job is not over."""
        retry_call(
            partial(self.store.read, DONE),
            STORE_RETRY,
            retryable=lambda error: isinstance(error, StoreUnavailable),
            on_failure=lambda _, error: self._crowd.tell(
                "trouble", client=self.name, error=str(error)
            ),
        )

    def join(self) -> None:
        self._crowd.tell("first", at_s=time.monotonic(), once=True)
        self.membership.join(lambda text: print(self.name, text, file=sys.stderr))
        self.joined_s = time.monotonic()
        self._crowd.tell("joined", once=True)
        self.core.begin()
        self._crowd.count("registered", 0, self.joined_s)

    def turn(self) -> None:
        """Observe, decide, act."""
        now_s = time.monotonic()
        if not self.joined_s:
            if now_s < self.due_s:
                return
            try:
                self.join()
            except StoreUnavailable as error:
                self._crowd.tell("trouble", client=self.name, error=str(error))
                self._tries += 1
                self.due_s = time.monotonic() + STORE_RETRY.pause_s(self._tries)
                return
        world, _ = self.observer.world()
        self.core.policy = self.policy if world is None else self._after
        self._trouble = False
        view, decision = self.core.cycle()
        due_s = self.core.due_s(view, decision)
        self.rests_until_s = time.monotonic() + self.core.rest_s(view)
        rest_s = REST_S
        in_round_s = now_s - view.round_s if view.round_s is not None else float("inf")
        busy = view.reports is not None or decision.actions
        if in_round_s <= LONG_ROUND_S and busy and not self._trouble:
            rest_s = BUSY_S
        for action in decision.actions:
            restored = isinstance(action, PutReport) and action.report.phase == "restored"
            if restored and not self._trouble:
                self._tell("reported")
        self.due_s = min(max(now_s + rest_s, due_s), self.workers.due_s(now_s))
        self.due_s = max(self.due_s, self.rests_until_s)

    @property
    def worker_group(self) -> PretendedWorkers | None:
        return self.workers if self.workers.generation else None

    def time_spent(self, view: View, following: World) -> None:
        return

    def decided(self, view: View, decision: Decision) -> None:
        return

    def store_failed(self, error: ElasticZeroError) -> None:
        self._trouble = True
        self._crowd.tell("trouble", client=self.name, error=str(error))

    def turn_failed(self, error: Exception, failures: int) -> None:
        raise error

    def exits(self, reason: str, *, failed: bool = False) -> None:
        raise AssertionError(f"{self.name} leaves: {reason}")

    def stop_workers(self, reason: str) -> None:
        raise AssertionError(f"{self.name}: {reason}")

    def poll(self, now_s: float) -> None:
        return

    def keep_only(self, keep: Set[tuple[int, int]]) -> None:
        """Memory holds what the present generation has left, and nothing else."""

    def saving(self) -> bool:
        return False

    def unsealed(self) -> bool:
        return False

    def retire(self, world: World) -> None:
        return

    def prepare_workers(self, world: World, proposal: Proposal) -> None:
        raise AssertionError("no node leaves inside the loops of the others")

    def enter(self, world: World, now_s: float) -> None:
        raise AssertionError("no workers enter a world inside their loops")

    def start(self, world: World, index: int, now_s: float) -> None:
        self.workers.start(world.generation, now_s)
        if index == 0:
            self.membership.take_store_socket().close()
        self._tell("knows")

    def _tell(self, what: str) -> None:
        """Say, once each, that it has done this for the first world and for one after that."""
        number = min(self.workers.generation, 2)
        if number not in self._told[what]:
            self._told[what].add(number)
            self._crowd.count(what, number, time.monotonic())

    def save_held(self, held: SaveHeldSnapshot) -> None:
        raise AssertionError(f"{self.name}: nothing is to be saved")


class Crowd:
    """The clients of this process, and the threads that take care of them."""

    def __init__(self, options: CrowdOptions) -> None:
        self.options = options
        self.channels = SharedChannels()
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, int], int] = {}
        self._told: set[str] = set()
        self._due: list[queue.SimpleQueue[Client]] = [
            queue.SimpleQueue() for _ in range(min(THREADS, options.clients))
        ]
        self.clients = [Client(options.first + n, self) for n in range(options.clients)]
        for number, client in enumerate(self.clients):
            client.thread = number % len(self._due)
        self._threads = [
            threading.Thread(target=self._work, args=(index,), daemon=True)
            for index in range(len(self._due))
        ]

    def connect(self) -> None:
        for client in self.clients:
            client.connect()

    def go(self) -> None:
        for thread in self._threads:
            thread.start()

    def fail(self) -> None:
        """A member of the group died: every worker notices."""
        now_s = time.monotonic()
        for client in random.sample(self.clients, len(self.clients)):
            client.workers.lose_a_peer(0, now_s)
            client.wake()

    def ask_for_boundary(self, generation: int) -> None:
        """Have all workers of a generation, in all processes, come to a boundary."""
        self.tell("boundary", generation=generation)

    def leave_at_boundary(self, generation: int) -> None:
        now_s = time.monotonic()
        for client in self.clients:
            if client.workers.generation == generation:
                client.workers.leave_at_boundary(now_s)
                client.wake()

    def wake(self, client: Client) -> None:
        if not client.queued:
            client.queued = True
            self._due[client.thread].put(client)

    def count(self, what: str, generation: int, at_s: float) -> None:
        """Say when the last client has come so far."""
        with self._lock:
            key = (what, generation)
            self._counts[key] = self._counts.get(key, 0) + 1
            complete = self._counts[key] == self.options.clients
        if complete:
            self.tell(what, generation=generation, at_s=at_s)

    def tell(self, event: str, *, once: bool = False, **fields: object) -> None:
        with self._lock:
            if once and event in self._told:
                return
            self._told.add(event)
            print(json.dumps({"event": event, **fields}), flush=True)

    def _work(self, index: int) -> None:
        clients = [client for client in self.clients if client.thread == index]
        try:
            for client in self._in_turn(index, clients):
                client.queued = False
                client.turn()
        except Exception:  # noqa: BLE001 - the top of a thread: the process is of no use without it
            traceback.print_exc()
            os._exit(1)

    def _in_turn(self, index: int, clients: Sequence[Client]) -> Iterator[Client]:
        """Whoever was woken, and whoever's time to look at the clock has come; first everybody."""
        yield from clients
        while True:
            soonest = min(clients, key=lambda client: client.due_s)
            left_s = soonest.due_s - time.monotonic()
            if left_s <= 0:
                yield soonest
            with suppress(queue.Empty):
                woken = self._due[index].get(timeout=min(max(0.0, left_s), LOOK_S))
                if time.monotonic() >= woken.rests_until_s:
                    yield woken
                else:
                    woken.queued = False
                    woken.due_s = min(woken.due_s, woken.rests_until_s)


def main() -> None:
    options = decode(CrowdOptions, json.loads(sys.argv[1]))
    crowd = Crowd(options)
    crowd.connect()
    collect_garbage_less_often()
    crowd.tell("ready")
    for order in sys.stdin:
        word, _, number = order.strip().partition(" ")
        match word:
            case "boundary":
                crowd.leave_at_boundary(int(number))
            case "go":
                crowd.go()
            case "fail":
                crowd.fail()
            case "mark":
                used = resource.getrusage(resource.RUSAGE_SELF)
                cpu_s = used.ru_utime + used.ru_stime
                crowd.tell("cpu", cpu_s=cpu_s, rss_bytes=used.ru_maxrss << 10)
            case _:
                break
    os._exit(0)  # hundreds of streams need not be taken down one by one


if __name__ == "__main__":
    main()
