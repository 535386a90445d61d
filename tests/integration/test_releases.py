"""A job goes on while its nodes are replaced, one after another, by those of this release."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest

import elasticzero
import elasticzero.checkpoint
from elasticzero.launcher.local.cluster import Node, Placement
from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.clusters import REGRESSION, Story, story
from tests.integration.reference import steps_in
from tests.integration.test_elastic_training import check_samples
from tests.support.releases import (
    AFTER,
    BEFORE,
    copy_as_release_after,
    unpack_release_before,
)

OLD = ("node-0", "node-1", "node-2")
GLOBAL_BATCH, EPOCHS = 24, 28
"""At an epoch's end too each of four nodes has two samples, which a BatchNorm needs: the release
before deals one as well."""


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
@pytest.mark.parametrize(
    ("strategy", "batch_norm"), [("ddp", False), ("ddp", True), ("zero1", True)]
)
def test_nodes_of_the_release_before_are_replaced_one_by_one(
    tmp_path: Path, root: Path, job: str, etcd: EtcdServer, strategy: str, batch_norm: bool
) -> None:
    """Either release leads, and a node of each is killed while both are there. A network with
    buffers is evaluated besides: ranks share buffers then, and after each step."""
    place = placed(unpack_release_before(root, tmp_path / "before"))
    assert version(dict(place("node-0").environment)) == BEFORE != elasticzero.__version__
    arguments = ["--nnodes", "1:4", "--strategy", strategy, "--lease-ttl", "2"]
    arguments += ["--redundancy", "mirror"] if strategy == "zero1" else []
    arguments += ["--checkpoint-dir", str(tmp_path / "c"), "--checkpoint-every", "25"]
    arguments += [str(REGRESSION), "--epochs", str(EPOCHS), "--pause", "0.1"]
    arguments += ["--global-batch", str(GLOBAL_BATCH), *(["--batch-norm"] if batch_norm else [])]
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
    tiers = {world["generation"]: world["tier"] for world in told.of("world")}
    last = tiers.pop(max(tiers))  # into a world of one release a node comes inside the loop
    assert last == ("live" if strategy == "ddp" else "ram")
    assert (tiers.pop(1), set(tiers.values())) == ("fresh", {"ram"})
    check_samples(told.lineage, told.directory(), epochs=EPOCHS, global_batch=GLOBAL_BATCH)
    if batch_norm:
        forwards = elasticzero.checkpoint.load(tmp_path / "c")["model/1.num_batches_tracked"]
        assert int(forwards) == steps_in(GLOBAL_BATCH, EPOCHS), "as rank 0 of each world has made"


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_nodes_of_two_releases_begin_together(
    tmp_path: Path, root: Path, job: str, etcd: EtcdServer
) -> None:
    """The first values are larger than the parts in which ranks of one release send them."""
    before = unpack_release_before(root, tmp_path / "before")
    old = Placement(environment=before, command_line="elasticzero.launcher.cli")
    arguments = ["--nnodes", "2", "--strategy", "ddp", str(REGRESSION), "--batch-norm"]
    arguments += ["--epochs", "1", "--hidden", "80000", "--global-batch", str(GLOBAL_BATCH)]
    places = {"node-0": old, "node-1": Placement()}
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=2, place=places.__getitem__) as told:
        assert set(told.wait_for_end().values()) == {0}, told.logs()
    check_samples(told.lineage, told.directory(), epochs=1, global_batch=GLOBAL_BATCH)


def says(told: Story, node: str, text: str) -> bool:
    """Returns whether the agent of a node has printed this."""
    return text in (told.directory() / node / "agent.log").read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_fleet_goes_over_to_the_next_minor_release_once(
    tmp_path: Path, root: Path, job: str, etcd: EtcdServer
) -> None:
    """Node by node: a new one comes, and an old one is drained. Both name the difference. The old
    ones train until more have the newer release, and give it their state from memory."""
    after = copy_as_release_after(root, tmp_path / "after")
    assert version(after) == AFTER != elasticzero.__version__

    def place(node: str) -> Placement:
        return Placement() if node in OLD else Placement(environment=after)

    arguments = ["--nnodes", "1:4", "--strategy", "ddp", "--lease-ttl", "2"]
    arguments += ["--checkpoint-dir", str(tmp_path / "c"), "--checkpoint-every", "25"]
    arguments += [str(REGRESSION), "--epochs", str(EPOCHS), "--pause", "0.1"]
    arguments += ["--global-batch", str(GLOBAL_BATCH)]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=3, place=place) as told:
        trains_again(told, 1)
        told.pause(0.4)
        told.cluster.start_node()
        first, second, third = told.of("world")[0]["members"]  # they came in any order
        sentence = f"node-3 has ElasticZero {AFTER}, and {first} has ElasticZero"
        for node in (first, "node-3"):
            told.wait("a line", partial(says, told, node, sentence))
        told.cluster.drain(told.cluster.nodes[first])
        trains_again(told, 2)
        assert members(told) == {second, third}, "it trains with the release that trains"
        told.cluster.start_node()
        told.wait("it waits", lambda: says(told, "node-4", "node-4 is set aside"))
        told.cluster.drain(told.cluster.nodes[second])
        trains_again(told, 3)
        assert members(told) == {"node-3", "node-4"}
        last = max(told.of("world"), key=lambda world: world["generation"])
        assert last["tier"] == "ram"
        assert f"{third} is set aside: {third} has ElasticZero" in last["reason"]
        told.cluster.drain(told.cluster.nodes[third])
        told.cluster.start_node()
        trains_again(told, 4)
        assert members(told) == {"node-3", "node-4", "node-5"}
        codes = told.wait_for_end()
    assert {codes[node] for node in ("node-3", "node-4", "node-5")} == {0}
    check_samples(told.lineage, told.directory(), epochs=EPOCHS, global_batch=GLOBAL_BATCH)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_the_last_old_node_hands_over_what_only_it_holds(
    tmp_path: Path, root: Path, job: str, etcd: EtcdServer
) -> None:
    """Without a checkpoint directory, and with as few nodes as can be."""
    after = copy_as_release_after(root, tmp_path / "after")
    places = {"node-0": Placement(), "node-1": Placement(environment=after)}
    arguments = ["--nnodes", "1", "--strategy", "ddp", "--lease-ttl", "2", str(REGRESSION)]
    arguments += ["--epochs", "6", "--pause", "0.1", "--global-batch", str(GLOBAL_BATCH)]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=1, place=places.__getitem__) as told:
        told.wait_for_step(3)
        told.pause(0.4)
        told.cluster.start_node()
        told.wait("it waits", lambda: says(told, "node-1", "node-1 is set aside"))
        told.cluster.drain(told.node(0))
        trains_again(told, 2)
        assert members(told) == {"node-1"}
        assert {world["tier"] for world in told.of("world")} == {"fresh", "ram"}
        codes = told.wait_for_end()
    assert codes["node-1"] == 0
    check_samples(told.lineage, told.directory(), epochs=6, global_batch=GLOBAL_BATCH)
