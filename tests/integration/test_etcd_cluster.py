"""Three members of etcd under two agents that train: members die, freeze and run out of space.

Where no worker failed, training goes on and no step is computed again; where one did, the job
recovers by itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from elasticzero.errors import StoreUnavailable
from elasticzero.launcher.store.api import job_prefix
from elasticzero.launcher.store.etcd.store import EtcdStore
from tests.integration.clusters import REGRESSION, Story, story
from tests.integration.etcd_members import Members
from tests.integration.test_elastic_training import check_samples, check_weights
from tests.support.deadlines import patience

pytestmark = pytest.mark.slow

TTL_S = 2
DEAD = "http://127.0.0.1:1"


def job_arguments(checkpoints: Path, pause: str) -> list[str]:
    return [
        *("--nnodes", "2:2", "--settle", "0.5", "--lease-ttl", str(TTL_S)),
        *("--checkpoint-dir", str(checkpoints), str(REGRESSION), "--pause", pause),
    ]


def steps_go_on(told: Story, count: int = 5) -> None:
    """So many more steps are done, whatever has been done to etcd."""
    told.look()
    told.wait_for_step(told.step + count)


def check_undisturbed(told: Story, codes: dict[str, int]) -> None:
    assert set(codes.values()) == {0}, told.logs()
    assert told.generation == 1, told.logs()
    assert told.lineage.recomputed == 0


def writes_again(etcd: Members) -> None:
    """Wait until the cluster takes a write."""
    deadline_s = time.monotonic() + patience(60)
    with EtcdStore(etcd.endpoints.split(","), job_prefix("probe")) as store:
        while True:
            try:
                assert store.write({"probe": b""})
                return
            except StoreUnavailable:
                assert time.monotonic() < deadline_s, "etcd takes no write"
                time.sleep(0.1)


def compact(etcd: Members) -> None:
    """Let etcd forget everything but what stands there now."""
    writes_again(etcd)
    etcd.control("compact", str(etcd.status()[0]["header"]["revision"]))


@pytest.mark.timeout(240)
def test_the_leader_is_killed_a_member_frozen_and_history_compacted(
    tmp_path: Path, job: str, reference: dict[str, Tensor]
) -> None:
    """One after the other, with an endpoint first that nobody answers at."""
    checkpoints = tmp_path / "checkpoints"
    with Members(tmp_path / "etcd", 3) as etcd:
        endpoints = f"{DEAD},{etcd.endpoints}"
        with story(tmp_path, endpoints, job, job_arguments(checkpoints, "0.18"), nodes=2) as told:
            told.wait_for_step(3)
            leader = etcd.leader()
            leader.kill()
            steps_go_on(told)
            writes_again(etcd)
            etcd.start(leader)
            steps_go_on(told)
            compact(etcd)
            frozen = etcd.leader()
            frozen.pause()
            steps_go_on(told, int(1.5 * TTL_S / 0.18))
            frozen.resume()
            steps_go_on(told)
            compact(etcd)
            codes = told.wait_for_end()
            check_undisturbed(told, codes)
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)


def outage(
    tmp_path: Path,
    job: str,
    reference: dict[str, Tensor],
    *,
    away: Callable[[Members], None],
    back: Callable[[Members], None],
    seconds: float,
    kill_a_worker: bool,
    pause: str,
) -> None:
    """All members are away for so long, and a worker is killed meanwhile or none is."""
    checkpoints = tmp_path / "checkpoints"
    with (
        Members(tmp_path / "etcd", 3) as etcd,
        story(tmp_path, etcd.endpoints, job, job_arguments(checkpoints, pause), nodes=2) as told,
    ):
        told.wait_for_step(5)
        away(etcd)
        until_s = time.monotonic() + seconds
        if kill_a_worker:
            told.cluster.kill_worker(told.node(1))
        while time.monotonic() < until_s:
            if not kill_a_worker:
                steps_go_on(told, 1)
            time.sleep(0.05)
        assert told.generation == 1
        back(etcd)
        codes = told.wait_for_end()
        if kill_a_worker:
            assert set(codes.values()) == {0}, told.logs()
            assert told.generation == 2, told.logs()
            assert told.lineage.recomputed <= 1
        else:
            check_undisturbed(told, codes)
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)


def freeze(etcd: Members) -> None:
    etcd.pause()


def thaw(etcd: Members) -> None:
    etcd.resume()


def kill(etcd: Members) -> None:
    etcd.kill()


def start(etcd: Members) -> None:
    etcd.start(*etcd.members)


@pytest.mark.timeout(240)
def test_all_members_freeze_for_longer_than_a_ttl(
    tmp_path: Path, job: str, reference: dict[str, Tensor]
) -> None:
    outage(
        *(tmp_path, job, reference),
        away=freeze,
        back=thaw,
        seconds=2.0 * TTL_S,
        kill_a_worker=False,
        pause="0.1",
    )


@pytest.mark.timeout(240)
def test_all_members_are_killed_and_a_worker_too(
    tmp_path: Path, job: str, reference: dict[str, Tensor]
) -> None:
    outage(
        *(tmp_path, job, reference),
        away=kill,
        back=start,
        seconds=1.5 * TTL_S,
        kill_a_worker=True,
        pause="0.03",
    )


@pytest.mark.chaos
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kill_a_worker", [False, True], ids=["all train", "a worker is killed"])
@pytest.mark.parametrize(("away", "back"), [(freeze, thaw), (kill, start)], ids=["stop", "kill"])
def test_all_members_are_away_for_a_minute(
    tmp_path: Path,
    job: str,
    reference: dict[str, Tensor],
    away: Callable[[Members], None],
    back: Callable[[Members], None],
    kill_a_worker: bool,
) -> None:
    outage(
        *(tmp_path, job, reference),
        away=away,
        back=back,
        seconds=60.0,
        kill_a_worker=kill_a_worker,
        pause="0.05" if kill_a_worker else "0.8",
    )


@pytest.mark.timeout(240)
def test_no_space_is_left_and_a_worker_is_killed(
    tmp_path: Path, job: str, reference: dict[str, Tensor]
) -> None:
    """Nothing can be written until the operator makes room; training goes on, and what failed
    meanwhile is mended then."""
    checkpoints = tmp_path / "checkpoints"
    quota = {"quota-backend-bytes": str(4 << 20)}
    with (
        Members(tmp_path / "etcd", options=quota) as etcd,
        story(tmp_path, etcd.endpoints, job, job_arguments(checkpoints, "0.1"), nodes=2) as told,
    ):
        told.wait_for_step(3)
        fill(etcd)
        steps_go_on(told, int(1.5 * TTL_S / 0.1))
        assert told.generation == 1, told.logs()
        told.cluster.kill_worker(told.node(1))
        told.wait("the trouble to be told", lambda: told.of("store_trouble"))
        message = told.of("store_trouble")[0]["message"]
        assert "space exceeded" in message and "etcdctl" in message
        time.sleep(1.0)
        assert told.generation == 1
        make_room(etcd)
        codes = told.wait_for_end()
        assert set(codes.values()) == {0}, told.logs()
        assert told.generation == 2, told.logs()
        assert told.of("world")[-1]["members"] == told.of("world")[0]["members"]
        assert told.lineage.recomputed <= 1
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)


def fill(etcd: Members) -> None:
    """Write until etcd takes no more."""
    with (
        EtcdStore([etcd.endpoints], "/another/") as store,
        pytest.raises(StoreUnavailable, match="space exceeded"),
    ):
        for _ in range(100):
            store.write({"ballast": b"x" * (1 << 20)})


def make_room(etcd: Members) -> None:
    """What an operator does about the alarm."""
    revision = json.loads(etcd.control("endpoint", "status", "-w", "json"))[0]["Status"]["header"]
    etcd.control("compact", str(revision["revision"]))
    etcd.control("defrag")
    etcd.control("alarm", "disarm")
