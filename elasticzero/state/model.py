"""Describes model and optimizer state as named tensors, and how the ranks partition them.

Names: `model/<name in state_dict>`, `not-saved/<name>` of a buffer that is not in it,
`module/<module>/<path>` of a module's extra state, `optimizer/<parameter>/<key>`,
`optimizers/<kind>/<parameter or optimizer>/<path>` of what an optimizer keeps in another form,
`tracked/<object>/<path>`, `rng/<kind>/<rank>`, `residual/<parameter>` of what ranks have not sent
of gradients yet, with a row for each rank, `right-factor/<parameter>` of `--wire powersgd:RANK`,
`outer/parameters/<parameter>` and `outer/momentum/<parameter>` of what islands have averaged.
Values that are not tensors become JSON, in which `{"$tensor": name}` stands for a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from elasticzero.errors import UserError
from elasticzero.nested import has_no_memory
from elasticzero.spans import Rule, Span, dealt, fsdp_rows
from elasticzero.state.buffers import ModelBuffers
from elasticzero.state.extra_state import KEY as EXTRA_STATE
from elasticzero.state.extra_state import ExtraStates

MODEL, OPTIMIZER, TRACKED, GROUPS, RNG = "model/", "optimizer/", "tracked/", "groups/", "rng/"
NOT_SAVED, EXTRA = "not-saved/", "module/"
OPTIMIZER_TREE = "optimizers/"
RESIDUAL, FACTOR, OUTER = "residual/", "right-factor/", "outer/"


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
    if tensor.dtype == getattr(torch, "float4_e2m1fn_x2", None):  # it has finite values only
        return True
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
    optimizers: dict[str, Any] = field(default_factory=dict)
    """Small state of the optimizers that is no tensor, equal on all ranks, as JSON."""
    residual: Mapping[str, Tensor] = field(default_factory=dict)
    """What this rank has not sent of gradients yet, by parameter: every rank has its own."""
    factors: Mapping[str, Tensor] = field(default_factory=dict)
    """The right factors of `--wire powersgd:RANK` by parameter, which all ranks have alike."""
    outer: Mapping[str, Tensor] = field(default_factory=dict)
    """Outer parameters and momentum of islands, which all ranks have alike."""
    residual_sum: Mapping[str, Tensor] = field(default_factory=dict)
    """The sum of that of ranks which hold the same part of the state, where they have summed it to
    leave together."""

    def written(self, world_size: int, rank: int) -> dict[str, Span]:
        """Returns the elements of each tensor that this rank writes, where all ranks are one row.

        Args:
            world_size: Number of ranks.
            rank: This rank.
        """
        spans: dict[str, Span] = {}
        for group in self.partitions:
            shapes = [self.specs[name].shape for name in group.names]
            parts = dealt(group.rule, shapes, group.ranks, world_size, rank)
            spans |= {group.names[index]: span for index, span in parts.items()}
        return spans

    def trained(self) -> set[str]:
        """Returns the names that must be finite; call it before buffers and other tensors are
        added."""
        names = self.specs.keys() - self.frozen
        return {name for name in names if not name.startswith(OPTIMIZER_TREE)}

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

    def add_residual(
        self, residual: Mapping[str, Tensor], rank: int, ranks: int, rows: int
    ) -> None:
        """Adds a residual as this rank's row of tensors that have one for each rank.

        Args:
            residual: The residual by parameter.
            rank: This rank among those that write the state.
            ranks: Their number.
            rows: Number of rows of ranks that hold the whole state each.
        """
        names = tuple(RESIDUAL + name for name in residual)
        for name, tensor in zip(names, residual.values(), strict=True):
            self.specs[name] = spec = Spec(dtype=tensor.dtype, shape=(ranks, *tensor.shape))
            self.held[name] = LocalTensor(tensor, fsdp_rows(spec.shape, ranks, rank, rows).start)
        if names:
            self.partitions.append(Partition(rule="fsdp_rows", names=names))

    def add_even(self, tensors: Mapping[str, Tensor]) -> None:
        """Adds tensors that every rank has whole, to be written in even parts."""
        for name, tensor in tensors.items():
            self.specs[name] = spec_of(tensor)
            self.held[name] = LocalTensor(tensor)
        if tensors:
            self.partitions.append(Partition(rule="even", names=tuple(tensors)))


class NamedModel:
    """Names what a model's `state_dict` holds: its own parameters, its buffers, and the extra state
    of its modules.

    The names are taken before a strategy wraps the model. A tensor with several names keeps the
    first.
    """

    def __init__(self, model: nn.Module, device: torch.device | None = None) -> None:
        """Takes the names.

        Args:
            model: The model.
            device: Where a buffer is put that is None now; None: the CPU.

        Raises:
            UserError: The `state_dict` holds what could not be stored or restored.
        """
        self.parameters: dict[str, nn.Parameter] = {}
        self.aliases: dict[str, str] = {}
        """Further names, each with the first one of the same tensor."""
        self.buffers = ModelBuffers(model, device)
        self.buffers.check()
        self.extra_states = ExtraStates(model)
        tensors: list[tuple[str, Tensor]] = [*model.named_parameters(remove_duplicate=False)]
        tensors += model.named_buffers(remove_duplicate=False)
        first: dict[int, str] = {}
        for name, tensor in tensors:
            if (first_name := first.setdefault(id(tensor), name)) != name:
                self.aliases[name] = first_name
            elif isinstance(tensor, nn.Parameter):
                _check_memory(name, tensor)
                self.parameters[name] = tensor
        _check_entries(model, {name for name, _ in tensors})

    def name_of(self) -> dict[int, str]:
        """Returns the parameters' names by `id`."""
        return {id(parameter): name for name, parameter in self.parameters.items()}


def _check_memory(name: str, tensor: Tensor) -> None:
    """Raises `UserError` for a parameter that wraps other tensors, which no strategy can copy."""
    if has_no_memory(tensor):
        raise UserError(
            f"parameter {name!r} is a {type(tensor).__name__}, which has no memory of its own and "
            "wraps other tensors: a session trains plain parameters; dequantize it, or keep it out "
            "of the model and save it with checkpoint.save"
        )


def _check_entries(model: nn.Module, tensors: set[str]) -> None:
    """Raises `UserError` for an entry of the `state_dict` that is neither one of these tensors nor
    a module's extra state, as one that a hook or `_save_to_state_dict` adds."""
    for name, value in model.state_dict().items():
        if name not in tensors and name.rpartition(".")[2] != EXTRA_STATE:
            raise UserError(
                f"the model's state_dict holds a {type(value).__name__} under {name!r} that is no "
                "parameter and no buffer of a module; make it a buffer, or return it from the "
                "module's get_extra_state"
            )


def called_parts(model: nn.Module) -> Iterator[nn.Module]:
    """Yields what a script calls: the model, or its parts where it has no forward of its own."""
    if getattr(model.forward, "__func__", None) is not nn.Module.forward:
        yield model
        return
    for child in model.children():
        yield from called_parts(child)
