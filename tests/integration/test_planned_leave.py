"""Nodes leave a job inside the loops of the others, through agents and etcd.

No survivor stops or starts anew, no step is done again, and the result is that of a run that
nothing disturbed. Whatever fails meanwhile, the job goes on as it does after any failure.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from torch import Tensor

from elasticzero.launcher.local.cluster import Node
from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.clusters import Story, story
from tests.integration.test_elastic_training import check_samples, check_weights
from tests.integration.test_operators import Operator
from tests.integration.test_preemption import codes_of, job_arguments


def members(told: Story) -> list[str]:
    """The nodes of the newest world, in the order of their ranks."""
    newest = max(told.of("world"), key=lambda world: world["generation"])
    return [str(node) for node in newest["members"]]


def tiers(told: Story) -> dict[int, str]:
    """Where the state of each generation came from."""
    return {world["generation"]: world["tier"] for world in told.of("world")}


def held_generations(told: Story) -> set[int]:
    """Those of which a node's memory has a snapshot."""
    return {int(event["generation"]) for event in told.of("kept") if event["error"] is None}


def check_inside(told: Story, generations: int) -> None:
    """All leaves were inside the loops: nothing was stopped, or started again, or done twice."""
    later = range(2, generations + 1)
    assert tiers(told) == {1: "fresh", **dict.fromkeys(later, "live")}, told.logs()
    assert not told.of("round")
    assert len(told.of("start")) == len(told.cluster.nodes), "no workers are started again"
    assert {event["generation"] for event in told.of("switched")} == set(later)
    assert told.lineage.recomputed == 0


@pytest.mark.timeout(120)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_the_node_of_rank_0_leaves_inside_the_loops_of_the_others(
    strategy: str, tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    checkpoints = tmp_path / "checkpoints"
    arguments = job_arguments(checkpoints, "--strategy", strategy, pause="0.01")
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=3) as told:
        told.wait_for_step(5)
        leaver = told.cluster.nodes[members(told)[0]]
        told.cluster.drain(leaver)
        told.wait_for_first_step(2)
        codes_of(told, [leaver])
    check_inside(told, 2)
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_two_nodes_leave_inside_the_loops_of_the_others(
    strategy: str, tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    """The first one is that of rank 0, and is told so by SIGTERM; an operator drains the next."""
    checkpoints = tmp_path / "checkpoints"
    arguments = job_arguments(checkpoints, "--strategy", strategy, nodes=4)
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=4) as told:
        told.wait_for_step(5)
        first = told.cluster.nodes[members(told)[0]]
        told.cluster.drain(first)
        told.wait_for_generation(2)
        told.wait_for_first_step(2)
        second = told.cluster.nodes[members(told)[1]]
        Operator(job, etcd).asks("drain", second.name, "--wait")
        told.wait_for_first_step(3)
        codes_of(told, [first, second])
    check_inside(told, 3)
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("zero2", marks=pytest.mark.slow)])
def test_a_node_gives_up_its_place_inside_the_loops_of_the_others_and_comes_back(
    strategy: str, tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    checkpoints = tmp_path / "checkpoints"
    arguments = job_arguments(checkpoints, "--strategy", strategy)
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=3) as told:
        told.wait_for_step(5)
        last = members(told)[-1]
        Operator(job, etcd).asks("scale", "1:2")
        told.wait_for_first_step(2)
        check_inside(told, 2)
        assert last not in members(told)
        assert told.cluster.nodes[last].running, "it waits for a place"
        Operator(job, etcd).asks("scale", "1:3")
        told.wait_for_first_step(3)
        assert set(told.wait_for_end().values()) == {0}
    assert tiers(told) == {1: "fresh", 2: "live", 3: "live"}, told.logs()
    assert len(members(told)) == 3
    assert told.lineage.recomputed == 0
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("zero1", marks=pytest.mark.slow)])
def test_the_last_but_one_leaves_inside_and_the_worker_left_alone_is_killed(
    strategy: str, tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    """Its node's memory has what the only rank holds."""
    checkpoints = tmp_path / "checkpoints"
    arguments = job_arguments(checkpoints, "--strategy", strategy, nodes=2)
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=2) as told:
        told.wait_for_step(5)
        leaver = told.cluster.nodes[members(told)[0]]
        told.cluster.drain(leaver)
        told.wait_for_first_step(2)
        check_inside(told, 2)
        (alone,) = members(told)
        with told.slowed(0.5):
            told.wait("what it holds alone is in memory", lambda: 2 in held_generations(told))
            kill_worker(told, told.cluster.nodes[alone])
        told.wait_for_first_step(3)
        codes_of(told, [leaver])
    assert tiers(told) == {1: "fresh", 2: "live", 3: "ram"}, told.logs()
    assert told.lineage.recomputed <= 2
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_two_nodes_that_hold_each_other_s_replicas_leave_by_a_stop(
    tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    """And a worker that is killed at once costs no more than since a snapshot. Without the stop all
    parts of one pair were gone, and training went back to its beginning."""
    checkpoints = tmp_path / "checkpoints"
    options = ["--strategy", "zero2", "--snapshot-every", "1"]
    arguments = job_arguments(checkpoints, *options, nodes=4, pause="0.1")
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=4) as told:
        told.wait_for_step(10)
        Operator(job, etcd).asks("scale", "1:2")
        told.wait_for_first_step(2)
        kill_worker(told, told.cluster.nodes[members(told)[1]])
        told.wait_for_first_step(3)
        told.wait_for_end()
    assert set(tiers(told).values()) == {"fresh", "ram"}, told.logs()
    assert told.lineage.recomputed <= MOST["zero2"]
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_a_node_that_has_it_switched_off_leaves_by_a_stop(
    tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    checkpoints = tmp_path / "checkpoints"
    arguments = job_arguments(checkpoints, "--strategy", "ddp", "--changes-inside", "off")
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=3) as told:
        told.wait_for_step(5)
        leaver = told.node(1)
        told.cluster.drain(leaver)
        told.wait_for_first_step(2)
        codes_of(told, [leaver])
    assert tiers(told)[2] == "ram"
    assert told.lineage.recomputed == 0
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)


def kill_worker(told: Story, node: Node) -> None:
    """The leaver's has ended where all have gone over."""
    for worker in told.cluster.workers_of(node)[-1:]:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)


def kill_node(told: Story, node: Node) -> None:
    told.cluster.kill_node(node)


def freeze_worker(told: Story, node: Node) -> None:
    """Its agent replaces it, because it does not run again."""
    for worker in told.cluster.workers_of(node)[-1:]:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGSTOP)


def drain(told: Story, node: Node) -> None:
    told.cluster.drain(node)


STRIKES: dict[str, Callable[[Story, Node], None]] = {
    "kill a worker": kill_worker,
    "kill the node": kill_node,
    "freeze a worker": freeze_worker,
    "drain": drain,
}
CODES = {"kill a worker": 0, "kill the node": -9, "freeze a worker": 0, "drain": 75}
"""Exit code of an agent that stays otherwise, by what strikes its node."""
LINES = ("notice", "prepares", "switched")
"""Events after which it comes: a node is to leave, workers prepare, they have gone over."""
PARTIES = {"the first that stays": 1, "another that stays": 2, "the leaver": 0}
"""Index in the world before; the leaver is the node of rank 0."""
CELLS = [
    (line, strike, party)
    for line in LINES
    for strike in STRIKES
    for party in PARTIES
    if (strike, party) != ("drain", "the leaver")
]


MOST = {"ddp": 1, "zero1": 12, "zero2": 12, "zero3": 12}
"""Number of steps that are done again at most, where each is followed by a snapshot."""


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("strategy", MOST)
@pytest.mark.parametrize(
    ("line", "strike", "party"), CELLS, ids=lambda word: word.replace(" ", "-")
)
def test_a_strike_at_each_line_of_a_planned_leave(
    line: str,
    strike: str,
    party: str,
    strategy: str,
    tmp_path: Path,
    job: str,
    etcd: EtcdServer,
    reference: dict[str, Tensor],
) -> None:
    checkpoints = tmp_path / "checkpoints"
    options = ["--strategy", strategy, "--snapshot-every", "1"]
    arguments = job_arguments(checkpoints, *options, nodes=4, pause="0.05")
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=4) as told:
        told.wait_for_step(5)
        before = members(told)
        leaver, struck = (told.cluster.nodes[before[i]] for i in (0, PARTIES[party]))
        told.cluster.drain(leaver)
        told.wait(line, lambda: told.of(line))
        if struck.running:
            STRIKES[strike](told, struck)
        codes = told.wait_for_end()
    over = {0} if (strike, party) == ("freeze a worker", "the leaver") else set()
    assert codes[leaver.name] in {75, -9} | over, told.logs()  # the job may be over before
    expected = {**dict.fromkeys(before[1:], 0), struck.name: CODES[strike]}
    assert {node: codes[node] for node in before[1:]} == {
        node: expected[node] for node in before[1:]
    }, told.logs()
    assert told.lineage.recomputed <= MOST[strategy], told.logs()
    if strike != "kill the node":  # two nodes that hold each other's replicas may be gone then
        later = {tier for generation, tier in tiers(told).items() if generation > 1}
        assert later <= {"ram", "live"}, "snapshots of before the change count"
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)


def train_without(etcd: EtcdServer, told: Story) -> None:
    """Has etcd be away for five steps."""
    etcd.kill()
    step = told.step
    told.wait_for_step(step + 5)
    etcd.restart()


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("line", LINES)
def test_etcd_is_away_at_each_line_of_a_planned_leave(
    line: str, tmp_path: Path, job: str, reference: dict[str, Tensor]
) -> None:
    """Training goes on; the world that workers have entered is recorded later."""
    checkpoints = tmp_path / "checkpoints"
    arguments = job_arguments(checkpoints, "--strategy", "ddp", nodes=3, pause="0.1")
    with EtcdServer() as etcd, story(tmp_path, etcd.endpoint, job, arguments, nodes=3) as told:
        told.wait_for_step(5)
        leaver = told.node(0)
        told.cluster.drain(leaver)
        told.wait(line, lambda: told.of(line))
        train_without(etcd, told)
        told.wait("the leaver's end", lambda: not leaver.running)  # before that of the job
        codes_of(told, [leaver])
    assert told.lineage.recomputed == 0, told.logs()
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)
