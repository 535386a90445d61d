"""Finds NaN and infinity among the floating-point numbers in a shard's bytes, without torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from elasticzero.errors import NotFinite

_CHUNK_BYTES = 4 << 20
_SUMMED = {"F32": "<f4", "F64": "<f8", "C64": "<f4"}
_EXPONENTS = {
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "F8_E5M2": ("u1", 0x7C),
    "F8_E4M3": ("u1", 0x7F),
}
"""The integer type of each float dtype, and the exponent bits, which are all set only in NaN and
infinity."""
CHECKED_DTYPES = frozenset(_SUMMED) | frozenset(_EXPONENTS)
TENSORS_SHOWN = 3
"""Maximum number of tensors that a message names."""


@dataclass(frozen=True, slots=True)
class Range:
    """Names bytes of a shard's file that must hold finite numbers."""

    name: str
    dtype: str
    start: int
    stop: int


def check_ranges(data: memoryview, ranges: Iterable[Range], where: str) -> None:
    """Checks that tensors hold neither NaN nor infinity.

    Args:
        data: Bytes of a shard's file.
        ranges: Bytes of each tensor in it, with the tensor's name and dtype.
        where: Step and rank, for the message.

    Raises:
        NotFinite: One of the ranges holds NaN or infinity.
    """
    bad = [r.name for r in ranges if not is_finite(data[r.start : r.stop], r.dtype)]
    if bad:
        raise not_finite_error(where, bad)


def not_finite_error(where: str, names: list[str]) -> NotFinite:
    """Returns the error for the tensors of these names."""
    unlisted = f" and {len(names) - TENSORS_SHOWN} more" if len(names) > TENSORS_SHOWN else ""
    listed = ", ".join(map(repr, names[:TENSORS_SHOWN])) + unlisted
    return NotFinite(f"the training state of {where} holds NaN or infinity in {listed}")


def is_finite(data: memoryview, dtype: str) -> bool:
    """Returns whether all these numbers are finite; True for a dtype that is not in
    `CHECKED_DTYPES`."""
    kind, bits = _EXPONENTS.get(dtype, (_SUMMED.get(dtype), 0))
    if kind is None:
        return True
    for start in range(0, len(data), _CHUNK_BYTES):
        part = np.frombuffer(data[start : start + _CHUNK_BYTES], dtype=kind)
        if bits:
            if bool(((part & bits) == bits).any()):
                return False
            continue
        with np.errstate(all="ignore"):
            total = part.sum()  # NaN and infinity stay what they are; finite numbers may overflow
        if not np.isfinite(total) and not bool(np.isfinite(part).all()):
            return False
    return True
