"""Directories with the names of Megatron-core, which torch's own writer makes here."""

from __future__ import annotations

import argparse
import io
import json
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.metadata import Metadata

from elasticzero.checkpoint.api import load
from elasticzero.checkpoint.cli.main import main
from elasticzero.checkpoint.convert.any_format import open_any
from elasticzero.checkpoint.convert.import_plan import ImportOptions
from elasticzero.checkpoint.convert.pickled.contents import name_contents
from elasticzero.checkpoint.convert.pickled.megatron import open_megatron
from elasticzero.errors import CheckpointDamaged, UserError

pickled: Any = torch.serialization.pickle  # what torch writes `.metadata` with
MODEL = {
    "embedding.weight": torch.arange(6.0).view(3, 2).bfloat16(),
    "decoder.layers.mlp.weight": torch.arange(12.0).view(2, 3, 2).bfloat16(),
    "decoder.final_norm.bias": torch.ones(2),
}
COMMON = {
    "iteration": 7,
    "optimizer": {"optimizer": {"state": {"common_step": 5}, "param_groups": [{"lr": 0.1}]}},
    "args": argparse.Namespace(lr=0.1),
    "opt_param_scheduler": {"max_lr": 0.1, "num_steps": 64},
}


class BytesAsTheyAre(torch_dcp.DefaultSavePlanner):
    def transform_object(self, write_item: Any, object: Any) -> Any:
        return object


def packed(value: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save([value], buffer)
    return buffer


def by_megatron(path: Path, state: dict[str, Any], common: Any = COMMON) -> Path:
    planner = BytesAsTheyAre(flatten_state_dict=False)
    with warnings.catch_warnings(action="ignore"):
        torch_dcp.save(state, checkpoint_id=path, planner=planner, no_dist=True)
    if common is not None:
        torch.save(common, path / "common.pt")
    about = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (path / "metadata.json").write_text(json.dumps(about))
    return path


def with_state(model: dict[str, torch.Tensor], **kinds: float) -> dict[str, Any]:
    """The model, and state of an optimizer: its tensors in 32 bits times a number."""
    state: dict[str, Any] = dict(model)
    for kind, times in kinds.items():
        for name, tensor in model.items():
            state[f"optimizer.state.{kind}.{name}"] = tensor.float() * times
    return state


def test_layers_get_names_and_the_optimizer_its_state(tmp_path: Path) -> None:
    kinds = {"exp_avg": 2.0, "exp_avg_sq": 3.0, "fp32_param": 1.5}
    state = with_state(MODEL, **kinds) | {"a._extra_state/shard_0_1": packed(b"")}
    source = by_megatron(tmp_path / "iter", state)
    order = ["import", str(source), str(tmp_path / "run"), "--format", "megatron"]
    assert main(order) == 0
    back: Any = load(tmp_path / "run")
    layers = [f"decoder.layers.{layer}.mlp.weight" for layer in range(2)]
    assert back["model"].keys() == {"embedding.weight", "decoder.final_norm.bias", *layers}
    for layer, name in enumerate(layers):
        whole = MODEL["decoder.layers.mlp.weight"][layer].float()
        assert torch.equal(back["model"][name], whole * 1.5)
        entries = back["optimizer"]["state"][name]
        assert torch.equal(entries["exp_avg"], whole * 2)
        assert torch.equal(entries["exp_avg_sq"], whole * 3)
        assert entries["step"] == 5
    assert torch.equal(back["model"]["embedding.weight"], MODEL["embedding.weight"].float() * 1.5)
    assert back["iteration"] == 7
    assert back["opt_param_scheduler"] == COMMON["opt_param_scheduler"]
    (step,) = [entry.name for entry in (tmp_path / "run").iterdir()]
    assert step.startswith("step-000000000007")


def test_what_is_left_out_is_listed(tmp_path: Path) -> None:
    state = with_state(MODEL, fp32_param=1.0) | {
        "decoder.layers.0.mlp._extra_state/shard_0_2": packed(b"scales"),
        "rng_state/shard_0_1": packed([1]),
    }
    saved = open_megatron(str(by_megatron(tmp_path / "iter", state)))
    assert {left.path for left in saved.left_out} == {
        "model/embedding.weight",
        "model/decoder.layers.0.mlp.weight",
        "model/decoder.layers.1.mlp.weight",
        "decoder.layers.0.mlp._extra_state/shard_0_2",
        "rng_state/shard_0_1",
        "args",
        "optimizer",
    }


def test_common_values_in_an_item_of_their_own(tmp_path: Path) -> None:
    state = dict(MODEL) | {"common_state/shard_0_1": packed(COMMON)}
    saved = open_megatron(str(by_megatron(tmp_path / "iter", state, common=None)))
    assert (saved.step, saved.tree["opt_param_scheduler"]["num_steps"]) == (7, 64)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.exp_avg",
            "distributed optimizer's buckets",
        ),
        ("chained_1.optimizer.distributed.dp_group_idx_0.param", "distributed optimizer's buckets"),
        ("optimizer.state.exp_avg.embedding.weight", "another shape than its parameter"),
    ],
)
def test_an_optimizer_that_only_megatron_takes_apart(
    tmp_path: Path, name: str, reason: str
) -> None:
    source = str(by_megatron(tmp_path / "iter", dict(MODEL) | {name: torch.ones(6)}))
    with pytest.raises(UserError, match=f"{reason}.*--dist-ckpt-optim-fully-reshardable"):
        open_megatron(source)
    plan = name_contents(open_megatron(source, model_only=True), ImportOptions(model_only=True))
    assert len(plan.foreign.specs) == 4
    assert name in {left.path for left in plan.left_out}


def test_a_model_is_loaded_without_naming_the_format(tmp_path: Path) -> None:
    source = str(by_megatron(tmp_path / "iter", with_state(MODEL, exp_avg=2.0)))
    model = open_any(source, model_only=True)(ImportOptions(model_only=True)).foreign.specs
    assert model.keys() == {
        "model/embedding.weight",
        "model/decoder.layers.0.mlp.weight",
        "model/decoder.layers.1.mlp.weight",
        "model/decoder.final_norm.bias",
    }
    whole = open_any(source, model_only=False)(ImportOptions()).foreign.specs
    assert "optimizer/decoder.layers.1.mlp.weight/exp_avg" in whole


def test_directories_of_other_kinds(tmp_path: Path) -> None:
    source = by_megatron(tmp_path / "iter", dict(MODEL))
    assert main(["import", str(source), str(tmp_path / "run"), "--format", "dcp"]) == 64
    (source / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(UserError, match="format zarr, and torch_dist is read"):
        open_megatron(str(source))
    (source / "metadata.json").unlink()
    with pytest.raises(UserError, match="does not say that Megatron-core wrote it"):
        open_megatron(str(source))


def test_metadata_of_a_class_of_megatrons_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Release 0.15 pickled one."""
    source = by_megatron(tmp_path / "iter", dict(MODEL))
    name = "megatron.core.dist_checkpointing.strategies.torch"
    kind = type("MCoreMetadata", (Metadata,), {"__module__": name})
    module: Any = ModuleType(name)
    module.MCoreMetadata = kind
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "megatron", ModuleType("megatron"))
    metadata = torch_dcp.FileSystemReader(source).read_metadata()
    (source / ".metadata").write_bytes(pickled.dumps(kind(**vars(metadata))))
    assert len(open_megatron(str(source)).tree["model"]) == 4


def test_common_values_that_make_no_sense(tmp_path: Path) -> None:
    source = by_megatron(tmp_path / "iter", dict(MODEL), common=[1])
    with pytest.raises(CheckpointDamaged, match="common state is no dict"):
        open_megatron(str(source))
