"""Checks after each write of the rounds that they keep what they promise."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from elasticzero.launcher.protocol.rounds.documents import (
    Committed,
    Fragment,
    FragmentReport,
    IslandReport,
    Rounds,
    Samples,
)
from tests.simulation.islands.drawing import Drawn
from tests.simulation.islands.island import Island

Key = tuple[tuple[str, str], int]
"""An island, its incarnation, and the number of a contribution."""


class BrokenRule(AssertionError):
    """Says which promise is not kept."""


class Promises:
    """Remembers what was committed, and by whom."""

    def __init__(self, islands: Collection[Island], drawn: Drawn) -> None:
        self._islands = islands
        self._drawn = drawn
        self._max_staleness = drawn.settings.max_staleness
        self._committed: dict[tuple[int, int], dict[int, tuple[Key, ...]]] = {}
        """Contributions of each round that counts, by history and fragment."""
        self._samples: dict[Key, list[Samples]] = {}
        self.voided = 0

    def contributed(self, island: Island, number: int, samples: list[Samples]) -> None:
        """Takes note of the samples of a contribution to the last fragment."""
        self._samples[(island.name, island.incarnation), number] = samples

    def settled(self, rounds: Rounds, island: Island) -> None:
        """Checks that what an island takes for counted does count, in a round that it has."""
        place = island.name, island.incarnation
        for number, contribution, round_ in island.counted:
            past = self._committed[rounds.history, number]
            if round_ in past and (place, contribution) not in past[round_]:
                raise BrokenRule(f"{island.name} takes {contribution} for counted in {round_}")
        island.counted.clear()

    def check(self, rounds: Rounds, reports: Mapping[str, IslandReport]) -> None:
        """Checks the rounds that are about to be written, with the reports that the lead has
        seen."""
        living = [
            report
            for report in reports.values()
            if any(seat.number == report.seat for seat in rounds.seats)
            and all(
                fragment.has(part.outer)
                for fragment, part in zip(rounds.fragments, report.fragments, strict=True)
            )
        ]
        for number, fragment in enumerate(rounds.fragments):
            self._check_fragment(rounds, number, fragment, living)
        counted = self._committed[rounds.history, len(rounds.fragments) - 1].values()
        committed = [piece for keys in counted for key in keys for piece in self._samples[key]]
        first = min((piece.start for piece in [*committed, *rounds.uncommitted()]), default=0)
        if self._has_samples(0, first) and rounds.history == 1:
            raise BrokenRule(f"samples before {first} are nowhere")
        position = 0
        for piece in sorted([*committed, *rounds.uncommitted()], key=lambda piece: piece.start):
            if piece.start < position or self._has_samples(position, piece.start):
                raise BrokenRule(f"sample {min(position, piece.start)} is lost, or in two places")
            position = piece.stop
        if self._has_samples(position, rounds.next) or position > rounds.next:
            raise BrokenRule(f"samples from {position} to {rounds.next} are nowhere")
        if rounds.samples != sum(map(len, committed)):
            raise BrokenRule(f"the count of samples is wrong: {rounds}")
        for piece in committed:
            if self._drawn.ends and piece.stop > self._drawn.ends[piece.start // self._section]:
                raise BrokenRule(f"{piece} is committed, and has positions without a sample")
        self._check_done(rounds)
        self._check_claims(rounds)
        self._check_marks(rounds)

    @property
    def _section(self) -> int:
        return self._drawn.order.section

    def _has_samples(self, start: int, stop: int) -> bool:
        """Returns whether there is a sample at a position in `[start, stop)`."""
        if not self._drawn.ends:
            return start < stop
        sections = range(start // self._section, -(-stop // self._section))
        return any(
            max(start, number * self._section) < min(stop, self._drawn.ends[number])
            for number in sections
        )

    def _check_done(self, rounds: Rounds) -> None:
        order = rounds.order
        if order.limit is not None and rounds.samples > order.limit:
            raise BrokenRule("more samples are committed than the loop has")
        is_all = rounds.samples == order.limit or not (
            self._has_samples(rounds.next, order.total) or any(rounds.uncommitted())
        )
        if rounds.done and not is_all:
            raise BrokenRule("the rounds are done before all samples are committed")

    def _check_marks(self, rounds: Rounds) -> None:
        """Checks that a section whose samples were committed need not be read from its beginning,
        as long as it is not lost with rounds."""
        if rounds.history > 1 or self.voided:
            return
        marks = [mark.at for mark in rounds.marks]
        for committed in rounds.fragments[-1].recent[-1:]:
            newest = (c for c in committed.contributors if c.taken and c.taken[-1].stop == c.upto)
            for piece in (c.taken[-1] for c in newest):
                stop = (piece.stop // self._section + 1) * self._section
                rest = [p.start for p in rounds.uncommitted() if piece.stop <= p.start < stop]
                if self._drawn.ends and rest and not any(piece.stop <= at < stop for at in marks):
                    raise BrokenRule(f"no mark is known after {piece}")

    def _check_claims(self, rounds: Rounds) -> None:
        for seat in rounds.seats:
            for claim in seat.claims:
                sections = {
                    position // rounds.order.section
                    for position in (claim.samples.start, claim.samples.stop - 1)
                }
                if len(sections) > 1:
                    raise BrokenRule(f"{claim} has samples of two sections")

    def _check_fragment(
        self, rounds: Rounds, number: int, fragment: Fragment, living: Sequence[IslandReport]
    ) -> None:
        past = self._committed.setdefault((rounds.history, number), {})
        for void in [round_ for round_ in past if round_ > fragment.outer.round]:
            self.voided += 1
            del past[void]
        for committed in fragment.recent:
            keys = tuple((c.place, c.number) for c in committed.contributors)
            if not keys and committed.outer.round in past:
                continue
            if committed.outer.round not in past and keys:
                parts = [report.fragments[number] for report in living]
                self._check_holders(committed, parts)
            if past.setdefault(committed.outer.round, keys) != keys:
                raise BrokenRule(f"round {committed.outer.round} was committed twice")
            self._check_sum(committed, keys)
        counts = [key for keys in past.values() for key in keys]
        if len(counts) != len({*counts}):
            raise BrokenRule(f"a contribution counts twice: {past}")

    def _check_holders(self, committed: Committed, living: Sequence[FragmentReport]) -> None:
        """Checks that a round that is new is in the memory of two islands, if there are two."""
        if sum(part.has(committed) for part in living) < min(2, len(living)):
            raise BrokenRule(f"round {committed.outer.round} is in the memory of one island")
        late = [c for c in committed.contributors if not 0 <= c.staleness <= self._max_staleness]
        if late:
            raise BrokenRule(f"a contribution counts that is too late: {late}")

    def _check_sum(self, committed: Committed, keys: Iterable[Key]) -> None:
        """Checks that a committed state sums up the contributions that the round names."""
        states = (island.states.get(committed.outer.digest) for island in self._islands)
        state = next(filter(None, states), None)
        if state is None or not committed.contributors:
            return
        summed = [((part[0], part[1]), part[3]) for part in state[1:]]
        if summed != [*keys]:
            raise BrokenRule(f"round {committed.outer.round} sums up other contributions")
