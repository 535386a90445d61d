"""A bad global batch takes training back to a held state, and is left out from there."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticzero import checkpoint as ez_checkpoint
from elasticzero.checkpoint.io.reader import open_step
from elasticzero.checkpoint.steps.catalog import newest_good
from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.launcher.store.etcd.server import EtcdServer
from elasticzero.spans import STRATEGIES
from tests.integration.clusters import Story, story
from tests.integration.scripts import bad_batches as script
from tests.integration.test_memory_tier import lose

SCRIPT = Path(script.__file__)
STEPS = 36
BAD = 29
"""The global batch of step 30, counted from 0."""
ROWS = ("--shard", "node", "--nproc-per-node", "2")
pytestmark = pytest.mark.timeout(180)


def options(folder: Path, strategy: str, told: dict[str, Any], *extra_options: str) -> list[str]:
    line = {"out": str(folder / "out"), "log": str(folder / "log"), "steps": STEPS} | told
    arguments = ["--strategy", strategy, "--checkpoint-dir", str(folder / "c")]
    arguments += ["--max-restarts", "0"]
    return [*arguments, "--snapshot-every", "10", *extra_options, str(SCRIPT), json.dumps(line)]


def plain(left_out: set[int]) -> dict[str, torch.Tensor]:
    """The weights after a plain loop in one process without these batches."""
    net, samples = script.model(), script.data(STEPS)
    optimizer = script.optimizer(net.parameters())
    for number in range(STEPS):
        if number not in left_out:
            first = number * script.GLOBAL_BATCH
            optimizer.zero_grad()
            script.loss_of(net, samples[first : first + script.GLOBAL_BATCH]).backward()
            optimizer.step()
    return {name: tensor.detach() for name, tensor in net.named_parameters()}


def check_result(folder: Path, left_out: set[int]) -> dict[str, Any]:
    """The weights are those without these batches, which the newest checkpoint names as skipped;
    returns what the script has written."""
    outcome: dict[str, Any] = json.loads((folder / "out").read_text())
    for name, tensor in plain(left_out).items():
        weights = torch.tensor(outcome["weights"][name], dtype=torch.float64)
        torch.testing.assert_close(weights, tensor, atol=1e-9, rtol=0, msg=name)
    assert outcome["count"] == STEPS - len(left_out)
    directory = open_directory(str(folder / "c"))
    assert newest_good(directory) == STEPS
    assert all(tensor.isfinite().all() for tensor in ez_checkpoint.load(folder / "c").values())
    position = open_step(directory.step(f"step-{STEPS:012d}")).manifest.state["position"]
    assert {entry["start"] // script.GLOBAL_BATCH for entry in position["skipped"]} == left_out
    assert len(position["skipped"]) == len(left_out)
    return outcome


def computed(folder: Path) -> list[tuple[int, int]]:
    """The (generation, global batch) that rank 0 has computed a loss of."""
    lines = (folder / "log").read_text().splitlines()
    return [(int(generation), int(number)) for generation, number in map(str.split, lines)]


def resumed(told: Story, generation: int) -> tuple[str, int]:
    world = next(world for world in told.of("world") if world["generation"] == generation)
    return world["tier"], world["resume_step"]


def long(*arguments: str) -> Any:
    """What `make slow` runs."""
    return pytest.param(arguments, marks=pytest.mark.slow, id=" ".join(arguments))


@pytest.mark.parametrize(
    "strategy_options",
    [
        ("zero3",),
        long("ddp"),
        long("zero1"),
        long("zero2"),
        long("zero2", "--redundancy", "mirror", "--keep-workers"),
        long("zero2", *ROWS),
        long("zero3", *ROWS, "--keep-workers"),
    ],
)
def test_bad_batches_are_left_out_after_going_back(
    strategy_options: tuple[str, ...], tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    """Two in a row, on one rank: two rollbacks, none of which counts as a restart."""
    bad = {BAD, BAD + 1}
    strategy, *extra_options = strategy_options
    arguments = options(
        tmp_path, strategy, {"bad": sorted(bad)}, *extra_options, "--on-nonfinite", "rollback"
    )
    with story(tmp_path, etcd.endpoint, job, ["--nnodes", "2", *arguments], nodes=2) as told:
        assert set(told.wait_for_end().values()) == {0}, told.logs()
        assert "training goes back to a held state" in told.logs()
    assert check_result(tmp_path, bad)["generation"] == 3
    done = computed(tmp_path)
    for generation, number in ((2, BAD), (3, BAD + 1)):
        tier, step = resumed(told, generation)
        assert tier == "ram" and 0 < step <= number
        assert [g for g, n in done if n == number] == [generation - 1], "computed once"
    assert (2, BAD - 1) in done, "what was between is computed again"


@pytest.mark.parametrize(
    "strategy", ["zero2", *(pytest.param(s, marks=pytest.mark.slow) for s in ("ddp", "zero3"))]
)
def test_what_is_left_out_outlives_a_killed_worker_and_a_lost_node(
    strategy: str, tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    """Both happen after the rollback, before training has come to the batch again."""
    told_to = {"bad": [BAD], "die": [2, 1, BAD - 4], "pause": 0.1}
    arguments = options(tmp_path, strategy, told_to, "--on-nonfinite", "rollback")
    arguments[arguments.index("--max-restarts") + 1] = "3"
    with story(tmp_path, etcd.endpoint, job, ["--nnodes", "1:2", *arguments], nodes=2) as told:
        told.wait_for_first_step(3)
        lose(told, 1)
        told.wait_for_generation(4)
        told.wait_for_end()
        assert resumed(told, 4)[1] < BAD
    assert check_result(tmp_path, {BAD})["generation"] == 4
    assert [g for g, n in computed(tmp_path) if n == BAD] == [1]


@pytest.mark.slow
def test_a_spike_goes_back_to_a_checkpoint_where_no_snapshot_is_taken(
    tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    """Nothing that is committed is undone."""
    extra_options = ["--on-spike", "rollback:20:5", "--snapshot-every", "0"]
    extra_options += ["--checkpoint-every", "8"]
    arguments = options(
        tmp_path, "zero1", {"bad": [], "spike": [BAD], "pause": 0.02}, *extra_options
    )
    with story(tmp_path, etcd.endpoint, job, ["--nnodes", "2", *arguments], nodes=2) as told:
        assert set(told.wait_for_end().values()) == {0}, told.logs()
    assert check_result(tmp_path, {BAD})["generation"] == 2
    assert resumed(told, 2)[1] == 24


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy_options",
    [*((s,) for s in STRATEGIES), *((s, *ROWS) for s in STRATEGIES[1:])],
    ids=" ".join,
)
@pytest.mark.parametrize("action", ["stop", "skip"])
def test_the_other_choices_go_back_to_nothing(
    action: str, strategy_options: tuple[str, ...], tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    strategy, *extra_options = strategy_options
    arguments = options(
        tmp_path, strategy, {"bad": [BAD]}, *extra_options, "--on-nonfinite", action
    )
    with story(tmp_path, etcd.endpoint, job, ["--nnodes", "2", *arguments], nodes=2) as told:
        codes = set(told.wait_for_end().values())
    assert len(computed(tmp_path)) == (BAD + 1 if action == "stop" else STEPS)
    if action == "skip":
        assert codes == {0} and check_result(tmp_path, {BAD})["generation"] == 1
        return
    assert codes == {64} and newest_good(open_directory(str(tmp_path / "c"))) == BAD
    state = ez_checkpoint.load(tmp_path / "c")
    assert all(math.isfinite(value) for tensor in state.values() for value in tensor.flatten())
