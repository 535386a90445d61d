"""Ranks whose state or whose scripts are not the same: they are named, and no result is wrong."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from elasticzero.errors import ExitCode
from elasticzero.ipc.failure import Failed
from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.clusters import SCRIPTS, Story, story
from tests.integration.reference import undisturbed
from tests.integration.test_elastic_training import check_weights
from tests.integration.training_harness import Pool
from tests.support.cases import slow

SCRIPT = SCRIPTS / "unlike.py"
NAMED = re.compile(r"rank 1 on (\S+) has (\S+) digest [0-9a-f]{16}")


@pytest.fixture(scope="module")
def expected_weights() -> dict[str, Tensor]:
    """The weights of an undisturbed run."""
    return undisturbed(global_batch=12, epochs=2)


def job_arguments(script_arguments: str, *options: str) -> list[str]:
    return [*options, str(SCRIPT), *script_arguments.split()]


def world(told: Story, generation: int) -> dict[str, Any]:
    return next(event for event in told.of("world") if event["generation"] == generation)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("strategy", "change", "every", "name"),
    [
        slow("ddp", "add", "5", "model/2.weight"),
        slow("ddp", "bit", "1", "model/2.weight"),
        ("zero2", "add", "1", "model/2.weight"),
    ],
)
def test_a_rank_that_differs_is_set_aside_and_its_steps_redone(
    strategy: str,
    change: str,
    every: str,
    name: str,
    tmp_path: Path,
    job: str,
    etcd: EtcdServer,
    expected_weights: dict[str, Tensor],
) -> None:
    """One element of a parameter, or one bit, on rank 1 after step 7: the run ended with exit
    code 0 and other weights than an undisturbed one."""
    arguments = job_arguments(
        f"--change 1:{change}@7",
        *["--nnodes", "2:3", "--strategy", strategy, "--verify-replicas", every],
        *["--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "4"],
    )
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=3) as told:
        codes = told.wait_for_end()
    assert set(codes.values()) == {0}, told.logs()
    first, second = world(told, 1), world(told, 2)
    odd = first["members"][1]
    named = NAMED.search(second["reason"])
    assert named is not None and named.groups() == (odd, name), second["reason"]
    assert f"{odd} is set aside" in second["reason"]
    assert second["members"] == [node for node in first["members"] if node != odd]
    assert second["resume_step"] <= 7
    check_weights(tmp_path / "checkpoints", expected_weights)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_rate_that_differs_ends_the_job(
    strategy: str, tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    """The script sets it, in the next generation too: no rank is set aside for it."""
    arguments = job_arguments(
        "--change 1:lr@7",
        *["--nnodes", "2:3", "--strategy", strategy, "--verify-replicas", "3"],
    )
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=3) as told:
        codes = told.wait_for_end()
    assert set(codes.values()) == {ExitCode.USAGE}, told.logs()
    log = (told.directory() / world(told, 1)["members"][0] / "agent.log").read_text()
    assert "options of the optimizers' groups, as lr, are not the same on all ranks after" in log


@pytest.mark.timeout(120)
@pytest.mark.parametrize("strategy", [slow("ddp"), "zero2"])
def test_two_ranks_that_differ_go_back_to_a_verified_state(
    strategy: str, tmp_path: Path, job: str, etcd: EtcdServer, expected_weights: dict[str, Tensor]
) -> None:
    """Without a majority none of both is right; and no checkpoint was written after the change."""
    arguments = job_arguments(
        "--change 1:add@7",
        *["--nnodes", "2:2", "--strategy", strategy, "--verify-replicas", "1"],
        *["--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "2"],
    )
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=2) as told:
        codes = told.wait_for_end()
    assert set(codes.values()) == {0}, told.logs()
    second = world(told, 2)
    assert "were equal at step 6" in second["reason"]
    assert len(second["members"]) == 2 and 0 < second["resume_step"] <= 6
    check_weights(tmp_path / "checkpoints", expected_weights)


@pytest.mark.timeout(120)
def test_two_ranks_that_differ_end_a_job_without_checkpoints(
    tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    arguments = job_arguments("--change 1:bit@7", "--nnodes", "2:2", "--verify-replicas", "5")
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=2) as told:
        codes = told.wait_for_end()
    assert set(codes.values()) == {ExitCode.FAILED}, told.logs()
    members = world(told, 1)["members"]
    log = (told.directory() / members[0] / "agent.log").read_text()
    assert "of 'model/2.weight' rank 0 on" in log
    digests = re.findall(r"rank (\d) on (\S+) has digest ([0-9a-f]{16})", log)
    assert [(rank, node) for rank, node, _ in digests[:2]] == [("0", members[0]), ("1", members[1])]
    assert digests[0][2] != digests[1][2]
    assert told.generation == 1


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_a_majority_without_checkpoints_goes_on_by_itself(
    tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    arguments = job_arguments("--change 1:bit@7", "--nnodes", "2:3", "--verify-replicas", "5")
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=3) as told:
        codes = told.wait_for_end()
    assert set(codes.values()) == {0}, told.logs()
    second = world(told, 2)
    assert (second["tier"], second["resume_step"] > 7) == ("ram", True)
    assert NAMED.search(second["reason"])


@pytest.mark.parametrize(
    ("unlike", "message"),
    [
        ("strategy=zero2", "strategy zero2, rank 0 on node0 has ddp"),
        ("hidden=9", "parameter '0.weight' float64 [9, 6], parameter '0.bias' float64 [9]"),
        ("optimizer=Adam", "optimizer Adam"),
        ("lr=0.5", "lr of the optimizer 0.5, rank 0 on node0 has 0.01"),
        ("samples=300", "samples 300, rank 0 on node0 has 331"),
        ("global_batch=10", "global_batch 10, rank 0 on node0 has 12"),
        ("micro_batch=3", "micro_batch 3, rank 0 on node0 has 4"),
        ("epochs=3", "epochs 3, rank 0 on node0 has 2"),
        ("seed=4", "seed 4, rank 0 on node0 has 3"),
        ("shuffle=0", "shuffle False, rank 0 on node0 has True"),
        ("drop_last=1", "drop_last True, rank 0 on node0 has False"),
    ],
)
def test_a_script_that_differs_is_named_with_both_values(
    unlike: str, message: str, pool: Pool
) -> None:
    """The ranks trained on different batches without a word, or ended by SIGABRT."""
    running = pool.start(SCRIPT, ["--unlike", f"1:{unlike}"], 2)
    running.until(running.ended)
    good, bad = (worker.last(Failed) for worker in running.workers)
    assert f"rank 1 on node1 has {message}" in bad.message, running.logs()
    assert (bad.blame, bad.final, good.blame) == ("user", True, "peer")
    assert "start every node with the same script" in running.workers[1].log.read_text()


def test_a_rank_is_judged_by_those_that_have_trained(pool: Pool) -> None:
    running = pool.start(
        SCRIPT,
        ["--unlike", "0:seed=4"],
        3,
        odd={1: trained, 2: trained},
    )
    running.until(running.ended)
    blames = [worker.last(Failed).blame for worker in running.workers]
    assert blames == ["user", "peer", "peer"], running.logs()
    assert "has seed 4, the other ranks have 3" in running.workers[0].last(Failed).message


def test_another_micro_batch_of_the_same_effect_is_no_difference(pool: Pool) -> None:
    """None, and any number from this rank's part on, give one micro-batch a step."""
    running = pool.start(SCRIPT, ["--unlike", "1:micro_batch=50", "--micro-batch", "6"], 2)
    assert running.finish() == 56


@pytest.mark.timeout(120)
def test_scripts_that_differ_end_a_job_that_needs_all_nodes(
    tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    environments = [{}, {"TESTER_UNLIKE": "global_batch=10"}]
    arguments = job_arguments("", "--nnodes", "2:2")
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=2, environments=environments) as told:
        codes = told.wait_for_end()
    assert set(codes.values()) == {ExitCode.USAGE}, told.logs()
    assert told.step == 0
    log = (told.directory() / "node-0" / "agent.log").read_text()
    assert re.search(r"rank 1 on node-\d has global_batch \d+, rank 0 on node-\d has \d+", log)


@pytest.mark.slow  # test_quarantine sets another newcomer aside
@pytest.mark.timeout(120)
def test_a_newcomer_whose_script_differs_waits_and_others_go_on(
    tmp_path: Path, job: str, etcd: EtcdServer, expected_weights: dict[str, Tensor]
) -> None:
    arguments = job_arguments(
        "--pause 0.05", "--nnodes", "1:2", "--checkpoint-dir", str(tmp_path / "checkpoints")
    )
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=1) as told:
        told.wait_for_step(5)
        told.pause(1.0)
        told.cluster.environment = {**told.cluster.environment, "TESTER_UNLIKE": "samples=300"}
        told.cluster.start_node()
        told.wait("its setting aside", lambda: setting_aside(told))
        codes = told.wait_for_end()
    assert set(codes.values()) == {0}, told.logs()
    (alone, *_) = setting_aside(told)
    assert alone["members"] == ["node-0"]
    assert "rank 1 on node-1 has samples 300, rank 0 on node-0 has 331" in alone["reason"]
    assert told.lineage.recomputed == 0
    check_weights(tmp_path / "checkpoints", expected_weights)


def setting_aside(told: Story) -> list[dict[str, Any]]:
    """The worlds that node-1 is set aside for: it comes in live and is refused at its loop, and the
    generation after that, which begins anew, compares all ranks."""
    return [world for world in told.of("world") if "node-1 is set aside" in world["reason"]]


@pytest.mark.timeout(120)
def test_a_tracked_object_that_differs_ends_the_job(
    tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    """A restore gives every rank rank 0's: what the others had would be lost without a word."""
    arguments = job_arguments("--change 1:tracked@7", "--nnodes", "2:2", "--verify-replicas", "5")
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=2) as told:
        codes = told.wait_for_end()
    assert set(codes.values()) == {ExitCode.USAGE}, told.logs()
    log = (told.directory() / "node-0" / "agent.log").read_text()
    assert "of 'tracked/counter' rank 0 on" in log


def trained(parameters: Any) -> Any:
    """The assignment of a node that has trained in an earlier generation."""
    return replace(parameters, trained=True)
