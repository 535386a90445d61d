"""Describes the pieces of parameters that a rank optimizes, and how their state is dealt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from elasticzero.spans import Rule, Span
from elasticzero.state.digests import same_bits
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


COMPARED_BYTES = 256 << 10
"""Size in bytes of the values that are compared with their masters at once; the comparison takes
three times as much memory."""


@dataclass(frozen=True, slots=True)
class MasteredValues:
    """Holds elements of the model in 16 bits, and the 32-bit masters that an optimizer steps."""

    values: Tensor
    master: Tensor


def take_changed_values(pairs: Iterable[MasteredValues]) -> None:
    """Gives each master the values that are not its own in 16 bits, which the script has set.

    A script that clamps parameters, decays them or puts other ones back so changes what is stepped.
    """
    for group in _grouped(pairs):
        values = [pair.values.reshape(-1) for pair in group]
        rounded = [torch.empty_like(value) for value in values]
        torch._foreach_copy_(rounded, [pair.master.detach().reshape(-1) for pair in group])
        if same_bits(_joined(values), _joined(rounded)):
            continue
        for pair, value, before in zip(group, values, rounded, strict=True):
            master = pair.master.detach()
            taken = torch.where(before == value, master.reshape(-1), value.to(master.dtype))
            master.copy_(taken.view(master.shape))


def _grouped(pairs: Iterable[MasteredValues]) -> Iterator[list[MasteredValues]]:
    """Yields pairs of one dtype and device whose values are compared at once."""
    group: list[MasteredValues] = []
    size = 0
    for pair in (part for whole in pairs for part in _cut(whole)):
        values = pair.values
        first = group[0].values if group else values
        alike = (values.dtype, values.device) == (first.dtype, first.device)
        if group and (not alike or size + values.nbytes > COMPARED_BYTES):
            yield group
            group, size = [], 0
        group.append(pair)
        size += values.nbytes
    if group:
        yield group


def _cut(pair: MasteredValues) -> Iterator[MasteredValues]:
    """Yields a pair in parts of at most `COMPARED_BYTES`, which share its memory."""
    values, master = pair.values, pair.master.detach()
    contiguous = values.is_contiguous() and master.is_contiguous()
    if not contiguous or values.nbytes <= COMPARED_BYTES:
        yield pair
        return
    count = COMPARED_BYTES // values.element_size()
    parts = zip(values.view(-1).split(count), master.view(-1).split(count), strict=True)
    for part_of_values, part_of_master in parts:
        yield MasteredValues(part_of_values, part_of_master)


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
