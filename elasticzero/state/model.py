"""Describes model and optimizer state as named tensors, and how the ranks partition them.

Names: `model/<name in state_dict>`, `optimizer/<parameter>/<key>`, `tracked/<object>/<path>`,
`rng/<kind>/<rank>`. Values that are not tensors become JSON, in which `{"$tensor": name}` stands
for a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from elasticzero.errors import UserError
from elasticzero.spans import Rule, Span

MODEL, OPTIMIZER, TRACKED, GROUPS, RNG = "model/", "optimizer/", "tracked/", "groups/", "rng/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """Describes a whole tensor, wherever its elements lie."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def spec_of(tensor: Tensor) -> Spec:
    return Spec(dtype=tensor.dtype, shape=tuple(tensor.shape))


def all_finite(tensor: Tensor) -> bool:
    """Tells whether every element is finite; torch cannot say so of numbers of 8 bits."""
    if tensor.is_floating_point() and tensor.element_size() == 1:
        tensor = tensor.float()
    return bool(torch.isfinite(tensor).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Lists tensors that are distributed over the ranks together, by one rule."""

    rule: Rule
    names: tuple[str, ...]
    ranks: tuple[int, ...] = ()
    """The rank of each tensor, under the rule `whole`."""


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """Holds elements of a tensor that this rank has in memory: those from `start` on."""

    tensor: Tensor
    start: int = 0


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """Names a span of a stored tensor, and the tensor to fill with it."""

    name: str
    span: Span
    tensor: Tensor
    """The tensor to fill: as many elements as the span, of the stored dtype, any shape, any
    device."""


@dataclass(slots=True)
class RankState:
    """Holds the training state of one rank: every tensor's spec, the partitions, and the local
    elements.

    The elements cover what the partitions give to the rank.
    """

    specs: dict[str, Spec] = field(default_factory=dict)
    partitions: list[Partition] = field(default_factory=list)
    held: dict[str, LocalTensor] = field(default_factory=dict)
    frozen: set[str] = field(default_factory=set)
    """Parameters that training does not change; they may hold anything, such as -inf in a mask."""

    def trained(self) -> set[str]:
        """Returns the names that must be finite; call it before buffers and other tensors are
        added."""
        return self.specs.keys() - self.frozen

    def not_finite(self) -> list[str]:
        """Returns the names with non-finite elements on this rank; reads every element."""
        names = [name for name in self.trained() if name in self.held]
        return sorted(name for name in names if not all_finite(self.held[name].tensor))

    def add_whole(self, tensors: Mapping[str, Tensor], ranks: tuple[int, ...]) -> None:
        """Adds tensors that lie whole with one rank each."""
        for name, tensor in tensors.items():
            self.specs[name] = spec_of(tensor)
            self.held[name] = LocalTensor(tensor)
        if tensors:
            self.partitions.append(Partition(rule="whole", names=tuple(tensors), ranks=ranks))

    def add_even(self, tensors: Mapping[str, Tensor]) -> None:
        """Adds tensors that every rank has whole, to be written in even parts."""
        for name, tensor in tensors.items():
            self.specs[name] = spec_of(tensor)
            self.held[name] = LocalTensor(tensor)
        if tensors:
            self.partitions.append(Partition(rule="even", names=tuple(tensors)))


class NamedModel:
    """Names a model's own parameters and persistent buffers by their `state_dict` names.

    The names are taken before a strategy wraps the model. A tensor with several names keeps the
    first.
    """

    def __init__(self, model: nn.Module) -> None:
        entries = model.state_dict()
        strange = [name for name, value in entries.items() if not isinstance(value, Tensor)]
        if strange:
            raise UserError(
                f"the model's state_dict holds something that is no tensor under {strange[0]!r}; "
                "keep it in an object of its own and give that to session.track"
            )
        self.parameters: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, Tensor] = {}
        self.aliases: dict[str, str] = {}
        first: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._add(name, parameter, self.parameters, first)
        for name, buffer in model.named_buffers(remove_duplicate=False):
            if name in entries:
                self._add(name, buffer, self.buffers, first)

    def _add(self, name: str, tensor: Any, into: dict[str, Any], first: dict[int, str]) -> None:
        if (first_name := first.setdefault(id(tensor), name)) != name:
            self.aliases[name] = first_name
        else:
            into[name] = tensor

    def name_of(self) -> dict[int, str]:
        """Returns the parameters' names by `id`."""
        return {id(parameter): name for name, parameter in self.parameters.items()}


def called_parts(model: nn.Module) -> Iterator[nn.Module]:
    """Yields what a script calls: the model, or its parts where it has no forward of its own."""
    if getattr(model.forward, "__func__", None) is not nn.Module.forward:
        yield model
        return
    for child in model.children():
        yield from called_parts(child)
