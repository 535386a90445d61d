"""Checkpoints that the real packages write come in whole: `make integrations` has the packages."""

from __future__ import annotations

import importlib.util
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

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(1000)]
SCRIPT = Path(__file__).with_name("foreign_checkpoints.py")


def saved_by(kind: str, out: Path) -> Path:
    """Runs the other program in one process."""
    package = kind.rstrip("123")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"`make integrations` has {package}")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    if package == "deepspeed":
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
        environment |= {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
        # A build that was killed leaves a lock, for which all later ones wait.
        environment |= {"TORCH_EXTENSIONS_DIR": str(out.parent.parent / "extensions")}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), kind, str(out)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-4000:]
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


def test_lightning(tmp_path: Path) -> None:
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


def test_transformers(tmp_path: Path) -> None:
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


def test_accelerate(tmp_path: Path) -> None:
    out = saved_by("accelerate", tmp_path / "out")
    names = (out / "names.txt").read_text().split()
    options = ("--names", str(out / "names.txt"), "--track", "schedule=scheduler")
    back = imported(out / "state", "accelerate", tmp_path / "run", *options)
    theirs = load_file(out / "state" / "model.safetensors")
    assert all(torch.equal(back["model"][n], t) for n, t in theirs.items())
    check_optimizer(back["optimizer"], names, torch.load(out / "state" / "optimizer.bin"))
    assert load_state(tmp_path / "run")["groups"][0]["names"] == names


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed(tmp_path: Path, stage: int) -> None:
    """What DeepSpeed's own converters make of the files is the same.

    Of several ranks, tests/unit/checkpoint/convert/pickled has files in the same layout.
    """
    out = saved_by(f"deepspeed{stage}", tmp_path / "out")
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
