"""Counts the bytes that one rank sends and receives of gradients and parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal

Kind = Literal["gradients", "parameters"]
"""Names what is sent."""


class Traffic:
    """Counts the bytes of one rank since it began.

    Of messages it counts all bytes, and of a backend's collective what its usual algorithms send: a
    ring, where each rank sends as much as it receives.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    @property
    def counts(self) -> Mapping[str, int]:
        """Returns the bytes by kind and direction, such as `gradients sent`."""
        return dict(self._counts)

    def count_messages(self, kind: Kind, sent: int, received: int) -> None:
        """Counts messages to single ranks and from them."""
        self._counts[f"{kind} sent"] += sent
        self._counts[f"{kind} received"] += received

    def count_halves(self, kind: Kind, size: int, ranks: int, *, halves: int) -> None:
        """Counts a collective.

        Args:
            kind: What is sent.
            size: Bytes of the tensor that each rank has, or gets, whole.
            ranks: Number of ranks.
            halves: 1 for a reduce-scatter or an all-gather, 2 for an all-reduce.
        """
        share = halves * size * (ranks - 1) // ranks
        self.count_messages(kind, share, share)
