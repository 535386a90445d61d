"""Sums matrices over ranks as products of two narrow ones (`--wire powersgd:RANK`).

That is PowerSGD (Vogels, Karimireddy and Jaggi, "PowerSGD: practical low-rank gradient compression
for distributed optimization", 2019, arXiv 1905.13727). Each rank multiplies its matrix by the right
factor of the step before. The sum of these products, made orthonormal by one rank, which gives it
to all, is the left factor. Each multiplies its matrix by that, and the sum of these products is the
right factor. So all get the projection of the sum of all matrices on the columns of the left
factor; and each rank knows what that leaves out of its own one, for a sum of projections is the
projection of the sum. All multiply the two factors element by element, in one order, and so get the
same bits on any machine.
Shapes: A rows, which are the first dimension of a parameter, B columns, R columns of a factor.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elasticzero.parallel.wire.sums import Peers
from elasticzero.step_clock import wait_for

LEAST_LENGTH = 64
"""A column whose length is not so many times the rounding of the longest one's is one of noise."""


class RightFactors:
    """Holds the right factor (B, R) of each matrix, from which the next step begins: part of the
    training state, and the same on all ranks."""

    def __init__(self, parameters: Mapping[str, Tensor], rank: int) -> None:
        """Begins with random numbers that follow from a parameter's name.

        Args:
            parameters: The parameters by name, or tensors of their shape, dtype and device.
            rank: The number of columns.
        """
        self.present = {
            name: _random(name, (parameter.shape[1:].numel(), rank)).to(parameter)
            for name, parameter in parameters.items()
        }
        """Holds those of the newest boundary, by parameter."""
        self._following: dict[str, Tensor] = {}

    def take(self, following: Mapping[str, Tensor]) -> None:
        """Takes those of the step under way, with columns of length 1. In the place of a column of
        next to nothing, with which nothing would be sent from then on, the present one stays."""
        for name, factor in following.items():
            lengths = torch.linalg.vector_norm(factor, dim=0)
            least = LEAST_LENGTH * torch.finfo(factor.dtype).eps * lengths.amax()
            has_length = (lengths > least) & lengths.isfinite()
            unit = factor / torch.where(has_length, lengths, 1)
            self._following[name] = torch.where(has_length, unit, self.present[name])

    def keep(self, names: AbstractSet[str]) -> None:
        """Has those of some parameters stay in the step."""
        for name in names:
            self._following.pop(name, None)

    def end(self, *, applied: bool) -> None:
        """Ends a global batch, whose step was applied or not."""
        if applied:
            self.present |= self._following
        self._following = {}


class LowRankSum:
    """Sums all ranks' matrices: an all-reduce, of which `add_up` begins the second half."""

    def __init__(
        self,
        gradients: Mapping[str, Tensor],
        factors: RightFactors,
        peers: Peers,
        errors: Mapping[str, Tensor],
    ) -> None:
        """Begins to sum.

        Args:
            gradients: This rank's gradients by parameter, which become the sums.
            factors: The right factors, which become those of this step.
            peers: The ranks.
            errors: Become what this rank's gradients have besides its part of the sums.
        """
        self._gradients, self._errors = gradients, errors
        self._factors, self._peers = factors, peers
        self._matrices = {name: _matrix(gradient) for name, gradient in gradients.items()}
        right = factors.present
        with _as_they_are(factors):
            self._left = {name: matrix @ right[name] for name, matrix in self._matrices.items()}
        self._right: dict[str, Tensor] = {}
        self._summed, self._work = self._begin(self._left.values())

    def add_up(self) -> None:
        """Waits for the left factors, and begins to sum the right ones; nothing the second time."""
        if self._right:
            return
        self._take(self._left)
        if self._peers.index == 0:
            for left in self._left.values():
                left.copy_(torch.linalg.qr(left).Q)
        self._give_to_all(self._summed)
        with _as_they_are(self._factors):
            for name, matrix in self._matrices.items():
                self._right[name] = right = matrix.T @ self._left[name]
                error = matrix - product(self._left[name], right)
                self._errors[name].copy_(error.view(self._errors[name].shape))
        self._matrices = {}
        self._summed, self._work = self._begin(self._right.values())

    def finish(self) -> None:
        """Waits for the right factors, and multiplies."""
        self.add_up()
        self._take(self._right)
        for name, gradient in self._gradients.items():
            whole = product(self._left[name], self._right[name])
            gradient.copy_(whole.view(gradient.shape))
        self._factors.take(self._right)

    def _give_to_all(self, flat: Tensor) -> None:
        """Gives all ranks the first one's numbers."""
        self._peers.traffic.count_halves("gradients", flat.nbytes, self._peers.count, halves=1)
        dist.broadcast(flat, group=self._peers.group.process_group, group_src=0)

    def _begin(self, parts: Iterable[Tensor]) -> tuple[Tensor, Any]:
        """Begins to sum tensors in one message; returns it, and what must be waited for."""
        summed = torch.cat([part.reshape(-1) for part in parts])
        self._peers.traffic.count_halves("gradients", summed.nbytes, self._peers.count, halves=2)
        group = self._peers.group.process_group
        return summed, dist.all_reduce(summed, group=group, async_op=True)

    def _take(self, parts: dict[str, Tensor]) -> None:
        """Waits for the sums, which take the places of these tensors."""
        wait_for([self._work])
        sums = self._summed.split([part.numel() for part in parts.values()])
        for name, total in zip(tuple(parts), sums, strict=True):
            parts[name] = total.view(parts[name].shape)


def product(left_AR: Tensor, right_BR: Tensor) -> Tensor:
    """Returns the product (A, B) of two factors, to the same bits on any machine."""
    whole_AB = left_AR[:, :1] * right_BR[:, 0]
    for column in range(1, right_BR.shape[1]):
        whole_AB += left_AR[:, column : column + 1] * right_BR[:, column]
    return whole_AB


def _as_they_are(factors: RightFactors) -> torch.autocast:
    """Returns a context in which numbers keep their format, whatever the script's autocast says."""
    device = next(iter(factors.present.values())).device
    return torch.autocast(device.type, enabled=False)


def _matrix(gradient: Tensor) -> Tensor:
    return gradient.reshape(len(gradient), -1)


def _random(name: str, shape: tuple[int, int]) -> Tensor:
    """Returns the first right factor of a parameter, the same on all ranks and in all runs."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64)
