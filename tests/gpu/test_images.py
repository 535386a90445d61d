"""A capture through an image on a GPU: it is the state at the call, whatever comes after it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elasticzero.checkpoint.format.layout import Group, Layout, TensorSpec
from elasticzero.checkpoint.format.manifest import Manifest
from elasticzero.checkpoint.io.reader import open_snapshot
from elasticzero.checkpoint.io.writer import TensorPiece
from elasticzero.checkpoint.ram.device_image import room
from elasticzero.checkpoint.ram.staging import SharedMemoryStager, StagingOptions
from elasticzero.checkpoint.ram.store import ShardName, SnapshotStore
from elasticzero.spans import Span

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
ELEMENTS = 1 << 24
NAMES = ("weights", "halves", "numbers")


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


def test_a_captured_state_may_change_at_once(shared_memory: Path) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    state = {
        "weights": torch.randn(ELEMENTS, device=device),
        "halves": torch.randn(ELEMENTS, device=device).bfloat16(),
        "numbers": torch.arange(ELEMENTS, dtype=torch.int64),  # on the CPU
    }
    expected = {name: tensor.cpu().clone() for name, tensor in state.items()}
    specs = {
        name: TensorSpec(dtype, (ELEMENTS,))
        for name, dtype in zip(NAMES, ("F32", "BF16", "I64"), strict=True)
    }
    assert room(device, 0) > sum(tensor.nbytes for tensor in state.values())
    layout = Layout(world_size=1, tensors=specs, groups=(Group("even", NAMES),))
    store, writer = SnapshotStore(shared_memory), SharedMemoryStager(shared_memory, 0)
    for step in range(1, 4):
        manifest = Manifest(
            step=step, generation=1, token="g000001-x", strategy="ddp", layout=layout, state={}
        )
        pieces = [TensorPiece(name, tensor) for name, tensor in state.items()]
        staged = writer.begin(manifest, 0, pieces, set(), StagingOptions(beside=True))
        for tensor in state.values():
            tensor += 1
        assert staged.finish is not None and store.drafts() == []
        staged.finish()
        store.seal(ShardName(1, step, 0, 1))
        snapshot = open_snapshot({0: [store.open(1, step)]}, 1, step)
        for name, tensor in expected.items():
            out = torch.empty_like(tensor)
            snapshot.read(name, Span(0, out.numel()), out)
            assert torch.equal(out, tensor), name
            tensor += 1
    writer.close()
