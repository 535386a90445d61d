"""Models as Hugging Face saves them come in, are trained for a step, and go out again."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from elasticzero.checkpoint.api import load
from elasticzero.checkpoint.cli.main import main
from tests.integration.training_harness import Pool
from tests.integrations.foreign_models import TOKENS, build, load_pretrained

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(300)]
LOADED = Path(__file__).with_name("training_loaded.py")


def save(model: Any, folder: Path) -> None:
    """Saves the model as its own library does, Hugging Face's in several files."""
    folder.mkdir()
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder, max_shard_size="8KB")
    else:
        save_file(model.state_dict(), folder / "model.safetensors")


def saved_tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def read_back(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a directory as the model's own library reads them."""
    if not hasattr(model, "save_pretrained"):
        return saved_tensors(folder)
    return dict(load_pretrained(model, folder).state_dict())


@pytest.mark.parametrize(
    ("name", "strategy"), [("llama", "zero3"), ("mixtral", "zero2"), ("float8", "zero1")]
)
def test_a_step_after_an_import(pool: Pool, tmp_path: Path, name: str, strategy: str) -> None:
    """Mixtral has other names in its files than in memory: its own library loads it."""
    if name != "float8" and importlib.util.find_spec("transformers") is None:
        pytest.skip("`make integrations` has transformers")
    model, hf, out = build(name), tmp_path / "hf", tmp_path / "out"
    save(model, hf)
    order = ["import", "-q", str(hf), str(tmp_path / "in"), "--format", "hf"]
    assert main(order) == 0
    theirs = saved_tensors(hf)
    back: Any = load(tmp_path / "in")
    assert back.keys() == {f"model/{n}" for n in theirs}
    assert all(torch.equal(_bits(back[f"model/{n}"]), _bits(t)) for n, t in theirs.items())

    told = {"model": name, "strategy": strategy, "load": str(hf), "steps": 1}
    if name == "mixtral":
        told = {"pretrained": told.pop("load")} | told
    told |= {"load_optimizer": False, "out": str(tmp_path / "after.pt")}
    pool.train_through(LOADED, tmp_path / "run", [(3, told)])
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    batch = torch.stack([TOKENS] * 4)
    model(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()
    order = ["export", "-q", str(tmp_path / "run"), str(out), "--format", "hf"]
    assert (
        main(
            [
                *order,
                *(["--config", str(hf / "config.json")] if (hf / "config.json").exists() else []),
            ]
        )
        == 0
    )
    exported, expected = read_back(model, out), model.state_dict()
    assert exported.keys() == expected.keys()
    for key, tensor in exported.items():
        if tensor.dtype == torch.float64:
            torch.testing.assert_close(tensor, expected[key], rtol=1e-9, atol=1e-9)
        else:
            assert torch.equal(_bits(tensor), _bits(theirs[key]))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
