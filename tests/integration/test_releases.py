"""A job goes on while its nodes are replaced, one after another, by those of this release."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import elasticzero
from elasticzero.launcher.local.cluster import Node, Placement
from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.clusters import REGRESSION, Story, story
from tests.integration.test_elastic_training import check_samples
from tests.support.releases import BEFORE, unpack_release_before

OLD = ("node-0", "node-1", "node-2")


def placed(before: Mapping[str, str]) -> Callable[[str], Placement]:
    """The first nodes are of the release before; the others have zones, which it does not know."""

    def place(node: str) -> Placement:
        if node in OLD:
            return Placement(environment=before, command_line="elasticzero.launcher.cli")
        return Placement(environment={"ELASTICZERO_ZONE": f"zone-{int(node[-1]) % 2}"})

    return place


def version(environment: dict[str, str]) -> str:
    script = "import elasticzero; print(elasticzero.__version__)"
    return subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def members(told: Story) -> set[str]:
    return set(max(told.of("world"), key=lambda world: world["generation"])["members"])


def trains_again(told: Story, generation: int) -> None:
    told.wait_for_first_step(generation)
    told.wait_for_step(told.step + 3)


def replace(told: Story, node: Node, generation: int) -> int:
    """One node comes and another one is drained; returns the generation that trains then."""
    told.pause(0.8)
    told.cluster.start_node()
    trains_again(told, generation + 1)
    told.cluster.drain(node)
    trains_again(told, generation + 2)
    told.pause(0.1)
    return generation + 2


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_nodes_of_the_release_before_are_replaced_one_by_one(
    tmp_path: Path, root: Path, job: str, etcd: EtcdServer, strategy: str
) -> None:
    """Either release leads, and a node of each is killed while both are there."""
    place = placed(unpack_release_before(root, tmp_path / "before"))
    assert version(dict(place("node-0").environment)) == BEFORE != elasticzero.__version__
    arguments = ["--nnodes", "1:4", "--strategy", strategy, "--lease-ttl", "2"]
    arguments += ["--redundancy", "mirror"] if strategy == "zero1" else []
    arguments += ["--checkpoint-dir", str(tmp_path / "c"), "--checkpoint-every", "25"]
    arguments += [str(REGRESSION), "--epochs", "12", "--pause", "0.1"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=3, place=place) as told:
        trains_again(told, 1)
        at = replace(told, told.node(0), 1)
        assert members(told) == {"node-1", "node-2", "node-3"}
        told.cluster.kill_node(told.node(3))
        trains_again(told, at + 1)
        at = replace(told, told.node(1), at + 1)
        told.cluster.kill_node(told.node(2))
        trains_again(told, at + 1)
        told.pause(0.8)
        told.cluster.start_node()
        trains_again(told, at + 2)
        assert members(told) == {"node-4", "node-5"}
        assert 0 in told.wait_for_end().values()
    assert {world["tier"] for world in told.of("world") if world["generation"] > 1} == {"ram"}
    check_samples(told.lineage, told.directory(), epochs=12)
