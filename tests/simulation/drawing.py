"""What a seed draws: the job, its policy, and which faults come when."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from elasticzero.launcher.protocol.policy import JobPolicy
from tests.simulation.directed import with_directed_faults
from tests.simulation.schedule import (
    BAD_INPUTS,
    CLEAN,
    HANG_TIMEOUT_S,
    HARMLESS,
    LASTING,
    LOSSES,
    Fault,
    Plan,
)

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
LOSS_SHARE = 0.1
"""So many schedules are about an etcd that loses its data, besides all else that happens."""
RUNS_SHARE = 0.1
"""So many of the others are about a job that is over, and is begun again while a node is away."""
RELEASE_SHARE = 0.08
"""So many of the schedules with one run have agents of the release before, and of a later one."""
PHASED_SHARE = 0.1
"""So many of the schedules of few nodes with storage save in phases, through the real code."""
FEW_NODES = 7
"""Of more nodes one would fail in nearly each save."""
RESTS_SHARE = 0.3
"""So many schedules have agents that rest until their next timer is due, and look at least once in
RESTS_S otherwise."""
RESTS_S = 60.0
BAD_JOIN_SHARE = 0.08
"""So many schedules have a node that comes, and whose workers always fail before they train."""
SAVE_TIMEOUT_S = 20.0
"""Longer than storage is away."""
STRANDED_SHARE = 0.02
"""So many schedules are about nodes that wait for others, and are lost while they do."""
SLOW_SHARE = 0.2
SLOW_START_S = 8.0
"""Longer than a process group may take, and long enough to be taken for a plain script."""


def draw(seed: int, nodes: int | None = None) -> Plan:
    """The schedule of a seed. nodes: how many the job begins with; None: 3 to 7."""
    plan = with_directed_faults(seed, _with_variants(seed, _draw(seed, nodes)))
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
