"""Finds a model's buffers by name whenever they are asked for, copies them, and puts values in
their place.

A script may put another tensor in a buffer's place at any time, as `self.sum = self.sum + x` does
in a forward, of another shape or dtype, or None; so no tensor of the model is kept here.

Rules:
 BU1  Persistent buffers, which the model saves, are part of the training state.
 BU2  Another buffer is part of it from its first change on. Until then the script makes it anew.
 BU3  A buffer takes a value in its own memory where the shape, the dtype and the memory allow it,
      so that what the script has of it stays the buffer; else another tensor takes its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from elasticzero.errors import UserError
from elasticzero.state.digests import change_marks
from elasticzero.torch_internals import buffers_of, count_of_changes, unsaved_buffers_of


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferCopy:
    """Holds copies of a model's buffers at one time."""

    values: Mapping[str, Tensor] = field(default_factory=dict)
    """The buffers by the first name of each; those that are None are left out."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further names of the same tensors, each with the first one."""
    unset: tuple[str, ...] = ()
    """The names of the buffers that are None."""
    saved: Mapping[str, Tensor] = field(default_factory=dict)
    """The buffers of `values` that the model saves."""
    changed: Mapping[str, Tensor] = field(default_factory=dict)
    """The buffers of `values` that the model does not save and that have changed (BU2)."""

    def of(self, name: str) -> Tensor:
        """Returns the copy of the buffer that has this name among its names."""
        return self.values[self.aliases.get(name, name)]


class ModelBuffers:
    """Gives access to the buffers of a model, as they are when asked for."""

    def __init__(self, model: nn.Module, device: torch.device | None = None) -> None:
        """Takes the names of all that modules have registered, None or not.

        Args:
            model: The model.
            device: Where a buffer is put that is None now; None: the CPU.
        """
        self._device = device or torch.device("cpu")
        self._modules = [(f"{path}." if path else "", m) for path, m in model.named_modules()]
        self._counts = [len(buffers_of(module)) for _, module in self._modules]
        self._slots = {p + key: (m, key) for p, m in self._modules for key in buffers_of(m)}
        self.names = tuple(self._slots)
        """The names of all, None or not."""
        self.saved_names = frozenset(
            name for name, (m, key) in self._slots.items() if key not in unsaved_buffers_of(m)
        )
        """The names of those that the model saves, None or not."""
        self._unsaved: dict[str, tuple[tuple[int, ...], Tensor]] = {}
        """A mark that changes, and the newest copy, of each buffer that the model does not save."""
        self._changed: set[str] = set()

    def _tensor(self, name: str) -> Tensor | None:
        module, key = self._slots[name]
        return buffers_of(module).get(key)

    def now(self) -> dict[str, Tensor]:
        """Returns the buffers by the first name of each; those that are None are left out, and of
        those that the model does not save the sparse ones."""
        first: dict[int, str] = {}
        return {
            name: tensor
            for name in self.names
            if (tensor := self._tensor(name)) is not None
            and (name in self.saved_names or tensor.layout is torch.strided)
            and first.setdefault(id(tensor), name) == name
        }

    def saved(self) -> dict[str, Tensor]:
        """Returns those of now that the model saves."""
        return {name: tensor for name, tensor in self.now().items() if name in self.saved_names}

    def check(self) -> None:
        """Raises `UserError` for a buffer that the model saves and that cannot be kept: a sparse
        one, or one that was registered late, to which no restore could give a value."""
        for name, tensor in self.saved().items():
            if tensor.layout is not torch.strided:
                raise UserError(
                    f"buffer {name!r} is sparse, and a checkpoint holds dense tensors only: keep "
                    "its indices and its values in buffers of their own, or register it with "
                    "persistent=False if the script makes it anew"
                )
        for (prefix, module), count in zip(self._modules, self._counts, strict=True):
            if len(buffers_of(module)) == count:
                continue
            for key in buffers_of(module).keys() - unsaved_buffers_of(module):
                if (name := prefix + key) not in self._slots:
                    raise UserError(
                        f"buffer {name!r} was registered after session.prepare, so that a restored "
                        "model would have no place for it: register it when the module is built, "
                        "with None if it has no value then"
                    )

    def state(self) -> dict[str, Tensor]:
        """Returns those of now that are part of the training state (BU1, BU2)."""
        tensors = self.now()
        self._watch(tensors)
        return {n: t for n, t in tensors.items() if n in self.saved_names or n in self._changed}

    def begin(self, restored: frozenset[str] = frozenset()) -> None:
        """Takes what the model does not save as what the script makes anew (BU2).

        restored: the names of those that are not, since they come from a stored state.
        """
        self._unsaved = {}
        self.copy()
        self._changed = set(restored)

    def copy(self) -> BufferCopy:
        """Returns copies of the buffers."""
        self.check()
        tensors = self.now()
        self._watch(tensors)
        saved = {name: _copied(t) for name, t in tensors.items() if name in self.saved_names}
        others = {name: self._unsaved[name][1] for name in tensors if name not in saved}
        first = {id(tensor): name for name, tensor in tensors.items()}
        named = {name: self._tensor(name) for name in self.names}
        return BufferCopy(
            values=saved | others,
            aliases={n: kept for n, t in named.items() if (kept := first.get(id(t), n)) != n},
            unset=tuple(name for name, tensor in named.items() if tensor is None),
            saved=saved,
            changed={name: tensor for name, tensor in others.items() if name in self._changed},
        )

    def _watch(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies anew those that the model does not save and that have changed."""
        unsaved = {name: t for name, t in tensors.items() if name not in self.saved_names}
        for name, mark in _marks(unsaved).items():
            before = self._unsaved.get(name)
            if before is None or before[0] != mark:
                self._unsaved[name] = mark, _copied(unsaved[name])
                self._changed.add(name)

    def put(self, copy: BufferCopy) -> None:
        """Gives the buffers the values of a copy, as far as it has any, and None."""
        placed: dict[str, Tensor] = {}
        taken: set[int] = set()
        for name, (module, key) in self._slots.items():
            first = copy.aliases.get(name, name)
            if name in copy.unset:
                setattr(module, key, None)
            elif first in placed:
                setattr(module, key, placed[first])
            elif first in copy.values:
                if id(self._tensor(name)) in taken:  # one tensor by two names, two in the copy
                    setattr(module, key, None)
                placed[first] = self._placed(name, copy.values[first])
                taken.add(id(placed[first]))

    def _placed(self, name: str, value: Tensor) -> Tensor:
        """Gives a buffer a value as BU3 says, and returns it."""
        tensor, (module, key) = self._tensor(name), self._slots[name]
        mark, kept = self._unsaved.get(name, ((), None))
        if tensor is not None and kept is value and _marks({name: tensor})[name] == mark:
            return tensor
        if tensor is not None and _takes(tensor, value):
            with torch.no_grad():
                tensor.copy_(value)
        else:
            tensor = value.to(self._device if tensor is None else tensor.device, copy=True)
            setattr(module, key, tensor)
        if kept is value:
            self._unsaved[name] = _marks({name: tensor})[name], kept
        return tensor


def unfold_buffers(model: nn.Module) -> None:
    """Gives buffers whose elements share memory, as those of `expand` do, memory of their own, into
    which values can be copied."""
    for module in model.modules():
        for key, tensor in list(buffers_of(module).items()):
            if tensor is not None and _is_expanded(tensor):
                setattr(module, key, _copied(tensor))


def _marks(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Any, ...]]:
    """Returns, for each tensor by name, what is another if it has changed or is another one; on a
    GPU a change through `.data` is missed, which no read that is free would show."""
    marks = {n: (t.data_ptr(), count_of_changes(t)) for n, t in tensors.items()}
    on_cpu = change_marks({n: t for n, t in tensors.items() if t.device.type == "cpu"})
    return {n: (*m, *on_cpu.get(n, ()), *tensors[n].shape) for n, m in marks.items()}


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _takes(tensor: Tensor, value: Tensor) -> bool:
    """Tells whether a buffer's own memory takes a value: one place for each element."""
    alike = tensor.shape == value.shape and tensor.dtype == value.dtype
    is_plain = not (_is_expanded(tensor) or tensor.is_inference() or tensor.requires_grad)
    return alike and is_plain


def _is_expanded(tensor: Tensor) -> bool:
    strided = tensor.layout is torch.strided
    sizes = zip(tensor.shape, tensor.stride() if strided else (), strict=strided)
    return any(count > 1 and stride == 0 for count, stride in sizes)
