"""Where the seconds of a job go, through faults of different kinds: each is in one class."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from elasticzero.launcher.observability.goodput import TIME_CLASSES, replayed
from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.clusters import REGRESSION, Story, story
from tests.integration.test_elastic_training import check_samples
from tests.integration.test_live_metrics import get

HANG_S = 4.0


def members(told: Story) -> list[str]:
    world = max(told.of("world"), key=lambda event: event["generation"])
    return list(world["members"])


def scraped(port: int) -> dict[str, float]:
    """The job's seconds by class, as an agent exports them."""
    return {
        sample.labels["time_class"]: sample.value
        for family in text_string_to_metric_families(get(port, "/metrics"))
        for sample in family.samples
        if sample.name == "elasticzero_job_seconds"
    }


def agree(one: Mapping[str, float], other: Mapping[str, float], whole_s: float) -> None:
    for kind in TIME_CLASSES:
        assert abs(one.get(kind, 0.0) - other.get(kind, 0.0)) <= 0.01 * whole_s, (kind, one, other)


@pytest.mark.timeout(170)
def test_every_second_of_a_job_with_five_faults_is_in_one_class(
    tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    """A worker dies, the leading node dies, the job is below MIN for a while, a node joins, a
    worker is suspended, and a node drains."""
    words = ["--nnodes", "2:3", "--strategy", "zero1", "--snapshot-every", "8", "--settle", "2"]
    words += ["--checkpoint-dir", str(tmp_path / "c"), "--hang-timeout", str(HANG_S)]
    words += ["--lease-ttl", "2", str(REGRESSION), "--pause", "0.15"]
    with story(tmp_path, etcd.endpoint, job, words, nodes=3) as told:
        cluster = told.cluster

        def trains_again(generation: int) -> None:
            told.wait_for_first_step(generation)
            told.wait_for_step(told.step + 3)

        trains_again(1)
        cluster.kill_worker(cluster.nodes[members(told)[0]])
        trains_again(2)
        cluster.kill_node(cluster.nodes[members(told)[0]])
        trains_again(3)
        cluster.kill_node(cluster.nodes[members(told)[0]])
        told.wait("a job below MIN", lambda: "idle" in [e["why"] for e in told.of("waiting")])
        cluster.start_node()
        trains_again(4)
        (pid, *_) = cluster.workers_of(cluster.nodes[members(told)[0]])
        os.kill(pid, signal.SIGSTOP)
        trains_again(5)
        cluster.start_node()
        trains_again(6)
        cluster.drain(cluster.nodes[members(told)[0]])
        trains_again(7)

        serving = {node: e["port"] for node, e in told.told if e["event"] == "serving"}
        leader = members(told)[0]
        exported = scraped(serving[leader])
        replay = replayed(event for node, event in told.told if node == leader)
        assert replay is not None
        whole_s = sum(exported.values())
        assert set(exported) == set(TIME_CLASSES)
        agree(exported, replay.seconds(time.time()), whole_s)
        codes = told.wait_for_end()
        assert 0 in codes.values()
    ends = [event for event in told.of("exit") if event["outcome"] == "finished"]
    began_s = min(event["time"] for event in told.of("registered"))
    step_s: dict[tuple[int, int], float] = {}
    for event in told.of("step"):
        step_s.setdefault((event["generation"], event["step"]), event["step_s"])
    redone = {at for at in step_s if not told.lineage.is_committed(*at)}
    for end in ends:
        seconds, wall_s = end["seconds"], end["time"] - began_s
        assert abs(sum(seconds.values()) - wall_s) <= 0.01 * wall_s, (seconds, wall_s)
        assert seconds["detect"] >= HANG_S  # the suspended worker
        assert seconds["idle"] > 0
        assert seconds.get("parked", 0.0) == 0
        assert redone and seconds["wasted"] > 0
        assert abs(seconds["wasted"] - sum(step_s[at] for at in redone)) < 0.02 * wall_s
        made = sum(seconds.get(kind, 0.0) for kind in ("productive", "data_wait", "snapshot"))
        counted_s = sum(s for at, s in step_s.items() if at not in redone)
        assert abs(made - counted_s) < 0.05 * wall_s
    kinds = {event["kind"] for event in told.of("recovery")}
    assert {"failure", "lapse", "grow"} <= kinds or {"failure", "grow", "leave"} <= kinds
    for event in told.of("recovery"):
        phases = [event[key] for key in event if key.endswith("_s") and event[key] is not None]
        assert abs(sum(phases) - event["seconds"]) < 1e-3
        assert sum(phases) < 30.0
    lost = {event["generation"]: event["steps_lost"] for event in told.of("recovery")}
    assert lost == {g: told.lineage.lost(g) for g in lost}
    check_samples(told.lineage, told.directory())
