"""Directories as transformers' Trainer, accelerate and Lightning lay them out.

`make integrations` reads what the real packages write.
"""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_state_dict

from elasticzero.checkpoint.api import load
from elasticzero.checkpoint.cli.main import main
from elasticzero.checkpoint.convert.import_plan import Import, ImportOptions
from elasticzero.checkpoint.convert.pickled.contents import name_contents
from elasticzero.checkpoint.convert.pickled.directories import open_directory_of_state
from elasticzero.errors import CheckpointDamaged, UserError
from tests.unit.checkpoint.convert.pickled.cases import opened, small_model, train, written
from tests.unit.checkpoint.convert.test_dcp import equal


class Arguments:
    """Stands for the arguments of a run, which are pickled as an object."""


def read(path: Path, **options: Any) -> Import:
    return name_contents(open_directory_of_state(str(path)), ImportOptions(**options))


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    return model, optimizer


def of_trainer(path: Path) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    path.mkdir()
    model, optimizer = trained()
    save_file(dict(model.state_dict()), path / "model.safetensors", {"format": "pt"})
    torch.save(optimizer.state_dict(), path / "optimizer.pt")
    torch.save({"last_epoch": 2, "_last_lr": [0.1]}, path / "scheduler.pt")
    torch.save(Arguments(), path / "training_args.bin")
    generators = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.get_rng_state(),
    }
    torch.save(generators, path / "rng_state.pth")
    (path / "trainer_state.json").write_text(json.dumps({"global_step": 2, "log_history": []}))
    (path / "config.json").write_text("{}")
    return model, optimizer


def names_of(model: torch.nn.Module) -> tuple[str, ...]:
    return tuple(name for name, _ in model.named_parameters())


def test_a_directory_of_a_trainer(tmp_path: Path) -> None:
    model, optimizer = of_trainer(tmp_path / "checkpoint-2")
    seen = read(
        tmp_path / "checkpoint-2", names=names_of(model), tracked={"scheduler": "scheduler"}
    )
    assert seen.step == 2
    assert {left.path for left in seen.left_out} == {"training_args.bin", "config.json"}
    back = load(written(seen, tmp_path / "run", strategy="zero3"))
    assert equal(back["model"], dict(model.state_dict()))
    assert equal(back["optimizer"], optimizer.state_dict())
    assert back["rng_state"]["python"] == random.getstate()
    assert torch.equal(back["rng_state"]["cpu"], torch.get_rng_state())
    assert back["trainer_state"] == {"global_step": 2, "log_history": []}
    assert seen.foreign.state["tracked"] == {"scheduler": {"last_epoch": 2, "_last_lr": [0.1]}}
    assert "optimizer/2.bias/exp_avg" in seen.foreign.specs


def test_weights_in_several_files(tmp_path: Path) -> None:
    """Whether they are safetensors with an index or pickles."""
    model, _ = trained()
    state = dict(model.state_dict())
    first = {name: tensor for name, tensor in state.items() if name.startswith("0")}
    rest = {name: tensor for name, tensor in state.items() if name not in first}
    for kind in ("safetensors", "bin"):
        (tmp_path / kind).mkdir()
        files: dict[str, str] = {}
        for number, part in enumerate((first, rest), 1):
            stem = "model" if kind == "safetensors" else "pytorch_model"
            file = f"{stem}-{number:05d}-of-00002.{kind}"
            files |= dict.fromkeys(part, file)
            save = save_file if kind == "safetensors" else torch.save
            save(part, tmp_path / kind / file)
        index = json.dumps({"metadata": {}, "weight_map": files})
        (tmp_path / kind / f"{stem}.{kind}.index.json").write_text(index)
        seen = read(tmp_path / kind)
        back = load(written(seen, tmp_path / "run" / kind))
        assert all(torch.equal(back["model"][n], t) for n, t in state.items())


def test_a_directory_of_accelerate(tmp_path: Path) -> None:
    model, optimizer = trained()
    path = tmp_path / "state"
    path.mkdir()
    save_file(dict(model.state_dict()), path / "model.safetensors", {"alias": "0.weight"})
    save_file({"w": torch.ones(2)}, path / "model_1.safetensors")
    torch.save(optimizer.state_dict(), path / "optimizer.bin")
    torch.save({"last_epoch": 2}, path / "scheduler.bin")
    torch.save({"n": 3, "t": torch.ones(2)}, path / "custom_checkpoint_0.pkl")
    torch.save({"step": 5, "random_state": random.getstate()}, path / "random_states_0.pkl")
    seen = read(path, names=names_of(model), tracked={"mine": "custom_checkpoint_0"})
    assert seen.left_out == ()
    assert seen.foreign.state["aliases"] == {"alias": "0.weight"}
    back = load(written(seen, tmp_path / "run"))
    assert equal(back["optimizer"], optimizer.state_dict())
    assert torch.equal(back["model_1"]["w"], torch.ones(2))
    assert back["custom_checkpoint_0"]["n"] == 3


def test_a_directory_of_fsdp(tmp_path: Path) -> None:
    """FSDP leaves a directory of torch.distributed.checkpoint for each object."""
    model, optimizer = trained()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    path = tmp_path / "state"
    path.mkdir()
    with warnings.catch_warnings(action="ignore"):
        for name, value in {
            "pytorch_model_fsdp_0": {"model": model_state},
            "optimizer_0": {"optimizer": optimizer_state},
        }.items():
            torch_dcp.save(value, checkpoint_id=path / name, no_dist=True)
    torch.save({"last_epoch": 2}, path / "scheduler.bin")
    seen = read(path)
    assert "optimizer/0.weight/exp_avg" in seen.foreign.specs
    assert seen.foreign.state["groups"][0]["names"] == list(names_of(model))
    back = load(written(seen, tmp_path / "run"))
    assert all(torch.equal(back["model"][n], t) for n, t in model.state_dict().items())
    assert back["scheduler"] == {"last_epoch": 2}


def test_a_file_of_lightning(tmp_path: Path) -> None:
    model, optimizer = trained()
    value = {
        "epoch": 1,
        "global_step": 2,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": {f"net.{name}": tensor for name, tensor in model.state_dict().items()},
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 2}}}},
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best": torch.tensor(0.5)}},
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [{"last_epoch": 2}],
        "hyper_parameters": {"lr": 0.1},
    }
    torch.save(value, tmp_path / "last.ckpt")
    names = tuple(f"net.{name}" for name in names_of(model))
    seen = opened(tmp_path / "last.ckpt", names=names, tracked={"schedule": "lr_schedulers/0"})
    assert (seen.step, seen.left_out) == (2, ())
    assert {"model/net.0.weight", "optimizer/net.2.bias/exp_avg"} <= seen.foreign.specs.keys()
    assert equal(load(written(seen, tmp_path / "run")), value)


def test_directories_of_other_kinds_are_refused(tmp_path: Path) -> None:
    for name, file in {"none": "optimizer.pt", "deepspeed": "zero_pp_rank_0.pt"}.items():
        (tmp_path / name).mkdir()
        torch.save({"x": torch.ones(1)}, tmp_path / name / file)
    with pytest.raises(UserError, match="has no weights of a model"):
        read(tmp_path / "none")
    with pytest.raises(UserError, match="written by DeepSpeed"):
        read(tmp_path / "deepspeed")
    with pytest.raises(UserError, match="is empty or does not exist"):
        read(tmp_path / "nowhere")
    of_trainer(tmp_path / "spoiled")
    (tmp_path / "spoiled" / "trainer_state.json").write_text("{")
    with pytest.raises(CheckpointDamaged, match="is not JSON"):
        read(tmp_path / "spoiled")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_trainer(tmp_path / "checkpoint-2")
    order = ["import", "-q", str(tmp_path / "checkpoint-2"), str(tmp_path / "run")]
    assert main([*order, "--format", "trainer"]) == 0
    shown = capsys.readouterr()
    assert "step-000000000002" in shown.out
    assert shown.out.endswith("left out\n") and ", 2 left out" in shown.out
    assert "left out: training_args.bin: it is no state of training" in shown.err
    assert "give their names with --names FILE" in shown.err
