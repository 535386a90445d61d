"""Gives memory and first values to a model that was built on the meta device.

A module's `reset_parameters` makes the values, as it does when the module is built, in the order of
`model.modules()`. So they are those of a model that was not built on meta, for the same seed, as
far as its modules initialise themselves so and share nothing. Values that are read from files take
their place. Rank 0's values are taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elasticzero.errors import UserError
from elasticzero.rank_groups.group import ALONE, RankGroup
from elasticzero.text import list_text

RESETS = ("reset_parameters", "_reset_parameters")
"""The methods by which torch's own modules initialise themselves."""


class StoredValues(Protocol):
    """Has first values for some of a model's tensors, in place of those that modules make."""

    def has(self, tensor: Tensor) -> bool: ...

    def fill(self, tensor: Tensor) -> None:
        """Gives one of these tensors its values, on rank 0 at least."""
        ...


class Materializer:
    """Materializes a model, whole or one part after the other.

    Parameters and buffers stay the same objects, so that tied ones stay tied.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        stored: StoredValues | None = None,
        group: RankGroup = ALONE,
    ) -> None:
        """Lists what is on the meta device.

        Args:
            model: The model, which is not changed yet.
            device: The device on which it gets memory.
            stored: First values of some of its tensors; None: modules make all of them.
            group: All ranks, which get rank 0's values.

        Raises:
            UserError: A module has tensors on meta that get no values.
        """
        self._device = device
        self._stored = stored
        self._group = group
        self._on_meta = frozenset(id(t) for m in model.modules() for t in _own(m) if t.is_meta)
        self._waiting = set(self._on_meta)
        for name, module in model.named_modules() if self._waiting else ():
            tensors = (
                *module.named_parameters(recurse=False),
                *module.named_buffers(recurse=False),
            )
            made = [of for of, t in tensors if self.gives(t) and not self._is_stored(t)]
            if made and _reset(module) is None:
                where = f"module {name!r}" if name else "the model itself"
                raise UserError(
                    f"{where}, a {type(module).__name__}, has tensors on the meta device "
                    f"({list_text(made, 3)}) and no reset_parameters() that gives them values: "
                    "write one, or build them on the CPU"
                )

    @property
    def is_needed(self) -> bool:
        """Returns whether something still has no memory."""
        return bool(self._waiting)

    def gives(self, tensor: Tensor) -> bool:
        """Returns whether this tensor of the model gets its memory and its values from here."""
        return id(tensor) in self._on_meta

    def put_stand_ins(self, model: nn.Module) -> None:
        """Replaces each tensor on meta by one on the device that shows its shape and holds a single
        number, so that an optimizer can be built."""
        self._make_what_is_not_stored(model)
        for module in model.modules():
            for tensor in _own(module):
                if tensor.is_meta:
                    number = torch.zeros((), dtype=tensor.dtype, device=self._device)
                    _swap(tensor, number.expand(tensor.shape))

    def materialize(self, module: nn.Module) -> list[nn.Parameter]:
        """Gives what has no memory in this module its own, and first values, equal on all ranks.

        All ranks call this together. Returns the parameters that had none.
        """
        self._make_what_is_not_stored(module)
        fresh = {id(t): t for part in module.modules() for t in _own(part) if self._allocate(t)}
        if self._stored is None:
            for part in module.modules():
                if any(id(t) in fresh for t in _own(part)):
                    _call_reset(part)
        for tensor in fresh.values():
            if self._stored is not None:
                self._stored.fill(tensor)
            self._broadcast(tensor)
        return [tensor for tensor in fresh.values() if isinstance(tensor, nn.Parameter)]

    def _make_what_is_not_stored(self, model: nn.Module) -> None:
        """Has modules make what is not stored while all else is on meta, where it stays as it is,
        whatever their methods do to it."""
        for part in model.modules() if self._stored is not None else ():
            made = [t for t in _own(part) if not self._is_stored(t) and self._allocate(t)]
            if made:
                _call_reset(part)
            for tensor in made:
                self._broadcast(tensor)

    def _allocate(self, tensor: Tensor) -> bool:
        """Gives a tensor memory if it waits for it, and returns whether it did."""
        if id(tensor) not in self._waiting:
            return False
        self._waiting.discard(id(tensor))
        _swap(tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device))
        return True

    def _is_stored(self, tensor: Tensor) -> bool:
        return self._stored is not None and self._stored.has(tensor)

    def _broadcast(self, tensor: Tensor) -> None:
        # A rank that comes into a world restores all values before it is connected.
        if len(self._group.ranks) > 1 and self._group.is_connected:
            dist.broadcast(tensor.data, 0, group=self._group.process_group)


def _own(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _reset(module: nn.Module) -> str | None:
    return next((name for name in RESETS if callable(getattr(module, name, None))), None)


def _call_reset(module: nn.Module) -> None:
    if (reset := _reset(module)) is not None:
        getattr(module, reset)()


def _swap(tensor: Tensor, other: Tensor) -> None:
    """Gives a tensor the contents of another one; it stays the same object."""
    if isinstance(tensor, nn.Parameter):
        other = nn.Parameter(other, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, other)
