"""What `session.evaluate` leaves behind: modules have their modes of before, by their own means."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elasticzero.state.auxiliary import AuxiliaryState
from elasticzero.training.evaluation import evaluating


class Merging(nn.Linear):
    """Has an adapter, which it adds to its weight in eval mode, as loralib's layers do."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.adapter = nn.Parameter(torch.ones(1, 1))
        self.is_merged = False
        nn.init.zeros_(self.weight)

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        if self.is_merged == mode:
            self.weight.data += -self.adapter if mode else self.adapter
            self.is_merged = not mode
        return self


@pytest.mark.parametrize("fails", [False, True])
def test_an_adapter_that_eval_mode_merges_is_taken_out_again(fails: bool) -> None:
    """It stayed in the weight, and each evaluation had training go on with it in silence."""
    layers, norm = [Merging(), Merging()], nn.BatchNorm1d(1)
    model = nn.Sequential(*layers, norm)
    layers[1].eval()
    norm.eval()
    merged = []
    try:
        with evaluating(model, AuxiliaryState(torch.device("cpu")), lambda: None):
            merged = [layer.weight.item() for layer in layers]
            assert not any(module.training for module in model.modules())
            if fails:
                raise ValueError
    except ValueError:
        assert fails
    assert merged == [1.0, 1.0]
    assert [layer.weight.item() for layer in layers] == [0.0, 1.0]
    assert [module.training for module in model] == [True, False, False]
