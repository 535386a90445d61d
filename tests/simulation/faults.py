"""What can happen to a simulated job, and what an operator can ask of it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from elasticzero.launcher.protocol.documents import Drain, Run, World, to_bytes
from elasticzero.launcher.store.job_run import RUN
from elasticzero.launcher.store.watch_cache import CONTROL, MEMBERS, WORLD
from tests.simulation.agents import Agent, Host
from tests.simulation.schedule import HARMLESS, Fault
from tests.simulation.training import Worker

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.storage import Part

BAD_FOR = 6
"""A bad machine's workers fail so often at most."""
NEVER_RESUMED_S = 4.5
"""A worker that a signal suspends for so long is not resumed at all: its agent is to replace it."""
LOOK_AGAIN_S = 0.02
ASK_AGAIN_S = 0.3
"""An operator tries so often until etcd answers."""
RESTORED_S = 0.9
"""For so long etcd is away when a backup is restored that lacks a node's registration."""
ODD = b"{not a run"
OPERATORS = ("join", "join-bad", "join-backed-up", "drain-newcomer", "stop", "scale", "odd-run")
"""What operators do, rightly or wrongly."""

REFUSES_S = 0.8
"""For so long storage takes no writes when the last checkpoint is to fail."""
SWITCH_KINDS = (
    *("kill-worker", "kill-agent", "lose-node-silently", "hang-worker", "cut-from-etcd"),
    *("stop-agent", "pause-etcd", "kill-etcd", "cut-off"),
)
SWITCH_S = 0.06
"""It fails so much later at most: within a message to the agent, and its write."""
ALL_LOST_SHARE, ALL_LOST_S = 0.1, 0.02
"""Share of the switches at which all agents that go on fail, and the seconds within which they do:
mostly before any has written the world."""


class Faults:
    """Makes things happen to one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._timeline = cluster.timeline
        self._random = cluster.random

    def happen(self, fault: Fault) -> None:
        """A fault of the plan, on the node it picks."""
        agents = self._cluster.running()
        agent = agents[int(fault.pick * len(agents))] if agents else None
        self.strike(fault.kind, agent, fault.seconds, hidden=fault.pick < 0.5)

    def strike(
        self, kind: str, agent: Agent | None, seconds: float = 0.0, *, hidden: bool = False
    ) -> None:
        """agent: of the node that it strikes, where it strikes one. hidden: of damage."""
        cluster = self._cluster
        if cluster.done is not None:
            return
        lasts = f" for {seconds:.1f} s" if seconds else ""
        cluster.rules.promises.struck(kind)
        if kind not in HARMLESS and kind != "at-switch":  # what it brings about may be a cause
            cluster.rules.cause(kind)
        match kind:
            case "pause-etcd" | "kill-etcd":
                cluster.note(f"-- {kind}{lasts}")
                cluster.etcd.stop("paused" if kind == "pause-etcd" else "killed", seconds)
            case "back-up-etcd":
                cluster.note("-- back-up-etcd")
                cluster.etcd.back_up()
            case "wipe-etcd" | "restore-etcd":
                cluster.note(f"-- {kind}{lasts}")
                self._lose_data(kind, seconds, renamed=hidden)
            case "damage":
                cluster.note("-- the newest checkpoint is damaged")
                cluster.storage.damage(hidden=hidden)
            case "storage-away":
                cluster.note(f"-- {kind}{lasts}")
                cluster.storage.go_away(seconds)
            case "freeze-writer":
                cluster.note(f"-- {kind}{lasts}")
                self._freeze_writer(seconds)
            case "freeze-committer":
                cluster.note(f"-- {kind}{lasts}")
                cluster.storage.before_manifest = partial(self._freeze_committer, seconds)
            case "freeze-holder":
                cluster.note(f"-- {kind}{lasts}")
                cluster.storage.before_persist = partial(self._freeze_holder, seconds)
            case "at-switch":
                cluster.note(f"-- {kind}{lasts}")
                cluster.at_switch = partial(self._strike_switch, seconds)
            case "kill-saver":
                cluster.note(f"-- {kind}{lasts}")
                cluster.storage.before_part = self._kill_saver
            case "kill-source":
                cluster.note(f"-- {kind}{lasts}")
                cluster.when_written = partial(self._kill_source, seconds)
            case "sigterm-leader":
                self._strike(kind, self._leader() or agent, seconds)
            case _ if kind.partition(":")[0] in OPERATORS:
                self._operators(kind, seconds)
            case _ if agent is not None:
                self._strike(kind, agent, seconds)

    def _operators(self, kind: str, seconds: float) -> None:
        """What an operator does: nodes come, or the job is asked for something."""
        cluster = self._cluster
        verb, _, rest = kind.partition(":")
        if verb == "scale" and not rest:
            least = self._random.randint(1, 4)
            kind = f"scale:{least}:{least + self._random.randint(0, 4)}"
        cluster.note(f"-- {kind} for {seconds:.1f} s" if seconds else f"-- {kind}")
        match verb:
            case "join-bad":
                cluster.add_node(rest)  # type: ignore[arg-type]
            case "join":
                cluster.add_node()
            case "join-backed-up":
                self._lose_registration(cluster.add_node().agent, seconds)
            case "drain-newcomer":
                self._drain_registered(cluster.add_node().agent, seconds)
            case "stop":
                self._operate(stop=True)
            case "scale":
                fewest, most = kind.split(":")[1:]
                self._operate(nnodes=(int(fewest), int(most)))
            case "odd-run":
                self._break_run(seconds)

    def _lose_data(self, kind: str, seconds: float, *, renamed: bool) -> None:
        """etcd comes back with other data after so long. renamed: as another cluster."""
        etcd = self._cluster.etcd
        backup = etcd.backups[-1] if kind == "restore-etcd" and etcd.backups else None
        cluster = etcd.cluster + 1 if renamed else etcd.cluster

        def lose() -> None:
            if self._cluster.done is None:
                etcd.lose_data(backup, cluster=cluster)

        if seconds and etcd.state == "up":
            etcd.stop("killed", seconds)
        self._timeline.after(seconds / 2, lose)

    def _strike(self, kind: str, agent: Agent | None, seconds: float) -> None:
        if agent is not None:
            lasts = f" for {seconds:.1f} s" if seconds else ""
            self._cluster.note(f"-- {kind} {agent.host.name}{lasts}")
            getattr(self, "_" + kind.replace("-", "_"))(agent, seconds)

    def _leader(self) -> Agent | None:
        """Of the first member of the world that lives."""
        world = self._cluster.world
        hosts = [self._cluster.hosts[m.node] for m in world.members] if world is not None else []
        return next((h.agent for h in hosts if h.agent is not None and not h.agent.dead), None)

    def _worker(self, agent: Agent) -> Worker | None:
        """One of the node's, drawn."""
        return (
            self._random.choice(agent.worker_group.workers)
            if agent.worker_group is not None
            else None
        )

    # -- workers

    def _kill_worker(self, agent: Agent, seconds: float) -> None:
        worker = self._worker(agent)
        if worker is not None:
            worker.worker_group.crash(worker)

    def _hang_worker(self, agent: Agent, seconds: float) -> None:
        worker = self._worker(agent)
        if worker is not None and worker.alive and not worker.stopping:
            worker.deaf = True
            worker.hang = self._random.choice(["stopped", "locked", "loop"])
            worker.hung_s = self._timeline.now_s
            if worker.hang != "stopped" or seconds < NEVER_RESUMED_S:
                self._timeline.after(seconds, self._unhang, worker)

    def _unhang(self, worker: Worker) -> None:
        if worker.deaf:
            worker.deaf, worker.hang = False, ""
            if worker.worker_group.aborted_s is not None:
                worker.worker_group.abort(worker)
            elif worker.group.broken:
                worker.group.notice(worker)
            else:
                worker.group.look_again()

    def _busy_worker(self, agent: Agent, seconds: float) -> None:
        """It is in a section of its own for longer than a step may last, and says so."""
        worker = self._worker(agent)
        if worker is not None and worker.phase == "training" and not worker.deaf:
            worker.busy = True
            worker.worker_group.progress(worker)
            self._timeline.after(seconds, self._busy_no_more, worker)

    def _busy_no_more(self, worker: Worker) -> None:
        if worker.busy:
            worker.busy = False
            self._cluster.rules.promises.disturbed()
            worker.worker_group.progress(worker)
            worker.worker_group.wake()
            worker.group.look_again()

    def _deadlock(self, agent: Agent, seconds: float) -> None:
        """The ranks wait for each other; before the first step that is found after half an hour."""
        if agent.worker_group is not None and agent.worker_group.group.stepped_s is not None:
            agent.worker_group.group.stuck = True

    def _crash_worker(self, agent: Agent, seconds: float) -> None:
        worker = self._worker(agent)
        if worker is not None and worker.phase == "training":
            worker.worker_group.fail(worker, "user", "RuntimeError: out of luck")

    def _bad_node(self, agent: Agent, seconds: float) -> None:
        """Its workers fail, one generation after another."""
        agent.host.faults_left = self._random.randint(2, BAD_FOR)
        agent.host.dies = agent.host.faults_left % 2 == 0
        worker = self._worker(agent)
        if worker is not None:
            agent.host.breaks(worker)

    def _outage_and_failure(self, agent: Agent, seconds: float) -> None:
        """etcd is away for longer than leases live, and a worker fails meanwhile."""
        away_s = self._cluster.plan.ttl_s * self._random.uniform(1.2, 2.5)
        self._cluster.etcd.stop(self._random.choice(["paused", "killed"]), away_s)
        self._cluster.later(0.0, away_s, self._kill_worker, agent, 0.0)

    # -- nodes

    def _kill_agent(self, agent: Agent, seconds: float) -> None:
        agent.kill()
        self._cluster.later(0.1, 3.0, self._restart, agent.host)

    def _restart(self, host: Host) -> None:
        gone = host.agent is None or host.agent.dead
        if not host.lost and gone and self._cluster.done is None:
            self._cluster.note(f"-- {host.name} starts again")
            self._cluster.begin_agent(host)

    def _lose_node(self, agent: Agent, seconds: float) -> None:
        agent.kill()
        agent.host.lost = True

    def _lose_node_silently(self, agent: Agent, seconds: float) -> None:
        if agent.dead:
            return  # its machine may be that of a later run's agent by now
        agent.host.silent = True
        agent.host.dark = True
        self._lose_node(agent, seconds)

    def _drain(self, agent: Agent, seconds: float) -> None:
        agent.host.lost = True  # once it has left
        me = agent.membership.me
        self._operate(drain=Drain(node=me.node, incarnation=me.incarnation))

    def _lose_registration(self, agent: Agent | None, seconds: float) -> None:
        """etcd is backed up when a node that comes has its lease, and is not registered yet; the
        backup is restored some seconds later, and the others are told of that before the node."""
        if agent is None:
            return
        agent.store.freeze_before(1, self._cluster.etcd.back_up, prefix=MEMBERS)
        self._timeline.after(seconds, self._cut_from_etcd, agent, 2 * RESTORED_S)
        self._timeline.after(seconds, self._restore_data)

    def _restore_data(self) -> None:
        self._lose_data("restore-etcd", RESTORED_S, renamed=False)

    def _drain_registered(self, agent: Agent | None, seconds: float) -> None:
        """A node that has just come is drained, and does not hear of it for a while."""
        if agent is None or agent.dead:
            return
        me = agent.membership.me
        if f"{MEMBERS}{me.node}" in self._cluster.etcd.read(MEMBERS).entries:
            self._slow_agent(agent, seconds)
            self._drain(agent, 0.0)
        else:
            self._timeline.after(LOOK_AGAIN_S, self._drain_registered, agent, seconds)

    def _break_run(self, seconds: float) -> None:
        """Somebody puts what cannot be read in the place of the run's number, for a while."""
        if self._set_run(ODD):
            self._timeline.after(seconds, self._mend_run)
        else:
            self._timeline.after(ASK_AGAIN_S, self._break_run, seconds)

    def _mend_run(self) -> None:
        if not self._set_run(to_bytes(Run(number=self._cluster.run_number))):
            self._timeline.after(ASK_AGAIN_S, self._mend_run)

    def _set_run(self, value: bytes) -> bool:
        """Writes the number of the run; returns whether etcd answers."""
        cluster = self._cluster
        if cluster.etcd.state != "up":
            return False
        cluster.note(f"etcd: the number of the run is {value.decode()}")
        cluster.etcd.writer = None
        cluster.etcd.write({RUN: value}, (), (), 0)
        cluster.rules.came_back()
        return True

    def _operate(self, drain: Drain | None = None, **asked: Any) -> None:
        """An operator asks for something more, and tries until etcd answers."""
        cluster = self._cluster
        if cluster.etcd.state != "up":
            self._timeline.after(ASK_AGAIN_S, lambda: self._operate(drain, **asked))
        elif cluster.done is None:
            before = cluster.asked
            drains = (*before.drain, *([drain] if drain is not None else []))
            scaled = before.scaled + ("nnodes" in asked)
            cluster.asked = replace(before, **asked, drain=drains, scaled=scaled)
            cluster.etcd.writer = None
            cluster.etcd.write({CONTROL: to_bytes(cluster.asked)}, (), (), 0)
            cluster.rules.asked(cluster.asked)

    def _sigterm(self, agent: Agent, seconds: float) -> None:
        grace_s = self._random.uniform(1.0, 8.0)
        agent.leave("SIGTERM", agent.host.clock() + grace_s)
        self._timeline.after(grace_s, agent.kill)

    _sigterm_leader = _sigterm

    def _sigterm_two(self, agent: Agent, seconds: float) -> None:
        """Two nodes are told at once."""
        self._sigterm(agent, seconds)
        others = [other for other in self._cluster.running() if other is not agent]
        if others:
            self._sigterm(self._random.choice(others), seconds)

    def _sigterm_again(self, agent: Agent, seconds: float) -> None:
        """A node is told twice, the second time with another deadline."""
        self._sigterm(agent, seconds)
        self._cluster.later(0.0, 0.5, self._sigterm, agent, seconds)

    # -- ways

    def _fade(self, agent: Agent, seconds: float) -> None:
        """etcd is away for longer than leases live, a node does not find it again, and is lost
        without a word some time later."""
        self._cluster.etcd.stop("paused", self._cluster.plan.ttl_s * 2.0)
        self._cut_from_etcd(agent, 60.0)
        self._cluster.later(2.0, 12.0, self._lose_node_silently, agent, 0.0)

    def _cut_from_etcd(self, agent: Agent, seconds: float) -> None:
        self._set_cut(agent.host, True)
        self._timeline.after(seconds, self._set_cut, agent.host, False)

    def _cut_from_peers(self, agent: Agent, seconds: float) -> None:
        agent.host.dark = True
        self._timeline.after(seconds, self._in_reach, agent.host)

    def _cut_off(self, agent: Agent, seconds: float) -> None:
        self._cut_from_etcd(agent, seconds)
        self._cut_from_peers(agent, seconds)

    def _set_cut(self, host: Host, cut: bool) -> None:
        host.cut = cut
        if not cut:
            host.back_s = self._timeline.now_s
            self._cluster.rules.came_back()
        if host.agent is not None:
            host.agent.store.cut = cut

    def _in_reach(self, host: Host) -> None:
        host.dark = host.silent
        agent = host.agent
        if agent is not None and agent.worker_group is not None:
            agent.worker_group.group.look_again()

    def _slow_agent(self, agent: Agent, seconds: float) -> None:
        agent.stall(seconds, whole=False)
        self._timeline.after(seconds, self._cluster.rules.came_back)

    def _stop_agent(self, agent: Agent, seconds: float) -> None:
        agent.stall(seconds, whole=True)
        self._timeline.after(seconds, self._cluster.rules.came_back)

    def _same_name(self, agent: Agent, seconds: float) -> None:
        """Another machine has the name of this one."""
        self._cluster.add_namesake(agent.host.name)

    def _loop_error(self, agent: Agent, seconds: float) -> None:
        """Some turns of its loop, one after another, meet an error that nobody expects."""
        count = self._random.choice([1, 1, 2, 3, 3])
        agent.break_turns(count, self._random.choice(["poll", "decided", "request"]))

    def _freeze_agent(self, agent: Agent, seconds: float) -> None:
        """Between two of its own writes, soon."""
        freeze = partial(self._freeze, agent, seconds, "a write")
        agent.store.freeze_before(self._random.randint(1, 3), freeze)

    def _strike_switch(self, seconds: float) -> None:
        """Workers go over to another world inside their loops; something fails in that moment."""
        cluster, self._cluster.at_switch = self._cluster, None
        kind = self._random.choice(SWITCH_KINDS)
        agents = cluster.running()
        if Random(f"{cluster.plan.seed} goes on").random() < ALL_LOST_SHARE:
            for one in agents:
                if one.goes_on:
                    cluster.later(0.0, ALL_LOST_S, self.strike, "kill-agent", one)
            return
        agent = self._random.choice(agents) if agents else None
        lasts_s = 0.0 if kind.startswith(("kill-worker", "kill-agent", "lose")) else seconds
        cluster.later(0.0, SWITCH_S, self.strike, kind, agent, lasts_s)

    def _freeze_writer(self, seconds: float) -> None:
        """The agent that is to write the next world, whichever it is, is frozen before that."""
        agents = self._cluster.running()

        def freeze(writer: Agent) -> None:
            if agents:
                agents.clear()
                self._freeze(writer, seconds, "it writes a world")

        for agent in agents:
            agent.store.freeze_before(1, partial(freeze, agent), prefix=WORLD)

    def _freeze_committer(self, seconds: float, agent: Agent, step: int) -> None:
        """The agent whose save is to make the next manifest is frozen before that, and one of its
        workers dies, so that the job goes on without the node. In half of these schedules its save
        goes on as soon as another process begins to remove what it takes for leftovers."""
        storage = self._cluster.storage
        storage.before_manifest = None
        self._freeze(agent, seconds, "its save makes a manifest")
        self._cluster.later(0.0, 0.3, self._kill_worker, agent, 0.0)
        if self._random.random() < 0.5:
            storage.before_removal = partial(self._resume_committer, agent, step)

    def _resume_committer(self, agent: Agent, step: int, remover: Agent, of_step: int) -> bool:
        """Returns whether the committer goes on."""
        goes_on = step == of_step and remover is not agent and agent.stands_still
        if goes_on:
            self._cluster.storage.before_removal = None
            self._cluster.note(f"-- the save of {agent.host.name} goes on: its files are removed")
            agent.store.stopped_until_s = self._timeline.now_s
        return goes_on

    def _freeze_holder(self, seconds: float, part: Part) -> None:
        """The last checkpoint cannot be written for a moment, and another agent is frozen."""
        cluster = self._cluster
        others = [agent for agent in cluster.running() if agent is not part.agent]
        if part.name[1] < cluster.plan.total_steps or not others:
            return
        cluster.storage.before_persist = None
        cluster.storage.go_away(REFUSES_S)
        cluster.rules.cause("storage-away")
        self._freeze(self._random.choice(others), seconds, "the last checkpoint fails")

    def _kill_saver(self, part: Part) -> bool:
        """An agent that is to write its part of a held snapshot is killed before it does. Another
        one, which was told to write the rest, holds some of that part too."""
        others = [other for other in self._cluster.running() if other is not part.agent]
        told = [other.host.memory for other in others if other.core.saved_held is not None]
        if not any(memory.has(part.name, rank) for memory in told for rank in part.ranks):
            return False
        self._cluster.storage.before_part = None
        self._cluster.note(f"-- {part.agent.host.name} is killed before it saves what it holds")
        self._cluster.rules.cause("kill-agent")
        self._kill_agent(part.agent, 0.0)
        return True

    def _kill_source(self, seconds: float, world: World) -> None:
        """A world starts from memory, of which one node alone holds a part: that one is killed
        before others have read it."""
        ranks = [source.rank for source in world.resume.sources]
        for source in world.resume.sources:
            agent = self._cluster.hosts[source.node].agent
            alone = ranks.count(source.rank) == 1 and len(set(ranks)) > 1
            if alone and agent is not None and not agent.dead:
                self._cluster.when_written = None
                self._timeline.after(seconds, self._strike, "kill-agent", agent, 0.0)
                return

    def _freeze(self, agent: Agent, seconds: float, before: str) -> None:
        self._cluster.note(f"-- {agent.host.name} is frozen before {before}")
        self._cluster.rules.cause("freeze-agent")
        self._stop_agent(agent, seconds)
