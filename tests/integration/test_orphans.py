"""What a command or a worker has started ends with it, whatever kills it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from elasticzero.launcher.snapshots.shared_memory import snapshot_directory
from elasticzero.launcher.store.etcd.server import EtcdServer
from elasticzero.processes import descendants, is_alive
from tests.integration.clusters import REGRESSION, born, elasticzero
from tests.support.deadlines import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.cold]

PATIENCE_S = 30.0

LEAVES_A_DAEMON = """
import pathlib, subprocess, sys, time
daemon = subprocess.Popen(["sleep", "300"], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(daemon.pid))
time.sleep(float(sys.argv[2]))
"""


def wait_until_gone(pids: list[tuple[int, str]]) -> None:
    """pids: with their times of birth, since numbers are used again."""

    def left() -> list[int]:
        return [pid for pid, at in pids if is_alive(pid) and born(pid) == at]

    wait_until(lambda: not left(), f"processes are left of {pids}")


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        elasticzero(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def test_nothing_outlives_a_killed_local(tmp_path: Path, job: str) -> None:
    """Agents, workers and fork servers lived on, and asked a dead etcd for good."""
    arguments = ["--nodes", "2", "--strategy", "zero2", "--job", job, "--log-dir", str(tmp_path)]
    process = start("local", *arguments, str(REGRESSION), "--pause", "0.1")
    assert process.stdout is not None
    for line in process.stdout:
        if "  step " in line:
            break
    pids = [(pid, born(pid)) for pid in descendants(process.pid)]
    assert len(pids) >= 7, "an etcd, and of each node an agent, a fork server and a worker"
    memory = [snapshot_directory(job, f"node-{index}") for index in (0, 1)]
    assert all(path.exists() for path in memory)
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    wait_until_gone(pids)
    assert not [path for path in memory if path.exists() and list(path.rglob("*"))]


@pytest.mark.parametrize("end", ["agent killed", "agent interrupted", "worker killed", "finished"])
def test_a_workers_own_daemon_ends_with_it(tmp_path: Path, job: str, end: str) -> None:
    """A process of a session of its own is in no process group that a signal could reach."""
    script, told = tmp_path / "script.py", tmp_path / "daemon"
    script.write_text(LEAVES_A_DAEMON)
    seconds = "0" if end == "finished" else "300"
    arguments = ["--job", job, "--http-port", "0", "--log-dir", str(tmp_path)]
    arguments += ["--max-restarts", "0"]
    agent = start("run", *arguments, str(script), str(told), seconds)
    wait_until(lambda: told.exists() and told.read_text(), "no daemon was started")
    daemon = int(told.read_text())
    pids = [(daemon, born(daemon))]
    match end:
        case "agent killed":
            agent.kill()
        case "agent interrupted":
            agent.send_signal(signal.SIGINT)
        case "worker killed":
            worker = int(Path(f"/proc/{daemon}/stat").read_text().rpartition(")")[2].split()[1])
            os.kill(worker, signal.SIGKILL)
    output, _ = agent.communicate(timeout=PATIENCE_S)
    codes = {"agent killed": -9, "agent interrupted": 130, "worker killed": 70, "finished": 0}
    assert agent.returncode == codes[end], output
    wait_until_gone(pids)


def test_a_stopped_fork_server_ends_with_its_agent(tmp_path: Path) -> None:
    code = (
        "import time\n"
        "from elasticzero.launcher.workers.forking.client import ForkServer\n"
        "server = ForkServer(()); server.wait_until_ready()\n"
        "print(server.pid, flush=True)\ntime.sleep(60)\n"
    )
    agent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    server = int(agent.stdout.readline())
    pids = [(server, born(server))]
    os.kill(server, signal.SIGSTOP)
    agent.kill()
    agent.communicate()
    wait_until_gone(pids)


def test_an_agent_whose_etcd_is_gone_leaves_a_finished_job(tmp_path: Path, job: str) -> None:
    """It asked a dead etcd for good, with nothing left to do."""
    with EtcdServer() as etcd:
        arguments = ["--etcd", etcd.endpoint, "--job", job, "--http-port", "0"]
        arguments += ["--join-timeout", "3"]
        arguments += ["--log-dir", str(tmp_path), str(REGRESSION), "--epochs", "1"]
        arguments += ["--pause", "0.1"]
        agent = start("run", *arguments)
        log = tmp_path / job / socket.gethostname() / "events.jsonl"
        wait_until(lambda: log.exists() and '"step"' in log.read_text(), "no step was made")
        etcd.stop()
        output, _ = agent.communicate(timeout=PATIENCE_S)
    assert agent.returncode == 69, output
    assert "every worker has finished" in output
