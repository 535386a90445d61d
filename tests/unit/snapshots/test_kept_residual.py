"""The file in which a rank keeps what it has not sent of gradients, while a peer is lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from elasticzero.ipc.agent_client import STANDALONE
from elasticzero.ipc.assignment import Assignment, Resume
from elasticzero.ipc.messages import ResidualLost
from elasticzero.options.wire import EXACT, Wire
from elasticzero.parallel.mesh import Mesh
from elasticzero.parallel.wire.residual import BucketResidual, Residual
from elasticzero.snapshots import kept_residual
from elasticzero.snapshots.kept_residual import KeptResidual
from tests.support.fake_groups import fake_group

STEP, GENERATION, RANKS = 7, 3, 3
KEPT, NEXT = torch.full((2, 3), 2.0), torch.full((2, 3), 5.0)


class FakeLink:
    """The client of an agent."""

    standalone = False

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


class FakeGroups:
    """Groups of ranks that all have what this one has."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def sum(self, table: Tensor) -> Tensor:
        return table * self.ranks


class Rank:
    """One local rank of a node."""

    def __init__(self, root: Path, *, divided: bool = False, **differences: Any) -> None:
        a = replace(
            STANDALONE,
            snapshot_root=str(root),
            world_size=RANKS,
            generation=GENERATION,
            resume=Resume(tier="ram", step=STEP, generation=GENERATION),
        )
        self.link = FakeLink(replace(a, **differences))
        link: Any = self.link
        mesh = Mesh.of_world(0, RANKS, fake_group(RANKS))
        self.residual = Residual(Wire(format="int8"), mesh, None if divided else mesh.world_group)
        self.bucket = BucketResidual(["w"], torch.empty(6), lambda flat_E: [flat_E.view(2, 3)])
        self.residual.lay([self.bucket])
        groups: Any = FakeGroups(self.link.assignment.world_size)
        self.kept = KeptResidual(link, groups, self.residual)

    @property
    def present(self) -> Tensor:
        return self.residual.present()["w"]

    def lost(self) -> list[tuple[int, float | None]]:
        return [(m.ranks, m.norm) for m in self.link.sent if isinstance(m, ResidualLost)]


def write(rank: Rank, *, is_complete: bool = False, following: Tensor = NEXT) -> None:
    """Has a rank end its generation, perhaps with all of a step's gradients encoded."""
    rank.present.copy_(KEPT)
    if is_complete:
        rank.bucket.add_to(torch.zeros(6), 1.0).copy_(following.flatten())
        rank.residual.completed()
    rank.kept.write(STEP, 2)


@pytest.mark.parametrize("step", [STEP, STEP + 1])
def test_a_survivor_goes_on_with_what_it_had(step: int, tmp_path: Path) -> None:
    """Also where another one was a step further, with all that this step has taken from it."""
    write(Rank(tmp_path), is_complete=True)
    after = Rank(tmp_path)
    after.kept.take(step, 2, is_stored=False)
    assert torch.equal(after.present, KEPT if step == STEP else NEXT)
    assert after.lost() == []


@pytest.mark.parametrize(
    ("differences", "step"),
    [
        ({}, STEP - 1),
        ({}, STEP + 1),
        ({"run": 2}, STEP),
        ({"local_rank": 1}, STEP),
        ({"resume": Resume(tier="ram", step=STEP, generation=GENERATION - 1)}, STEP),
    ],
)
def test_another_boundary_has_none(differences: dict[str, Any], step: int, tmp_path: Path) -> None:
    write(Rank(tmp_path))
    after = Rank(tmp_path, **differences)
    after.kept.take(step, 2, is_stored=False)
    assert not after.present.any() and after.lost() == []


def test_a_step_that_another_rank_has_skipped_has_sent_nothing(tmp_path: Path) -> None:
    write(Rank(tmp_path), is_complete=True)
    after = Rank(tmp_path)
    after.kept.take(STEP + 1, 3, is_stored=False)
    assert torch.equal(after.present, KEPT)


def test_a_step_that_is_not_finite_is_not_kept(tmp_path: Path) -> None:
    write(Rank(tmp_path), is_complete=True, following=torch.full((2, 3), torch.nan))
    after = Rank(tmp_path)
    after.kept.take(STEP + 1, 2, is_stored=False)
    assert not after.present.any()


@pytest.mark.parametrize("damage", [b"", b"no tensors", b"\x10" + bytes(30)])
def test_a_damaged_file_has_none(damage: bytes, tmp_path: Path) -> None:
    write(Rank(tmp_path))
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage)
    after = Rank(tmp_path)
    after.kept.take(STEP, 2, is_stored=False)
    assert not after.present.any()


def test_where_mirrors_have_the_state_the_file_has_its_size_alone(tmp_path: Path) -> None:
    before = Rank(tmp_path, divided=True, mirrored_by=1)
    write(before)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size < 300
    after = Rank(tmp_path, divided=True, world_size=RANKS - 1)
    after.present.fill_(9)  # loaded with the state
    after.kept.take(STEP, 2, is_stored=True)
    assert torch.equal(after.present, torch.full((2, 3), 9.0))
    assert after.lost() == [(1, None)]


def test_a_snapshot_of_divided_state_has_all_and_needs_no_file(tmp_path: Path) -> None:
    write(Rank(tmp_path, divided=True))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("survivors", "squares", "expected"),
    [
        (3, (4.0, 12.0), []),
        (2, (4.0, 12.0), [(1, 2.0)]),
        (1, (4.0, 12.0), [(2, 8**0.5)]),
        (2, None, [(1, None)]),
        (2, (4.0, 7.9), [(1, 0.0)]),  # sums are rounded
    ],
)
def test_rank_0_says_what_is_lost(
    survivors: int,
    squares: tuple[float, float] | None,
    expected: list[tuple[int, float | None]],
    tmp_path: Path,
) -> None:
    before = Rank(tmp_path)
    if squares is not None:
        pair = torch.tensor(squares, dtype=torch.float64)
        before.residual._squares = (pair[0], pair[1])
    write(before)
    for rank in (0, 1):
        after = Rank(tmp_path, world_size=survivors, rank=rank)
        after.kept.take(STEP, 2, is_stored=False)
        assert after.lost() == (expected if rank == 0 else [])


def test_no_room_for_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"a part of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept_residual, "save_file", refuse)
    write(Rank(tmp_path))
    assert "parts of gradients that were not sent yet are lost" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_that_finds_no_memory_does_not_cost_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(kept_residual, "save_file", refuse)
    write(Rank(tmp_path))
    assert "CUDA out of memory" in caplog.text


def test_the_file_goes_once_a_state_is_captured(tmp_path: Path) -> None:
    """With those of local ranks that there are no more."""
    write(Rank(tmp_path))
    (tmp_path / "residual-1.safetensors").touch()
    (tmp_path / "slot-1").touch()
    after = Rank(tmp_path)
    after.kept.take(STEP, 2, is_stored=False)
    assert len(list(tmp_path.iterdir())) == 3  # this generation may fail before
    after.kept.release()
    assert [path.name for path in tmp_path.iterdir()] == ["slot-1"]


def test_a_wire_that_loses_nothing_has_no_file(tmp_path: Path) -> None:
    link: Any = FakeLink(replace(STANDALONE, snapshot_root=str(tmp_path)))
    kept = KeptResidual(link, None, Residual(EXACT, Mesh.of_world(0, 1), None))
    kept.write(STEP, 2)
    kept.take(STEP, 2, is_stored=False)
    assert list(tmp_path.iterdir()) == []
