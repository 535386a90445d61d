"""Models the store: what islands have written, and what each of them sees of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from elasticzero.launcher.protocol.rounds.documents import IslandReport, Rounds

TTL = 12
"""Ticks after which a registration is gone whose island does not renew it."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Holds the documents as of one tick."""

    tick: int = 0
    rounds: Rounds | None = None
    reports: dict[str, IslandReport] = field(default_factory=dict)
    """Reports by island, in the order of registrations."""


class Store:
    """Holds the documents, their leases, and all that was there before."""

    def __init__(self) -> None:
        self.rounds: Rounds | None = None
        self.reports: dict[str, IslandReport] = {}
        self.away_until = 0
        """Tick until which the store does not answer."""
        self._renewed: dict[str, int] = {}
        self._past = [Seen()]

    def answers(self, tick: int) -> bool:
        return tick >= self.away_until

    def back_for(self, tick: int) -> int:
        """Returns the number of ticks since the store last came back."""
        return tick - self.away_until

    def put_rounds(self, tick: int, rounds: Rounds) -> None:
        self.rounds = rounds
        self._note(tick)

    def put_report(self, tick: int, island: str, report: IslandReport) -> None:
        """Writes a report; one of another incarnation is another registration, the last one."""
        before = self.reports.get(island)
        if before is not None and before.incarnation != report.incarnation:
            del self.reports[island]
        self.reports[island] = report
        self.renew(tick, island)
        if report != before:
            self._note(tick)

    def renew(self, tick: int, island: str) -> None:
        self._renewed[island] = tick

    def remove(self, tick: int, island: str) -> None:
        if self.reports.pop(island, None) is not None:
            self._note(tick)

    def expire(self, tick: int) -> None:
        """Ends registrations that were not renewed."""
        for island in [name for name in self.reports if tick - self._renewed[name] > TTL]:
            self.remove(tick, island)

    def as_of(self, tick: int) -> Seen:
        """Returns what an island sees that has all changes up to a tick."""
        return next(seen for seen in reversed(self._past) if seen.tick <= tick)

    def _note(self, tick: int) -> None:
        self._past.append(Seen(tick, self.rounds, {**self.reports}))
