"""Checkpoints that the real packages write come in whole: `make integrations` has the packages."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from elasticzero.checkpoint.api import load, load_state
from elasticzero.checkpoint.cli.main import main
from elasticzero.launcher.store.etcd.server import free_ports
from tests.integration.training_harness import Pool
from tests.integrations.foreign_checkpoints import SAMPLES, by_dimensions, small_model

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(1000)]
SCRIPT = Path(__file__).with_name("foreign_checkpoints.py")
LOADED = Path(__file__).with_name("training_loaded.py")
ROOT = Path(__file__).parents[2]


def saved_by(kind: str, out: Path, ranks: int = 1, python: Path = Path(sys.executable)) -> Path:
    """Runs the other program, with a process for each rank."""
    package = kind.partition("-")[0].rstrip("123")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"`make integrations` has {package}")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    environment |= {"PYTHONPATH": str(ROOT)}
    if package == "deepspeed":
        # A build that was killed leaves a lock, for which all later ones wait.
        environment |= {"TORCH_EXTENSIONS_DIR": str(out.parent.parent / "extensions")}
    if package in ("deepspeed", "megatron") or ranks > 1:
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    processes = []
    for rank in range(ranks):
        place = {"WORLD_SIZE": str(ranks), "RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = subprocess.Popen(
            [str(python), str(SCRIPT), kind, str(out)],
            env=environment | (place if "MASTER_PORT" in environment else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        processes.append(process)
    try:
        for process in processes:
            printed, _ = process.communicate(timeout=900)
            assert process.returncode == 0, printed[-4000:]
    finally:
        for process in processes:
            process.kill()
    return out


def imported(source: Path, kind: str, target: Path, *options: str) -> dict[str, Any]:
    assert main(["import", "-q", str(source), str(target), "--format", kind, *options]) == 0
    loaded: dict[str, Any] = load(target)
    return loaded


def check_optimizer(loaded: Any, names: list[str], theirs: Any) -> None:
    """Checks that state by number has come in as it was, and with the names of a job."""
    assert loaded["param_groups"] == theirs["param_groups"]
    for number, _ in enumerate(names):
        for key, value in theirs["state"][number].items():
            assert torch.equal(loaded["state"][number][key], value)


def test_lightning(pool: Pool, tmp_path: Path) -> None:
    out = saved_by("lightning", tmp_path / "out")
    names = (out / "names.txt").read_text().split()
    options = ("--names", str(out / "names.txt"), "--track", "schedule=lr_schedulers/0")
    back = imported(out / "last.ckpt", "torch", tmp_path / "run", *options)
    theirs = torch.load(out / "last.ckpt", weights_only=False)
    assert back["global_step"] == theirs["global_step"] == 8
    assert all(torch.equal(back["state_dict"][n], t) for n, t in theirs["state_dict"].items())
    check_optimizer(back["optimizer_states"][0], names, theirs["optimizer_states"][0])
    state = load_state(tmp_path / "run")
    assert state["groups"][0]["names"] == names
    assert state["tracked"]["schedule"]["last_epoch"] == 2
    following = torch.load(out / "next.pt", weights_only=True)
    check_step(pool, tmp_path, {"strategy": "zero1", "load": str(out / "last.ckpt")}, following)


def test_transformers(pool: Pool, tmp_path: Path) -> None:
    """GPT-2 has tied weights. Exported again, they are what the Trainer saved."""
    out = saved_by("transformers", tmp_path / "out")
    names = (out / "names.txt").read_text().split()
    source = out / "checkpoint-3"
    back = imported(source, "trainer", tmp_path / "run", "--names", str(out / "names.txt"))
    theirs = load_file(source / "model.safetensors")
    assert all(torch.equal(back["model"][n], t) for n, t in theirs.items())
    check_optimizer(back["optimizer"], names, torch.load(source / "optimizer.pt"))
    assert back["trainer_state"]["global_step"] == 3
    assert main(["export", "-q", str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    again = load_file(tmp_path / "hf" / "model.safetensors")
    assert again.keys() == theirs.keys()
    assert all(torch.equal(again[n], t) for n, t in theirs.items())
    told = {"strategy": "zero3", "model": "gpt2", "clip": 1.0, "load": str(source)}
    check_step(pool, tmp_path, told, torch.load(out / "next.pt", weights_only=True))


def test_accelerate(pool: Pool, tmp_path: Path) -> None:
    out = saved_by("accelerate", tmp_path / "out")
    names = (out / "names.txt").read_text().split()
    options = ("--names", str(out / "names.txt"), "--track", "schedule=scheduler")
    back = imported(out / "state", "accelerate", tmp_path / "run", *options)
    theirs = load_file(out / "state" / "model.safetensors")
    assert all(torch.equal(back["model"][n], t) for n, t in theirs.items())
    check_optimizer(back["optimizer"], names, torch.load(out / "state" / "optimizer.bin"))
    assert load_state(tmp_path / "run")["groups"][0]["names"] == names
    following = torch.load(out / "next.pt", weights_only=True)
    check_step(pool, tmp_path, {"strategy": "zero2", "load": str(out / "state")}, following)


@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (2, 1), (3, 2)])
def test_deepspeed(pool: Pool, tmp_path: Path, stage: int, ranks: int) -> None:
    """An import equals what DeepSpeed's own converters make of the files, and a job goes on."""
    out = saved_by(f"deepspeed{stage}", tmp_path / "out", ranks)
    back = imported(out, "deepspeed", tmp_path / "run")
    convert = subprocess.run(
        [
            sys.executable,
            str(out / "zero_to_fp32.py"),
            str(out),
            str(tmp_path / "fp32"),
            "--safe_serialization",
        ],
        env=os.environ | {"DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
    )
    assert convert.returncode == 0, convert.stderr[-2000:]
    theirs = load_file(tmp_path / "fp32" / "model.safetensors")
    assert theirs.keys() <= back["model"].keys()
    assert all(torch.equal(back["model"][n].float(), t.float()) for n, t in theirs.items())
    assert (back["epoch"], back["global_steps"]) == (1, 3)
    universal = out / "universal"
    convert = subprocess.run(
        [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state",
         "--input_folder", str(out / "global_step3"), "--output_folder", str(universal)],
        env=os.environ | {"DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert convert.returncode == 0, convert.stderr[-2000:]
    again = imported(universal, "deepspeed", tmp_path / "again")
    assert again["model"].keys() == back["model"].keys()
    assert all(torch.equal(again["model"][n], t) for n, t in back["model"].items())
    for name, entries in back["optimizer"]["state"].items():
        for key, value in entries.items():
            assert torch.equal(again["optimizer"]["state"][name][key], value)
    assert load_state(tmp_path / "again")["groups"] == load_state(tmp_path / "run")["groups"]
    model = small_model().double()
    model.load_state_dict({name: tensor.double() for name, tensor in back["model"].items()})
    model[0].bias.requires_grad_(False)  # type: ignore[index]
    optimizer = by_dimensions(list(model.parameters()))
    state = back["optimizer"]["state"]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kept = {key: state[name][key].double() for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {**kept, "step": state[name]["step"].float()}
    model(SAMPLES).square().mean().backward()
    optimizer.step()
    told = {"strategy": "zero1" if stage == 3 else "zero3", "frozen": True, "load": str(out)}
    check_step(pool, tmp_path, told, model.state_dict())


@pytest.mark.parametrize(
    ("kind", "environment", "strategy"),
    [
        ("accelerate-fsdp", None, "zero2"),
        ("accelerate-fsdp-full", None, "ddp"),
        ("torch", ".venv-oldest", "zero1"),
        ("torch", ".venv-newest", "zero3"),
    ],
)
def test_fsdp_of_two_ranks(
    pool: Pool, tmp_path: Path, kind: str, environment: str | None, strategy: str
) -> None:
    """Model and optimizer are those that torch gathers, and the next step is theirs."""
    python = Path(sys.executable)
    if environment is not None and not (python := ROOT / environment / "bin/python").exists():
        pytest.skip(f"`make versions` has {environment}")
    out = saved_by(kind, tmp_path / "out", 2, python)
    form = "dcp" if kind == "torch" else "accelerate"
    back = imported(out / "state", form, tmp_path / "run")
    whole = torch.load(out / "whole.pt", weights_only=True)
    assert back["model"].keys() == whole["model"].keys()
    assert all(torch.equal(back["model"][n], t) for n, t in whole["model"].items())
    for name, entries in whole["optimizer"]["state"].items():
        for key, value in entries.items():
            assert torch.equal(back["optimizer"]["state"][name][key], value)
    check_step(pool, tmp_path, {"strategy": strategy, "load": str(out / "state")}, whole["next"])
    exported = str(tmp_path / "again.pt")
    assert main(["export", "-q", str(tmp_path / "run"), exported, "--format", "torch"]) == 0
    again = torch.load(exported, weights_only=True)
    assert all(torch.equal(again[n], t) for n, t in whole["model"].items())


def test_megatron(pool: Pool, tmp_path: Path) -> None:
    """Layers that are one tensor come in as layers, and AdamW goes on with its moments."""
    out = saved_by("megatron", tmp_path / "out")
    whole = torch.load(out / "whole.pt", weights_only=True)
    shapes = {name: list(tensor.shape) for name, tensor in whole["model"].items()}
    for kind, strategy in (("alike", "zero2"), ("apart", "ddp")):
        back = imported(out / kind, "megatron", tmp_path / kind)
        assert back["model"].keys() == whole["model"].keys()
        assert all(torch.equal(back["model"][n], t) for n, t in whole["model"].items())
        told = {"strategy": strategy, "shapes": shapes, "rate": 0.1, "load": str(out / kind)}
        check_step(pool, tmp_path, told, whole["next"])


def check_step(
    pool: Pool, folder: Path, told: dict[str, Any], expected: dict[str, torch.Tensor]
) -> None:
    """Trains one step from the files, with three ranks, and compares the weights."""
    told |= {"out": str(folder / "after.pt")}
    assert pool.start(LOADED, [json.dumps(told)], 3).finish() == 1
    after = torch.load(folder / "after.pt", weights_only=True)
    assert after.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(after[name], tensor, rtol=1e-9, atol=1e-9)
