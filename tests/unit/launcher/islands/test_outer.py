"""The mean of contributions, and the outer step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from elasticzero.ipc.round_wire import Elements
from elasticzero.launcher.islands import outer
from elasticzero.launcher.islands.outer import OuterOptimizer, write_mean

ELEMENTS = 37


def drawn(dice: np.random.Generator, dtype: type) -> Elements:
    return dice.normal(size=ELEMENTS).astype(dtype)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer, "PIECE", 10)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (1.0, 0.0), (0.4, 0.5)])
def test_the_outer_step_is_that_of_torchs_sgd(lr: float, momentum: float, dtype: type) -> None:
    dice = np.random.default_rng(0)
    parameters_E = drawn(dice, dtype)
    momentum_E: Elements = np.zeros(ELEMENTS, dtype)
    parameter = torch.nn.Parameter(torch.from_numpy(parameters_E.copy()))
    optimizer = torch.optim.SGD([parameter], lr, momentum, nesterov=momentum > 0)
    for _ in range(6):
        gradient_E = drawn(dice, dtype)
        parameter.grad = torch.from_numpy(gradient_E)
        optimizer.step()
        OuterOptimizer(lr=lr, momentum=momentum).step(parameters_E, momentum_E, gradient_E)
    tolerance = 1e-12 if dtype is np.float64 else 1e-5
    assert np.allclose(parameters_E, parameter.detach().numpy(), rtol=0, atol=tolerance)


def test_a_step_has_the_same_bits_in_pieces_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for size in (1, 7, ELEMENTS):
        monkeypatch.setattr(outer, "PIECE", size)
        dice = np.random.default_rng(1)
        arrays = [drawn(dice, np.float32) for _ in range(4)]
        write_mean([(3, arrays[0]), (5, arrays[1])], arrays[1])
        OuterOptimizer().step(arrays[2], arrays[3], arrays[1])
        results.append((arrays[2].tobytes(), arrays[3].tobytes()))
    assert len({*results}) == 1


def test_a_mean_is_weighted() -> None:
    dice = np.random.default_rng(2)
    first_E, second_E = drawn(dice, np.float32), drawn(dice, np.float32)
    mean_E = np.empty(ELEMENTS, np.float32)
    write_mean([(1, first_E), (3, second_E)], mean_E)
    expected_E = (first_E.astype(np.float64) + 3 * second_E.astype(np.float64)) / 4
    assert np.array_equal(mean_E, expected_E.astype(np.float32))
