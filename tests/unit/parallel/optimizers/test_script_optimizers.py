"""The session steps the optimizers of a script, and refuses others beside them."""

from __future__ import annotations

import copy
import gc
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from elasticzero.errors import UserError
from elasticzero.parallel.optimizers.script_optimizers import (
    OtherOptimizers,
    OutsideParameters,
    take_over_optimizer,
)
from elasticzero.torch_internals.hooks import has_step_hooks


def test_an_optimizer_is_stepped_by_the_session_alone_and_in_parts() -> None:
    """A hook of the script's would run once for each part, so it forbids parts; the session's own
    check does not."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    session = SimpleNamespace(applying=False)
    take_over_optimizer(optimizer, lambda: session.applying, model)
    with pytest.raises(UserError, match="leave it out"):
        optimizer.step()
    session.applying = True
    optimizer.step()
    assert not has_step_hooks(optimizer)


def test_state_that_a_script_loads_leaves_schedulers_their_groups() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 0.5
    take_over_optimizer(optimizer, lambda: True, model)
    group = optimizer.param_groups[0]
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0] is group and group["lr"] == 0.5


def test_a_script_takes_and_loads_no_state_of_parts() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    saved = optimizer.state_dict()
    take_over_optimizer(optimizer, lambda: True, model, strategy="zero2")
    with pytest.raises(UserError, match="under zero2, where each rank has the state of its parts"):
        optimizer.state_dict()
    with pytest.raises(UserError, match="or use strategy ddp"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize(
    "register",
    [
        lambda optimizer, hook: optimizer.register_step_pre_hook(hook),
        lambda optimizer, hook: optimizer.register_step_post_hook(hook),
        lambda _, hook: register_optimizer_step_pre_hook(hook),
        lambda _, hook: register_optimizer_step_post_hook(hook),
    ],
)
def test_a_hook_of_the_script_is_called_once_a_step(
    register: Callable[..., torch.utils.hooks.RemovableHandle],
) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    take_over_optimizer(optimizer, lambda: True, model)
    handle = register(optimizer, lambda *_: None)
    assert has_step_hooks(optimizer)
    handle.remove()
    assert not has_step_hooks(optimizer)


def test_an_optimizer_of_the_script_may_not_step_what_a_loss_reaches_beside_the_model() -> None:
    """Weights of losses, kept beside the model, would differ from rank to rank in silence."""
    model = nn.Linear(2, 1)
    weights = nn.Parameter(torch.zeros(3))
    teacher = nn.Linear(2, 1)
    ours = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    script = torch.optim.SGD([weights], lr=0.1)
    x = torch.ones(4, 2, requires_grad=True)
    loss = (model(x) - teacher(x)).square().mean() * torch.exp(weights[0])
    outside = OutsideParameters(model, loss)
    loss.backward()
    ours.step()
    probe.step()
    assert not has_step_hooks(ours)
    with pytest.raises(UserError, match=r"the script's own SGD steps a parameter of shape \(3,\)"):
        script.step()
    del outside
    script.step()


def test_an_optimizer_that_the_script_makes_later_is_refused_while_it_lives() -> None:
    """`optimizer = SGD(model.parameters())` in the middle of training would change nothing."""
    model = nn.Linear(2, 1)
    before = torch.optim.SGD(model.parameters(), lr=0.1)
    others = OtherOptimizers(model, lambda: False)
    assert others.difference() is None
    teacher = nn.Linear(2, 1)
    groups: list[dict[str, Any]] = [{"params": [teacher.weight]}, {"params": [teacher.bias]}]
    of_teacher = torch.optim.Adam(groups)
    assert others.difference() is None
    switched = torch.optim.Adam([*groups[:1], {"params": [model.bias]}])
    error = others.difference()
    assert error is not None and "(Adam) of parameter 'bias' after session.prepare" in str(error)
    del switched
    gc.collect()
    assert others.difference() is None
    assert of_teacher.param_groups and before.param_groups


def test_notes_of_optimizers_end_with_a_generation() -> None:
    """A process that is kept has another generation's script make its optimizers anew."""
    model = nn.Linear(2, 1)
    old = OtherOptimizers(model, lambda: False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert old.difference() is not None
    del old
    young = OtherOptimizers(model, lambda: False)
    assert young.difference() is None
    assert optimizer.param_groups


def test_an_optimizer_from_before_prepare_may_not_be_stepped() -> None:
    """It would find no gradient, and do nothing in silence."""
    model = nn.Linear(2, 1)
    session = SimpleNamespace(applying=False)
    before = torch.optim.SGD(model.parameters(), lr=0.1)
    others = OtherOptimizers(model, lambda: session.applying)
    with pytest.raises(UserError, match=r"\(SGD\) of parameter 'weight' that session\.prepare has"):
        before.step()
    torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1).step()
    session.applying = True  # an optimizer of the session's may step another inside of it
    before.step()
    assert others.difference() is None


def test_an_optimizer_of_other_parameters_may_not_step_in_several_global_batches() -> None:
    """A value network beside the model is of one rank's samples, and lost at each recovery."""
    batch: int | None = None
    tracked: list[Any] = []
    model, value = nn.Linear(2, 1), nn.Linear(2, 1)
    others = OtherOptimizers(model, lambda: False, batch=lambda: batch, tracked=lambda: tracked)
    of_value = torch.optim.SGD(value.parameters(), lr=0.1)
    for _ in range(2):
        of_value.step()  # before training
    batch = 1
    for _ in range(2):
        of_value.step()  # an inner loop of one global batch
    batch = 2
    with pytest.raises(UserError, match=r"optimizer \(SGD\) of parameters that the model"):
        of_value.step()
    torch.optim.SGD(value.parameters(), lr=0.1).step()  # made anew for this global batch
    tracked.append(SimpleNamespace(critic=value, optimizer=of_value))
    of_value.step()
    tracked[:] = [of_value]
    of_value.step()
    assert others.difference() is None


Look = Callable[[defaultdict[Any, Any], Tensor], Any]


@pytest.mark.parametrize(
    "look",
    [
        lambda state, parameter: state[parameter],
        lambda state, parameter: state.get(parameter, {}),
        lambda state, parameter: parameter in state,
        lambda state, parameter: state.pop(parameter, None),
        lambda state, parameter: state.setdefault(parameter, {}),
        lambda state, parameter: state.__setitem__(parameter, {}),
        lambda state, parameter: state.__delitem__(parameter),
    ],
)
def test_state_of_parts_is_not_looked_up_by_whole_parameters(look: Look) -> None:
    """`optimizer.state.get(parameter, {})` would be empty, and clearing it would do nothing."""
    model = nn.Linear(2, 2)
    piece = nn.Parameter(torch.zeros(2))
    frozen = model.bias.requires_grad_(False)
    optimizer = torch.optim.Adam([piece], lr=0.1)
    piece.grad = torch.ones(2)
    optimizer.step()
    take_over_optimizer(optimizer, lambda: True, model, strategy="zero1")
    with pytest.raises(UserError, match="state of parameter 'weight', and under zero1 each rank"):
        look(optimizer.state, model.weight)
    assert set(optimizer.state[piece]) == {"step", "exp_avg", "exp_avg_sq"}
    assert optimizer.state.get(frozen, {}) == {} and frozen not in optimizer.state
    optimizer.step()
    assert type(copy.deepcopy(optimizer.state)) is defaultdict


def test_state_of_whole_parameters_is_looked_up_by_them() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    take_over_optimizer(optimizer, lambda: True, model, strategy="zero1")
    optimizer.state[model.weight]["momentum_buffer"] = torch.zeros(1, 2)
    assert model.weight in optimizer.state
    assert optimizer.state.pop(model.bias, None) is None
