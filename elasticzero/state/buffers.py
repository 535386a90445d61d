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
from torch.nn.modules.batchnorm import _BatchNorm

from elasticzero.errors import UserError
from elasticzero.state.digests import change_marks
from elasticzero.torch_internals.tensors import buffers_of, count_of_changes, unsaved_buffers_of


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
        self.of_batch_norms = frozenset(
            name for name, (module, _) in self._slots.items() if isinstance(module, _BatchNorm)
        )
        """The names of those that a BatchNorm has."""
        self._unsaved: dict[str, tuple[tuple[int, ...], Tensor]] = {}
        """A mark that changes, and the newest copy, of each buffer that the model does not save."""
        self._changed: set[str] = set()
        self._begun = False
        """True once it is known which of these the script makes anew."""

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
        """Raises `UserError` for a buffer that is to be kept and cannot be: a sparse one, a complex
        one of a format that no checkpoint has, or one that was registered late, to which no restore
        could give a value."""
        self._check(self.now())

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if tensor.layout is not torch.strided and name in self.saved_names:
                raise UserError(
                    f"buffer {name!r} is sparse, and a checkpoint holds dense tensors only: keep "
                    "its indices and its values in buffers of their own, or register it with "
                    "persistent=False if the script makes it anew"
                )
            if tensor.is_complex() and tensor.dtype is not torch.complex64:
                self._require_constant(name, tensor)
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

    def _require_constant(self, name: str, tensor: Tensor) -> None:
        """Raises `UserError` if a buffer is part of the training state (BU1, BU2)."""
        if name in self.saved_names or (self._begun and name in self._changed):
            raise UserError(
                f"buffer {name!r} is of {tensor.dtype}, and of complex numbers a checkpoint holds "
                "complex64 alone: keep it as torch.view_as_real of it, with a last dimension of 2, "
                "or make it anew with persistent=False and leave it as it is"
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
        self._watch(self.now())
        self._changed, self._begun = set(restored), True
        self.check()

    def copy(self) -> BufferCopy:
        """Returns copies of the buffers."""
        tensors = self.now()
        self._watch(tensors)
        self._check(tensors)
        with torch.no_grad():
            saved = {n: _copied(t) for n, t in tensors.items() if n in self.saved_names}
        others = {name: self._unsaved[name][1] for name in tensors if name not in saved}
        aliases, unset = {}, []
        if len(tensors) < len(self.names):
            first = {id(tensor): name for name, tensor in tensors.items()}
            named = {name: self._tensor(name) for name in self.names}
            aliases = {n: kept for n, t in named.items() if (kept := first.get(id(t), n)) != n}
            unset = [name for name, tensor in named.items() if tensor is None]
        return BufferCopy(
            values=saved | others,
            aliases=aliases,
            unset=tuple(unset),
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
        unset, filled = set(copy.unset), _Filled()
        for name, (module, key) in self._slots.items():
            first = copy.aliases.get(name, name)
            if name in unset:
                setattr(module, key, None)
            elif first in placed:
                setattr(module, key, placed[first])
            elif first in copy.values:
                present = buffers_of(module).get(key)
                if id(present) in taken:  # one tensor by two names, two in the copy
                    present = None
                placed[first] = self._placed(name, present, copy.values[first], filled)
                taken.add(id(placed[first]))
        for name, tensor, value in filled.fill():
            self._mark_kept(name, tensor, value)

    def _placed(self, name: str, present: Tensor | None, value: Tensor, filled: _Filled) -> Tensor:
        """Returns the buffer that has a value, or has it once `filled` is, as BU3 says.

        Args:
            name: The buffer's name.
            present: The buffer as it is; None: it takes the value's place in memory of its own.
            value: The value.
            filled: Takes what is to be copied.
        """
        if present is not None:
            mark, kept = self._unsaved.get(name, ((), None))
            if kept is value and _marks({name: present})[name] == mark:
                return present
            if _takes(present, value):
                filled.add(name, present, value)
                return present
        tensor = value.to(self._device if present is None else present.device, copy=True)
        module, key = self._slots[name]
        setattr(module, key, tensor)
        self._mark_kept(name, tensor, value)
        return tensor

    def _mark_kept(self, name: str, tensor: Tensor, value: Tensor) -> None:
        """Takes what a copy has put back of a buffer that the model does not save for no change."""
        if name in self._unsaved and self._unsaved[name][1] is value:
            self._unsaved[name] = _marks({name: tensor})[name], value


class _Filled:
    """Copies values into the memory of buffers, all by one call."""

    def __init__(self) -> None:
        self._all: list[tuple[str, Tensor, Tensor]] = []
        self._buffers: list[Tensor] = []
        self._values: list[Tensor] = []

    def add(self, name: str, buffer: Tensor, value: Tensor) -> None:
        """Takes a value for a buffer of this name."""
        self._all.append((name, buffer, value))
        if buffer.is_conj() or buffer.is_neg():  # torch copies into no list of such
            with torch.no_grad():
                buffer.copy_(value)
        else:
            self._buffers.append(buffer)
            self._values.append(value)

    def fill(self) -> list[tuple[str, Tensor, Tensor]]:
        """Copies, and returns the name of each buffer, the buffer and its value."""
        if self._buffers:
            with torch.no_grad():
                torch._foreach_copy_(self._buffers, self._values)
        return self._all


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
    if tensor.is_contiguous() and not torch.is_grad_enabled():
        return tensor.clone()  # of thousands of small ones in half of the time
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _takes(tensor: Tensor, value: Tensor) -> bool:
    """Tells whether a buffer's own memory takes a value: one place for each element."""
    alike = tensor.shape == value.shape and tensor.dtype == value.dtype
    is_folded = not tensor.is_contiguous() and _is_expanded(tensor)
    is_plain = not (is_folded or tensor.is_inference() or tensor.requires_grad)
    return alike and is_plain


def _is_expanded(tensor: Tensor) -> bool:
    strided = tensor.layout is torch.strided
    sizes = zip(tensor.shape, tensor.stride() if strided else (), strict=strided)
    return any(count > 1 and stride == 0 for count, stride in sizes)
