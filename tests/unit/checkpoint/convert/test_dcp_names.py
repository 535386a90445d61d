"""What programs save under other keys with torch's own writer, a session goes on from."""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
)

from elasticzero.checkpoint.api import load, load_state
from elasticzero.checkpoint.cli.main import main
from elasticzero.checkpoint.convert.dcp_import import open_dcp, plan_dcp
from elasticzero.checkpoint.io.reader import open_step
from elasticzero.checkpoint.storage.urls import open_storage
from elasticzero.errors import UserError
from elasticzero.parallel import Setting, Strategy, create
from elasticzero.snapshots import restore
from elasticzero.state.auxiliary import AuxiliaryState
from elasticzero.state.model import NamedModel
from tests.unit.checkpoint.convert.test_dcp import by_torch, equal, imported

CPU = torch.device("cpu")
Output = pytest.CaptureFixture[str]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(4))


def built(
    model: nn.Module, factory: Callable[[Any], torch.optim.Optimizer]
) -> tuple[Strategy, AuxiliaryState]:
    named = NamedModel(model)
    setting = Setting(model=model, named=named, factory=factory, device=CPU, rank=0, world_size=1)
    strategy = create("ddp", setting)
    return strategy, AuxiliaryState(CPU, named=named, groups=strategy.optimizers.groups)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, betas=(0.5, 0.75))


def trained(steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Small()
    optimizer = adam(model.parameters())
    for _ in range(steps):
        sum(p.square().sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def state_of(model: nn.Module, optimizer: Any, **options: Any) -> tuple[Any, Any]:
    return get_state_dict(model, optimizer, **options)


def flattened(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """As torchtitan saves an optimizer."""
    state: Any = get_optimizer_state_dict(model, optimizer)
    flat: dict[str, Any] = {}
    for name, entries in state["state"].items():
        flat |= {f"state.{name}.{key}": value for key, value in entries.items()}
    for group in state["param_groups"]:
        for name in group["params"]:
            options = {key: value for key, value in group.items() if key != "params"}
            flat |= {f"param_groups.{name}.{key}": value for key, value in options.items()}
    return flat


def nestings(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    weights, state = state_of(model, optimizer)
    flat = flattened(model, optimizer)
    both = {"model": weights, "optim": state}
    names = [name for name, _ in model.named_parameters()]
    parts = [
        {
            "state": {name: state["state"][name] for name in chosen},
            "param_groups": [{**state["param_groups"][0], "params": chosen}],
        }
        for chosen in (names[:1], names[1:])
    ]
    return {
        "optim": both,
        "optimizer": {"model": weights, "optimizer": state},
        "optimizers": {"model": weights, "optimizers": state},
        "list": {"model": weights, "optimizers": parts},
        "dict": {"model": weights, "optim": dict(zip(("a", "b"), parts, strict=True))},
        "app": {"app": both},
        "one root of any name": {"trainer": {**both, "epoch": 3}, "other": 5},
        "state": {"state": both},
        "flat": {"model": weights, "optimizer": flat},
        "flat beside a root": {**weights, "optimizer": flat, "train_state": {"step": 5}},
        "flat in a list": {"model": weights, "optimizers": [flat]},
    }


def restored(step: Any, factory: Callable[[Any], torch.optim.Optimizer] = adam) -> Any:
    strategy, small = built(Small(), factory)
    restore.restore_state(open_step(step), strategy, small, 0)
    return strategy


def held(strategy: Any) -> dict[str, Tensor]:
    return {name: part.tensor for name, part in strategy.rank_state().held.items()}


@pytest.mark.parametrize("nesting", nestings(*trained()))
def test_a_session_goes_on_from_every_nesting(
    tmp_path: Path, nesting: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = trained()
    saved = nestings(model, optimizer)[nesting]
    step = imported(by_torch(tmp_path / "dcp", saved), tmp_path / "new")
    strategy = restored(step)
    tensors = held(strategy)
    parameters = dict(model.named_parameters())
    assert all(torch.equal(tensors[f"model/{n}"], p) for n, p in parameters.items())
    for name, parameter in parameters.items():
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(tensors[f"optimizer/{name}/{key}"], value), (name, key)
    (group,) = strategy.optimizers.groups
    assert group.options["betas"] == (0.5, 0.75)
    assert "no state of the optimizer" not in caplog.text
    assert equal(load(step.where), saved)  # the nesting is as it was


def test_what_is_lacking_is_said_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = trained()
    weights, state = state_of(model, optimizer)
    step = imported(by_torch(tmp_path / "a", {"model": weights, "mine": state}), tmp_path / "new")
    restored(step)
    assert caplog.text.count("no state of the optimizer for any parameter, of") == 1
    assert "AdamW begins anew there" in caplog.text
    caplog.clear()
    restored(step, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    assert caplog.text == ""
    del state["state"]["first.weight"]
    both = {"model": weights, "optimizer": state}
    restored(imported(by_torch(tmp_path / "b", both), tmp_path / "part"))
    assert "no state of the optimizer for 'first.weight', of 4" in caplog.text


def test_names_that_nothing_reads_are_said_and_mapped(tmp_path: Path, capsys: Output) -> None:
    model, optimizer = trained()
    weights, state = state_of(model, optimizer)
    by_torch(tmp_path / "dcp", {"net": {"g": weights}, "opt": state, "deep": {"model": weights}})
    args = ["import", "-q", "--format", "dcp", str(tmp_path / "dcp")]
    assert main([*args, str(tmp_path / "a"), "--map", "deep/model=other"]) == 0
    assert "under names that no session reads: net/g/" in capsys.readouterr().err
    maps = ["--map", "net/g=model", "--map", "opt=optimizer", "--map", "deep=spare"]
    assert main([*args, str(tmp_path / "b"), *maps, "--step", "5"]) == 0
    assert "spare/model/" in capsys.readouterr().err
    strategy = restored(open_storage(str(tmp_path / "b" / "step-000000000005")))
    assert any(name.startswith("optimizer/") for name in held(strategy))
    assert main([*args, str(tmp_path / "c"), "--map", "nett=model", "--map", "op=x"]) == 64
    assert (
        "--map nett=model, --map op=x: nothing here has this prefix; the first keys are net, opt, "
        "deep" in capsys.readouterr().err
    )
    assert not (tmp_path / "c").exists()
    assert main(["import", "-q", "--format", "hf", "x", "y", "--map", "a=b"]) == 64
    assert "--map is not for --format hf" in capsys.readouterr().err


def test_a_prefix_ends_where_a_key_or_its_part_does(tmp_path: Path) -> None:
    path = by_torch(tmp_path / "a", {"model": {"module.w": torch.ones(2), "mod": torch.ones(1)}})
    mapped = open_dcp(str(path), maps=[("model/module.", "model/"), ("model/mod", "model/n")])
    assert mapped.specs.keys() == {"model/w", "model/n"}
    lifted = open_dcp(str(path), maps=[("model", "")])
    assert lifted.specs.keys() == {"model/module.w", "model/mod"}
    with pytest.raises(UserError, match="nothing here has this prefix"):
        open_dcp(str(path), maps=[("model/modul", "x")])


class Counting(nn.Module):
    """Keeps extra state that a checkpoint can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.kept: Any = {"count": 3, "scale": torch.ones(2)}

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


def test_extra_state_comes_back_to_its_module(tmp_path: Path) -> None:
    state = dict(nn.Sequential(Counting(), Counting()).state_dict())
    for number, saved in enumerate(({"model": state}, state, {"app": {"model": state}})):
        step = imported(by_torch(tmp_path / f"{number}", saved), tmp_path / f"new{number}")
        modules = load_state(step.where)["modules"]
        assert modules["1._extra_state"]["count"] == 3
        assert modules["1._extra_state"]["scale"] == {"$tensor": "module/1._extra_state/scale"}
        again = nn.Sequential(Counting(), Counting())
        again[1].set_extra_state(None)
        strategy, small = built(again, adam)
        restore.restore_state(open_step(step), strategy, small, 0)
        assert equal(again[1].get_extra_state(), state["1._extra_state"])


@pytest.mark.parametrize("value", [b"bytes", io.BytesIO(b"as of Transformer Engine")])
def test_extra_state_of_bytes_is_refused_by_name(
    tmp_path: Path, capsys: Output, value: Any
) -> None:
    weights = {"0.weight": torch.ones(2), "0._extra_state": value}
    by_torch(tmp_path / "dcp", {"model": weights, "epoch": 3})
    args = ["import", "-q", "--format", "dcp", str(tmp_path / "dcp"), str(tmp_path / "new")]
    assert main(args) == 64
    error = capsys.readouterr().err
    assert "'model/0._extra_state'" in error and "--model-only` leaves" in error
    for advice in ("weights_only", "add_safe_globals", "torch.load"):
        assert advice not in error
    assert not (tmp_path / "new").exists()
    assert main([*args, "--model-only"]) == 0
    printed = capsys.readouterr()
    assert "left out: model/0._extra_state: --model-only leaves out the extra state" in printed.err
    assert "1 tensor" in printed.out and "2 left out" in printed.out
    assert equal(load(tmp_path / "new"), {"model": {"0.weight": torch.ones(2)}})


def _save_on_rank(rank: int, folder: str, nesting: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = Small()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = adam(model.parameters())
    for _ in range(2):
        sum(p.square().sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    options = StateDictOptions(flatten_optimizer_state_dict=nesting == "flat")
    if nesting == "flat":
        optimizer.param_groups[0].pop("betas")  # torch flattens numbers alone
    weights, state = state_of(model, optimizer, options=options)
    saved = {
        "flat": {**weights, "optimizer": state},
        "app": {"app": {"model": weights, "optim": state}},
    }
    torch_dcp.save(saved[nesting], checkpoint_id=f"{folder}/dcp")
    dist.barrier()
    os._exit(0)  # gloo of torch 2.13 sometimes aborts where its group is destroyed


@pytest.mark.slow
@pytest.mark.parametrize("nesting", ["flat", "app"])
def test_two_ranks_of_fsdp2_become_one_session(tmp_path: Path, nesting: str) -> None:
    spawn: Any = torch.multiprocessing.spawn  # type: ignore[attr-defined]
    spawn(_save_on_rank, (str(tmp_path), nesting), nprocs=2)
    step = imported(tmp_path / "dcp", tmp_path / "new")
    tensors = held(restored(step))
    model, optimizer = trained()
    for name, parameter in model.named_parameters():
        assert torch.equal(tensors[f"model/{name}"], parameter)
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(tensors[f"optimizer/{name}/{key}"], value), (name, key)


@pytest.mark.slow
def test_any_mixture_of_keys_is_read_the_same(tmp_path: Path) -> None:
    """Any top key for the optimizer, below any root or none, flattened or not, in a list or not."""
    model, optimizer = trained()
    weights, state = state_of(model, optimizer)
    expected = None
    kinds = itertools.product(
        ("optim", "optimizer", "optimizers"),
        (state, flattened(model, optimizer)),
        (lambda o: o, lambda o: [o], lambda o: {"adam": o}),
        (
            lambda s: s,
            lambda s: {"app": s},
            lambda s: {"state": s, "x": 1},
            lambda s: {**s, "y": {"z": 1}},
        ),
    )
    for number, (key, kind, several, nest) in enumerate(kinds):
        path = by_torch(tmp_path / str(number), nest({"model": weights, key: several(kind)}))
        plan = plan_dcp(str(path))
        assert plan.foreign.notes == ()
        names = {*plan.foreign.specs}, plan.foreign.state["groups"][0]["options"]
        expected = expected or names
        assert names == expected
