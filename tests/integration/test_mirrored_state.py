"""Divided state with `--redundancy mirror`: a lost node costs no step that was finished."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.clusters import Story, story
from tests.integration.test_elastic_training import check_samples, check_weights
from tests.integration.test_memory_tier import job_arguments, lose, members
from tests.integration.training_harness import Pool
from tests.support.cases import slow

HERE = Path(__file__).parent
pytestmark = pytest.mark.timeout(180)
MIRROR = ("--redundancy", "mirror", "--snapshot-every", "1000")
"""A snapshot is taken at a generation's beginning, and no other one."""


def rare(*values: str) -> Any:
    """What only `make chaos` runs."""
    return pytest.param(*values, marks=pytest.mark.chaos)


def redone(told: Story) -> int:
    return told.lineage.recomputed


@pytest.mark.parametrize("strategy", [slow("zero1"), rare("zero2"), slow("zero3")])
def test_two_lost_nodes_one_after_the_other_cost_no_finished_step(
    strategy: str, tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    """Three nodes, a node is killed; of the two that are left another one is; then one joins, and
    one leaves."""
    options = job_arguments(tmp_path / "c", strategy, "--nnodes", "1:3", *MIRROR)
    with story(tmp_path, etcd.endpoint, job, options, nodes=3) as told:
        told.wait_for_step(20)
        lose(told, 1)
        told.wait_for_first_step(2)
        told.wait_for_step(told.step + 5)
        lose(told, 0)
        told.wait_for_first_step(3)
        told.pause(0.6)
        told.cluster.start_node()
        told.wait_for_first_step(4)
        told.pause(0.1)
        told.cluster.drain(told.cluster.nodes[members(told)[0]])
        told.wait_for_generation(5)
        told.wait_for_end()
    tiers = {world["generation"]: world["tier"] for world in told.of("world")}
    assert tiers == {1: "fresh", 2: "ram", 3: "ram", 4: "ram", 5: "ram"}
    assert redone(told) == 0, told.lineage
    check_samples(told.lineage, told.directory())
    check_weights(tmp_path / "c", reference)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_mirror_without_the_scripts_newest_change_is_not_handed_over(
    pool: Pool, tmp_path: Path, strategy: str
) -> None:
    """Those of zero2 have it; those of zero3 get it with the next gradient."""
    told: dict[str, Any] = {"directory": str(tmp_path), "world_size": 2, "changed": True}
    told |= {"strategy": strategy, "dtype": "float64", "optimizer": "SGD"}
    lines = [json.dumps(told | {"rank": rank}) for rank in range(2)]
    for running in [pool.start(HERE / "training_mirrors.py", [line], 1) for line in lines]:
        running.until(running.ended, 60)
        assert running.workers[0].exit_code == 0, running.logs()
    paths = list(tmp_path.glob("mirror*"))
    assert len(paths) == (2 if strategy == "zero2" else 0)
    for path in paths:
        parameters = {n: t for n, t in load_file(path).items() if n.startswith("model/blocks")}
        assert parameters and all(t.abs().max() <= 0.01 for t in parameters.values())


def test_a_change_of_the_lost_ranks_rows_alone_leaves_no_mirror(pool: Pool, tmp_path: Path) -> None:
    """A clamp may change rows that only the lost rank had. Those that are left ran it too."""
    told: dict[str, Any] = {"directory": str(tmp_path), "world_size": 2, "changed": "elsewhere"}
    told |= {"strategy": "zero3", "dtype": "float64", "optimizer": "SGD"}
    lines = [json.dumps(told | {"rank": rank}) for rank in range(2)]
    for running in [pool.start(HERE / "training_mirrors.py", [line], 1) for line in lines]:
        running.until(running.ended, 60)
        assert running.workers[0].exit_code == 0, running.logs()
    assert not list(tmp_path.glob("mirror*"))


@pytest.mark.parametrize("changed", ["state", "state before"])
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_a_mirror_without_the_scripts_change_of_the_optimizer_is_not_handed_over(
    pool: Pool, tmp_path: Path, strategy: str, changed: str
) -> None:
    """All ranks make it after the last step; or one rank makes it earlier, and tells the others."""
    told: dict[str, Any] = {"directory": str(tmp_path), "world_size": 2, "changed": changed}
    told |= {"strategy": strategy, "dtype": "float64", "optimizer": "SGD"}
    lines = [json.dumps(told | {"rank": rank}) for rank in range(2)]
    for running in [pool.start(HERE / "training_mirrors.py", [line], 1) for line in lines]:
        running.until(running.ended, 60)
        assert running.workers[0].exit_code == 0, running.logs()
    assert not list(tmp_path.glob("mirror*"))


@pytest.mark.parametrize("place", [rare("mirroring"), "gathering"])
def test_a_node_lost_inside_a_step_costs_that_step_at_most(
    place: str, tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    """One rank has not sent its gradient to its mirror yet, and the others wait for it; or it has
    stepped some of its buckets, and the others wait for the rest. Then its node is lost."""
    (holds := tmp_path / "holds").mkdir()
    options = [*job_arguments(tmp_path / "c", "zero1", "--nnodes", "1:3", *MIRROR)]
    options += ["--holds", str(holds)]
    with story(tmp_path, etcd.endpoint, job, options, nodes=3) as told:
        told.wait_for_step(20)
        (holds / f"{place}-1").write_text("1")
        told.wait("the rank at its place", (holds / f"{place}-1-at-1").exists)
        lose(told, 1)
        told.wait_for_generation(2)
        (holds / f"{place}-1").unlink()
        told.wait_for_end()
    second = next(world for world in told.of("world") if world["generation"] == 2)
    assert second["tier"] == "ram" and second["resume_step"] >= 20
    assert redone(told) == 0, told.lineage
    check_samples(told.lineage, told.directory())
    check_weights(tmp_path / "c", reference)


@pytest.mark.parametrize(
    ("strategy", "dtype", "optimizer"),
    [
        ("zero1", "float64", "AdamW"),
        rare("zero1", "bfloat16", "SGD"),
        rare("zero2", "float32", "fused"),
        ("zero2", "bfloat16", "AdamW"),
        rare("zero3", "float64", "AdamW"),
        ("zero3", "bfloat16", "SGD"),
        ("zero1", "float64", "Muon, AdamW"),
        rare("zero2", "bfloat16", "Muon, AdamW"),
        ("zero3", "float32", "Adagrad, SGD"),
        ("zero1", "bfloat16", "Packing"),
    ],
)
def test_a_mirror_equals_its_owners_part_bit_by_bit(
    pool: Pool, tmp_path: Path, strategy: str, dtype: str, optimizer: str
) -> None:
    """Accumulation, clipping, a schedule, parameters unused by some or all ranks, weights that the
    script changes itself."""
    told: dict[str, Any] = {"directory": str(tmp_path), "world_size": 3}
    told |= {"strategy": strategy, "dtype": dtype, "optimizer": optimizer}
    lines = [json.dumps(told | {"rank": rank}) for rank in range(3)]
    for running in [pool.start(HERE / "training_mirrors.py", [line], 1) for line in lines]:
        running.until(running.ended, 60)
        assert running.workers[0].exit_code == 0, running.logs()
    for rank in range(3):
        part = load_file(tmp_path / f"own-{rank}")
        mirror = load_file(tmp_path / f"mirror-{rank}")
        assert part.keys() == mirror.keys()
        assert any(name.startswith("optimizer/") for name in part)
        different = [name for name in part if not torch.equal(part[name], mirror[name])]
        assert not different, (rank, different)


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_nodes_lost_at_random_times_seldom_cost_a_finished_step(
    strategy: str, tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    """Twelve times a node is killed at any time, and another one comes. Only a death while the norm
    is summed goes back to a snapshot."""
    moments = random.Random(15)
    options = job_arguments(
        tmp_path / "c", strategy, "--nnodes", "1:3", *MIRROR, "--max-restarts", "99"
    )
    options[options.index("--pause") + 1] = "0.0"
    with story(tmp_path, etcd.endpoint, job, [*options, "--epochs", "10000"], nodes=3) as told:
        told.wait_for_step(10)
        for _ in range(12):
            before = told.generation
            time.sleep(moments.uniform(0.5, 1.0))
            lose(told, moments.randrange(3))
            told.wait_for_first_step(before + 1)
            told.cluster.start_node()
            told.wait("three nodes", lambda: len(members(told)) == 3)
            told.wait_for_first_step(told.generation)
        lineage = told.lineage
        lost = [lineage.lost(generation) for generation in lineage.resume_steps]
        # A step takes two milliseconds here, of which the sum of the norm is a good part.
        assert sum(steps > 0 for steps in lost) <= 3, lost
        later = [world for world in told.of("world") if world["generation"] > 1]
        assert {world["tier"] for world in later} == {"ram"}
