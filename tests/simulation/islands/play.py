"""Plays one schedule: islands, their lead, the store, and the faults.

The rules that decide are the product's: `launcher/protocol/rounds` and
`elasticzero/islands/progress`. Each island sees what is in the store with a delay, and fetches take
time; islands die, freeze, come and leave, cannot reach each other, have transfers that hang, and
lose the store. After the last fault every schedule must end with all samples committed, and all
islands that live must have the same state.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from elasticzero.launcher.protocol.rounds.documents import Rounds
from elasticzero.launcher.protocol.rounds.island import tasks
from elasticzero.launcher.protocol.rounds.lead import LeadView, lead
from tests.simulation.islands.drawing import KINDS, draw
from tests.simulation.islands.island import Island
from tests.simulation.islands.promises import BrokenRule, Promises
from tests.simulation.islands.store import TTL, Seen, Store

OVERDUE = 60
"""Ticks after which an attempt has taken too long."""
LONGEST = 6 * OVERDUE
"""Ticks within which every attempt is over, or is given up."""
COME = 20
"""Ticks for which the rounds wait until all islands are there."""
LIMIT = 6_000
"""Ticks within which every schedule ends."""


class Play:
    """Plays the schedule of one seed."""

    def __init__(self, seed: int, tell: Callable[[str], None] = lambda line: None) -> None:
        self.drawn = draw(seed)
        self.store = Store()
        self.islands: list[Island] = []
        self.promises = Promises(self.islands, self.drawn)
        self._tell = tell
        self._dice = random.Random(f"faults of {seed}")
        self._tick = 0
        self._attempts: dict[tuple[int, int, int], int] = {}
        """When each attempt was first seen, by history, fragment and number."""
        self._cut: tuple[frozenset[str], int] = (frozenset(), 0)
        """Two islands that cannot reach each other, and until when."""
        for _ in range(self.drawn.islands):
            self._join()

    def run(self) -> None:
        """Plays to the end; raises `BrokenRule`."""
        faults = [*self.drawn.faults]
        while self._tick < LIMIT:
            self._tick += 1
            while faults and faults[0] <= self._tick:
                faults.pop(0)
                self._strike()
            if not any(island.alive for island in self.islands):
                self._join()
            if self.store.answers(self._tick):
                self.store.expire(self._tick)
            for island in self._dice.sample(self.islands, len(self.islands)):
                if island.alive and self._tick >= island.frozen_until:
                    self._act(island)
            if not faults and self._is_over():
                return
        raise BrokenRule(f"the schedule does not end: {self.store.rounds}")

    def _is_over(self) -> bool:
        rounds = self.store.rounds
        if rounds is None or not rounds.done:
            return False
        newest = [fragment.outer for fragment in rounds.fragments]
        having = [i.outer == newest for i in self.islands if i.alive and not i.leaving]
        return all(having) or not any(having)  # who comes after all others have gone is refused

    def _say(self, text: str) -> None:
        self._tell(f"{self._tick}: {text}")

    # The faults.

    def _join(self) -> None:
        speed = self._dice.choice(self.drawn.speeds)
        island = Island(f"island-{len(self.islands)}", speed, self.drawn)
        self._begin(island)
        self.islands.append(island)

    def _begin(self, island: Island) -> None:
        seed = island.name if self._dice.random() < 0.5 else "the same seed"
        island.begin_with_own(("initial", seed))
        island.alive, island.leaving = True, False

    def _strike(self) -> None:
        living = [island for island in self.islands if island.alive]
        kind = self._dice.choice(KINDS)
        count = 2 if self.drawn.pairs and self._dice.random() < 0.5 else 1
        victims = self._dice.sample(living, min(count, len(living)))
        self._say(f"{kind}: {', '.join(victim.name for victim in victims)}")
        if kind == "join" or not living:
            self._join()
        elif kind == "store":
            self.store.away_until = self._tick + self._dice.randint(1, 3 * TTL)
        elif kind == "cut":
            ends = self._dice.sample(living, min(2, len(living)))
            until = self._tick + self._dice.randint(
                1, self._dice.choice([2 * OVERDUE, 2 * LONGEST])
            )
            self._cut = frozenset(end.name for end in ends), until
        for victim in victims:
            self._strike_one(kind, victim)

    def _strike_one(self, kind: str, victim: Island) -> None:
        if kind == "kill":
            victim.alive = False
        elif kind == "begin again":
            self._begin(victim)
        elif kind == "freeze":
            victim.frozen_until = self._tick + self._dice.randint(1, 4 * TTL)
        elif kind == "hang":
            victim.hangs_until = self._tick + self._dice.randint(1, 2 * LONGEST)
        elif kind == "drain" and sum(i.alive and not i.leaving for i in self.islands) > 1:
            victim.leaving = True

    # A tick of an island.

    def _act(self, island: Island) -> None:
        answers = self.store.answers(self._tick)
        if answers:
            self._renew(island)
            seen = self._tick - self._dice.randint(0, self.drawn.delay)
            island.seen = max(island.seen, seen)
        documents = self.store.as_of(island.seen)
        rounds = documents.rounds
        if rounds is not None and island.is_registered:
            self._follow(island, documents, rounds)
            if self._dice.random() < island.speed and not rounds.done:
                self._train(island, rounds)
        if answers and island.alive:
            self.store.put_report(self._tick, island.name, island.report())
            island.is_registered = True
            if next(iter(documents.reports), None) == island.name:
                self._lead(island, documents)

    def _renew(self, island: Island) -> None:
        """Renews a registration; where it is gone, comes back with it if the store was away."""
        if not island.is_registered:
            return
        report = self.store.reports.get(island.name)
        if report is not None and report.incarnation == island.incarnation:
            self.store.renew(self._tick, island.name)
        elif self.store.back_for(self._tick) < TTL:
            island.is_registered = False
        else:
            self._begin_anew(island)

    def _begin_anew(self, island: Island) -> None:
        self._say(f"{island.name} begins anew")
        if self.store.answers(self._tick):
            self.store.remove(self._tick, island.name)
        island.begin(island.outer)

    def _follow(self, island: Island, documents: Seen, rounds: Rounds) -> None:
        """Takes note of the rounds, and does what is to be done: one task at a time."""
        if island.follow(rounds):
            self._begin_anew(island)
            return
        self.promises.settled(rounds, island)
        parts = {number: island.part(number) for number in range(len(island.outer))}
        todo = [*tasks(rounds, documents.reports, island.name, parts)]
        if island.task is None and todo:
            island.task = self._tick + self._dice.randint(0, self.drawn.fetch), todo[0]
        if island.task is None or self._tick < max(island.task[0], island.hangs_until):
            return
        _, task = island.task
        island.task = None
        if task in todo:  # else something else has become of it meanwhile
            island.do(rounds, task, lambda name: self._reached(island, name))
            self.promises.settled(rounds, island)

    def _reached(self, island: Island, name: str) -> Island | None:
        ends, until = self._cut
        if self._tick < until and ends == {island.name, name}:
            return None
        return next(
            (
                other
                for other in self.islands
                if other.name == name and other.alive and self._tick >= other.frozen_until
            ),
            None,
        )

    def _train(self, island: Island, rounds: Rounds) -> None:
        for number, samples in island.train(rounds).items():
            self.promises.contributed(island, number, samples)
        if island.leaving and island.has_contributed_all:
            self._say(f"{island.name} has left")
            island.alive = False
            if self.store.answers(self._tick):
                self.store.remove(self._tick, island.name)

    def _lead(self, island: Island, documents: Seen) -> None:
        """Writes the next document, if it is still what this lead has seen."""
        rounds, reports = documents.rounds, documents.reports
        overdue = set()
        for number, fragment in enumerate(rounds.fragments if rounds is not None else ()):
            if rounds is not None and fragment.closing is not None:
                key = rounds.history, number, fragment.closing.attempt
                ticks = self._tick - self._attempts.setdefault(key, self._tick)
                if ticks > LONGEST:
                    raise BrokenRule(f"an attempt takes {ticks} ticks: {fragment.closing}")
                if ticks > OVERDUE:
                    overdue.add((number, fragment.closing.attempt))
        silent = set()
        if rounds is not None and self.store.back_for(self._tick) < 2 * TTL:
            silent = {seat.island for seat in rounds.seats} - {*reports}
        view = LeadView(
            rounds=rounds,
            reports=reports,
            silent=silent,
            overdue=overdue,
            complete=self._tick > COME or len(reports) >= self.drawn.islands,
        )
        following = lead(view, self.drawn.settings)
        registration = self.store.reports.get(island.name)
        stands = registration is not None and registration.incarnation == island.incarnation
        if following in (None, rounds) or not stands or self.store.rounds != rounds:
            return
        assert following is not None
        self.promises.check(following, reports)
        self.store.put_rounds(self._tick, following)
