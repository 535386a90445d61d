"""Computes what an island contributes of its parameters, and what it takes of a round.

The functions work on flat tensors of one shape, piece by piece, so that they need little memory
beside them.
Shapes: E elements of a fragment, or of a part of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

PIECE = 1 << 20
"""Elements that are computed at a time."""


def write_difference(outer_E: Tensor, local_E: Tensor, out_E: Tensor) -> None:
    """Writes an island's contribution: by how much outer parameters exceed its own. Where its own
    have fewer bits, they are compared with what was taken of the outer ones, in as many bits.

    Args:
        outer_E: The outer parameters that the island last took.
        local_E: Its parameters, of any floating-point dtype and on any device.
        out_E: Where the difference goes, of the dtype of `outer_E`.
    """
    for piece in _pieces(outer_E):
        outer = outer_E[piece].to(local_E.dtype).to(outer_E.dtype)
        torch.sub(outer, local_E[piece].to(outer.device, outer.dtype), out=out_E[piece])


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Holds what an island's parameters would be without the steps since its last contribution.

    They are the outer parameters that it last took, less its contribution where that is not
    settled, which the outer parameters do not have yet.
    """

    outer_E: Tensor
    sent_E: Tensor | None = None
    """The contribution that is not settled; None: there is none."""

    def at(self, piece: slice) -> Tensor:
        """Returns these parameters' elements of a piece."""
        outer = self.outer_E[piece]
        return outer if self.sent_E is None else outer - self.sent_E[piece]


def take(local_E: Tensor, before: Reference, after: Reference, alpha: float | None) -> None:
    """Takes a round's outer parameters into an island's own, in place.

    Where they come in time, `alpha` of the island's own parameters stays (arXiv 2501.18512). Where
    they come later, all steps since the contribution stay as they are: the island's parameters move
    by as much as the reference does.

    Args:
        local_E: The island's parameters, of any floating-point dtype and on any device.
        before: What they were without the steps since the last contribution.
        after: The same with the round.
        alpha: Share of its own parameters that stays; None: the round comes later.
    """
    for piece in _pieces(local_E):
        there = after.at(piece)
        present = local_E[piece].to(there.device, there.dtype)
        if alpha is None:
            there = (present - before.at(piece)).add_(there)
        elif alpha:
            there = (present * alpha).add_(there * (1.0 - alpha))
        local_E[piece] = there.to(local_E.device, local_E.dtype)


def _pieces(flat_E: Tensor) -> Iterator[slice]:
    for start in range(0, flat_E.numel(), PIECE):
        yield slice(start, start + PIECE)
