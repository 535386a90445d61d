"""Detects that one rank makes another call than the rest when the ranks agree on something. Pure.

Every message of the control tree that a session sends ends in two numbers: the first is made of the
call that the rank is at and the rank itself, and the second is its negative. The maximum of the
first over all ranks names a rank whose call is the highest, and that of the second one whose call
is the lowest. They name different calls where a rank has left its loop, or where one rank alone
makes a call that all ranks must make.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from elasticzero.errors import RetryError, UserError

_SHIFT = 31
LEAST = -(1 << 63)
"""The number that stands for none; every other number is greater."""
ADVICE = (
    "all ranks must come to the same calls; to end a loop on all ranks, call "
    "session.stop(reason) on any of them"
)


class Call(IntEnum):
    """Names the call that a rank makes. If two ranks differ, the one with the higher call is at
    fault.

    The release before knows those with even numbers, and sends half of each, shifted by one bit
    more.
    """

    STEP = 0
    CHECKPOINT = 1
    VERIFY = 2
    EPOCH_END = 4
    LOOP = 6
    EVALUATE = 8
    STATE_DICT = 10
    PREPARE = 12
    FINISH = 14


WORDS = {
    Call.STEP: "is at the next step of its loop",
    Call.CHECKPOINT: "is at a step whose state is captured",
    Call.VERIFY: "is at the end of its loop or before a checkpoint",
    Call.EPOCH_END: "is at the end of an epoch",
    Call.LOOP: "begins a loop over session.batches",
    Call.EVALUATE: "is in session.evaluate",
    Call.STATE_DICT: "is in session.state_dict",
    Call.PREPARE: "is in session.prepare",
    Call.FINISH: "has come to the end of the training function",
}


def marks(call: Call, rank: int) -> tuple[int, int]:
    """Returns the two numbers that a message of this rank carries."""
    mark = (int(call) << _SHIFT) + rank
    return mark, -mark


def call_of(numbers: Sequence[int]) -> Call | None:
    """Returns the call that a message's marks name; None: it has none, or is shorter."""
    mark = numbers[-2] if len(numbers) > 2 else LEAST
    return Call(mark >> _SHIFT) if mark >= 0 and numbers[-1] == -mark else None


def check(maxima: Sequence[int], call: Call, rank: int, where: str) -> None:
    """Raises if the ranks make different calls.

    Args:
        maxima: The greatest of all ranks' two numbers.
        call: The call that this rank makes.
        rank: This rank.
        where: The place of this rank, for the message.

    Raises:
        UserError: This rank is the one at fault.
        RetryError: Another rank is.
    """
    highest, lowest = maxima[0], -maxima[1]
    if highest < 0 or highest >> _SHIFT == lowest >> _SHIFT:
        return  # no rank gave a mark, or all make the same call
    low, low_rank = Call(lowest >> _SHIFT), lowest & ((1 << _SHIFT) - 1)
    if call == low:
        high, high_rank = Call(highest >> _SHIFT), highest & ((1 << _SHIFT) - 1)
        raise RetryError(f"rank {high_rank} {WORDS[high]}, while rank {rank} {WORDS[call]}")
    raise UserError(
        f"rank {rank} {WORDS[call]}{where}, while rank {low_rank} {WORDS[low]}: {ADVICE}"
    )
