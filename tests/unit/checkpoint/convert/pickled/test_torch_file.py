"""Files of `torch.save` in and out: torch's own writer and reader against ours."""

from __future__ import annotations

import argparse
import collections
import io
import json
import os
import subprocess
import tempfile
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticzero.checkpoint.api import load, load_state, save
from elasticzero.checkpoint.cli.main import main
from elasticzero.checkpoint.convert.dcp_export import DcpExportOptions
from elasticzero.checkpoint.convert.torch_export import export_torch
from elasticzero.checkpoint.rewrite.diff import compare
from elasticzero.checkpoint.storage.urls import open_storage
from elasticzero.errors import CheckpointDamaged, UserError
from tests.unit.checkpoint.convert.pickled.cases import (
    Malice,
    loaded,
    opened,
    small_model,
    spoil,
    train,
    written,
)
from tests.unit.checkpoint.convert.test_dcp import equal
from tests.unit.checkpoint.convert.test_huggingface import STRANGE

pickled: Any = torch.serialization.pickle  # what torch writes its files with


def saved(path: Path, value: Any, **options: Any) -> Path:
    torch.save(value, path, **options)
    return path


def test_a_state_dict_comes_in_as_it_was(tmp_path: Path) -> None:
    model = small_model()
    seen = opened(saved(tmp_path / "m.pt", model.state_dict()))
    assert list(seen.foreign.specs) == [f"model/{name}" for name in model.state_dict()]
    assert seen.summary() == "9 tensors, 0 values of state, 0 left out"
    assert equal(loaded(seen, tmp_path / "run"), dict(model.state_dict()))


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_training_loops_file_comes_in_as_it_was(tmp_path: Path, protocol: int) -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    value: dict[str, Any] = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "step": 12,
        "history": [1, 2.5, None, float("inf"), ("x", True)],
        "array": np.arange(6, dtype=np.float64).reshape(2, 3)[:, ::-1].copy(order="F"),
        "number": np.float32(0.5),
        "by number": {0: torch.ones(1), (1, "x"): 5},
        "counts": collections.defaultdict(list, {"a": [1]}),
    }
    seen = opened(saved(tmp_path / "t.pt", value, pickle_protocol=protocol))
    assert seen.step == 12
    assert seen.left_out == ()
    back = loaded(seen, tmp_path / "run")
    array = back.pop("array")
    assert np.array_equal(array, value.pop("array"))
    value["model"] = dict(value["model"])
    assert equal(back, value)


def test_state_by_number_gets_names(tmp_path: Path) -> None:
    model = small_model()
    groups: list[dict[str, Any]] = [
        {"params": list(model[2].parameters()), "lr": 0.1},
        {"params": list(model[0].parameters())},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.2, momentum=0.9)
    train(model, optimizer)
    path = saved(
        tmp_path / "t.pt", {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    )
    (note,) = (unnamed := opened(path)).foreign.notes
    assert "give their names with --names FILE" in note
    assert "other/optimizer/state/0/momentum_buffer" in unnamed.foreign.specs
    assert "groups" not in unnamed.foreign.state
    names = ("2.weight", "2.bias", "0.weight", "0.bias")
    seen = opened(path, names=names)
    assert seen.foreign.notes == ()
    first, second = seen.foreign.state["groups"]
    assert (first["names"], first["options"]["lr"]) == (["2.weight", "2.bias"], 0.1)
    assert (second["names"], second["options"]["lr"]) == (["0.weight", "0.bias"], 0.2)
    step = written(seen, tmp_path / "run")
    state = optimizer.state[groups[1]["params"][0]]["momentum_buffer"]
    assert equal(load(step)["optimizer"]["state"][2]["momentum_buffer"], state)
    assert "optimizer/0.weight/momentum_buffer" in seen.foreign.specs
    for wrong, sentence in (
        (names[:3], "too few names"),
        ((*names, "x"), "1 more names than"),
        (("2.bias", "2.weight", *names[2:]), "the names are in another order"),
        (("2.weight", "x", *names[2:]), "the model has no tensor 'x'"),
    ):
        with pytest.raises(UserError, match=sentence):
            opened(path, names=wrong)


def test_an_optimizer_that_knows_its_names_needs_none(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.Adam(model.named_parameters())
    train(model, optimizer)
    saved(tmp_path / "t.pt", {"net": model.state_dict(), "opt": optimizer.state_dict()})
    seen = opened(tmp_path / "t.pt")
    assert "optimizer/1.bias/exp_avg_sq" in seen.foreign.specs
    assert seen.foreign.state["groups"][0]["names"] == [n for n, _ in model.named_parameters()]


def test_views_strides_and_shared_storages(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    value = {
        "base": base,
        "tied": base,
        "part": base[1:3],
        "column": base[:, 2],
        "turned": base.t(),
        "every other": base[::2, ::3],
        "expanded": torch.tensor([7.0]).expand(3, 2),
        "parameter": torch.nn.Parameter(base[2]),
        "no elements": base[:0],
        "scalar": base[1, 1],
    }
    seen = opened(saved(tmp_path / "t.pt", value))
    assert seen.foreign.state["aliases"] == {"tied": "base"}
    assert "model/tied" not in seen.foreign.specs
    for world_size in (1, 3):
        step = written(seen, tmp_path / f"{world_size}", world_size=world_size, strategy="zero3")
        back = load(step)
        assert all(torch.equal(back[name], tensor) for name, tensor in value.items())


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "module._orig_mod."])
def test_a_wrappers_prefix_is_taken_off_and_said(tmp_path: Path, wrapper: str) -> None:
    state = {wrapper + name: tensor for name, tensor in small_model().state_dict().items()}
    seen = opened(saved(tmp_path / "t.pt", {"state_dict": state, "module.x": torch.ones(1)}))
    assert "model/0.weight" in seen.foreign.specs
    assert seen.foreign.notes == (f"the names of the model's tensors had {wrapper!r} in front",)


@pytest.mark.parametrize(
    ("path", "is_model"),
    [
        (("state_dict",), True),
        (("generator",), True),  # the only dict of tensors
        (("app", "model"), True),
        (("a", "b"), False),
    ],
)
def test_where_the_model_is(tmp_path: Path, path: tuple[str, ...], is_model: bool) -> None:
    value: Any = {"w": torch.ones(2)}
    for key in reversed(path):
        value = {key: value, "epoch": 3}
    seen = opened(saved(tmp_path / "t.pt", value))
    assert list(seen.foreign.specs) == ["model/w" if is_model else "/".join((*path, "w"))]


def test_the_user_says_which_is_the_model(tmp_path: Path) -> None:
    """A prefix of its names is taken off, of its optimizer's too."""
    model = small_model()
    optimizer = torch.optim.Adam([(f"net.{n}", p) for n, p in model.named_parameters()])
    train(model, optimizer)
    weights = {f"net.{name}": tensor for name, tensor in model.state_dict().items()}
    value = {"model": {"old": torch.ones(1)}, "ema": {**weights, "head.w": torch.zeros(2)}}
    path = saved(tmp_path / "t.pt", {**value, "optimizer": optimizer.state_dict()})
    seen = opened(path, model="ema/net.")
    assert {"model/0.weight", "ema/head.w", "other/model/old"} <= seen.foreign.specs.keys()
    assert "optimizer/0.weight/exp_avg" in seen.foreign.specs
    alone = opened(path, model="ema/", model_only=True)
    assert alone.foreign.specs.keys() == {*(f"model/{name}" for name in weights), "model/head.w"}
    flat = opened(saved(tmp_path / "flat.pt", weights), model="net.")
    assert "model/2.bias" in flat.foreign.specs
    for wrong in ("emma", "ema/nut.", "ema/net.0.weight/x", "model/old/x"):
        with pytest.raises(UserError, match=f"--map {wrong}=model: nothing was saved"):
            opened(path, model=wrong)


def test_what_no_checkpoint_holds_is_left_out_and_said(tmp_path: Path) -> None:
    value = {
        "model": {"w": torch.ones(2)},
        "args": argparse.Namespace(lr=0.1, out=Path("/a/b"), device=torch.device("cuda", 1)),
        "dtype": torch.bfloat16,
        "seen": {1, 2},
        "raw": b"bytes",
        "listed": [1, {3}, 2],
    }
    seen = opened(saved(tmp_path / "t.pt", value))
    assert {left.path: left.reason for left in seen.left_out} == {
        "seen": "it is a builtins.set",
        "raw": "it is a bytes",
        "listed/1": "it is a builtins.set",
    }
    assert seen.summary() == "1 tensor, 7 values of state, 3 left out"
    back = loaded(seen, tmp_path / "run")
    assert back["args"] == {"lr": 0.1, "out": "/a/b", "device": "cuda:1"}
    assert (back["dtype"], back["listed"]) == ("bfloat16", [1, None, 2])


class Config:
    """A class of the user's own."""


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({"model": {"w": torch.ones(2)}, "config": {"x": Config()}}, "test_torch_file.Config"),
        ({"model": {"w": torch.ones(2, dtype=torch.complex128)}}, "tensor of torch.complex128"),
        ({"model": {"w": torch.ones(2).to_sparse()}}, "torch._utils._rebuild_sparse_tensor"),
        ({"model": {"w": torch.ones(2, dtype=torch.cfloat).conj()}}, "lazy conjugation"),
        ({"model": torch.nn.Linear(1, 1)}, "torch.nn.modules.linear.Linear"),
    ],
)
def test_an_unknown_name_is_refused_by_its_name(tmp_path: Path, value: Any, name: str) -> None:
    path = saved(tmp_path / "t.pt", value)
    with pytest.raises(UserError, match=name) as caught:
        opened(path)
    assert "--without" in str(caught.value)


def test_a_part_with_an_unknown_name_can_be_left_out(tmp_path: Path) -> None:
    value = {"model": {"w": torch.ones(2)}, "config": {"x": Config(), "y": 1}}
    path = saved(tmp_path / "t.pt", value)
    seen = opened(path, without=("config/x",))
    assert equal(loaded(seen, tmp_path / "a"), {"model": value["model"], "config": {"y": 1}})
    alone = opened(path, model_only=True)
    assert [left.path for left in alone.left_out] == ["config"]
    assert equal(loaded(alone, tmp_path / "b"), {"model": value["model"]})
    with pytest.raises(UserError, match="nothing was saved under this path"):
        opened(path, without=("config/x", "config/z"))


def test_an_objects_state_is_tracked_by_name(tmp_path: Path) -> None:
    schedule = {"last_epoch": 3, "best": torch.tensor(0.5)}
    path = saved(tmp_path / "t.pt", {"model": {"w": torch.ones(2)}, "schedulers": [schedule]})
    seen = opened(path, tracked={"scheduler": "schedulers/0"})
    state = load_state(written(seen, tmp_path / "run"))
    assert state["tracked"] == {
        "scheduler": {"last_epoch": 3, "best": {"$tensor": "schedulers/0/best"}}
    }
    with pytest.raises(UserError, match="nothing was saved under 'x'"):
        opened(path, tracked={"scheduler": "x"})


def test_names_that_mean_something_to_a_job_are_kept_free(tmp_path: Path) -> None:
    value = {"model": {"w": torch.ones(2)}, "rng": {"cpu": {"0": torch.zeros(3)}}, "ema": {}}
    seen = opened(saved(tmp_path / "t.pt", value))
    assert set(seen.foreign.specs) == {"model/w", "other/rng/cpu/0"}
    assert equal(loaded(seen, tmp_path / "run"), value)


def test_files_of_other_kinds_are_refused_by_name(tmp_path: Path) -> None:
    value = {"w": torch.ones(2)}
    saved(tmp_path / "old.pt", value, _use_new_zipfile_serialization=False)
    torch.jit.script(torch.nn.Linear(1, 1)).save(str(tmp_path / "script.pt"))
    saved(tmp_path / "one.pt", torch.ones(2))
    saved(tmp_path / "empty.pt", {"epoch": 3})
    saved(tmp_path / "model.pt", torch.nn.Linear(1, 1))
    with zipfile.ZipFile(tmp_path / "other.pt", "w") as archive:
        archive.writestr("a/b", "c")
    saved(tmp_path / "packed.pt", value)
    with (
        zipfile.ZipFile(tmp_path / "packed.pt") as old,
        zipfile.ZipFile(tmp_path / "again.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    (tmp_path / "text.pt").write_text("hello")
    (tmp_path / "plain.pt").write_bytes(pickled.dumps({1: 2}))
    for name, sentence in {
        "old.pt": "of torch's format before 1.6.*write it again with",
        "script.pt": "a program of TorchScript",
        "one.pt": "holds a tensor, not a dict",
        "empty.pt": "holds no tensors",
        "model.pt": r"holds torch\.nn\.modules\.linear\.Linear, not a dict: save the state_dict",
        "other.pt": "has not written",
        "again.pt": "was compressed by another program",
        "text.pt": "is no file that",
        "plain.pt": "a pickle that `torch.save` has not written",
        "nowhere.pt": "does not exist",
    }.items():
        with pytest.raises(UserError, match=sentence):
            opened(tmp_path / name)


def test_a_changed_byte_of_a_tensor_is_found(tmp_path: Path) -> None:
    path = saved(tmp_path / "t.pt", {"w": torch.full((1000,), 3.0)})
    data = bytearray(path.read_bytes())
    data[data.index(torch.full((1000,), 3.0).numpy().tobytes()) + 401] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointDamaged, match="storage 0 is not what was written"):
        written(opened(path), tmp_path / "run")
    assert os.listdir(tmp_path) == ["t.pt"] or not os.listdir(tmp_path / "run")


def test_a_file_that_torch_wrote_without_checksums(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        path = saved(tmp_path / "t.pt", {"w": torch.arange(9.0)})
    finally:
        torch.serialization.set_crc32_options(True)
    assert equal(loaded(opened(path), tmp_path / "run"), {"w": torch.arange(9.0)})


def test_nothing_that_a_file_names_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    for number, call in enumerate(
        [
            Malice(os.system, f"touch {mark}"),
            Malice(subprocess.call, ["touch", str(mark)]),
            Malice(exec, f"open({str(mark)!r}, 'w')"),
        ]
    ):
        path = saved(tmp_path / f"{number}.pt", {"model": {"w": torch.ones(1)}, "x": call})
        with pytest.raises(UserError, match="only its own program can make"):
            opened(path)
        opened(path, model_only=True)
    assert not mark.exists()


@settings(max_examples=100)
@given(st.data())
def test_a_spoiled_file_is_refused_in_words(data: st.DataObject) -> None:
    """Whatever bytes are changed, the error is ours, and no name of the file is called."""
    model = small_model()
    buffer = io.BytesIO()
    value = {"model": model.state_dict(), "a": np.arange(3), "p": Path("/x"), "n": {1: (2, 3.5)}}
    torch.save(value, buffer)
    content = spoil(data, buffer.getvalue())
    with tempfile.TemporaryDirectory() as directory, suppress(UserError, CheckpointDamaged):
        path = Path(directory) / "t.pt"
        path.write_bytes(content)
        written(opened(path), Path(directory) / "run")


DOUBLED = b"".join(b"](h%ch%ceq%c0" % (n, n, n + 1) for n in range(40))
"""Makes a list that holds the list before twice, and so on: 2^40 values."""


@pytest.mark.parametrize(
    "program",
    [
        b"\x80\x02}X\x01\x00\x00\x00a" + b"](" * 5000 + b"e" * 5000 + b"s.",  # lists in lists
        b"\x80\x02}X\x01\x00\x00\x00a]q\x000" + DOUBLED + b"h\x28s.",
        b"\x80\x02}X\x01\x00\x00\x00a]q\x00h\x00as.",  # a list in itself
        b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s.",  # a dict in itself
    ],
)  # fmt: skip
def test_nesting_without_end_is_refused(tmp_path: Path, program: bytes) -> None:
    path = tmp_path / "t.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", program)
    with pytest.raises(UserError, match=r"nested too deep|contains itself|repeats"):
        opened(path)


@pytest.mark.parametrize("everything", [False, True])
def test_strange_tensors_go_out_and_come_back(tmp_path: Path, everything: bool) -> None:
    step = save(tmp_path / "ckpt", {f"model/{name}": t for name, t in STRANGE.items()})
    target = str(tmp_path / "m.pt")
    done = export_torch(open_storage(step), target, DcpExportOptions(everything=everything))
    assert (done.where, done.tensors) == (target, len(STRANGE))
    theirs = torch.load(target, weights_only=True)
    assert equal(theirs["model"] if everything else theirs, STRANGE)
    with zipfile.ZipFile(target) as archive:
        assert archive.testzip() is None
    assert equal(torch.load(target, mmap=True).keys(), torch.load(target).keys())
    back = written(opened(tmp_path / "m.pt"), tmp_path / "back")
    assert compare(open_storage(step), open_storage(str(back)), model_only=True).same


def test_what_was_nested_goes_out_and_comes_back(tmp_path: Path) -> None:
    value = {
        "net": {"w": torch.arange(6.0).reshape(2, 3)},
        "pair": (torch.ones(2), {"deep": [torch.zeros(1), "text", -5, 1 << 70, float("-inf")]}),
        "by number": {0: {"m": torch.ones(1)}, 1: 5},
        "array": np.arange(3),
        "$odd": None,
    }
    step = save(tmp_path / "ckpt", value, state={"note": "kept"})
    export_torch(open_storage(step), str(tmp_path / "all.pt"), DcpExportOptions(everything=True))
    theirs = torch.load(tmp_path / "all.pt", weights_only=True)
    theirs.pop("elasticzero")
    assert equal(theirs.pop("array"), torch.arange(3))
    assert equal(theirs, {key: item for key, item in value.items() if key != "array"})
    back = written(opened(tmp_path / "all.pt"), tmp_path / "back")
    assert compare(open_storage(step), open_storage(str(back))).same
    assert isinstance(load(back)["array"], np.ndarray)


def test_a_jobs_state_goes_out_and_comes_back(tmp_path: Path) -> None:
    """Tied names, optimizer state by name, groups, and tensors inside of state."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    names: dict[torch.Tensor, str] = {p: name for name, p in model.named_parameters()}
    tensors = {f"model/{name}": t for name, t in model.state_dict().items()}
    for parameter, entries in optimizer.state.items():
        tensors |= {f"optimizer/{names[parameter]}/{key}": t for key, t in entries.items()}
    tensors |= {"groups/0/lr": torch.tensor(0.1), "tracked/ema/mean": torch.ones(2)}
    options = {"lr": {"$tensor": "groups/0/lr"}, "betas": {"$tuple": [0.9, 0.999]}}
    state = {
        "aliases": {"head": "0.weight"},
        "groups": [{"names": list(names.values()), "options": options}],
        "tracked": {"ema": {"mean": {"$tensor": "tracked/ema/mean"}}},
    }
    step = save(tmp_path / "ckpt", tensors, state=state, step=3)
    export_torch(open_storage(step), str(tmp_path / "all.pt"), DcpExportOptions(everything=True))
    theirs = torch.load(tmp_path / "all.pt", weights_only=True)
    assert theirs["model"]["head"].data_ptr() == theirs["model"]["0.weight"].data_ptr()
    assert theirs["optimizer"]["param_groups"][0]["params"] == list(names.values())
    back = written(opened(tmp_path / "all.pt"), tmp_path / "back")
    assert compare(open_storage(step), open_storage(str(back))).same
    assert load_state(back) == load_state(step)
    alone = written(opened(tmp_path / "all.pt", model_only=True), tmp_path / "alone")
    assert load_state(alone)["aliases"] == {"head": "0.weight"}


def test_an_export_never_replaces_a_file(tmp_path: Path) -> None:
    step = save(tmp_path / "ckpt", {"model/w": torch.ones(3)})
    (tmp_path / "m.pt").write_text("mine")
    with pytest.raises(UserError, match="exists: give a new file"):
        export_torch(open_storage(step), str(tmp_path / "m.pt"))
    with pytest.raises(UserError, match=r"must be a file that ends in one of \.pt"):
        export_torch(open_storage(step), str(tmp_path / "dir"))
    assert (tmp_path / "m.pt").read_text() == "mine"


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    value = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7, "s": {1}}
    path = str(saved(tmp_path / "t.pt", value))
    names = tmp_path / "names"
    names.write_text("\n".join(name for name, _ in model.named_parameters()) + "\n")
    order = ["import", path, "--format", "torch", "--names", str(names)]
    assert main([*order, "--list"]) == 0
    listing = capsys.readouterr().out
    assert "optimizer/0.weight/exp_avg" in listing and "it is a builtins.set" in listing
    assert listing.endswith("27 tensors, 19 values of state, 1 left out\n")
    assert main([*order, "--list", "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert about["tensors"]["model/0.weight"] == {"dtype": "F32", "shape": [4, 3]}
    assert about["left_out"] == {"s": "it is a builtins.set"}
    assert main(order) == 64
    assert "the checkpoint directory to write into is missing" in capsys.readouterr().err
    assert main([*order[:2], str(tmp_path / "run"), *order[2:], "-q"]) == 0
    shown = capsys.readouterr()
    assert "step-000000000007" in shown.out
    assert shown.out.endswith("27 tensors, 19 values of state, 1 left out\n")
    assert "left out: s: it is a builtins.set" in shown.err
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "m.pt"), "--format", "torch"]) == 0
    assert equal(torch.load(tmp_path / "m.pt", weights_only=True), dict(model.state_dict()))
    assert (
        main(["import", path, str(tmp_path / "x"), "--format", "hf", "--names", str(names)]) == 64
    )
    assert "--names is not for --format hf" in capsys.readouterr().err
