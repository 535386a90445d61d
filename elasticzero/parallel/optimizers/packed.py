"""Takes packed state apart into its inner tensors, and puts it together again.

An optimizer packs what it keeps where an entry of its state is a tensor that wraps other tensors:
codes of 8 bits, say, and a scale for each block of them. Torch has a protocol for the classes of
such tensors: `__tensor_flatten__` names the inner tensors, and `__tensor_unflatten__` puts them
together. The inner tensor `codes` of the entry `exp_avg` is stored as `exp_avg.codes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from elasticzero.nested import has_inner_tensors


@dataclass(frozen=True, slots=True, eq=False)
class PackedEntry:
    """Describes a packed entry of an optimizer's state for one parameter."""

    key: str
    like: Tensor
    """An entry of the same class, sizes and options, on the meta device."""

    def put_together(self, stored: Mapping[str, Tensor]) -> Tensor:
        """Returns the entry that is made of these inner tensors.

        Args:
            stored: The inner tensors by the keys under which they are stored.
        """
        made: Tensor = _put_together(self.key, self.like, stored)
        return made


def is_packed(value: Any) -> bool:
    """Tells whether an entry of an optimizer's state wraps other tensors."""
    return isinstance(value, Tensor) and has_inner_tensors(value)


def inner_entries(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the keys and values that are stored for an entry: its inner tensors, or itself."""
    if not is_packed(value):
        yield key, value
        return
    for name in value.__tensor_flatten__()[0]:
        yield from inner_entries(f"{key}.{name}", getattr(value, name))


def _put_together(key: str, like: Any, stored: Mapping[str, Tensor]) -> Any:
    if not is_packed(like):
        return stored[key]
    names, options = like.__tensor_flatten__()
    inner = {name: _put_together(f"{key}.{name}", getattr(like, name), stored) for name in names}
    return type(like).__tensor_unflatten__(inner, options, like.shape, like.stride())
