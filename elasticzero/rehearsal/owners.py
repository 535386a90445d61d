"""Reads what training goes on from where it lives: from the model's modules, the optimizers and the
tracked objects themselves, as they are at that moment.

Nothing here asks what a capture would store: a value that a capture forgets must be among these.
What a strategy divides is gathered whole, so that the values are the same in every world.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from elasticzero.comm.gather import assembled
from elasticzero.comm.process_group import ProcessGroups
from elasticzero.errors import UserError
from elasticzero.parallel.base import Strategy
from elasticzero.parallel.optimizers.attributes import own_attributes
from elasticzero.parallel.optimizers.state_dicts import changes_state_dict
from elasticzero.rehearsal.projection import PLAIN, leaves, live_value
from elasticzero.rehearsal.records import LiveValue
from elasticzero.spans import fsdp_rows
from elasticzero.state.auxiliary import AuxiliaryState, Stateful
from elasticzero.state.extra_state import KEY
from elasticzero.torch_internals.tensors import buffers_of

PARAMETER, BUFFER, EXTRA_STATE = "parameter", "buffer", "extra state"
OPTIMIZER, ATTRIBUTE, TRACKED, GENERATOR = (
    "optimizer",
    "optimizer attribute",
    "tracked",
    "generator",
)
NOT_OPTIONS = ("params", "param_names")
"""Keys of a group of parameters that are no options of it."""
CONTAINERS = (Mapping, list, tuple)


@dataclass(frozen=True, slots=True)
class Part:
    """Holds this rank's elements of a divided tensor."""

    kind: str
    name: str
    elements: Tensor
    start: int
    """Index of the first of them in the whole tensor, flattened."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""

    @property
    def spec(self) -> list[Any]:
        """Returns what all ranks must know of it, as JSON."""
        dtype = str(self.elements.dtype).removeprefix("torch.")
        return [self.kind, self.name, dtype, list(self.shape), self.start, self.elements.numel()]


class Guard(Stateful, Protocol):
    """Describes what decides whether steps are applied."""

    @property
    def keeps_state(self) -> bool:
        """Returns whether something of it is part of the training state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owners:
    """Holds the objects in which the training state of one rank lives."""

    model: nn.Module
    """The script's model, as the strategy has laid it over the ranks."""
    strategy: Strategy
    auxiliary: AuxiliaryState
    guard: Guard
    groups: ProcessGroups | None
    """The process groups; None for one process alone."""

    @property
    def is_first(self) -> bool:
        """Returns whether this rank has the whole values."""
        return self.groups is None or self.groups.rank_info.rank == 0

    @property
    def ranks(self) -> int:
        """Returns the number of ranks."""
        return 1 if self.groups is None else self.groups.rank_info.world_size

    def live(self) -> tuple[LiveValue, ...]:
        """Returns all whole values on rank 0, and none on the others; all ranks call this
        together, between two steps."""
        self.strategy.settle()
        divided = self.strategy.shards > 1 and self.ranks > 1
        if not divided and not self.is_first:
            return ()
        with torch.no_grad():
            parts, values = self._sorted()
            if divided and self.groups is not None:
                values = _gathered(parts, values, self.groups)
            else:
                values += [live_value(p.kind, p.name, p.elements.reshape(p.shape)) for p in parts]
        return tuple(values) if self.is_first else ()

    def tensors(self) -> Iterator[Tensor]:
        """Yields the tensors of the model, the optimizers and the tracked modules."""
        things = (self.model, *self.auxiliary.tracked.values())
        for module in (thing for thing in things if isinstance(thing, nn.Module)):
            yield from (*module.parameters(), *module.buffers())
        for optimizer in self.strategy.optimizers.by_name.values():
            for _, leaf in leaves("", list(optimizer.state.values())):
                if isinstance(leaf, Tensor):
                    yield leaf
        for thing in self.auxiliary.tracked.values():
            yield from (
                leaf for _, leaf in leaves("", thing.state_dict()) if isinstance(leaf, Tensor)
            )

    @property
    def objects(self) -> list[object]:
        """Returns the objects of which everything is read here."""
        optimizers = self.strategy.optimizers.by_name.values()
        return [self.model, *optimizers, *self.auxiliary.tracked.values()]

    def generators(self) -> tuple[LiveValue, ...]:
        """Returns the states of this rank's random generators."""
        states = self.auxiliary.generators().tensors()
        return tuple(live_value(GENERATOR, name, state) for name, state in states.items())

    def _sorted(self) -> tuple[list[Part], list[LiveValue]]:
        """Returns this rank's parts of divided tensors, and the values that it has whole."""
        parts: list[Part] = []
        values: list[LiveValue] = []
        whole = chain(self._tracked(), self._modules()) if self.is_first else ()
        for item in chain(whole, self._of_optimizers(), self._parameters()):
            if isinstance(item, Part):
                parts.append(item)
            else:
                values.append(live_value(*item))
        return parts, values

    def _tracked(self) -> Iterator[tuple[str, str, Any]]:
        for name, thing in self.auxiliary.tracked.items():
            yield from _named(TRACKED, leaves(name, thing.state_dict()))
        if self.guard.keeps_state:
            yield from _named(TRACKED, leaves("step guard", self.guard.state_dict()))

    def _modules(self) -> Iterator[tuple[str, str, Any]]:
        """Yields buffers, those that the model does not save and those that are None too, and extra
        state."""
        for path, module in self.model.named_modules():
            prefix = f"{path}." if path else ""
            for key, tensor in buffers_of(module).items():
                yield BUFFER, prefix + key, tensor
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                value = module.get_extra_state()
                yield from _named(EXTRA_STATE, leaves(prefix + KEY, value))

    def _parameters(self) -> Iterator[tuple[str, str, Any] | Part]:
        for name, parameter in self.model.named_parameters():
            if isinstance(parameter, DTensor):
                rows = parameter.to_local().detach()
                shape = tuple(parameter.shape)
                assert self.groups is not None
                span = fsdp_rows(shape, self.ranks, self.groups.rank_info.rank)
                yield Part(PARAMETER, name, rows, span.start, shape)
            elif self.is_first:
                yield PARAMETER, name, parameter.detach()

    def _of_optimizers(self) -> Iterator[tuple[str, str, Any] | Part]:
        optimizers = self.strategy.optimizers
        yield from self._masters()
        for name, optimizer in optimizers.by_name.items():
            prefix = f"{name}." if name else ""
            yield from self._state(prefix, optimizer)
            for number, group in enumerate(optimizer.param_groups):
                options = {k: v for k, v in group.items() if k not in NOT_OPTIONS}
                path = f"{prefix}param_groups[{number}]"
                for key, value in options.items():
                    yield from _named(OPTIMIZER, leaves(f"{path}[{key!r}]", value))
            yield from self._attributes(prefix, optimizer, {id(optimizer)})
            if self.strategy.shards == 1 and changes_state_dict(optimizer):
                with suppress(UserError):  # zero1 to zero3 refuse the call, in a world of one too
                    entries = optimizer.state_dict()
                    rest = {k: v for k, v in entries.items() if k not in ("state", "param_groups")}
                    yield from _named(OPTIMIZER, leaves(f"{prefix}state_dict()", rest))

    def _masters(self) -> Iterator[Part]:
        """Yields the 32-bit masters of parameters that have 16 bits."""
        group_of = self.strategy.optimizers.group_of
        for name, local in self.strategy.pieces().items():
            spec = group_of[name].specs[name]
            if local.tensor.dtype != spec.dtype:
                path = f"state[{name!r}]['master']"
                yield Part(OPTIMIZER, path, local.tensor.detach(), local.start, spec.shape)

    def _state(
        self, prefix: str, optimizer: torch.optim.Optimizer
    ) -> Iterator[tuple[str, str, Any] | Part]:
        """Yields what an optimizer keeps by parameter, and under other keys."""
        group_of = self.strategy.optimizers.group_of
        pieces = {id(p.tensor): (name, p) for name, p in self.strategy.pieces().items()}
        for number, (key, state) in enumerate(optimizer.state.items()):
            name, piece = pieces.get(id(key), ("", None))
            shown = f"parameter {number}" if isinstance(key, Tensor) else repr(key)
            path = f"{prefix}state[{repr(name) if piece else shown}]"
            entries = state.items() if isinstance(state, Mapping) else ()
            if not entries:
                yield from _named(OPTIMIZER, leaves(path, state))
            for entry, value in entries:
                place = f"{path}[{entry!r}]"
                if piece is not None and self._is_divided(value, piece.tensor):
                    shape = group_of[name].specs[name].shape
                    yield Part(OPTIMIZER, place, value.detach(), piece.start, shape)
                else:
                    yield from _named(OPTIMIZER, leaves(place, value))

    def _is_divided(self, value: Any, piece: Tensor) -> bool:
        """Tells whether a value has one element for each of a piece, and a plain tensor's form."""
        return type(value) in (Tensor, nn.Parameter) and bool(value.shape == piece.shape)

    def _attributes(
        self, prefix: str, optimizer: torch.optim.Optimizer, seen: set[int]
    ) -> Iterator[tuple[str, str, Any] | Part]:
        """Yields plain values and tensors among an optimizer's own attributes, and what optimizers
        inside of it keep. Under strategies that divide its state, tensors are left out.

        Args:
            prefix: What the names begin with.
            optimizer: The optimizer.
            seen: The `id` of optimizers that are not looked at again; those inside are added.
        """
        parameters = {id(parameter) for parameter in self.model.parameters()}
        for name, value in own_attributes(optimizer).items():
            if isinstance(value, torch.optim.Optimizer):
                if id(value) not in seen:
                    seen.add(id(value))
                    yield from self._state(f"{prefix}{name}.", value)
                    yield from self._attributes(f"{prefix}{name}.", value, seen)
                continue
            for path, leaf in leaves(f"{prefix}{name}", value):
                is_tensor = isinstance(leaf, Tensor) and self.strategy.shards == 1
                if isinstance(leaf, (*PLAIN, *CONTAINERS)) or (
                    is_tensor and id(leaf) not in parameters
                ):
                    yield ATTRIBUTE, path, leaf


def _named(kind: str, items: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, str, Any]]:
    for name, value in items:
        yield kind, name, value


def _gathered(parts: list[Part], values: list[LiveValue], groups: ProcessGroups) -> list[LiveValue]:
    """Returns, on rank 0, the values of all ranks and the tensors that are whole once gathered.

    All ranks call this together. Of a value that several ranks have, the lowest rank's counts.

    Args:
        parts: This rank's parts.
        values: What this rank has whole.
        groups: The process groups.
    """
    told = [dataclasses.astuple(value) for value in values]
    message = json.dumps({"parts": [part.spec for part in parts], "values": told}).encode()
    tables = [json.loads(text) for text in groups.exchange(message)]
    whole: dict[tuple[str, str], LiveValue] = {}
    for kind, name, digest, text, sums in chain.from_iterable(t["values"] for t in tables):
        whole.setdefault((kind, name), LiveValue(kind, name, digest, text, tuple(sums)))
    rank, part_of = groups.rank_info.rank, {(part.kind, part.name): part for part in parts}
    for key, tensor in _wholes([table["parts"] for table in tables]).items():
        dtype, shape, givers = tensor
        part = part_of[key] if rank in givers else None
        start = 0 if part is None else part.start
        elements = None if part is None else part.elements
        numel = torch.Size(shape).numel()
        flat = assembled(elements, start, numel, getattr(torch, dtype), groups)
        if rank == 0:
            whole[key] = live_value(*key, flat.view(shape))
    return list(whole.values())


def _wholes(
    specs_by_rank: list[list[list[Any]]],
) -> dict[tuple[str, str], tuple[str, list[int], set[int]]]:
    """Returns type and shape of each tensor that has parts, and the ranks that give them.

    Where several ranks have the same elements, the lowest one gives them.

    Args:
        specs_by_rank: What each rank has told of its parts.
    """
    wholes: dict[tuple[str, str], tuple[str, list[int], set[int]]] = {}
    assigned: set[tuple[str, str, int]] = set()
    for rank, specs in enumerate(specs_by_rank):
        for kind, name, dtype, shape, start, count in specs:
            givers = wholes.setdefault((kind, name), (dtype, shape, set()))[2]
            if count and (kind, name, start) not in assigned:
                assigned.add((kind, name, start))
                givers.add(rank)
    return dict(sorted(wholes.items()))
