"""Describes the state that an optimizer keeps for a parameter, and puts stored state in its
place."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal
from urllib.parse import unquote

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

Kind = Literal["elementwise", "scalar", "number", "shaped", "inner", "other", "constant", "tree"]


@dataclass(frozen=True, slots=True)
class StateKey:
    """Describes one entry that an optimizer keeps for a parameter."""

    kind: Kind
    """elementwise: shaped like the parameter; scalar: a 0-dim tensor; number: of Python's own;
    shaped: a tensor that has dimensions of the parameter's sizes; inner: a tensor inside of a
    packed one; other: a tensor of any shape; constant: None or a string that does not change;
    tree: anything else."""
    dtype: torch.dtype
    device: torch.device
    python: type[Any] | None = None
    dimensions: tuple[int | None, ...] = ()
    """The parameter's dimension from which the size of each one follows; None: the size is 1."""
    size: tuple[int, ...] = ()
    """The shape of an inner tensor."""
    packed: PackedEntry | None = None
    """The packed entry that has an inner tensor."""
    constant: str | None = None
    """The value of a constant."""
    follows: bool = False
    """The tensor had the dtype of the parameter for which it was kept."""
    late: bool = False
    """It was not yet there after the first step."""

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


def stored_key(key: Any) -> str | None:
    """Returns the name under which an entry is stored, which has no slash and is none of our own;
    None: the key is no string, or empty."""
    return _quoted(key) if type(key) is str and key else None


@lru_cache(maxsize=1024)
def _quoted(key: str) -> str:
    return "%6Daster" if key == MASTER else key.replace("%", "%25").replace("/", "%2F")


def original_key(stored: str) -> str:
    """Returns the key of the entry that is stored under a name."""
    return unquote(stored)


def number_dtype(value: Any) -> torch.dtype | None:
    """Returns how a number is stored as a tensor; None: it is no number, or too large."""
    if type(value) is int and not -(1 << 63) <= value < 1 << 63:
        return None
    return NUMBERS.get(type(value))


def stored_state(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the tensors and numbers that an optimizer keeps for a parameter, as they are stored:
    packed entries by their inner tensors, numbers as 0-dim tensors."""
    stored = {}
    for key, value in state.items():
        if (name := stored_key(key)) is None:
            continue
        for full, inner in inner_entries(name, value):
            if (tensor := _as_tensor(inner)) is not None:
                stored[full] = tensor
    return stored


def inner_keys(key: Any, value: Any) -> set[str]:
    """Returns the names under which an entry is stored; none if its key is no string."""
    name = stored_key(key)
    return set() if name is None else {full for full, _ in inner_entries(name, value)}


def _as_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value.detach()
    dtype = number_dtype(value)
    return None if dtype is None else torch.tensor(value, dtype=dtype)


def put_state(
    optimizer: torch.optim.Optimizer,
    parameter: nn.Parameter,
    stored: Mapping[str, Tensor],
    schema: Schema,
    *,
    made_at_once: bool = False,
    stepped: bool = False,
) -> None:
    """Replaces the optimizer's entries for a parameter with the stored ones.

    Entries that are all zero may be those of a parameter that was never stepped: strategies that
    partition state write zeros for it, and the optimizer makes its first state by itself.

    Args:
        optimizer: The optimizer.
        parameter: What the optimizer has of it: the parameter or a piece.
        stored: The stored entries, by key.
        schema: What the optimizer keeps for a parameter like this one.
        made_at_once: True: the optimizer has made its first state when it was built, and will not
            make it later.
        stepped: True: the entries are those of a parameter that was stepped, zero or not.
    """
    if made_at_once and not stored:
        return
    optimizer.state.pop(parameter, None)
    if made_at_once or stepped or any(bool(entry.any()) for entry in stored.values()):
        entries = {
            original_key(key): entry.constant
            for key, entry in schema.items()
            if entry.kind == "constant"
        }
        entries |= as_kept(stored, schema, parameter)
        if entries:
            optimizer.state[parameter] = entries


def as_kept(
    stored: Mapping[str, Tensor], schema: Schema, parameter: Tensor, *, own_dtype: bool = False
) -> dict[str, Any]:
    """Returns stored entries as the optimizer keeps them, by its own keys.

    Args:
        stored: The stored entries, by key.
        schema: What the optimizer keeps for a parameter like this one.
        parameter: What the optimizer has of it: the parameter or a piece.
        own_dtype: True: they were stored as an optimizer of whole parameters has them.
    """
    entries = {}
    for key, tensor in stored.items():
        entries[key] = _as_state(tensor, schema.get(key), parameter, own_dtype=own_dtype)
    return _put_together(entries, schema)


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
        entry = schema.get(stored_key(key) or "")
        if entry is not None and entry.kind == "elementwise":
            part = value.detach().reshape(-1)[start : start + piece.numel()].view(piece.shape)
            dtype = piece.dtype if value.is_floating_point() else value.dtype
            value = part.to(piece.device, dtype, copy=True)
        elif isinstance(value, Tensor) and entry is not None:
            value = value.detach().to(entry.device, copy=True)
        else:
            value = copy.deepcopy(value)
        cut[key] = value
    return cut


def _put_together(entries: Mapping[str, Any], schema: Schema) -> dict[str, Any]:
    """Returns the entries with those that the optimizer packs put together."""
    together: dict[str, Any] = {}
    for key, value in entries.items():
        if (packed := schema[key].packed if key in schema else None) is None:
            together[original_key(key)] = value
        elif (original := original_key(packed.key)) not in together:
            together[original] = packed.put_together(entries)
    return together


def _as_state(
    stored: Tensor, entry: StateKey | None, like: Tensor, *, own_dtype: bool = False
) -> Any:
    """Returns a stored entry in the form in which the optimizer keeps it for parameter `like`.

    Args:
        stored: The stored entry.
        entry: What the optimizer keeps under its key; None: it is no entry of the schema.
        like: The parameter or piece.
        own_dtype: True: it was stored as an optimizer of whole parameters has it.
    """
    if entry is None:
        return stored if stored.dim() == 0 else stored.to(like.device)
    if entry.python is not None:
        return entry.python(stored.item())
    device = entry.device if entry.kind == "scalar" else like.device
    if own_dtype or not (stored.is_floating_point() or stored.is_complex()):
        keeps_dtype = own_dtype or entry.kind not in ("scalar", "inner")
        dtype = stored.dtype if keeps_dtype else entry.dtype
    else:
        dtype = like.dtype if entry.follows else entry.dtype
    lies_otherwise = type(like) is nn.Parameter and not like.is_contiguous()
    if entry.kind == "elementwise" and lies_otherwise and stored.shape == like.shape:
        # A fused step takes elements as they lie in memory, as in a channels_last convolution.
        return torch.empty_like(like, dtype=dtype, device=device, requires_grad=False).copy_(stored)
    return stored.to(device, dtype)


def by_parameter(stored: Mapping[str, Spec]) -> dict[str, dict[str, Spec]]:
    """Returns the optimizer's stored tensors, by parameter and key."""
    specs_of: dict[str, dict[str, Spec]] = {}
    for full, spec in stored.items():
        if full.startswith(OPTIMIZER):
            name, _, key = full[len(OPTIMIZER) :].rpartition("/")
            specs_of.setdefault(name, {})[key] = spec
    return specs_of


def name_is_stepped(name: str, small: Mapping[str, Any]) -> bool:
    """Tells whether stored entries are known to be those of a parameter that was stepped.

    Args:
        name: The parameter's name.
        small: What `RankState.optimizers` was when they were stored.
    """
    return name not in small.get("unstepped", (name,))


def check_nothing_else(small: Mapping[str, Any]) -> None:
    """Raises `CheckpointMismatch` where `ddp` has stored what no other strategy keeps."""
    kinds = (("for parameter", "state"), ("for parameter", "values"), ("under", "entries"))
    for what, kind in kinds:
        for name in (name for name, tree in small.get(kind, {}).items() if tree):
            raise CheckpointMismatch(
                f"the checkpoint was written with another optimizer: it holds what is neither a "
                f"tensor of the parameter's shape nor a number {what} {name!r}, which strategy "
                "ddp alone can restore: use it, with the optimizer that wrote the checkpoint"
            )


def dealt_keys(schema: Schema) -> set[str]:
    """Returns the keys of the entries that are stored as tensors."""
    return {key for key, entry in schema.items() if entry.kind not in ("constant", "tree")}


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
    if stored and stored != dealt_keys(schema):
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


def lacks_state(keys: Mapping[str, Spec], schema: Schema, small: Mapping[str, Any]) -> bool:
    """Returns whether nothing is stored of what an optimizer keeps for a parameter.

    Args:
        keys: Shape and dtype of each stored entry of the parameter.
        schema: What this optimizer keeps for it.
        small: What is stored of it besides tensors.
    """
    return bool(dealt_keys(schema)) and not set(keys) - {MASTER} and not small
