"""A store that answers slowly, and always does, keeps no job from its next world."""

from __future__ import annotations

import pytest

from elasticzero.launcher.protocol.policy import JobPolicy
from tests.simulation.cluster import Cluster
from tests.simulation.etcd import Costs
from tests.simulation.schedule import Plan
from tests.support.cases import slow

NODES = 10
TTL_S = 5
TRAINS_S = 10.0
"""So long a generation trains before nodes are lost."""
WORLD_S = 90.0
"""Within this the next world is there."""


def _cluster(answer_s: float, nodes: int, most: int, *, storage: bool = False) -> Cluster:
    plan = Plan(
        seed=1,
        nodes=nodes,
        policy=JobPolicy(min_nodes=1, max_nodes=most, settle_s=3.0, lease_ttl_s=TTL_S),
        ttl_s=TTL_S,
        total_steps=10**6,
        step_s=1.0,
        storage=storage,
        connect_s=60.0,
        long_kernels=False,
        trouble=0.0,
        poll_s=0.25,
        apart_s=0.0,
    )
    cluster = Cluster(plan, costs=Costs(answer_s=answer_s))
    for _ in range(nodes):
        cluster.add_node()
    return cluster


def _reach(cluster: Cluster, generation: int, nodes: int) -> bool:
    """Runs until so many nodes have started that generation."""
    started, until_s = cluster.rules.started, cluster.timeline.now_s + WORLD_S
    return cluster.timeline.run(until_s, lambda: started.get(generation, 0) >= nodes)


@pytest.mark.parametrize("answer_s", [0.0, 0.2, 0.5, 0.9, 1.2, 1.6])
@pytest.mark.parametrize("fault", ["lose-node", "lose-node-silently"])
def test_a_lost_node_does_not_end_a_job_with_a_slow_store(answer_s: float, fault: str) -> None:
    """Each slow read of the leader gave the lost node its time to answer anew, without end."""
    cluster = _cluster(answer_s, NODES, NODES)
    assert _reach(cluster, 1, NODES)
    cluster.timeline.run(cluster.timeline.now_s + TRAINS_S, lambda: False)
    cluster.strike(fault, cluster.running()[-1])
    assert _reach(cluster, 2, NODES - 1), list(cluster.history)[-8:]
    assert cluster.world is not None and len(cluster.world.members) == NODES - 1


@pytest.mark.parametrize("answer_s", [0.5, slow(1.2)])
def test_a_world_is_written_though_a_look_at_storage_is_old_by_then(answer_s: float) -> None:
    """What storage holds was asked anew while the leader read the store, and no world was
    written."""
    cluster = _cluster(answer_s, NODES, NODES, storage=True)
    assert _reach(cluster, 1, NODES)
    cluster.timeline.run(cluster.timeline.now_s + TRAINS_S, lambda: False)
    cluster.strike("lose-node", cluster.running()[-1])
    assert _reach(cluster, 2, NODES - 1), list(cluster.history)[-8:]


@pytest.mark.parametrize("answer_s", [0.0, 0.5])
def test_spares_follow_a_lost_world_with_a_slow_store(answer_s: float) -> None:
    """Each slow read of the spare that takes over made the lapsed leases doubtful anew."""
    cluster = _cluster(answer_s, 4, 2)
    assert _reach(cluster, 1, 2)
    cluster.timeline.run(cluster.timeline.now_s + TRAINS_S, lambda: False)
    world = cluster.world
    assert world is not None
    for member in world.members:
        cluster.strike("lose-node", cluster.hosts[member.node].agent)
    assert _reach(cluster, 2, 2), list(cluster.history)[-8:]
