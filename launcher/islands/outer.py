"""Computes the mean of contributions, and the step of the outer optimizer.

The functions work on flat arrays of one shape, piece by piece, so that they need little memory
beside them. Each number comes of additions and multiplications that are rounded one by one: so all
islands get the same bits of the same input, whatever their processors are.
Shapes: E elements of a fragment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from elasticzero.ipc.round_wire import Elements

PIECE = 1 << 20
"""Elements that are computed at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterOptimizer:
    """Steps outer parameters by SGD with Nesterov momentum, as torch's `SGD(…, nesterov=True)`
    does.

    With `lr` 1 and `momentum` 0 a step takes the mean of the islands' parameters.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def step(self, parameters_E: Elements, momentum_E: Elements, mean_E: Elements) -> None:
        """Steps the parameters and their momentum in place.

        Args:
            parameters_E: The outer parameters.
            momentum_E: Their momentum; zeros before the first step.
            mean_E: The mean of the contributions, which is the gradient.
        """
        for piece in _pieces(parameters_E):
            gradient, momentum = mean_E[piece], momentum_E[piece]
            momentum *= self.momentum
            momentum += gradient
            change = momentum * self.momentum
            change += gradient
            change *= self.lr
            parameters_E[piece] -= change


def write_mean(contributions: Sequence[tuple[int, Elements]], out_E: Elements) -> None:
    """Writes the mean of contributions, weighted by samples, summed in their order in 64 bits.

    Args:
        contributions: The number of samples of each, and its elements.
        out_E: Where the mean goes.
    """
    samples = sum(count for count, _ in contributions)
    for piece in _pieces(out_E):
        total = np.zeros(len(out_E[piece]))
        for count, contribution_E in contributions:
            total += contribution_E[piece].astype(np.float64) * count
        out_E[piece] = total / samples


def _pieces(flat_E: Elements) -> Iterator[slice]:
    for start in range(0, len(flat_E), PIECE):
        yield slice(start, start + PIECE)
