"""The report on a real job with faults, while it runs and after its end."""

from __future__ import annotations

import http.client
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from elasticzero.errors import ExitCode
from elasticzero.launcher.store.etcd.server import EtcdServer
from elasticzero.ops.report.digest import digest
from elasticzero.ops.report.log_files import find_logs, read_run
from tests.integration.clusters import REGRESSION, Story, elasticzero, story


def members(told: Story) -> list[str]:
    world = max(told.of("world"), key=lambda event: event["generation"])
    return list(world["members"])


def reported(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        elasticzero("report", *arguments), capture_output=True, text=True, timeout=60, check=False
    )


def agree(one: Mapping[str, float], other: Mapping[str, float], whole_s: float) -> None:
    for kind in one.keys() | other.keys():
        assert abs(one.get(kind, 0.0) - other.get(kind, 0.0)) <= 0.01 * whole_s, (kind, one, other)


@pytest.mark.timeout(170)
def test_a_job_with_three_faults(tmp_path: Path, job: str, etcd: EtcdServer) -> None:
    """A worker dies, a node dies, and a node joins; then the job ends."""
    arguments = ["--nnodes", "2:3", "--strategy", "zero1", "--snapshot-every", "8"]
    arguments += ["--checkpoint-dir", str(tmp_path / "c"), "--checkpoint-every", "20"]
    arguments += [str(REGRESSION), "--pause", "0.1"]
    page = tmp_path / "page.html"
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=3) as told:
        cluster = told.cluster

        def trains_again(generation: int) -> None:
            told.wait_for_first_step(generation)
            told.wait_for_step(told.step + 3)

        trains_again(1)
        cluster.kill_worker(cluster.nodes[members(told)[-1]])
        trains_again(2)
        lost = members(told)[-1]
        cluster.kill_node(cluster.nodes[lost])
        trains_again(3)

        done = reported("--job", job, "--etcd", etcd.endpoint, "-o", str(page))
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"Job {job} is running: it has made")
        assert "it survived 2 faults" in done.stdout
        text = page.read_text()
        assert f"{lost} is lost" in text and "The logs of 1 node are missing" in text
        serving = {node: e["port"] for node, e in told.told if e["event"] == "serving"}
        stranger = http.client.HTTPConnection("127.0.0.1", serving[members(told)[0]], timeout=10)
        stranger.request("GET", "/events")
        assert stranger.getresponse().status == 401
        stranger.close()

        with told.slowed(1.0):
            cluster.start_node()
            told.wait_for_first_step(4)
        told.wait_for_step(told.step + 3)
        codes = told.wait_for_end()
        assert 0 in codes.values()
    done = reported("--job", job, "--etcd", etcd.endpoint, "-o", str(page))
    assert done.returncode == ExitCode.USAGE
    assert re.fullmatch(r"error: job '.*' is over .*elasticzero report LOG_DIR\n", done.stderr)
    done = reported(str(told.directory()), "-o", str(page))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Job {job} finished all")
    check_logs(told, lost)


def check_logs(told: Story, lost: str) -> None:
    """The report on the logs of all nodes, and of each alone, agrees with what they say."""
    summary = read_run(*find_logs(told.directory(), None))
    ends = {
        node: event["seconds"]
        for node, event in told.told
        if event["event"] == "exit" and event["outcome"] == "finished"
    }
    assert len(ends) == 3
    last = max(ends.values(), key=lambda seconds: sum(seconds.values()))
    agree(summary.seconds, last, summary.wall_s)
    for node, seconds in ends.items():  # agents end a moment after one another
        events = [event for name, event in told.told if name == node]
        [life] = digest(node, events)
        assert life.account is not None
        agree(life.account.seconds(life.ended_s), seconds, summary.wall_s)
        alone = read_run(*find_logs(told.directory() / node, None))
        agree(alone.seconds, seconds, summary.wall_s)
    parts = [summary.before_first, *(generation.seconds for generation in summary.generations)]
    added = {kind: sum(part.get(kind, 0.0) for part in parts) for kind in summary.seconds}
    agree(added, summary.seconds, summary.wall_s)
    assert [fault.label for fault in summary.faults] == ["worker killed", "node lost"]
    assert summary.faults[1].lost == (lost,)
    assert summary.final_step == told.step
    lineage = told.lineage
    assert {g.number: g.steps_redone for g in summary.generations[1:]} == {
        g: lineage.lost(g) for g in lineage.resume_steps if g > 1
    }
    assert {recovery.generation for recovery in summary.recoveries} == {
        2,
        3,
    }  # a node that comes in
    assert summary.checkpoints and summary.checkpoints[-1].committed
    assert not summary.notes
    cut = read_run(*find_logs(told.directory() / lost, None))
    assert cut.outcome == "unknown" and cut.final_step < summary.final_step
