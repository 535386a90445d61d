"""Keeps an island in the rounds: what it holds, what it reports, and what its workers are told.

`turn` is called in the agent's loop, and decides from documents, files and messages alone what
comes next: each step may be lost or done twice. Rules:
 IK1  An island takes part from the moment at which all of its node's workers have their state. Its
      own state is its first outer state, which others take where it is the first island.
 IK2  It begins anew, under another incarnation, where what it has made counts no more: it has
      another seat, its outer state is none of the recent rounds', or its workers have come back
      from a state that is older than what it has told of. Its claims are free then, and its
      workers take the outer parameters.
 IK3  Its workers are told what rounds there are once it has their files, and not before.
 IK4  A contribution is reported once all workers of the node have written their part of it, and its
      file stays until the contribution is settled and all have taken the state that has it.
"""

from __future__ import annotations

import math
import queue
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from elasticzero.checkpoint.storage.http import HttpStorage
from elasticzero.errors import StoreUnavailable
from elasticzero.ipc.rounds import (
    FragmentNews,
    GivenSamples,
    IslandAt,
    IslandProgress,
    JoinRounds,
    RoundNews,
    SamplesLeft,
    outer_name,
    own_name,
    sent_name,
)
from elasticzero.launcher.islands.documents import Documents, RoundDocuments
from elasticzero.launcher.islands.exchange import Agreed, Exchange, Exchanged, mean_name
from elasticzero.launcher.islands.files import PARTS, RoundFiles, size_of
from elasticzero.launcher.islands.outer import OuterOptimizer
from elasticzero.launcher.protocol.rounds.documents import (
    Contribution,
    FragmentReport,
    IslandReport,
    Origin,
    Outer,
    Rounds,
    SampleOrder,
    Samples,
    Seat,
    Sum,
    Unreachable,
)
from elasticzero.launcher.protocol.rounds.island import Advance, SumUp, tasks
from elasticzero.launcher.protocol.rounds.lead import LeadView, RoundSettings, lead
from elasticzero.launcher.store.membership import new_incarnation

OVERDUE_S, SLOWEST_BYTES_S = 30.0, 250_000.0
"""Seconds after which an attempt has taken too long, and bytes a second of its mean that it may
take besides."""
AHEAD_TTLS, MOST_AHEAD = 3.0, 256
"""Multiple of a registration's TTL for which an island has samples, so that it goes on while a lost
lead is replaced; and the most claims that it asks for besides the one that it trains on."""
QUIET_S = 10.0
"""Seconds for which no line about a failed transfer follows another."""
SILENCE_S = 20.0
"""Seconds without data after which a transfer between islands ends."""


class Reach(Protocol):
    """Opens what another island's agent serves of the rounds."""

    def __call__(self, report: IslandReport) -> HttpStorage: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandPlace:
    """Says which island this node is, and how the others reach it."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlets:
    """Holds what a keeper calls."""

    reach: Reach
    """Opens the files of another island's agent."""
    tell: Callable[[RoundNews], None]
    """Sends news to this node's workers."""
    wake: Callable[[], None]
    """Wakes the agent's loop; called from other threads."""
    log_line: Callable[[str], None]
    """Receives lines for people."""
    outage_end_s: Callable[[], float] = lambda: 0.0
    """Returns when the store last came back, on the monotonic clock."""


@dataclass
class _Fragment:
    """Holds what the island has of one fragment."""

    outer: Outer
    sum: Sum | None = None
    unreachable: Unreachable | None = None
    digests: dict[int, str] = field(default_factory=dict)
    """Digest of each contribution that is kept, by number."""
    base: int = 0
    """Round whose outer parameters all workers have taken, or a later one."""
    before: list[Outer] = field(default_factory=list)
    """Earlier outer states, whose files are still read: by workers, or by other islands."""


class IslandKeeper:
    """Keeps this node's island in the rounds."""

    def __init__(
        self,
        place: IslandPlace,
        files: RoundFiles,
        documents: RoundDocuments,
        outlets: Outlets,
    ) -> None:
        """Begins before the workers have their state.

        Args:
            place: Which island this is.
            files: The files of this node.
            documents: The documents of the rounds.
            outlets: What the keeper calls.
        """
        self._place, self._files, self._documents = place, files, documents
        self._outlets, self._log = outlets, outlets.log_line
        self._incarnation = new_incarnation()
        self._seat = 0
        self._join: JoinRounds | None = None
        """What the workers of the present generation have said; None: not all of them."""
        self._joins: dict[int, JoinRounds] = {}
        self._at: dict[int, deque[IslandAt]] = {}
        """Messages of each worker that others have not sent yet."""
        self._progress: IslandProgress | None = None
        self._waits = False
        self._fragments: list[_Fragment] = []
        self._exchange: Exchange | None = None
        self._busy: set[int] = set()
        self._ended: queue.SimpleQueue[Exchanged] = queue.SimpleQueue()
        self._sources: dict[str, HttpStorage] = {}
        self._news: RoundNews | None = None
        self._claim_s: tuple[int, float, float] = (0, 0.0, math.inf)
        """Number of the claim that the island trains on, when it has begun it, and the seconds
        that one takes."""
        self._attempts: dict[tuple[int, int, int], float] = {}
        self._began_s = time.monotonic()
        self._quiet_until_s = 0.0

    # What workers say.

    def generation_begins(self) -> None:
        """Notes that other workers begin, which have said nothing yet."""
        self._join, self._joins, self._at = None, {}, {}
        self._news = None

    def received(self, rank: int, message: Any) -> None:
        """Takes in a message of a worker.

        Args:
            rank: Local rank of the worker.
            message: The message; all but those of rounds are ignored.
        """
        if isinstance(message, JoinRounds):
            self._joins[rank] = message
            if len(self._joins) == self._place.workers:
                self._workers_have_joined(message)
        elif isinstance(message, IslandAt):
            self._at.setdefault(rank, deque()).append(message)
            if len(self._at) == self._place.workers and all(self._at.values()):
                first = [waiting.popleft() for waiting in self._at.values()]
                self._workers_are_at(first[0])

    def _workers_have_joined(self, join: JoinRounds) -> None:
        self._join = join
        if not self._fragments:
            self._begin_with_own(join)
        elif self._progress is not None and self._progress.claim and not self._goes_on(join):
            self._begin_anew("its workers have come back from an earlier state")
        if self._progress is not None and join.progress.incarnation == self._incarnation:
            self._progress = join.progress

    def _begin_with_own(self, join: JoinRounds) -> None:
        """Takes the workers' state for the first outer state (IK1)."""
        for number, shape in enumerate(join.fragments):
            first, zeros = own_name(number), f"{own_name(number)}.momentum"
            with self._files.making(zeros, shape):
                pass
            outer = Outer(round=0, digest=self._files.digest(first, zeros))
            for name, part in zip((first, zeros), PARTS, strict=True):
                path = self._files.path(outer_name(number, 0, outer.digest, part))
                self._files.path(name).rename(path)
            self._fragments.append(_Fragment(outer=outer))
        optimizer = OuterOptimizer(lr=join.settings.outer_lr, momentum=join.settings.outer_momentum)
        agreed = Agreed(shapes=join.fragments, optimizer=optimizer)
        self._exchange = Exchange(self._files, agreed, self._open_source, self._task_ended)

    def _goes_on(self, join: JoinRounds) -> bool:
        """Returns whether workers have all that the island has told of (IK2)."""
        before, after = self._progress, join.progress
        assert before is not None
        if after.incarnation != self._incarnation:
            return False
        return all(
            (b.number, b.base, b.sent is None) == (a.number, a.base, a.sent is None)
            for b, a in zip(before.fragments, after.fragments, strict=True)
        )

    def _workers_are_at(self, at: IslandAt) -> None:
        if at.progress.incarnation != self._incarnation:
            return
        self._progress, self._waits = at.progress, at.waits
        self._measure(at.progress.claim)
        for number, part in enumerate(at.progress.fragments):
            kept = self._fragments[number]
            if part.sent is not None and part.sent.number not in kept.digests:
                name = sent_name(number, self._incarnation, part.sent.number)
                kept.digests[part.sent.number] = self._files.digest(name)
            newest = part.sent.number if part.sent is not None else part.number + 1
            kept.digests = {n: d for n, d in kept.digests.items() if n >= newest}
            kept.base = part.base

    def _measure(self, claim: int) -> None:
        """Measures how long the island takes for a claim."""
        number, began_s, _ = self._claim_s
        now_s = time.monotonic()
        if claim > number:
            seconds = (now_s - began_s) / (claim - number) if number else math.inf
            self._claim_s = claim, now_s, seconds

    # What the rounds say.

    def turn(self, now_s: float) -> None:
        """Does what is to be done now; what the store does not take is done in a later turn."""
        while not self._ended.empty():
            self._take(self._ended.get())
        join = self._join
        if join is None or not self._documents.is_known:
            return
        read = self._documents.read()
        if self._is_refused(join, read):
            return
        with suppress(StoreUnavailable):
            if read.rounds is not None and read.rounds.order.digest == join.digest:
                self._follow(read.rounds, read.reports)
            self._documents.put_report(self._report(join))
            self._lead(join, read, now_s)
        if read.rounds is not None and read.rounds.order.digest == join.digest:
            self._tell_news(read.rounds)
        self._clean()

    def _is_refused(self, join: JoinRounds, read: Documents) -> bool:
        """Tells the workers, where they train on other samples, or another model, than the job's
        other islands."""
        rounds, name = read.rounds, self._place.name
        others = [report.order for island, report in read.reports.items() if island != name]
        refused = (
            rounds is not None and rounds.order in others and rounds.order.digest != join.digest
        )
        if refused and self._news is None:
            self._news = _refusal(name)
            self._outlets.tell(self._news)
        return refused

    def _follow(self, rounds: Rounds, reports: Mapping[str, IslandReport]) -> None:
        seat = rounds.seat(self._place.name, self._incarnation)
        at = self._progress
        if seat is not None and self._seat not in (0, seat.number):
            self._begin_anew("another seat was given to it")
        elif at is not None and at.claim and not self._takes_part(rounds):
            self._begin_anew("its rounds count no more")
        elif seat is not None:
            self._seat = seat.number
        parts = {number: self._part(number) for number in range(len(self._fragments))}
        reports = {n: r for n, r in reports.items() if r.order == rounds.order}
        for task in tasks(rounds, reports, self._place.name, parts):
            if isinstance(task, Advance):
                self._advance(task.fragment, task.outer)
            elif task.fragment not in self._busy and self._exchange is not None:
                self._busy.add(task.fragment)
                self._exchange.begin(
                    task, _digests(task, reports) if isinstance(task, SumUp) else {}
                )

    def _takes_part(self, rounds: Rounds) -> bool:
        pairs = zip(rounds.fragments, self._fragments, strict=True)
        return all(fragment.has(kept.outer) for fragment, kept in pairs)

    def _begin_anew(self, why: str) -> None:
        """Begins under another incarnation, with the outer states that there are (IK2)."""
        self._log(f"island {self._place.name} begins anew: {why}")
        self._incarnation, self._seat, self._progress = new_incarnation(), 0, None
        self._waits, self._claim_s = False, (0, 0.0, math.inf)
        for kept in self._fragments:
            kept.sum = kept.unreachable = None
            kept.digests = {}
        self._documents.forget()

    def _advance(self, number: int, outer: Outer) -> None:
        kept = self._fragments[number]
        kept.before.append(kept.outer)
        kept.outer = outer

    def _task_ended(self, outcome: Exchanged) -> None:
        self._ended.put(outcome)
        self._outlets.wake()

    def _take(self, outcome: Exchanged) -> None:
        number = outcome.task.fragment
        self._busy.discard(number)
        kept = self._fragments[number]
        if outcome.error and (now_s := time.monotonic()) >= self._quiet_until_s:
            self._quiet_until_s = now_s + QUIET_S
            self._log(f"a round cannot go on yet: {outcome.error}")
        match outcome.result:
            case Sum() as result:
                kept.sum = result
            case Unreachable() as unreachable:
                kept.unreachable = unreachable
            case None if not outcome.error:
                self._advance(number, outcome.task.outer)  # type: ignore[union-attr]

    def _open_source(self, island: str) -> HttpStorage | None:
        """Returns the files of another island's agent; called in the exchange's thread."""
        report = self._documents.read().reports.get(island)
        if report is None or island == self._place.name:
            return None
        before = self._sources.get(island)
        if before is None or report.address not in before.where:
            self._sources[island] = before = self._outlets.reach(report)
        return before

    # What the island reports.

    def _report(self, join: JoinRounds) -> IslandReport:
        claim = self._progress.claim if self._progress is not None else 0
        left = join.progress.left
        ahead = math.ceil(AHEAD_TTLS * self._place.ttl_s / max(self._claim_s[2], 1e-3))
        if join.settings.wait:  # it goes no faster than the others
            ahead = 1
        return IslandReport(
            incarnation=self._incarnation,
            address=self._place.address,
            order=SampleOrder(
                epoch=join.epoch,
                total=join.total,
                global_batch=join.global_batch,
                digest=join.digest,
            ),
            origin=Origin(
                next=left.next,
                free=tuple(Samples(start=start, stop=stop) for start, stop in left.earlier),
                samples=left.committed,
            ),
            fragments=tuple(self._part(number) for number in range(len(self._fragments))),
            seat=self._seat,
            claim=claim,
            ahead=min(max(1, ahead), MOST_AHEAD),
            run=self._place.run,
        )

    def _part(self, number: int) -> FragmentReport:
        kept, at = self._fragments[number], self._progress
        sent = at.fragments[number].sent if at is not None else None
        contribution = None
        if sent is not None and self._join is not None:
            contribution = Contribution(
                number=sent.number,
                base=sent.base,
                samples=sent.samples,
                steps=sent.steps,
                claim=sent.claim,
                upto=sent.upto,
                digest=kept.digests[sent.number],
                waits=self._waits or sent.since >= self._join.settings.grace,
            )
        return FragmentReport(
            outer=kept.outer,
            contribution=contribution,
            sum=kept.sum,
            unreachable=kept.unreachable,
        )

    # What the lead writes.

    def _lead(self, join: JoinRounds, read: Documents, now_s: float) -> None:
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
        if rounds is not None and now_s - self._outlets.outage_end_s() < 2 * place.ttl_s:
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

    # What the workers are told.

    def _tell_news(self, rounds: Rounds) -> None:
        """Tells the workers how the rounds stand, if that is new to them (IK3)."""
        seat = rounds.seat(self._place.name, self._incarnation)
        if seat is None or seat.number != self._seat or not self._takes_part(rounds):
            return
        fragments = tuple(
            FragmentNews(
                round=kept.outer.round,
                digest=kept.outer.digest,
                called=fragment.called,
                settled=_settled_for(seat, number, kept.outer),
            )
            for number, (fragment, kept) in enumerate(
                zip(rounds.fragments, self._fragments, strict=True)
            )
        )
        version = 0 if self._news is None else self._news.version
        news = RoundNews(
            version=version,
            incarnation=self._incarnation,
            fragments=fragments,
            claims=tuple(
                GivenSamples(
                    number=claim.number,
                    start=claim.samples.start,
                    stop=claim.samples.stop,
                    batch=claim.batch,
                )
                for claim in seat.claims
            ),
            left=self._left_of(rounds),
            none_left=rounds.next >= rounds.order.total and not rounds.free,
            done=rounds.done,
        )
        if news != self._news:
            self._news = replace(news, version=version + 1)
            self._outlets.tell(self._news)

    def _left_of(self, rounds: Rounds) -> SamplesLeft:
        """Returns the samples that are in no committed round, as of the last one."""
        before = None if self._news is None else self._news.left
        if before is not None and before.committed == rounds.samples:
            return before
        pieces = sorted((piece.start, piece.stop) for piece in rounds.uncommitted())
        return SamplesLeft(next=rounds.next, earlier=tuple(pieces), committed=rounds.samples)

    def _clean(self) -> None:
        """Removes files that nobody needs any more."""
        names = set[str]()
        for number, kept in enumerate(self._fragments):
            kept.before = [state for state in kept.before if self._is_read(number, kept, state)]
            for outer in (kept.outer, *kept.before):
                names |= {outer_name(number, outer.round, outer.digest, p) for p in PARTS}
            if kept.sum is not None:
                names.add(mean_name(number, kept.sum.attempt))
                following = kept.outer.round + 1, kept.sum.outer
                names |= {outer_name(number, *following, part) for part in PARTS}
            names |= {sent_name(number, self._incarnation, n) for n in kept.digests}
            if number in self._busy:
                return
        self._files.keep_only(names | self._written_by_workers())

    def _is_read(self, number: int, kept: _Fragment, state: Outer) -> bool:
        """Returns whether an earlier outer state may still be read."""
        names = [outer_name(number, state.round, state.digest, part) for part in PARTS]
        fetched = any(self._files.was_read(name, SILENCE_S) for name in names)
        return fetched or state.round >= kept.base

    def _written_by_workers(self) -> set[str]:
        """Returns the names of files that workers may be writing."""
        names = set[str]()
        if self._progress is not None:
            for number, part in enumerate(self._progress.fragments):
                names.add(sent_name(number, self._incarnation, part.number + 1))
                names.add(sent_name(number, self._incarnation, part.number))
        return names

    def close(self) -> None:
        """Leaves the rounds."""
        if self._exchange is not None:
            self._exchange.close()
        self._documents.close()
        for source in self._sources.values():
            source.close()


def _refusal(island: str) -> RoundNews:
    """Returns the news that an island can take no part."""
    return RoundNews(
        version=1,
        incarnation="",
        fragments=(),
        claims=(),
        left=SamplesLeft(),
        none_left=False,
        done=False,
        refused=f"island {island} has another model, other samples or other settings of diloco "
        "than the job's other islands: start all with the same script and options",
    )


def _digests(task: SumUp, reports: Mapping[str, IslandReport]) -> dict[str, str]:
    """Returns the digest that each island has told of its contribution."""
    digests = {}
    for contributor in task.contributors:
        report = reports.get(contributor.island)
        part = report.fragments[task.fragment].contribution if report is not None else None
        if part is not None and part.number == contributor.number:
            digests[contributor.island] = part.digest
    return digests


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
