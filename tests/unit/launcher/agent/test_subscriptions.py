"""Who watches the registrations of all nodes while no step is made, on the simulator's time."""

from __future__ import annotations

import pytest

from elasticzero.launcher.agent.subscriptions import MANY, QUIET_S, QUIET_SPREAD_S, STANDBY
from elasticzero.launcher.protocol.policy import JobPolicy
from elasticzero.launcher.store.watch_cache import MEMBERS, reports_of
from tests.simulation.cluster import Cluster
from tests.simulation.schedule import Plan

NODES = 60
TTL_S = 5
STEP_S = 300.0
"""A step, or an evaluation, that takes longer than the tests."""
ALL_BEGUN_S = QUIET_S + QUIET_SPREAD_S + 1.0


@pytest.fixture(params=[(1, 0.25), (10, 1e6)], ids=["looks often", "looks when a timer is due"])
def cluster(request: pytest.FixtureRequest) -> Cluster:
    """A world of many nodes, whose first step does not end for long; some names begin with the
    first one's, where that is given by the first number."""
    names_from, poll_s = request.param
    return _world_of(NODES, names_from, poll_s)


def _world_of(nodes: int, names_from: int = 1, poll_s: float = 1e6) -> Cluster:
    plan = Plan(
        seed=2,
        nodes=nodes,
        policy=JobPolicy(min_nodes=1, max_nodes=nodes, settle_s=3.0, lease_ttl_s=TTL_S),
        ttl_s=TTL_S,
        total_steps=10**6,
        step_s=STEP_S,
        storage=False,
        connect_s=60.0,
        long_kernels=False,
        trouble=0.0,
        poll_s=poll_s,
        rests=poll_s > 1.0,
        apart_s=0.0,
        names_from=names_from,
    )
    cluster = Cluster(plan)
    for _ in range(nodes):
        cluster.add_node()
    started = cluster.rules.started
    assert cluster.timeline.run(20.0, lambda: started.get(1, 0) == nodes)
    return cluster


def _watchers(cluster: Cluster) -> int:
    """How many agents watch all registrations."""
    watches = cluster.etcd.bucket(MEMBERS).watches
    return sum(watch.prefix == MEMBERS for watch in watches)


def _watched(cluster: Cluster) -> int:
    """How many watches there are of registrations, of all and of one."""
    return len(cluster.etcd.bucket(MEMBERS).watches)


def test_a_long_evaluation_has_few_nodes_watch_all(cluster: Cluster) -> None:
    """After 30 s nearly every member watched all registrations at once."""
    timeline = cluster.timeline
    most = 0
    until_s = timeline.now_s + ALL_BEGUN_S
    while timeline.now_s < until_s:
        timeline.run(timeline.now_s + 0.5, lambda: False)
        most = max(most, _watchers(cluster))
    assert most == STANDBY
    assert _watched(cluster) == NODES, "each other member watches the one before it"


@pytest.mark.parametrize("lost", [(0, 1, 2), (0, 1, 2, 3, 4, 5), (0, 1, 2, 4, 6)], ids=str)
def test_the_first_member_left_watches_all(cluster: Cluster, lost: tuple[int, ...]) -> None:
    """All that watched the registrations are lost at once, and no worker is told of it."""
    timeline = cluster.timeline
    timeline.run(timeline.now_s + ALL_BEGUN_S, lambda: False)
    assert cluster.world is not None
    members = [member.node for member in cluster.world.members]
    for index in lost:
        cluster.strike("lose-node-silently", cluster.hosts[members[index]].agent)
    requests = sum(agent.store.requests for agent in cluster.running())
    after = NODES - len(lost)
    until_s = timeline.now_s + 4 * TTL_S
    assert timeline.run(until_s, lambda: cluster.rules.started.get(2, 0) >= after)
    assert [m.node for m in cluster.world.members] == [
        node for index, node in enumerate(members) if index not in lost
    ]
    spent = sum(agent.store.requests for agent in cluster.running()) - requests
    assert spent < 12 * NODES


@pytest.mark.parametrize(("nodes", "readers"), [(MANY, STANDBY), (MANY + 1, 1)])
def test_of_many_nodes_only_the_leader_follows_the_reports(nodes: int, readers: int) -> None:
    """In a small world two others do too, to lead at once if the leader is lost."""
    cluster = _world_of(nodes)
    assert cluster.world is not None
    last = cluster.world.members[-1].node
    cluster.strike("lose-node", cluster.hosts[last].agent)
    reports, most = cluster.etcd.bucket(reports_of(1)), 0
    until_s = cluster.timeline.now_s + 4 * TTL_S
    while cluster.timeline.now_s < until_s and not cluster.rules.started.get(2, 0):
        cluster.timeline.run(cluster.timeline.now_s + 0.02, lambda: False)
        most = max(most, len(reports.watches))
    assert cluster.rules.started.get(2, 0)
    assert most == readers


def test_of_many_nodes_another_leads_without_the_first() -> None:
    cluster = _world_of(MANY + 1)
    assert cluster.world is not None
    first, last = cluster.world.members[0].node, cluster.world.members[-1].node
    for node in (last, first):
        cluster.strike("lose-node", cluster.hosts[node].agent)
    until_s = cluster.timeline.now_s + 4 * TTL_S
    assert cluster.timeline.run(until_s, lambda: cluster.rules.started.get(2, 0) == MANY - 1)
