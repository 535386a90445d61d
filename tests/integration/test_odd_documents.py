"""Somebody writes into etcd what no agent wrote, while two nodes train."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch import Tensor

from elasticzero.checkpoint.steps import catalog
from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.launcher.store.api import RequestTooLarge, job_prefix, unchanged
from elasticzero.launcher.store.etcd.server import EtcdServer
from elasticzero.launcher.store.etcd.store import EtcdStore
from tests.integration.clusters import REGRESSION, Story, elasticzero, story
from tests.integration.test_elastic_training import check_samples, check_weights

ODD = b"not json"
SECONDS = 60.0
"""A generous deadline."""


@contextmanager
def store_of(etcd: EtcdServer, job: str) -> Iterator[EtcdStore]:
    store = EtcdStore([etcd.endpoint], job_prefix(job))
    try:
        yield store
    finally:
        store.close()


def test_a_write_that_is_too_large_is_no_outage(etcd: EtcdServer, job: str) -> None:
    """It was taken for one: the agent waited for etcd for ever, also after SIGTERM."""
    with store_of(etcd, job) as store:
        assert store.write({"world": b"here"}) is not None
        for size in (1_600_000, 5_000_000):  # what etcd refuses, and what gRPC does
            with pytest.raises(RequestTooLarge, match=f"'done' has {size} bytes"):
                store.write({"done": b"x" * size})
        assert store.reachable and set(store.read("").entries) == {"world"}


def test_a_large_value_can_be_written_over(etcd: EtcdServer, job: str) -> None:
    """A condition repeated it, so that no end of the job could be written."""
    with store_of(etcd, job) as store:
        assert store.write({"done": b"x" * 1_500_000}) is not None
        large = store.read("done").entries["done"]
        assert store.write({"done": b"1" * 100_000}, conditions=[unchanged("done", large)])
        assert store.write({"done": b"2"}, conditions=[unchanged("done", large)]) is None


def arguments(checkpoints: Path) -> list[str]:
    return [
        *("--nnodes", "1:3", "--settle", "1", "--checkpoint-dir", str(checkpoints)),
        *(str(REGRESSION), "--pause", "0.2"),
    ]


def console(told: Story) -> str:
    """Returns all that the agents have printed."""
    return "".join(node.log.read_text() for node in told.cluster.nodes.values())


def steps_on(told: Story) -> None:
    """Some steps more are made."""
    step = told.step
    told.wait_for_step(step + 3)


@pytest.mark.timeout(240)
def test_a_job_outlives_odd_documents_of_each_kind(
    tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    """Each of them ended both agents within a second, and every agent after them."""
    checkpoints = tmp_path / "checkpoints"
    with (
        store_of(etcd, job) as store,
        story(tmp_path, etcd.endpoint, job, arguments(checkpoints), nodes=2) as told,
    ):
        told.wait_for_step(3)
        for key in ("members/zz", "reports/1/zz", "control", "done", "unknown", "alarm/zz"):
            store.write({key: ODD})
            steps_on(told)
        assert told.generation == 1, told.logs()
        for key in ("members/zz", "control", "done"):
            line = f"{job_prefix(job)}{key} cannot be read"
            assert console(told).count(line) in (1, 2), console(told)

        status = subprocess.run(
            elasticzero("status", "--job", job, "--etcd", etcd.endpoint),
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert status.returncode == 0, status.stderr
        assert f"{job_prefix(job)}done cannot be read" in status.stderr
        assert "node-0" in status.stdout and "Traceback" not in status.stderr

        newcomer = told.cluster.start_node()
        told.wait("the newcomer's end", lambda: not newcomer.running)
        assert newcomer.process.returncode == 64, newcomer.log.read_text()
        assert "delete the key" in " ".join(newcomer.log.read_text().split())
        assert told.generation == 1, told.logs()

        store.write({"members/node-1": ODD})
        steps_on(told)
        told.wait(
            "the registration's return",
            lambda: store.read("members/node-1").entries["members/node-1"].value != ODD,
        )

        told.pause(0.5)
        generation = told.generation
        store.write({f"alarm/{generation}": ODD})
        told.wait("the next generation", lambda: told.generation > generation)
        assert "in etcd cannot be read" in console(told)
        steps_on(told)
        codes = told.wait_for_end()
        assert [codes["node-0"], codes["node-1"]] == [0, 0], told.logs()
        assert store.read("done").entries["done"].value != ODD
        assert "Traceback" not in console(told)
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)


@pytest.mark.slow  # another odd document is the first story
@pytest.mark.timeout(240)
def test_an_odd_world_has_all_leave_with_their_state(
    tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    checkpoints = tmp_path / "checkpoints"
    with store_of(etcd, job) as store:
        with story(tmp_path, etcd.endpoint, job, arguments(checkpoints), nodes=2) as told:
            told.wait_for_step(5)
            world = store.read("world").entries["world"].value
            store.write({"world": ODD})
            told.wait("the end of both", lambda: not told.cluster.running())
            codes = told.wait_for_end()
            assert codes == {"node-0": 75, "node-1": 75}, told.logs()
            assert f"{job_prefix(job)}world cannot be read" in console(told)
            assert "Traceback" not in console(told)
        assert catalog.newest_good(open_directory(checkpoints)) == told.step
        assert store.read("world").entries["world"].value == ODD

        again = tmp_path / "again"
        again.mkdir()
        with story(again, etcd.endpoint, job, arguments(checkpoints), nodes=1) as told:
            codes = told.wait_for_end()
            assert codes == {"node-0": 75}, told.logs()
            store.write({"world": world})
            told.cluster.start_node(name="node-0")
            codes = told.wait_for_end()
            assert codes == {"node-0": 0}, told.logs()
    check_weights(checkpoints, reference)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_an_odd_run_has_all_leave_with_their_state_once_they_must_write(
    tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    """They wrote no alarm either, so that the job stood still until somebody mended the key."""
    checkpoints = tmp_path / "checkpoints"
    with store_of(etcd, job) as store:
        with story(tmp_path, etcd.endpoint, job, arguments(checkpoints), nodes=2) as told:
            told.wait("both", lambda: any(len(e["members"]) == 2 for e in told.of("world")))
            told.wait_for_first_step(told.generation)
            store.write({"run": ODD})
            steps_on(told)
            step = told.step
            (worker, *_) = told.cluster.workers_of(told.node(1))
            os.kill(worker, signal.SIGKILL)
            told.wait("the end of both", lambda: not told.cluster.running())
            codes = told.wait_for_end()
            assert codes == {"node-0": 75, "node-1": 75}, told.logs()
            assert f"{job_prefix(job)}run cannot be read" in console(told)
            assert "Traceback" not in console(told)
        newest = catalog.newest_good(open_directory(checkpoints))
        assert newest is not None and newest >= step
        assert store.read("run").entries["run"].value == ODD

        again = tmp_path / "again"
        again.mkdir()
        few_s = [*arguments(checkpoints)[:2], "--join-timeout", "3", *arguments(checkpoints)[2:]]
        with story(again, etcd.endpoint, job, few_s, nodes=1) as told:
            assert told.wait_for_end() == {"node-0": 69}, told.logs()
            assert "the key `run` of the job in etcd is not readable" in " ".join(
                console(told).split()
            )
            store.write({}, deletes=["run"])
            told.cluster.start_node(name="node-0")
            assert told.wait_for_end() == {"node-0": 0}, told.logs()
    check_weights(checkpoints, reference)


@pytest.mark.timeout(120)
def test_no_agent_starts_with_an_odd_token(tmp_path: Path, job: str, etcd: EtcdServer) -> None:
    with store_of(etcd, job) as store:
        store.write({"token": ODD})
        with story(tmp_path, etcd.endpoint, job, arguments(tmp_path / "c"), nodes=1) as told:
            assert told.wait_for_end() == {"node-0": 64}
            text = " ".join(console(told).split())
    assert "the key `token` of the job, cannot be read" in text
    assert "Traceback" not in text


CHILD = """
import os, sys, time
fd = int(os.environ["ELASTICZERO_CHANNEL_FD"])
if os.fork() == 0:
    for _ in range(50):
        os.write(fd, b"not json\\n" * 10)
        time.sleep(0.02)
    os._exit(0)
import runpy
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.timeout(180)
def test_a_child_of_the_script_may_write_to_the_agent(
    tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    """It inherits the worker's socket by a fork; one line ended the agent."""
    script, checkpoints = tmp_path / "script.py", tmp_path / "checkpoints"
    script.write_text(CHILD)
    options = ["--nnodes", "1:1", "--checkpoint-dir", str(checkpoints)]
    options += [str(script), str(REGRESSION), "--pause", "0.05"]
    with story(tmp_path, etcd.endpoint, job, options, nodes=1) as told:
        assert told.wait_for_end() == {"node-0": 0}, told.logs()
        assert "is no message, and is left out" in " ".join(console(told).split())
    check_weights(checkpoints, reference)
