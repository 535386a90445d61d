"""A worker or a node is killed at each place within a step, wherever state is divided and copied.

make chaos                                                   # every strategy and placement
python -m pytest -m chaos tests/chaos/test_kills_within_steps.py -k 'zero2 and mirror'

The rank that dies is inside its backward, where it has sent the last layer's gradients and the
others wait for the rest; or it has all sums and has not stepped yet; or updated parameters are
gathered, some of which it has. The weights are those of a run that nothing has disturbed.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.chaos.test_worlds import LONG_STEP_S, STEP_S, trains_whole
from tests.integration.clusters import REGRESSION, Story, story
from tests.integration.test_elastic_training import check_samples, check_weights
from tests.integration.test_memory_tier import members

PLACES = ("reducing", "between", "gathering")
PLACEMENTS = {
    "world": ((3, 1), ("--snapshot-every", "1")),
    "node": ((2, 2), ("--shard", "node")),
    "mirror": ((3, 1), ("--redundancy", "mirror", "--snapshot-every", "1000")),
    "fixed order": ((2, 2), ("--shard", "node", "--deterministic")),
}
"""How state is divided and what it is read from after a loss; by name: nodes and workers a node,
and options."""
DRAWN = {("zero2", "node", "node"), ("zero3", "mirror", "worker")}


def cells() -> list[Any]:
    """Every strategy, placement and fault; `make slow` runs those of DRAWN."""
    return [
        pytest.param(*cell, marks=pytest.mark.slow if cell in DRAWN else pytest.mark.chaos)
        for cell in product(("zero1", "zero2", "zero3"), PLACEMENTS, ("worker", "node"))
        if cell[:2] != ("zero3", "fixed order")
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("strategy", "placement", "fault"), cells())
def test_kills_within_a_step_change_nothing(
    strategy: str,
    placement: str,
    fault: str,
    tmp_path: Path,
    job: str,
    etcd: EtcdServer,
    reference: dict[str, Tensor],
) -> None:
    (nodes, workers), options = PLACEMENTS[placement]
    (holds := tmp_path / "holds").mkdir()
    arguments = ["--nnodes", f"1:{nodes}", "--nproc-per-node", str(workers), "--strategy", strategy]
    arguments += [*options, "--lease-ttl", "2", "--max-restarts", "9"]
    arguments += ["--checkpoint-dir", str(tmp_path / "c"), str(REGRESSION)]
    arguments += ["--holds", str(holds)]
    arguments += ["--virtual-batch", "2"] if placement == "fixed order" else []
    spares = len(PLACES) if fault == "node" else 0
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=nodes + spares) as told:
        told.pause(LONG_STEP_S)
        told.wait("registrations", lambda: len(registered(told)) == nodes + spares)
        told.pause(STEP_S)
        for index, place in enumerate(PLACES):
            told.wait_for_step(told.step + 4)
            victim = -1 - index if fault == "worker" else -1
            strike(told, holds, place, fault, (victim % nodes, workers))
            trains_whole(told, nodes)
        told.wait_for_end()
    lineage = told.lineage
    if placement != "world":
        assert lineage.recomputed == 0, lineage
    assert {world["tier"] for world in told.of("world") if world["generation"] > 1} == {"ram"}
    check_samples(lineage, told.directory())
    check_weights(tmp_path / "c", reference)


def strike(told: Story, holds: Path, place: str, fault: str, of_node: tuple[int, int]) -> None:
    """Kills the last worker of a node, or the node, at a place of a step. A spare takes the place
    of a node.

    of_node: its index among the members, and its number of workers. A node whose workers alone fail
    time and again is set aside, so the workers of one node are not killed three times.
    """
    generation, (index, workers) = told.generation, of_node
    rank = index * workers + workers - 1
    (holds / f"{place}-{generation}").write_text(str(rank))
    told.wait(f"rank {rank} {place}", (holds / f"{place}-{generation}-at-{rank}").exists)
    node = told.cluster.nodes[members(told)[index]]
    if fault == "worker":
        told.cluster.kill_worker(node)
    else:
        told.cluster.kill_node(node)
    told.wait_for_generation(generation + 1)
    (holds / f"{place}-{generation}").unlink()


def registered(told: Story) -> set[str]:
    return {name for name, event in told.told if event["event"] == "registered"}
