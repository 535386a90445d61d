"""Mixes the bits of 64-bit integers. Pure; it is no defence against an attacker."""

from __future__ import annotations

MASK64 = (1 << 64) - 1


def mix64(value: int) -> int:
    """Applies the finaliser of splitmix64: a bijection of 64-bit values that spreads every bit."""
    value &= MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)
