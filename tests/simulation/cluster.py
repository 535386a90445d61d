"""A whole simulated job: etcd, machines, storage, workers, the faults of a plan, and their end."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

from elasticzero.errors import ExitCode, StoreUnavailable
from elasticzero.ipc.assignment import Resume
from elasticzero.launcher.protocol.actions import Decision
from elasticzero.launcher.protocol.documents import FIRST_RUN, Control, Done, Run, World, to_bytes
from elasticzero.launcher.protocol.policy import with_operator_overrides
from elasticzero.launcher.protocol.view import View
from elasticzero.launcher.store.api import Entry
from elasticzero.launcher.store.decoding import document
from elasticzero.launcher.store.job_run import RUN, number_in
from elasticzero.launcher.store.watch_cache import (
    ALARM,
    CONTROL,
    DONE,
    MEMBERS,
    NEXT,
    WORLD,
    reports_of,
)
from tests.simulation.agents import Agent, BadInput, Host
from tests.simulation.etcd import Costs, Etcd
from tests.simulation.faults import Faults
from tests.simulation.phases import PhasedStorage
from tests.simulation.rules import Rules
from tests.simulation.schedule import Plan
from tests.simulation.storage import Storage
from tests.simulation.timeline import Timeline
from tests.simulation.training import Group

LIVENESS_S = 150.0
"""Once nothing fails any more, a job that has enough nodes is over within this."""
MOST_EVENTS = 2_000_000
MEND_S = 2.0
AGAIN_S = 0.5
"""So often an operator looks whether the job, or an agent, can be begun again."""
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
        self.storage = self._empty_storage()
        self.rules = Rules(self)
        self._faults = Faults(self)
        self.hosts: dict[str, Host] = {}
        """By name: of several machines of one name, the one that was registered last."""
        self.namesakes: list[Host] = []
        """The other ones."""
        self.world: World | None = None
        """The last one that was written."""
        self._stands: World | None = None
        """The one that etcd holds."""
        self.when_written: Callable[[World], None] | None = None
        """Called with each world that is written."""
        self.done: Done | None = None
        self.run_number = FIRST_RUN
        """Of the job's present run."""
        self.first_end: Done | None = None
        """That of the run before."""
        self.at_switch: Callable[[], None] | None = None
        """Called when workers next go over to another world inside their loops."""
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
        self.etcd.restored = self._restored
        self.storage.committed = self.rules.committed

    def _empty_storage(self) -> Storage:
        """The checkpoint directory of a run."""
        plan = self.plan
        if not plan.phased:
            return Storage(self.timeline, possible=plan.storage)

        def require(so: bool, rule: str, text: str) -> None:
            self.rules.require(so, rule, text)

        return PhasedStorage(self.timeline, Random(f"{plan.seed} phases"), plan.keep, require)

    # -- what agents and workers use

    def later(self, least_s: float, most_s: float, call: Callable[..., Any], *args: Any) -> None:
        self.timeline.after(self.random.uniform(least_s, most_s), call, *args)

    def draw(self) -> str:
        return f"{self.random.getrandbits(40):010x}"

    def port(self) -> int:
        self._ports += 1
        return self._ports

    def read_document(self, kind: type[Any], data: bytes) -> Any:
        """What `WatchCache` reads, once for all agents: documents never change."""
        key = (kind, data)
        cached = self._documents.get(key)
        if cached is None:
            cached = self._documents[key] = document(kind, data)
        return cached

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
        name = (resume.generation, resume.step, len({s.rank for s in resume.sources}))
        for source in resume.sources:
            host = self.hosts[source.node]
            near = host is reader
            if near or (host.serves and not reader.dark):
                has = host.memory.has(name, source.rank)
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
        self.rules.wrote(self.etcd.writer, key)
        if key == WORLD:
            before, after = self._stands, document(World, entry.value)
            self.note(f"etcd: {_told(after)}")
            self.rules.writes(before, after)
            self.world = self._stands = after
            if self.when_written is not None:
                self.when_written(after)
        elif key == DONE:
            if self.done is not None and self.etcd.losses:
                return  # it was lost, and stands again
            self.done = document(Done, entry.value)
            self.note(f"etcd: done: {self.done.reason}")
            self.rules.done_written(self.done)
            if self.run_number < self.plan.runs:
                self.timeline.after(AGAIN_S, self._begin_again)
        elif key != RUN:
            if key.startswith(MEMBERS):
                self.note(f"etcd: {key.removeprefix(MEMBERS)} is registered")
                self._note_name(key.removeprefix(MEMBERS))
            self.rules.put(key, entry)

    def _note_name(self, name: str) -> None:
        """A machine registers by a name that was another's."""
        for host in self.namesakes:
            writes = host.agent is not None and host.agent.store is self.etcd.writer
            if writes and host.name == name:
                self.note(f"-- another machine is {name} from now on")
                self.namesakes.remove(host)
                self.namesakes.append(self.hosts[name])
                self.hosts[name] = host
                return

    def _removed(self, key: str, entry: Entry) -> None:
        if key.startswith(MEMBERS):
            self.note(f"etcd: the registration of {key.removeprefix(MEMBERS)} is gone")
        elif key == WORLD:
            self._stands = None
        elif key == DONE and not self.etcd.losing and self.done is not None:
            self.note("etcd: the end is gone: it was that of another history")
            self.done = None
            self.rules.goes_on()
        self.rules.removed(key, entry)

    def _restored(self, key: str, entry: Entry) -> None:
        """A backup brings a key back."""
        if key == WORLD:
            self._stands = document(World, entry.value)
        elif key.startswith(MEMBERS):
            self.rules.put(key, entry)

    # -- the run

    def run(self) -> None:
        """The whole plan; raises `Violation` where a rule is broken."""
        for fault in self.plan.faults:
            self.timeline.after(fault.at_s, self._faults.happen, fault)
        self.begin(max(self.plan.faults_end_s, self.plan.apart_s + 0.1))

    def begin(self, calm_s: float, *, mends: bool = True) -> None:
        """Let the nodes come, and run to the end. calm_s: no fault comes after that; then `mends`
        says whether agents start again and enough nodes come."""
        for _ in range(self.plan.nodes):
            self.later(0.0, self.plan.apart_s, self.add_node)
        self._mends = mends
        self.timeline.most_events = MOST_EVENTS
        self.timeline.after(calm_s, self._calm_down)
        if not self.timeline.run(calm_s + LIVENESS_S, lambda: self.over):
            self.rules.stuck()
        self.rules.at_the_end()

    def _begin_again(self) -> None:
        """An operator begins the job again, once no node of it is registered: `--restart`."""
        if self.etcd.state != "up" or self.etcd.read(MEMBERS).entries:
            self.timeline.after(AGAIN_S, self._begin_again)
            return
        documents = [
            DONE,
            WORLD,
            CONTROL,
            NEXT,
            *(f"{ALARM}{number}" for number in self.rules.worlds),
        ]
        documents += [reports_of(number) for number in self.rules.worlds]
        self.first_end, self.done, self.world, self._stands = self.done, None, None, None
        self.run_number += 1
        self.asked = Control()
        self.storage = self._empty_storage()
        self.rules = Rules(self)
        self.storage.committed = self.rules.committed
        self.etcd.writer = None
        self.note("etcd: the job is begun again")
        following = to_bytes(Run(number=self.run_number))
        self.etcd.write({RUN: following}, documents, (), 0)
        for host in list(self.hosts.values()):
            host.bad_input, host.faults_left = "", 0  # its machine was mended
            self.begin_agent(host)
        if self._calm:
            self._mend()

    @property
    def over(self) -> bool:
        """Nothing more will happen."""
        ended = self.done is not None and self.run_number == self.plan.runs
        ended |= not self._mends
        return self._calm and ended and not self.running()

    def running(self) -> list[Agent]:
        hosts = (*self.hosts.values(), *self.namesakes)
        agents = [host.agent for host in hosts if host.agent is not None]
        return [agent for agent in agents if not agent.dead]

    def add_node(self, bad_input: BadInput = "") -> Host:
        number = self._names + self.plan.names_from if self._names else 1
        self._names += 1
        host = Host(self, f"node-{number}")
        host.bad_input = bad_input
        host.release = self.plan.release_of(self._names)
        host.versions = self.plan.versions_of(self._names)
        self.hosts[host.name] = host
        self.begin_agent(host)
        return host

    def begin_agent(self, host: Host) -> None:
        """Have an agent begin on a machine that is there and has none: at once, or as soon as the
        number of the run can be read."""
        if host.lost or (host.agent is not None and not host.agent.dead):
            return
        if self.has_readable_run:
            host.agent = Agent(self, host)
        else:
            self.timeline.after(AGAIN_S, self.begin_agent, host)

    @property
    def has_readable_run(self) -> bool:
        """Whether the number of the run can be read in etcd."""
        with suppress(StoreUnavailable):
            return number_in(self.etcd.read(RUN).entries.get(RUN)) > 0
        return False

    def add_namesake(self, name: str) -> None:
        """Another machine comes, by the name of one that is there."""
        host = Host(self, name)
        self.namesakes.append(host)
        self.begin_agent(host)

    def _most_alike(self) -> int:
        """Counts the machines that are well and have the build that most of these have."""
        well = [host.versions for host in self.hosts.values() if not (host.lost or host.bad_input)]
        return max(Counter(well).values(), default=0)

    def _calm_down(self) -> None:
        """No fault comes any more; enough nodes are there."""
        self._calm = True
        self._mend()

    def _mend(self) -> None:
        """Machines whose agents are gone start them again, and nodes come where too few are."""
        if self.done is not None or not self._mends:
            return
        for host in list(self.hosts.values()):
            self.begin_agent(host)
        least = with_operator_overrides(self.plan.policy, self.asked).min_nodes
        while self._most_alike() < least:
            self.add_node()
        self.rules.registered(self.running())
        self.timeline.after(MEND_S, self._mend)

    def strike(
        self, kind: str, agent: Agent | None, seconds: float = 0.0, *, hidden: bool = False
    ) -> None:
        """A fault: see `Faults.strike`."""
        self._faults.strike(kind, agent, seconds, hidden=hidden)


def _told(world: World) -> str:
    """A world in one line."""
    names = [member.node for member in world.members]
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    start = {"fresh": "from the start", "ram": "from step {} in memory", "storage": "from step {}"}
    start["live"] = "inside the loops after step {}"
    where = start[world.resume.tier].format(world.resume.step)
    return f"generation {world.generation} of {shown} {where}: {world.reason}"
