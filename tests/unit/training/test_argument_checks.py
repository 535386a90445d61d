"""What a copy of the model that a script trains is a copy of."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from elasticzero.errors import UserError
from elasticzero.training.argument_checks import redirect_deepcopy


class Wrapped(nn.Module):
    """As DistributedDataParallel lies around a model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_an_average_of_a_wrapped_model_is_of_the_model_inside() -> None:
    """Else its names in a checkpoint depend on the number of ranks."""
    given = nn.Linear(2, 1)
    laid = Wrapped(given)
    redirect_deepcopy(given, laid, "ddp")
    averages = AveragedModel(laid)
    assert list(averages.state_dict()) == ["n_averaged", "module.weight", "module.bias"]
    with torch.no_grad():
        given.weight.fill_(3.0)
    averages.update_parameters(laid)
    torch.testing.assert_close(averages.module.weight, torch.full((1, 2), 3.0))


def test_a_model_in_parts_is_not_copied() -> None:
    given = nn.Linear(2, 1)
    redirect_deepcopy(given, given, "zero3")
    with pytest.raises(UserError, match="no rank has the whole model"):
        copy.deepcopy(given)
