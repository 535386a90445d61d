"""From memory to storage, while memory goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from elasticzero.checkpoint.format.layout import Group, Layout, TensorSpec
from elasticzero.checkpoint.format.names import SUMS_SUFFIX, step_directory
from elasticzero.checkpoint.io.reader import Checkpoint, open_snapshot, open_step
from elasticzero.checkpoint.io.writer import TensorPiece
from elasticzero.checkpoint.ram.staging import SharedMemoryStager
from elasticzero.checkpoint.ram.store import ShardName, SnapshotStore
from elasticzero.checkpoint.ram.transfer import persist
from elasticzero.checkpoint.steps import commit
from elasticzero.checkpoint.storage.base import Bytes
from elasticzero.checkpoint.storage.disk import DiskDirectory, DiskStorage
from elasticzero.errors import StorageError
from elasticzero.spans import Span
from tests.unit.checkpoint.cases import draft_of

NUMEL = 100_000
LAYOUT = Layout(
    world_size=1, tensors={"a": TensorSpec("F32", (NUMEL,))}, groups=(Group("even", ("a",)),)
)


class Slow(DiskDirectory):
    """A directory in which every write begins only after something else has happened."""

    def __init__(self, path: Path, first: Callable[[], object]) -> None:
        super().__init__(path)
        self._first = first

    def make(self, name: str) -> DiskStorage:
        first = self._first

        class Storage(DiskStorage):
            def write(
                self,
                name: str,
                chunks: Iterable[Bytes],
                *,
                size: int | None = None,
                cached: bool = True,
            ) -> None:
                first()
                super().write(name, chunks, size=size, cached=cached)

        return Storage(super().make(name).path)


@pytest.mark.parametrize("generation", [1, 2])
def test_captures_go_on_while_a_shard_is_being_copied(tmp_path: Path, generation: int) -> None:
    """The same generation's, as at a stop in the middle of a save, or the next one's: what is being
    copied is not needed in memory any more, and its slot is not free for all that."""
    memory = SnapshotStore(tmp_path / "memory")
    writer = SharedMemoryStager(memory.root, 0)

    def capture(generation: int, step: int) -> ShardName:
        draft = draft_of(LAYOUT, generation=generation, token=f"g{generation}", step=step)
        writer.write(draft, 0, [TensorPiece("a", torch.full((NUMEL,), float(step)))], set())
        return ShardName(generation, step, 0, 1)

    later = iter(range(6, 20))
    directory = Slow(
        tmp_path / "checkpoints", lambda: memory.seal(capture(generation, next(later)))
    )
    shard = capture(1, 5)
    memory.seal(shard)
    seal = memory.read_seal(shard)
    persist(memory, shard, directory, lambda: seal)
    storage = directory.step(step_directory(5))
    assert commit.commit(storage, draft_of(LAYOUT, generation=1, token="g1", step=5), wait_s=0.0)
    assert read(open_step(storage)) == 5.0
    (held,) = memory.held()
    assert held.step == next(later) - 1 and not memory.has(shard)
    snapshot = memory.open(held.generation, held.step)
    assert read(open_snapshot({0: [snapshot]}, held.generation, held.step)) == held.step


class Full(DiskDirectory):
    """A directory that has no room, and in which something else happens before a removal."""

    def __init__(self, path: Path, before: Callable[[], object]) -> None:
        super().__init__(path)
        self._before = [before]

    def make(self, name: str) -> DiskStorage:
        left = self._before

        class Storage(DiskStorage):
            def remove(
                self, name: str, *, holding: bytes | None = None, version: str | None = None
            ) -> None:
                if left:
                    left.pop()()
                super().remove(name, holding=holding, version=version)

            def write(
                self,
                name: str,
                chunks: Iterable[Bytes],
                *,
                size: int | None = None,
                cached: bool = True,
            ) -> None:
                raise StorageError("no space left on device")

        return Storage(super().make(name).path)


def test_a_part_that_is_begun_anew_takes_none_of_another_nodes(tmp_path: Path) -> None:
    """Two nodes hold the shard. One stands still where it makes room for its part, the other one
    saves the step meanwhile, which then lost its shard."""
    memory = SnapshotStore(tmp_path / "memory")
    draft = draft_of(LAYOUT, generation=1, token="g1", step=5)
    SharedMemoryStager(memory.root, 0).write(
        draft, 0, [TensorPiece("a", torch.full((NUMEL,), 5.0))], set()
    )
    shard = ShardName(1, 5, 0, 1)
    memory.seal(shard)
    seal = memory.read_seal(shard)
    place = DiskDirectory(tmp_path / "checkpoints")
    storage = place.step(step_directory(5))

    def save() -> None:
        persist(memory, shard, place, lambda: seal, again=True)
        assert commit.commit(storage, draft, wait_s=0.0)

    persist(memory, shard, place, lambda: seal)
    storage.remove(draft.file_name(0) + SUMS_SUFFIX)
    with pytest.raises(StorageError, match="no space"):
        persist(memory, shard, Full(place.path, save), lambda: seal, again=True)
    assert read(open_step(storage)) == 5.0


def read(checkpoint: Checkpoint) -> float:
    """What all of its numbers are."""
    values = torch.empty(NUMEL)
    checkpoint.read("a", Span(0, NUMEL), values)
    assert bool((values == values[0]).all())
    return float(values[0])
