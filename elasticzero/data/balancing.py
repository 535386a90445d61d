"""Measures each rank's speed in a loop, and has the ranks agree on their shares of global batches.

`shares.py` has the rules. Every `--straggler-steps` steps the ranks exchange what they have
measured, at the boundary before a step; each computes the same shares from it. They hold from the
first step on of which no rank has read a sample.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from statistics import median

from elasticzero.data.shares import RankSpeed, Shares, ShareTable, balanced
from elasticzero.options.settings import TrainingSettings

_MESSAGE = struct.Struct("!ddq")
"""Packs what a rank has measured, and the furthest step whose shares it has taken."""
FEWEST = 0.5
"""Part of `--straggler-steps` of which a rank must know its own time."""
MOST_NAMED = 8
"""Maximum number of ranks whose shares a line names."""


class Balancer:
    """Follows one rank's own times in one loop and one world, and keeps the table of shares."""

    def __init__(
        self,
        exchange: Callable[[bytes], list[bytes]],
        table: ShareTable | None,
        settings: TrainingSettings,
    ) -> None:
        """Begins with equal shares.

        Args:
            exchange: Returns each rank's bytes, by rank; all ranks call it together.
            table: Receives the shares; None: they stay equal.
            settings: The training settings, of which those of stragglers count.
        """
        self._exchange = exchange
        self._table = table
        self._every = settings.straggler_steps
        self._factor = settings.straggler_factor
        self._steps: deque[tuple[int, float]] = deque(maxlen=self._every)
        """Samples and own time in seconds of this rank in the last steps with the newest shares."""

    def note(self, step: int, samples: int, own_s: float | None) -> None:
        """Takes in a step of the loop.

        Args:
            step: Its number in the loop.
            samples: Number of samples that this rank has computed.
            own_s: The rank's own time, in seconds; None: it is not known.
        """
        table = self._table
        if table is not None and own_s is not None and step >= table.holds_from:
            self._steps.append((samples, own_s))

    def agree(self, step: int) -> str | None:
        """Has the shares follow the ranks' speeds, where that is due; all ranks call this together
        before each step of the loop.

        Args:
            step: Number of the step in the loop, from 1.

        Returns:
            A line on the shares, if they change.
        """
        table = self._table
        if table is None or step == 1 or (step - 1) % self._every or step <= table.holds_from:
            return None
        speed = self._speed()
        message = _MESSAGE.pack(speed.samples_a_s, speed.own_s, table.furthest)
        told = [_MESSAGE.unpack(of_rank) for of_rank in self._exchange(message)]
        speeds = [RankSpeed(samples_a_s, own_s) for samples_a_s, own_s, _ in told]
        present = table.newest
        shares = balanced(speeds, present, self._factor)
        if shares == present:
            return None
        table.put(max(step, 1 + max(furthest for *_, furthest in told)), shares)
        self._steps.clear()
        return shares_text(shares, len(told))

    def _speed(self) -> RankSpeed:
        if len(self._steps) < FEWEST * self._every:
            return RankSpeed(0.0, 0.0)
        own_s = median(own_s for _, own_s in self._steps)
        samples_a_s = median(samples / max(own_s, 1e-9) for samples, own_s in self._steps)
        return RankSpeed(samples_a_s, own_s)


def shares_text(shares: Shares | None, ranks: int) -> str:
    """Returns a line on the shares of so many ranks, the smallest ones first; None: equal ones."""
    if shares is None:
        return "all ranks have equal shares of a global batch again"
    smallest = sorted(range(ranks), key=lambda rank: shares[rank])[:MOST_NAMED]
    named = ", ".join(f"rank {rank} has {100 * shares[rank]:.3g} %" for rank in smallest)
    rest = ", …" if ranks > MOST_NAMED else ""
    return (
        f"shares of a global batch follow the ranks' speeds: {named}{rest} (equal: "
        f"{100 / ranks:.3g} %)"
    )
