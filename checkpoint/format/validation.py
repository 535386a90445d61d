"""Checks that a manifest with valid syntax describes a usable step.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from elasticzero.checkpoint.format.layout import ITEM_BYTES, TensorSpec
from elasticzero.checkpoint.format.manifest import TREE, Manifest
from elasticzero.nested import unflatten

_SMALL = ("F8", "F4")
_UNKNOWN_TO_NUMPY = frozenset({"BF16", *(name for name in ITEM_BYTES if name.startswith(_SMALL))})


def check_committed(manifest: Manifest) -> None:
    """Raises `ValueError` if a committed step's manifest lacks a digest, or if its nesting is
    invalid."""
    for file in manifest.files:
        if file.digest is None:
            raise ValueError(f"it has no digest for {file.name}")
    check_nesting(manifest)


def check_nesting(manifest: Manifest) -> None:
    """Raises `ValueError` if the nesting of values saved by hand is invalid."""
    if TREE not in manifest.state:
        return
    tensors = manifest.layout.tensors
    try:
        value = unflatten(manifest.state[TREE], lambda name: _StandIn(name, tensors[name]))
        if not isinstance(value, dict):
            raise TypeError("it is not a dict")
    except KeyError as error:
        raise ValueError(f"its nesting makes no sense: there is no tensor {error}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"its nesting makes no sense: {error}") from None


@dataclass(frozen=True, slots=True)
class _StandIn:
    """Stands for a tensor of which only the description is known."""

    name: str
    spec: TensorSpec

    def numpy(self) -> None:
        if self.spec.dtype in _UNKNOWN_TO_NUMPY:
            raise TypeError(f"{self.name!r} is an array of {self.spec.dtype}, which numpy lacks")
