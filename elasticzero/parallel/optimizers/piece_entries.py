"""Lists what is stored of a piece of a parameter: its master, and what the optimizer keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from elasticzero.errors import UserError
from elasticzero.parallel.optimizers.groups import Optimizers
from elasticzero.parallel.optimizers.pieces import ParameterPiece
from elasticzero.parallel.optimizers.state import MASTER, Schema, working_dtype
from elasticzero.state.model import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptEntry:
    """Describes one entry that is stored for a parameter."""

    spec: Spec
    """Shape and dtype of the entry for the whole parameter."""
    scalar: bool = False
    """True if it is one number, whatever the parameter's shape."""
    elementwise: bool = False
    """True if it has an element for each of the parameter's, so that a piece has a part of it."""


def master_entry(spec: Spec) -> dict[str, KeptEntry]:
    """Returns the entry of a parameter's 32-bit master; nothing where it has none.

    Args:
        spec: Shape and dtype of the parameter.
    """
    if (dtype := working_dtype(spec.dtype)) == spec.dtype:
        return {}
    return {MASTER: KeptEntry(spec=Spec(dtype=dtype, shape=spec.shape), elementwise=True)}


def kept_entries(schema: Schema, spec: Spec) -> dict[str, KeptEntry]:
    """Returns the entries that an optimizer keeps for a parameter, by key.

    Args:
        schema: What it keeps for a parameter like this one.
        spec: Shape and dtype of the parameter.
    """
    entries: dict[str, KeptEntry] = {}
    for key, entry in schema.items():
        if entry.kind == "constant":
            continue
        scalar = entry.kind in ("scalar", "number")
        entries[key] = KeptEntry(
            spec=Spec(
                dtype=working_dtype(spec.dtype) if entry.follows else entry.dtype,
                shape=() if scalar else entry.shape(spec.shape),
            ),
            scalar=scalar,
            elementwise=entry.kind == "elementwise",
        )
    return entries


def stored_value(
    optimizers: Optimizers,
    piece: ParameterPiece,
    key: str,
    entry: KeptEntry,
    kept: Mapping[str, Tensor],
) -> Tensor:
    """Returns what is stored of a piece under `key`: zeros where it has no state.

    Args:
        optimizers: The script's optimizers.
        piece: The piece.
        key: The entry's key.
        entry: What is stored under it.
        kept: What the optimizer keeps for the piece; empty: the piece was never stepped.

    Raises:
        UserError: The entry has another shape than it had for a dummy.
    """
    if key == MASTER:
        return piece.parameter.detach()
    value, spec = kept.get(key), entry.spec
    of_whole = spec.shape != piece.shape
    if value is None:
        shape = spec.shape if entry.scalar or of_whole else piece.parameter.shape
        return torch.zeros(shape, dtype=spec.dtype)
    if of_whole and tuple(value.shape) != spec.shape:
        raise UserError(
            f"{type(optimizers.group_of[piece.name].optimizer).__name__} keeps {key!r} "
            f"for parameter {piece.name!r} with shape {tuple(value.shape)}, and was expected "
            f"to keep it with shape {spec.shape}; use strategy ddp"
        )
    return value
