"""What a seed draws: the job, its policy, and which faults come when."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

from elasticzero.launcher.protocol.policy import JobPolicy
from tests.simulation.releases import Release

FAULTS: dict[str, float] = {
    "kill-worker": 4,
    "hang-worker": 1,
    "crash-worker": 1,
    "kill-agent": 3,
    "lose-node": 2,
    "lose-node-silently": 2,
    "join": 3,
    "drain": 2,
    "sigterm": 2,
    "sigterm-leader": 1,
    "sigterm-two": 1,
    "sigterm-again": 0.5,
    "scale": 2,
    "stop": 0.3,
    "busy-worker": 1,
    "deadlock": 1,
    "bad-node": 1,
    "outage-and-failure": 1,
    "pause-etcd": 2,
    "kill-etcd": 2,
    "cut-from-etcd": 2,
    "cut-from-peers": 1,
    "cut-off": 2,
    "slow-agent": 2,
    "stop-agent": 1,
    "damage": 1,
    "storage-away": 1,
    "fade": 1,
}
"""What can happen, and how often each is drawn."""
HARMLESS = frozenset(
    {"pause-etcd", "kill-etcd", "wipe-etcd", "restore-etcd", "back-up-etcd", "busy-worker"}
)
"""These alone change no generation."""
CLEAN = frozenset({"join", "drain", "scale", "stop"})
"""These alone, and those above, recompute no step."""
MACHINES = frozenset(
    {"join", "drain", "scale", "stop", "kill-agent", "lose-node", "lose-node-silently"}
    | {"kill-source", "kill-saver", "sigterm", "sigterm-leader", "sigterm-two", "sigterm-again"}
)
"""Where nothing else happens, and etcd is well, no failure counts."""
LASTING = ("pause", "storage", "kill-etcd", "cut", "slow", "stop-agent", "hang", "busy", "outage")
"""What begins so lasts for a while."""
HANG_TIMEOUT_S = 2.5
LOSS_SHARE = 0.1
"""So many schedules are about an etcd that loses its data, besides all else that happens."""
LOSSES = ("wipe-etcd", "restore-etcd")
RUNS_SHARE = 0.1
"""So many of the others are about a job that is over, and is begun again while a node is away."""
FREEZE_SHARE = 0.1
"""So many schedules freeze an agent between two of its own writes, besides all else."""
RELEASE_SHARE = 0.08
"""So many of the schedules with one run have agents of the release before, and of a later one."""
PHASED_SHARE = 0.1
"""So many of the schedules of few nodes with storage save in phases, through the real code."""
FEW_NODES = 7
"""Of more nodes one would fail in nearly each save."""
NAME_SHARE = 0.06
"""So many schedules have a machine that comes by the name of another one."""
NEWCOMER_SHARE = 0.05
"""So many schedules have a node that is drained as soon as it has come."""
WRITER_SHARE = 0.05
"""So many schedules freeze whichever agent is to write the next world, before it does."""
COMMITTER_SHARE = 0.4
"""So many of the schedules that save in phases freeze the agent of a save before its manifest."""
COMMITTER_TRAINS_S = 20.0
"""Such a job trains for so long after that."""
ODD_RUN_SHARE = 0.05
"""So many schedules of one run, in which etcd keeps its data, have a number of the run that cannot
be read."""
SUSPENDED_SHARE = 0.04
"""So many schedules are about an agent that is suspended alone, or cut off from etcd alone, for
longer than its lease lives; and about nothing else."""
SOURCE_SHARE = 0.02
"""So many schedules are about a node that is lost before others have read what it alone holds."""
NO_HELP_S = 15.0
"""As long as something is still to happen, no further nodes come."""
NEEDED_SHARE = 0.02
"""So many schedules are about a node with bad input that is needed; and as many about a job that is
given up, and loses the node that is to save its state."""
HOLDER_SHARE = 0.02
"""So many schedules are about a node that stands still while the last checkpoint fails."""
RESTARTED_SHARE = 0.03
"""So many schedules are about agents that are killed and begin anew in one round."""
WAITING_SHARE = 0.02
"""So many schedules are about a node that waits, and of which a restored backup has the lease
alone."""
WAITS_S = 16.0
"""Such a job trains for so long after that."""
PLANNED_SHARE = 0.06
"""So many schedules are about a node that leaves inside the others' loops, while something fails or
changes."""
PLANNED_KINDS = (
    *("kill-worker", "kill-agent", "lose-node", "stop-agent", "hang-worker", "cut-from-peers"),
    *("kill-etcd", "pause-etcd", "cut-from-etcd", "freeze-agent", "drain", "sigterm", "join"),
    *("stop", "scale", "wipe-etcd", "freeze-writer"),
)
AT_SWITCH_SHARE = 0.5
"""So many of these leaves are struck when the others go over."""
RESTS_SHARE = 0.3
"""So many schedules have agents that rest until their next timer is due, and look at least once in
RESTS_S otherwise."""
RESTS_S = 60.0
ERROR_SHARE = 0.07
"""So many schedules have an agent whose loop meets errors that nobody expects."""
BAD_JOIN_SHARE = 0.08
"""So many schedules have a node that comes, and whose workers always fail before they train."""
BAD_INPUTS = ("import", "model", "script", "crash")
SAVE_TIMEOUT_S = 20.0
"""Longer than storage is away."""
STRANDED_SHARE = 0.02
"""So many schedules are about nodes that wait for others, and are lost while they do."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens at a time, to the node that `pick` chooses among those there are."""

    at_s: float
    kind: str
    pick: float
    seconds: float
    """How long it lasts, where it does."""


OLDER, NEWER = ("0.2.0", "2.13.0+cpu"), ("0.3.1", "2.13.0+cpu")
"""Versions of the nodes of the two builds."""
SLOW_SHARE = 0.2
SLOW_START_S = 8.0
"""Longer than a process group may take, and long enough to be taken for a plain script."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One schedule."""

    seed: int
    nodes: int
    policy: JobPolicy
    ttl_s: int = 2
    nproc: int = 1
    strategy: str = "zero1"
    total_steps: int = 40
    step_s: float = 0.1
    snapshot_every: int = 5
    checkpoint_every: int = 0
    storage: bool = True
    connect_s: float = 3.0
    """What a process group may take when all are there."""
    start_s: float = 60.0
    """For so long those that are there wait for the others' scripts."""
    slow_start_s: float = 0.0
    """One script in four takes up to so much longer to start."""
    long_kernels: bool = True
    """Some workers are in one when they are to hear of something, and hear of it late."""
    crash_at: int = 0
    """The script fails at this step, each time; 0: never."""
    crash_rank: int = 0
    trouble: float = 0.003
    """The share of requests, and of watches' news, that is late or lost."""
    poll_s: float = 1.0
    """An agent to which nothing happens looks so often."""
    rests: bool = False
    """An agent rests until its next timer is due, as real ones do, and at most for poll_s."""
    pause_growth: float = 4.0
    """Until then each of its pauses is so many times the one before."""
    names_from: int = 1
    """The first node is node-1, the second node-(this + 1): with 10, its name begins with the
    first's."""
    apart_s: float = 0.5
    """The nodes come within so long."""
    runs: int = 1
    """So often the job is run: once it is over, it is begun again."""
    phased: bool = False
    """Saves are those of the real code, each of whose phases may be late, repeated or fail."""
    keep: int | None = None
    """Steps that retention leaves then; None: all."""
    releases: float = 0.0
    """So many of the nodes have another release than this one."""
    builds: bool = False
    """The nodes that come state one of two builds, mostly the older one first."""
    faults: tuple[Fault, ...] = field(default=())

    def release_of(self, number: int) -> Release:
        """That of the agents of the node that comes as the so many-th."""
        if not self.releases:
            return ""
        random = Random(f"{self.seed} release of {number}")
        return random.choice(["before", "after"]) if random.random() < self.releases else ""

    def versions_of(self, number: int) -> tuple[str, str]:
        """Versions of ElasticZero and torch of the node that comes as the so many-th; empty: it
        states none."""
        if not self.builds:
            return ("", "")
        random = Random(f"{self.seed} build of {number}")
        newer = random.random() < (0.3 if number <= self.nodes else 0.8)
        return NEWER if newer else OLDER

    @property
    def loses_data(self) -> bool:
        """Whether etcd loses its data at some time."""
        return any(fault.kind in (*LOSSES, "join-backed-up") for fault in self.faults)

    @property
    def faults_end_s(self) -> float:
        return max((fault.at_s + fault.seconds for fault in self.faults), default=0.0)


def draw(seed: int, nodes: int | None = None) -> Plan:
    """The schedule of a seed. nodes: how many the job begins with; None: 3 to 7."""
    plan = _with_directed_faults(seed, _with_variants(seed, _draw(seed, nodes)))
    if Random(f"{seed} rests").random() < RESTS_SHARE:
        plan = replace(plan, rests=True, poll_s=RESTS_S)
    return plan


def _with_variants(seed: int, plan: Plan) -> Plan:
    """The job may lose etcd's data, or be run twice; its nodes may have other releases; and it may
    save in phases."""
    random = Random(seed ^ 0x1055)
    if random.random() < LOSS_SHARE:
        plan = replace(plan, faults=(*plan.faults, *_losses(random, plan)))
    elif (drawn := Random(f"{seed} runs")).random() < RUNS_SHARE:
        plan = replace(plan, runs=2, faults=(*plan.faults, *_absences(drawn, plan)))
    if plan.runs == 1 and Random(f"{seed} releases").random() < RELEASE_SHARE:
        plan = replace(plan, releases=0.5)
    phased = Random(f"{seed} phased")
    if plan.storage and plan.nodes <= FEW_NODES and phased.random() < PHASED_SHARE:
        keep, every = phased.choice([None, 1, 1, 2]), phased.choice([2, 3, 5])
        plan = replace(plan, phased=True, keep=keep, checkpoint_every=every)
    return plan


def _with_directed_faults(seed: int, plan: Plan) -> Plan:
    """Adds faults that are directed at what seldom happens by itself, each drawn apart, so that
    the others of a seed stay."""
    backed_up = Random(f"{seed} backed up")
    if plan.runs == 1 and not plan.phased and backed_up.random() < WAITING_SHARE:
        return _with_waiting_node(backed_up, plan)
    planned = Random(f"{seed} planned")
    if plan.runs == 1 and not plan.releases and planned.random() < PLANNED_SHARE:
        return _with_planned_changes(planned, plan)
    suspended = Random(f"{seed} suspended")
    if plan.runs == 1 and not plan.phased and suspended.random() < SUSPENDED_SHARE:
        return _with_suspended_agent(suspended, plan)
    given_up = Random(f"{seed} given up")
    if plan.runs == 1 and not plan.phased and given_up.random() < 2 * NEEDED_SHARE:
        return _with_end(given_up, plan)
    source = Random(f"{seed} source")
    if plan.runs == 1 and not plan.phased and source.random() < SOURCE_SHARE:
        return _with_lost_source(source, plan)
    holder = Random(f"{seed} holder")
    if plan.runs == 1 and not plan.phased and holder.random() < HOLDER_SHARE:
        return _with_frozen_holder(holder, plan)
    restarted = Random(f"{seed} restarted")
    if plan.runs == 1 and restarted.random() < RESTARTED_SHARE:
        return _with_restarted_agents(restarted, plan)
    added = (
        *_freezes(Random(f"{seed} freeze"), plan),
        *_errors(Random(f"{seed} errors"), plan),
        *_namesakes(Random(f"{seed} name"), plan),
        *_frozen_writers(Random(f"{seed} writer"), plan),
        *_odd_runs(Random(f"{seed} odd run"), plan),
    )
    plan = replace(plan, faults=(*plan.faults, *added))
    plan = _with_newcomer(Random(f"{seed} newcomer"), plan)
    return _with_frozen_committer(Random(f"{seed} committer"), plan)


def _with_waiting_node(random: Random, plan: Plan) -> Plan:
    """A node waits for a place, and nothing else happens, but that a backup is restored which has
    its lease and not its registration."""
    at_s, after_s = random.uniform(2.0, 4.0), random.uniform(0.5, 2.0)
    faults = (Fault(at_s, "join-backed-up", 0.0, after_s),)
    steps = int((at_s + after_s + WAITS_S) / plan.step_s)
    policy = replace(plan.policy, max_nodes=plan.nodes)
    trouble = min(plan.trouble, 0.01)  # the node looks every few seconds, and is to be answered
    plan = replace(plan, policy=policy, total_steps=steps, trouble=trouble, crash_at=0)
    return replace(plan, faults=faults)


def _with_planned_changes(random: Random, plan: Plan) -> Plan:
    """Nodes leave one after another, each without a stop if nothing else happens; something does,
    shortly before the others go over to a world without it, or shortly after."""
    nodes = random.randint(3, 6)
    at_s = random.uniform(1.5, 3.0)
    faults = []
    for _ in range(random.choice([1, 2, 2])):
        faults.append(Fault(at_s, random.choice(["drain", "sigterm"]), random.random(), 0.0))
        if random.random() < AT_SWITCH_SHARE:
            lasts_s = random.choice([0.5, 2.0, 5.0]) * random.uniform(0.8, 1.2)
            faults.append(Fault(at_s, "at-switch", 0.0, lasts_s))
            at_s += 1.0
            continue
        for _ in range(random.choice([0, 1, 1, 2])):
            kind = random.choice(PLANNED_KINDS)
            lasts_s = random.choice([0.3, 1.0, 2.0, 3.5, 6.0]) * random.uniform(0.8, 1.2)
            seconds = lasts_s if kind.startswith((*LASTING, "freeze", "wipe")) else 0.0
            struck_s = at_s + random.uniform(-0.1, 0.9)
            faults.append(Fault(struck_s, kind, random.random(), seconds))
        at_s += random.choice([0.2, 1.0, 2.5]) * random.uniform(0.8, 1.2)
    policy = replace(
        plan.policy,
        strategy="ddp",
        min_nodes=1,
        max_nodes=nodes + 1,
        hang_timeout_s=random.choice([None, HANG_TIMEOUT_S]),
    )
    steps = max(plan.total_steps, int((at_s + 4.0) / plan.step_s))
    trouble = random.choice([0.0, 0.0, plan.trouble])
    faults.sort(key=lambda fault: fault.at_s)
    plan = replace(plan, nodes=nodes, policy=policy, strategy="ddp", total_steps=steps)
    plan = replace(plan, trouble=trouble, crash_at=0, slow_start_s=0.0)
    return replace(plan, faults=tuple(faults))


def _with_suspended_agent(random: Random, plan: Plan) -> Plan:
    """A divided state of which snapshots are held often or seldom, and an agent that is away."""
    at_s, lasts_s = random.uniform(2.0, 8.0), random.choice([3.0, 6.0, 15.0, 30.0])
    kind = random.choice(["stop-agent", "stop-agent", "cut-from-etcd"])
    faults = (Fault(at_s, kind, random.random(), lasts_s),)
    every = random.choice([2, 5, 30, 60])
    steps = int((at_s + lasts_s + 5.0) / plan.step_s)
    policy = replace(plan.policy, strategy="zero1")
    trouble = random.choice([0.0, min(plan.trouble, 0.01)])
    plan = replace(plan, policy=policy, strategy="zero1", snapshot_every=every, crash_at=0)
    plan = replace(plan, total_steps=steps, trouble=trouble, checkpoint_every=0, faults=faults)
    return plan


def _with_end(random: Random, plan: Plan) -> Plan:
    """A job that cannot go on: a node with bad input is needed, or its script always fails. In half
    of the latter the node that is to save the state is killed before it does; another one has its
    part, for a snapshot is taken at each step."""
    plan = replace(plan, storage=True, trouble=0.0, crash_at=0, slow_start_s=0.0, nproc=1)
    if random.random() < 0.5:
        kind = f"join-bad:{random.choice(['import', 'model', 'script'])}"
        policy = replace(plan.policy, min_nodes=plan.nodes + 1, max_nodes=plan.nodes + 2)
        comes = Fault(0.0, kind, 0.0, 0.0)
        waits = Fault(NO_HELP_S, "back-up-etcd", 0.0, 0.0)
        return replace(plan, policy=policy, faults=(comes, waits))
    policy = replace(plan.policy, max_nodes=plan.nodes, min_nodes=1)
    steps = random.randint(20, 40)
    faults = (Fault(0.5, "kill-saver", 0.0, 0.0),) if random.random() < 0.5 else ()
    policy = replace(policy, max_restarts=0 if faults else policy.max_restarts)
    plan = replace(plan, policy=policy, total_steps=2 * steps, crash_at=steps, faults=faults)
    return replace(plan, snapshot_every=1, step_s=0.25, checkpoint_every=0)


def _with_lost_source(random: Random, plan: Plan) -> Plan:
    """A node leaves or comes at a boundary, so that each part of the state exists once; then one of
    those that hold a part is killed while the others begin."""
    at_s = random.uniform(2.0, 4.0)
    change = Fault(at_s, random.choice(["drain", "join"]), random.random(), 0.0)
    lost = Fault(at_s - 0.1, "kill-source", 0.0, random.uniform(0.05, 0.5))
    policy = replace(plan.policy, strategy="zero1", min_nodes=1, max_nodes=plan.nodes + 2)
    steps = max(plan.total_steps, int((at_s + 4.0) / plan.step_s))
    plan = replace(plan, policy=policy, strategy="zero1", total_steps=steps, trouble=0.0)
    return replace(plan, crash_at=0, slow_start_s=0.0, faults=(change, lost))


def _with_frozen_holder(random: Random, plan: Plan) -> Plan:
    """The last checkpoint fails, and an agent stands still that alone has its part of the step."""
    faults = (Fault(0.0, "freeze-holder", random.random(), random.uniform(1.0, 8.0)),)
    policy = replace(plan.policy, strategy="zero1", min_nodes=1, max_nodes=plan.nodes)
    plan = replace(plan, policy=policy, strategy="zero1", storage=True, total_steps=20)
    plan = replace(plan, snapshot_every=0, checkpoint_every=random.choice([0, 7]), crash_at=0)
    return replace(plan, trouble=0.0, slow_start_s=0.0, faults=faults)


def _with_restarted_agents(random: Random, plan: Plan) -> Plan:
    """Each node is needed, and two agents are killed and begin anew, the second one after it has
    answered in the round that the first one's end has opened."""
    at_s = random.uniform(1.5, 4.0)
    times_s = (at_s, at_s + random.uniform(0.1, 1.5))
    faults = tuple(Fault(killed_s, "kill-agent", random.random(), 0.0) for killed_s in times_s)
    policy = replace(plan.policy, min_nodes=plan.nodes, max_nodes=plan.nodes + 1)
    steps = max(plan.total_steps, int((at_s + 2.0) / plan.step_s))
    trouble = random.choice([0.0, plan.trouble])
    plan = replace(plan, policy=policy, total_steps=steps, trouble=trouble, crash_at=0)
    return replace(plan, faults=faults)


def _with_newcomer(random: Random, plan: Plan) -> Plan:
    """A node comes, for which there is room, is drained at once, and does not run for a while: less
    than its lease lives, for a loop that stands still for longer loses it."""
    if random.random() >= NEWCOMER_SHARE:
        return plan
    lasts_s = plan.total_steps * plan.step_s
    at_s = random.choice([random.uniform(0.2, 0.8), random.uniform(1.5, max(2.0, lasts_s))])
    fault = Fault(at_s, "drain-newcomer", 0.0, random.uniform(0.5, 0.95) * plan.ttl_s)
    policy = replace(plan.policy, max_nodes=max(plan.policy.max_nodes, plan.nodes + 2))
    return replace(plan, policy=policy, faults=(*plan.faults, fault))


def _frozen_writers(random: Random, plan: Plan) -> list[Fault]:
    """The agent that is to write a world is frozen before that, mostly until another one has
    written it."""
    if random.random() >= WRITER_SHARE:
        return []
    at_s = random.choice([0.1, random.uniform(0.5, plan.total_steps * plan.step_s)])
    lasts_s = random.choice([1.0, 4.0, 6.0, 12.0]) * random.uniform(0.8, 1.2)
    ends = Fault(at_s + random.uniform(0.0, 0.3), "kill-worker", random.random(), 0.0)
    return [Fault(at_s, "freeze-writer", 0.0, lasts_s), ends]


def _odd_runs(random: Random, plan: Plan) -> list[Fault]:
    """The key of the run cannot be read for a while, in which a generation ends in some."""
    if plan.runs > 1 or plan.loses_data or random.random() >= ODD_RUN_SHARE:
        return []
    at_s = random.uniform(0.2, plan.total_steps * plan.step_s)
    lasts_s = random.choice([0.5, 2.0, 5.0, 10.0]) * random.uniform(0.8, 1.2)
    faults = [Fault(at_s, "odd-run", 0.0, lasts_s)]
    if random.random() < 0.5:
        ends_s = at_s + random.uniform(0.0, lasts_s)
        faults.append(Fault(ends_s, "kill-worker", random.random(), 0.0))
    return faults


def _with_frozen_committer(random: Random, plan: Plan) -> Plan:
    """The agent of a save is frozen before its manifest, until the files of the save may be taken
    for leftovers, and removed. Each node holds the whole state: the others go on behind that step,
    and do not save it again."""
    if not plan.phased or plan.runs > 1 or random.random() >= COMMITTER_SHARE:
        return plan
    at_s, lasts_s = random.uniform(0.5, 4.0), random.uniform(8.0, 14.0)
    steps = max(plan.total_steps, int((at_s + COMMITTER_TRAINS_S) / plan.step_s))
    fault = Fault(at_s, "freeze-committer", 0.0, lasts_s)
    policy = replace(plan.policy, strategy="ddp")
    plan = replace(plan, policy=policy, strategy="ddp", total_steps=steps)
    return replace(plan, faults=(*plan.faults, fault))


def _namesakes(random: Random, plan: Plan) -> list[Fault]:
    """A machine comes by the name of another one, which is away in two schedules of three."""
    if random.random() >= NAME_SHARE:
        return []
    at_s, pick = random.uniform(0.2, plan.total_steps * plan.step_s), random.random()
    faults = [Fault(at_s, "same-name", pick, 0.0)]
    away = random.choice(["", "cut-from-etcd", "stop-agent"])
    if away:
        away_s = random.choice([3.0, 6.0, 12.0]) * random.uniform(0.8, 1.2)
        faults.append(Fault(at_s - random.uniform(0.0, 0.2), away, pick, away_s))
    return faults


def _errors(random: Random, plan: Plan) -> list[Fault]:
    """The loop of an agent meets unexpected errors; of two agents in some schedules."""
    if random.random() >= ERROR_SHARE:
        return []
    lasts_s = plan.total_steps * plan.step_s
    times = [random.uniform(0.2, lasts_s) for _ in range(random.choice([1, 1, 2]))]
    return [Fault(at_s, "loop-error", random.random(), 0.0) for at_s in times]


def _freezes(random: Random, plan: Plan) -> list[Fault]:
    """An agent is frozen before one of its next writes, once or twice."""
    if random.random() >= FREEZE_SHARE:
        return []
    faults = []
    for _ in range(random.choice([1, 1, 2])):
        at_s = random.uniform(0.2, plan.total_steps * plan.step_s)
        lasts_s = random.choice([0.3, 1.0, 3.5, 6.0, 12.0]) * random.uniform(0.8, 1.2)
        faults.append(Fault(at_s, "freeze-agent", random.random(), lasts_s))
    return faults


def _absences(random: Random, plan: Plan) -> list[Fault]:
    """Some agents are away when the job ends, most of them until it has been begun again.

    Their workers stay in reach of their peers: a round that waits for as long as this for a node is
    of another kind.
    """
    ends_s = plan.total_steps * plan.step_s
    faults = []
    for _ in range(random.choice([1, 1, 2])):
        at_s = random.uniform(0.3, 1.0) * ends_s
        away_s = random.choice([ends_s, 10.0, 20.0, 40.0]) * random.uniform(0.8, 1.2)
        kind = random.choice(["stop-agent", "stop-agent", "slow-agent", "cut-from-etcd"])
        faults.append(Fault(at_s, kind, random.random(), away_s))
    return faults


def _losses(random: Random, plan: Plan) -> list[Fault]:
    """etcd loses its data once or twice: all of them, or those since a backup."""
    most_s = max(4.0, plan.faults_end_s, plan.total_steps * plan.step_s * 0.8)
    faults = []
    for _ in range(random.choice([1, 1, 2])):
        at_s = random.uniform(0.2, most_s)
        away_s = random.choice([0.0, 0.3, 1.0, 3.0]) * random.uniform(0.8, 1.2)
        kind = random.choice(LOSSES)
        if kind == "restore-etcd":
            faults.append(Fault(random.uniform(0.0, at_s), "back-up-etcd", 0.0, 0.0))
        faults.append(Fault(at_s, kind, random.random(), away_s))
    return faults


def _draw(seed: int, nodes: int | None) -> Plan:
    random = Random(seed)
    count = nodes or random.randint(3, 7)
    least = random.randint(1, max(1, count // 2 + 1))
    most = max(least, count + random.choice([-1, 0, 0, 1, 3]))
    strategy = random.choice(["ddp", "zero1", "zero1", "zero3"])
    policy = JobPolicy(
        min_nodes=least,
        max_nodes=most,
        strategy=strategy,
        settle_s=0.4,
        grow_settle_s=0.2,
        join_timeout_s=600.0,
        stop_s=2.5,
        save_s=3.0,
        save_timeout_s=SAVE_TIMEOUT_S,
        lease_ttl_s=2.0,
        handover_s=4.0,
        strict_checkpoint=False,
        hang_timeout_s=random.choice([None, HANG_TIMEOUT_S]),
    )
    faults = _faults(random, hangs=policy.hang_timeout_s is not None)
    if random.random() < STRANDED_SHARE:
        faults = _stranded(random, count, least)
    faults = (*faults, *_bad_joins(Random(f"{seed} joins")))
    step_s = random.choice([0.06, 0.1, 0.15, 0.25])
    lasts_s = 1.5 + max((f.at_s + f.seconds for f in faults), default=0.0)
    steps = max(10, int(lasts_s * random.uniform(0.5, 1.3) / step_s))
    storage = random.random() < 0.8
    plan = Plan(
        seed=seed,
        nodes=count,
        policy=policy,
        nproc=2 if random.random() < 0.2 else 1,
        names_from=random.choice([1, 10]),
        strategy=strategy,
        total_steps=steps,
        step_s=step_s,
        snapshot_every=random.choice([0, 3, 5, 8]),
        checkpoint_every=random.choice([0, 0, 7, 12]) if storage else 0,
        storage=storage,
        crash_at=random.randint(2, steps - 1) if random.random() < 0.02 else 0,
        crash_rank=random.randint(0, 3),
        trouble=random.choice([0.0, 0.002, 0.01, 0.03]),
        poll_s=random.choice([0.5, 1.0, 2.0]),
        faults=faults,
    )
    if random.random() >= SLOW_SHARE:
        return plan
    patient = replace(policy, handover_s=policy.handover_s + SLOW_START_S)
    return replace(plan, slow_start_s=SLOW_START_S, policy=patient)


def _stranded(random: Random, count: int, least: int) -> tuple[Fault, ...]:
    """Fewer than MIN are left; one of them is lost too; much later others come."""
    at_s = random.uniform(1.5, 4.0)
    lost = [Fault(at_s, "lose-node", random.random(), 0.0) for _ in range(count - least + 1)]
    waits_s = random.choice([0.5, 1.0, 2.0])
    later = Fault(at_s + waits_s, "lose-node", random.random(), 0.0)
    come_s = at_s + waits_s + random.uniform(3.0, 8.0)
    joins = [Fault(come_s, "join", 0.0, 0.0) for _ in range(count)]
    return (*lost, later, *joins)


def _bad_joins(random: Random) -> tuple[Fault, ...]:
    """Nodes with bad input come, one or two; drawn apart, so that a seed's other faults stay."""
    if random.random() >= BAD_JOIN_SHARE:
        return ()
    at_s = random.choice([0.0, random.uniform(0.5, 8.0)])
    kinds = [f"join-bad:{random.choice(BAD_INPUTS)}" for _ in range(random.choice([1, 1, 2]))]
    return tuple(Fault(at_s + random.uniform(0.0, 1.0), kind, 0.0, 0.0) for kind in kinds)


def _faults(random: Random, *, hangs: bool) -> tuple[Fault, ...]:
    only = random.random()
    kinds = list(FAULTS)
    if only < 0.15:
        kinds = sorted(HARMLESS & FAULTS.keys() | (CLEAN if only >= 0.07 else frozenset()))
    if not hangs:
        kinds = [kind for kind in kinds if kind not in ("deadlock", "busy-worker")]
    count = random.choice([0, 1, 1, 2, 2, 3, 3, 4, 5, 6])
    drawn = random.choices(kinds, [FAULTS[kind] for kind in kinds], k=count)
    at_s = random.uniform(0.0, 4.0)
    faults = []
    for kind in drawn:
        seconds = random.choice([0.3, 1.0, 2.0, 3.5, 6.0]) * random.uniform(0.8, 1.2)
        if not kind.startswith(LASTING):
            seconds = 0.0
        faults.append(Fault(at_s, kind, random.random(), seconds))
        at_s += random.choice([0.0, 0.05, 0.3, 0.8, 2.0, 4.0]) * random.uniform(0.5, 1.5)
    return tuple(faults)
