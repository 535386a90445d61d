"""Describes the state that an optimizer keeps for a parameter, and puts stored state in its
place."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from elasticzero.errors import CheckpointMismatch
from elasticzero.parallel.optimizers.packed import PackedEntry, inner_entries
from elasticzero.state.model import OPTIMIZER, Spec

MASTER = "master"
"""The key under which a 32-bit copy of a 16-bit parameter is kept beside its optimizer state."""

NUMBERS: dict[type[Any], torch.dtype] = {
    int: torch.int64,
    float: torch.float64,
    bool: torch.bool,
}
"""How Python's own numbers in an optimizer's state are stored."""

Kind = Literal["elementwise", "scalar", "number", "shaped", "inner", "other"]


@dataclass(frozen=True, slots=True)
class StateKey:
    """Describes one entry that an optimizer keeps for a parameter."""

    kind: Kind
    """elementwise: shaped like the parameter; scalar: a 0-dim tensor; number: of Python's own;
    shaped: a tensor that has dimensions of the parameter's sizes; inner: a tensor inside of a
    packed one."""
    dtype: torch.dtype
    device: torch.device
    python: type[Any] | None = None
    dimensions: tuple[int | None, ...] = ()
    """The parameter's dimension from which the size of each one follows; None: the size is 1."""
    size: tuple[int, ...] = ()
    """The shape of an inner tensor."""
    packed: PackedEntry | None = None
    """The packed entry that has an inner tensor."""

    def shape(self, of: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the entry for a parameter of shape `of`."""
        if self.kind == "elementwise":
            return of
        if self.kind == "inner":
            return self.size
        return tuple(1 if number is None else of[number] for number in self.dimensions)


Schema = Mapping[str, StateKey]


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which pieces of a parameter are optimized."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def stored_state(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns what an optimizer keeps for a parameter, as it is stored: packed entries by their
    inner tensors, numbers as 0-dim tensors."""
    stored = {}
    for key, value in state.items():
        for full, inner in inner_entries(key, value):
            if (tensor := _as_tensor(inner)) is not None:
                stored[full] = tensor
    return stored


def _as_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value.detach()
    return torch.tensor(value, dtype=NUMBERS[type(value)]) if type(value) in NUMBERS else None


def put_state(
    optimizer: torch.optim.Optimizer,
    parameter: nn.Parameter,
    stored: Mapping[str, Tensor],
    schema: Schema,
    *,
    made_at_once: bool = False,
) -> None:
    """Replaces the optimizer's entries for a parameter with the stored ones.

    Entries that are all zero are those of a parameter that was never stepped: strategies that
    partition state write zeros for it, and the optimizer makes its first state by itself.

    Args:
        optimizer: The optimizer.
        parameter: What the optimizer has of it: the parameter or a piece.
        stored: The stored entries, by key.
        schema: What the optimizer keeps for a parameter like this one.
        made_at_once: True: the optimizer has made its first state when it was built, and will not
            make it later.
    """
    if made_at_once and not stored:
        return
    optimizer.state.pop(parameter, None)
    if made_at_once or any(bool(entry.any()) for entry in stored.values()):
        optimizer.state[parameter] = _put_together(
            {key: _as_state(tensor, schema.get(key), parameter) for key, tensor in stored.items()},
            schema,
        )


def cut_state(
    state: Mapping[str, Any], schema: Schema, start: int, piece: nn.Parameter
) -> dict[str, Any]:
    """Returns the part of a whole parameter's state that belongs to a piece of it.

    Args:
        state: What the optimizer keeps for the whole parameter.
        schema: What it keeps for a parameter like this one.
        start: The first of the parameter's elements in the piece.
        piece: The piece.
    """
    cut: dict[str, Any] = {}
    for key, value in state.items():
        if key in schema and schema[key].kind == "elementwise":
            part = value.detach().reshape(-1)[start : start + piece.numel()].view(piece.shape)
            dtype = piece.dtype if value.is_floating_point() else value.dtype
            value = part.to(piece.device, dtype, copy=True)
        elif isinstance(value, Tensor) and key in schema:
            value = value.detach().to(schema[key].device, copy=True)
        else:
            value = copy.deepcopy(value)
        cut[key] = value
    return cut


def _put_together(entries: Mapping[str, Any], schema: Schema) -> dict[str, Any]:
    """Returns the entries with those that the optimizer packs put together."""
    together: dict[str, Any] = {}
    for key, value in entries.items():
        if (packed := schema[key].packed if key in schema else None) is None:
            together[key] = value
        elif packed.key not in together:
            together[packed.key] = packed.put_together(entries)
    return together


def _as_state(stored: Tensor, entry: StateKey | None, like: Tensor) -> Any:
    """Returns a stored entry in the form in which the optimizer keeps it for parameter `like`.

    Args:
        stored: The stored entry.
        entry: What the optimizer keeps under its key; None: it is no entry of the schema.
        like: The parameter or piece.
    """
    if entry is None:
        return stored if stored.dim() == 0 else stored.to(like.device)
    if entry.python is not None:
        return entry.python(stored.item())
    if entry.kind == "scalar":
        return stored.to(entry.device, entry.dtype)
    if entry.kind == "inner":
        return stored.to(like.device, entry.dtype)
    dtype = like.dtype if stored.is_floating_point() else stored.dtype
    return stored.to(like.device, dtype)


def by_parameter(stored: Mapping[str, Spec]) -> dict[str, dict[str, Spec]]:
    """Returns the optimizer's stored tensors, by parameter and key."""
    specs_of: dict[str, dict[str, Spec]] = {}
    for full, spec in stored.items():
        if full.startswith(OPTIMIZER):
            name, _, key = full[len(OPTIMIZER) :].rpartition("/")
            specs_of.setdefault(name, {})[key] = spec
    return specs_of


def check_keys(name: str, keys: Mapping[str, Spec], schema: Schema) -> None:
    """Checks that the stored entries of a parameter are those that this optimizer keeps.

    Args:
        name: The parameter's name.
        keys: Shape and dtype of each stored entry; empty: the parameter has no stored state.
        schema: What this optimizer keeps for the parameter.

    Raises:
        CheckpointMismatch: The entries are another optimizer's, or are packed in another way.
    """
    stored = set(keys) - {MASTER}
    if stored and stored != set(schema):
        raise CheckpointMismatch(
            f"the checkpoint was written with another optimizer: it holds "
            f"{', '.join(sorted(stored))} for parameter {name!r}, and this optimizer keeps "
            f"{', '.join(sorted(schema)) or 'nothing'}. An optimizer can only go on from state "
            "that holds what it keeps itself: use the optimizer that wrote it, or one that keeps "
            "the same, or start in another checkpoint directory"
        )
    for key, entry in schema.items():
        if entry.kind != "inner" or key not in keys:
            continue
        if keys[key] != (expected := Spec(dtype=entry.dtype, shape=entry.size)):
            raise CheckpointMismatch(
                f"the checkpoint holds {key!r} of parameter {name!r} as {_text(keys[key])}, and "
                f"this optimizer packs it as {_text(expected)}: give it the number of bits and the "
                "block size with which the checkpoint was written"
            )


def _text(spec: Spec) -> str:
    return f"{list(spec.shape)} of {spec.dtype}"
