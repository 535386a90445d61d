"""Storage that is full, or cannot be written, while memory holds the state."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from elasticzero.checkpoint.format.layout import Group, Layout, TensorSpec
from elasticzero.checkpoint.io.writer import TensorPiece
from elasticzero.checkpoint.ram.store import ShardName, SnapshotStore
from elasticzero.checkpoint.ram.transfer import persist
from elasticzero.checkpoint.steps import catalog
from elasticzero.checkpoint.steps.retention import RetentionPolicy
from elasticzero.checkpoint.storage.disk import DiskDirectory
from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.launcher.snapshots.checkpoint_saver import CheckpointSaver
from elasticzero.launcher.snapshots.roles import SnapshotRole
from elasticzero.launcher.snapshots.save_events import SaveFinished
from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.clusters import REGRESSION, Story, story
from tests.integration.reference import steps_in
from tests.integration.test_elastic_training import check_samples, check_weights
from tests.mounts import fill, let_write, small_disk
from tests.support.deadlines import patience
from tests.unit.checkpoint.cases import draft_of, write_snapshot

NUMEL = 2 << 20
LAYOUT = Layout(
    world_size=1, tensors={"a": TensorSpec("F32", (NUMEL,))}, groups=(Group("even", ("a",)),)
)
OLD, TOKEN, NEW = (f"g{generation:06d}-{'0' * 16}" for generation in (1, 2, 3))
pytestmark = pytest.mark.timeout(240)
LAST = steps_in(10, 3)


def job_arguments(checkpoints: Path, strategy: str, *options: str) -> list[str]:
    arguments = ["--strategy", strategy, "--checkpoint-dir", str(checkpoints), *options]
    return [*arguments, str(REGRESSION), "--pause", "0.02"]


def terminal(told: Story, node: int = 0) -> str:
    """What an agent has said to whoever watches its terminal."""
    return told.node(node).log.read_text()


def newest(checkpoints: Path) -> int | None:
    return catalog.newest_good(open_directory(checkpoints))


@pytest.mark.parametrize(
    ("strategy", "nodes"), [("ddp", 1), pytest.param("zero2", 2, marks=pytest.mark.slow)]
)
def test_a_disk_full_at_the_end_loses_nothing_once_there_is_room(
    strategy: str, nodes: int, tmp_path: Path, job: str, etcd: EtcdServer,
    reference: dict[str, Tensor],
) -> None:  # fmt: skip
    """Four tries within seconds were all that the last steps got, and a healthy job ended."""
    with small_disk(tmp_path / "disk", 8) as disk:
        options = ["--nnodes", str(nodes), "--checkpoint-every", "40"]
        checkpoints = disk / "c"
        with story(
            tmp_path,
            etcd.endpoint,
            job,
            job_arguments(checkpoints, strategy, *options),
            nodes=nodes,
        ) as told:
            told.wait("a checkpoint", lambda: newest(checkpoints) == 40)
            filler = fill(disk)
            told.wait("a save that failed", lambda: told.of("save_failed"))
            time.sleep(3.0)
            assert len(told.cluster.running()) == nodes
            filler.unlink()
            codes = told.wait_for_end()
        assert set(codes.values()) == {0}, told.logs()
        output = "".join(terminal(told, node) for node in range(nodes))
        at_stake = "steps 41 to 102 are at stake, for the newest checkpoint is of step 40"
        assert at_stake in output, output
        check_samples(told.lineage, told.directory())
        check_weights(checkpoints, reference)


@pytest.mark.slow
def test_a_disk_that_stays_full_ends_the_job_and_says_what_is_lost(
    tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    with small_disk(tmp_path / "disk", 8) as disk:
        options = ["--nnodes", "2", "--checkpoint-every", "40", "--save-timeout", "6"]
        checkpoints = disk / "c"
        with story(
            tmp_path, etcd.endpoint, job, job_arguments(checkpoints, "zero2", *options), nodes=2
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


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_a_job_that_is_given_up_saves_its_state_first(
    strategy: str, tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    """The steps since the last checkpoint were thrown away with the job, though memory had them."""
    checkpoints = tmp_path / "c"
    options = ["--nnodes", "2", "--checkpoint-every", "20", "--max-restarts", "1"]
    arguments = [*job_arguments(checkpoints, strategy, *options), "--fail-at", "38"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=2) as told:
        codes = told.wait_for_end()
    assert codes == {"node-0": 70, "node-1": 70}, told.logs()
    assert newest(checkpoints) == 37, told.logs()
    assert "the checkpoint of step 37 has all that was done" in terminal(told)


@pytest.mark.slow
def test_storage_that_is_read_only_as_a_job_is_given_up_is_tried_again(
    tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    with small_disk(tmp_path / "disk", 8) as disk:
        checkpoints = disk / "c"
        options = ["--nnodes", "1", "--checkpoint-every", "20", "--max-restarts", "0"]
        arguments = [*job_arguments(checkpoints, "ddp", *options), "--fail-at", "58"]
        with story(tmp_path, etcd.endpoint, job, arguments, nodes=1) as told:
            told.wait("a checkpoint", lambda: newest(checkpoints) == 20)
            told.pause(0.2)
            let_write(disk, writes=False)
            told.pause(0.0)
            told.wait("a save that failed", lambda: told.of("save_failed"))
            let_write(disk, writes=True)
            codes = told.wait_for_end()
        assert codes == {"node-0": 70}
        assert newest(checkpoints) == 57, told.logs()


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_while_a_full_disk_is_waited_for_keeps_its_time(
    sent: signal.Signals, code: int, tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    with small_disk(tmp_path / "disk", 8) as disk:
        options = ["--nnodes", "1", "--checkpoint-every", "40", "--grace", "8"]
        arguments = job_arguments(disk / "c", "ddp", *options)
        with story(tmp_path, etcd.endpoint, job, arguments, nodes=1) as told:
            told.wait("a checkpoint", lambda: newest(disk / "c") == 40)
            fill(disk)
            told.wait("a save that failed", lambda: told.of("save_failed"))
            sent_s = time.monotonic()
            told.node(0).process.send_signal(sent)
            told.wait("its end", lambda: not told.cluster.running(), 60.0)
            took_s = time.monotonic() - sent_s
        assert told.node(0).process.returncode == code, told.logs()
        assert took_s < 40.0, f"{took_s:.1f} s"
        if sent is signal.SIGTERM:
            expected = "left: its time is up; step 102, held in memory, is not saved"
            assert expected in terminal(told), terminal(told)


@pytest.mark.slow
def test_leftovers_of_failed_saves_make_room_for_the_next(tmp_path: Path) -> None:
    """12 of 20 MB were parts of saves that had failed: every later one failed for want of room."""
    draft = draft_of(LAYOUT, generation=2, token=TOKEN, step=9)
    memory = tmp_path / "memory"
    write_snapshot(memory, draft, 0, [TensorPiece("a", torch.arange(NUMEL, dtype=torch.float32))])
    news: list[object] = []
    with small_disk(tmp_path / "disk", 20) as disk:
        left = {
            f"step-000000000004/rank-00001-of-00002-{OLD}.safetensors": 5,
            f"step-000000000004/rank-00001-of-00002-{OLD}.safetensors.sums": 1,
            f"step-000000000007/.rank-00000-of-00002-{TOKEN}.safetensors.1-a.partial": 6,
        }
        stay = {
            f"step-000000000009/rank-00001-of-00002-{TOKEN}.safetensors": 1,
            f"step-000000000012/rank-00000-of-00002-{NEW}.safetensors": 1,
            "notes.txt": 1,
        }
        for name, mebibytes in (left | stay).items():
            (disk / name).parent.mkdir(exist_ok=True)
            (disk / name).write_bytes(bytes(mebibytes << 20))
        saver = CheckpointSaver(SnapshotStore(memory), str(disk), RetentionPolicy(), lambda: None)
        saver.begin(SnapshotRole(generation=2, token=TOKEN, world_size=1, ranks=(0,)))
        saver.save_held([ShardName(2, 9, 0, 1)])
        deadline_s = time.monotonic() + patience(30.0)
        while saver.saving and time.monotonic() < deadline_s:
            time.sleep(0.01)
        saver.close()
        news = list(saver.events())
        assert not [name for name in left if (disk / name).exists()], news
        assert all((disk / name).exists() for name in stay)
        assert newest(disk) == 9, news
    (over,) = (told for told in news if isinstance(told, SaveFinished))
    assert "3 files of saves that failed removed, for want of space" in over.notes


@pytest.mark.slow
def test_a_save_tried_again_does_not_copy_its_parts_twice(tmp_path: Path) -> None:
    """A disk that had room for one copy of a part had none for a second beside it."""
    draft = draft_of(LAYOUT, generation=2, token=TOKEN, step=9)
    memory = tmp_path / "memory"
    write_snapshot(memory, draft, 0, [TensorPiece("a", torch.arange(NUMEL, dtype=torch.float32))])
    store, shard = SnapshotStore(memory), ShardName(2, 9, 0, 1)
    with small_disk(tmp_path / "disk", 12) as disk:
        seal = store.read_seal(shard)
        written = [
            persist(store, shard, DiskDirectory(disk), lambda: seal, again=again)[1]
            for again in (False, True)
        ]
        assert written[0] > NUMEL and written[1] == 0
        part = next(disk.glob("step-*/rank-*.safetensors"))
        part.write_bytes(part.read_bytes()[:-1])
        assert persist(store, shard, DiskDirectory(disk), lambda: seal, again=True)[1] > NUMEL
