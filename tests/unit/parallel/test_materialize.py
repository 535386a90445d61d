"""Models that were built on the meta device get memory and values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from elasticzero.errors import UserError
from elasticzero.parallel import Setting, create
from elasticzero.parallel.materialize import Materializer
from elasticzero.state.model import NamedModel

CPU = torch.device("cpu")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.norm(self.first(x)))
        return output


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(2))


def on_meta(kind: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return kind()


def test_values_are_those_of_the_modules_themselves() -> None:
    model = on_meta(Tied)
    before = dict(model.named_parameters())
    torch.manual_seed(3)
    meta = Materializer(model, CPU)
    assert meta.is_needed
    meta.materialize(model)
    assert not meta.is_needed
    assert dict(model.named_parameters()).keys() == before.keys()
    assert all(model.get_parameter(name) is before[name] for name in before)
    assert model.get_parameter("last.weight") is model.get_parameter("first.weight")
    assert model.get_buffer("norm.running_var").tolist() == [1.0, 1.0, 1.0]
    assert all(bool(p.isfinite().all()) and not p.is_meta for p in model.parameters())


def test_stand_ins_have_the_shape_and_no_memory() -> None:
    model = nn.Sequential(on_meta(Tied), nn.Linear(3, 3))
    meta = Materializer(model, CPU)
    meta.put_stand_ins(model)
    weight = model.get_parameter("0.first.weight")
    assert (tuple(weight.shape), weight.device, weight.requires_grad) == ((3, 3), CPU, True)
    assert weight.untyped_storage().nbytes() == 4
    kept = model.get_parameter("1.weight").clone()
    meta.materialize(model[0])
    meta.materialize(model)
    assert weight.untyped_storage().nbytes() == 36
    assert torch.equal(model.get_parameter("1.weight"), kept)


def test_a_module_that_cannot_initialise_itself_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), on_meta(Scale))
    with pytest.raises(
        UserError, match=r"module '1', a Scale, .* \(by\) and no reset_parameters\(\)"
    ):
        Materializer(model, CPU)


def test_state_that_is_made_at_once_fits_rows_of_a_model_from_meta() -> None:
    """Adagrad makes its state for stand-ins, whose parameters have no memory when it is cut."""
    model = on_meta(Tied)
    meta = Materializer(model, CPU)
    meta.put_stand_ins(model)
    strategy = create(
        "zero3",
        Setting(
            model=model,
            named=NamedModel(model),
            factory=lambda params: {
                "adagrad": torch.optim.Adagrad(params[:1], initial_accumulator_value=0.5),
                "sgd": torch.optim.SGD(params[1:], momentum=0.9),
            },
            device=CPU,
            rank=0,
            world_size=1,
            materialize=meta.materialize,
        ),
    )
    sums = strategy.rank_state().held["optimizer/first.weight/sum"].tensor
    assert sums.tolist() == [0.5] * 9
