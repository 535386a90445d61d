"""An agent that is suspended alone, while the workers of its node train on: nothing that they have
captured is held on two nodes then, and each step is one more to be done again."""

from __future__ import annotations

import signal
from contextlib import closing
from pathlib import Path

import pytest

from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.clusters import REGRESSION, Story, story
from tests.integration.etcd_relay import Relay
from tests.integration.reference import steps_in
from tests.integration.test_elastic_training import check_samples

TTL_S = 2
STEP_S = 0.12
EPOCHS = 20
MOST_STEPS = 60
"""Steps of little more than two TTLs, and half as many again for a machine that is busy. Without a
rule for it they are as many as fit into the socket of a worker, however long each of them takes:
more than a hundred."""


def job_arguments(nodes: str) -> list[str]:
    return [
        *("--nnodes", nodes, "--strategy", "zero2", "--snapshot-every", "2"),
        *("--lease-ttl", str(TTL_S), str(REGRESSION)),
        *("--epochs", str(EPOCHS), "--pause", str(STEP_S)),
    ]


def wait_until_held(told: Story, generation: int) -> None:
    """Waits for a snapshot that every node of a generation holds."""
    told.wait_for_generation(generation)
    world = next(event for event in told.of("world") if event["generation"] == generation)

    def is_held() -> bool:
        held = [
            {
                event["step"]
                for name, event in told.told
                if name == node
                and event["event"] == "kept"
                and event["generation"] == generation
                and event["error"] is None
            }
            for node in world["members"]
        ]
        return bool(set.intersection(*held))

    told.wait("a snapshot on all nodes", is_held)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("index", [0, 2], ids=["the leader", "another one"])
def test_steps_behind_a_suspended_agent_are_bounded(
    index: int, tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    """The node is given up soon, and comes back once its agent runs."""
    with story(tmp_path, etcd.endpoint, job, job_arguments("1:3"), nodes=3) as told:
        wait_until_held(told, 1)
        frozen = told.cluster.nodes[told.of("world")[0]["members"][index]]
        frozen.process.send_signal(signal.SIGSTOP)
        told.wait_for_first_step(2)
        lost = told.lineage.lost(2)
        print(f"\n{lost} steps are done again")
        frozen.process.send_signal(signal.SIGCONT)
        told.wait_for_first_step(3)
        assert set(told.wait_for_end().values()) == {0}, told.logs()
    check_samples(told.lineage, told.directory(), epochs=EPOCHS)
    assert len(told.committed()) == steps_in(10, EPOCHS)
    assert lost <= MOST_STEPS


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_an_agent_that_answers_keeps_its_place(tmp_path: Path, job: str, etcd: EtcdServer) -> None:
    """It is cut off from etcd for several TTLs, and serves its snapshots as before."""
    with (
        closing(Relay(etcd.endpoint)) as relay,
        story(tmp_path, etcd.endpoint, job, job_arguments("2"), nodes=1) as told,
    ):
        direct = list(told.cluster.command)
        told.cluster.command = [relay.endpoint if w == etcd.endpoint else w for w in direct]
        told.cluster.start_node()
        wait_until_held(told, 1)
        relay.freeze()
        before = told.step
        told.wait("steps of five TTLs", lambda: told.step > before + 5 * TTL_S / STEP_S)
        relay.thaw()
        assert set(told.wait_for_end().values()) == {0}, told.logs()
        assert told.generation == 1 and told.lineage.recomputed == 0
    check_samples(told.lineage, told.directory(), epochs=EPOCHS)
