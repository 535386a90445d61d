"""Parameters that a script changes between a boundary and the optimizers' step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from elasticzero.parallel.buckets import gather
from elasticzero.state.boundary_values import BoundaryValues
from elasticzero.state.model import LocalTensor, RankState


def model() -> nn.Linear:
    made = nn.Linear(2, 2)
    made.bias.requires_grad_(False)
    nn.init.ones_(made.weight)
    return made


def kept(layer: nn.Module) -> BoundaryValues:
    values = BoundaryValues(dict(layer.named_parameters()))
    values.mark()
    values.copy()
    return values


def in_place(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.mul_(2)


def by_a_view(layer: nn.Linear) -> None:
    layer.weight.detach()[0].mul_(2)


def moved(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data * 2


@pytest.mark.parametrize("change", [in_place, by_a_view, moved])
def test_a_change_is_copied_from_the_next_boundary_on(change: Callable[[nn.Linear], None]) -> None:
    layer = model()
    values = kept(layer)
    assert values.are_there(()) and not values.changed()
    change(layer)
    assert values.changed() == {"weight"}
    assert not values.are_there(())
    values.learn()
    values.mark()
    values.copy()
    before = layer.weight.detach().clone()
    change(layer)
    assert values.are_there(())
    with values.in_place():
        assert torch.equal(layer.weight, before)
    assert not torch.equal(layer.weight, before)
    values.put_back()
    assert torch.equal(layer.weight, before)


def test_another_change_than_before_is_not_copied() -> None:
    layer = model()
    values = kept(layer)
    in_place(layer)
    values.learn()
    values.mark()
    values.copy()
    layer.bias.add_(1)
    assert not values.are_there(())


def test_what_is_found_by_its_values_is_copied_too() -> None:
    """torch counts no change through `.data`."""
    layer = model()
    values = kept(layer)
    layer.weight.data.mul_(2)
    assert values.are_there(()) and not values.are_there(["weight"])
    values.learn_compared(["weight", "of another rank"])
    values.mark()
    values.copy()
    layer.weight.data.mul_(2)
    values.put_back()
    assert values.are_there(["weight"]) and layer.weight.detach().eq(2).all()


def test_what_is_watched_is_there_with_its_values_alone() -> None:
    """An average of weights that `on_epoch_end` had put in through `.data` for its evaluation was
    handed over as what is trained, where a peer was lost in the evaluation."""
    layer = model()
    values = kept(layer)
    momentum = torch.zeros(2)
    tensors = {"weight": layer.weight.detach(), "momentum": momentum}
    values.watch(lambda: RankState(held={n: LocalTensor(t) for n, t in tensors.items()}))
    assert values.are_there(())
    before = layer.weight.detach().clone()
    layer.weight.data.mul_(2)
    assert not values.are_there(())
    layer.weight.data.copy_(before)
    assert values.are_there(())
    momentum.add_(1)
    assert not values.are_there(())
    values.mark()
    assert values.are_there(())


def test_a_boundary_that_is_not_copied_yet_puts_nothing_back() -> None:
    """Copies of the boundary before would be older."""
    layer = model()
    values = kept(layer)
    in_place(layer)
    values.learn()
    values.mark()
    values.copy()
    in_place(layer)
    values.mark()
    present = layer.weight.detach().clone()
    values.put_back()
    assert torch.equal(layer.weight, present)
    in_place(layer)
    assert not values.are_there(())


def test_before_the_first_boundary_everything_is_there() -> None:
    layer = model()
    values = BoundaryValues(dict(layer.named_parameters()))
    in_place(layer)
    assert values.are_there(())


def test_parameters_that_are_gathered_are_not_waited_for() -> None:
    layer = model()
    values = kept(layer)

    def wait() -> None:
        raise AssertionError("waited")

    layer.weight.__dict__[gather._WAIT] = wait
    gather._become(layer.get_parameter("weight"), gather.PendingParameter)
    values.mark()
    values.copy()
    assert values.are_there(())
    values.put_back()


def test_parameters_of_inference_mode_are_left_out() -> None:
    with torch.inference_mode():
        frozen = nn.Linear(1, 1).requires_grad_(False)
    values = kept(nn.Sequential(frozen, nn.Linear(1, 1)))
    assert values.are_there(())
