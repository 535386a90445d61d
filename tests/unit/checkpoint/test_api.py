"""`checkpoint.save` and `load` of nested state dicts, by one process."""

from __future__ import annotations

import copy
import json
import math
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elasticzero import checkpoint
from elasticzero.checkpoint.steps.tags import set_tags
from elasticzero.checkpoint.storage.disk import DiskDirectory
from elasticzero.errors import CheckpointDamaged, CheckpointMismatch, UserError
from tests.unit.checkpoint.damage_cases import signed


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def trained() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(1)
    net = model()
    groups: list[dict[str, Any]] = [
        {"params": net[0].parameters(), "lr": torch.tensor(0.01)},
        *({"params": [p]} for p in net[2].parameters()),
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.9))
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
    return net, optimizer


def equal(a: Any, b: Any) -> bool:
    """Equal in values, types and order, NaN equal to itself."""
    if isinstance(a, torch.Tensor):
        return type(a) is type(b) and torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, np.ndarray):
        return type(a) is type(b) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))


def test_a_whole_training_state_comes_back_as_it_was(tmp_path: Path) -> None:
    net, optimizer = trained()
    saved = {
        "model": dict(net.state_dict()),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "lr": [0.1, (math.inf, -math.inf), {"loss": math.nan}],
        "array": np.arange(4).reshape(2, 2),
        "number": np.float64(2.5).item(),
        "names": {1: "one", ("a", 2): None, "$x": True, "": -1},
    }
    checkpoint.save(tmp_path, saved, step=4)
    loaded = checkpoint.load(tmp_path)
    assert equal(loaded, saved)
    other, again = trained()
    nn.init.zeros_(other.get_parameter("0.weight"))
    other.load_state_dict(loaded["model"])
    again.load_state_dict(loaded["optimizer"])
    for thing, old in ((other, net), (again, optimizer)):
        assert equal(dict(thing.state_dict()), dict(old.state_dict()))
    assert not torch.equal(next(iter(loaded["model"].values())), torch.zeros(4, 3))


def test_loading_into_a_fresh_script_s_objects(tmp_path: Path) -> None:
    net, optimizer = trained()
    checkpoint.save(
        tmp_path,
        {
            "model": net.state_dict(),
            "optimizer": optimizer.state_dict(),
            "epoch": 3,
            "extra": {"big": torch.ones(9)},
        },
    )
    fresh = model()
    rest = torch.optim.AdamW(fresh.parameters())
    into: dict[str, Any] = {
        "model": fresh.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 0,
    }
    kept = into["model"]["0.weight"]
    loaded = checkpoint.load(tmp_path, into)
    assert list(loaded) == ["model", "optimizer", "epoch"] and loaded["epoch"] == 3
    assert loaded["model"]["0.weight"] is kept and torch.equal(
        fresh.get_parameter("0.weight"), net.get_parameter("0.weight")
    )
    assert fresh[1].num_batches_tracked == 2

    empty = checkpoint.load(
        tmp_path, {"optimizer": torch.optim.AdamW(fresh.parameters()).state_dict()}
    )
    assert equal(empty["optimizer"], optimizer.state_dict())
    del rest


def test_flat_checkpoints_load_into_nested_dicts_and_vice_versa(
    tmp_path: Path,
) -> None:
    flat = {"model/w": torch.ones(3), "model/b": torch.zeros(1)}
    checkpoint.save(tmp_path / "flat", flat)
    assert equal(checkpoint.load(tmp_path / "flat"), flat)
    nested = {"model": OrderedDict(w=torch.empty(3))}
    loaded = checkpoint.load(tmp_path / "flat", nested)
    assert loaded["model"]["w"] is nested["model"]["w"] and torch.equal(
        loaded["model"]["w"], torch.ones(3)
    )
    checkpoint.save(tmp_path / "nested", {"model": {"w": torch.ones(3)}, "epoch": 1})
    loaded = checkpoint.load(tmp_path / "nested", {"model/w": torch.empty(3)})
    assert equal(loaded, {"model/w": torch.ones(3)})


@pytest.mark.parametrize(
    ("into", "complaint"),
    [
        ({"epochs": 0}, "nothing under 'epochs'"),
        ({"model": {"v": torch.ones(3)}}, "model/v is missing"),
        ({"model": {"w": torch.ones(4)}}, r"model/w is F32.3., and F32.4. is expected"),
        ({"new": torch.ones(1)}, "new is missing"),
    ],
)
def test_what_the_checkpoint_does_not_have_is_named(
    tmp_path: Path, into: dict[str, Any], complaint: str
) -> None:
    checkpoint.save(tmp_path, {"model": {"w": torch.ones(3)}, "epoch": 1})
    before = copy.deepcopy(into)
    with pytest.raises(CheckpointMismatch, match=complaint):
        checkpoint.load(tmp_path, into)
    assert equal(into, before)


def test_a_url_is_a_checkpoint_directory_too() -> None:
    saved = {"model": {"w": torch.arange(6).reshape(2, 3)}, "epoch": 1}
    step = checkpoint.save("memory://standalone/run", saved, step=2)
    assert step.startswith("memory://") and step.endswith("/standalone/run/step-000000000002")
    assert equal(checkpoint.load("memory://standalone/run"), saved)
    assert equal(checkpoint.load(step), saved)


def test_what_a_killed_save_left_goes_with_the_same_save_again(tmp_path: Path) -> None:
    name = f"rank-00000-of-00001-{'ab' * 8}.safetensors"
    for step in (1, 2):
        place = tmp_path / f"step-{step:012}"
        place.mkdir()
        (place / f".{name}.123-ab12cd34.partial").write_bytes(b"x" * 100)
    checkpoint.save(tmp_path, {"a": torch.ones(3)}, step=1)
    assert len(os.listdir(tmp_path / "step-000000000001")) == 3
    assert len(os.listdir(tmp_path / "step-000000000002")) == 1, "it may be going on"


def test_the_state_stands_beside_the_nesting(tmp_path: Path) -> None:
    state = {"aliases": {"b": "a"}, "best": math.inf}
    checkpoint.save(tmp_path, {"model": {"w": torch.ones(3)}}, state=state)
    assert checkpoint.load_state(tmp_path) == state


@pytest.mark.parametrize(
    "tree",
    [
        "3",
        '{"$map":[[{"a":1},2]]}',
        '{"x":{"$tensor":"y"}}',
        '{"x":{"$tensor":{}}}',
        '{"x":{"$tuple":3}}',
        '{"x":{"$float":"four"}}',
        '{"x":{"$float":7}}',
        '{"x":{"$tuple":"ab"}}',
        '{"x":{"$tensor":"x","y":1}}',
        '{"x":{"$set":[1]}}',
        '{"$map":[["x",1],["x",2]]}',
        '{"$map":{"ab":1}}',
    ],
)
def test_nesting_that_makes_no_sense_is_damage(tmp_path: Path, tree: str) -> None:
    step = checkpoint.save(tmp_path, {"x": torch.ones(1), "n": 1})
    path = Path(step) / "manifest.json"
    value = json.loads(path.read_bytes())
    value["state"]["$tree"] = json.loads(tree)
    path.write_bytes(signed(value))
    with pytest.raises(CheckpointDamaged, match="makes no sense"):
        checkpoint.load(step)
    with pytest.raises(UserError, match=r"no good checkpoint \(1 damaged"):
        checkpoint.load(tmp_path)


def test_a_step_is_any_integer_that_can_name_a_directory(tmp_path: Path) -> None:
    numbered = torch.arange(8).numpy()[7]
    assert checkpoint.save(tmp_path, {"a": torch.ones(2)}, step=numbered).endswith("-000000000007")
    refused: list[Any] = [True, -1, 10**18, 1.5]
    for wrong in refused:
        with pytest.raises(UserError, match=f"step {wrong}"):
            checkpoint.save(tmp_path, {"a": torch.ones(2)}, step=wrong)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000000007"]


def test_a_step_is_loaded_by_its_tag(tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path, {"w": torch.full((2,), float(step))}, step=step)
    set_tags(DiskDirectory(tmp_path), 1, ["best"])
    assert checkpoint.load(tmp_path / "tags" / "best")["w"].tolist() == [1.0, 1.0]
    assert checkpoint.load(tmp_path)["w"].tolist() == [2.0, 2.0]
    checkpoint.save(tmp_path, {"w": torch.zeros(2)}, step=3)
    assert checkpoint.load_state(tmp_path / "tags" / "best.json") == {}


def test_a_load_warns_its_user_of_a_newer_step_that_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint.save(tmp_path, {"w": torch.ones(3)}, step=1)
    newest = Path(checkpoint.save(tmp_path, {"w": torch.zeros(3)}, step=2))
    next(newest.glob("*.safetensors")).unlink()
    assert equal(checkpoint.load(tmp_path), {"w": torch.ones(3)})
    [record] = caplog.records
    assert (record.name, record.levelname) == ("elasticzero.checkpoint.api", "WARNING")
    assert record.getMessage().startswith("step 2 is damaged (")
    assert record.getMessage().endswith("); step 1 is used")
