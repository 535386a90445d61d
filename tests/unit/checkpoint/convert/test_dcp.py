"""torch.distributed.checkpoint directories: torch's own writer and reader against ours."""

from __future__ import annotations

import io
import json
import os
import resource
import subprocess
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from elasticzero.checkpoint.api import load, load_state, save
from elasticzero.checkpoint.cli.main import main
from elasticzero.checkpoint.convert.dcp_export import DcpExportOptions, export_dcp
from elasticzero.checkpoint.convert.dcp_import import _load, open_dcp
from elasticzero.checkpoint.convert.dcp_metadata import (
    METADATA_NAME,
    Contents,
    StoredItem,
    read_contents,
)
from elasticzero.checkpoint.convert.file_window import FileWindow
from elasticzero.checkpoint.rewrite.diff import compare
from elasticzero.checkpoint.rewrite.reshard import TargetShape, import_foreign
from elasticzero.checkpoint.storage.base import Storage
from elasticzero.checkpoint.storage.disk import DiskDirectory, DiskStorage
from elasticzero.checkpoint.storage.urls import open_storage
from elasticzero.errors import CheckpointDamaged, StorageError, UserError
from tests.unit.checkpoint.convert.test_huggingface import STRANGE, same_bits

pickled: Any = torch.serialization.pickle  # what torch writes `.metadata` with


def by_torch(path: Path, state_dict: dict[str, Any]) -> Path:
    """What torch's own writer makes of a state dict."""
    with warnings.catch_warnings(action="ignore"):
        torch_dcp.save(state_dict, checkpoint_id=path, no_dist=True)
    return path


def read_by_torch(path: Path) -> dict[str, Any]:
    dcp_to_torch_save(path, path.with_suffix(".pt"))
    exported: dict[str, Any] = torch.load(path.with_suffix(".pt"), weights_only=True)
    return exported


def imported(source: Path, target: Path, *, model_only: bool = False, **shape: Any) -> Storage:
    foreign = open_dcp(str(source), model_only=model_only)
    done = import_foreign(
        foreign, DiskDirectory(target), 3, TargetShape(**{"world_size": 2, **shape})
    )
    return open_storage(done.where)


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(3)).sum().backward()
        optimizer.step()
    return model, optimizer


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and same_bits(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def test_what_torch_wrote_comes_back_as_it_was_nested(tmp_path: Path) -> None:
    model, optimizer = trained()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    saved = {
        "model": model_state,
        "optimizer": optimizer_state,
        "epoch": 3,
        "schedule": {"rates": [1, 2.5, None], "seen": (1, "x"), "moving": [torch.ones(2), 5]},
    }
    step = imported(by_torch(tmp_path / "dcp", saved), tmp_path / "new", strategy="zero3")
    assert equal(load(step.where), saved)
    (group,) = load_state(step.where)["groups"]
    assert group["names"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert group["options"]["lr"] == 0.1
    alone = imported(by_torch(tmp_path / "dcp", saved), tmp_path / "model", model_only=True)
    assert equal(load(alone.where)["model"], dict(model_state))


def test_a_model_at_the_root_and_an_optimizer_by_number(tmp_path: Path) -> None:
    model, optimizer = trained()
    step = imported(by_torch(tmp_path / "a", dict(model.state_dict())), tmp_path / "new")
    loaded = load(step.where)
    assert equal(loaded, dict(model.state_dict()))
    saved = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}
    step = imported(by_torch(tmp_path / "b", saved), tmp_path / "newer")
    state = load(step.where)["optimizer"]["state"]
    assert equal(state["0"], optimizer.state_dict()["state"][0])


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_strange_tensors_go_out_and_come_back(tmp_path: Path, world_size: int) -> None:
    saved = save(tmp_path / "ckpt", {f"model/{name}": t for name, t in STRANGE.items()})
    done = export_dcp(open_storage(saved), str(tmp_path / "dcp"))
    assert (done.tensors, done.files) == (len(STRANGE), ("__0_0.distcp",))
    assert equal(read_by_torch(tmp_path / "dcp"), STRANGE)
    step = imported(tmp_path / "dcp", tmp_path / "back", world_size=world_size, strategy="zero3")
    assert compare(open_storage(saved), step, model_only=True).same


def test_everything_goes_out_and_comes_back(tmp_path: Path) -> None:
    """A session's checkpoint: tied names, optimizer state, groups, and tensors inside of state."""
    model, optimizer = trained()
    tensors = {f"model/{name}": t for name, t in model.state_dict().items()}
    names = list(dict(model.named_parameters()))
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer/{name}/{key}"] = value
    tensors |= {"tracked/ema/mean": torch.ones(3), "groups/0/lr": torch.tensor(0.1)}
    options = {"lr": {"$tensor": "groups/0/lr"}, "betas": {"$tuple": [0.9, 0.999]}}
    state = {
        "aliases": {"2.weight": "0.weight"},
        "groups": [{"names": names, "options": options}],
        "tracked": {"ema": {"mean": {"$tensor": "tracked/ema/mean"}}},
        "position": {"step": 3},
    }
    saved = save(tmp_path / "ckpt", tensors, state=state, step=3)
    source = open_storage(saved)
    export_dcp(source, str(tmp_path / "dcp"), DcpExportOptions(everything=True))
    exported = read_by_torch(tmp_path / "dcp")
    assert equal(exported["model"]["2.weight"], exported["model"]["0.weight"])
    group = exported["optimizer"]["param_groups"][0]
    assert (group["params"], group["betas"]) == (names, (0.9, 0.999))
    assert torch.equal(group["lr"], torch.tensor(0.1))
    del exported["model"]["2.weight"]
    other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    opened = torch.optim.AdamW(other.parameters())
    set_model_state_dict(other, exported["model"])
    set_optimizer_state_dict(other, opened, exported["optimizer"])
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert equal(optimizer.state[ours], opened.state[theirs])
    assert compare(source, imported(tmp_path / "dcp", tmp_path / "back")).same
    alone = imported(tmp_path / "dcp", tmp_path / "alone", model_only=True)
    assert compare(source, alone, model_only=True).same
    assert load_state(alone.where) == {"aliases": {"2.weight": "0.weight"}}


def test_a_model_saved_by_hand_without_a_prefix(tmp_path: Path) -> None:
    model, _ = trained()
    saved = save(tmp_path / "ckpt", model.state_dict())
    export_dcp(open_storage(saved), str(tmp_path / "dcp"))
    assert equal(read_by_torch(tmp_path / "dcp"), dict(model.state_dict()))
    export_dcp(open_storage(saved), str(tmp_path / "all"), DcpExportOptions(everything=True))
    assert compare(open_storage(saved), imported(tmp_path / "all", tmp_path / "back")).same


def test_what_was_nested_by_hand_goes_out_and_comes_back(tmp_path: Path) -> None:
    import numpy as np

    saved = save(
        tmp_path / "ckpt",
        {
            "net": {"w": torch.arange(6.0).reshape(2, 3)},
            "pair": (torch.ones(2), {"deep": [torch.zeros(1), "text"]}),
            "by number": {0: {"m": torch.ones(1)}, 1: 5},
            "array": np.arange(3),
            "$odd": float("inf"),
        },
        state={"note": "kept"},
    )
    source = open_storage(saved)
    export_dcp(source, str(tmp_path / "dcp"), DcpExportOptions(everything=True))
    exported = read_by_torch(tmp_path / "dcp")
    assert torch.equal(exported["net"]["w"], torch.arange(6.0).reshape(2, 3))
    assert torch.equal(exported["pair"][1]["deep"][0], torch.zeros(1))
    assert torch.equal(exported["array"], torch.arange(3))
    step = imported(tmp_path / "dcp", tmp_path / "back")
    assert compare(source, step).same
    back = load(step.where)
    assert isinstance(back["pair"], tuple) and isinstance(back["array"], np.ndarray)
    with pytest.raises(UserError, match="holds no tensors of a model"):
        imported(tmp_path / "dcp", tmp_path / "x", model_only=True)


def test_an_export_that_cannot_be_leaves_nothing(tmp_path: Path) -> None:
    saved = save(tmp_path / "ckpt", {"model/w": torch.ones(3), "other/x": torch.ones(3)})
    (name,) = [n for n in os.listdir(saved) if n.endswith(".safetensors")]
    os.truncate(Path(saved) / name, 4096)
    with pytest.raises(CheckpointDamaged):
        export_dcp(open_storage(saved), str(tmp_path / "dcp"))
    assert sorted(os.listdir(tmp_path)) == ["ckpt"]
    with pytest.raises(UserError, match="not on this machine's disks"):
        export_dcp(open_storage(saved), "s3://bucket/dcp")


@pytest.mark.parametrize(
    "state", ["5", "{", '{"aliases": 3}', '{"$tree": {"$map": [[1, 2, 3]]}}', '{"$tree":' * 5000]
)
def test_an_exports_own_state_that_makes_no_sense(tmp_path: Path, state: str) -> None:
    path = by_torch(tmp_path / "dcp", {"w": torch.ones(2), "elasticzero": {"state": state}})
    with pytest.raises(CheckpointDamaged, match="makes no sense"):
        open_dcp(str(path))


def test_megatrons_directories_are_refused_by_name(tmp_path: Path) -> None:
    """All of its tensors came in as a model's, with its optimizer among them."""
    path = by_torch(tmp_path / "dcp", {"decoder.layers.weight": torch.ones(2, 3)})
    (path / "metadata.json").write_text('{"note": "of the user"}')
    open_dcp(str(path))
    about = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (path / "metadata.json").write_text(json.dumps(about))
    with pytest.raises(UserError, match=r"is of Megatron-core \(torch_dist\)"):
        open_dcp(str(path))


def test_two_paths_to_one_name_are_refused(tmp_path: Path) -> None:
    one = torch.ones(2)
    path = by_torch(tmp_path / "a", {"model": {"a/b": one, "a": {"b": one}}})
    with pytest.raises(UserError, match="would get the same name"):
        open_dcp(str(path))
    tree = {"$tree": {"x": {"$tensor": "same"}, "y": {"$tensor": "same"}}}
    state = {"x": one, "y": one, "elasticzero": {"state": json.dumps(tree)}}
    with pytest.raises(UserError, match="would get the same name"):
        open_dcp(str(by_torch(tmp_path / "b", state)))


def test_a_tensor_saved_under_one_of_two_names_loads_under_both(tmp_path: Path) -> None:
    """The nesting still named the one that was left out, so that no load made sense of it."""
    one = torch.arange(3.0)
    path = by_torch(tmp_path / "dcp", {"model": {"a": one, "b": one}, "epoch": 3})
    order = ["import", "-q", str(path), str(tmp_path / "run"), "--format", "dcp"]
    assert main([*order, "--alias", "b=a"]) == 0
    loaded = load(tmp_path / "run")
    assert equal(loaded, {"model": {"a": one, "b": one}, "epoch": 3})


class _Malice:
    """Pickled, it asks its reader to run a command."""

    def __init__(self, run: Callable[..., object], *arguments: object) -> None:
        self.call = (run, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    return by_torch(tmp_path / "dcp", {"model": {"w": torch.arange(4.0)}, "epoch": 3})


def test_metadata_that_would_run_code_is_refused_unrun(victim: Path, tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    for run, arguments in (
        (os.system, (f"touch {proof}",)),
        (eval, (f"open({str(proof)!r}, 'w')",)),
        (subprocess.Popen, (["touch", str(proof)],)),
        (getattr, ("text", "upper")),
        (torch.load, (str(proof),)),
    ):
        malice: Any = _Malice(run, *arguments)
        for thing in (malice, Metadata({"w": malice}), Metadata({}, malice, {})):
            (victim / METADATA_NAME).write_bytes(pickled.dumps(thing))
            with pytest.raises(UserError, match="no checkpoint of torch needs"):
                open_dcp(str(victim))
    assert not proof.exists()


def test_an_item_that_would_run_code_is_refused_and_nothing_runs(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    malice = _Malice(os.system, f"touch {proof}")
    path = by_torch(tmp_path / "dcp", {"model": {"w": torch.arange(4.0)}, "epoch": malice})
    proof.unlink(missing_ok=True)
    with pytest.raises(UserError, match="asks for code to be run"):
        open_dcp(str(path))
    step = imported(path, tmp_path / "new", model_only=True)
    assert equal(load(step.where), {"model": {"w": torch.arange(4.0)}})
    assert not proof.exists()


def test_a_flipped_byte_is_found(victim: Path, tmp_path: Path) -> None:
    """torch's own reader loads it silently."""
    data = bytearray((victim / "__0_0.distcp").read_bytes())
    at = data.index(torch.arange(4.0).numpy().tobytes())
    data[at + 5] ^= 1
    (victim / "__0_0.distcp").write_bytes(data)
    with pytest.raises(CheckpointDamaged, match="CRC"):
        imported(victim, tmp_path / "new")
    assert os.listdir(tmp_path / "new") == []


def test_files_that_are_missing_or_cut_off(victim: Path, tmp_path: Path) -> None:
    whole = (victim / "__0_0.distcp").read_bytes()
    (victim / "__0_0.distcp").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointDamaged, match="__0_0"):
        imported(victim, tmp_path / "new", model_only=True)
    (victim / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointDamaged, match=r"__0_0\.distcp is missing"):
        imported(victim, tmp_path / "new", model_only=True)
    (victim / METADATA_NAME).unlink()
    with pytest.raises(UserError, match="is empty or does not exist"):
        open_dcp(str(victim))
    with pytest.raises(UserError, match="is empty or does not exist"):
        open_dcp(str(tmp_path / "nowhere"))


def chunks(*parts: tuple[list[int], list[int]]) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in parts]


def metadata_of(size: list[int], parts: list[ChunkStorageMetadata], file: str) -> bytes:
    info = torch_dcp.filesystem._StorageInfo(file, 0, 10)
    return bytes(
        pickled.dumps(
            Metadata(
                {"w": TensorStorageMetadata(TensorProperties(), torch.Size(size), parts)},
                {"w": ("w",)},
                {MetadataIndex("w", part.offsets): info for part in parts},
            )
        )
    )


@pytest.mark.parametrize(
    ("size", "parts", "file", "message"),
    [
        ([4, 2], chunks(([0, 0], [2, 2])), "f", "are not the whole"),
        ([4, 2], chunks(([0, 0], [2, 2]), ([1, 0], [2, 2])), "f", "overlap"),
        ([4, 2], chunks(([0, 0], [4, 1]), ([0, 1], [4, 1]), ([1, 0], [0, 2])), "f", None),
        ([4, 2], chunks(([0, 0], [4, 1]), ([2, 0], [2, 2])), "f", "overlap"),
        ([4, 2], chunks(([0, 0], [8, 1])), "f", "lies outside"),
        ([4, 2], chunks(([0], [8])), "f", "lies outside"),
        ([4], chunks(([0], [4])), "../f", "is not the name of a file"),
        ([4], chunks(([0], [4])), "/etc/passwd", "is not the name of a file"),
        ([1 << 62, 1 << 62], chunks(([0, 0], [4, 1])), "f", "are not the whole"),
    ],
)
def test_metadata_that_makes_no_sense(
    tmp_path: Path, size: list[int], parts: list[Any], file: str, message: str | None
) -> None:
    (tmp_path / METADATA_NAME).write_bytes(metadata_of(size, parts, file))
    if message is None:
        assert len(read_contents(DiskStorage(tmp_path)).tensors) == 1
        return
    with pytest.raises(CheckpointDamaged, match=message):
        read_contents(DiskStorage(tmp_path))


def test_metadata_that_says_too_little(tmp_path: Path) -> None:
    tensor = TensorStorageMetadata(TensorProperties(), torch.Size([4]), chunks(([0], [4])))
    wrong: Any = "tensor"
    for thing in (
        None,
        5,
        Metadata({"w": tensor}, None, {}),
        Metadata({"w": BytesStorageMetadata()}, None, {}),
        Metadata({"w": tensor}, {"w": ()}, {}),
        Metadata({"w": wrong}, None, {}),
        BytesStorageMetadata(),
    ):
        (tmp_path / METADATA_NAME).write_bytes(pickled.dumps(thing))
        with pytest.raises(CheckpointDamaged, match="makes no sense"):
            read_contents(DiskStorage(tmp_path))


class _Memory:
    """One small file."""

    where = "memory"

    def __init__(self, data: bytes) -> None:
        self.data = data

    def size(self, name: str) -> int:
        return len(self.data)

    def read_into(self, name: str, start: int, *buffers: memoryview) -> int:
        (buffer,) = buffers
        part = self.data[start : start + len(buffer)]
        buffer[: len(part)] = part
        return len(part)


def plain() -> bytes:
    parts = chunks(([0, 0], [2, 2]), ([2, 0], [2, 2]))
    return metadata_of([4, 2], parts, "__0_0.distcp")


@settings(max_examples=300)
@given(st.data())
def test_spoiled_metadata_is_refused_in_words(data: st.DataObject) -> None:
    spoiled = spoiled_somewhere(data, plain())
    try:
        contents = read_contents(_Memory(spoiled))
    except (CheckpointDamaged, UserError):
        return
    assert isinstance(contents, Contents)


def spoiled_somewhere(data: st.DataObject, whole: bytes) -> bytes:
    spoiled = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(spoiled) - 1))
        match data.draw(st.sampled_from(["flip", "cut", "double"])):
            case "flip":
                spoiled[at] ^= data.draw(st.integers(1, 255))
            case "cut":
                del spoiled[at : at + data.draw(st.integers(1, 8))]
            case "double":
                spoiled[at:at] = spoiled[at : at + 9]
        spoiled = spoiled or bytearray(b".")
    return bytes(spoiled)


@settings(max_examples=150)
@given(st.data())
def test_a_spoiled_item_is_refused_in_words(data: st.DataObject) -> None:
    saved = io.BytesIO()
    torch.save({"w": torch.arange(4.0), "rates": [1, "x"]}, saved)
    spoiled = spoiled_somewhere(data, saved.getvalue())
    with suppress(CheckpointDamaged, UserError):
        _load(_Memory(spoiled), StoredItem("f", 0, len(spoiled)), "x")


def test_an_item_too_small_for_its_tensor_takes_no_memory(tmp_path: Path) -> None:
    huge = 1 << 50
    (tmp_path / METADATA_NAME).write_bytes(metadata_of([huge], chunks(([0], [huge])), "f"))
    with pytest.raises(CheckpointDamaged, match="says that 10 bytes of f hold"):
        open_dcp(str(tmp_path))


def test_items_are_read_by_range(victim: Path) -> None:
    window = FileWindow(DiskStorage(victim), "__0_0.distcp", 2, 5)
    data = (victim / "__0_0.distcp").read_bytes()
    assert window.read() == data[2:7]
    assert (window.seek(-2, io.SEEK_END), window.read(9)) == (3, data[5:7])
    assert (window.seek(9), window.read(1)) == (9, b"")


def test_an_export_without_room_is_a_storage_error(tmp_path: Path) -> None:
    """It leaves no file."""
    step = save(tmp_path / "a", {"model": {"w": torch.zeros(1 << 16)}})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(StorageError, match=r"cannot write to .*: File too large"):
            export_dcp(open_storage(step), str(tmp_path / "dcp"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "dcp").exists()
