"""Any state, dealt in any way to any number of ranks, loads into any other: N to M to N' ranks
through real files, against tensors that were never cut."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticzero.checkpoint.format.dtypes import byte_view, torch_dtype
from elasticzero.checkpoint.format.layout import Layout, TensorSpec
from elasticzero.checkpoint.format.manifest import Manifest
from elasticzero.checkpoint.format.names import step_directory
from elasticzero.checkpoint.io.reader import open_step
from elasticzero.checkpoint.io.writer import SaveCoordination, TensorPiece, write_checkpoint
from elasticzero.checkpoint.storage.disk import DiskDirectory
from elasticzero.state.model import LoadTarget
from tests.unit.checkpoint.cases import draft_of, elements, layouts

MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else None


def tensors_of(specs: dict[str, TensorSpec]) -> dict[str, torch.Tensor]:
    whole = {}
    for name, data in elements(specs).items():
        made = torch.empty(specs[name].shape, dtype=torch_dtype(specs[name].dtype))
        byte_view(made)[:] = data
        whole[name] = made
    return whole


def write(directory: DiskDirectory, draft: Manifest, parts: list[list[TensorPiece]]) -> None:
    """Every rank its part; rank 0 last, which commits."""
    for rank in reversed(range(draft.layout.world_size)):
        write_checkpoint(directory, draft, rank, parts[rank], SaveCoordination(wait_s=0.0))


def cut(layout: Layout, whole: dict[str, torch.Tensor]) -> list[list[TensorPiece]]:
    """What each rank holds: the dumb way, by slices of whole tensors."""
    return [
        [
            TensorPiece(n, whole[n].reshape(-1)[s.start : s.stop])
            for n, s in layout.spans(rank).items()
        ]
        for rank in range(layout.world_size)
    ]


def load(directory: DiskDirectory, step: int, layout: Layout) -> list[list[TensorPiece]]:
    """What each rank of a new world reads of a step."""
    parts = []
    for rank in range(layout.world_size):
        checkpoint = open_step(directory.step(step_directory(step)))
        pieces, targets = [], []
        for name, span in layout.spans(rank).items():
            dtype = torch_dtype(layout.tensors[name].dtype)
            pieces.append(TensorPiece(name, torch.empty(len(span), dtype=dtype)))
            targets.append(LoadTarget(name, span, pieces[-1].data))
        checkpoint.load(targets)
        parts.append(pieces)
    return parts


def as_bytes(parts: list[list[TensorPiece]]) -> list[dict[str, bytes]]:
    return [{piece.name: bytes(byte_view(piece.data)) for piece in pieces} for pieces in parts]


@settings(max_examples=250)
@given(st.data(), layouts())
def test_any_layout_loads_into_any_other(data: st.DataObject, first: Layout) -> None:
    check(data, first)


@pytest.mark.slow
@pytest.mark.timeout(400)
@settings(max_examples=1000)
@given(st.data(), layouts())
def test_any_of_many_more_layouts_loads_into_any_other(data: st.DataObject, first: Layout) -> None:
    check(data, first)


def check(data: st.DataObject, first: Layout) -> None:
    """Writes a state in one layout, and loads it in two others, one after the other."""
    whole = tensors_of(dict(first.tensors))
    with tempfile.TemporaryDirectory(dir=MEMORY) as root:
        directory = DiskDirectory(Path(root))
        write(directory, draft_of(first, step=1), cut(first, whole))
        for step in (1, 2):
            layout = data.draw(layouts(first.tensors))
            parts = load(directory, step, layout)
            assert as_bytes(parts) == as_bytes(cut(layout, whole))
            if step == 1:
                write(directory, draft_of(layout, step=2, token="second"), parts)
