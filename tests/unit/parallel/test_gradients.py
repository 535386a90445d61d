"""Gradients that are not complete refuse what a script does with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elasticzero.errors import UserError
from elasticzero.parallel.gradients import (
    INCOMPLETE,
    OWN_BACKWARD,
    REFUSED,
    WATCHED_EVERY,
    HiddenGradients,
    LateGradients,
)


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


USES: dict[str, tuple[Callable[[nn.Linear], Any], str]] = {
    "norm": (lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0), "is used"),
    "value": (lambda m: nn.utils.clip_grad_value_(m.parameters(), 1.0), "is used"),
    "read": (lambda m: torch.stack([gradient.norm() for gradient in gradients_of(m)]), "is used"),
    "a list": (lambda m: torch.cat(gradients_of(m)), "is used"),
    "backward": (lambda m: m(torch.ones(1, 1)).sum().backward(), OWN_BACKWARD),
}


def layer() -> nn.Linear:
    """One of its parameters has one element, to which autograd could add in place."""
    made = nn.Linear(1, 2)
    for parameter in made.parameters():
        parameter.grad = torch.ones_like(parameter)
    return made


@pytest.mark.parametrize("partitioned", [True, False])
@pytest.mark.parametrize("use", USES)
def test_every_use_of_an_incomplete_gradient_is_refused(use: str, partitioned: bool) -> None:
    model = layer()
    gradients = HiddenGradients(dict(model.named_parameters()), partitioned=partitioned)
    gradients.hide(complete=False)
    act, sentence = USES[use]
    expected = sentence if sentence == OWN_BACKWARD else REFUSED if partitioned else INCOMPLETE
    with pytest.raises(UserError) as caught:
        act(model)
    assert str(caught.value) == expected
    gradients.show()
    assert all(
        torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters() if p.grad is not None
    )


def test_whole_gradients_may_be_used_once_they_are_complete() -> None:
    model = layer()
    gradients = HiddenGradients(dict(model.named_parameters()), partitioned=False)
    gradients.hide(complete=True)
    nn.utils.clip_grad_value_(model.parameters(), 0.5)
    gradients.show()
    assert model.bias.grad is not None and model.bias.grad.tolist() == [0.5, 0.5]


def test_a_gradient_that_the_script_sets_is_refused() -> None:
    model = layer()
    gradients = HiddenGradients(dict(model.named_parameters()), partitioned=True)
    gradients.hide(complete=True)
    model.bias.grad = None  # as zero_grad does, without effect
    model.weight.grad = torch.zeros(2, 1)
    with pytest.raises(UserError, match="the script uses parameters"):
        gradients.show()


def test_a_gradient_that_the_script_takes_away_is_refused_before_the_step() -> None:
    """Between micro-batches it comes back."""
    model = layer()
    gradients = HiddenGradients(dict(model.named_parameters()), partitioned=True)
    gradients.hide(complete=False)
    model.zero_grad()
    gradients.show()
    assert model.bias.grad is not None
    gradients.hide(complete=True)
    model.bias.grad = None
    with pytest.raises(UserError, match="the script uses parameters"):
        gradients.show(before_step=True)


@pytest.mark.parametrize("partitioned", [True, False])
def test_a_compiler_sees_no_gradients_where_they_are_hidden(partitioned: bool) -> None:
    """It compiles anew for a micro-batch of another size, in the middle of a global batch."""
    model = layer()
    torch.optim.SGD(model.parameters())  # has torch import what a compiler calls
    gradients = HiddenGradients(dict(model.named_parameters()), partitioned=partitioned)
    gradients.hide(complete=False)
    model.bias.grad = None
    compiled = torch.compile(model, backend="eager", dynamic=False)
    for size in (3, 1):
        assert compiled(torch.ones(size, 1)).shape == (size, 2)
    with pytest.raises(UserError):
        gradients_of(model)[0].norm()
    assert model.bias.grad is None, "what the script has taken away is not put back"
    with pytest.raises(UserError):
        gradients.show(before_step=True)


def test_a_gradient_before_the_first_backward_is_refused() -> None:
    model = nn.Linear(1, 2)
    gradients = HiddenGradients(dict(model.named_parameters()), partitioned=True)
    gradients.require_none()
    model(torch.ones(1, 1)).sum().backward()
    with pytest.raises(UserError, match="'weight' has a gradient before"):
        gradients.require_none()
    model.zero_grad()
    gradients.require_none()


def test_a_late_gradient_is_refused_in_the_first_step_and_in_some_after_it() -> None:
    model = nn.Linear(1, 2)
    model.bias.requires_grad_(False)
    late = LateGradients(dict(model.named_parameters()))

    def step() -> None:
        late.stop()
        model(torch.ones(1, 1)).sum().backward()
        late.begin()
        model(torch.ones(1, 1)).sum().backward()
        late.end()

    with pytest.raises(UserError, match=r"'weight' has got a gradient after session.backward"):
        step()
    late.end()
    for _ in range(WATCHED_EVERY - 1):
        step()
    with pytest.raises(UserError, match="a backward of the script's own adds to gradients"):
        step()
    late.stop()
    assert not model.weight._post_accumulate_grad_hooks
