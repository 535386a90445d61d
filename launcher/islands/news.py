"""Makes what an island's workers are told of the rounds. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from elasticzero.ipc.rounds import FragmentNews, GivenSamples, RoundNews, SamplesLeft
from elasticzero.launcher.protocol.rounds.claims import to_give
from elasticzero.launcher.protocol.rounds.documents import Outer, Rounds, Seat, Settled


def news_of(
    rounds: Rounds, seat: Seat, outers: Sequence[Outer], left: SamplesLeft, version: int
) -> RoundNews:
    """Returns the news of rounds, as far as a node has their results.

    Args:
        rounds: The rounds.
        seat: The island's seat.
        outers: The outer state that the node has of each fragment.
        left: Samples with which rounds would go on that begin with these.
        version: Number of the news.
    """
    return RoundNews(
        version=version,
        incarnation=seat.incarnation,
        fragments=tuple(
            FragmentNews(
                round=outer.round,
                digest=outer.digest,
                called=fragment.called,
                settled=_settled_for(seat, number, outer),
            )
            for number, (fragment, outer) in enumerate(zip(rounds.fragments, outers, strict=True))
        ),
        claims=tuple(
            GivenSamples(
                number=claim.number,
                start=claim.samples.start,
                stop=claim.samples.stop,
                batch=claim.batch,
            )
            for claim in seat.claims
        ),
        left=left,
        none_left=not to_give(rounds),
        done=rounds.done,
    )


def refusal(version: int, why: str) -> RoundNews:
    """Returns the news that an island can take no part.

    Args:
        version: Number of the news.
        why: The reason, as a sentence.
    """
    return RoundNews(
        version=version,
        incarnation="",
        fragments=(),
        claims=(),
        left=SamplesLeft(),
        none_left=False,
        done=False,
        refused=why,
    )


def seat_after_the_end(rounds: Rounds, island: str, incarnation: str) -> Seat:
    """Returns the seat of an island that has come after the last round: it has no samples.

    Args:
        rounds: The rounds, which are done.
        island: The island.
        incarnation: Its incarnation.
    """
    settled = tuple(Settled() for _ in rounds.fragments)
    return Seat(island=island, incarnation=incarnation, number=0, settled=settled)


def left_of(rounds: Rounds) -> SamplesLeft:
    """Returns the samples that are in no committed round."""
    pieces = sorted((piece.start, piece.stop) for piece in rounds.uncommitted())
    return SamplesLeft(
        next=rounds.next, earlier=tuple(pieces), committed=rounds.samples, marks=rounds.marks
    )


def _settled_for(seat: Seat, number: int, outer: Outer) -> int:
    """Returns the number of the last contribution that an outer state has, or that counts nowhere.

    Args:
        seat: The island's seat.
        number: Number of the fragment.
        outer: The outer state that the island has.
    """
    settled = seat.settled[number]
    counts_later = settled.round is not None and settled.round > outer.round
    return settled.number - 1 if counts_later else settled.number
