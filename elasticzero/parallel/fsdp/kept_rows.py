"""Watches what a script does with the rows that a rank has of parameters.

torch pickles rows as if they were all, and whoever loads the file has wrong values for the rest:
another rank, a later world, or a script that averages files. So that is refused.

Rows that a script keeps, and what it has computed of them, are of one world. A rank looks for them
before it goes over to another one inside of its loop. Plain tensors that were computed of
`to_local()` nobody can tell from others: one call of it counts as kept.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

from torch import Tensor
from torch.distributed.tensor import DTensor

from elasticzero.errors import UserError
from elasticzero.torch_internals.fsdp import keeps_rows

PICKLED_ROWS = (
    "the script pickles a parameter, or what it has computed of one (torch.save), of which each "
    "rank has rows alone under zero3: call session.state_dict() on all ranks, which gives rank 0 "
    "the whole model, or use ddp, zero1 or zero2"
)
TOOK_ROWS = (
    "the script takes rows of a parameter by to_local(), of which it may keep some, and another "
    "world has other ones"
)
KEEPS_ROWS = (
    "the script keeps rows of a parameter, or what it has computed of one, as this world divides "
    "them"
)
FROZE_OBJECTS = (
    "the script has called gc.freeze(), after which nobody can tell whether it keeps rows of "
    "parameters"
)


@dataclass(slots=True)
class WatchedMesh:
    """Holds what is known of the script's use of one mesh over which parameters are divided."""

    mesh: ReferenceType[Any]
    tie: str = ""
    """Says why the script may keep rows; empty: nothing speaks for that."""


_watched: dict[int, WatchedMesh] = {}
"""Has each mesh by its identity, for meshes of as many ranks are equal."""
_reduce: Any = Tensor.__reduce_ex__
_to_local: Any = DTensor.to_local
_freeze = gc.freeze


def watch_rows(parameters: Iterable[Tensor]) -> None:
    """Has what lies over the meshes of these parameters raise `UserError` where it is pickled, and
    takes note where its rows are taken; with DTensors over other meshes all is as before."""
    for number in [number for number, watched in _watched.items() if watched.mesh() is None]:
        del _watched[number]
    for parameter in parameters:
        if isinstance(parameter, DTensor) and _watched_of(parameter.device_mesh) is None:
            _watched[id(parameter.device_mesh)] = WatchedMesh(ref(parameter.device_mesh))
    DTensor.__reduce_ex__ = _reduce_of  # type: ignore[method-assign]
    DTensor.to_local = _to_local_of  # type: ignore[method-assign, assignment]
    gc.freeze = _freeze_objects


def tie_to_world(groups: Sequence[Any], tensors: Iterable[Tensor]) -> str:
    """Returns why the script may have rows of parameters, or what it has computed of them; empty:
    it has none.

    Args:
        groups: FSDP2's groups of parameters.
        tensors: Those in the memory of rows that are not the script's.
    """
    for group in groups:
        watched = _watched_of(group.mesh_info.mesh)
        if watched is not None and watched.tie:
            return watched.tie
    return KEEPS_ROWS if keeps_rows(groups, tensors) else ""


def _watched_of(mesh: Any) -> WatchedMesh | None:
    """Returns what is known of a mesh; None: no parameter of a session is divided over it."""
    watched = _watched.get(id(mesh))
    return watched if watched is not None and watched.mesh() is mesh else None


def _reduce_of(tensor: Any, protocol: Any) -> Any:
    """Takes the place of a DTensor's `__reduce_ex__`."""
    if _watched_of(tensor.device_mesh) is not None:
        raise UserError(PICKLED_ROWS)
    return _reduce(tensor, protocol)


def _to_local_of(tensor: Any, *arguments: Any, **named: Any) -> Any:
    """Takes the place of a DTensor's `to_local`."""
    if (watched := _watched_of(tensor.device_mesh)) is not None:
        watched.tie = TOOK_ROWS
    return _to_local(tensor, *arguments, **named)


def _freeze_objects() -> None:
    """Takes the place of `gc.freeze`. Its count of objects would tell too, and takes 30 ms where
    there are many."""
    for watched in _watched.values():
        watched.tie = FROZE_OBJECTS
    _freeze()
