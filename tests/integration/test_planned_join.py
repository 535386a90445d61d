"""Nodes come into a job inside the loops of the others, through agents and etcd.

No survivor stops or starts anew, no step is done again, and the result is that of a run that
nothing disturbed. Whatever fails meanwhile, the job goes on as it does after any failure.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.clusters import Story, story
from tests.integration.test_elastic_training import check_samples, check_weights
from tests.integration.test_operators import Operator
from tests.integration.test_planned_leave import (
    CODES,
    MOST,
    STRIKES,
    check_inside,
    members,
    tiers,
    train_without,
)
from tests.integration.test_preemption import codes_of, job_arguments
from tests.support.cases import slow


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "strategy", ["zero3", *(slow(strategy) for strategy in ("ddp", "zero1", "zero2"))]
)
def test_a_node_comes_into_a_world_of_one_and_the_first_one_leaves(
    strategy: str, tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    checkpoints = tmp_path / "checkpoints"
    arguments = job_arguments(checkpoints, "--strategy", strategy, nodes=2)
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=1) as told:
        told.wait_for_step(5)
        first = told.node(0)
        with told.slowed(SLOW_S):
            told.cluster.start_node()
            told.wait_for_first_step(2)
        assert members(told) == [first.name, "node-1"]
        told.cluster.drain(first)
        told.wait_for_first_step(3)
        codes_of(told, [first])
    check_inside(told, 3)
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_a_spare_takes_the_place_of_a_node_that_leaves(
    strategy: str, tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    """The others go on without the one first, and then with the other."""
    checkpoints = tmp_path / "checkpoints"
    arguments = job_arguments(checkpoints, "--strategy", strategy, nodes=2)
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=2) as told:
        told.wait_for_step(5)
        with told.slowed(SLOW_S):
            told.cluster.start_node()
            told.wait("the spare", lambda: len(told.of("registered")) == 3)
        first = told.cluster.nodes[members(told)[0]]
        Operator(job, etcd).asks("drain", first.name, "--wait")
        told.wait_for_first_step(3)
        codes_of(told, [first])
    check_inside(told, 3)
    assert len(members(told)) == 2
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)


SLOW_S = 0.5
"""A step lasts so long while a node starts, which takes seconds."""
PARTIES = {"the first": 0, "another": 1, "the newcomer": 2}
LINES = {"its workers start": 1, "the others prepare": 2, "they have gone over": 0}
"""How many agents have had workers prepare; 0: workers have gone over."""
CELLS = [(line, strike, party) for line in LINES for strike in STRIKES for party in PARTIES]


def reached(told: Story, line: str) -> bool:
    count = LINES[line]
    return len(told.of("prepares")) >= count if count else bool(told.of("switched"))


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
@pytest.mark.parametrize(
    ("line", "strike", "party"), CELLS, ids=lambda word: word.replace(" ", "-")
)
def test_a_strike_at_each_line_of_a_planned_join(
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
    arguments = job_arguments(checkpoints, *options, nodes=3, pause="0.05")
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=2) as told:
        told.wait_for_step(5)
        with told.slowed(SLOW_S):
            told.cluster.start_node()
            told.wait(line, lambda: reached(told, line))
        names = [*members(told)[:2], "node-2"]
        struck = told.cluster.nodes[names[PARTIES[party]]]
        if struck.running:
            STRIKES[strike](told, struck)
        codes = told.wait_for_end()
    assert codes == {**dict.fromkeys(names, 0), struck.name: CODES[strike]}, told.logs()
    assert told.lineage.recomputed <= MOST[strategy], told.logs()
    if strike != "kill the node":  # a replica that is not there yet may have been its own
        later = {tier for generation, tier in tiers(told).items() if generation > 1}
        assert later <= {"ram", "live"}, "snapshots of before the change count"
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("line", LINES)
def test_etcd_is_away_at_each_line_of_a_planned_join(
    line: str, tmp_path: Path, job: str, reference: dict[str, Tensor]
) -> None:
    """Training goes on; the world that workers have entered is recorded later."""
    checkpoints = tmp_path / "checkpoints"
    arguments = job_arguments(checkpoints, "--strategy", "ddp", nodes=3, pause="0.1")
    with EtcdServer() as etcd, story(tmp_path, etcd.endpoint, job, arguments, nodes=2) as told:
        told.wait_for_step(5)
        with told.slowed(SLOW_S):
            told.cluster.start_node()
            told.wait(line, lambda: reached(told, line))
        train_without(etcd, told)
        assert set(told.wait_for_end().values()) == {0}
    assert told.lineage.recomputed == 0, told.logs()
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)
