"""Event files of a run go on where they ended, and TensorBoard's own reader reads them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elasticzero.ops.trackers.averages import Row
from elasticzero.ops.trackers.tensorboard_run import TensorBoardRun, open_tensorboard_run
from elasticzero.ops.trackers.tracker import NOTHING

pytest.importorskip("tensorboard")


def rows(*steps: int) -> list[Row]:
    return [Row(step, 1000.0 + step, {"loss": step / 2, "lr": 0.5}) for step in steps]


def points(directory: Path, name: str) -> list[tuple[float, int, float]]:
    """Returns what TensorBoard shows of a curve."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    return [(e.wall_time, e.step, e.value) for e in events.Scalars(name)]


@contextmanager
def opened(folder: Path, job: str = "job", *, begins: bool = False) -> Iterator[TensorBoardRun]:
    run = open_tensorboard_run(str(folder), job, begins=begins)
    yield run
    run.close(None)


def test_a_run_that_is_opened_again_knows_its_last_step(tmp_path: Path) -> None:
    with opened(tmp_path, begins=True) as first:
        assert first.last_step == NOTHING
        first.write(rows(1, 2))
        first.write(rows(3))
    with opened(tmp_path) as second:
        assert second.last_step == 3
        second.write(rows(4))
    for _ in range(2):  # a process that writes nothing hides nothing
        with opened(tmp_path) as later:
            assert later.last_step == 4
    expected = [(1000.0 + step, step, step / 2) for step in (1, 2, 3, 4)]
    assert points(tmp_path / "job" / "run-1", "loss") == expected


def test_a_job_that_begins_anew_has_a_run_of_its_own(tmp_path: Path) -> None:
    with opened(tmp_path, begins=True) as run:
        run.write(rows(1, 2))
    with opened(tmp_path, begins=True) as again:
        assert again.where == str(tmp_path / "job" / "run-2")
        assert again.last_step == NOTHING
    with opened(tmp_path) as same:
        assert same.where == again.where
    with opened(tmp_path, begins=True) as empty:  # such as after a process that died at its start
        assert empty.where == again.where
    with opened(tmp_path, "other") as other:
        assert other.where == str(tmp_path / "other" / "run-1")


def test_a_record_that_was_cut_short_does_not_count(tmp_path: Path) -> None:
    with opened(tmp_path, begins=True) as run:
        run.write(rows(1, 2))
    (file,) = (tmp_path / "job" / "run-1").iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    with opened(tmp_path) as again:
        assert again.last_step == 1
        again.write(rows(2, 3))
    assert [step for _, step, _ in points(tmp_path / "job" / "run-1", "loss")] == [1, 2, 3]


def test_a_node_whose_clock_is_behind_writes_the_last_file(tmp_path: Path) -> None:
    with opened(tmp_path, begins=True) as run:
        run.write(rows(1, 2))
    folder = tmp_path / "job" / "run-1"
    (file,) = folder.iterdir()
    ahead = "events.out.tfevents.9000000000.node.1.0"
    file.rename(folder / ahead)
    with opened(tmp_path) as again:
        assert again.last_step == 2
        again.write(rows(3))
    assert max(path.name for path in folder.iterdir()) != ahead
    with opened(tmp_path) as third:
        assert third.last_step == 3
