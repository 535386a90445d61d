"""Hugging Face safetensors out and in, against safetensors' own reader and writer."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from elasticzero.checkpoint.api import load, save
from elasticzero.checkpoint.convert.huggingface import (
    INDEX_NAME,
    HfExportOptions,
    export_hf,
    open_hf,
)
from elasticzero.checkpoint.format.layout import PAIRED, TensorSpec
from elasticzero.checkpoint.rewrite.diff import compare
from elasticzero.checkpoint.rewrite.reshard import TargetShape, import_foreign, tie_aliases
from elasticzero.checkpoint.steps import catalog
from elasticzero.checkpoint.storage.disk import DiskDirectory
from elasticzero.checkpoint.storage.urls import open_storage
from elasticzero.errors import CheckpointDamaged, UserError
from tests.unit.checkpoint.cases import (
    draft_of,
    elements,
    flip,
    layouts,
    simple_layout,
    specs,
    write_step,
)

STRANGE = {
    "scalar": torch.tensor(4.5),
    "step": torch.tensor(7),
    "ids": torch.arange(5, dtype=torch.int32),
    "mask": torch.tensor([True, False, True]),
    "tiny": torch.tensor([0.5, 448.0, -2.0]).to(torch.float8_e4m3fn),
    "wave": torch.tensor([1 + 2j, -3.5j], dtype=torch.complex64),
    "empty": torch.zeros(0, 3),
    "half": torch.randn(3, 5).to(torch.bfloat16),
}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    def raw(tensor: torch.Tensor) -> bytes:
        return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    return (a.dtype, a.shape, raw(a)) == (b.dtype, b.shape, raw(b))


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
                export_hf(source, str(target))
            return
        done = export_hf(source, str(target), HfExportOptions(max_shard_bytes=most))
        index: dict[str, Any] = {
            "metadata": {"total_size": sum(spec.nbytes for spec in model.values())},
            "weight_map": {n.removeprefix("model/"): "model.safetensors" for n in model},
        }
        if len(done.files) > 1:
            index = json.loads((target / INDEX_NAME).read_text())
        assert sorted(os.listdir(target)) == sorted(
            [*done.files, *([INDEX_NAME] if len(done.files) > 1 else [])]
        )
        assert done.tensors == len(model)
        assert index["metadata"]["total_size"] == sum(spec.nbytes for spec in model.values())
        assert index["weight_map"].keys() == {name.removeprefix("model/") for name in model}
        seen = set()
        for file in done.files:
            content = (target / file).read_bytes()
            with safetensors.safe_open(target / file, "numpy") as opened:
                assert opened.metadata() == {"format": "pt"}
            read = dict(safetensors.deserialize(content))  # type: ignore[no-untyped-call]
            assert sum(len(t["data"]) for t in read.values()) <= most or len(read) == 1
            for name, tensor in read.items():
                spec = model[f"model/{name}"]
                read_shape = tuple(tensor["shape"])
                if spec.dtype == PAIRED:  # safetensors counts single values
                    read_shape = (*read_shape[:-1], read_shape[-1] // 2)
                assert (read_shape, tensor["dtype"]) == (spec.shape, spec.dtype)
                assert bytes(tensor["data"]) == contents[f"model/{name}"]
                assert index["weight_map"][name] == file
                seen.add(name)
        assert seen == index["weight_map"].keys()
        back = import_foreign(
            open_hf(str(target)),
            DiskDirectory(Path(directory) / "new"),
            3,
            TargetShape(world_size=2),
        )
        held = catalog.read_manifest(open_storage(back.where)).layout.tensors
        assert held == model


def test_names_of_exported_files(tmp_path: Path) -> None:
    layout = simple_layout()
    source = write_step(tmp_path / "a", draft_of(layout), elements(layout.tensors))
    config = tmp_path / "gpt.json"
    config.write_text('{"model_type": "gpt2"}')
    assert export_hf(source, str(tmp_path / "one")).files == ("model.safetensors",)
    two = HfExportOptions(max_shard_bytes=8000, config=config)
    assert export_hf(source, str(tmp_path / "two"), two).files == (
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    )
    assert (tmp_path / "two" / "config.json").read_bytes() == config.read_bytes()
    with pytest.raises(UserError, match="is not empty"):
        export_hf(source, str(tmp_path / "two"))
    config.write_text("{")
    with pytest.raises(UserError, match=r"the config .* is not JSON"):
        export_hf(source, str(tmp_path / "three"), two)
    assert not (tmp_path / "three").exists()


def test_a_damaged_source_leaves_nothing(tmp_path: Path) -> None:
    layout = simple_layout()
    source = write_step(tmp_path / "a", draft_of(layout), elements(layout.tensors))
    flip(source.path / draft_of(layout).file_name(1), -1)
    (tmp_path / "empty").mkdir()
    for name in ("hf", "empty"):
        with pytest.raises(CheckpointDamaged, match="rank-00001"):
            export_hf(source, str(tmp_path / name))
    assert sorted(os.listdir(tmp_path)) == ["a", "empty"]
    assert os.listdir(tmp_path / "empty") == []


@pytest.mark.parametrize("most", [10**9, 30])
def test_strange_tensors_come_back_bit_for_bit(tmp_path: Path, most: int) -> None:
    step = save(tmp_path / "ckpt", {f"model/{name}": t for name, t in STRANGE.items()})
    done = export_hf(
        open_storage(step), str(tmp_path / "hf"), HfExportOptions(max_shard_bytes=most)
    )
    read: dict[str, torch.Tensor] = {}
    for file in done.files:
        read |= safetensors.torch.load_file(tmp_path / "hf" / file)
    assert read.keys() == STRANGE.keys()
    assert all(same_bits(read[name], STRANGE[name]) for name in STRANGE)
    shape = TargetShape(world_size=3, strategy="zero3")
    back = import_foreign(open_hf(str(tmp_path / "hf")), DiskDirectory(tmp_path / "back"), 9, shape)
    assert (back.step, back.world_size) == (9, 3)
    loaded = load(tmp_path / "back")
    assert all(same_bits(loaded[f"model/{name}"], STRANGE[name]) for name in STRANGE)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight


def test_tied_tensors_stand_once_and_keep_their_aliases(tmp_path: Path) -> None:
    model = Tied()
    tensors = {"model/" + n: t.data for n, t in model.named_parameters()}
    aliases = {"second.weight": "first.weight"}
    step = save(tmp_path / "ckpt", tensors, state={"aliases": aliases})
    export_hf(open_storage(step), str(tmp_path / "hf"))
    other = Tied()
    missing, unexpected = safetensors.torch.load_model(other, tmp_path / "hf" / "model.safetensors")
    assert not missing and not unexpected
    assert torch.equal(other.second.weight, model.first.weight)
    foreign = open_hf(str(tmp_path / "hf" / "model.safetensors"))
    assert foreign.state == {"aliases": aliases}
    theirs = tmp_path / "theirs.safetensors"
    safetensors.torch.save_model(model, str(theirs))
    foreign = open_hf(str(theirs))
    (alias,) = foreign.state["aliases"].items()
    assert set(alias) == {"first.weight", "second.weight"}
    assert f"model/{alias[1]}" in foreign.specs and f"model/{alias[0]}" not in foreign.specs


def test_a_conversion_on_the_way(tmp_path: Path) -> None:
    values = torch.randn(5, 3)
    step = save(tmp_path / "ckpt", {"model/w": values, "model/n": torch.arange(3)})
    export_hf(open_storage(step), str(tmp_path / "hf"), HfExportOptions(dtype="bf16"))
    read = safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors")
    assert same_bits(read["w"], values.to(torch.bfloat16)) and read["n"].dtype == torch.int64
    shape = TargetShape(world_size=2, dtype="fp32")
    import_foreign(open_hf(str(tmp_path / "hf")), DiskDirectory(tmp_path / "back"), 0, shape)
    assert same_bits(load(tmp_path / "back")["model/w"], values.to(torch.bfloat16).float())


def sharded(directory: Path) -> Path:
    """A model of two files with an index."""
    layout = simple_layout()
    source = write_step(directory / "ckpt", draft_of(layout), elements(layout.tensors))
    export_hf(source, str(directory / "hf"), HfExportOptions(max_shard_bytes=8000))
    return directory / "hf"


def test_an_import_misses_nothing_silently(tmp_path: Path) -> None:
    target = sharded(tmp_path)
    first, second = (target / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    index = json.loads((target / INDEX_NAME).read_text())
    whole = first.read_bytes()

    def refused(kind: type[Exception], message: str) -> None:
        with pytest.raises(kind, match=message):
            foreign = open_hf(str(target))
            import_foreign(foreign, DiskDirectory(tmp_path / "new"), 0, TargetShape(world_size=2))
        assert not os.path.exists(tmp_path / "new") or os.listdir(tmp_path / "new") == []

    first.write_bytes(whole[:-8])
    refused(CheckpointDamaged, "model-00001-of-00002")
    first.write_bytes(b"\xff" * 8 + whole[8:])
    refused(CheckpointDamaged, "says its header has")
    first.write_bytes(whole[:4])
    refused(CheckpointDamaged, "ends before byte 8|says its header")
    first.unlink()
    refused(CheckpointDamaged, "lacks 'model-00001-of-00002.safetensors', which its index names")
    first.write_bytes(whole)
    for weight_map, message in (
        ({**index["weight_map"], "w2": first.name}, "has no tensor 'w2'"),
        ({**index["weight_map"], "w": "../hf/" + first.name}, "lacks '../hf/"),
        ([], "is not an index"),
        ({"w": 5}, "lacks '5'"),
    ):
        (target / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
        refused(CheckpointDamaged, message)
    (target / INDEX_NAME).unlink()
    refused(UserError, "2 safetensors files and not one index")
    second.unlink()
    assert open_hf(str(target)).specs.keys() == {"model/w"}
    first.unlink()
    refused(UserError, "is empty or does not exist")
    (target / "pytorch_model.bin").write_bytes(b"")
    refused(UserError, "pickled weights")
    with pytest.raises(UserError, match="does not exist"):
        open_hf(str(target / "no.safetensors"))
    with pytest.raises(UserError, match="step -1"):
        import_foreign(
            open_hf(str(sharded(tmp_path / "x"))),
            DiskDirectory(tmp_path / "y"),
            -1,
            TargetShape(world_size=1),
        )


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    target = sharded(tmp_path)
    foreign = open_hf(str(target))
    os.truncate(target / "model-00001-of-00002.safetensors", 5000)
    with pytest.raises(CheckpointDamaged, match="ends before byte"):
        import_foreign(foreign, DiskDirectory(tmp_path / "new"), 0, TargetShape(world_size=2))
    assert os.listdir(tmp_path / "new") == []


def test_to_an_object_store_and_from_it(tmp_path: Path) -> None:
    layout = simple_layout()
    contents = elements(layout.tensors)
    source = write_step(tmp_path / "a", draft_of(layout), contents)
    url = f"memory://{tmp_path.name}/hf"
    done = export_hf(source, url, HfExportOptions(max_shard_bytes=8000))
    assert (done.where, len(done.files)) == (url, 2)
    with pytest.raises(UserError, match="is not empty"):
        export_hf(source, url)
    back = import_foreign(
        open_hf(url), DiskDirectory(tmp_path / "back"), 7, TargetShape(world_size=1)
    )
    assert compare(source, open_storage(back.where), model_only=True).same
    flip(source.path / draft_of(layout).file_name(1), -1)
    with pytest.raises(CheckpointDamaged):
        export_hf(source, f"{url}2", HfExportOptions(max_shard_bytes=8000))
    assert open_storage(f"{url}2").names() == []


def test_two_names_of_one_tensor_become_one(tmp_path: Path) -> None:
    both = {"a": torch.arange(4.0), "b": torch.arange(4.0), "c": torch.ones(4), "d": torch.ones(2)}
    safetensors.torch.save_file(both, tmp_path / "model.safetensors")
    foreign = open_hf(str(tmp_path))
    tied = tie_aliases(foreign, {"b": "a"})
    assert tied.specs.keys() == {"model/a", "model/c", "model/d"}
    assert tied.state == {"aliases": {"b": "a"}}
    for aliases, message in (
        ({"c": "a"}, "the two are not the same"),
        ({"d": "c"}, "the two are not the same"),
        ({"x": "a"}, "there is no tensor model/x"),
        ({"b": "a", "a": "b"}, "there is no tensor model/b"),
    ):
        with pytest.raises(UserError, match=message):
            tie_aliases(foreign, aliases)


def test_a_model_saved_by_hand_without_a_prefix(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    step = save(tmp_path / "ckpt", {**model.state_dict(), "other/x": torch.ones(1)})
    export_hf(open_storage(step), str(tmp_path / "hf"), HfExportOptions(dtype="bf16"))
    read = safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors")
    assert read.keys() == {"weight", "bias"}
    assert same_bits(read["weight"], model.weight.detach().to(torch.bfloat16))
