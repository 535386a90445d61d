"""The scripts in README.md and docs/checkpoints.md, as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from elasticzero import checkpoint

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "checkpoints.md"

TORCH_S_END = "terminate called without an active exception"
"""What gloo of torch 2.13 sometimes says as its group is destroyed, the last line of a script: the
process then aborts, with all its work done. What was saved is looked at below."""


def scripts(directory: Path, page: Path = PAGE) -> list[str]:
    """Write every example under its name; the names."""
    examples = re.findall(
        r"<!-- example: (\S+) -->\n```python\n(.*?)```", page.read_text(), re.DOTALL
    )
    for name, text in examples:
        (directory / name).write_text(text)
    return [name for name, _ in examples]


def run(directory: Path, *arguments: str) -> str:
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    finished = subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert finished.returncode == 0 or TORCH_S_END in finished.stdout, finished.stdout
    return finished.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_example_runs_and_goes_on_where_it_was(tmp_path: Path) -> None:
    assert scripts(tmp_path) == ["plain.py", "fsdp.py", "infer.py"]
    assert "epoch 3, loss" in run(tmp_path, "plain.py")
    assert "epoch 6, loss" in run(tmp_path, "plain.py")
    for ranks, step in (("2", 3), ("3", 6)):
        run(
            tmp_path,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            ranks,
            "fsdp.py",
        )
        saved = checkpoint.load(tmp_path / "sharded")
        assert saved["step"] == step
        assert {float(entry["step"]) for entry in saved["optimizer"]["state"].values()} == {step}
    assert "output: " in run(tmp_path, "infer.py")


@pytest.mark.slow
def test_the_quick_start_runs_as_printed(tmp_path: Path) -> None:
    assert scripts(tmp_path, ROOT / "README.md") == ["train.py"]
    quick_start = (tmp_path / "train.py").read_text()
    assert quick_start == (ROOT / "examples" / "quickstart.py").read_text()
    assert "finished after step 939" in run(tmp_path, "train.py")
    alone = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in alone.items()} == {
        "0.weight": (128, 64),
        "0.bias": (128,),
        "2.weight": (10, 128),
        "2.bias": (10,),
    }
    (tmp_path / "model.safetensors").unlink()
    arguments = ["-m", "elasticzero.cli", "local", "--nodes", "2", "--strategy", "zero3"]
    assert "done: 939 steps" in run(tmp_path, *arguments, "train.py")
    together = load_file(tmp_path / "model.safetensors")
    for name, tensor in alone.items():
        torch.testing.assert_close(together[name], tensor, rtol=0.05, atol=0.01)
