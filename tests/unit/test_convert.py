"""Resharding and export against tensors that were never cut."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticzero.checkpoint import commit, convert
from elasticzero.checkpoint.disk import DiskDirectory
from elasticzero.checkpoint.manifest import Group, Layout, TensorSpec
from elasticzero.checkpoint.shards import open_shard, shard_specs
from elasticzero.checkpoint.storage import Storage
from elasticzero.errors import CheckpointDamaged, UserError
from tests.unit.checkpoint_cases import (
    cut,
    draft_of,
    elements,
    flip,
    layouts,
    simple_layout,
    specs,
    write_step,
)


def assert_holds(storage: Storage, contents: dict[str, bytes]) -> None:
    """A step's shards hold exactly their spans of `contents`."""
    manifest = commit.read_manifest(storage)
    assert commit.fault(storage) is None
    assert manifest.layout.tensors.keys() == contents.keys()
    for rank in range(manifest.layout.world_size):
        shard = open_shard(storage, manifest, rank)
        spans = manifest.layout.spans(rank)
        for name, spec in shard_specs(manifest, rank).items():
            read = bytearray(spec.nbytes)
            shard.read_into(name, type(spans[name])(0, spec.numel), memoryview(read))
            assert read == cut(contents[name], spec.dtype, spans[name])


@settings(max_examples=30)
@given(layouts(), st.integers(1, 7), st.sampled_from([None, *convert.STRATEGIES]))
def test_resharding_keeps_every_element(layout: Layout, world: int, strategy: str | None) -> None:
    contents = elements(layout.tensors)
    with tempfile.TemporaryDirectory() as directory:
        source = write_step(Path(directory) / "old", draft_of(layout), contents)
        written = convert.reshard(source, DiskDirectory(Path(directory) / "new"), world, strategy)
        assert_holds(written, contents)
        manifest = commit.read_manifest(written)
        assert manifest.layout == convert.reshaped(layout, world, strategy)
        assert (manifest.step, manifest.generation, manifest.state) == (7, 3, {"epoch": 1})
        assert manifest.strategy == (strategy or "zero2")
        assert manifest.token != "token"


def test_two_to_three_and_back_is_the_same_bytes(tmp_path: Path) -> None:
    layout = simple_layout(world_size=2)
    contents = elements(layout.tensors)
    source = write_step(tmp_path / "a", draft_of(layout), contents)
    three = convert.reshard(source, DiskDirectory(tmp_path / "b"), 3)
    two = convert.reshard(three, DiskDirectory(tmp_path / "c"), 2)
    assert_holds(two, contents)
    assert commit.read_manifest(two).layout == layout


def test_strategies_deal_by_their_own_rules() -> None:
    layout = Layout(
        world_size=5,
        tensors={n: TensorSpec("F32", (4, 2)) for n in ("a", "b", "c")},
        groups=(Group("even", ("a",)), Group("fsdp_rows", ("b",)), Group("whole", ("c",), (4,))),
    )
    rows = convert.reshaped(layout, 3, "zero3").groups
    assert [group.rule for group in rows] == ["fsdp_rows", "fsdp_rows", "whole"]
    assert rows[2].ranks == (1,)
    for strategy in ("ddp", "zero1", "zero2"):
        rules = [group.rule for group in convert.reshaped(layout, 3, strategy).groups]
        assert rules == ["even", "even", "whole"]
    kept = [group.rule for group in convert.reshaped(layout, 3).groups]
    assert kept == ["even", "fsdp_rows", "whole"]


def test_bad_wishes_are_refused(tmp_path: Path) -> None:
    layout = simple_layout()
    source = write_step(tmp_path / "a", draft_of(layout), elements(layout.tensors))
    with pytest.raises(UserError, match="0 ranks"):
        convert.reshard(source, DiskDirectory(tmp_path / "b"), 0)
    with pytest.raises(UserError, match="'zero9' is not one of"):
        convert.reshard(source, DiskDirectory(tmp_path / "b"), 1, "zero9")
    with pytest.raises(UserError, match="holds a checkpoint already"):
        convert.reshard(source, DiskDirectory(tmp_path / "a"), 1)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "thesis.tex").write_bytes(b"")
    with pytest.raises(UserError, match="other things"):
        convert.reshard(source, DiskDirectory(tmp_path / "c"), 1)


def test_a_damaged_source_gives_no_checkpoint(tmp_path: Path) -> None:
    layout = simple_layout()
    source = write_step(tmp_path / "a", draft_of(layout), elements(layout.tensors))
    flip(source.path / draft_of(layout).file_name(1), -1)
    with pytest.raises(CheckpointDamaged, match="rank-00001"):
        convert.reshard(source, DiskDirectory(tmp_path / "b"), 3)
    assert os.listdir(tmp_path / "b") == []
    with pytest.raises(CheckpointDamaged, match="rank-00001"):
        convert.export_hf(source, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@settings(max_examples=30)
@given(st.data(), specs(), st.integers(1, 200))
def test_the_exported_model_is_whole_and_under_its_own_names(
    data: st.DataObject, tensors: dict[str, TensorSpec], most: int
) -> None:
    model = {f"model/layers.{name}": spec for name, spec in tensors.items()}
    layout = data.draw(layouts(model | {"optimizer/x/m": TensorSpec("F32", (3,))}))
    contents = elements(layout.tensors)
    with tempfile.TemporaryDirectory() as directory:
        source = write_step(Path(directory) / "old", draft_of(layout), contents)
        target = Path(directory) / "hf"
        if not model:
            with pytest.raises(UserError, match="nothing to export"):
                convert.export_hf(source, target)
            return
        done = convert.export_hf(source, target, most)
        index: dict[str, Any] = {
            "metadata": {"total_size": sum(spec.nbytes for spec in model.values())},
            "weight_map": {n.removeprefix("model/"): "model.safetensors" for n in model},
        }
        if len(done.files) > 1:
            index = json.loads((target / convert.INDEX_NAME).read_text())
        assert sorted(os.listdir(target)) == sorted(
            [*done.files, *([convert.INDEX_NAME] if len(done.files) > 1 else [])]
        )
        assert done.tensors == len(model)
        assert index["metadata"]["total_size"] == sum(spec.nbytes for spec in model.values())
        assert index["weight_map"].keys() == {name.removeprefix("model/") for name in model}
        seen = set()
        for file in done.files:
            content = (target / file).read_bytes()
            with safetensors.safe_open(target / file, "numpy") as opened:
                assert opened.metadata() == {"format": "pt"}
            read = dict(safetensors.deserialize(content))
            assert sum(len(t["data"]) for t in read.values()) <= most or len(read) == 1
            for name, tensor in read.items():
                spec = model[f"model/{name}"]
                assert (tuple(tensor["shape"]), tensor["dtype"]) == (spec.shape, spec.dtype)
                assert bytes(tensor["data"]) == contents[f"model/{name}"]
                assert index["weight_map"][name] == file
                seen.add(name)
        assert seen == index["weight_map"].keys()


def test_names_of_exported_files(tmp_path: Path) -> None:
    layout = simple_layout()
    source = write_step(tmp_path / "a", draft_of(layout), elements(layout.tensors))
    assert convert.export_hf(source, tmp_path / "one").files == ("model.safetensors",)
    assert convert.export_hf(source, tmp_path / "two", 8000).files == (
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    )
    with pytest.raises(UserError, match="is not empty"):
        convert.export_hf(source, tmp_path / "two")
