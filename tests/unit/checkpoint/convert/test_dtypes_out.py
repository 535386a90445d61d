"""Converting a model to another dtype loses no scale and makes nothing infinite in silence."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from elasticzero import checkpoint
from elasticzero.checkpoint.cli.main import main
from elasticzero.checkpoint.format.layout import TensorSpec
from elasticzero.checkpoint.rewrite.sources import CAST_DTYPES, cast_specs, unconverted
from elasticzero.errors import CheckpointMismatch
from elasticzero.ipc.agent_client import STANDALONE, AgentClient
from elasticzero.snapshots.pretrained.model import Pretrained

SMALL = torch.tensor([3e-9, 1.0 / 3])
FP8_MODEL = {
    "attn.k_proj.weight": torch.ones(2, 2).to(torch.float8_e4m3fn),
    "attn.k_proj.weight_scale_inv": SMALL,
    "attn.k_proj.input_scale": SMALL,
    "attn.k_proj.bias": SMALL,
    "attn.k_scale": SMALL,
    "norm.weight": SMALL,
    "norm.scale": SMALL,
    "logit_scale": SMALL,
}
SCALES = {"attn.k_proj.weight_scale_inv", "attn.k_proj.input_scale", "attn.k_scale"}
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
Output = pytest.CaptureFixture[str]


def converted(tmp_path: Path, command: str, tensors: dict[str, Tensor], *flags: str) -> int:
    """Runs a conversion to `new`, which then has the tensors under their names in the model."""
    source, target = tmp_path / "run", str(tmp_path / "new")
    if command == "import":
        (tmp_path / "hf").mkdir()
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        save_file(tensors, tmp_path / "hf" / "model.safetensors")
        return main(["import", "-q", str(tmp_path / "hf"), target, "--format", "hf", *flags])
    checkpoint.save(source, {f"model/{name}": tensor for name, tensor in tensors.items()})
    if command == "reshard":
        return main(["reshard", "-q", str(source), target, "--world-size", "3", *flags])
    return main(["export", "-q", str(source), target, "--format", command, *flags])


def result_of(tmp_path: Path, command: str) -> dict[str, Tensor]:
    if command == "hf":
        return load_file(tmp_path / "new" / "model.safetensors")
    if command == "dcp":
        args = ["import", "-q", str(tmp_path / "new"), str(tmp_path / "back"), "--format", "dcp"]
        assert main(args) == 0
    where = tmp_path / ("back" if command == "dcp" else "new")
    loaded = checkpoint.load(where)
    tensors = loaded.get("model", loaded)
    return {name.removeprefix("model/"): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("command", ["import", "reshard", "hf"])
def test_scales_stay_beside_the_float8_that_they_scale(
    tmp_path: Path, command: str, capsys: Output
) -> None:
    assert converted(tmp_path, command, FP8_MODEL, "--dtype", "fp16") == 0
    assert "leaves float8 and its scales as they are: 4 tensors" in capsys.readouterr().err
    result = result_of(tmp_path, command)
    assert {name for name in result if result[name].dtype == torch.float32} == SCALES
    assert all(torch.equal(result[name], SMALL) for name in SCALES)
    assert result["logit_scale"].dtype == result["norm.scale"].dtype == torch.float16


def test_a_model_without_float8_has_no_such_scales() -> None:
    specs = {"model/a.weight": TensorSpec("F32", (2,)), "model/a.scale": TensorSpec("F32", (2,))}
    assert {spec.dtype for spec in cast_specs(specs, "bf16").values()} == {"BF16"}
    assert unconverted(specs) == []


@pytest.mark.parametrize("command", ["import", "reshard", "hf", "dcp"])
def test_a_value_beyond_the_range_is_refused_by_name(
    tmp_path: Path, command: str, capsys: Output
) -> None:
    """bf16 holds 1e38, and fp16 ends at 65,504."""
    tensors = {"a": torch.ones(9), "big": torch.tensor([1.0, -1e38]).bfloat16()}
    assert converted(tmp_path, command, tensors, "--dtype", "fp16") == 64
    error = capsys.readouterr().err
    assert "model/big has the value -9.96921e+37, which F16 cannot hold" in error
    assert "--allow-overflow" in error
    new = tmp_path / "new"
    assert not new.exists() or list(new.iterdir()) == []


@pytest.mark.parametrize("command", ["import", "reshard", "hf", "dcp"])
def test_overflow_that_is_allowed_becomes_infinite(tmp_path: Path, command: str) -> None:
    tensors = {"big": torch.tensor([1.0, -1e38]).bfloat16()}
    flags = ("--dtype", "fp16", "--allow-overflow")
    assert converted(tmp_path, command, tensors, *flags) == 0
    assert result_of(tmp_path, command)["big"].tolist() == [1.0, -torch.inf]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *itertools.product(
            (torch.float64, torch.float32, torch.bfloat16, torch.float16), CAST_DTYPES
        )
    ],
)
def test_only_finite_values_that_become_infinite_are_refused(
    tmp_path: Path, old: torch.dtype, new: str
) -> None:
    """Infinities and NaN of the model itself pass; the largest value of each dtype does or not."""
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, 1e-30]).to(old)
    assert converted(tmp_path, "hf", {"w": special}, "--dtype", new) == 0
    (tmp_path / "more").mkdir()
    largest = torch.tensor([torch.finfo(old).max], dtype=old)
    target = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[new]
    lost = bool(torch.isinf(largest.to(target)).any())
    code = converted(tmp_path / "more", "hf", {"w": largest}, "--dtype", new)
    assert code == (64 if lost else 0)


def test_a_rank_that_overflows_ends_the_others_and_leaves_nothing(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.ones(5000) for i in range(6)} | {"z": torch.tensor([1e6])}
    assert converted(tmp_path, "reshard", tensors, "--dtype", "fp16") == 64
    assert list((tmp_path / "new").iterdir()) == []
    args = ["--world-size", "3", "--dtype", "fp16", "--allow-overflow"]
    assert main(["reshard", "-q", str(tmp_path / "run"), str(tmp_path / "new"), *args]) == 0


def test_prepare_refuses_values_that_the_model_cannot_hold(tmp_path: Path) -> None:
    save_file({"weight": torch.tensor([[1e5]]), "bias": torch.ones(1)}, tmp_path / "w.safetensors")
    model = nn.Linear(1, 1).half()
    pretrained = Pretrained(model, tmp_path / "w.safetensors", AgentClient(None, STANDALONE))
    with pytest.raises(CheckpointMismatch, match=r"'weight' in .* has the value 100000, which"):
        pretrained.fill(model.weight)
