"""Tensors to shards and back, against tensors that were never cut."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import elasticzero.checkpoint
from elasticzero.checkpoint.format.dtypes import byte_view, tensor_spec, torch_dtype
from elasticzero.checkpoint.format.layout import ITEM_BYTES, Group, Layout, TensorSpec
from elasticzero.checkpoint.format.manifest import Manifest
from elasticzero.checkpoint.format.names import snapshot_manifest_name, step_directory
from elasticzero.checkpoint.io import read_parts
from elasticzero.checkpoint.io.reader import Checkpoint, open_snapshot, open_step
from elasticzero.checkpoint.io.writer import SaveCoordination, TensorPiece, write_checkpoint
from elasticzero.checkpoint.ram.store import SnapshotStore
from elasticzero.checkpoint.storage.disk import DiskDirectory, DiskStorage
from elasticzero.errors import CheckpointDamaged, CheckpointMismatch, StorageError, UserError
from elasticzero.spans import Span
from elasticzero.state.model import LoadTarget
from tests.unit.checkpoint.cases import (
    draft_of,
    elements,
    flip,
    layouts,
    simple_layout,
    write_snapshot,
)

NO_WAIT = SaveCoordination(wait_s=0.0)


def tensors_of(specs: dict[str, TensorSpec], seed: int = 0) -> dict[str, torch.Tensor]:
    whole = {}
    for name, data in elements(specs, seed).items():
        dtype = torch_dtype(specs[name].dtype)
        flat = (
            torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
        )
        whole[name] = flat.reshape(specs[name].shape)
    return whole


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit: NaNs too."""
    return tensor_spec(a) == tensor_spec(b) and bytes(byte_view(a)) == bytes(byte_view(b))


def pieces(draft: Manifest, rank: int, whole: dict[str, torch.Tensor]) -> list[TensorPiece]:
    held = draft.layout.spans(rank)
    return [TensorPiece(n, whole[n].reshape(-1)[s.start : s.stop]) for n, s in held.items()]


def write_all(directory: Path, draft: Manifest, whole: dict[str, torch.Tensor]) -> Path:
    """A checkpoint, written by its ranks one after the other, rank 0 last."""
    for rank in reversed(range(draft.layout.world_size)):
        write_checkpoint(DiskDirectory(directory), draft, rank, pieces(draft, rank, whole), NO_WAIT)
    return directory / step_directory(draft.step)


def snapshot_all(root: Path, draft: Manifest, whole: dict[str, torch.Tensor]) -> DiskStorage:
    for rank in range(draft.layout.world_size):
        write_snapshot(root, draft, rank, pieces(draft, rank, whole))
    return DiskStorage(SnapshotStore(root).path(draft.generation, draft.step))


@settings(max_examples=60)
@given(st.data(), layouts())
def test_any_layout_loads_into_any_other(data: st.DataObject, old: Layout) -> None:
    """From N ranks to M ranks to N' ranks, each rank loading only what it holds."""
    whole = tensors_of(dict(old.tensors))
    with tempfile.TemporaryDirectory() as directory:
        draft = draft_of(old)
        source = snapshot_all(Path(directory), draft, whole)
        for generation in (4, 5):
            places = {r: [source] for r in range(draft.layout.world_size)}
            new = draft_of(data.draw(layouts(old.tensors)), generation=generation)
            for rank in range(new.layout.world_size):
                checkpoint = open_snapshot(places, draft.generation, 7)
                parts = {
                    name: (span, torch.empty(len(span), dtype=whole[name].dtype))
                    for name, span in new.layout.spans(rank).items()
                }
                checkpoint.load(LoadTarget(name, *held) for name, held in parts.items())
                for name, (span, tensor) in parts.items():
                    assert same(tensor, whole[name].reshape(-1)[span.start : span.stop])
                held = [TensorPiece(name, tensor) for name, (_, tensor) in parts.items()]
                write_snapshot(Path(directory), new, rank, held)
            draft, source = new, DiskStorage(SnapshotStore(Path(directory)).path(generation, 7))


def test_every_dtype_survives_and_every_rank_writes_its_share(tmp_path: Path) -> None:
    specs = {dtype: TensorSpec(dtype, (7, 11)) for dtype in ITEM_BYTES}
    layout = Layout(
        world_size=3, tensors=specs, groups=tuple(Group("even", (name,)) for name in specs)
    )
    whole = tensors_of(specs)
    step = write_all(tmp_path, draft_of(layout), whole)
    loaded = elasticzero.checkpoint.load(step)
    assert loaded.keys() == whole.keys()
    for name, tensor in loaded.items():
        assert same(tensor, whole[name])
    total = sum(spec.nbytes for spec in specs.values())
    for rank in range(3):
        file = safetensors.torch.load_file(step / draft_of(layout).file_name(rank))
        share = sum(tensor.nbytes for tensor in file.values())
        assert share == pytest.approx(total / 3, rel=0.05)


def test_only_rank_0_commits_and_says_so(tmp_path: Path) -> None:
    draft = draft_of(simple_layout())
    whole = tensors_of(dict(draft.layout.tensors))
    second = write_checkpoint(DiskDirectory(tmp_path), draft, 1, pieces(draft, 1, whole))
    first = write_checkpoint(DiskDirectory(tmp_path), draft, 0, pieces(draft, 0, whole), NO_WAIT)
    assert (first.committed, second.committed) == (True, False)
    storage = DiskStorage(tmp_path / step_directory(7))
    files = open_step(storage).manifest.files
    assert [file.bytes for file in files] == [first.bytes, second.bytes]
    names = storage.names()
    for rank in (0, 1):
        other = replace(draft, token="other")
        rank_pieces = pieces(draft, rank, whole)
        again = write_checkpoint(DiskDirectory(tmp_path), other, rank, rank_pieces, NO_WAIT)
        assert (again.bytes, again.committed) == (0, False)
    assert storage.names() == names


def test_pieces_that_are_not_the_layout_s_are_refused(tmp_path: Path) -> None:
    draft = draft_of(simple_layout(world_size=1))
    whole = tensors_of(dict(draft.layout.tensors))
    right = pieces(draft, 0, whole)
    wrong = {
        "differ in .'model/w'": right[1:],
        "differ in .'x'": [*right, TensorPiece("x", torch.zeros(1))],
        "999 elements": [replace(p, data=p.data[1:]) if p.name == "model/b" else p for p in right],
        "float32 were given for F64": [replace(p, data=p.data.float()) for p in right],
    }
    for complaint, wrong_pieces in wrong.items():
        with pytest.raises(ValueError, match=complaint):
            write_checkpoint(DiskDirectory(tmp_path), draft, 0, wrong_pieces, NO_WAIT)
    assert os.listdir(tmp_path) == []


def test_targets_of_other_shapes_and_orders_are_filled(tmp_path: Path) -> None:
    draft = draft_of(simple_layout(numel=60))
    whole = tensors_of(dict(draft.layout.tensors))
    checkpoint = open_step(DiskStorage(write_all(tmp_path, draft, whole)))
    matrix = torch.zeros(10, 6, dtype=torch.float64).t()
    parameter = torch.nn.Parameter(torch.zeros(2, 3, 10, dtype=torch.float64))
    part = torch.zeros(2, 7, dtype=torch.float64).t()
    checkpoint.load(
        [
            LoadTarget("model/w", Span(0, 60), matrix),
            LoadTarget("model/b", Span(0, 60), parameter),
            LoadTarget("model/b", Span(25, 39), part),
        ]
    )
    assert torch.equal(matrix.reshape(-1), whole["model/w"].reshape(-1))
    assert torch.equal(parameter.data.reshape(-1), whole["model/b"])
    assert torch.equal(part.reshape(-1), whole["model/b"][25:39])
    assert checkpoint.bytes_read == 8 * (60 + 60 + 14)


def test_a_target_not_in_plain_memory_is_filled_by_staging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = draft_of(simple_layout(numel=1000))
    whole = tensors_of(dict(draft.layout.tensors))
    checkpoint = open_step(DiskStorage(write_all(tmp_path, draft, whole)))
    monkeypatch.setattr(read_parts, "READ_STAGING_BYTES", 64)
    matrix = torch.zeros(10, 100, dtype=torch.float64).t()
    checkpoint.read("model/w", Span(0, 1000), matrix)
    assert torch.equal(matrix.reshape(-1), whole["model/w"].reshape(-1))


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    draft = draft_of(simple_layout(numel=60))
    whole = tensors_of(dict(draft.layout.tensors))
    checkpoint = open_step(DiskStorage(write_all(tmp_path, draft, whole)))
    held = dict(draft.layout.tensors)
    checkpoint.check(held)
    expected = held | {"model/b": TensorSpec("F32", (60,)), "model/new": TensorSpec("F32", ())}
    del expected["optimizer/w/step"]
    with pytest.raises(CheckpointMismatch) as caught:
        checkpoint.check(expected)
    assert str(caught.value) == (
        "the checkpoint of step 7 does not fit: model/new is missing; optimizer/w/step is not "
        "expected; model/b is F64[60], and F32[60] is expected"
    )
    many = {f"x{i}": TensorSpec("F32", ()) for i in range(9)}
    with pytest.raises(CheckpointMismatch, match=r"x4 is missing; and 4 more$"):
        checkpoint.check(held | many)
    double = torch.zeros(60, dtype=torch.float64)
    for target, complaint in [
        (LoadTarget("x", Span(0, 60), double), "no tensor 'x'"),
        (LoadTarget("model/b", Span(0, 60), double.float()), "F64.* and torch.float32 is expected"),
        (LoadTarget("model/b", Span(0, 59), double), "59 elements .* to fill a tensor of 60"),
        (LoadTarget("model/b", Span(1, 61), double), "nobody holds elements .60, 61"),
    ]:
        with pytest.raises(CheckpointMismatch, match=complaint):
            checkpoint.load([target])


@pytest.fixture
def scattered(tmp_path: Path) -> tuple[Manifest, dict[str, torch.Tensor], list[DiskStorage]]:
    """A snapshot of three ranks, each on a node of its own."""
    draft = draft_of(simple_layout(world_size=3), generation=4)
    whole = tensors_of(dict(draft.layout.tensors))
    nodes = []
    for rank in range(3):
        root = tmp_path / f"node-{rank}"
        write_snapshot(root, draft, rank, pieces(draft, rank, whole))
        nodes.append(DiskStorage(SnapshotStore(root).path(4, 7)))
    return draft, whole, nodes


T = TypeVar("T")
Scattered = tuple[Manifest, dict[str, torch.Tensor], list[DiskStorage]]


def load_all(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    specs = checkpoint.manifest.layout.tensors
    made = {n: torch.empty(s.shape, dtype=torch_dtype(s.dtype)) for n, s in specs.items()}
    checkpoint.load(LoadTarget(n, Span(0, t.numel()), t) for n, t in made.items())
    return made


def test_a_snapshot_is_read_from_the_nodes_that_hold_it(scattered: Scattered) -> None:
    _, whole, nodes = scattered
    read = load_all(open_snapshot({r: [nodes[r]] for r in range(3)}, 4, 7))
    assert all(same(read[name], whole[name]) for name in whole)
    assert [s.ranks for n in nodes for s in SnapshotStore(n.path.parents[1]).held()] == [
        (0,),
        (1,),
        (2,),
    ]


@pytest.mark.parametrize("harm", ["gone", "flipped", "no manifest"])
def test_the_next_source_takes_over(scattered: Scattered, tmp_path: Path, harm: str) -> None:
    draft, whole, nodes = scattered
    spare = snapshot_all(tmp_path / "spare", draft, whole)
    for rank, node in enumerate(nodes):
        if harm == "gone":
            for name in node.names():
                node.remove(name)
        elif harm == "flipped":
            flip(node.path / draft.file_name(rank), -1)
        else:
            node.remove(snapshot_manifest_name(rank, 3))
    read = load_all(open_snapshot({r: [nodes[r], spare] for r in range(3)}, 4, 7))
    assert all(same(read[name], whole[name]) for name in whole)
    with pytest.raises((CheckpointDamaged, StorageError)):
        load_all(open_snapshot({r: [nodes[r]] for r in range(3)}, 4, 7))


def test_a_shard_that_is_still_written_is_waited_for(scattered: Scattered) -> None:
    _, whole, nodes = scattered
    manifests = dict[int, bytes]()
    for rank, node in enumerate(nodes):
        path = node.path / snapshot_manifest_name(rank, 3)
        manifests[rank] = path.read_bytes()
        path.unlink()

    def until_held(open_it: Callable[[], T]) -> T:
        while True:
            try:
                return open_it()
            except CheckpointDamaged:
                rank = min(manifests)
                path = nodes[rank].path / snapshot_manifest_name(rank, 3)
                path.write_bytes(manifests.pop(rank))

    read = load_all(open_snapshot({r: [nodes[r]] for r in range(3)}, 4, 7, until_held))
    assert all(same(read[name], whole[name]) for name in whole)


def test_a_snapshot_of_another_generation_or_step_is_refused(
    scattered: Scattered, tmp_path: Path
) -> None:
    """So is one of another write of the same step."""
    draft, whole, nodes = scattered
    places = {r: [nodes[r]] for r in range(3)}
    with pytest.raises(CheckpointDamaged, match="step 7 of generation 4, not step 7 of gener"):
        open_snapshot(places, 5, 7)
    other = snapshot_all(tmp_path / "other", replace(draft, token="other"), whole)
    with pytest.raises(CheckpointDamaged, match="belongs to another snapshot"):
        load_all(open_snapshot(places | {1: [other]}, 4, 7))
    with pytest.raises(StorageError, match=r"only ranks \[0, 2\] are held"):
        open_snapshot({0: [nodes[0]], 2: [nodes[2]]}, 4, 7)
    with pytest.raises(StorageError, match="no node holds the shard of rank 0"):
        open_snapshot({0: []}, 4, 7)


def test_a_snapshot_written_again_is_whole_again(scattered: Scattered) -> None:
    draft, whole, nodes = scattered
    root = nodes[1].path.parents[1]
    changed = {name: tensor + 1 for name, tensor in whole.items()}
    write_snapshot(root, draft, 1, pieces(draft, 1, changed))
    read = load_all(open_snapshot({r: [nodes[r]] for r in range(3)}, 4, 7))
    span = draft.layout.spans(1)["model/b"]
    assert torch.equal(
        read["model/b"][span.start : span.stop], whole["model/b"][span.start : span.stop] + 1
    )


def test_a_checkpoint_with_a_file_of_another_save_is_refused(tmp_path: Path) -> None:
    draft = draft_of(simple_layout())
    whole = tensors_of(dict(draft.layout.tensors))
    step = write_all(tmp_path / "a", draft, whole)
    other = replace(draft, token="other")
    theirs = write_all(tmp_path / "b", other, whole)
    for end in ("", ".sums"):
        os.replace(theirs / (other.file_name(1) + end), step / (draft.file_name(1) + end))
    with pytest.raises(CheckpointDamaged, match="not the one that the manifest names"):
        elasticzero.checkpoint.load(step)


def test_a_flipped_bit_in_any_shard_is_never_loaded(tmp_path: Path) -> None:
    draft = draft_of(simple_layout())
    step = write_all(tmp_path, draft, tensors_of(dict(draft.layout.tensors)))
    for rank in (0, 1):
        path = step / draft.file_name(rank)
        for position in range(0, path.stat().st_size, 997):
            flip(path, position)
            with pytest.raises(CheckpointDamaged, match=path.name):
                elasticzero.checkpoint.load(step)
            flip(path, position)
    elasticzero.checkpoint.load(step)


def test_saved_by_hand_and_loaded(tmp_path: Path) -> None:
    saved = {
        "w": torch.randn(5, 4).t(),
        "half": torch.randn(9).bfloat16(),
        "scalar": torch.tensor(3),
        "none": torch.empty(0, 3),
        "mask": torch.tensor([True, False]),
    }
    state = {"epoch": 2, "best": math.inf}
    step = elasticzero.checkpoint.save(tmp_path, saved, step=3, state=state)
    assert step == str(tmp_path / "step-000000000003")
    for path in (tmp_path, step, f"file://{tmp_path}"):
        loaded = elasticzero.checkpoint.load(path)
        assert list(loaded) != [] and loaded.keys() == saved.keys()
        assert all(same(loaded[name], saved[name].contiguous()) for name in saved)
    assert elasticzero.checkpoint.load_state(tmp_path) == state
    into = {"w": torch.zeros(5, 4).t(), "scalar": torch.tensor(0)}
    assert elasticzero.checkpoint.load(tmp_path, into)["w"] is into["w"]
    assert torch.equal(into["w"], saved["w"]) and into["scalar"] == 3
    with pytest.raises(CheckpointMismatch, match=r"w is F32.4, 5., and F32.5, 4. is expected"):
        elasticzero.checkpoint.load(tmp_path, {"w": torch.zeros(5, 4)})
    with pytest.raises(CheckpointMismatch, match="x is missing"):
        elasticzero.checkpoint.load(tmp_path, {"x": torch.zeros(5, 4)})


def test_saving_over_a_checkpoint_is_refused(tmp_path: Path) -> None:
    elasticzero.checkpoint.save(tmp_path, {"w": torch.ones(3)})
    with pytest.raises(UserError, match="holds a checkpoint already: save under another step"):
        elasticzero.checkpoint.save(tmp_path, {"w": torch.zeros(3)})
    assert torch.equal(elasticzero.checkpoint.load(tmp_path)["w"], torch.ones(3))


@pytest.mark.parametrize(
    ("tensors", "rest", "complaint"),
    [
        ({}, {}, "no tensors"),
        ({"x": [1.0, 2.0]}, {}, "no tensors"),
        ([torch.ones(1)], {}, "takes a dict, not a list"),
        ({"x": {"y": {torch.float32}}}, {}, "'x/y' is a set"),
        ({"x": {"y": torch.ones(1)}, "x/y": torch.ones(1)}, {}, "two tensors .* name 'x/y'"),
        ({0: torch.ones(1), "0": torch.ones(1)}, {}, "two tensors .* name '0'"),
        ({"__metadata__": torch.ones(1)}, {}, "the name '__metadata__'"),
        ({"\ud800": torch.ones(1)}, {}, "no tensor can have the name"),
        ({"x": torch.ones(1, device="meta")}, {}, "x is on the meta device"),
        ({"x": torch.eye(2).to_sparse()}, {}, "layout torch.sparse_coo"),
        ({"x": torch.ones(1)}, {"state": {"$tree": 1}}, "key '.tree' of `state` is taken"),
        ({"x": torch.ones(1)}, {"state": {"x": object()}}, "`state` is not JSON: .*object"),
        ({"x": torch.ones(1)}, {"state": {("a", "b"): 1}}, "`state` is not JSON"),
        ({"x": torch.ones(1)}, {"step": -1}, "step -1 must be between 0"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_anything_is_made(
    tmp_path: Path, tensors: Any, rest: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(UserError, match=complaint):
        elasticzero.checkpoint.save(tmp_path / "new", tensors, **rest)
    assert os.listdir(tmp_path) == []


def test_a_dtype_that_safetensors_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="complex128"):
        elasticzero.checkpoint.save(tmp_path, {"z": torch.zeros(2, dtype=torch.complex128)})


def test_the_manifest_is_plain_json_and_nothing_is_pickled(tmp_path: Path) -> None:
    step = Path(elasticzero.checkpoint.save(tmp_path, {"w": torch.ones(3)}))
    value = json.loads((step / "manifest.json").read_text())
    assert (value["version"], value["step"]) == (1, 0)
    assert sorted(path.suffix for path in step.iterdir()) == [".json", ".safetensors", ".sums"]
