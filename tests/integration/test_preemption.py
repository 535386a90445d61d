"""Nodes that are told to leave: by their clouds, by SIGTERM, two at once, in bad moments.

No finished step is computed again, and the result is that of a run that nothing disturbed.
"""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from torch import Tensor

from elasticzero.launcher.local.cluster import Node
from elasticzero.launcher.store.etcd.server import EtcdServer
from elasticzero.processes import descendants
from tests.clouds import Aws, Azure, Gcp
from tests.integration.clusters import REGRESSION, Story, story
from tests.integration.test_elastic_training import check_samples, check_weights

SHORT = ("--lease-ttl", "2", "--settle", "10")


def job_arguments(
    checkpoints: Path, *options: str, nodes: int = 3, pause: str = "0.03"
) -> list[str]:
    """The arguments of a run; `--settle` is long, so that all nodes are in the first world."""
    arguments = ["--nnodes", f"1:{nodes}", *SHORT, "--checkpoint-dir", str(checkpoints)]
    return [*arguments, *options, str(REGRESSION), "--pause", pause]


def reasons(told: Story) -> str:
    """Why each generation after the first was made."""
    later = {e["generation"]: e["reason"] for e in told.of("world") if e["generation"] > 1}
    return "\n".join(later.values())


def codes_of(told: Story, leavers: list[Node]) -> None:
    """Those that were told to leave exit with 75, and all others are done."""
    left = [node.name for node in leavers]
    expected = {name: 75 if name in left else 0 for name in told.cluster.nodes}
    assert told.wait_for_end() == expected, told.logs()


@pytest.mark.timeout(120)
def test_a_spot_interruption_of_the_leader_costs_no_step(
    tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    checkpoints = tmp_path / "checkpoints"
    arguments = job_arguments(
        checkpoints, "--preemption", "auto", "--strategy", "zero2", pause="0.07"
    )
    with ExitStack() as stack:
        machines = [stack.enter_context(Aws()) for _ in range(3)]
        environments = [machine.environment for machine in machines]
        told = stack.enter_context(
            story(tmp_path, etcd.endpoint, job, arguments, nodes=3, environments=environments)
        )
        told.wait_for_step(10)
        leader = told.cluster.nodes[told.of("world")[0]["members"][0]]
        machines[int(leader.name.rpartition("-")[2])].interrupt(118)
        told.wait("the notice", lambda: told.of("notice"))
        codes_of(told, [leader])
        log = leader.log.read_text()
    assert told.lineage.recomputed == 0
    assert f"{leader.name} leaves: AWS spot interruption in 11" in reasons(told)
    assert "this node watches for preemption notices of AWS" in log
    assert "AWS spot interruption in 11" in log
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_two_nodes_are_preempted_at_once(
    tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    checkpoints = tmp_path / "checkpoints"
    arguments = job_arguments(checkpoints, "--preemption", "gcp", "--strategy", "zero3")
    with (
        Gcp() as doomed,
        Gcp() as safe,
        story(
            tmp_path,
            etcd.endpoint,
            job,
            arguments,
            nodes=3,
            environments=[doomed.environment, safe.environment, doomed.environment],
        ) as told,
    ):
        told.wait_for_step(10)
        doomed.preempt()
        codes_of(told, [told.node(0), told.node(2)])
    assert told.lineage.recomputed == 0
    for name in ("node-0", "node-2"):
        assert f"{name} leaves: GCP preemption in 30 s" in reasons(told)
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_step_longer_than_the_grace_is_given_up(
    tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    """Nobody comes to a boundary in time: the leaver's workers are killed in the middle of the
    step, and what they held lies with another node."""
    checkpoints = tmp_path / "checkpoints"
    arguments = job_arguments(
        checkpoints, "--grace", "2", "--strategy", "zero2", "--snapshot-every", "1"
    )
    with story(
        tmp_path, etcd.endpoint, job, [*arguments, "--long-step", "20", "--long", "6"], nodes=3
    ) as told:
        told.wait_for_step(19)
        leaver = told.cluster.nodes[told.of("world")[0]["members"][1]]
        told.cluster.drain(leaver)
        codes_of(told, [leaver])
    (reason,) = reasons(told).splitlines()
    assert reason.startswith(f"{leaver.name} leaves: SIGTERM (2 s of grace); no time to end"), (
        reason
    )
    assert told.lineage.recomputed <= 2, told.logs()
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_sigterm_to_every_process_of_a_node_twice_and_while_others_regroup(
    tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    """As when a machine is shut down; and a worker elsewhere fails in the same moment."""
    checkpoints = tmp_path / "checkpoints"
    with story(tmp_path, etcd.endpoint, job, job_arguments(checkpoints), nodes=3) as told:
        told.wait_for_step(10)
        leaver, other = told.node(0), told.node(1)
        told.cluster.kill_worker(other)
        for _ in range(2):
            for pid in [*descendants(leaver.process.pid), leaver.process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        codes_of(told, [leaver])
    assert told.lineage.recomputed <= 1
    assert len([e for n, e in told.told if n == leaver.name and e["event"] == "notice"]) == 1
    assert f"{leaver.name} leaves: SIGTERM (25 s of grace)" in reasons(told)
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_notice_before_the_first_world(tmp_path: Path, job: str, etcd: EtcdServer) -> None:
    arguments = ["--nnodes", "2:2", *SHORT, "--preemption", "azure", str(REGRESSION)]
    with (
        Azure() as machine,
        story(
            tmp_path, etcd.endpoint, job, arguments, nodes=1, environments=[machine.environment]
        ) as told,
    ):
        told.wait("the node", lambda: told.of("registered"))
        machine.schedule("Preempt", 30)
        assert told.wait_for_end() == {"node-0": 75}
        told.cluster.start_node()  # on the same machine: it leaves before anybody knows of it
        assert told.wait_for_end() == {"node-0": 75, "node-1": 75}
    assert len(told.of("registered")) == 1
    assert not told.of("world")
