"""Which of a script's optimizers a global batch is for."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elasticzero.errors import UserError
from elasticzero.parallel.optimizers.groups import Optimizers, open_optimizers
from elasticzero.parallel.optimizers.state import cut_state
from elasticzero.state.model import NamedModel


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 3)
        self.b = nn.Linear(3, 1)


def several(model: Two) -> Optimizers:
    made = {name: torch.optim.SGD(model.get_submodule(name).parameters(), lr=0.1) for name in "ab"}
    return open_optimizers(made, NamedModel(model), "nothing")


def test_names_are_given_one_or_several_in_any_order() -> None:
    optimizers = several(Two())
    assert optimizers.named(None) is None
    assert optimizers.named("b") == ("b",)
    assert optimizers.named(["b", "a", "b"]) == ("a", "b")


@pytest.mark.parametrize(
    ("only", "message"),
    [("c", "only= names 'c'; the script's optimizers are 'a', 'b'"), ([], "names no optimizer")],
)
def test_names_of_no_optimizer_are_refused(only: Any, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        several(Two()).named(only)


def test_an_optimizer_without_a_name_cannot_be_named() -> None:
    model = Two()
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizers = open_optimizers(made, NamedModel(model), "nothing")
    with pytest.raises(UserError, match="let it return a dict"):
        optimizers.named("a")


def test_gradients_are_computed_for_what_the_named_optimizers_train() -> None:
    model = Two()
    optimizers, named = several(model), NamedModel(model).parameters
    assert optimizers.begin_turn(None, named) is None and list(optimizers.stepped) == ["a", "b"]
    model.b.bias.requires_grad_(False)
    assert optimizers.begin_turn(("b",), named) == [model.b.weight]
    assert list(optimizers.stepped) == ["b"]
    optimizers.check_used(["b.weight"])
    with pytest.raises(UserError, match="a rank has a gradient of 'a"):
        optimizers.check_used(["b.weight", "a.bias"])
    model.b.weight.requires_grad_(False)
    with pytest.raises(UserError, match="no parameter of the optimizer 'b' needs a gradient"):
        optimizers.begin_turn(("b",), named)


def test_packed_state_of_plain_tensors_is_refused_before_a_step() -> None:
    model = nn.Linear(2, 2)
    kind = type("AdamW8bit", (torch.optim.AdamW,), {"__module__": "bitsandbytes.optim.adamw"})
    subclass = type("Own", (kind,), {})
    for optimizer_type in (kind, subclass):
        made = optimizer_type(model.parameters())
        with pytest.raises(
            UserError, match=f"{optimizer_type.__name__} of bitsandbytes keeps packed state"
        ):
            open_optimizers(made, NamedModel(model), "elements")
        open_optimizers(made, NamedModel(model), "nothing")


@pytest.mark.parametrize("division", ["nothing", "elements", "rows"])
def test_a_scheduler_on_the_optimizer_hides_nothing_of_what_it_keeps(division: Any) -> None:
    """A scheduler wraps the optimizer's step, which must not be what the dummies are stepped by."""
    schemas = []
    for scheduled in (False, True):
        model = nn.Linear(4, 3)
        made = torch.optim.AdamW(model.parameters(), lr=0.1)
        if scheduled:
            torch.optim.lr_scheduler.OneCycleLR(made, 0.1, total_steps=9)
        before = model.weight.detach().clone()
        schemas.append(open_optimizers(made, NamedModel(model), division).schema("weight"))
        assert torch.equal(model.weight, before) and not made.state
    assert schemas[0] == schemas[1] and set(schemas[1]) == {"step", "exp_avg", "exp_avg_sq"}


class Late(torch.optim.SGD):
    """Keeps something from its third step on."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["count"] = state.get("count", 0) + 1
            if state["count"] > 2:
                state["late"] = torch.zeros_like(parameter)


def test_state_that_would_not_be_stored_is_an_error() -> None:
    model = nn.Linear(2, 3)
    made, weight = Late(model.parameters(), lr=0.1), model.get_parameter("weight")
    optimizers = open_optimizers(made, NamedModel(model), "nothing")
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        made.step()
        assert set(optimizers.stored_state("weight", weight)) == {"count"}
    made.step()
    with pytest.raises(UserError, match="Late keeps count, late for parameter 'weight', and kept"):
        optimizers.stored_state("weight", weight)


def test_an_optimizer_that_steps_elsewhere_is_tried_there() -> None:
    """Its parameters are on a device on which nothing can be computed, as a GPU's are while the
    state is to lie in host memory."""
    with torch.device("meta"):
        model = nn.Linear(2, 3)
    made = torch.optim.AdamW(model.parameters(), fused=True)
    named = NamedModel(model)
    opened = open_optimizers(made, named, "rows", torch.device("cpu"))
    kept = opened.schema("weight")
    assert {key: entry.device.type for key, entry in kept.items()} == dict.fromkeys(kept, "cpu")
    with pytest.raises(UserError, match="cannot work on parts of a model"):
        open_optimizers(made, named, "rows")


def test_state_made_at_once_follows_its_piece_to_another_device() -> None:
    model = nn.Linear(4, 1)
    made = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)
    schema = open_optimizers(made, NamedModel(model), "rows").schema("weight")
    assert {entry.device.type for entry in schema.values()} == {"cpu"}
    piece = nn.Parameter(torch.empty(2, device="meta"))
    cut = cut_state(made.state[model.weight], schema, 1, piece)
    assert (cut["sum"].device.type, cut["sum"].shape) == ("meta", (2,))
    assert cut["step"].device.type == "cpu"


class Together(torch.optim.SGD):
    """Steps each parameter by the norm of all."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            norm = torch.stack([parameter.grad.norm() for parameter in group["params"]]).norm()
            for parameter in group["params"]:
                parameter.data -= group["lr"] * norm * parameter.grad


@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)])
def test_dummies_move_where_a_warm_up_begins_with_zero(lr: float) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UserError, match="Together treats its parameters together"):
        open_optimizers(Together(model.parameters(), lr=lr), NamedModel(model), "elements")


def test_dummies_are_stepped_without_compiling() -> None:
    compiled = []

    def backend(module: Any, inputs: Any) -> Any:
        compiled.append(module)
        return module.forward

    def subtract(parameter: Tensor, gradient: Tensor) -> None:
        parameter.sub_(gradient)

    class Compiled(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                torch.compile(subtract, backend=backend)(parameter.detach(), parameter.grad)

    model = nn.Linear(2, 2)
    made = Compiled(model.parameters())
    open_optimizers(made, NamedModel(model), "elements")
    assert not compiled
    model(torch.ones(2)).sum().backward()
    made.step()
    assert compiled
