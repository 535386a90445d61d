"""Training state by name: what is encoded, copied at a boundary, refused, and put back."""

from __future__ import annotations

import math
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from elasticzero import checkpoint as ez_checkpoint
from elasticzero.checkpoint.format.names import step_directory
from elasticzero.checkpoint.io.reader import open_step
from elasticzero.checkpoint.io.writer import write_checkpoint
from elasticzero.checkpoint.storage.disk import DiskDirectory, DiskStorage
from elasticzero.data.position import DataPosition, MicroBatch
from elasticzero.errors import CheckpointMismatch, UserError
from elasticzero.nested import tensor_names
from elasticzero.parallel import Setting, Strategy, create
from elasticzero.snapshots import manifest_draft, restore
from elasticzero.spans import Span
from elasticzero.state.auxiliary import AuxiliaryState, decode_state, encode_state
from elasticzero.state.model import NamedModel, all_finite
from elasticzero.state.rng import RngState, preserve_rng
from tests.support.groups import end_groups

CPU = torch.device("cpu")
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=12,
)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.second = nn.Linear(5, 4)
        self.second.weight = self.first.weight
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.first(x) + self.second(x) + self.mean
        return output


class Transposed(Small):
    """Its weight lies by columns, as that of a channels_last convolution lies by channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first.weight.data = self.first.weight.data.t().contiguous().t()


def build(
    name: str,
    factory: Any = torch.optim.AdamW,
    dtype: torch.dtype = torch.float32,
    kind: type[Small] | None = None,
) -> tuple[Strategy, AuxiliaryState]:
    model = (kind or Small)().to(dtype)
    named = NamedModel(model)
    setting = Setting(model=model, named=named, factory=factory, device=CPU, rank=0, world_size=1)
    strategy = create(name, setting)
    small = AuxiliaryState(
        CPU,
        named=named,
        groups=strategy.optimizers.groups,
    )
    return strategy, small


def train(strategy: Strategy, dtype: torch.dtype = torch.float32) -> None:
    for step in range(3):
        strategy.expect(MicroBatch(positions=Span(0, 1), weight=1, last=True))
        strategy.backward(strategy.model(torch.ones(2, 5, dtype=dtype)).square().mean(), 1.0)
        strategy.finish(1.0, None if step else 1.0)
        strategy.apply()


def save(folder: Path, strategy: Strategy, small: AuxiliaryState, name: str) -> Path:
    author = manifest_draft.WriterInfo(rank=0, world_size=1, generation=1, token="t", strategy=name)
    draft, pieces = manifest_draft.draft(
        strategy.rank_state(), small.capture(3, DataPosition()), author
    )
    write_checkpoint(DiskDirectory(folder), draft, 0, pieces)
    return folder / step_directory(3)


@given(plain)
def test_what_is_encoded_comes_back_the_same(value: Any) -> None:
    tensors: dict[str, Tensor] = {}
    decoded = decode_state(encode_state(value, "x", tensors), tensors)
    assert repr(decoded) == repr(value)


def test_tensors_inside_are_copied_and_named() -> None:
    moving = torch.arange(3.0)
    value = {"a": [moving, (np.arange(2), np.float32(1.5))], 7: math.inf}
    tensors: dict[str, Tensor] = {}
    json = encode_state(value, "tracked/x", tensors)
    moving += 1
    assert sorted(tensors) == sorted(tensor_names(json)) == ["tracked/x/a/0", "tracked/x/a/1/0"]
    decoded = decode_state(json, tensors)
    assert decoded["a"][0].tolist() == [0.0, 1.0, 2.0]
    assert (
        decoded["a"][1][0].tolist() == [0, 1]
        and decoded["a"][1][1] == 1.5
        and decoded[7] == math.inf
    )


def test_what_cannot_be_encoded_is_named() -> None:
    with pytest.raises(UserError, match=r"'tracked/x/hooks/1' is a object"):
        encode_state({"hooks": [1, object()]}, "tracked/x", {})


def test_rows_of_a_parameter_are_no_state_of_an_object() -> None:
    """An average of parameters under zero3 is made of DTensors: they ended in torch's error where
    they do not divide evenly, and where they do each rank wrote its own rows as the whole."""
    end_groups()  # a test of zero3 on one rank may have made one
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        rows = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)], src_data_rank=None)
        with pytest.raises(UserError, match=r"'tracked/ema/0' is a DTensor of torch"):
            encode_state([rows], "tracked/ema", {})
    finally:
        end_groups()


def test_generators_go_on_where_they_were() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    random.gauss(0, 1)
    np.random.standard_normal()
    state = RngState.from_tensors(RngState.capture(CPU).tensors())

    def draw() -> list[float]:
        return [torch.rand(()).item(), random.gauss(0, 1), random.random(), np.random.normal()]

    first = draw()
    state.apply(CPU)
    assert draw() == first
    with preserve_rng(CPU):
        draw()
        state.apply(CPU)
    assert draw() != first


def test_generator_state_has_a_constant_size() -> None:
    random.seed(1)
    before = {kind: t.numel() for kind, t in RngState.capture(CPU).tensors().items()}
    random.gauss(0, 1)
    np.random.standard_normal(3)
    torch.rand(7)
    assert before == {kind: t.numel() for kind, t in RngState.capture(CPU).tensors().items()}


def test_names_are_the_models_own_and_a_tied_tensor_has_one() -> None:
    named = NamedModel(Small())
    assert list(named.parameters) == ["first.weight", "first.bias", "second.bias"]
    assert named.aliases == {"second.weight": "first.weight"}
    assert list(named.buffers.saved()) == ["mean"]


def test_a_boundary_copy_does_not_move_with_the_model() -> None:
    strategy, small = build("ddp")
    small.track("scheduler", torch.optim.lr_scheduler.StepLR(strategy.optimizers.as_made, 1))
    copy = small.capture(4, DataPosition(epoch=1))
    small.buffers.now()["mean"] += 1
    strategy.optimizers.as_made.param_groups[0]["lr"] = 9.0
    torch.rand(1)
    assert copy.buffers.saved["mean"].sum() == 0
    assert copy.json["groups"][0]["options"]["lr"] == 1e-3
    assert copy.json["groups"][0]["options"]["betas"] == {"$tuple": [0.9, 0.999]}
    assert not torch.equal(copy.rng.torch_cpu, torch.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
def test_numbers_of_8_bits_are_finite_or_not(dtype: torch.dtype) -> None:
    values = torch.tensor([-448.0, 0.0, 1.5])
    assert all_finite(values.to(dtype)) and all_finite(torch.full((2,), 255, dtype=torch.uint8))
    assert not all_finite(torch.tensor([1.0, math.nan]).to(dtype))


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2"])
def test_16_bit_parameters_have_32_bit_partitioned_masters(tmp_path: Path, name: str) -> None:
    strategy, small = build(name, dtype=torch.bfloat16)
    train(strategy, torch.bfloat16)
    step = save(tmp_path, strategy, small, name)
    whole = ez_checkpoint.load(step)
    masters = {n: t for n, t in whole.items() if n.endswith("/master")}
    assert (name == "ddp") == (not masters)
    for full, master in masters.items():
        parameter = whole["model/" + full.split("/")[1]]
        assert master.dtype == torch.float32 and torch.equal(master.bfloat16(), parameter)
        assert not torch.equal(master, parameter.float()) or not master.any()
    for other in ("ddp", "zero1", "zero2"):
        again, small_again = build(other, dtype=torch.bfloat16)
        restore.restore_state(open_step(DiskStorage(step)), again, small_again, 0)
        share = again.rank_state()
        same = [n for n in whole if n.startswith("model/") and n != "model/mean"]
        if (other == "ddp") == (name == "ddp"):
            same += [n for n in whole if n.startswith("optimizer/")]
        for full in same:
            assert torch.equal(share.held[full].tensor.reshape(-1), whole[full].reshape(-1)), full
        train(again, torch.bfloat16)


class WholeNorm(torch.optim.SGD):
    """Not elementwise: it scales by the norm of the whole parameter, or of all of them."""

    together = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            norms = [parameter.detach().norm() for parameter in group["params"]]
            for parameter, norm in zip(group["params"], norms, strict=True):
                if parameter.grad is not None:
                    factor = torch.stack(norms).norm() if self.together else norm
                    parameter.data -= parameter.grad * factor


class AllNorms(WholeNorm):
    together = True


class OddState(WholeNorm):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["last"] = torch.zeros(parameter.numel() + 4)


def two(parameters: list[nn.Parameter]) -> dict[str, torch.optim.Optimizer]:
    some, others = parameters[:2], parameters[1:]
    return {"a": torch.optim.SGD(some), "b": torch.optim.Adam(others)}


def hooked_with_frozen(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    parameters[0].requires_grad_(False)
    made = torch.optim.SGD(parameters)
    made.register_step_post_hook(lambda *_: None)
    return made


def test_a_group_without_parameters_keeps_its_options() -> None:
    def factory(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [{"params": parameters}, {"params": [], "lr": 0.5}]
        return torch.optim.SGD(groups, lr=0.1)

    strategy, small = build("zero1", factory)
    strategy.optimizers.groups[1].options["lr"] = 0.25
    copy = small.capture(3, DataPosition())
    again, small_again = build("ddp", factory)
    small_again.apply(copy.json, copy.tensors)
    assert [group.options["lr"] for group in again.optimizers.groups] == [0.1, 0.25]


def test_a_group_that_has_lost_a_parameter_is_refused() -> None:
    strategy, _ = build("ddp")
    strategy.optimizers.groups[0].options["params"].pop()
    with pytest.raises(UserError, match="a group of AdamW has 2 parameters, and had 3"):
        train(strategy)


@pytest.mark.parametrize(
    ("name", "factory", "complaint"),
    [
        ("zero1", lambda ps: AllNorms(ps, lr=0.1), "AllNorms treats its parameters together"),
        ("zero1", lambda ps: OddState(ps, lr=0.1), "OddState keeps 'last', whose size does not"),
        ("zero1", lambda ps: torch.optim.LBFGS(ps), "LBFGS cannot work on parts of a model"),
        ("zero1", lambda ps: torch.optim.SparseAdam(ps), "takes sparse gradients only"),
        ("ddp", lambda ps: torch.optim.SparseAdam(ps), "takes sparse gradients only"),
        ("ddp", lambda ps: torch.optim.SGD([nn.Parameter(torch.ones(2))]), "not the model's"),
        ("ddp", two, "'first.bias' is in two optimizers, 'a' and 'b'"),
        ("zero1", hooked_with_frozen, "SGD has a hook on its step, and frozen parameters"),
    ],
)
def test_an_optimizer_that_cannot_be_partitioned_is_refused(
    name: str, factory: Any, complaint: str
) -> None:
    with pytest.raises(UserError, match=complaint):
        build(name, factory)


@pytest.mark.parametrize(
    "factory",
    [
        torch.optim.AdamW,
        torch.optim.RMSprop,
        torch.optim.NAdam,
        torch.optim.RAdam,
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
        lambda ps: torch.optim.AdamW(ps, fused=True),
        lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.1), foreach=False),
        lambda ps: torch.optim.Adagrad(ps, lr=0.1, initial_accumulator_value=0.3),
        torch.optim.Adafactor,
        lambda ps: {"a": torch.optim.Adafactor(ps[:1]), "b": torch.optim.Adagrad(ps[1:])},
    ],
)
@pytest.mark.parametrize(("first", "second"), [("ddp", "zero2"), ("zero1", "ddp")])
def test_usual_optimizers_change_strategy(
    tmp_path: Path, factory: Any, first: str, second: str
) -> None:
    strategy, small = build(first, factory)
    train(strategy)
    step = save(tmp_path, strategy, small, first)
    again, small_again = build(second, factory)
    restore.restore_state(open_step(DiskStorage(step)), again, small_again, 0)
    train(strategy)
    train(again)
    a, b = strategy.rank_state(), again.rank_state()
    assert set(a.specs) == set(b.specs)
    for name in a.specs:
        assert a.specs[name] == b.specs[name]
        left, right = a.held[name].tensor.reshape(-1), b.held[name].tensor.reshape(-1)
        assert torch.allclose(left, right, atol=1e-6), name


def test_another_optimizers_state_is_refused(tmp_path: Path) -> None:
    """Without a momentum it was "'step' with shape (), which cannot be partitioned"."""
    strategy, small = build("ddp")
    train(strategy)
    step = save(tmp_path, strategy, small, "ddp")
    for name in ("ddp", "zero1"):
        for momentum, kept in ((0.9, "keeps momentum_buffer"), (0.0, "keeps nothing")):
            again, small_again = build(name, partial(torch.optim.SGD, lr=0.1, momentum=momentum))
            with pytest.raises(CheckpointMismatch, match="written with another optimizer") as why:
                restore.restore_state(open_step(DiskStorage(step)), again, small_again, 0)
            assert kept in str(why.value)
            assert "use the optimizer that wrote it" in str(why.value)


def test_what_is_tracked_must_be_what_was_tracked(tmp_path: Path) -> None:
    strategy, small = build("ddp")
    small.track("scheduler", torch.optim.lr_scheduler.StepLR(strategy.optimizers.as_made, 1))
    step = save(tmp_path, strategy, small, "ddp")
    again, small_again = build("ddp")
    with pytest.raises(CheckpointMismatch, match="has state for 'scheduler'"):
        restore.restore_state(open_step(DiskStorage(step)), again, small_again, 0)
    small_again.track("scheduler", torch.optim.lr_scheduler.StepLR(again.optimizers.as_made, 1))
    small_again.track("average", nn.Linear(2, 2))
    with pytest.raises(CheckpointMismatch, match="has no state for 'average'"):
        restore.restore_state(open_step(DiskStorage(step)), again, small_again, 0)
