"""Divides the samples of a loop among islands, and takes back what they have not used. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from elasticzero.ipc.rounds import StreamMark, nearest_mark
from elasticzero.launcher.protocol.rounds.documents import Claim, Rounds, Samples, Seat


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


def to_give(rounds: Rounds) -> int:
    """Returns the number of samples that islands can still be given; of a stream the most that
    there may be."""
    order = rounds.order
    positions = order.total - rounds.next + sum(map(len, rounds.free))
    if order.limit is None:
        return positions
    claimed = sum(len(claim.samples) for seat in rounds.seats for claim in seat.claims)
    return max(0, min(positions, order.limit - rounds.samples - claimed))


def granted(
    rounds: Rounds, seat: Seat, size: int, batch: int
) -> tuple[Claim | None, tuple[Samples, ...], int]:
    """Returns a new claim, and what is left: (claim, free samples, next position).

    Args:
        rounds: The rounds before.
        seat: The island's seat.
        size: Most samples that it is to have.
        batch: Number of samples of an inner step.

    Returns:
        None in place of the claim where no samples are left.
    """
    size = min(size, to_give(rounds))
    if not size:
        return None, rounds.free, rounds.next
    order, after = rounds.order, rounds.next
    place = _piece_for(rounds, seat)
    if place is None:
        piece, others = Samples(start=after, stop=order.section_stop(after)), rounds.free
        after = piece.stop
    else:
        piece = rounds.free[place]
        others = (*rounds.free[:place], *rounds.free[place + 1 :])
    stop = min(piece.start + size, piece.stop)
    claim = Claim(
        number=seat.granted + 1, samples=Samples(start=piece.start, stop=stop), batch=batch
    )
    if place is None and not order.is_stream:
        return claim, others, stop
    rest = Samples(start=stop, stop=piece.stop)
    return claim, united([*others, rest], order.section), after


def _piece_for(rounds: Rounds, seat: Seat) -> int | None:
    """Returns the place of the free samples that an island is given, in their order; None: it is
    given further ones.

    Of a stream, an island goes on with the section that it reads as long as it can, so that few
    readers are opened twice: what was given back comes first, then that section, one that nobody
    reads any more, a new one, and at last one that another island reads.

    Args:
        rounds: The rounds.
        seat: The island's seat.
    """
    free, section = rounds.free, rounds.order.section
    if not rounds.order.is_stream:
        return 0 if free else None
    others = {other.after for other in rounds.seats if other.place != seat.place}
    wishes: list[Callable[[Samples], bool]] = [
        lambda piece: piece.stop % section != 0,
        lambda piece: piece.start == seat.after,
        lambda piece: piece.start not in others,
    ]
    for fits in wishes:
        place = next((place for place, piece in enumerate(free) if fits(piece)), None)
        if place is not None:
            return place
    return 0 if free and rounds.next >= rounds.order.total else None


def without_beyond(rounds: Rounds, end: int) -> Rounds:
    """Returns the rounds without the positions of a section that have no sample.

    Args:
        rounds: The rounds.
        end: Position after the last sample of its section.
    """
    stop = rounds.order.section_stop(end)
    if end >= rounds.next:
        return rounds

    def cut(piece: Samples) -> Samples:
        is_there = end < piece.stop <= stop
        return replace(piece, stop=max(piece.start, end)) if is_there else piece

    free = united(map(cut, rounds.free), rounds.order.section)
    seats = []
    for seat in rounds.seats:
        claims = (replace(claim, samples=cut(claim.samples)) for claim in seat.claims)
        seats.append(replace(seat, claims=tuple(c for c in claims if len(c.samples))))
    return replace(rounds, free=free, seats=tuple(seats))


def nearest_marks(rounds: Rounds) -> tuple[StreamMark, ...]:
    """Returns the marks from which readers go on with what is, or may become, an island's: the
    nearest one before each piece of samples, in its section."""
    section, starts = rounds.order.section, {piece.start for piece in rounds.uncommitted()}
    for past in rounds.fragments[-1].recent:
        starts |= {piece.start for c in past.contributors for piece in c.taken}
    nearest = (nearest_mark(rounds.marks, start, section) for start in starts)
    return tuple(sorted({m.at: m for m in nearest if m is not None}.values(), key=lambda m: m.at))


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


def united(pieces: Iterable[Samples], section: int) -> tuple[Samples, ...]:
    """Returns the same samples in order, with those of a section that touch as one piece.

    Args:
        pieces: Pieces that have no sample in common.
        section: Number of positions in a section.
    """
    joined: list[Samples] = []
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if joined and joined[-1].stop == piece.start and piece.start % section:
            joined[-1] = Samples(start=joined[-1].start, stop=piece.stop)
        elif len(piece):
            joined.append(piece)
    return tuple(joined)
