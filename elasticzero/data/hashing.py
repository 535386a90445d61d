"""Mixes the bits of 64-bit integers. Pure; it is no defence against an attacker."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MASK64 = (1 << 64) - 1


def mix64(value: int) -> int:
    """Applies the finaliser of splitmix64: a bijection of 64-bit values that spreads every bit."""
    value &= MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


def mix64_each(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Applies `mix64` to each value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
