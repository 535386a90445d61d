"""Refuses to pickle a rank's rows of parameters, as `torch.save` would.

torch pickles the rows that the rank has as if they were all, and says nothing. Whoever loads the
file has wrong values for the rest: another rank, a later world, or a script that averages files.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor
from torch.distributed.tensor import DTensor

from elasticzero.errors import UserError

PICKLED_ROWS = (
    "the script pickles a parameter, or what it has computed of one (torch.save), of which each "
    "rank has rows alone under zero3: call session.state_dict() on all ranks, which gives rank 0 "
    "the whole model, or use ddp, zero1 or zero2"
)

_meshes: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""The meshes over which parameters are divided, by their identity."""
_reduce: Any = Tensor.__reduce_ex__


def refuse_pickled_rows(parameters: Iterable[Tensor]) -> None:
    """Has what lies over the meshes of these parameters raise `UserError` where it is pickled;
    DTensors over other meshes are pickled as before."""
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            _meshes[id(parameter.device_mesh)] = parameter.device_mesh
    DTensor.__reduce_ex__ = _reduce_of  # type: ignore[method-assign]


def _reduce_of(tensor: Any, protocol: Any) -> Any:
    """Takes the place of a DTensor's `__reduce_ex__`."""
    if _meshes.get(id(tensor.device_mesh)) is tensor.device_mesh:
        raise UserError(PICKLED_ROWS)
    return _reduce(tensor, protocol)
