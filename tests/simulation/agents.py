"""Machines and agents: the real loop of an agent, `launcher/agent/core.py`, on virtual time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Literal

import greenlet

from elasticzero.errors import ElasticZeroError, ExitCode, RunEnded, StoreUnavailable, UserError
from elasticzero.launcher.agent.core import AgentCore, StoreSide
from elasticzero.launcher.agent.observer import ClusterObserver
from elasticzero.launcher.agent.store_writer import StoreWriter
from elasticzero.launcher.agent.subscriptions import Subscriptions
from elasticzero.launcher.protocol.actions import Decision, SaveHeldSnapshot
from elasticzero.launcher.protocol.documents import UNSTATED, Member, Proposal, World
from elasticzero.launcher.protocol.view import View
from elasticzero.launcher.secrets import Secret
from elasticzero.launcher.store.api import Store
from elasticzero.launcher.store.job_run import RUN, RunStore, StoredRun, number_in
from elasticzero.launcher.store.job_token import Agreed, agree_on_token
from elasticzero.launcher.store.membership import Membership
from elasticzero.launcher.store.recovery import StoreRecovery
from elasticzero.launcher.store.watch_cache import DONE, WatchCache
from tests.simulation.connection import SimulatedStore
from tests.simulation.releases import Release, of_later_release
from tests.simulation.storage import NodeMemory, Part, SlowLook
from tests.simulation.worker_group import WorkerGroup

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.training import Worker

FIRST_PAUSE_S = 0.06
REST_S = 0.25
"""As in `launcher/agent/agent.py`: after it was woken, or as long as it is not registered, an
agent looks again so soon."""
ROUND_PAUSE_S = 0.25
LONG_ROUND_S = 5.0
"""In a round an agent looks at least so often; in one that lasts as seldom as at other times."""
LONGEST_PAUSE_S = 2.0
"""An agent that does not know when its next timer is due looks at least so often."""
JOIN_AGAIN_S = 0.5
SETTLE_S = 0.05
TOKEN = Secret("the token of every job")


BadInput = Literal["", "import", "model", "script", "crash"]
"""What is wrong with a node's input: a module is missing, the state does not fit its model, its
script raises, or its workers die as they begin."""


Place = Literal["poll", "decided", "request"]
"""Where the loop meets an unexpected error: before it has looked, before it acts, or in the middle
of an action."""


class Defect(Exception):
    """An error that nobody expects."""


class Port:
    """Stands for a bound socket."""

    def __init__(self, number: int) -> None:
        self.number = number

    def getsockname(self) -> tuple[str, int]:
        return ("", self.number)

    def close(self) -> None:
        return


class Probe:
    """Stands for connections to agents: a host that is there says that no agent is, and an agent
    that does not run answers nothing."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._unanswered_s: dict[str, float] = {}

    def refusing(self, addresses: Mapping[str, str]) -> list[str]:
        hosts = self._cluster.hosts
        return [key for key, a in addresses.items() if hosts[a.partition(":")[0]].refuses]

    def unanswered_since(self, members: Mapping[str, Member], now_s: float) -> dict[str, float]:
        silent = [key for key, m in members.items() if not self._cluster.hosts[m.node].answers]
        self._unanswered_s = {key: self._unanswered_s.get(key, now_s) for key in silent}
        return dict(self._unanswered_s)


class LateRecovery:
    """The recovery of the store, from when the node is registered, in the store's history of
    then."""

    def __init__(self) -> None:
        self.actual: StoreRecovery | None = None

    @property
    def due_s(self) -> float:
        return self.actual.due_s if self.actual is not None else inf

    def poll(self, now_s: float) -> None:
        if self.actual is not None:
            self.actual.poll(now_s)


class Host:
    """A machine: its clock, its memory, and at most one agent at a time."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.memory = NodeMemory()
        self.agent: Agent | None = None
        self.lost = False
        """For good."""
        self.cut = False
        """From etcd."""
        self.dark = False
        """From the other nodes."""
        self.silent = False
        """It went without a word: no peer is told."""
        self.back_s = 0.0
        """When it was last cut off no more."""
        self.bad_input: BadInput = ""
        """Why its workers always fail before they train, if they do."""
        self.faults_left = 0
        """So often its workers will still fail soon after they began to train."""
        self.dies = False
        """They die, and say nothing."""
        self.release: Release = ""
        """Release of its agents."""
        self.versions = ("", "")
        """Versions of ElasticZero and torch that they state."""
        random = cluster.random
        self._offset_s = random.uniform(100.0, 1e5)
        self._rate = random.uniform(0.99, 1.01)

    def clock(self) -> float:
        """This machine's monotonic clock."""
        return self._offset_s + self._rate * self.cluster.timeline.now_s

    def clock_at(self, true_s: float) -> float:
        return self._offset_s + self._rate * true_s

    def breaks(self, worker: Worker) -> None:
        """A worker begins to train; on a bad machine it fails soon."""
        if self.faults_left:
            self.faults_left -= 1
            self.cluster.later(0.05, 0.8, self._break, worker)

    def _break(self, worker: Worker) -> None:
        if worker.phase == "training":
            self.cluster.rules.cause("bad-node")
            if self.dies:
                worker.worker_group.crash(worker)
            else:
                worker.worker_group.fail(worker, "environment", "OSError: a bad machine")

    @property
    def refuses(self) -> bool:
        """Whether it tells others at once that no agent runs on it."""
        there = not (self.lost or self.dark or self.silent)
        return there and (self.agent is None or self.agent.dead)

    @property
    def serves(self) -> bool:
        """Whether others can read what its memory holds."""
        return self.agent is not None and not self.agent.dead and not self.dark

    @property
    def answers(self) -> bool:
        """Whether its agent tells others that its loop turns."""
        return self.agent is not None and self.serves and not self.agent.stands_still


class Agent:
    """One agent's process."""

    def __init__(self, cluster: Cluster, host: Host) -> None:
        self.cluster = cluster
        self.host = host
        self.plan = cluster.plan
        host.memory.keep_only(())
        host.agent = self
        self.store = SimulatedStore(cluster.etcd, host.clock, cluster.plan.trouble, self._renews)
        self.store.cut = host.cut
        entry = cluster.etcd.read(RUN).entries.get(RUN)
        self.run = number_in(entry)
        """The run of the job that it belongs to."""
        bound = self.run_store = RunStore(self.store, StoredRun(self.run, entry))
        store: Store = self.store if host.release == "before" else bound
        if host.release == "after":
            self.store.stored = of_later_release
        self._store = store
        stated = UNSTATED if host.release == "before" else self.run
        self.storage = cluster.storage
        """That of its run."""
        self.dead = False
        self.standstills = 0
        """How often it stood still for longer than its lease lives."""
        self.failures = 0
        """Turns of the loop that an unexpected error has ended."""
        self._defects: tuple[int, Place] = (0, "poll")
        """How many turns will meet one, and where."""
        self._in_turn = False
        self.store.before_request = lambda: self._break_at("request")
        self.saves = 0
        """Saves of this node that are not over."""
        self.worker_group: WorkerGroup | None = None
        self.exit_code: ExitCode | None = None
        self.reason = ""
        self.basis: View | None = None
        """What it saw when it last decided on a world to write."""
        self.began_s = cluster.timeline.now_s
        self.stalled_s = self.deaf_until_s = 0.0
        """The loop does not run from the one to the other."""
        self._awake = self._woken = self._asleep = False
        self._sleep_id = 0
        self._pause_s = FIRST_PAUSE_S
        me = Member(
            node=host.name,
            incarnation=cluster.draw(),
            host=host.name,
            http_port=9400,
            store_port=cluster.port(),
            nproc=cluster.plan.nproc,
            run=stated,
            release=host.versions[0],
            torch=host.versions[1],
        )
        self.membership = Membership(
            store,
            me,
            cluster.plan.ttl_s,
            Port(me.store_port),  # type: ignore[arg-type]
            bind=lambda: Port(cluster.port()),  # type: ignore[arg-type,return-value]
            draw_incarnation=cluster.draw,
        )
        self.observer = WatchCache(store, self.wake, cluster.read_document, run=stated)
        self.look = SlowLook(cluster.storage, cluster.random, self.wake)
        subscriptions = Subscriptions(store, self.observer, self.membership)
        self.cluster_observer = ClusterObserver(
            *(store, self.observer, self.membership, subscriptions, host.memory, self.look),
            *(Probe(cluster), cluster.draw),
        )
        self._recovery = LateRecovery()
        side = StoreSide(
            cache=self.observer,
            membership=self.membership,
            subscriptions=subscriptions,
            observer=self.cluster_observer,
            writer=StoreWriter(store, self.observer, self.membership, self.cluster_observer),
            recovery=self._recovery,
            run=bound,
        )
        self.core = AgentCore(cluster.plan.policy, self, self, side, self, host.clock)
        self._task = cluster.timeline.task(self._run)

    # -- from outside

    def wake(self) -> None:
        """Have the loop look again at once."""
        self._awake = True
        if self._asleep:
            self._asleep = False
            self._woken = True
            self.cluster.timeline.after(0.0, self._resume, self._sleep_id)

    def kill(self) -> None:
        """SIGKILL of the agent: its workers die with it, and nothing is said to anybody."""
        if self.dead:
            return
        self.dead = self.store.dead = True
        if self.worker_group is not None:
            for worker in self.worker_group.workers:
                self.worker_group.kill_one(worker)
        if greenlet.getcurrent() is not self._task:
            self._task.throw()

    def hears_for(self, seconds: float) -> bool:
        """Whether it has been running, in reach of etcd, for so long."""
        etcd, now_s = self.cluster.etcd, self.cluster.timeline.now_s
        since_s = max(self.began_s, self.deaf_until_s, self.host.back_s, etcd.back_s)
        return not self.dead and self.store.well and now_s - since_s > seconds

    @property
    def leaving(self) -> bool:
        return self.core.notice is not None

    def leave(self, reason: str, by_s: float | None = None) -> None:
        """Have this node leave. by_s: it is gone then."""
        self.core.leave(reason, by_s)

    def break_turns(self, count: int, place: Place) -> None:
        """Have the next turns of the loop meet an unexpected error."""
        self._defects = (count, place)

    def _break_at(self, place: Place) -> None:
        count, where = self._defects
        if count and place == where and self._in_turn:
            self._defects = (count - 1, where)
            raise Defect(f"a defect: {place}")

    @property
    def stands_still(self) -> bool:
        """Whether the loop does not run."""
        return self.deaf_until_s > self.cluster.timeline.now_s

    @property
    def goes_on(self) -> bool:
        """Returns whether its workers stay in the world that they are prepared for."""
        prepared = self.worker_group.prepared if self.worker_group is not None else None
        me = self.membership.me
        return prepared is not None and prepared.find(me.node, me.incarnation) is not None

    @property
    def is_left_behind(self) -> bool:
        """Returns whether the others have gone on inside their loops without its workers."""
        return self.worker_group is not None and self.worker_group.switched == "left"

    def _renews(self) -> bool:
        """Returns whether the lease is renewed: not once the loop has stood still for a TTL."""
        still_s = self.cluster.timeline.now_s - self.stalled_s
        return not self.stands_still or still_s <= self.plan.ttl_s

    def stall(self, seconds: float, *, whole: bool) -> None:
        """The loop does not run for so long; whole: nor does anything else of the process."""
        now_s = self.cluster.timeline.now_s
        until_s = now_s + seconds
        self.stalled_s = self.stalled_s if self.stands_still else now_s
        self.deaf_until_s = max(self.deaf_until_s, until_s)
        self.standstills += seconds > self.plan.ttl_s
        if whole:
            self.store.stopped_until_s = self.deaf_until_s

    # -- the loop

    def _run(self) -> None:
        if self.plan.rests:
            self.membership.call_at_lapse(self.wake)
        agreed = self._agree() if self.plan.loses_data else None
        self._join()
        self._recovery.actual = StoreRecovery(
            self._store,
            self.observer,
            self.membership,
            self.cluster_observer,
            agreed,
            lambda text: self.cluster.note(f"{self.host.name}: {text}"),
        )
        if self.exit_code is None:
            self.core.begin()
        while self.exit_code is None:
            self._sit_out()
            self._in_turn = True
            unreadable = self.run_store.unreadable
            seen = self.core.turn()
            self._in_turn = False
            self.exit_code = self.core.exit_code
            unreadable &= self.run_store.unreadable and seen is not None
            self.cluster.rules.turned(self, unreadable=unreadable)
            if self.exit_code is None:
                self._sleep(*(seen or (None, None)))
        self._close()

    def _agree(self) -> Agreed:
        """On the job's token."""
        while True:
            self._sit_out()
            with suppress(StoreUnavailable):
                return agree_on_token(self._store, TOKEN)
            self.cluster.timeline.sleep(JOIN_AGAIN_S)

    def _join(self) -> None:
        while self.exit_code is None:
            self._sit_out()
            try:
                if self.store.read(DONE).entries:
                    self.exit_code = ExitCode.USAGE
                elif self.leaving:
                    self.exit_code = ExitCode.LEFT
                else:
                    self.membership.join(
                        lambda text: self.cluster.note(f"{self.host.name}: {text}"),
                        clock=self.host.clock,
                        sleep=self.cluster.timeline.sleep,
                    )
                    return
            except StoreUnavailable:
                pass
            except RunEnded:
                self.exit_code = ExitCode.SUPERSEDED
            except UserError as error:
                self.cluster.note(f"{self.host.name}: {error}")
                self.cluster.rules.names.is_refused(self)
                self.exit_code = ExitCode.USAGE
            self.cluster.timeline.sleep(JOIN_AGAIN_S)

    def _sit_out(self) -> None:
        while (left_s := self.deaf_until_s - self.cluster.timeline.now_s) > 0:
            self.cluster.timeline.sleep(left_s)

    # -- what the loop reports

    def time_spent(self, view: View, following: World) -> None:
        self.basis = view

    def decided(self, view: View, decision: Decision) -> None:
        self._break_at("decided")
        if decision.reason != self.reason:
            self.reason = decision.reason
            self.cluster.decided(self, view, decision)

    def store_failed(self, error: ElasticZeroError) -> None:
        return

    def turn_failed(self, error: Exception, failures: int) -> None:
        if not isinstance(error, Defect):
            raise error
        self.failures = failures
        self.cluster.note(f"{self.host.name}: {error}")
        self.cluster.rules.cause("loop-error")

    def exits(self, reason: str, *, failed: bool = False) -> None:
        return

    # -- what the loop asks of this node

    def stop_workers(self, reason: str) -> None:
        """See `Agent.stop_workers`; the state that one node holds whole is not saved here."""
        group, policy = self.worker_group, self.plan.policy
        if group is None:
            return
        group.stop(reason, self.host.clock())
        self._settle(lambda: any(worker.alive for worker in group.workers), policy.stop_s)
        group.kill(spare_saving=True)
        self._settle(lambda: any(worker.alive for worker in group.workers), policy.save_s)
        self._settle(lambda: self.saving() or self.unsealed(), policy.save_s)

    def _settle(self, lasts: Callable[[], bool], most_s: float) -> None:
        until_s = self.cluster.timeline.now_s + most_s
        while lasts() and self.cluster.timeline.now_s < until_s:
            self.cluster.timeline.sleep(SETTLE_S)

    def poll(self, now_s: float) -> None:
        """Workers' messages are part of what the group shows."""
        self._break_at("poll")

    def saving(self) -> bool:
        return self.saves > 0

    def keep_only(self, keep: Set[tuple[int, int]]) -> None:
        self.host.memory.keep_only(keep)

    def unsealed(self) -> bool:
        return bool(self.host.memory.drafts)

    def retire(self, world: World) -> None:
        if self.worker_group is not None:
            self.worker_group.kill()
            self.worker_group.group.supersede()

    def start(self, world: World, index: int, now_s: float) -> None:
        if index == 0:
            self.membership.take_store_socket()
        self.worker_group = WorkerGroup(self, world, index)
        self.cluster.rules.starts(self, world, index)

    def prepare_workers(self, world: World, proposal: Proposal) -> None:
        me, group = self.membership.me, self.worker_group
        index = proposal.find(me.node, me.incarnation)
        if index is not None and not world.names(me):
            if group is not None:
                group.kill()
            self.worker_group = WorkerGroup.coming_in(self, world, proposal)
            return
        if index == 0:
            self.membership.take_store_socket()
        if group is not None:
            group.prepare(proposal)

    def enter(self, world: World, now_s: float) -> None:
        if self.worker_group is not None:
            self.worker_group.enter(world)

    def seal_all(self) -> None:
        """What the dead workers have left is sealed."""
        if not self.dead:
            self.host.memory.seal(list(self.host.memory.drafts))
            self.wake()

    def save_held(self, held: SaveHeldSnapshot) -> None:
        """Write parts of a snapshot to storage, again and again until it stands, or another
        generation or save begins."""
        workers = self.worker_group
        if workers is not None:
            workers.group.drop_save()
        self.saves += 1
        written = self.cluster.rules.worlds.get(held.generation)
        token = written.token if written is not None else ""
        name = (held.generation, held.step, held.world_size)

        def lasts() -> bool:
            return self.core.saved_held is held and self.worker_group is workers

        def write() -> None:
            storage = self.storage
            if self.dead:
                return
            world, _ = self.observer.world()
            bad_steps = world.bad_steps if world is not None else ()
            part = Part(
                agent=self,
                name=name,
                token=token,
                ranks=held.ranks,
                replacing=held.step in bad_steps,
                bad_steps=bad_steps,
                lasts=lasts,
            )
            storage.save_part(part)
            wait()

        def wait() -> None:
            storage = self.storage
            stored = storage.steps.get(held.step)
            good = stored is not None and (stored.hidden or not stored.damaged)
            stands = storage.has_all(name) or good
            if stands or not lasts():
                self.saves -= 1
                self.cluster_observer.saved(held.step)
                self.wake()
            elif not self.dead:
                self.cluster.later(0.1, 0.5, write)

        self.cluster.later(0.05, 0.5, write)

    # -- waiting

    def _sleep(self, view: View | None, decision: Decision | None) -> None:
        """Until something happens, or the next timer is due, or a while; looks less often while
        nothing does."""
        timeline, plan = self.cluster.timeline, self.plan
        left_s = 0.0
        if plan.rests and view is not None and decision is not None:
            left_s = self.core.due_s(view, decision) - self.host.clock()
        if (decision is not None and decision.actions) or self._awake:
            self._pause_s = FIRST_PAUSE_S
        elif left_s > 0.0:
            self._pause_s = min(max(left_s, REST_S), plan.poll_s)
        elif view is None or self._woken or self.store.unregistered:
            self._pause_s = REST_S
        else:
            in_round = view.round_s is not None and self.host.clock() - view.round_s < LONG_ROUND_S
            longest_s = min(plan.poll_s, ROUND_PAUSE_S if in_round else LONGEST_PAUSE_S)
            self._pause_s = min(self._pause_s * plan.pause_growth, longest_s)
        self._woken = False
        if not self._awake:
            self._asleep = True
            self._sleep_id += 1
            timeline.after(self._pause_s, self._resume, self._sleep_id)
            timeline.wait()
        self._awake = False

    def _resume(self, sleep_id: int) -> None:
        if sleep_id == self._sleep_id and not self.dead:
            self._sleep_id += 1
            self._asleep = False
            self._task.switch()

    def _close(self) -> None:
        """The process ends by itself."""
        self.dead = True
        self.cluster.left(self)
        if self.worker_group is not None:
            for worker in self.worker_group.workers:
                self.worker_group.kill_one(worker)
        self.membership.close()
        self.store.dead = True
