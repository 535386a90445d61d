"""Models an island: its inner steps, what it fetches and computes, and what it reports."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from elasticzero.ipc.rounds import FragmentProgress, IslandProgress, StreamMark
from elasticzero.islands.progress import (
    after_step,
    contributed,
    is_due,
    took,
    with_ends,
)
from elasticzero.launcher.protocol.rounds.claims import to_give
from elasticzero.launcher.protocol.rounds.documents import (
    Contribution,
    FragmentReport,
    IslandReport,
    Origin,
    Outer,
    Rounds,
    Samples,
    Seat,
    Sum,
    Unreachable,
)
from elasticzero.launcher.protocol.rounds.island import Advance, SumUp, TakeOuter, TakeSum, Task
from tests.simulation.islands.drawing import Drawn

State = tuple[Any, ...]
"""Of an outer state, the digest of the one before and what was summed up since; of a contribution,
whose it is and its samples."""
Reach = Callable[[str], "Island | None"]
"""Returns an island that this one can reach; None: it does not answer."""


def digest(state: State) -> str:
    return hashlib.blake2b(repr(state).encode(), digest_size=8).hexdigest()


@dataclass
class Island:
    """Stands for the workers of an island, and for the agent that leads it."""

    name: str
    speed: float
    drawn: Drawn
    incarnation: str = ""
    seat: int = 0
    count: int = 0
    """Number of its incarnations."""
    alive: bool = True
    frozen_until: int = 0
    hangs_until: int = 0
    """Tick until which its transfers bring nothing."""
    leaving: bool = False
    seen: int = 0
    """Tick up to which it has seen what is in the store."""
    is_registered: bool = False
    progress: IslandProgress = field(default_factory=lambda: IslandProgress(fragments=()))
    outer: list[Outer] = field(default_factory=list)
    sums: list[Sum | None] = field(default_factory=list)
    unreachable: list[Unreachable | None] = field(default_factory=list)
    states: dict[str, State] = field(default_factory=dict)
    """Outer states that it has, by digest."""
    contributions: dict[tuple[int, int], State] = field(default_factory=dict)
    """Contributions that it keeps ready, by fragment and number."""
    unsent: list[list[Samples]] = field(default_factory=list)
    """Samples that are in no contribution to each fragment yet."""
    counted: list[tuple[int, int, int]] = field(default_factory=list)
    """Contributions that it takes for counted, and is to be checked: fragment, number, round."""
    has_samples: bool = True
    ends_seen: set[int] = field(default_factory=set)
    """Ends of sections that it has come to, and has not told of."""
    task: tuple[int, Task] | None = None
    """The task under way, and the tick at which it is over."""

    def begin(self, outer: list[Outer]) -> None:
        """Begins with these states, and nothing of what was before."""
        self.count += 1
        self.incarnation, self.seat = f"{self.name}.{self.count}", 0
        self.is_registered, self.has_samples, self.task = False, True, None
        self.outer = [*outer]
        parts = tuple(FragmentProgress(base=state.round, digest=state.digest) for state in outer)
        self.progress = IslandProgress(fragments=parts)
        self.sums = [None] * len(outer)
        self.unreachable = [None] * len(outer)
        self.unsent = [[] for _ in outer]
        self.contributions = {}

    def begin_with_own(self, initial: State) -> None:
        """Begins as a script does that nobody has given a state."""
        self.states = {digest(initial): initial}
        self.begin([Outer(round=0, digest=digest(initial))] * self.drawn.diloco.fragments)

    # What it reports.

    def report(self) -> IslandReport:
        numbers = range(len(self.outer))
        return IslandReport(
            incarnation=self.incarnation,
            address=self.name,
            order=self.drawn.order,
            origin=Origin(),
            fragments=tuple(self.part(number) for number in numbers),
            seat=self.seat,
            is_over=self.is_over,
            claim=self.progress.claim,
            ends=self.progress.ends,
            ahead=0 if self.leaving else self.drawn.ahead,
        )

    @property
    def is_over(self) -> bool:
        pairs = zip(self.progress.fragments, self.outer, strict=True)
        newest = all(part.digest == outer.digest for part, outer in pairs)
        return not self.has_samples and self.has_contributed_all and newest

    def part(self, number: int) -> FragmentReport:
        sent = self.progress.fragments[number].sent
        contribution = None
        if sent is not None:
            waits = sent.since >= self.drawn.diloco.grace or not self.has_samples
            contribution = Contribution(
                number=sent.number,
                base=sent.base,
                samples=sent.samples,
                steps=sent.steps,
                claim=sent.claim,
                upto=sent.upto,
                mark=sent.mark,
                digest=digest(self.contributions[number, sent.number]),
                waits=waits,
            )
        return FragmentReport(
            outer=self.outer[number],
            contribution=contribution,
            sum=self.sums[number],
            unreachable=self.unreachable[number],
        )

    # What it takes of the others.

    def takes_part(self, rounds: Rounds) -> bool:
        """Returns whether its states are of these rounds."""
        pairs = zip(rounds.fragments, self.outer, strict=True)
        return all(fragment.has(outer) for fragment, outer in pairs)

    def follow(self, rounds: Rounds) -> bool:
        """Takes note of its seat, and of what has become of its contributions; returns whether it
        must begin anew: what it has done counts no more."""
        seat = rounds.seat(self.name, self.incarnation)
        if seat is not None and self.seat not in (0, seat.number):
            return True
        if self.progress.claim and not self.takes_part(rounds):
            return True
        if seat is not None:
            self.seat = seat.number
            for number in range(len(self.outer)):
                self._settle(seat, number)
        return False

    def _settle(self, seat: Seat, number: int) -> None:
        """Drops a contribution that is part of the state that the island has, or counts nowhere."""
        settled = seat.settled[number]
        if settled.round is not None and settled.round > self.outer[number].round:
            return
        part = self.progress.fragments[number]
        sent = part.sent.number if part.sent is not None else 0
        if sent == settled.number and settled.round is not None:
            self.counted.append((number, sent, settled.round))
        self.progress = took(self.progress, number, part.base, part.digest, settled.number)
        for key in [k for k in self.contributions if k[0] == number and k[1] <= settled.number]:
            del self.contributions[key]

    def do(self, rounds: Rounds, task: Task, reach: Reach) -> None:
        """Does a task; where another island cannot be reached, it is left undone."""
        number = task.fragment
        match task:
            case SumUp():
                self._sum_up(task, reach)
            case TakeSum(sum=result, sources=sources):
                source = next(filter(None, map(reach, sources)), None)
                if source is not None and source.sums[number] == result:
                    _, *summed = source.states[result.outer]
                    self._compute(number, result.attempt, (task.base.digest, *summed))
            case Advance(outer=outer):
                self._advance(rounds, number, outer)
            case TakeOuter(outer=outer, sources=sources):
                source = next(filter(None, map(reach, sources)), None)
                if source is not None and source.outer[number] == outer:
                    self.states[outer.digest] = source.states[outer.digest]
                    self._advance(rounds, number, outer)

    def _sum_up(self, task: SumUp, reach: Reach) -> None:
        summed = []
        for contributor in task.contributors:
            source = reach(contributor.island)
            key = task.fragment, contributor.number
            if source is None or source.incarnation != contributor.incarnation:
                state = None
            else:
                state = source.contributions.get(key)
            if state is None:
                self.unreachable[task.fragment] = Unreachable(
                    attempt=task.attempt, islands=(contributor.island,)
                )
                return
            summed.append(state)
        self._compute(task.fragment, task.attempt, (task.base.digest, *summed))

    def _compute(self, number: int, attempt: int, state: State) -> None:
        self.states[digest(state)] = state
        mean = digest(state[1:])
        self.sums[number] = Sum(attempt=attempt, mean=mean, outer=digest(state))

    def _advance(self, rounds: Rounds, number: int, outer: Outer) -> None:
        self.outer[number] = outer
        self.progress = took(self.progress, number, outer.round, outer.digest, 0)
        if (seat := rounds.seat(self.name, self.incarnation)) is not None:
            self._settle(seat, number)

    # Its inner steps.

    def train(self, rounds: Rounds) -> dict[int, list[Samples]]:
        """Makes an inner step, if there are samples, and contributes what is due.

        Returns:
            The samples of each contribution that is new, by number, of the last fragment.
        """
        seat = rounds.seat(self.name, self.incarnation)
        if seat is None or seat.number != self.seat or not self.takes_part(rounds):
            return {}
        step = None if self.leaving else self._next_samples(seat)
        claims = [(claim.samples.start, claim.samples.stop) for claim in seat.claims]
        section = self.drawn.order.section
        self.progress = with_ends(self.progress, self.ends_seen, claims, section)
        self.ends_seen.clear()
        if step is not None:
            claim, samples = step
            mark = StreamMark(at=samples.stop, rows=()) if self.drawn.ends else None
            self.progress = after_step(self.progress, claim, samples.stop, len(samples), mark)
            for unsent in self.unsent:
                unsent.append(samples)
        self.has_samples = step is not None
        none_left = not to_give(rounds)
        last = self.leaving or (none_left and self._next_samples(seat) is None)
        made = {}
        for number, fragment in enumerate(rounds.fragments):
            called, settings = fragment.called, self.drawn.diloco
            if is_due(self.progress, settings, number, called=called, last=last):
                made[self._contribute(number)] = number
        newest = len(self.outer) - 1
        return {n: self._samples_of(n) for n, number in made.items() if number == newest}

    @property
    def has_contributed_all(self) -> bool:
        """Returns whether all steps are in contributions that are settled."""
        return not any(part.sent or part.steps for part in self.progress.fragments)

    def _samples_of(self, contribution: int) -> list[Samples]:
        _, _, _, _, *samples = self.contributions[len(self.outer) - 1, contribution]
        return samples

    def _next_samples(self, seat: Seat) -> tuple[int, Samples] | None:
        """Returns the next samples, and the number of their claim; None: it has none."""
        at = self.progress
        for claim in seat.claims:
            start = claim.samples.start
            if claim.number == at.claim:
                start = max(start, at.upto)
            last = min(claim.samples.stop, self._end_of_section(start))
            if claim.number >= at.claim and start < last:
                stop = min(start + claim.batch, last)
                return claim.number, Samples(start=start, stop=stop)
        return None

    def _end_of_section(self, position: int) -> int:
        """Returns the position after the last sample of a section, to which the island comes as it
        looks for one there."""
        order, ends = self.drawn.order, self.drawn.ends
        if not ends:
            return order.section_stop(position)
        end = ends[position // order.section]
        if position >= end:
            self.ends_seen.add(end)
        return end

    def _contribute(self, number: int) -> int:
        self.progress = contributed(self.progress, number)
        sent = self.progress.fragments[number].sent
        assert sent is not None
        samples, self.unsent[number] = self.unsent[number], []
        whose = (self.name, self.incarnation, number, sent.number)
        self.contributions[number, sent.number] = (*whose, *samples)
        return sent.number
