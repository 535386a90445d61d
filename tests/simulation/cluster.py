"""A whole simulated job: etcd, machines, storage, workers, the faults of a plan, and their end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from elasticzero.channel import Resume
from elasticzero.errors import ExitCode
from elasticzero.launcher.actions import Decision
from elasticzero.launcher.observe import CONTROL, DONE, MEMBERS, WORLD, document
from elasticzero.launcher.store import Entry
from elasticzero.launcher.view import View
from elasticzero.launcher.world import Control, Done, Drain, World, to_bytes
from tests.simulation.agents import Agent, Host
from tests.simulation.etcd import Costs, Etcd
from tests.simulation.rules import Rules
from tests.simulation.schedule import HARMLESS, Fault, Plan
from tests.simulation.storage import Storage
from tests.simulation.timeline import Timeline
from tests.simulation.training import Group

LIVENESS_S = 150.0
"""Once nothing fails any more, a job that has enough nodes is over within this."""
MEND_S = 2.0
EVENTS_KEPT = 60


class Cluster:
    """Everything of one run; the same plan runs the same way each time."""

    def __init__(
        self,
        plan: Plan,
        tell: Callable[[str], None] | None = None,
        random: Random | None = None,
        costs: Costs | None = None,
    ) -> None:
        self.plan = plan
        self.random = random or Random(plan.seed ^ 0x5EED)
        self.timeline = Timeline()
        self.etcd = Etcd(self.timeline, self.random, costs)
        self.storage = Storage(self.timeline, possible=plan.storage)
        self.rules = Rules(self)
        self.hosts: dict[str, Host] = {}
        self.world: World | None = None
        self.done: Done | None = None
        self.history: deque[str] = deque(maxlen=EVENTS_KEPT)
        self.exits: list[tuple[str, ExitCode]] = []
        self._tell = tell
        self._groups: dict[str, Group] = {}
        self._documents: dict[tuple[type, bytes], Any] = {}
        self._ports = 20000
        self._names = 0
        self._calm = False
        self._mends = True
        self.asked = Control()
        """By operators."""
        self.etcd.written = self._written
        self.etcd.removed = self._removed
        self.storage.committed = self.rules.committed

    # -- what agents and workers use

    def later(self, least_s: float, most_s: float, call: Callable[..., Any], *args: Any) -> None:
        self.timeline.after(self.random.uniform(least_s, most_s), call, *args)

    def draw(self) -> str:
        return f"{self.random.getrandbits(40):010x}"

    def port(self) -> int:
        self._ports += 1
        return self._ports

    def read_document(self, kind: type[Any], data: bytes) -> Any:
        """What `Observer` reads, once for all agents: documents never change."""
        key = (kind, data)
        found = self._documents.get(key)
        if found is None:
            found = self._documents[key] = document(kind, data)
        return found

    def group(self, world: World) -> Group:
        """The process group of a world, which its token names."""
        if world.token not in self._groups:
            self._groups[world.token] = Group(self, world)
        return self._groups[world.token]

    def unreadable(self, resume: Resume, reader: Host) -> tuple[str, str, int | None] | None:
        """Why a worker on `reader` cannot read the state it is to start from: blame, message and
        the damaged step; None where it can."""
        if resume.tier == "storage":
            if self.storage.good(resume.step):
                return None
            return "checkpoint", f"step {resume.step} is damaged", resume.step
        by_rank: dict[int, bool] = {}
        for source in resume.sources:
            host = self.hosts[source.node]
            near = host is reader
            if near or (host.serves and not reader.dark):
                size = len({s.rank for s in resume.sources})
                has = host.memory.has((resume.generation, resume.step, size), source.rank)
                by_rank[source.rank] = by_rank.get(source.rank, False) or has
            else:
                by_rank.setdefault(source.rank, False)
        if all(by_rank.values()):
            return None
        return "environment", "a shard of the snapshot cannot be read", None

    def note(self, text: str) -> None:
        """Something happened."""
        line = f"{self.timeline.now_s:9.3f}  {text}"
        self.history.append(line)
        if self._tell is not None:
            self._tell(line)

    def decided(self, agent: Agent, view: View, decision: Decision) -> None:
        did = ", ".join(type(action).__name__ for action in decision.actions)
        self.note(f"{agent.host.name}: {decision.reason}{f'  [{did}]' if did else ''}")

    def left(self, agent: Agent) -> None:
        assert agent.exit_code is not None
        self.note(f"{agent.host.name}: exits with {agent.exit_code.name}")
        self.exits.append((agent.host.name, agent.exit_code))
        self.rules.exits(agent)
        agent.host.memory.keep_only(())

    def _written(self, key: str, entry: Entry) -> None:
        if key == WORLD:
            before, self.world = self.world, document(World, entry.value)
            self.note(f"etcd: {_told(self.world)}")
            self.rules.world_written(before, self.world)
        elif key == DONE:
            self.done = document(Done, entry.value)
            self.note(f"etcd: done: {self.done.reason}")
            self.rules.done_written(self.done)
        else:
            if key.startswith(MEMBERS):
                self.note(f"etcd: {key.removeprefix(MEMBERS)} is registered")
            self.rules.put(key, entry)

    def _removed(self, key: str, entry: Entry) -> None:
        if key.startswith(MEMBERS):
            self.note(f"etcd: the registration of {key.removeprefix(MEMBERS)} is gone")
        self.rules.removed(key, entry)

    # -- the run

    def run(self) -> None:
        """The whole plan; raises `Violation` where a rule is broken."""
        for fault in self.plan.faults:
            self.timeline.after(fault.at_s, self._strike, fault)
        self.begin(max(self.plan.faults_end_s, self.plan.apart_s + 0.1))

    def begin(self, calm_s: float, *, mends: bool = True) -> None:
        """Let the nodes come, and run to the end. calm_s: no fault comes after that; then `mends`
        says whether agents start again and enough nodes come."""
        for _ in range(self.plan.nodes):
            self.later(0.0, self.plan.apart_s, self.add_node)
        self._mends = mends
        self.timeline.after(calm_s, self._calm_down)
        if not self.timeline.run(calm_s + LIVENESS_S, lambda: self.over):
            self.rules.stuck()
        self.rules.at_the_end()

    @property
    def over(self) -> bool:
        """Nothing more will happen."""
        ended = self.done is not None or not self._mends
        return self._calm and ended and not self.running()

    def running(self) -> list[Agent]:
        agents = [h.agent for h in self.hosts.values() if h.agent is not None]
        return [agent for agent in agents if not agent.dead]

    def add_node(self) -> Host:
        number = self._names + self.plan.names_from if self._names else 1
        self._names += 1
        host = Host(self, f"node-{number}")
        self.hosts[host.name] = host
        host.agent = Agent(self, host)
        return host

    def _calm_down(self) -> None:
        """No fault comes any more; enough nodes are there."""
        self._calm = True
        self._mend()

    def _mend(self) -> None:
        """Machines whose agents are gone start them again, and nodes come where too few are."""
        if self.done is not None or not self._mends:
            return
        for host in list(self.hosts.values()):
            if not host.lost and (host.agent is None or host.agent.dead):
                host.agent = Agent(self, host)
        while sum(not h.lost for h in self.hosts.values()) < self.plan.limits.min_nodes:
            self.add_node()
        self.rules.registered(self.running())
        self.timeline.after(MEND_S, self._mend)

    # -- faults

    def _strike(self, fault: Fault) -> None:
        """A fault of the plan, on the node it picks."""
        agents = self.running()
        agent = agents[int(fault.pick * len(agents))] if agents else None
        self.strike(fault.kind, agent, fault.seconds, hidden=fault.pick < 0.5)

    def strike(
        self, kind: str, agent: Agent | None, seconds: float = 0.0, *, hidden: bool = False
    ) -> None:
        """A fault. agent: of the node that it strikes, where it strikes one. hidden: of damage."""
        if self.done is not None:
            return
        lasts = f" for {seconds:.1f} s" if seconds else ""
        if kind not in HARMLESS:
            self.rules.cause(kind)
        match kind:
            case "pause-etcd" | "kill-etcd":
                self.note(f"-- {kind}{lasts}")
                self.etcd.stop("paused" if kind == "pause-etcd" else "killed", seconds)
            case "join":
                self.note("-- join")
                self.add_node()
            case "stop":
                self.note("-- stop")
                self._operate(stop=True)
            case _ if kind.startswith("scale:"):
                self.note(f"-- {kind}")
                _, least, most = kind.split(":")
                self._operate(nnodes=(int(least), int(most)))
            case "damage":
                self.note("-- the newest checkpoint is damaged")
                self.storage.damage(hidden=hidden)
            case _ if agent is not None:
                self.note(f"-- {kind} {agent.host.name}{lasts}")
                getattr(self, "_" + kind.replace("-", "_"))(agent, seconds)

    def _kill_worker(self, agent: Agent, seconds: float) -> None:
        if agent.gang is not None:
            agent.gang.kill_one(self.random.choice(agent.gang.workers))

    def _hang_worker(self, agent: Agent, seconds: float) -> None:
        if agent.gang is None:
            return
        worker = self.random.choice(agent.gang.workers)
        if worker.alive and not worker.stopping:
            worker.deaf = True
            self.timeline.after(seconds, self._unhang, worker)

    def _unhang(self, worker: Any) -> None:
        if worker.deaf:
            worker.deaf = False
            if worker.gang.aborted_s is not None:
                worker.gang._abort(worker)
            elif worker.group.broken:
                worker.group._notice(worker)
            else:
                worker.group.look_again()

    def _crash_worker(self, agent: Agent, seconds: float) -> None:
        if agent.gang is not None:
            worker = self.random.choice(agent.gang.workers)
            if worker.phase == "training":
                agent.gang.fail(worker, "user", "RuntimeError: out of luck")

    def _kill_agent(self, agent: Agent, seconds: float) -> None:
        agent.kill()
        self.later(0.1, 3.0, self._restart, agent.host)

    def _restart(self, host: Host) -> None:
        if not host.lost and (host.agent is None or host.agent.dead) and self.done is None:
            self.note(f"-- {host.name} starts again")
            host.agent = Agent(self, host)

    def _lose_node(self, agent: Agent, seconds: float) -> None:
        agent.kill()
        agent.host.lost = True

    def _lose_node_silently(self, agent: Agent, seconds: float) -> None:
        agent.host.silent = True
        agent.host.dark = True
        self._lose_node(agent, seconds)

    def _drain(self, agent: Agent, seconds: float) -> None:
        agent.host.lost = True  # once it has left
        me = agent.membership.me
        self._operate(drain=(Drain(node=me.node, incarnation=me.incarnation),))

    def _operate(self, **asked: Any) -> None:
        """An operator asks for something more."""
        self.asked = replace(self.asked, **asked)
        self.etcd.write({CONTROL: to_bytes(self.asked)}, (), (), 0)

    def _sigterm(self, agent: Agent, seconds: float) -> None:
        grace_s = self.random.uniform(1.0, 8.0)
        agent.leave("SIGTERM", agent.host.clock() + grace_s)
        self.timeline.after(grace_s, agent.kill)

    def _fade(self, agent: Agent, seconds: float) -> None:
        """etcd is away for longer than leases live, a node does not find it again, and is lost
        without a word some time later."""
        self.etcd.stop("paused", self.plan.ttl_s * 2.0)
        self._cut_from_etcd(agent, 60.0)
        self.later(2.0, 12.0, self._lose_node_silently, agent, 0.0)

    def _cut_from_etcd(self, agent: Agent, seconds: float) -> None:
        self._set_cut(agent.host, True)
        self.timeline.after(seconds, self._set_cut, agent.host, False)

    def _cut_from_peers(self, agent: Agent, seconds: float) -> None:
        agent.host.dark = True
        self.timeline.after(seconds, self._in_reach, agent.host)

    def _cut_off(self, agent: Agent, seconds: float) -> None:
        self._cut_from_etcd(agent, seconds)
        self._cut_from_peers(agent, seconds)

    def _set_cut(self, host: Host, cut: bool) -> None:
        host.cut = cut
        if not cut:
            self.rules.came_back()
        if host.agent is not None:
            host.agent.store.cut = cut

    def _in_reach(self, host: Host) -> None:
        host.dark = host.silent
        agent = host.agent
        if agent is not None and agent.gang is not None:
            agent.gang.group.look_again()

    def _slow_agent(self, agent: Agent, seconds: float) -> None:
        agent.stall(seconds, whole=False)
        self.timeline.after(seconds, self.rules.came_back)

    def _stop_agent(self, agent: Agent, seconds: float) -> None:
        agent.stall(seconds, whole=True)
        self.timeline.after(seconds, self.rules.came_back)


def _told(world: World) -> str:
    """A world in one line."""
    names = [member.node for member in world.members]
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    start = {"fresh": "from the start", "ram": "from step {} in memory", "storage": "from step {}"}
    where = start[world.resume.tier].format(world.resume.step)
    return f"generation {world.generation} of {shown} {where}: {world.reason}"
