"""Checks that gradients and losses are finite before an optimizer changes anything.

Shapes: N numbers of a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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

    def __init__(self, *, has_own_message: bool = True) -> None:
        """Begins a global batch.

        Args:
            has_own_message: Whether losses may have a message of their own, which the release
                before does not know.
        """
        self.has_own_message = has_own_message
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


class StepNumbers:
    """Brings the numbers that decide on a step from the device in one transfer, for which nothing
    waits until they are asked for."""

    def __init__(self, numbers_N: Tensor) -> None:
        self._numbers_N, self._event = numbers_N, None
        if numbers_N.is_cuda:
            pinned_N = torch.empty(numbers_N.shape, dtype=numbers_N.dtype, pin_memory=True)
            pinned_N.copy_(numbers_N, non_blocking=True)
            event: Any = torch.cuda.Event()
            event.record()
            self._numbers_N, self._event = pinned_N, event

    def values(self) -> list[float]:
        """Returns the numbers; on a GPU it waits until all work before them is done."""
        if self._event is not None:
            self._event.synchronize()
        values: list[float] = self._numbers_N.tolist()
        return values


SUMMED_ELEMENTS = 1 << 20
"""Number of elements of a gradient on the CPU whose squares are summed in its own format, which
rounds more the more there are; these sums are added in 64 bits."""


def squared_norm(
    gradients: Sequence[Tensor], device: torch.device, *, in_parts: bool = True
) -> Tensor:
    """Returns the square of the norm of all these gradients: 0-dim, of 64 bits.

    Args:
        gradients: The gradients.
        device: The device of the result.
        in_parts: Whether long gradients on the CPU are summed in parts, as the release before does
            not: ranks that do not tell each other their norms must have the same.
    """
    return _sum_of_squares([_norms(gradients, in_parts=in_parts)], device)


NormsOfKinds = Mapping[tuple[torch.dtype, torch.device], Sequence[Tensor]]
"""Norms of gradients or of parts of them, by the dtype and device that they have."""


def _norms(gradients: Iterable[Tensor], *, in_parts: bool = True) -> NormsOfKinds:
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for gradient in gradients:
        same = alike.setdefault((_wide(gradient), gradient.device), [])
        same += _parts(gradient) if in_parts else [gradient]
    return {
        kind: torch._foreach_norm(same, 2, dtype=kind[0])  # noqa: SLF001 - as torch.optim does
        for kind, same in alike.items()
    }


def _sum_of_squares(norms: Iterable[NormsOfKinds], device: torch.device) -> Tensor:
    """Returns the sum of the squares of all these norms: 0-dim, of 64 bits."""
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for kinds in norms:
        for kind, same in kinds.items():
            alike.setdefault(kind, []).extend(same)
    sums = [torch.stack(same).to(device).double().square().sum() for same in alike.values()]
    if not sums:
        return torch.zeros((), dtype=torch.float64, device=device)
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def _parts(gradient: Tensor) -> Sequence[Tensor]:
    is_long = gradient.numel() > SUMMED_ELEMENTS and gradient.device.type == "cpu"
    if not is_long or not gradient.is_contiguous():
        return (gradient,)
    parts: Sequence[Tensor] = gradient.view(-1).split(SUMMED_ELEMENTS)
    return parts


class SquaredNorm:
    """Adds up the squares of gradients as they become complete.

    On the CPU that is done at once, beside exchanges that are under way; on a GPU by few launches
    at the end.
    """

    def __init__(self) -> None:
        self._gradients: list[Tensor] = []
        self._norms: list[NormsOfKinds] = []
        self._is_at_once = True
        """`_norms` has all gradients."""

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Counts gradients, which nothing changes any more but the factor of `total`."""
        self._gradients += gradients
        if all(gradient.device.type == "cpu" for gradient in gradients):
            self._norms.append(_norms(gradients))
        else:
            self._is_at_once = False

    def total(self, factor: float, device: torch.device) -> Tensor:
        """Returns the square of the norm of all gradients: 0-dim, of 64 bits.

        Args:
            factor: What all gradients were multiplied by meanwhile.
            device: The device of the result.
        """
        if self._is_at_once:
            square = _sum_of_squares(self._norms, device)
            if factor == 1.0:
                return square
            # A square may leave its format where that of the multiplied gradient does not.
            if bool(torch.isfinite(square)):
                return square * factor**2
        return squared_norm(self._gradients, device)


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


def norm_of(square: float) -> float:
    """Returns the root of a sum; NaN for what is no square, as an aborted collective leaves it."""
    return math.sqrt(square) if square >= 0 else math.nan


def clipping(norm: Tensor, max_norm: float) -> Tensor:
    """Returns by what gradients of this norm are multiplied, as in torch's `clip_grad_norm_`."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Returns the names of those that hold NaN or infinity; reads every element."""
    return [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]


def _wide(gradient: Tensor) -> torch.dtype:
    """Returns the dtype in which squares are summed."""
    return torch.float64 if gradient.dtype == torch.float64 else torch.float32
