"""An agent whose loop fails, stands still, or finds no room: real processes, and no false peace."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from http.client import HTTPConnection
from pathlib import Path

import pytest

from elasticzero.checkpoint.steps import catalog
from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.launcher.local.cluster import Placement
from elasticzero.launcher.observability.event_log import EventReader
from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.clusters import PATIENCE_S, REGRESSION, Story, elasticzero, story
from tests.integration.scripts.faulty_loop import ALWAYS, ONCE, STALL
from tests.support.deadlines import patience

pytestmark = pytest.mark.timeout(240)
IDLE_CONNECTIONS = 220
OPEN_FILES = 160
NOISY = """
import sys
for number in range(20_000):
    print(number, "x" * 100)
"""


def fault_file(tmp_path: Path) -> Path:
    return tmp_path / "fault"


def with_faults(tmp_path: Path, node: str) -> Placement:
    """Node 0 has a loop that fails as `fault_file` says."""
    if node != "node-0":
        return Placement()
    return Placement(
        command_line="tests.integration.scripts.faulty_loop",
        environment={"TESTER_FAULT_FILE": str(fault_file(tmp_path))},
    )


@contextmanager
def faulty(
    tmp_path: Path, etcd: EtcdServer, job: str, *options: str, nodes: int
) -> Iterator[Story]:
    common = ["--lease-ttl", "3", "--nnodes", f"1:{nodes}", *options]
    arguments = [*common, str(REGRESSION), "--pause", "0.05"]
    place = partial(with_faults, tmp_path)
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=nodes, place=place) as told:
        yield told


def health(port: int) -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/healthz")
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def port_of(told: Story, node: str) -> int:
    ports = [e["port"] for name, e in told.told if name == node and e["event"] == "serving"]
    return int(ports[-1])


def codes(told: Story) -> dict[str, int | None]:
    return {name: node.process.poll() for name, node in told.cluster.nodes.items()}


@pytest.mark.slow
def test_a_node_whose_loop_fails_leaves_with_its_state(
    tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    """Any exception in the loop killed the node and its workers at once."""
    with faulty(tmp_path, etcd, job, nodes=2) as told:
        told.wait_for_first_step(1)
        told.wait("both nodes", lambda: any(len(e["members"]) == 2 for e in told.of("world")))
        step = told.step
        told.wait_for_step(step + 2)
        fault_file(tmp_path).write_text(ONCE)
        told.wait("its leave", lambda: codes(told)["node-0"] is not None)
        assert codes(told)["node-0"] == 75, told.logs()
        told.wait_for_end()
        assert codes(told) == {"node-0": 75, "node-1": 0}, told.logs()
        log = told.node(0).log.read_text()
    assert "RuntimeError: a bug in the loop" in log
    assert [event["failures"] for event in told.of("loop_error")] == [1]
    lost = [event["steps_lost"] for event in told.of("recovery")]
    assert not any(lost), lost


def test_a_loop_that_always_fails_stops_and_saves(
    tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    """Its workers stop by their own protocol, and the state of the last step is saved."""
    checkpoints = tmp_path / "c"
    options = ["--checkpoint-dir", str(checkpoints), "--checkpoint-every", "1000"]
    with faulty(tmp_path, etcd, job, *options, nodes=1) as told:
        told.wait_for_step(5)
        fault_file(tmp_path).write_text(ALWAYS)
        assert told.wait_for_end() == {"node-0": 71}, told.logs()
        log = told.node(0).log.read_text()
        stopping = told.of("stopping")
    assert "its loop has failed 3 times, and its workers are stopped" in log
    assert [event["clean"] for event in stopping] == [True]
    assert catalog.newest_good(open_directory(checkpoints)) == stopping[0]["step"] >= 5


@pytest.mark.slow
def test_a_loop_that_stands_still_loses_its_lease(
    tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    """Other threads renewed it for ever, and `/healthz` said ok."""
    with faulty(tmp_path, etcd, job, nodes=2) as told:
        told.wait("both nodes", lambda: any(len(e["members"]) == 2 for e in told.of("world")))
        told.wait_for_first_step(told.generation)
        port = port_of(told, "node-0")
        assert health(port) == (200, "ok\n")
        before = told.generation
        told.pause(0.2)
        fault_file(tmp_path).write_text(STALL)
        told.wait("its health", lambda: health(port)[0] == 503)
        assert "the agent's loop has stood still for" in health(port)[1]
        told.wait(
            "the other node alone",
            lambda: any(e["members"] == ["node-1"] for e in told.of("world")),
        )
        told.wait("its step", lambda: max(told.lineage.reached) > before)
        fault_file(tmp_path).unlink()
        told.wait("its health again", lambda: health(port)[0] == 200)
        alone = told.generation
        told.wait_for_generation(alone + 1)
        told.pause(0.01)
        assert set(told.wait_for_end().values()) == {0}, told.logs()


def test_a_reader_of_output_that_stops_does_not_stop_a_job(tmp_path: Path, job: str) -> None:
    """The loop stood still in a write to the pipe, and the job with it."""
    script = tmp_path / "noisy.py"
    script.write_text(NOISY)
    arguments = ["run", "--job", job, "--node-name", "a", "--log-dir", str(tmp_path), "--tee"]
    arguments += ["--http-port", "0", "--preemption", "none", str(script)]
    with subprocess.Popen(
        elasticzero(*arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as agent:
        try:
            assert agent.wait(patience(PATIENCE_S)) == 0
        finally:
            agent.kill()
        assert agent.stdout is not None
        shown = agent.stdout.read().decode()
    assert shown.count("x" * 100) > 100
    events = [event["event"] for event in EventReader(tmp_path / job / "a").read()]
    assert events[-1] == "exit"


def few_files(node: str) -> Placement:
    limit = f'ulimit -n {OPEN_FILES}; exec "$@"'
    return Placement(command_prefix=("sh", "-c", limit, node))


@pytest.mark.slow
def test_idle_connections_do_not_end_an_agent(tmp_path: Path, job: str, etcd: EtcdServer) -> None:
    """EMFILE while a log was repeated ended the node."""
    arguments = ["--tee", str(REGRESSION), "--pause", "0.05"]
    with (
        story(tmp_path, etcd.endpoint, job, arguments, nodes=1, place=few_files) as told,
        ExitStack() as stack,
    ):
        told.wait_for_step(3)
        port, before = port_of(told, "node-0"), told.step
        for _ in range(IDLE_CONNECTIONS):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
        told.wait("steps beside them", lambda: told.step > before + 30)
        told.pause(0.0)
        assert told.wait_for_end() == {"node-0": 0}, told.logs()
    assert told.generation == 1
