"""Describes the pieces of parameters that a rank optimizes, and how their state is dealt."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from elasticzero.spans import Rule, Span
from elasticzero.state.model import Partition


@dataclass(frozen=True, slots=True, eq=False)
class ParameterPiece:
    """Holds the elements of a parameter that this rank optimizes."""

    name: str
    start: int
    """Index of its first element in the flattened parameter."""
    parameter: nn.Parameter
    """Parameter that the optimizer sees: 1-D, or the whole parameter in its shape."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    counts: bool = True
    """True if its gradient counts in the norm of a row; False for a second copy of it."""
    values: Tensor | None = None
    """The model's own elements, in 16 bits, where `parameter` is their 32-bit master."""

    @property
    def span(self) -> Span:
        return Span(self.start, self.start + self.parameter.numel())


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionedGroup:
    """Parameters whose state is dealt to the ranks together."""

    rule: Rule
    names: tuple[str, ...]
    owners: tuple[int, ...]
    """The rank that holds the first element of each."""

    def partition(self, names: tuple[str, ...]) -> Partition:
        """Returns how tensors shaped like the parameters, with these names, are dealt."""
        ranks = self.owners if self.rule == "whole" else ()
        return Partition(rule=self.rule, names=names, ranks=ranks)
