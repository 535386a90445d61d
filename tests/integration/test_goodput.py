"""Where the seconds of a job go, through faults of different kinds: each is in one class."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from elasticzero.launcher.goodput import TIME_CLASSES, replayed
from elasticzero.launcher.local.cluster import Node
from elasticzero.launcher.observability.lineage import Lineage
from elasticzero.launcher.observability.metrics import PHASES
from elasticzero.launcher.protocol.hang_rules import SUSPENDED_S
from elasticzero.launcher.store.etcd.server import EtcdServer
from elasticzero.ops.report.log_files import find_logs, read_run
from elasticzero.ops.report.model import RunSummary
from tests.integration.clusters import REGRESSION, Story, story
from tests.integration.test_elastic_training import check_samples
from tests.integration.test_live_metrics import get


def members(told: Story) -> list[str]:
    world = max(told.of("world"), key=lambda event: event["generation"])
    return list(world["members"])


def scraped(port: int) -> dict[str, float]:
    """The job's seconds by class, as an agent exports them."""
    return {
        sample.labels["time_class"]: sample.value
        for family in text_string_to_metric_families(get(port, "/metrics/job"))
        for sample in family.samples
        if sample.name == "elasticzero_job_seconds"
    }


def agree(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    """Whether the two say the same. Where `other` is of another moment, training went on between
    them undisturbed, so that the difference is productive."""
    whole_s = sum(one.values())
    apart_s = sum(other.values()) - whole_s
    expected = {kind: one.get(kind, 0.0) for kind in TIME_CLASSES}
    expected["productive"] += apart_s
    return abs(apart_s) < 10 and all(
        abs(other.get(kind, 0.0) - expected[kind]) <= 0.01 * whole_s for kind in TIME_CLASSES
    )


def account_of(told: Story, node: str) -> dict[str, float]:
    """The job's seconds by the log of one agent, up to now."""
    account = replayed(event for name, event in told.told if name == node)
    assert account is not None
    return account.seconds(time.time())


def report_on(told: Story) -> RunSummary:
    """What `elasticzero report` says of the logs of all nodes."""
    return read_run(*find_logs(told.directory(), None))


class Disturber:
    """Disturbs a job; each method returns once training goes on."""

    def __init__(self, told: Story) -> None:
        self.told, self.cluster, self.generation = told, told.cluster, 0

    def first(self) -> Node:
        """The node of rank 0."""
        return self.cluster.nodes[members(self.told)[0]]

    def trains_again(self) -> None:
        self.generation += 1
        self.told.wait_for_first_step(self.generation)
        self.told.pause(0.15)
        self.told.wait_for_step(self.told.step + 3)

    def comes(self) -> None:
        self.told.pause(0.8)
        self.cluster.start_node()
        self.trains_again()

    def loses_two_nodes(self) -> None:
        """The job is below MIN after the second."""
        self.cluster.kill_node(self.first())
        self.trains_again()
        self.cluster.kill_node(self.first())
        why = self.told.of
        self.told.wait("a job below MIN", lambda: "idle" in [e["why"] for e in why("waiting")])
        self.comes()

    def suspends_a_worker(self) -> None:
        (pid, *_) = self.cluster.workers_of(self.first())
        os.kill(pid, signal.SIGSTOP)
        self.trains_again()


def check_end(told: Story, end: Mapping[str, Any]) -> None:
    """What an agent says at its end is what the steps and the clock say."""
    began_s = min(event["time"] for event in told.of("registered"))
    seconds, wall_s = end["seconds"], end["time"] - began_s
    assert abs(sum(seconds.values()) - wall_s) <= 0.01 * wall_s, (seconds, wall_s)
    assert seconds["detect"] >= SUSPENDED_S  # the suspended worker
    assert seconds["idle"] > 0
    assert seconds.get("parked", 0.0) == 0
    step_s: dict[tuple[int, int], float] = {}
    for event in told.of("step"):
        step_s.setdefault((event["generation"], event["step"]), event["step_s"])
    redone_s = [s for at, s in step_s.items() if not told.lineage.is_committed(*at)]
    assert redone_s and abs(seconds["wasted"] - sum(redone_s)) < 0.02 * wall_s
    made_s = sum(seconds.get(kind, 0.0) for kind in ("productive", "data_wait", "snapshot"))
    between_s = made_s - sum(step_s.values()) + sum(redone_s)  # what the script does between steps
    assert -0.02 * wall_s < between_s < 0.15 * wall_s


def check_recoveries(told: Story) -> None:
    """An agent counts the steps that it has seen; a lost node may have made one more."""
    recoveries = [(node, event) for node, event in told.told if event["event"] == "recovery"]
    assert {"failure", "boundary"} <= {event["kind"] for _, event in recoveries}
    for node, event in recoveries:
        phases = [event[f"{phase}_s"] for phase in PHASES]
        assert abs(sum(s for s in phases if s is not None) - event["seconds"]) < 1e-3
        seen = Lineage()
        for name, earlier in told.told:
            if name == node:
                seen.take(earlier)
        generation = event["generation"]
        lost = (seen.lost(generation), event["steps_lost"], told.lineage.lost(generation))
        assert lost[0] <= lost[1] <= lost[2], (node, event)


@pytest.mark.slow  # test_report reads three faults
@pytest.mark.timeout(240)
def test_every_second_of_a_job_with_five_faults_is_in_one_class(
    tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    """A worker dies, two leading nodes die, so that the job is below MIN until another node comes,
    a worker is suspended, a node joins, and one drains; the last two stop all loops."""
    arguments = ["--nnodes", "2:3", "--strategy", "zero1", "--snapshot-every", "8"]
    arguments += ["--checkpoint-dir", str(tmp_path / "c")]
    arguments += ["--changes-inside", "off"]
    arguments += ["--lease-ttl", "2", str(REGRESSION), "--epochs", "6", "--pause", "0.15"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=3) as told:
        job_is = Disturber(told)
        job_is.trains_again()
        told.cluster.kill_worker(job_is.first())
        job_is.trains_again()
        job_is.loses_two_nodes()
        job_is.suspends_a_worker()
        job_is.comes()
        told.cluster.drain(job_is.first())
        job_is.trains_again()
        leader = members(told)[0]
        ports = {node: e["port"] for node, e in told.told if e["event"] == "serving"}
        exported = scraped(ports[leader])
        told.look()
        assert set(exported) == set(TIME_CLASSES)
        replay = account_of(told, leader)
        assert agree(exported, replay), (exported, replay)
        # Each agent has its own account: a rank that is restored first waits for the other one in
        # its first step. The report follows one agent.
        accounts = [account_of(told, node) for node in members(told)]
        reported = report_on(told).seconds
        assert any(agree(account, reported) for account in accounts), (accounts, reported)
        assert 0 in told.wait_for_end().values()
    ends = [event for event in told.of("exit") if event["outcome"] == "finished"]
    assert len(ends) == 2
    reported = report_on(told).seconds
    for end in ends:
        check_end(told, end)
    # Agents begin to count at their own times, and the report follows one of them.
    whole_s = [sum(end["seconds"].values()) for end in ends]
    assert any(sum(reported.values()) == pytest.approx(s, rel=0.01) for s in whole_s), whole_s
    assert any(agree(end["seconds"], reported) for end in ends), (ends, reported)
    check_recoveries(told)
    check_samples(told.lineage, told.directory(), epochs=6)
