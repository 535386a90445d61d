"""Islands that read a stream: each sample is used once, whatever becomes of an island."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from elasticzero.data.loader import RankSchedule
from elasticzero.data.position import DataPosition
from elasticzero.data.streams.dealing import StreamOrder
from elasticzero.data.streams.loader import StreamReader
from elasticzero.data.streams.plan import StreamPlan
from elasticzero.data.streams.source import Stream, stream_order
from elasticzero.errors import UserError
from elasticzero.ipc.rounds import NONE, GivenSamples, SamplesLeft
from elasticzero.islands.claimed_stream import ClaimedStream
from elasticzero.islands.kinds import plan_of_islands, without_islands
from elasticzero.islands.plan import ClaimTable
from elasticzero.islands.progress import with_ends
from elasticzero.islands.stream_plan import SECTION, IslandStreamPlan
from elasticzero.launcher.protocol.rounds.claims import (
    granted,
    nearest_marks,
    split,
    to_give,
    united,
    without_beyond,
)
from elasticzero.launcher.protocol.rounds.documents import (
    Committed,
    Contributor,
    Fragment,
    Outer,
    Rounds,
    SampleOrder,
    Samples,
    Seat,
    Settled,
)
from tests.support.cases import slow

EVERY = 3


@dataclass
class Island:
    """The worker of an island with one rank, and its seat."""

    data: ClaimedStream
    plan: IslandStreamPlan
    schedule: RankSchedule
    seat: Seat
    position: DataPosition
    used: list[int] = field(default_factory=list)
    """Samples that are not committed yet."""

    def step(self) -> None:
        """Makes an inner step, if there are samples."""
        claims = [(claim.samples.start, claim.samples.stop) for claim in self.seat.claims]
        self.plan.table.claims = tuple(
            GivenSamples(number=c.number, start=start, stop=stop, batch=c.batch)
            for c, (start, stop) in zip(self.seat.claims, claims, strict=True)
        )
        self.data.prepare(self.position)
        island = with_ends(self.position.island or NONE, self.plan.ends, claims, SECTION)
        self.position = replace(self.position, island=island)
        following = self.plan.next(self.position)
        if following is None:
            return
        batch, self.position = following
        self.data.look_ahead(batch, self.position)
        for _ in self.schedule.parts(batch, self.position.steps):
            self.used += next(self.data).tolist()


class Play:
    """Deals a stream to islands that come and go."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        shards = dice.choice([3, 9, 16])
        readers = dice.choice([n for n in (1, 4, 9, 16, 2 * shards) if n <= shards] + [2 * shards])
        lengths = [dice.choice([0, 1, 7, 20, 33]) for _ in range(shards)]
        lengths[0] += 1
        numbers = iter(range(sum(lengths)))
        self.shards = [[next(numbers) for _ in range(length)] for length in lengths]
        self.stream = Stream(
            self.shards, read, readers=readers, shuffle_window=dice.choice([1, 4, 16])
        )
        self.plan = StreamPlan(
            order=stream_order(self.stream, seed, shuffle=dice.random() < 0.7),
            global_batch=dice.choice([4, 6]),
            epochs=dice.choice([1, 2]),
        )
        of_islands = plan_of_islands(self.plan, ClaimTable())
        self.rounds = Rounds(
            order=SampleOrder(
                section=SECTION,
                is_stream=True,
                total=of_islands.total,
                global_batch=self.plan.global_batch,
                digest="order",
            ),
            fragments=(Fragment(recent=(Committed(outer=Outer(round=0, digest="")),)),),
            seats=(),
            next=0,
        )
        self.islands: list[Island] = []
        self.numbered = 0
        self.committed: Counter[int] = Counter()
        self.last: tuple[tuple[Samples, ...], list[int]] = (), []
        """Samples of the last commit, by position and by number."""

    def run(self) -> None:
        for _ in range(self.dice.choice([1, 2, 4])):
            self.begin()
        for _ in range(3_000):
            if not to_give(self.rounds) and not any(i.seat.claims for i in self.islands):
                return
            island = self.dice.choice(self.islands)
            self.give(island)
            island.step()
            self.tell_ends(island)
            chance = self.dice.random()
            if chance < 0.3:
                self.commit(island)
            elif chance < 0.34:
                self.lose(island)
                self.begin()
            elif chance < 0.38:  # its workers start again, with the state of the last boundary
                self.start_again(island)
            elif chance < 0.42:
                self.void()
        raise AssertionError("the stream does not end")

    def begin(self) -> None:
        self.numbered += 1
        seat = Seat(
            island=f"i{self.numbered}",
            incarnation="1",
            number=self.numbered,
            settled=(Settled(),),
        )
        position = DataPosition(island=replace(NONE, left=SamplesLeft(marks=self.rounds.marks)))
        self.islands.append(self.made(seat, position))
        self.put(seat)

    def made(self, seat: Seat, position: DataPosition) -> Island:
        plan = plan_of_islands(self.plan, ClaimTable())
        assert isinstance(plan, IslandStreamPlan)
        schedule = RankSchedule(plan=plan, rank=0, world_size=1)
        reader = StreamReader(dataset=None, stream=self.stream, device=torch.device("cpu"))
        at = plan.start(position, 0)
        return Island(ClaimedStream(reader, schedule, plan), plan, schedule, seat, at)

    def put(self, seat: Seat) -> None:
        others = tuple(s for s in self.rounds.seats if s.number != seat.number)
        self.rounds = replace(self.rounds, seats=(*others, seat))

    def give(self, island: Island) -> None:
        while len(island.seat.claims) < 2:
            size = EVERY * self.plan.global_batch // 2
            claim, free, after = granted(self.rounds, island.seat, size, 2)
            if claim is None:
                return
            island.seat = replace(
                island.seat,
                claims=(*island.seat.claims, claim),
                granted=claim.number,
                after=claim.samples.stop,
            )
            self.rounds = replace(self.rounds, free=free, next=after)
            self.put(island.seat)

    def tell_ends(self, island: Island) -> None:
        assert island.position.island is not None
        for end in island.position.island.ends:
            self.rounds = without_beyond(self.rounds, end)
        for other in self.islands:
            other.seat = next(s for s in self.rounds.seats if s.number == other.seat.number)

    def commit(self, island: Island) -> None:
        at = island.position.island
        assert at is not None
        taken, claims = split(island.seat.claims, at.claim, at.upto)
        assert sum(map(len, taken)) == len(island.used)
        island.seat = replace(island.seat, claims=claims)
        self.put(island.seat)
        mark = () if at.mark is None else (at.mark,)
        contributor = Contributor(
            island=island.seat.island,
            incarnation="1",
            number=1,
            samples=len(island.used),
            staleness=0,
            claim=at.claim,
            upto=at.upto,
            taken=taken,
        )
        past = Committed(outer=Outer(round=0, digest=""), contributors=(contributor,))
        self.rounds = replace(
            self.rounds,
            fragments=(Fragment(recent=(past,)),),
            samples=self.rounds.samples + len(island.used),
            marks=(*self.rounds.marks, *mark),
        )
        self.rounds = replace(self.rounds, marks=nearest_marks(self.rounds))
        self.committed.update(island.used)
        self.last = taken, island.used
        island.used = []
        self.see_marks()

    def void(self) -> None:
        """Has the samples of the last commit be free again, whoever they were of."""
        taken, used = self.last
        self.last = (), []
        self.committed.subtract(used)
        self.rounds = replace(
            self.rounds,
            free=united([*self.rounds.free, *taken], SECTION),
            samples=self.rounds.samples - len(used),
        )

    def see_marks(self) -> None:
        for island in self.islands:
            at = island.position.island or NONE
            left = SamplesLeft(marks=self.rounds.marks)
            island.position = replace(island.position, island=replace(at, left=left))

    def lose(self, island: Island) -> None:
        island.data.close()
        self.islands.remove(island)
        free = united([*self.rounds.free, *(c.samples for c in island.seat.claims)], SECTION)
        seats = tuple(s for s in self.rounds.seats if s.number != island.seat.number)
        self.rounds = replace(self.rounds, free=free, seats=seats)

    def start_again(self, island: Island) -> None:
        island.data.close()
        again = self.made(island.seat, island.position)
        again.used = island.used
        self.islands[self.islands.index(island)] = again


def read(shard: list[int], start: int) -> Iterator[int]:
    yield from shard[start:]


@pytest.mark.parametrize(
    "first", [0, 10, 80, *map(slow, [*range(20, 80, 10), *range(90, 400, 10)])]
)
def test_each_sample_is_used_once_in_each_epoch(first: int) -> None:
    for seed in range(first, first + 10):
        play = Play(seed)
        play.run()
        samples = [i for shard in play.shards for i in shard]
        assert +play.committed == Counter(samples * (play.plan.epochs or 0)), seed
        assert len(play.rounds.marks) <= 1 + len(play.islands), seed


def stream_plan() -> StreamPlan:
    order = StreamOrder(shards=9, readers=9, window=4)
    return StreamPlan(order=order, global_batch=4, epochs=2)


def test_islands_go_on_where_all_readers_were() -> None:
    """Each section's readers have given a first part of its samples."""
    plan = plan_of_islands(stream_plan(), ClaimTable())
    rows = tuple((7 if v == 1 else -1, v, 0, 0, v) for v in range(9))
    position = DataPosition(epoch=1, offset=9 * 10 + 4, steps=40, stream=rows)
    left = plan.begun_by(position).left
    places = [(start % SECTION, start // SECTION, stop // SECTION) for start, stop in left.earlier]
    # 7 of reader 1; of the others 10, or 11 as the turn has come to them: 94 = 7 + 87.
    assert places == [(11 + 7 + 11, 3, 4), (11 * 3, 4, 5), (11 + 11 + 10, 5, 6)]
    assert sum(place for place, *_ in places) == 94
    assert left.next == 6 * SECTION and left.committed == 160
    assert [mark.at for mark in left.marks] == [start for start, _ in left.earlier]
    assert left.marks[1].rows == rows[3:6]


def test_a_job_without_islands_begins_the_epoch_anew() -> None:
    rest = (4 * SECTION + 3, 5 * SECTION)
    left = SamplesLeft(next=6 * SECTION, earlier=(rest,), committed=90)
    position = DataPosition(epoch=1, offset=3, steps=9, island=replace(NONE, left=left))
    after, text = without_islands(position, stream_plan())
    assert (after.epoch, after.offset, after.steps, after.island) == (1, 0, 22, None)
    assert "beginning of epoch 1" in text


def test_an_island_needs_a_reader_for_each_rank() -> None:
    plan = plan_of_islands(stream_plan(), ClaimTable())
    assert isinstance(plan, IslandStreamPlan)
    assert all(len(units) == 1 for units in plan.units(1, 3, None))
    with pytest.raises(UserError, match=r"9 readers, of which islands read 3 at a time.*16"):
        plan.units(0, 4, None)


def test_a_stream_without_samples_is_an_error(tmp_path: Path) -> None:
    play = Play(0)
    play.stream = Stream([[] for _ in play.shards], read, readers=play.stream.readers)
    play.plan = StreamPlan(order=play.plan.order, global_batch=4, steps=3)
    unlimited = plan_of_islands(play.plan, ClaimTable()).total
    play.rounds = replace(play.rounds, order=replace(play.rounds.order, total=unlimited))
    with pytest.raises(UserError, match="no sample at all"):
        play.run()


def test_free_samples_of_the_section_that_an_island_reads_come_first() -> None:
    play = Play(1)
    order = replace(play.rounds.order, total=6 * SECTION)
    rests = [Samples(start=k * SECTION + 10, stop=(k + 1) * SECTION) for k in range(2)]
    seats = [
        Seat(island=f"i{k}", incarnation="1", number=k, settled=(), after=rests[k].start)
        for k in range(2)
    ]
    rounds = replace(
        play.rounds, order=order, seats=tuple(seats), free=tuple(rests), next=2 * SECTION
    )
    new = replace(seats[0], island="i9", number=9, after=0)

    def start(seat: Seat, rounds: Rounds) -> int:
        claim, _, _ = granted(rounds, seat, 6, 2)
        assert claim is not None
        return claim.samples.start

    assert [start(seat, rounds) for seat in seats] == [rest.start for rest in rests]
    assert start(new, rounds) == 2 * SECTION
    assert start(new, replace(rounds, next=6 * SECTION)) == rests[0].start
    given_back = Samples(start=SECTION + 2, stop=SECTION + 5)
    free = (rests[0], given_back, rests[1])
    assert start(seats[0], replace(rounds, free=free)) == given_back.start
