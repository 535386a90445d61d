"""How rendezvous and regrouping grow with the number of nodes, on virtual time.

Agents of the real decision code against the simulator's model of etcd (tests/simulation), which
serves one request after another. Run: `python benchmarks/simulated_rendezvous.py [N ...]`.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from elasticzero.launcher.protocol.documents import to_bytes
from elasticzero.launcher.protocol.policy import JobPolicy
from tests.simulation.cluster import Cluster
from tests.simulation.etcd import Costs
from tests.simulation.schedule import Plan

COSTS = Costs(read_s=50e-6, write_s=100e-6, told_s=20e-6, byte_s=1e-9)
"""One etcd: 20,000 reads or 10,000 writes a second, 50,000 watches told, 1 GB/s."""
LOST_SHARE = 0.01
LIMIT_S = 600.0
REST_S = 10.0


def measure(nodes: int) -> dict[str, float]:
    """The figures for one number of nodes; all come at once."""
    policy = JobPolicy(
        min_nodes=1, max_nodes=nodes, strategy="zero1", settle_s=3.0, lease_ttl_s=5.0
    )
    plan = Plan(
        seed=nodes,
        nodes=nodes,
        policy=policy,
        ttl_s=5,
        total_steps=10**6,
        step_s=1.0,
        snapshot_every=5,
        storage=False,
        connect_s=60.0,
        trouble=0.0,
        long_kernels=False,
        poll_s=0.25,
        apart_s=0.0,
    )
    cluster = Cluster(plan, costs=COSTS)
    for _ in range(nodes):
        cluster.timeline.after(0.0, cluster.add_node)
    timeline, started = cluster.timeline, cluster.rules.started

    def reach(generation: int, count: int) -> float:
        began_s = timeline.now_s
        if not timeline.run(began_s + LIMIT_S, lambda: started.get(generation, 0) >= count):
            raise RuntimeError(f"{started} of {count} nodes know generation {generation}")
        return timeline.now_s - began_s

    def requests() -> list[int]:
        return [agent.store.requests for agent in cluster.running()]

    formed_s = reach(1, nodes)
    joined = requests()
    timeline.run(timeline.now_s + REST_S, lambda: False)
    began = [agent.store.requests + agent.store.pulses for agent in cluster.running()]
    timeline.run(timeline.now_s + REST_S, lambda: False)
    ended = [agent.store.requests + agent.store.pulses for agent in cluster.running()]
    at_rest = (sum(ended) - sum(began)) / REST_S
    lost = max(1, int(nodes * LOST_SHARE))
    before = dict(zip(cluster.running(), requests(), strict=True))
    for agent in cluster.running()[-lost:]:
        cluster.strike("lose-node", agent)
    regrouped_s = reach(2, nodes - lost)
    spent = [agent.store.requests - before[agent] for agent in cluster.running()]
    assert cluster.world is not None
    return {
        "nodes": nodes,
        "formed_s": formed_s,
        "regrouped_s": regrouped_s,
        "join_requests": sum(joined) / len(joined),
        "join_requests_most": max(joined),
        "round_requests": sum(spent) / len(spent),
        "round_requests_most": max(spent),
        "at_rest_per_s": at_rest,
        "world_bytes": len(to_bytes(cluster.world)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nodes", type=int, nargs="*", default=[10, 100, 1000])
    options = parser.parse_args()
    print(
        "| nodes | all know the world | all know the next, 1 % lost | requests a node to join "
        "(most) | requests a node in a round (most) | at rest, all nodes | world |\n"
        "|---|---|---|---|---|---|---|",
        flush=True,
    )
    for nodes in options.nodes:
        began_s = time.monotonic()
        row = measure(nodes)
        print(
            f"| {nodes:,} | {row['formed_s']:.2f} s | {row['regrouped_s']:.2f} s "
            f"| {row['join_requests']:.1f} ({row['join_requests_most']:,.0f}) "
            f"| {row['round_requests']:.1f} ({row['round_requests_most']:,.0f}) "
            f"| {row['at_rest_per_s']:.1f}/s | {row['world_bytes']:,} bytes |",
            flush=True,
        )
        print(f"{nodes} nodes took {time.monotonic() - began_s:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
