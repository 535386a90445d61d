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
        self, model: nn.Module, device: torch.device, stored: StoredValues | None = None
    ) -> None:
        """Raises `UserError` for a module with tensors on meta that get no values."""
        self._device = device
        self._stored = stored
        self._waiting = {id(t) for m in model.modules() for t in _own(m) if t.is_meta}
        for name, module in model.named_modules() if self._waiting else ():
            own = [t for t in _own(module) if self.is_waiting(t)]
            if _reset(module) is None and not self._all_stored(own):
                where = f"module {name!r}" if name else "the model itself"
                tensors = (
                    *module.named_parameters(recurse=False),
                    *module.named_buffers(recurse=False),
                )
                raise UserError(
                    f"{where}, a {type(module).__name__}, has tensors on the meta device "
                    f"({list_text((n for n, t in tensors if self.is_waiting(t)), 3)}) and no "
                    "reset_parameters() that gives them values: write one, or build them on the CPU"
                )

    @property
    def is_needed(self) -> bool:
        """Returns whether something still has no memory."""
        return bool(self._waiting)

    def is_waiting(self, tensor: Tensor) -> bool:
        """Returns whether this tensor of the model still has no memory."""
        return id(tensor) in self._waiting

    def put_stand_ins(self, model: nn.Module) -> None:
        """Replaces each tensor on meta by one on the device that shows its shape and holds a single
        number, so that an optimizer can be built."""
        for module in model.modules():
            for tensor in _own(module):
                if tensor.is_meta:
                    number = torch.zeros((), dtype=tensor.dtype, device=self._device)
                    _swap(tensor, number.expand(tensor.shape))

    def materialize(self, module: nn.Module) -> list[nn.Parameter]:
        """Gives what has no memory in this module its own, and first values, equal on all ranks.

        All ranks call this together. Returns the parameters that had none.
        """
        fresh: dict[int, Tensor] = {}
        for part in module.modules():
            own = [t for t in _own(part) if id(t) in self._waiting or id(t) in fresh]
            for tensor in own:
                if id(tensor) in self._waiting:
                    self._waiting.discard(id(tensor))
                    fresh[id(tensor)] = tensor
                    _swap(
                        tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
                    )
            if not self._all_stored(own) and (reset := _reset(part)) is not None:
                getattr(part, reset)()
        if self._stored is not None:
            for tensor in fresh.values():
                if self._stored.has(tensor):
                    self._stored.fill(tensor)
        if dist.is_initialized() and dist.get_world_size() > 1:
            for tensor in fresh.values():
                dist.broadcast(tensor.data, 0)
        return [tensor for tensor in fresh.values() if isinstance(tensor, nn.Parameter)]

    def _all_stored(self, tensors: list[Tensor]) -> bool:
        """Returns whether no value of these tensors must be made."""
        stored = self._stored
        return not tensors or (stored is not None and all(stored.has(t) for t in tensors))


def _own(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _reset(module: nn.Module) -> str | None:
    return next((name for name in RESETS if callable(getattr(module, name, None))), None)


def _swap(tensor: Tensor, other: Tensor) -> None:
    """Gives a tensor the contents of another one; it stays the same object."""
    if isinstance(tensor, nn.Parameter):
        other = nn.Parameter(other, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, other)
