"""Checks that gradients and losses are finite before an optimizer changes anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspects:
    """Names what is not finite of this rank's part of a global batch."""

    loss: bool
    gradients: list[str]
    """Parameters, by name."""


class LossCheck:
    """Holds zero while every loss of a global batch is finite, else NaN; it is added to what is
    summed over the ranks, so that all of them see one bad loss."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self.mean: Tensor | None = None
        """Sum of the losses times their fractions: 0-dim, 32 bits; None: no loss has counted."""

    def add(self, loss: Tensor, fraction: float) -> None:
        """Counts a loss, with its fraction of the global batch. Nothing waits for its value."""
        value = loss.detach().reshape(()).to(torch.float32)
        part, check = value * fraction, value * 0
        self.mean = part if self.mean is None else self.mean + part
        self._sum = check if self._sum is None else self._sum + check

    @property
    def value(self) -> Tensor | None:
        """Returns a 0-dim tensor of 32 bits; None: no loss has counted."""
        return self._sum

    @property
    def bad(self) -> bool:
        """Tells whether a loss of this rank is not finite; waits for its value."""
        return self._sum is not None and not bool(torch.isfinite(self._sum))

    def clear(self) -> None:
        """Begins a new global batch."""
        self._sum = self.mean = None


def squared_norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns the square of the norm of all these gradients: 0-dim, of 64 bits."""
    square = torch.zeros((), dtype=torch.float64, device=device)
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for gradient in gradients:
        alike.setdefault((_wide(gradient), gradient.device), []).append(gradient)
    for (dtype, _), same in alike.items():
        norms = torch._foreach_norm(same, 2, dtype=dtype)  # noqa: SLF001 - as torch.optim does
        square += torch.stack(norms).to(device).double().square().sum()
    return square


def squares_of(
    gradients: Mapping[str, Tensor], names: Iterable[str], device: torch.device
) -> Tensor:
    """Computes the square of each gradient's own norm.

    Args:
        gradients: The gradients that there are, by name.
        names: The names in the order of the result.
        device: The device of the result.

    Returns:
        A 1-D tensor of 64 bits; it has 0 for a gradient that is missing.
    """
    norm_of: dict[str, float] = {}
    if gradients:
        flat = [gradient.reshape(-1) for gradient in gradients.values()]
        norms = [torch.linalg.vector_norm(vector, dtype=_wide(vector)) for vector in flat]
        values = torch.stack([norm.double().to(device) for norm in norms]).tolist()
        norm_of = dict(zip(gradients, values, strict=True))
    norms_N = [norm_of.get(name, 0.0) for name in names]
    return torch.tensor(norms_N, dtype=torch.float64, device=device).square()


def fixed_order_sum(values: Tensor) -> Tensor:
    """Returns the sum of a 1-D tensor, added from the first element to the last: 0-dim."""
    total = 0.0
    for value in values.tolist():
        total += value
    return torch.tensor(total, dtype=values.dtype, device=values.device)


def clipping(norm: Tensor, max_norm: float) -> Tensor:
    """Returns by what gradients of this norm are multiplied, as in torch's `clip_grad_norm_`."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Returns the names of those that hold NaN or infinity; reads every element."""
    return [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]


def _wide(gradient: Tensor) -> torch.dtype:
    """Returns the dtype in which squares are summed."""
    return torch.float64 if gradient.dtype == torch.float64 else torch.float32
