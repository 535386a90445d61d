"""Hooks of a script on gradients and on steps, beside those that are not the script's."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from elasticzero.errors import UserError
from elasticzero.parallel.gradients import check_hooks, check_hooks_of_several
from elasticzero.parallel.optimizers.groups import open_optimizers
from elasticzero.parallel.parameter_changes import ForwardChanges
from elasticzero.state.model import NamedModel
from elasticzero.torch_internals.hooks import (
    GradientHooks,
    GradientReady,
    call_gradient_hooks,
    has_step_hooks,
    order_hooks,
    with_gradient_hooks,
    without_gradient_hooks,
)


def test_a_hook_is_called_with_the_whole_gradient_alone() -> None:
    """In two backwards only ours is called, and then the script's as autograd would."""
    parameter, calls = nn.Parameter(torch.ones(2)), [""]
    parameter.register_post_accumulate_grad_hook(GradientReady(lambda _: calls.append("ours")))
    assert not with_gradient_hooks({"weight": parameter})
    check_hooks({"weight": parameter}, "zero1")
    handle = parameter.register_hook(lambda gradient: gradient.clamp(max=5.0))
    parameter.register_post_accumulate_grad_hook(lambda p: calls.append(str(p.grad.tolist())))
    with pytest.raises(UserError, match="parameter 'weight' has a hook on its gradient"):
        check_hooks({"weight": parameter}, "zero1")
    with without_gradient_hooks([parameter]):
        for _ in range(2):
            (parameter * torch.tensor([1.0, 3.0])).sum().backward()
    assert calls == ["", "ours", "ours"]
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [2.0, 6.0]
    call_gradient_hooks(parameter)
    assert calls.pop() == "[2.0, 5.0]"
    handle.remove()
    parameter.grad = None
    (parameter * 7).sum().backward()
    assert calls == ["", "ours", "ours", "ours", "[7.0, 7.0]"]


def test_hooks_that_are_added_and_removed_are_seen_at_each_look() -> None:
    """Where no number of hooks has changed, none is looked at."""
    leaves = {name: nn.Parameter(torch.ones(1)) for name in ("a", "b", "c")}
    leaves["a"].register_post_accumulate_grad_hook(GradientReady(lambda _: None))
    hooks = GradientHooks(leaves)
    for _ in range(2):
        assert hooks.names() == []
    for name, leaf in leaves.items():
        registers: list[Any] = [leaf.register_hook, leaf.register_post_accumulate_grad_hook]
        for register in registers:
            handle = register(lambda gradient: None)
            for _ in range(2):
                assert hooks.names() == [name]
            handle.remove()
            assert hooks.names() == []


def test_hooks_of_a_frozen_parameter_and_an_error_in_a_backward_change_nothing() -> None:
    parameter, frozen = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1), False)
    parameter.register_hook(lambda gradient: gradient)
    with pytest.raises(ZeroDivisionError), without_gradient_hooks([parameter, frozen]):
        assert not with_gradient_hooks({"weight": parameter})
        raise ZeroDivisionError
    assert with_gradient_hooks({"weight": parameter, "frozen": frozen}) == ["weight"]


def test_a_hook_of_several_gradients_is_left_to_autograd() -> None:
    """torch refuses to call it outside of a backward."""
    parameter = nn.Parameter(torch.ones(1))
    check_hooks_of_several({"weight": parameter})
    calls: list[object] = []
    register_multi_grad_hook([parameter], calls.append)
    for check in (check_hooks_of_several, lambda parameters: check_hooks(parameters, "zero3")):
        with pytest.raises(UserError, match="parameter 'weight' has a hook"):
            check({"weight": parameter})
    with without_gradient_hooks([parameter]):
        (parameter * 2).sum().backward()
    assert calls == [[torch.tensor([2.0])]]


@pytest.mark.parametrize("hooks", [{}, {3: print}, None])
def test_plain_dicts_of_hooks_become_ordered_ones(hooks: Any) -> None:
    """Wrappers of optimizers make such dicts, or none, and torch can add nothing to them."""
    layer = nn.Linear(1, 1)
    optimizer: Any = torch.optim.SGD(layer.parameters())
    if hooks is None:
        del optimizer._optimizer_step_pre_hooks
    else:
        optimizer._optimizer_step_pre_hooks = hooks
        layer._forward_pre_hooks = hooks
        order_hooks(layer)
        assert type(layer._forward_pre_hooks) is OrderedDict
    assert has_step_hooks(optimizer) == bool(hooks)
    optimizer.register_step_pre_hook(lambda *_: None)
    assert has_step_hooks(optimizer)
    kept = optimizer._optimizer_step_pre_hooks
    order_hooks(optimizer)
    assert optimizer._optimizer_step_pre_hooks is kept


def test_the_options_by_which_ranks_step_have_a_number() -> None:
    """A rate that followed from a rank's own loss was another on each rank, in silence."""
    layer = nn.Linear(1, 1)
    rate = torch.tensor(0.5)
    made = torch.optim.Adam(layer.parameters(), lr=rate, betas=(0.5, 0.6))
    optimizers = open_optimizers(made, NamedModel(layer), "nothing")
    numbers = []
    for change in (
        lambda: None,
        lambda: rate.fill_(0.25),
        lambda: made.param_groups[0].update(betas=(0.5, 0.7)),
        lambda: made.param_groups[0].update(of_the_script=object()),
    ):
        change()
        changes = ForwardChanges({"a": torch.ones(1)}, 2, optimizers.options_number)
        changes.begin()
        numbers.append(changes.end())
        assert changes.sentence().startswith("ranks would step by different options")
    assert len(set(numbers)) == 4 and None not in numbers
    assert optimizers.options_number() == optimizers.options_number()


def test_only_what_a_forward_changes_has_a_number() -> None:
    weights: dict[str, Tensor] = {"a": torch.ones(3), "b": torch.ones(2)}
    changes = ForwardChanges(weights, ranks=2)
    changes.begin()
    changes.begin()
    assert changes.end() == 0
    weights["b"][0] = 3
    changes.begin()
    assert changes.end() is None, "only the first step is looked at, and each that is asked for"
    changes.request()
    changes.begin()
    weights["b"][1] = -1
    changes.begin()
    number = changes.end()
    assert number
    assert "a forward has changed parameter 'b'" in changes.sentence()
    changes.request()
    changes.begin()
    weights["b"][1] = -2
    assert changes.end() not in (0, number)
    alone = ForwardChanges(weights, ranks=1)
    alone.begin()
    alone.request()
    alone.begin()
    assert alone.end() is None
