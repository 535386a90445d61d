"""Sums up how the rounds of a job's islands stand, for people. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elasticzero.launcher.protocol.rounds.documents import (
    Committed,
    IslandReport,
    Rounds,
    SampleOrder,
    Samples,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandSummary:
    """Says what an island that lives has."""

    island: str
    round: int | None
    """Newest round whose result it has; None: it has none yet."""
    samples: int | None
    """Number of its samples in the last round; None: it is not among those that were averaged."""
    staleness: int | None
    """Number of rounds by which these came late."""
    waiting: int | None
    """Number of samples that it has contributed to a round that is not closed; None: it has not
    contributed."""
    on_hand: int
    """Number of samples that it has been given and that are in no round."""
    address: str
    """Address of its agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsSummary:
    """Says how the rounds of a job stand."""

    round: int
    """Newest round, of the part of the model that is averaged last."""
    samples: int
    """Number of samples in rounds."""
    total: int | None
    """Number of all samples of the loop; None: that is not known of a stream."""
    given_back: int
    """Number of samples that islands were given and that are to be given to others."""
    is_over: bool
    """True once all samples are in rounds."""
    islands: tuple[IslandSummary, ...]
    """Those that live, in the order in which they came."""


def summary_of(rounds: Rounds, reports: Mapping[str, IslandReport]) -> RoundsSummary:
    """Returns how the rounds stand.

    Args:
        rounds: The rounds.
        reports: Reports of the islands that live.
    """
    last = _last(rounds)
    return RoundsSummary(
        round=0 if last is None else last.outer.round,
        samples=rounds.samples,
        total=_total(rounds.order),
        given_back=sum(len(piece) for piece in rounds.free if not _is_rest(piece, rounds.order)),
        is_over=rounds.done,
        islands=tuple(_island(island, report, rounds) for island, report in reports.items()),
    )


def _total(order: SampleOrder) -> int | None:
    return order.limit if order.is_stream else order.total


def _is_rest(piece: Samples, order: SampleOrder) -> bool:
    """Returns whether free samples reach to the end of a stream's section, wherever that is."""
    return order.is_stream and piece.stop == order.section_stop(piece.start)


def _last(rounds: Rounds) -> Committed | None:
    """Returns the newest round of the fragment that is averaged last, with which samples count;
    None: there is none."""
    return next((past for f in rounds.fragments[-1:] for past in f.recent[-1:]), None)


def _island(island: str, report: IslandReport, rounds: Rounds) -> IslandSummary:
    last = _last(rounds)
    contributors = () if last is None else last.contributors
    part = next((c for c in contributors if c.island == island), None)
    held = [part.outer.round for part in report.fragments[-1:] if part.outer is not None]
    contributions = [part.contribution for part in report.fragments]
    seat = rounds.seat(island, report.incarnation)
    return IslandSummary(
        island=island,
        round=max(held, default=None),
        samples=None if part is None else part.samples,
        staleness=None if part is None else part.staleness,
        waiting=max((c.samples for c in contributions if c is not None), default=None),
        on_hand=0 if seat is None else sum(len(claim.samples) for claim in seat.claims),
        address=report.address,
    )
