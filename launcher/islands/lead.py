"""Writes the document of the rounds where this node's island is the lead."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from elasticzero.ipc.rounds import JoinRounds
from elasticzero.launcher.islands.documents import Documents, RoundDocuments
from elasticzero.launcher.islands.files import size_of
from elasticzero.launcher.protocol.rounds.documents import Rounds
from elasticzero.launcher.protocol.rounds.lead import LeadView, RoundSettings, lead

OVERDUE_S, SLOWEST_BYTES_S = 30.0, 250_000.0
"""Seconds after which an attempt has taken too long, and bytes a second of its mean that it may
take besides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandPlace:
    """Says of which island this node is, and how the others reach it."""

    name: str
    address: str
    run: int
    workers: int
    """Number of this node's workers."""
    least: int
    """Number of islands with which the rounds begin."""
    join_timeout_s: float
    """Seconds after which the rounds begin with those that are there."""
    ttl_s: float


class Lead:
    """Leads the rounds, as long as this island is the first one that lives."""

    def __init__(
        self,
        place: IslandPlace,
        documents: RoundDocuments,
        log_line: Callable[[str], None],
        outage_end_s: Callable[[], float],
    ) -> None:
        """Begins before there are rounds.

        Args:
            place: Which island this is.
            documents: The documents of the rounds.
            log_line: Receives lines for people.
            outage_end_s: Returns when the store last came back, on the monotonic clock.
        """
        self._place, self._documents = place, documents
        self._log, self._outage_end_s = log_line, outage_end_s
        self._attempts: dict[tuple[int, int, int], float] = {}
        """When each attempt was first seen: of a history, a fragment, and its number."""
        self._began_s = time.monotonic()

    def write(self, join: JoinRounds, read: Documents, now_s: float) -> None:
        """Writes the next document, where this island is the lead.

        Args:
            join: What the workers have said.
            read: The documents.
            now_s: Present time, on the monotonic clock.
        """
        rounds, reports = read.rounds, read.reports
        if next(iter(reports), None) != self._place.name:
            return
        place, silent = self._place, set[str]()
        if rounds is not None and now_s - self._outage_end_s() < 2 * place.ttl_s:
            silent = {seat.island for seat in rounds.seats} - {*reports}
        waited = now_s - self._began_s >= place.join_timeout_s
        view = LeadView(
            rounds=rounds,
            reports=reports,
            silent=silent,
            overdue=self._overdue(rounds, join, now_s),
            complete=len(reports) >= place.least or waited,
        )
        settings = RoundSettings(every=join.settings.every, quorum=join.settings.quorum)
        following = lead(view, settings)
        if following is None or following == rounds:
            return
        if self._documents.put_rounds(following, read):
            self._say_what_is_new(rounds, following)

    def _overdue(
        self, rounds: Rounds | None, join: JoinRounds, now_s: float
    ) -> set[tuple[int, int]]:
        """Returns the attempts that have taken too long, with the number of their fragment."""
        overdue = set()
        for number, fragment in enumerate(rounds.fragments if rounds is not None else ()):
            if rounds is None or (closing := fragment.closing) is None:
                continue
            key = rounds.history, number, closing.attempt
            limit_s = OVERDUE_S + size_of(join.fragments[number]) / SLOWEST_BYTES_S
            if now_s - self._attempts.setdefault(key, now_s) > limit_s:
                overdue.add((number, closing.attempt))
        return overdue

    def _say_what_is_new(self, before: Rounds | None, after: Rounds) -> None:
        for number, fragment in enumerate(after.fragments):
            rounds_before = 0 if before is None else before.fragments[number].outer.round
            if fragment.outer.round < rounds_before:
                self._log(f"rounds after {fragment.outer.round} are void: no island has them")
            for past in fragment.recent:
                if before is not None and past.outer.round > rounds_before:
                    islands = [f"{c.island} ({c.samples})" for c in past.contributors]
                    self._log(f"round {past.outer.round}: {', '.join(islands)} samples")
