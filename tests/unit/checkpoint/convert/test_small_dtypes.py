"""Numbers of 8 and 4 bits that safetensors has are kept, and the config states the right dtype."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from elasticzero import checkpoint
from elasticzero.checkpoint.cli.main import main
from elasticzero.checkpoint.convert.huggingface import with_dtype
from elasticzero.checkpoint.format.layout import TensorSpec
from elasticzero.errors import UserError
from elasticzero.state.model import all_finite

PAIRS, POWERS = torch.float4_e2m1fn_x2, torch.float8_e8m0fnu
Output = pytest.CaptureFixture[str]


def raw(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return tensor.dtype, tensor.shape, data


def small() -> dict[str, torch.Tensor]:
    numbers = torch.arange(60, dtype=torch.uint8).reshape(5, 12)
    return {
        "a.pairs": numbers.view(PAIRS),
        "a.scale": numbers[:, :3].contiguous().view(POWERS),
        "odd.pairs": torch.arange(7, dtype=torch.uint8).view(PAIRS),
        "plain": torch.ones(3),
    }


def test_they_come_back_from_every_conversion(tmp_path: Path) -> None:
    tensors = small()
    run, hf, dcp = (str(tmp_path / name) for name in ("run", "hf", "dcp"))
    checkpoint.save(run, {f"model/{name}": tensor for name, tensor in tensors.items()})
    assert main(["reshard", "-q", run, f"{run}2", "--world-size", "3", "--strategy", "zero3"]) == 0
    assert main(["diff", "-q", run, f"{run}2"]) == 0
    assert main(["export", "-q", f"{run}2", hf]) == 0
    assert main(["export", "-q", f"{run}2", dcp, "--format", "dcp"]) == 0
    theirs = load_file(tmp_path / "hf" / "model.safetensors")
    assert {name: raw(t) for name, t in theirs.items()} == {n: raw(t) for n, t in tensors.items()}
    save_file(tensors, tmp_path / "w.safetensors")
    for kind, source in (("hf", hf), ("dcp", dcp), ("hf", str(tmp_path / "w.safetensors"))):
        target = tmp_path / f"back-{kind}-{Path(source).name}"
        assert main(["import", "-q", source, str(target), "--format", kind]) == 0
        into = {f"model/{name}": torch.zeros_like(t) for name, t in tensors.items()}
        loaded = checkpoint.load(target, into=into if kind == "hf" else None)
        got = {name.removeprefix("model/"): raw(tensor) for name, tensor in loaded.items()}
        assert got == {name: raw(tensor) for name, tensor in tensors.items()}


def test_what_a_file_cannot_tell_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^w cannot be kept in a checkpoint: a scalar of F4"):
        checkpoint.save(tmp_path / "run", {"w": torch.empty((), dtype=PAIRS)})
    assert not (tmp_path / "run").exists()


def test_an_array_of_them_is_none_and_all_are_finite() -> None:
    assert all_finite(torch.empty(3, dtype=PAIRS))
    assert not all_finite(torch.full((1,), 255, dtype=torch.uint8).view(POWERS))


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_exported_config_states_the_dtype_of_the_weights(
    tmp_path: Path, capsys: Output, key: str
) -> None:
    config = tmp_path / "config.json"
    parts = {"text_config": {key: "float32"}, "quantization_config": {key: "float32"}}
    config.write_text(json.dumps({"a": 1, key: "torch.float32", **parts, "z": 2}))
    run = str(tmp_path / "run")
    checkpoint.save(run, {"model/w": torch.ones(2), "model/n": torch.ones(9, dtype=torch.int8)})
    args = ["--dtype", "bf16", "--config", str(config)]
    assert main(["export", "-q", run, str(tmp_path / "hf"), *args]) == 0
    assert (
        f"config.json: {key} is bfloat16, as the weights; it was torch.float32"
        in capsys.readouterr().out
    )
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert written == {
        "a": 1,
        key: "bfloat16",
        "text_config": {key: "bfloat16"},
        "quantization_config": {key: "float32"},
        "z": 2,
    }
    assert [*written] == ["a", key, "text_config", "quantization_config", "z"]


def test_a_config_stays_as_it_is_unless_it_is_wrong() -> None:
    mixed = [TensorSpec("F32", (9,)), TensorSpec("BF16", (5,)), TensorSpec("F8_E4M3", (99,))]
    for text in ('{ "torch_dtype":"float32"}', '{"b" :1}', '{"dtype": null}', "[]"):
        assert with_dtype(text.encode(), mixed) == (text.encode(), ())
    data = b'{"dtype": "float16", "text_config": {"dtype": "bfloat16"}}'
    config, lines = with_dtype(data, mixed)
    expected = {"dtype": "float32", "text_config": {"dtype": "bfloat16"}}
    assert json.loads(config) == expected and len(lines) == 1
    assert with_dtype(data, [TensorSpec("I8", (9,))]) == (data, ())
