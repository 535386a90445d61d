"""Faults that a seed directs at what seldom happens by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from tests.simulation.schedule import BAD_INPUTS, HANG_TIMEOUT_S, LASTING, Fault, Plan

FREEZE_SHARE = 0.1
"""So many schedules freeze an agent between two of its own writes, besides all else."""
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
ASIDE_SHARE = 0.01
"""So many schedules are about two nodes with bad input of which one is needed."""
HOLDER_SHARE = 0.02
"""So many schedules are about a node that stands still while the last checkpoint fails."""
RESTARTED_SHARE = 0.03
"""So many schedules are about agents that are killed and begin anew in one round."""
WAITING_SHARE = 0.02
"""So many schedules are about a node that waits, and of which a restored backup has the lease
alone."""
WAITS_S = 16.0
"""Such a job trains for so long after that."""
PLANNED_SHARE = 0.1
"""So many schedules are about a node that leaves inside the others' loops, while something fails or
changes."""
PLANNED_KINDS = (
    *("kill-worker", "kill-agent", "lose-node", "stop-agent", "hang-worker", "cut-from-peers"),
    *("kill-etcd", "pause-etcd", "cut-from-etcd", "freeze-agent", "drain", "sigterm", "join"),
    *("stop", "scale", "wipe-etcd", "freeze-writer"),
)
AT_SWITCH_SHARE = 0.5
"""So many of these leaves are struck when the others go over."""
DIVIDED_SHARE = 0.4
"""Share of leaves inside the loops in which the ranks divide the state."""
FEWER_SHARE = 0.3
"""Share of these changes in which operators lower MAX, so that nodes give up their places."""
ERROR_SHARE = 0.07
"""So many schedules have an agent whose loop meets errors that nobody expects."""


def with_directed_faults(seed: int, plan: Plan) -> Plan:
    """Adds faults that are directed at what seldom happens by itself, each drawn apart, so that
    the others of a seed stay."""
    for name, share, barred_by, direct in DIRECTED:
        random = Random(f"{seed} {name}")
        fits = plan.runs == 1 and not (barred_by and getattr(plan, barred_by))
        if fits and random.random() < share:
            return direct(random, plan)
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
    """Nodes leave one after another, or give up their places, each without a stop if nothing else
    happens; something does, shortly before the others go over to a world without it, or shortly
    after."""
    nodes = random.randint(3, 6)
    at_s = random.uniform(1.5, 3.0)
    faults, fewer = [], Random(f"{plan.seed} fewer")
    for _ in range(random.choice([1, 2, 2])):
        kind, pick = random.choice(["drain", "sigterm"]), random.random()
        if fewer.random() < FEWER_SHARE:
            kind, pick = f"scale:1:{fewer.randint(2, nodes - 1)}", 0.0
        faults.append(Fault(at_s, kind, pick, 0.0))
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
    divided = Random(f"{plan.seed} divided")
    strategy = "zero1" if divided.random() < DIVIDED_SHARE else "ddp"
    every = divided.choice([1, 2, 5, 20]) if strategy == "zero1" else plan.snapshot_every
    policy = replace(
        plan.policy,
        strategy=strategy,
        min_nodes=1,
        max_nodes=nodes + 1,
        hang_timeout_s=random.choice([None, HANG_TIMEOUT_S]),
    )
    steps = max(plan.total_steps, int((at_s + 4.0) / plan.step_s))
    trouble = random.choice([0.0, 0.0, plan.trouble])
    faults.sort(key=lambda fault: fault.at_s)
    plan = replace(plan, nodes=nodes, policy=policy, strategy=strategy, total_steps=steps)
    plan = replace(plan, trouble=trouble, crash_at=0, slow_start_s=0.0, snapshot_every=every)
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


def _with_two_aside(random: Random, plan: Plan) -> Plan:
    """Two nodes with bad input come, and are set aside; then a good one goes, and MIN needs one of
    the two."""
    kinds = [f"join-bad:{random.choice(BAD_INPUTS)}" for _ in range(2)]
    comes = [Fault(random.uniform(0.0, 2.0), kind, 0.0, 0.0) for kind in kinds]
    goes_s = random.uniform(6.0, 10.0)
    goes = Fault(goes_s, random.choice(["lose-node", "drain"]), random.random(), 0.0)
    waits = Fault(goes_s + NO_HELP_S, "back-up-etcd", 0.0, 0.0)
    policy = replace(plan.policy, min_nodes=plan.nodes, max_nodes=plan.nodes + 2)
    steps = int((goes_s + NO_HELP_S) / plan.step_s)
    plan = replace(
        plan, policy=policy, total_steps=steps, trouble=0.0, crash_at=0, slow_start_s=0.0
    )
    return replace(plan, faults=(*sorted(comes, key=lambda fault: fault.at_s), goes, waits))


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


DIRECTED: tuple[tuple[str, float, str, Callable[[Random, Plan], Plan]], ...] = (
    ("backed up", WAITING_SHARE, "phased", _with_waiting_node),
    ("planned", PLANNED_SHARE, "releases", _with_planned_changes),
    ("suspended", SUSPENDED_SHARE, "phased", _with_suspended_agent),
    ("given up", 2 * NEEDED_SHARE, "phased", _with_end),
    ("aside", ASIDE_SHARE, "phased", _with_two_aside),
    ("source", SOURCE_SHARE, "phased", _with_lost_source),
    ("holder", HOLDER_SHARE, "phased", _with_frozen_holder),
    ("restarted", RESTARTED_SHARE, "", _with_restarted_agents),
)
"""What schedules of one run may be about, and about nothing else, in the order in which it is
drawn. Each row has the text that seeds the draw, the share of the schedules, the field of a plan
that rules it out (empty: none does), and the function that directs the plan."""
