"""Faults in orders that a protocol of leases and reports gets wrong first."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from torch import Tensor

from elasticzero.launcher.agent.assignments import CONNECT_S
from elasticzero.launcher.snapshots.shared_memory import snapshot_directory
from elasticzero.launcher.store.etcd.server import EtcdServer
from elasticzero.processes import children_of
from tests.integration.clusters import REGRESSION, SCRIPTS, Story, elasticzero, story
from tests.integration.test_elastic_training import check_samples, check_weights

pytestmark = pytest.mark.slow

SHORT = ("--lease-ttl", "2", "--settle", "10")


@pytest.mark.timeout(120)
def test_a_world_whose_nodes_are_all_gone_is_taken_over(
    tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    checkpoints = tmp_path / "checkpoints"
    arguments = ["--nnodes", "1:2", *SHORT, "--checkpoint-dir", str(checkpoints)]
    arguments += ["--checkpoint-every", "10", str(REGRESSION), "--pause", "0.03"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=2) as told:
        told.wait_for_step(25)
        for node in told.cluster.running():
            told.cluster.kill_node(node)
        told.cluster.start_node()
        codes = told.wait_for_end()
    assert codes["node-2"] == 0
    assert told.generation == 2
    assert told.lineage.resume_steps[2] >= 20
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)


@pytest.mark.timeout(120)
def test_the_leader_dies_after_it_answered(
    tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    """One worker is slow, another is killed, and the leader dies while it waits for the first."""
    checkpoints, holds = tmp_path / "checkpoints", tmp_path / "holds"
    holds.mkdir()
    arguments = ["--nnodes", "1:3", *SHORT, "--checkpoint-dir", str(checkpoints)]
    arguments += [str(REGRESSION), "--pause", "0.05", "--holds", str(holds)]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=3) as told:
        told.wait_for_step(10)
        leader, slow, killed = (told.cluster.nodes[n] for n in told.of("world")[0]["members"])
        (holds / "step-1").write_text("1")
        told.wait("a slow rank", (holds / "step-1-at-1").exists)
        told.cluster.kill_worker(killed)
        waits = f"waiting for the workers of {slow.name}"
        told.wait("the leader waits", lambda: _said(told, leader.name, waits))
        told.cluster.kill_node(leader)
        (holds / "step-1").unlink()
        codes = told.wait_for_end()
    assert sorted(codes.values()) == [-9, 0, 0], told.logs()
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)


@pytest.mark.timeout(120)
def test_a_stopped_worker_does_not_keep_a_round_waiting(
    tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    """What makes the round is another worker's failure, and no hang is looked for."""
    checkpoints = tmp_path / "checkpoints"
    arguments = ["--nnodes", "1:2", *SHORT, "--hang-timeout", "0"]
    arguments += ["--checkpoint-dir", str(checkpoints), "--checkpoint-every", "5"]
    arguments += [str(REGRESSION), "--pause", "0.05"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=2) as told:
        told.wait_for_step(10)
        stopped, killed = (told.cluster.nodes[n] for n in told.of("world")[0]["members"])
        (worker,) = told.cluster.workers_of(stopped)
        os.kill(worker, signal.SIGSTOP)
        told.cluster.kill_worker(killed)
        codes = told.wait_for_end()
    assert set(codes.values()) == {0}, told.logs()
    assert told.generation == 2, told.logs()
    assert _said(told, stopped.name, "a worker here is stopped by a signal, and is killed")
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)


@pytest.mark.timeout(120)
def test_sigterm_ends_a_job_of_one_node_and_its_state_is_saved(
    tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    checkpoints = tmp_path / "checkpoints"
    arguments = ["--nnodes", "1:1", *SHORT, "--checkpoint-dir", str(checkpoints)]
    arguments += [str(REGRESSION), "--pause", "0.05"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=1) as told:
        told.wait_for_step(15)
        told.cluster.drain(told.node(0))
        told.wait("its end", lambda: not told.node(0).running)
        told.cluster.start_node()
        codes = told.wait_for_end()
    assert codes == {"node-0": 75, "node-1": 0}
    assert told.lineage.recomputed == 0
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("slow", ["boundary", "import"])
def test_a_drain_loses_nothing_where_ranks_are_slow(
    slow: str, tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    """Ranks come to the boundary far apart; or the next generation takes long to ask for state."""
    checkpoints = tmp_path / "checkpoints"
    arguments = ["--nnodes", "1:3", *SHORT, "--strategy", "zero2"]
    arguments += ["--checkpoint-dir", str(checkpoints), str(REGRESSION), "--pause", "0.02"]
    arguments += ["--slow-after", "20"] if slow == "boundary" else ["--slow-start", "6"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=3) as told:
        told.wait_for_step(20 if slow == "boundary" else 10)
        leaver = told.cluster.nodes[told.of("world")[0]["members"][-1]]
        told.cluster.drain(leaver)
        codes = told.wait_for_end()
    assert sorted(codes.values()) == [0, 0, 75], told.logs()
    assert told.lineage.recomputed == 0, told.logs()
    assert told.generation == 2
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)


@pytest.mark.timeout(120)
def test_rank_0_may_start_later_than_a_process_group_may_take(
    tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    checkpoints = tmp_path / "checkpoints"
    arguments = ["--nnodes", "1:2", *SHORT, "--checkpoint-dir", str(checkpoints), str(REGRESSION)]
    arguments += ["--slow-start", str(1.4 * CONNECT_S), "--slow-rank", "0"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=2) as told:
        codes = told.wait_for_end()
        (late,) = {world["members"][0] for world in told.of("world")}
    assert set(codes.values()) == {0}, told.logs()
    assert told.generation == 1
    (other,) = set(told.cluster.nodes) - {late}
    assert "was not reached for 10 s" in (told.directory() / other / "0.log").read_text()
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("survivor", ["kept", pytest.param("forked", marks=pytest.mark.chaos)])
def test_a_newcomer_may_start_later_than_a_process_group_may_take(
    survivor: str, tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    checkpoints = tmp_path / "checkpoints"
    arguments = ["--nnodes", "1:2", "--checkpoint-dir", str(checkpoints), "--settle", "0"]
    arguments += ["--changes-inside", "off"]  # else it prepares beside the training
    arguments += ["--keep-workers"] if survivor == "kept" else []
    arguments += [str(REGRESSION), "--slow-start", str(1.4 * CONNECT_S), "--slow-rank", "1"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=1) as told:
        told.pause(0.8)
        told.wait_for_step(5)
        told.cluster.start_node()
        told.wait("the newcomer's world", lambda: told.generation == 2)
        codes = told.wait_for_end()
    assert set(codes.values()) == {0}, told.logs()
    assert told.generation == 2 and told.lineage.recomputed == 0
    log = (told.directory() / "node-0" / "0.log").read_text()
    assert "waiting for rank 1 to call elasticzero.run() (10 s)" in log
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)


@pytest.mark.timeout(120)
def test_a_node_told_to_leave_waits_for_nobody_whose_script_starts_slowly(
    tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    checkpoints = tmp_path / "checkpoints"
    arguments = ["--nnodes", "1:2", *SHORT, "--checkpoint-dir", str(checkpoints), str(REGRESSION)]
    arguments += ["--slow-start", "600", "--slow-rank", "1"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=2) as told:
        told.wait("the first world", lambda: len(told.of("started")) == 2)
        leaver = told.cluster.nodes[told.of("world")[0]["members"][0]]
        told.cluster.drain(leaver)
        codes = told.wait_for_end()
    assert codes.pop(leaver.name) == 75
    assert set(codes.values()) == {0}, told.logs()
    assert told.generation == 2
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)


@pytest.mark.timeout(120)
def test_a_leader_told_to_leave_while_etcd_is_away_does_leave(
    tmp_path: Path, job: str, reference: dict[str, Tensor]
) -> None:
    checkpoints = tmp_path / "checkpoints"
    arguments = ["--nnodes", "1:2", *SHORT, "--checkpoint-dir", str(checkpoints)]
    arguments += [str(REGRESSION), "--pause", "0.1"]
    with EtcdServer() as etcd, story(tmp_path, etcd.endpoint, job, arguments, nodes=2) as told:
        told.wait_for_step(5)
        leader = told.cluster.nodes[told.of("world")[0]["members"][0]]
        etcd.pause()
        time.sleep(1.0)
        told.cluster.drain(leader)
        time.sleep(3.0)
        etcd.resume()
        codes = told.wait_for_end()
        assert sorted(codes.values()) == [0, 75], told.logs()
        assert told.lineage.recomputed == 0
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)


@pytest.mark.timeout(120)
def test_the_leader_dies_after_all_have_finished(
    tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    """What is finished is not trained again."""
    arguments = ["--nnodes", "1:2", *SHORT, str(REGRESSION), "--epochs", "1", "--linger", "3"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=2) as told:
        first = told.wait("a world", lambda: told.of("world"))[0]["members"]
        leader, other = (told.cluster.nodes[name] for name in first)
        told.wait("the leader's report", lambda: _said(told, leader.name, "every worker here has"))
        told.cluster.kill_node(leader)
        codes = told.wait_for_end()
    assert codes[other.name] == 0
    assert told.generation == 1, told.logs()


def _said(told: Story, node: str, text: str) -> bool:
    reasons = [e["reason"] for n, e in told.told if n == node and e["event"] == "reason"]
    return any(text in reason for reason in reasons)


@pytest.mark.timeout(120)
def test_a_failing_network_ends_the_job(
    tmp_path: Path, job: str, etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank is there, but none can connect: that is no preemption to be forgiven for ever."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    arguments = ["--nnodes", "2:2", *SHORT, "--max-restarts", "2", str(REGRESSION)]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=2) as told:
        codes = told.wait_for_end()
        log = told.node(0).log.read_text()
    assert set(codes.values()) == {70}
    assert "times in a row without progress" in log


@pytest.mark.timeout(120)
@pytest.mark.parametrize("killed", ["server", pytest.param("keeper", marks=pytest.mark.slow)])
def test_the_fork_server_dies(
    tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor], killed: str
) -> None:
    checkpoints = tmp_path / "checkpoints"
    arguments = ["--nnodes", "1:2", *SHORT, "--checkpoint-dir", str(checkpoints)]
    arguments += [str(REGRESSION), "--pause", "0.05"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=2) as told:
        told.wait_for_step(10)
        (keeper,) = children_of(told.node(1).process.pid)
        (server,) = children_of(keeper)
        os.kill(keeper if killed == "keeper" else server, signal.SIGKILL)
        codes = told.wait_for_end()
    assert set(codes.values()) == {0}, told.logs()
    assert told.lineage.recomputed <= 1
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)


@pytest.mark.timeout(60)
def test_an_agent_refused_for_its_name_leaves_the_others_memory_alone(
    tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    arguments = ["--nnodes", "1:2", *SHORT, str(REGRESSION), "--pause", "0.2"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=1) as told:
        told.wait_for_step(2)
        memory = snapshot_directory(job, "node-0") / "kept"
        memory.mkdir(parents=True, exist_ok=True)
        common = ["run", "--etcd", etcd.endpoint, "--job", job, "--node-name", "node-0"]
        completed = subprocess.run(
            elasticzero(*common, *SHORT, "--http-port", "0", str(REGRESSION)),
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
        assert completed.returncode == 64, completed.stderr
        assert memory.exists()
        memory.rmdir()


@pytest.mark.timeout(60)
def test_a_script_that_ends_badly_after_training_has_failed(tmp_path: Path) -> None:
    arguments = ["run", "--http-port", "0", "--max-restarts", "0", "--log-dir", str(tmp_path)]
    completed = subprocess.run(
        elasticzero(*arguments, str(SCRIPTS / "ends_badly.py")),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert completed.returncode == 70, completed.stderr
    assert "exited with status 3" in completed.stderr
