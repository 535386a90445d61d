"""Divides the samples of a loop among islands, and takes back what they have not used. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from elasticzero.launcher.protocol.rounds.documents import Claim, Rounds, Samples


def share_of(global_batch: int, place: int, islands: int) -> int:
    """Returns the number of samples of one island's inner step.

    Shares differ by at most one. With more islands than samples all have one, so that an inner step
    of all islands has more samples than was asked for.

    Args:
        global_batch: Number of samples of an inner step of all islands.
        place: Place of the island among those that live, from 0.
        islands: Number of these.
    """
    share = (place + 1) * global_batch // islands - place * global_batch // islands
    return max(1, share)


def granted(
    rounds: Rounds, number: int, size: int, batch: int
) -> tuple[Claim | None, tuple[Samples, ...], int]:
    """Returns a new claim, and what is left: (claim, free samples, next position).

    Args:
        rounds: The rounds before.
        number: Number of the claim.
        size: Most samples that it is to have.
        batch: Number of samples of an inner step.

    Returns:
        None in place of the claim where no samples are left.
    """
    if rounds.free:
        first = rounds.free[0]
        stop = min(first.stop, first.start + size, _end_of_epoch(rounds, first.start))
        rest = () if stop == first.stop else (Samples(start=stop, stop=first.stop),)
        samples = Samples(start=first.start, stop=stop)
        free = (*rest, *rounds.free[1:])
        return Claim(number=number, samples=samples, batch=batch), free, rounds.next
    start = rounds.next
    stop = min(start + size, _end_of_epoch(rounds, start))
    if stop <= start:
        return None, (), start
    claim = Claim(number=number, samples=Samples(start=start, stop=stop), batch=batch)
    return claim, (), stop


def _end_of_epoch(rounds: Rounds, position: int) -> int:
    """Returns the position after the epoch that a position is in, or after the loop."""
    epoch = rounds.order.epoch
    return min((position // epoch + 1) * epoch, rounds.order.total)


def split(
    claims: Iterable[Claim], number: int, upto: int
) -> tuple[tuple[Samples, ...], tuple[Claim, ...]]:
    """Divides claims where a contribution ends: (samples that it has, claims that are left).

    Args:
        claims: Claims of one island.
        number: Number of the newest claim of which the contribution has samples.
        upto: Position after the last of its samples.
    """
    taken, left = [], []
    for claim in claims:
        start, stop = claim.samples.start, claim.samples.stop
        middle = stop if claim.number < number else start
        if claim.number == number:
            middle = min(max(upto, start), stop)
        if start < middle:
            taken.append(Samples(start=start, stop=middle))
        if middle < stop:
            left.append(replace(claim, samples=Samples(start=middle, stop=stop)))
    return tuple(taken), tuple(left)


def united(pieces: Iterable[Samples]) -> tuple[Samples, ...]:
    """Returns the same samples in order, with those that touch as one piece."""
    joined: list[Samples] = []
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if joined and joined[-1].stop == piece.start:
            joined[-1] = Samples(start=joined[-1].start, stop=piece.stop)
        elif len(piece):
            joined.append(piece)
    return tuple(joined)
