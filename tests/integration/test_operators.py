"""Operators drain, scale and stop jobs that run; nodes that fail again and again are set aside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from elasticzero.checkpoint.steps import catalog
from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.clusters import REGRESSION, Story, elasticzero, story
from tests.integration.test_elastic_training import check_weights
from tests.integration.test_memory_tier import members

pytestmark = pytest.mark.timeout(240)


class Operator:
    """Somebody at a terminal."""

    def __init__(self, job: str, etcd: EtcdServer) -> None:
        self._place = ["--job", job, "--etcd", etcd.endpoint]

    def begins(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            elasticzero(*arguments, *self._place),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def asks(self, *arguments: str) -> str:
        """The output of a command that succeeds."""
        return self.hears(self.begins(*arguments))

    def hears(self, asked: subprocess.Popen[str]) -> str:
        output, _ = asked.communicate(timeout=120)
        assert asked.returncode == 0, output
        return output

    def sees(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self.asks("status", "--json"))
        return status

    def sees_states(self) -> dict[str, str]:
        return {node["node"]: node["state"] for node in self.sees()["nodes"]}


def reason(told: Story) -> str:
    """Why the newest world was made."""
    return str(max(told.of("world"), key=lambda world: world["generation"])["reason"])


def nothing_read_from_storage(told: Story) -> bool:
    """Every change of the world was made from memory, or inside the loops."""
    later = {world["tier"] for world in told.of("world") if world["generation"] > 1}
    return later <= {"ram", "live"}


def test_two_operators_drain_scale_and_stop_a_job(
    tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    operator, checkpoints = Operator(job, etcd), tmp_path / "c"
    arguments = ["--settle", "60", "--strategy", "zero2", "--checkpoint-dir", str(checkpoints)]
    slow = ["--nnodes", "1:2", *arguments, str(REGRESSION), "--pause", "0.5"]
    with story(tmp_path, etcd.endpoint, job, slow, nodes=3) as told:
        told.wait(
            "two of three nodes", lambda: told.of("world") and len(told.of("registered")) == 3
        )
        first, second = members(told)
        (third,) = told.cluster.nodes.keys() - {first, second}
        told.wait_for_step(2)
        status = operator.sees()
        assert (status["leader"], status["nnodes"], status["world_size"]) == (first, [1, 2], 2)
        assert {node["node"]: node["role"] for node in status["nodes"]} == {
            first: "leader", second: "member", third: "spare"
        }  # fmt: skip
        assert status["step"] >= 2 and status["steps_per_s"] > 0 and 0 < status["goodput"] <= 1

        asked = [("drain", second, "--wait"), ("scale", "1:1", "--wait")]
        processes = [operator.begins(*request) for request in asked]
        outputs = [operator.hears(one) for one in processes]
        assert f"{second} leaves at the next step" in outputs[0]
        assert told.wait("the drained node's end", lambda: not told.cluster.nodes[second].running)
        told.wait("a world of one", lambda: members(told) == [first])
        assert told.cluster.nodes[second].process.returncode == 75
        told.cluster.start_node(name=second)
        told.wait("its return", lambda: operator.sees_states().get(second) == "waiting")
        assert told.cluster.nodes[third].running

        operator.asks("scale", "1:3", "--wait")
        told.wait("a world of three", lambda: set(members(told)) == {first, second, third})
        last = members(told)[-1]
        assert f"{last} gives up its place" in operator.asks("scale", "1:2", "--wait")
        told.wait("a world of two", lambda: len(members(told)) == 2)
        assert reason(told) == f"{last} waits: 2 nodes at most"
        assert operator.sees_states()[last] == "waiting"

        final_output = operator.asks("stop", "--wait")
        codes = told.wait_for_end()
    assert codes == {first: 0, second: 0, third: 0}
    assert told.lineage.recomputed == 0 and nothing_read_from_storage(told)
    assert catalog.newest_good(open_directory(checkpoints)) == told.step
    goes_on = f"--restart goes on from the checkpoint of step {told.step}"
    assert goes_on in final_output
    assert goes_on in told.cluster.nodes[first].log.read_text()
    assert "stopped" in operator.asks("status")
    again = ["run", "--etcd", etcd.endpoint, "--job", job, "--http-port", "0", "--nnodes", "1:1"]
    again += [*arguments, "--log-dir", str(tmp_path / "again")]
    for extra_options, code in (([], 64), (["--restart"], 0)):
        ended = subprocess.run(
            elasticzero(*again, *extra_options, str(REGRESSION)),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ended.returncode == code, ended.stderr
        assert code == 0 or f"was stopped (stopped by an operator; {goes_on})" in ended.stderr
    check_weights(checkpoints, reference)


@pytest.mark.slow
def test_below_min_the_job_waits_goes_on_and_can_be_stopped(
    tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    operator, checkpoints = Operator(job, etcd), tmp_path / "c"
    arguments = ["--nnodes", "2:2", "--strategy", "zero1", "--snapshot-every", "1"]
    arguments += ["--checkpoint-dir", str(checkpoints), str(REGRESSION), "--pause", "0.2"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=2) as told:

        def waits() -> bool:
            texts = [event["reason"] for event in told.of("reason")]
            return "saving step" in texts[-1] or "state is kept" in texts[-1]

        told.wait_for_step(5)
        told.cluster.kill_node(told.cluster.nodes[members(told)[1]])
        told.wait("too few nodes", waits)
        told.cluster.start_node()
        told.wait("the second generation", lambda: told.generation == 2)
        assert nothing_read_from_storage(told) and told.lineage.recomputed <= 2
        told.wait_for_step(told.step + 3)
        survivor, newcomer = members(told)
        told.cluster.kill_node(told.cluster.nodes[newcomer])
        told.wait("too few nodes again", waits)
        operator.asks("stop", "--wait")
        codes = told.wait_for_end()
    assert codes[survivor] == 0
    saved = catalog.newest_good(open_directory(checkpoints))
    assert saved is not None and told.step - 2 <= saved <= told.step


@pytest.mark.slow
def test_a_node_whose_workers_fail_again_and_again_is_set_aside(
    tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    operator = Operator(job, etcd)
    arguments = ["--nnodes", "1:3", "--settle", "60", str(REGRESSION), "--pause", "0.3"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=3) as told:
        told.wait_for_step(2)
        bad = members(told)[1]
        for generation in (1, 2, 3):
            told.wait_for_first_step(generation)
            told.cluster.kill_worker(told.cluster.nodes[bad])
            told.wait_for_generation(generation + 1)
        assert bad not in members(told)
        assert reason(told).startswith(f"{bad} is set aside: its workers failed time and again")
        told.wait("its return as a spare", lambda: operator.sees_states().get(bad) == "set aside")
        agent = told.cluster.nodes[bad].process.pid
        os.kill(agent, signal.SIGSTOP)
        try:
            shown = operator.asks("status").splitlines()
        finally:
            os.kill(agent, signal.SIGCONT)
        row = next(line for line in shown if line.startswith(bad))
        assert "set aside after 3 failures" in row and row.count("?") == 3, shown


@pytest.mark.slow
def test_of_the_nodes_beyond_max_as_many_wait_as_spares_allows(
    tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    arguments = ["--nnodes", "1:1", "--spares", "1", "--lease-ttl", "2", str(REGRESSION)]
    arguments += ["--pause", "0.2", "--epochs", "6"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=3) as told:
        told.wait("a world", lambda: told.of("world"))
        (trains,) = members(told)
        gone = told.wait(
            "one node's end",
            lambda: [n for n in told.cluster.nodes.values() if not n.running],
        )
        assert [node.process.returncode for node in gone] == [75]
        assert "left: there are 1 nodes, and 1 wait (--spares)" in gone[0].log.read_text()
        (spare,) = {node.name for node in told.cluster.running()} - {trains}
        told.cluster.kill_node(told.cluster.nodes[trains])
        told.wait("the spare's world", lambda: members(told) == [spare])
        assert told.wait_for_end()[spare] == 0
