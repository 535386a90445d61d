"""Exchanges control words: messages of all ranks at every boundary between two steps. Pure.

Each rank submits its word during a step. At the step's end every rank collects the same word, which
has the greatest or the least of each field over all ranks, so that all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticzero.comm import barriers
from elasticzero.comm.barriers import LEAST, Call
from elasticzero.errors import ElasticZeroError
from elasticzero.ipc.messages import FLAG_FINISH, FLAG_GROW, FLAG_LEAVE, FLAG_STOP

if TYPE_CHECKING:
    from elasticzero.comm.control_tree import MaxTree
    from elasticzero.comm.process_group import ProcessGroups

CONTROL_FLAGS = (FLAG_LEAVE, FLAG_GROW, FLAG_STOP, FLAG_FINISH)
PREPARED = -1
"""The number of the first flag that stands for a rank that is prepared, below that of one that is
not, and that of a node that leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlWord:
    """Holds what one rank reports at a boundary.

    The ranks' result has the greatest value of each field, but the least of `ready`, `prepared`,
    `held` and `saved`. A word that asks for a checkpoint says nothing of `ready`: ranks of the
    release before know no other number, and none asks while such a rank takes part. Nor is one
    `prepared` then, which shares a number with the first flag: none is where a node leaves so.
    """

    flags: int = 0
    """Bits: a node leaves, the world grows, the job is stopped."""
    ready: bool = False
    """True once this rank has the memory for its snapshots."""
    held: int = -1
    """Newest step whose snapshot this node holds, with the replica that it keeps."""
    saved: int = -1
    """Newest step whose save has ended on this node, with or without success."""
    not_held: int = -1
    """Newest step whose snapshot this node could not hold."""
    unsaved: int = -1
    """Newest step whose checkpoint this node could not write."""
    every: int = 0
    """On rank 0, the snapshot interval that it proposes, in steps; 0: no change."""
    verify_every: int = 0
    """On rank 0, the interval of verifications that it proposes, in steps; 0: no change."""
    digest: int | None = None
    """Digest, at an earlier boundary, of the state that must be equal on all ranks; None: no rank
    has one to compare now."""
    complement: int | None = None
    """In the ranks' result, the greatest of `~digest`."""
    asks: bool = False
    """True if this rank's script has asked for a checkpoint of the boundary before this step."""
    prepared: bool = False
    """True if this rank can go over to the next world at the boundary after this step."""

    @property
    def digests_equal(self) -> bool:
        """Returns whether all ranks gave the same digest, or none."""
        complement = None if self.complement is None else ~self.complement
        return self.digest == complement


class ControlExchange:
    """Exchanges control words: a rank submits its own during a step, and collects the result."""

    def __init__(self, groups: ProcessGroups | None) -> None:
        self._groups = groups
        self._submitted = False
        self._early: Sequence[int] | None = None
        """The result that was received before it was collected."""

    @property
    def _tree(self) -> MaxTree | None:
        """Returns the tree of the present world; None: there is no other rank."""
        groups = self._groups
        alone = groups is None or groups.rank_info.world_size == 1
        return None if groups is None or alone else groups.control_tree

    @property
    def _rank(self) -> int:
        return 0 if self._groups is None else self._groups.rank_info.rank

    @property
    def alone(self) -> bool:
        """Returns whether there is no other rank to exchange words with."""
        return self._tree is None

    @property
    def submitted(self) -> bool:
        """Returns whether this rank's word of the step that it works on is submitted."""
        return self._submitted

    def submit(self, word: ControlWord) -> None:
        """Submits this rank's word for the step that it works on; later calls in a step do nothing.

        The session does so as the step's first backward begins. A rank that leaves its loop before
        that has submitted none: its next message meets the others' words and reveals the
        difference.
        """
        tree = self._tree
        if tree is not None and not self._submitted:
            tree.submit(encode_word(word, self._rank))
            self._submitted = True

    def asks(self) -> bool:
        """Waits for the words of this step, and returns whether a rank asks for a checkpoint.

        All ranks call this after their first backward. What ends the generation is an error of
        `collect` alone, so that a step whose gradient is whole is still applied.
        """
        tree = self._tree
        if tree is None or not self._submitted:
            return False
        try:
            if self._early is None:
                self._early = tree.collect()
            barriers.check(self._early[-2:], Call.STEP, self._rank, "")
        except (RuntimeError, ElasticZeroError):
            return False
        return decode_word(self._early).asks

    def collect(self, word: ControlWord) -> ControlWord | None:
        """Returns the result of all ranks' words of this step, or None if no word was submitted.

        A single rank gets its own current word. Raises `RetryError` if another rank has left its
        loop.
        """
        tree = self._tree
        if tree is None:
            return word
        if not self._submitted:
            return None
        self._submitted = False
        early, self._early = self._early, None
        numbers = tree.collect() if early is None else early
        barriers.check(numbers[-2:], Call.STEP, self._rank, "")
        return decode_word(numbers)


def encode_word(word: ControlWord, rank: int) -> list[int]:
    """Encodes a word as numbers whose maxima are the result: each flag separately, minima
    negated."""
    flags = [int(bool(word.flags & flag)) for flag in CONTROL_FLAGS]
    if word.prepared and not flags[0]:
        flags[0] = PREPARED
    ready = 1 if word.asks else -int(word.ready)
    least = [ready, -word.held, -word.saved]
    most = [word.not_held, word.unsaved, word.every, word.verify_every]
    digests = [LEAST, LEAST] if word.digest is None else [word.digest, ~word.digest]
    return [*flags, *least, *most, *digests, *barriers.marks(Call.STEP, rank)]


def decode_word(numbers: Sequence[int]) -> ControlWord:
    flags = sum(flag for flag, raised in zip(CONTROL_FLAGS, numbers, strict=False) if raised > 0)
    ready, held, saved, not_held, unsaved, every, verify_every, digest, complement, *_ = numbers[
        len(CONTROL_FLAGS) :
    ]
    return ControlWord(
        flags=flags,
        ready=ready < 0,
        held=-held,
        saved=-saved,
        not_held=not_held,
        unsaved=unsaved,
        every=every,
        verify_every=verify_every,
        digest=None if digest == LEAST else digest,
        complement=None if complement == LEAST else complement,
        asks=ready > 0,
        prepared=numbers[0] == PREPARED,
    )
