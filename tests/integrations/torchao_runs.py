"""Runs a script with torchao's optimizers beside a plain loop, and compares what they keep."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from elasticzero import checkpoint as ez_checkpoint

MARKS = [
    pytest.mark.integrations,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("compiled"),
]
SCRIPT = Path(__file__).parent / "training_torchao.py"
PATIENCE_S = 250.0
STEPS = 30
PACKED = ("first.weight", "second.weight")
"""Parameters of the script's model that have 4096 elements."""


def run(command: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def plain(folder: Path, optimizer: str) -> dict[str, Tensor]:
    """The weights and the optimizer's state of a plain loop of STEPS steps."""
    told = {"optimizer": optimizer, "steps": STEPS, "out": str(folder / "plain")}
    completed = run([sys.executable, str(SCRIPT), json.dumps(told)], OMP_NUM_THREADS="1")
    assert completed.returncode == 0, completed.stderr
    return load_file(folder / "plain")


def state_in(folder: Path) -> dict[str, Tensor]:
    """The weights and the optimizer's state of a checkpoint."""
    whole = ez_checkpoint.load(folder)
    return {n: t for n, t in whole.items() if n.startswith(("model/", "optimizer/"))}


def assert_equal(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype and tensors[name].shape == tensor.shape
        bits = [value.reshape(-1).view(torch.uint8) for value in (tensors[name], tensor)]
        assert torch.equal(*bits), name


def assert_close(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The sums of another world have another order, and so a few numbers get another code."""
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        differences = (tensors[name].double() - tensor.double()).abs()
        beyond = differences > (0.0 if name.endswith(".codes") else 1e-5)
        assert beyond.double().mean() < 0.03, (name, differences.max())
        assert name.endswith(".codes") or differences.max() < 1e-3, (name, differences.max())
