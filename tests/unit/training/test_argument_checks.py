"""What a copy of a trained model is a copy of, and who steps its optimizer."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from elasticzero.errors import UserError
from elasticzero.parallel.optimizers.groups import Optimizers
from elasticzero.training.argument_checks import (
    check_model,
    check_offload,
    check_tracked,
    checked_tag,
    redirect_deepcopy,
)


class Wrapped(nn.Module):
    """As DistributedDataParallel lies around a model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_what_compile_returns_is_no_model() -> None:
    """No other run would find its parameters by the names that they have there."""
    with pytest.raises(UserError, match="give it the model itself, and compile=True"):
        check_model(torch.compile(nn.Linear(2, 1)))


def test_a_module_of_torch_jit_is_refused_by_its_name() -> None:
    with pytest.raises(UserError, match=r"has module '0', which is of torch\.jit: give it the"):
        check_model(nn.Sequential(torch.jit.script(nn.Linear(2, 1))))


def test_an_average_of_a_wrapped_model_is_of_the_model_inside() -> None:
    """Else its names in a checkpoint depend on the number of ranks."""
    original = nn.Linear(2, 1)
    laid = Wrapped(original)
    redirect_deepcopy(original, laid, "ddp")
    averages = AveragedModel(laid)
    assert list(averages.state_dict()) == ["n_averaged", "module.weight", "module.bias"]
    with torch.no_grad():
        original.weight.fill_(3.0)
    averages.update_parameters(laid)
    torch.testing.assert_close(averages.module.weight, torch.full((1, 2), 3.0))


def test_a_model_in_parts_is_not_copied() -> None:
    original = nn.Linear(2, 1)
    redirect_deepcopy(original, original, "zero3")
    with pytest.raises(UserError, match="no rank has the whole model"):
        copy.deepcopy(original)
    parts = nn.ModuleDict({"one": nn.Linear(2, 1)})
    redirect_deepcopy(parts, parts, "zero3")
    with pytest.raises(UserError, match="no rank has the whole model"):
        AveragedModel(parts["one"])


@pytest.mark.parametrize(
    ("strategy", "device", "mirrors", "complaint"),
    [
        ("zero2", "cpu", {}, "cpu_offload=True with strategy zero2, and zero3 alone"),
        ("zero3", "cuda", {"mirrors": (1,)}, "mirrors of --redundancy mirror: leave out one"),
        ("zero3", "cuda", {"mirrored_by": 0}, "mirrors of --redundancy mirror: leave out one"),
    ],
)
def test_state_in_host_memory_is_refused_where_it_cannot_be(
    strategy: str, device: str, mirrors: dict[str, Any], complaint: str
) -> None:
    assignment: Any = SimpleNamespace(**{"mirrors": (), "mirrored_by": None} | mirrors)
    with pytest.raises(UserError, match=complaint):
        check_offload(strategy, torch.device(device), assignment)
    check_offload("zero3", torch.device("cpu"), assignment)


@pytest.mark.parametrize("tag", ["", ".best", "a/b", "a b", "x" * 65, 7, b"best", True])
def test_what_is_no_tag_is_named(tag: Any) -> None:
    with pytest.raises(UserError, match=r"session.checkpoint\(tag=.*1 to 64 letters") as caught:
        checked_tag(tag)
    assert repr(tag) in str(caught.value)


@pytest.mark.parametrize("tag", [None, "best", "v1.2_x-y"])
def test_a_tag_or_none(tag: str | None) -> None:
    assert checked_tag(tag) == tag


def test_a_loader_is_not_tracked() -> None:
    """Its position and the session's would differ."""
    with pytest.raises(UserError, match="leave this DataLoader out"):
        check_tracked("loader", DataLoader([1, 2]), Optimizers({}, []), "ddp")  # type: ignore[arg-type]
