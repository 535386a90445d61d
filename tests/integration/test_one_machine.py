"""Several agents that are started by hand on one machine, without a port or a name."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from elasticzero.launcher.options.table import DEFAULT_HTTP_PORT
from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.clusters import REGRESSION, elasticzero

pytestmark = pytest.mark.slow

LATE_S = 120.0
"""A generous deadline."""


@contextmanager
def started(folder: Path, *commands: Sequence[str]) -> Iterator[list[subprocess.Popen[str]]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    agents = []
    try:
        for command in commands:
            agents.append(
                subprocess.Popen(
                    elasticzero("run", *command),
                    env=environment,
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        yield agents
    finally:
        for agent in agents:
            agent.kill()
            agent.communicate()


def job_arguments(etcd: EtcdServer, job: str, *options: str) -> list[str]:
    arguments = ["--etcd", etcd.endpoint, "--job", job, "--nnodes", "2", "--preemption", "none"]
    return [*arguments, "--host", "127.0.0.1", *options, str(REGRESSION), "--epochs", "1"]


def ends(agents: Sequence[subprocess.Popen[str]]) -> list[str]:
    """What each says, once all have ended well."""
    outputs = [agent.communicate(timeout=LATE_S)[1] for agent in agents]
    assert [agent.returncode for agent in agents] == [0] * len(agents), "\n".join(outputs)
    return outputs


@pytest.mark.timeout(240)
def test_two_agents_of_one_job_share_a_machine(tmp_path: Path, job: str) -> None:
    """The second ended with 69, "Address already in use", and no flag was named."""
    with EtcdServer() as etcd:
        one = job_arguments(etcd, job)
        with started(tmp_path, one, one) as agents:
            output = "\n".join(ends(agents))
    host = socket.gethostname()
    assert f"this one is node {host}-2 (--node-name)" in output
    assert "2 ranks on" in output
    assert f"port {DEFAULT_HTTP_PORT} is in use: /metrics is at port" in output


@pytest.mark.timeout(240)
def test_two_jobs_share_a_machine(tmp_path: Path, job: str) -> None:
    """Jobs know nothing of each other: each has its nodes under the host's name."""
    with EtcdServer() as etcd:
        one, other = job_arguments(etcd, job), job_arguments(etcd, f"{job}-other")
        with started(tmp_path, one, one, other, other) as agents:
            outputs = ends(agents)
    assert sum("(--node-name)" in text for text in outputs) == 2
    assert sum("/metrics is at port" in text for text in outputs) >= 3


@pytest.mark.timeout(120)
def test_a_port_that_was_given_and_is_taken_names_the_flag(tmp_path: Path, job: str) -> None:
    with EtcdServer() as etcd, socket.create_server(("0.0.0.0", 0)) as taken:
        port = str(taken.getsockname()[1])
        with started(tmp_path, job_arguments(etcd, job, "--http-port", port)) as (agent,):
            _, output = agent.communicate(timeout=LATE_S)
    assert agent.returncode == 69
    assert f":{port}: Address already in use" in output and "--http-port" in output


@pytest.mark.timeout(120)
def test_a_name_that_was_given_and_is_taken_names_the_flag(tmp_path: Path, job: str) -> None:
    """A second agent under a name that was given takes no other: it may be a mistake."""
    with EtcdServer() as etcd:
        named = job_arguments(etcd, job, "--node-name", "mine", "--http-port", "0")
        with started(tmp_path, named) as (first,):
            assert first.stderr is not None
            line = first.stderr.readline()
            assert "registered" in line, line
            with started(tmp_path, named) as (second,):
                _, output = second.communicate(timeout=LATE_S)
    assert second.returncode == 64
    assert "--node-name" in output
