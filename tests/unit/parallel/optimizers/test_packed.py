"""State that an optimizer packs: it is stored by its inner tensors, and goes between strategies."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elasticzero import checkpoint as ez_checkpoint
from elasticzero.checkpoint.io.reader import open_step
from elasticzero.checkpoint.storage.disk import DiskStorage
from elasticzero.errors import CheckpointMismatch, UserError
from elasticzero.options.settings import TrainingSettings
from elasticzero.parallel import Setting, create
from elasticzero.parallel.optimizers.groups import Dealt, Optimizers, open_optimizers
from elasticzero.parallel.optimizers.packed import PackedEntry, is_packed
from elasticzero.parallel.optimizers.state import stored_state
from elasticzero.snapshots import restore
from elasticzero.state.model import NamedModel
from tests.support.packing import Blocks, LargePacking, Packing
from tests.unit.state.test_state import CPU, Small, build, save, train


def opened(kind: Any, division: Dealt, model: nn.Module | None = None) -> Optimizers:
    model = model or Small()
    return open_optimizers(kind(list(model.parameters())), NamedModel(model), division)


def test_a_packed_entry_is_taken_apart_and_put_together() -> None:
    values = torch.linspace(-1, 1, 32).view(4, 8)
    inner = Blocks.of(torch.arange(8.0), 2, most=50)
    blocks = Blocks.of(values, 4)
    blocks.scale = inner  # packed twice
    state = stored_state({"step": 3, "m": blocks, "nothing": None})
    assert list(state) == ["step", "m.codes", "m.scale.codes", "m.scale.scale"]
    assert all(type(tensor) is Tensor for tensor in state.values())
    again = PackedEntry("m", blocks).put_together(state)
    assert is_packed(again) and isinstance(again, Blocks) and isinstance(again.scale, Blocks)
    assert torch.equal(again.codes, blocks.codes) and again.most == 100
    assert torch.equal(again.scale.values(), inner.values()) and again.scale.most == 50


def test_what_is_kept_is_known_for_each_shape() -> None:
    schema = opened(LargePacking, "elements").schema("first.weight")
    assert list(schema) == ["steps", "momentum.codes", "momentum.scale"]
    assert schema["momentum.codes"].dtype == torch.int8
    assert [entry.shape((4, 5)) for entry in schema.values()][1:] == [(4, 5), (5,)]
    assert {entry.device for entry in schema.values()} == {CPU}
    for name in ("first.bias", "second.bias"):
        assert list(opened(LargePacking, "elements").schema(name)) == ["steps", "momentum"]


def test_a_shape_larger_than_the_memory_takes_none() -> None:
    model = nn.Linear(2, 2)
    huge = nn.Parameter(torch.empty(1 << 21, 1 << 21, device="meta"))
    model.register_parameter("huge", huge)
    made = LargePacking(model.parameters())
    schema = open_optimizers(made, NamedModel(model), "elements").schema("huge")
    assert schema["momentum.scale"].size == (1 << 40,)


@pytest.mark.parametrize("kind", [Packing, LargePacking])
def test_a_packing_optimizer_gets_whole_parameters(kind: Any) -> None:
    for group in opened(kind, "elements").groups:
        assert group.nature.works_on == "parameters" and group.nature.packs
    with pytest.raises(UserError, match=r"keeps packed state.* zero3 divides each parameter by"):
        opened(kind, "rows")
    assert opened(torch.optim.AdamW, "elements").groups[0].nature.works_on == "elements"


def fixed_order(kind: Any) -> Any:
    """zero1 under --deterministic, of one rank."""
    model = Small()
    named = NamedModel(model)
    fields: dict[str, Any] = {"model": model, "named": named, "factory": kind, "device": CPU}
    options = TrainingSettings(deterministic=True)
    return create("zero1", Setting(rank=0, world_size=1, options=options, **fields))


@pytest.mark.parametrize("kind", [Packing, LargePacking])
@pytest.mark.parametrize(
    ("first", "second"), [("ddp", "zero2"), ("zero1", "ddp"), ("zero2", "zero1"), ("ddp", "ddp")]
)
def test_packed_state_changes_strategy_bit_by_bit(
    tmp_path: Path, kind: Any, first: str, second: str
) -> None:
    strategy, small = build(first, kind)
    train(strategy)
    step = save(tmp_path, strategy, small, first)
    stored = {n: t for n, t in ez_checkpoint.load(step).items() if n.startswith("optimizer/")}
    packed = [name for name in stored if name.endswith("/momentum.codes")]
    assert len(packed) == (1 if kind is LargePacking else 3)
    again, small_again = build(second, kind)
    restore.restore_state(open_step(DiskStorage(step)), again, small_again, 0)
    state = again.optimizers.group_of["first.weight"].optimizer.state
    assert sum(isinstance(of["momentum"], Blocks) for of in state.values()) == len(packed)
    for _ in range(2):
        a, b = strategy.rank_state(), again.rank_state()
        assert a.specs == b.specs
        for name in a.specs:
            left, right = a.held[name].tensor, b.held[name].tensor
            assert torch.equal(left.reshape(-1), right.reshape(-1)), name
        train(strategy)
        train(again)


def test_packed_state_of_the_fixed_order_is_as_of_ddp(tmp_path: Path) -> None:
    strategy, small = build("ddp", LargePacking)
    train(strategy)
    step = save(tmp_path, strategy, small, "ddp")
    again = fixed_order(LargePacking)
    restore.restore_state(open_step(DiskStorage(step)), again, build("ddp", LargePacking)[1], 0)
    held = again.rank_state().held
    for name, tensor in ez_checkpoint.load(step).items():
        if name.startswith("optimizer/"):
            assert torch.equal(held[name].tensor.reshape(-1), tensor.reshape(-1)), name


@pytest.mark.parametrize("name", ["ddp", "zero1"])
def test_state_packed_in_another_way_is_refused(tmp_path: Path, name: str) -> None:
    strategy, small = build("zero1", LargePacking)
    train(strategy)
    step = save(tmp_path, strategy, small, "zero1")
    expected = r"'momentum.scale' of parameter 'first.weight' as \[5\] of torch.float32, .*\[10\]"
    for kind, message in (
        (partial(LargePacking, block=2), expected),
        (torch.optim.SGD, "written with another optimizer"),
    ):
        again, small_again = build(name, kind)
        with pytest.raises(CheckpointMismatch, match=message):
            restore.restore_state(open_step(DiskStorage(step)), again, small_again, 0)


class NotOnMeta(Packing):
    def update(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        float(parameter.sum())
        super().update(parameter, group)


class AtOnce(Packing):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["momentum"] = Blocks.of(torch.zeros(parameter.shape), 1)


class DummiesAlone(Packing):
    def update(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        least = 1 if parameter.is_meta or parameter.shape in ((2,), (2, 3)) else 1000
        super().update(parameter, {**group, "least": least})


@pytest.mark.parametrize("division", ["nothing", "elements"])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (NotOnMeta, "NotOnMeta packs what it keeps, and cannot step a parameter of shape"),
        (AtOnce, "it packs state when it is built"),
    ],
)
def test_packed_state_of_an_unknown_form_is_refused(
    kind: Any, division: Dealt, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        opened(kind, division)


@pytest.mark.parametrize("name", ["ddp", "zero1"])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (DummiesAlone, "DummiesAlone keeps momentum, steps for parameter"),
        (
            partial(Packing, block=4, least=16),
            "Packing keeps momentum.codes, momentum.scale, steps",
        ),
    ],
)
def test_state_packed_otherwise_than_that_of_dummies_is_not_lost(
    name: str, kind: Any, message: str
) -> None:
    """It would be stored as zeros."""
    strategy, _ = build(name, kind)
    train(strategy)
    with pytest.raises(UserError, match=message):
        strategy.rank_state()
