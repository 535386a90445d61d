"""The control word: what the ranks tell each other at every boundary between two steps. Pure.

Each rank submits its word during a step. At the step's end every rank collects the same word, which
has the greatest or the least of each field over all ranks, so that all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticzero.comm import barriers
from elasticzero.comm.barriers import LEAST, Call
from elasticzero.ipc.messages import FLAG_FINISH, FLAG_GROW, FLAG_LEAVE, FLAG_STOP

if TYPE_CHECKING:
    from elasticzero.comm.process_group import ProcessGroups

CONTROL_FLAGS = (FLAG_LEAVE, FLAG_GROW, FLAG_STOP, FLAG_FINISH)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlWord:
    """What the ranks tell each other at a boundary. Of all ranks' words the one that counts has
    the greatest of each field, but the least of `ready`, `held` and `saved`."""

    flags: int = 0
    """Bits: a node leaves, the world grows, the job is stopped."""
    ready: bool = False
    """This rank has its memory."""
    held: int = -1
    """Newest step whose snapshot this node holds, and its buddy's too."""
    saved: int = -1
    """Newest step whose save is over on this node, well or not."""
    not_held: int = -1
    """Newest step whose snapshot this node could not keep."""
    unsaved: int = -1
    """Newest step whose checkpoint this node could not write."""
    every: int = 0
    """Rank 0: the snapshot interval it wants, in steps; 0: as it is."""
    verify_every: int = 0
    """Rank 0: the interval of verifications it wants, in steps; 0: as it is."""
    digest: int | None = None
    """Of what must be equal on all ranks, as it was at an earlier boundary; None: no rank has one
    to compare now."""
    complement: int | None = None
    """Of all ranks' words: the greatest of `~digest`."""

    @property
    def digests_equal(self) -> bool:
        """Whether all ranks gave the same digest, or none."""
        complement = None if self.complement is None else ~self.complement
        return self.digest == complement


class ControlExchange:
    """Exchanges control words: a rank submits its own in a step, and collects the result."""

    def __init__(self, groups: ProcessGroups | None) -> None:
        many = groups is not None and groups.rank_info.world_size > 1
        self._tree = groups.control_tree if groups is not None and many else None
        self._rank = groups.rank_info.rank if groups is not None else 0
        self._submitted = False

    def submit(self, mine: ControlWord) -> None:
        """Submit this rank's word for the step that it works on; later calls in a step do nothing.

        The session does so as the step's first backward begins. A rank that leaves its loop before
        that has submitted none: what it submits next meets the others' words and gives it away.
        """
        if self._tree is not None and not self._submitted:
            self._tree.submit(encode_word(mine, self._rank))
            self._submitted = True

    def collect(self, mine: ControlWord) -> ControlWord | None:
        """Collect what all ranks' words of this step make; None where none was submitted. One
        rank alone gets its own word of now.

        Raises `RetryError` where another rank has left its loop.
        """
        if self._tree is None:
            return mine
        if not self._submitted:
            return None
        self._submitted = False
        numbers = self._tree.collect()
        barriers.check(numbers[-2:], Call.STEP, self._rank, "")
        return decode_word(numbers)


def encode_word(word: ControlWord, rank: int) -> list[int]:
    """A word as numbers of which the greatest count: each flag for itself, the least negated."""
    flags = [int(bool(word.flags & flag)) for flag in CONTROL_FLAGS]
    least = [-int(word.ready), -word.held, -word.saved]
    most = [word.not_held, word.unsaved, word.every, word.verify_every]
    digests = [LEAST, LEAST] if word.digest is None else [word.digest, ~word.digest]
    return [*flags, *least, *most, *digests, *barriers.marks(Call.STEP, rank)]


def decode_word(numbers: Sequence[int]) -> ControlWord:
    flags = sum(flag for flag, raised in zip(CONTROL_FLAGS, numbers, strict=False) if raised)
    ready, held, saved, not_held, unsaved, every, verify_every, digest, complement, *_ = numbers[
        len(CONTROL_FLAGS) :
    ]
    return ControlWord(
        flags=flags,
        ready=bool(ready),
        held=-held,
        saved=-saved,
        not_held=not_held,
        unsaved=unsaved,
        every=every,
        verify_every=verify_every,
        digest=None if digest == LEAST else digest,
        complement=None if complement == LEAST else complement,
    )
