"""The model stays the script's own object when its forward computes in 16 bits."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elasticzero.errors import UserError
from elasticzero.training.precision import MODES, Compute

CPU = torch.device("cpu")
BF16 = Compute(precision="bf16")


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.inside: torch.dtype | None = None

    def forward(self, x: Tensor, *, scale: float = 2.0) -> dict[str, Any]:
        y = self.layer(x) * scale
        self.inside = y.dtype
        return {"y": y, "both": (y, [y, "text"])}


def test_results_have_32_bits_wherever_they_are() -> None:
    model = Doubled()
    BF16.apply(model, CPU, "ddp")
    output = model(torch.ones(2, 3), scale=3.0)
    assert model.inside == torch.bfloat16
    assert output["y"].dtype == output["both"][0].dtype == output["both"][1][0].dtype
    assert output["y"].dtype == torch.float32 and output["both"][1][1] == "text"
    assert list(inspect.signature(model.forward).parameters) == ["x", "scale"]
    assert model.layer(torch.ones(2, 3)).dtype == torch.float32, "outside of the model's forward"
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_copy_has_parameters_of_its_own() -> None:
    """A forward that is a closure over the model makes the copy compute with the original's."""
    model = Doubled()
    BF16.apply(model, CPU, "ddp")
    other = copy.deepcopy(model)
    nn.init.zeros_(other.layer.weight)
    nn.init.zeros_(other.layer.bias)
    assert not other(torch.ones(2, 3))["y"].any() and model(torch.ones(2, 3))["y"].any()


def test_a_forward_that_was_replaced_is_kept() -> None:
    model = Doubled()
    plain = model.forward
    model.__dict__["forward"] = lambda x: plain(x)["y"] + 1
    expected = model(torch.ones(2, 3))
    BF16.apply(model, CPU, "ddp")
    assert torch.allclose(model(torch.ones(2, 3)), expected, atol=0.1)
    assert model.inside == torch.bfloat16


def test_parts_of_a_container_compute_in_16_bits() -> None:
    model = nn.ModuleDict({"one": Doubled(), "more": nn.ModuleList([Doubled()])})
    BF16.apply(model, CPU, "ddp")
    parts: Any = [model["one"], model["more"][0]]  # type: ignore[index]
    for part in parts:
        part(torch.ones(2, 3))
        assert part.inside == torch.bfloat16


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
@pytest.mark.parametrize(
    ("compiled", "mode"), [(True, None), *((mode, mode) for mode in sorted(MODES))]
)
def test_the_compiler_is_given_the_mode(
    monkeypatch: pytest.MonkeyPatch, strategy: str, compiled: bool | str, mode: str | None
) -> None:
    modes: list[Any] = []

    def compile_with(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        modes.append(options.get("mode"))
        return function

    monkeypatch.setattr(torch, "compile", compile_with)
    Compute(compiled=compiled).apply(Doubled(), CPU, strategy)
    assert modes == [mode]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"precision": "half"}, "precision='half'; it must be one of fp32, bf16"),
        ({"compiled": "fast"}, "compile='fast'; it must be False, True or a mode"),
    ],
)
def test_other_values_are_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        Compute(**options)


def test_64_bit_parameters_are_refused() -> None:
    parameters = dict(nn.Linear(2, 2).double().named_parameters())
    with pytest.raises(UserError, match="parameter 'weight' is float64, and the forward pass"):
        BF16.check(parameters, "zero1")
    Compute().check(parameters, "zero1")
