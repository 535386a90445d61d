"""Nodes that fail where others do not are set aside, and no healthy job ends for them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.clusters import REGRESSION, SCRIPTS, Story, elasticzero, story
from tests.support.cases import slow

OTHERS = ["--nnodes", "1:3"]


def reasons(told: Story) -> list[str]:
    """Of the worlds, one after another."""
    return list(dict.fromkeys(event["reason"] for event in told.of("world")))


def joins_with(told: Story, arguments: Sequence[str]) -> str:
    """Start another node with a command of its own; its name."""
    told.cluster.command = [
        *told.cluster.command[: told.cluster.command.index("--nnodes")],
        *arguments,
    ]
    return told.cluster.start_node().name


NEWCOMERS = {
    "a missing module": ([str(SCRIPTS / "fails_on_import.py")], "ModuleNotFoundError: No module"),
    "an older model": ([str(REGRESSION), "--hidden", "9"], ""),
    "another checkpoint directory": (
        ["--checkpoint-dir", "{tmp}/other", str(REGRESSION)],
        "other on node-2 is not the one of rank 0's",
    ),
    "no checkpoint directory": ([str(REGRESSION)], "node-2 has no --checkpoint-dir"),
    "another script": (
        [str(SCRIPTS / "raises_in_train.py")],
        "RuntimeError: this script is not of this job",
    ),
    "a script that ends": ([str(SCRIPTS / "ends_at_once.py")], "exited with status 3"),
}


@pytest.mark.parametrize(
    ("what", "strategy"),
    [
        *(slow(what, "ddp") for what in NEWCOMERS),
        slow("an older model", "zero2"),
    ],
)
def test_a_bad_newcomer_is_set_aside_and_the_others_train(
    what: str, strategy: str, tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    """All nodes exited with 70, and the steps in memory were lost."""
    newcomer, error = NEWCOMERS[what]
    good = [*OTHERS, "--max-restarts", "0", "--strategy", strategy]
    saved = ["--checkpoint-dir", str(tmp_path / "checkpoints"), str(REGRESSION), "--epochs", "4"]
    with story(tmp_path, etcd.endpoint, job, [*good, *saved, "--pause", "0.2"], nodes=2) as told:
        told.wait_for_step(8)
        extra_options = ["--checkpoint-dir", str(tmp_path / "checkpoints")] * (what[:2] != "no")
        extra_options += [word.format(tmp=tmp_path) for word in newcomer]
        with told.slowed(1.0):
            bad = joins_with(told, [*good, *extra_options])
            told.wait("it is set aside", lambda: told.generation >= 3)
        told.wait_for_step(told.step + 5)
        codes = told.wait_for_end()
        log = told.node(2).log.read_text()
    assert codes == {"node-0": 0, "node-1": 0, bad: 0}, told.logs()
    assert told.lineage.recomputed == 0, told.logs()
    joined, aside = reasons(told)[1:3]
    assert joined == "node-2 joined" and aside.startswith("node-2 is set aside: rank 2 failed")
    assert "this node is set aside for 30 s: rank 2 failed where others did not" in log
    assert error in log and error in aside
    assert len(told.committed()) == max(told.committed()) == 4 * 34


@pytest.mark.slow
def test_an_import_error_on_one_of_two_nodes_leaves_the_other(
    tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    """At the start: with MIN 1 the good node trains."""
    arguments = [*OTHERS, str(REGRESSION), "--epochs", "2"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=1) as told:
        bad = joins_with(told, [*OTHERS, str(SCRIPTS / "fails_on_import.py")])
        codes = told.wait_for_end()
    assert codes == {"node-0": 0, bad: 0}, told.logs()
    assert {"node-0", "node-1"} == {n for n, e in told.told if e["event"] == "registered"}
    assert any("node-1 is set aside" in reason for reason in reasons(told)), told.logs()


def test_bad_input_on_all_nodes_ends_the_job_with_64(
    tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    arguments = ["--nnodes", "1:2", "--settle", "3", str(SCRIPTS / "fails_on_import.py")]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=2) as told:
        assert told.wait_for_end() == {"node-0": 64, "node-1": 64}, told.logs()
        assert told.generation <= 2
        log = told.node(0).log.read_text()
    assert "ModuleNotFoundError: No module named 'there_is_no_such_module'" in log
    assert "Traceback" not in log


def test_a_node_whose_worker_crashes_thrice_is_set_aside(
    tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    """SIGSEGV: its death hid behind its peers' loss, and the job ended with two good nodes."""
    arguments = [*OTHERS, "--snapshot-every", "2", "--strategy", "zero1", str(REGRESSION)]
    arguments += ["--pause", "0.2", "--epochs", "3"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=3) as told:
        told.wait_for_step(2)
        bad = told.of("world")[-1]["members"][1]
        node = told.cluster.nodes[bad]
        for generation in (1, 2, 3):
            told.wait_for_first_step(generation)
            os.kill(told.cluster.workers_of(node)[-1], signal.SIGSEGV)
            told.wait_for_generation(generation + 1)
        assert bad not in told.of("world")[-1]["members"]
        told.wait_for_step(told.step + 5)
        codes = told.wait_for_end()
        log = (node.log.parent / "0.log").read_text()
    assert set(codes.values()) == {0}, told.logs()
    by_generation = {event["generation"]: event["reason"] for event in told.of("world")}
    for generation in (2, 3, 4):
        reason = by_generation[generation]
        assert f"on {bad} failed (killed by SIGSEGV)" in reason, by_generation
    assert log.count("Fatal Python error: Segmentation fault") == 3
    assert "regression.py" in log


@pytest.mark.slow
def test_an_interrupted_worker_is_named_and_not_its_peer(
    tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    """KeyboardInterrupt: the worker ended without a word."""
    arguments = [*OTHERS, str(REGRESSION), "--pause", "0.2", "--epochs", "2"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=2) as told:
        told.wait_for_step(3)
        os.kill(told.cluster.workers_of(told.node(1))[-1], signal.SIGINT)
        told.wait("the next generation", lambda: told.generation > 1)
        codes = told.wait_for_end()
    assert set(codes.values()) == {0}, told.logs()
    assert "on node-1 failed (interrupted by SIGINT (KeyboardInterrupt))" in reasons(told)[1]


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("zero1", marks=pytest.mark.slow)])
def test_an_exception_at_the_same_step_on_two_nodes_ends_the_job(
    strategy: str, tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    """On whichever node: one stop and one traceback, after four tries and five tracebacks before.

    Rank 0 raises, so another node has to take its place before it is known whose the error is.
    """
    arguments = [*OTHERS, "--strategy", strategy, "--snapshot-every", "2", str(REGRESSION)]
    with story(tmp_path, etcd.endpoint, job, [*arguments, "--fail-at", "7"], nodes=3) as told:
        codes = told.wait_for_end()
        logs = [path.read_text() for path in told.directory().glob("*/0.log")]
        agents = [told.node(index).log.read_text() for index in range(3)]
    assert set(codes.values()) == {70}, told.logs()
    assert told.generation == 3, told.logs()
    assert sum(log.count("Traceback") for log in logs) == 1
    assert sum("ValueError: told to fail at step 7; the same as in" in log for log in logs) == 2
    for agent in agents:
        assert agent.count("Traceback") <= 1
        assert "on different nodes: the script or its data, not a machine" in agent


def test_a_crash_is_shown_with_one_traceback_on_one_terminal() -> None:
    arguments = ["local", "--nodes", "2", "--nnodes", "1:2", str(REGRESSION), "--fail-at", "7"]
    completed = subprocess.run(
        elasticzero(*arguments), capture_output=True, text=True, timeout=120, check=False
    )
    assert completed.returncode == 70, completed.stdout + completed.stderr
    shown = completed.stdout + completed.stderr
    assert shown.count("Traceback") == 1, shown
    assert len(re.findall("generation [0-9]+: ", completed.stdout)) <= 4, shown
