"""Tells by one sum over the ranks whether all of them have the same number. Pure.

The mean of the squares is the square of the mean only where all numbers are equal.
"""

from __future__ import annotations

MODULUS = (1 << 20) - 3
"""Numbers are below this: small, so that sums of squares are exact in 64-bit floats."""


def with_square(number: int) -> tuple[float, float]:
    """Returns what a rank gives to the sum over the ranks."""
    return float(number), float(number**2)


def is_same(number: int, ranks: int, sums: tuple[float, float]) -> bool:
    """Returns whether all ranks have this rank's number.

    Args:
        number: This rank's number, below `MODULUS`.
        ranks: Number of ranks.
        sums: The sums over the ranks of what `with_square` returns.
    """
    return sums == (ranks * number, ranks * number**2)
