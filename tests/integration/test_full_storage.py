"""Storage that is full, or cannot be written, while memory holds the state."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest
from torch import Tensor

from elasticzero.checkpoint import commit
from elasticzero.checkpoint.storage import open_directory
from elasticzero.launcher.embedded import EmbeddedEtcd
from elasticzero.launcher.local import is_alive
from tests.integration.clusters import REGRESSION, Story, story
from tests.integration.reference import steps_in
from tests.integration.test_elastic_training import check_samples, check_weights
from tests.mounts import fill, let_write, small_disk

pytestmark = pytest.mark.timeout(240)
LAST = steps_in(10, 3)


def words(checkpoints: Path, strategy: str, *more: str) -> list[str]:
    given = ["--strategy", strategy, "--checkpoint-dir", str(checkpoints), *more]
    return [*given, str(REGRESSION), "--pause", "0.02"]


def terminal(told: Story, node: int = 0) -> str:
    """What an agent has said to whoever watches its terminal."""
    return told.node(node).log.read_text()


def newest(checkpoints: Path) -> int | None:
    return commit.newest_good(open_directory(checkpoints))


@pytest.mark.parametrize(("strategy", "nodes"), [("ddp", 1), ("zero2", 2)])
def test_a_disk_full_at_the_end_loses_nothing_once_there_is_room(
    strategy: str, nodes: int, tmp_path: Path, job: str, etcd: EmbeddedEtcd,
    reference: dict[str, Tensor],
) -> None:  # fmt: skip
    """Four tries within seconds were all that the last steps got, and a healthy job ended."""
    with small_disk(tmp_path / "disk", 8) as disk:
        options = ["--nnodes", str(nodes), "--checkpoint-every", "40"]
        checkpoints = disk / "c"
        with story(
            tmp_path, etcd.endpoint, job, words(checkpoints, strategy, *options), nodes=nodes
        ) as told:
            told.wait("a checkpoint", lambda: newest(checkpoints) == 40)
            filler = fill(disk)
            told.wait("a save that failed", lambda: told.of("save_failed"))
            time.sleep(3.0)
            assert len(told.cluster.running()) == nodes
            filler.unlink()
            codes = told.wait_for_end()
        assert set(codes.values()) == {0}, told.logs()
        said = "".join(terminal(told, node) for node in range(nodes))
        at_stake = "steps 41 to 102 are at stake, for the newest checkpoint is of step 40"
        assert at_stake in said, said
        check_samples(told.lineage, told.directory())
        check_weights(checkpoints, reference)


def test_a_disk_that_stays_full_ends_the_job_and_says_what_is_lost(
    tmp_path: Path, job: str, etcd: EmbeddedEtcd
) -> None:
    with small_disk(tmp_path / "disk", 8) as disk:
        options = ["--nnodes", "2", "--checkpoint-every", "40", "--save-timeout", "6"]
        checkpoints = disk / "c"
        with story(
            tmp_path, etcd.endpoint, job, words(checkpoints, "zero2", *options), nodes=2
        ) as told:
            told.wait("a checkpoint", lambda: newest(checkpoints) == 40)
            fill(disk)
            codes = told.wait_for_end()
        assert codes == {"node-0": 70, "node-1": 70}, told.logs()
        assert newest(checkpoints) == 40
        expected = (
            "step 102 could not be saved within 6 s (--save-timeout): steps 41 to 102 are lost, "
            "the newest checkpoint is of step 40"
        )
        for node in range(2):
            assert expected in terminal(told, node), terminal(told, node)


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_a_job_that_is_given_up_saves_its_state_first(
    strategy: str, tmp_path: Path, job: str, etcd: EmbeddedEtcd
) -> None:
    """The steps since the last checkpoint were thrown away with the job, though memory had them."""
    checkpoints = tmp_path / "c"
    options = ["--nnodes", "2", "--checkpoint-every", "20", "--max-restarts", "1"]
    given = [*words(checkpoints, strategy, *options), "--fail-at", "38"]
    with story(tmp_path, etcd.endpoint, job, given, nodes=2) as told:
        codes = told.wait_for_end()
    assert codes == {"node-0": 70, "node-1": 70}, told.logs()
    assert newest(checkpoints) == 37, told.logs()
    assert "the checkpoint of step 37 has all that was done" in terminal(told)


def test_storage_that_is_read_only_as_a_job_is_given_up_is_tried_again(
    tmp_path: Path, job: str, etcd: EmbeddedEtcd
) -> None:
    with small_disk(tmp_path / "disk", 8) as disk:
        checkpoints = disk / "c"
        options = ["--nnodes", "1", "--checkpoint-every", "20", "--max-restarts", "0"]
        given = [*words(checkpoints, "ddp", *options), "--fail-at", "58"]
        with story(tmp_path, etcd.endpoint, job, given, nodes=1) as told:
            told.wait("a checkpoint", lambda: newest(checkpoints) == 20)
            told.pause(0.2)
            let_write(disk, writes=False)
            told.pause(0.0)
            told.wait("a save that failed", lambda: told.of("save_failed"))
            let_write(disk, writes=True)
            codes = told.wait_for_end()
        assert codes == {"node-0": 70}
        assert newest(checkpoints) == 57, told.logs()


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_while_a_full_disk_is_waited_for_keeps_its_time(
    sent: signal.Signals, code: int, tmp_path: Path, job: str, etcd: EmbeddedEtcd
) -> None:
    with small_disk(tmp_path / "disk", 8) as disk:
        options = ["--nnodes", "1", "--checkpoint-every", "40", "--grace", "8"]
        given = words(disk / "c", "ddp", *options)
        with story(tmp_path, etcd.endpoint, job, given, nodes=1) as told:
            told.wait("a checkpoint", lambda: newest(disk / "c") == 40)
            fill(disk)
            told.wait("a save that failed", lambda: told.of("save_failed"))
            sent_s = time.monotonic()
            told.node(0).process.send_signal(sent)
            told.wait("its end", lambda: not told.cluster.running(), 60.0)
            took_s = time.monotonic() - sent_s
        assert told.node(0).process.returncode == code, told.logs()
        assert took_s < 8.0, f"{took_s:.1f} s"
        if sent is signal.SIGTERM:
            assert re.search(r"left: its time is up.*steps 41 to 102", terminal(told)), terminal(told)
