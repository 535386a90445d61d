"""Keeps an island in the rounds: what it holds, what it reports, and what its workers are told.

`turn` is called in the agent's loop, and decides from documents, files and messages alone what
comes next: each step may be lost or done twice. Rules:
 IK1  An island takes part from the moment at which all of its node's workers have their state. That
      is its first outer state, with which the rounds begin where no other island has more samples
      behind its own (RD10). While its workers start again it goes on to lead, to exchange and to
      report, and says that it does not train.
 IK2  It begins anew, under another incarnation, where what it has made counts no more: it has
      another seat, its outer state is none of the recent rounds', or its workers have come back
      from a state that is older than what it has told of. Its claims are free then, and its
      workers take the outer parameters.
 IK3  Its workers are told what rounds there are once it has their files, and not before.
 IK4  A contribution is reported once all workers of the node have written their part of it and its
      digest is known, and its file stays until the contribution is settled and all have taken the
      state that has it.
"""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from elasticzero.checkpoint.storage.http import HttpStorage
from elasticzero.errors import StoreUnavailable
from elasticzero.ipc.rounds import (
    PARTS,
    IslandAt,
    IslandProgress,
    JoinRounds,
    RoundNews,
    SamplesLeft,
    encoded_name,
    outer_name,
    own_name,
    sent_name,
)
from elasticzero.launcher.islands.committed import CommittedRounds
from elasticzero.launcher.islands.documents import Documents, RoundDocuments
from elasticzero.launcher.islands.exchange import (
    Exchange,
    Exchanged,
    PrepareSent,
    agreed_in,
    mean_name,
)
from elasticzero.launcher.islands.files import RoundFiles, size_of
from elasticzero.launcher.islands.lead import IslandPlace, Lead
from elasticzero.launcher.islands.news import left_of, news_of, refusal, seat_after_the_end
from elasticzero.launcher.islands.node import RETRY_S, AtHand, NodeOutlets, NodeWorkers, RareLine
from elasticzero.launcher.protocol.rounds.documents import (
    Committed,
    Contribution,
    FragmentReport,
    IslandReport,
    Origin,
    Outer,
    Rounds,
    SampleOrder,
    Samples,
    Sum,
    Unreachable,
)
from elasticzero.launcher.protocol.rounds.island import Advance, SumUp, tasks
from elasticzero.launcher.store.membership import new_incarnation

AHEAD_TTLS, MOST_AHEAD = 3.0, 256
"""Multiple of a registration's TTL for which an island has samples, so that it goes on while a lost
lead is replaced; and the most claims that it asks for besides the one that it trains on."""
SILENCE_S = 20.0
"""Seconds without data after which a transfer between islands ends."""


class Reach(Protocol):
    """Opens what another island's agent serves of the rounds."""

    def __call__(self, report: IslandReport) -> HttpStorage: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlets(NodeOutlets):
    """Holds what a keeper calls."""

    reach: Reach
    """Opens the files of another island's agent."""
    note_round: Callable[[int, int, Committed], None]
    """Notes a committed round: the number of the history, and that of the fragment."""
    outage_end_s: Callable[[], float] = lambda: 0.0
    """Returns when the store last came back, on the monotonic clock."""


@dataclass
class _Fragment:
    """Holds what the island has of one fragment."""

    outer: Outer
    sum: Sum | None = None
    unreachable: Unreachable | None = None
    digests: dict[int, str] = field(default_factory=dict)
    """Digest of each contribution that is kept, by number; empty: it is being computed."""
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
        at_hand: AtHand | None = None,
    ) -> None:
        """Begins before the workers have their state.

        Args:
            place: Which island this is.
            files: The files of this node.
            documents: The documents of the rounds.
            outlets: What the keeper calls.
            at_hand: What the node knows of the rounds that its island has taken part in; None: it
                knows of none.
        """
        self._place, self._files, self._documents = place, files, documents
        self._outlets, self._log = outlets, outlets.log_line
        self._incarnation = new_incarnation()
        self._seat = 0
        self._join: JoinRounds | None = None
        """Message of the workers that have come last; None: none has."""
        self._left = at_hand.left if at_hand else None
        """Samples with which rounds would go on that begin with the outer states; None: those of
        the state that the workers have restored."""
        self._retry_s: dict[int, float] = {}
        """When a task for a fragment may be tried again, after one that has failed."""
        self._workers = NodeWorkers(place.workers)
        self._progress: IslandProgress | None = None
        self._waits = self._leaves = False
        self._fragments = [_Fragment(outer=outer) for outer in at_hand.outers] if at_hand else []
        self._exchange: Exchange | None = None
        self._busy: dict[int, Outer] = {}
        """Fragments for which a task is under way, with the state that it began with."""
        self._ended: queue.SimpleQueue[Exchanged] = queue.SimpleQueue()
        self._sources: dict[str, tuple[tuple[str, int], HttpStorage]] = {}
        """Files of other islands' agents, with the address and run that they are of."""
        self._news: RoundNews | None = None
        self._claim_s: tuple[int, float, float] = (0, 0.0, math.inf)
        """Number of the claim that the island trains on, when it has begun it, and the seconds
        that one takes."""
        self._committed = CommittedRounds()
        self._lead = Lead(place, documents, outlets.log_line, outlets.outage_end_s)
        self._failures = RareLine(outlets.log_line)

    # What workers say.

    def generation_begins(self) -> None:
        """Notes that other workers begin, which have said nothing yet. Rounds go on meanwhile."""
        self._workers.begin_anew()
        self._news = None

    def received(self, rank: int, message: Any) -> None:
        """Takes in a message of a worker.

        Args:
            rank: Local rank of the worker.
            message: The message; all but those of rounds are ignored.
        """
        whole = self._workers.take(rank, message)
        if isinstance(whole, JoinRounds):
            self._workers_have_joined(whole)
        elif whole is not None:
            self._workers_are_at(whole)

    def _workers_have_joined(self, join: JoinRounds) -> None:
        self._join = join
        if self._exchange is None:
            if len(self._fragments) != len(join.fragments):
                self._begin_with_own(join)
                self._left = None
            self._exchange = Exchange(
                self._files,
                agreed_in(join),
                self._open_source,
                self._task_ended,
                self._outlets.count_bytes,
            )
            return
        is_this = join.progress.incarnation == self._incarnation
        if is_this and self._goes_on(join):
            self._progress = join.progress
        elif is_this or (self._progress is not None and self._progress.claim):
            self._begin_anew("its workers have come back from an earlier state")

    def _begin_with_own(self, join: JoinRounds) -> None:
        """Takes the workers' state for the first outer state (IK1)."""
        self._fragments = []
        for number, shape in enumerate(join.fragments):
            names = [own_name(number, part) for part in PARTS]
            if not join.has_momentum:
                with self._files.making(names[-1], size_of(shape)):
                    pass  # zeros
            outer = Outer(round=0, digest=self._files.digest(*names))
            for name, part in zip(names, PARTS, strict=True):
                path = self._files.path(outer_name(number, 0, outer.digest, part))
                self._files.path(name).rename(path)
            self._fragments.append(_Fragment(outer=outer))

    def _goes_on(self, join: JoinRounds) -> bool:
        """Returns whether workers have all that the island has told of (IK2)."""
        if self._progress is None:
            return False
        return all(
            (before.number, before.base, before.sent is None)
            == (after.number, after.base, after.sent is None)
            for before, after in zip(self._progress.fragments, join.progress.fragments, strict=True)
        )

    def _workers_are_at(self, at: IslandAt) -> None:
        if at.progress.incarnation != self._incarnation:
            return
        self._progress, self._waits = at.progress, at.waits
        self._measure(at.progress.claim)
        for number, part in enumerate(at.progress.fragments):
            kept = self._fragments[number]
            newest = part.sent.number if part.sent is not None else part.number + 1
            kept.digests = {n: d for n, d in kept.digests.items() if n >= newest}
            kept.base = part.base
        self._prepare_sent()

    def _prepare_sent(self) -> None:
        """Has contributions prepared that are not, once it may be tried."""
        at = self._progress
        if at is None or self._exchange is None or not self._workers.are_there:
            return
        for number, part in enumerate(at.fragments):
            digests = self._fragments[number].digests
            is_new = part.sent is not None and part.sent.number not in digests
            if part.sent is not None and is_new and self._may_try(number):
                digests[part.sent.number] = ""
                self._exchange.begin(
                    PrepareSent(
                        fragment=number, incarnation=self._incarnation, number=part.sent.number
                    )
                )

    def _measure(self, claim: int) -> None:
        """Measures how long the island takes for a claim."""
        number, began_s, _ = self._claim_s
        now_s = time.monotonic()
        if claim > number:
            seconds = (now_s - began_s) / (claim - number) if number else math.inf
            self._claim_s = claim, now_s, seconds

    # What the rounds say.

    def turn(self, now_s: float, *, leaves: bool = False) -> None:
        """Does what is to be done now; what the store does not take is done in a later turn.

        Args:
            now_s: Present time, on the monotonic clock.
            leaves: Whether the node is about to leave.
        """
        self._leaves = leaves
        while not self._ended.empty():
            self._take(self._ended.get())
        self._prepare_sent()
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
            self._lead.write(join, read, now_s)
        if read.rounds is not None and read.rounds.order.digest == join.digest:
            for number, past in self._committed.new_in(read.rounds):
                self._outlets.note_round(read.rounds.history, number, past)
            self._tell_news(read.rounds, {*read.reports} - {self._place.name})
        if self._workers.are_there:
            self._clean()

    def _is_refused(self, join: JoinRounds, read: Documents) -> bool:
        """Tells the workers, where they train on other samples, or another model, than the job's
        other islands."""
        rounds, name = read.rounds, self._place.name
        others = [report.order for island, report in read.reports.items() if island != name]
        refused = (
            rounds is not None and rounds.order in others and rounds.order.digest != join.digest
        )
        if refused:
            self._refuse(
                "has another model, other samples or other settings of diloco than the job's other "
                "islands: start all with the same script and options"
            )
        return refused

    def fail(self, error: Exception) -> None:
        """Leaves the rounds, as something has failed that must not."""
        self.close()
        why = f"its agent has failed ({type(error).__name__}); the agent's log has more"
        self._refuse(f"takes no part in the rounds any more: {why}")

    def _refuse(self, why: str) -> None:
        """Tells the workers that the island can take no part, once."""
        if self._news is None or not self._news.refused:
            version = 1 if self._news is None else self._news.version + 1
            self._news = refusal(version, f"island {self._place.name} {why}")
            self._outlets.tell(self._news)

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
            elif task.fragment not in self._busy and self._may_try(task.fragment):
                assert self._exchange is not None
                self._busy[task.fragment] = self._fragments[task.fragment].outer
                self._exchange.begin(
                    task, _digests(task, reports) if isinstance(task, SumUp) else {}
                )

    def _may_try(self, number: int) -> bool:
        return time.monotonic() >= self._retry_s.get(number, 0.0)

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
            kept.digests, kept.base = {}, 0
        with suppress(StoreUnavailable):  # its next report takes the place of the last one
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
        kept = self._fragments[number]
        if isinstance(outcome.task, PrepareSent):
            if outcome.task.incarnation == self._incarnation:
                self._take_digest(kept, outcome)
            return
        if outcome.error:
            self._retry_s[number] = time.monotonic() + RETRY_S
        if self._busy.pop(number) != kept.outer:
            return  # the rounds have gone on without it
        self._say_error(outcome)
        match outcome.result:
            case Sum() as result:
                kept.sum = result
            case Unreachable() as unreachable:
                kept.unreachable = unreachable
            case None if not outcome.error:
                self._advance(number, outcome.task.outer)  # type: ignore[union-attr]

    def _take_digest(self, kept: _Fragment, outcome: Exchanged) -> None:
        """Notes the digest of a contribution, which is still kept if its number is."""
        assert isinstance(outcome.task, PrepareSent)
        number = outcome.task.number
        if isinstance(outcome.result, str) and number in kept.digests:
            kept.digests[number] = outcome.result
        elif outcome.error:
            kept.digests.pop(number, None)
            self._retry_s[outcome.task.fragment] = time.monotonic() + RETRY_S
            self._say_error(outcome)

    def _say_error(self, outcome: Exchanged) -> None:
        """Logs why a task has failed, but not every time."""
        if outcome.error:
            self._failures.log(f"a round cannot go on yet: {outcome.error}")

    def _open_source(self, island: str) -> HttpStorage | None:
        """Returns the files of another island's agent; called in the exchange's thread."""
        report = self._documents.read().reports.get(island)
        if report is None or island == self._place.name:
            return None
        place = report.address, report.run
        before = self._sources.get(island)
        if before is not None and before[0] == place:
            return before[1]
        if before is not None:
            before[1].close()
        source = self._outlets.reach(report)
        self._sources[island] = place, source
        return source

    # What the island reports.

    def _report(self, join: JoinRounds) -> IslandReport:
        claim = self._progress.claim if self._progress is not None else 0
        left = self._left or join.progress.left
        ahead = math.ceil(AHEAD_TTLS * self._place.ttl_s / max(self._claim_s[2], 1e-3))
        if join.settings.wait:  # it goes no faster than the others
            ahead = 1
        trains = self._workers.are_there and not self._leaves
        return IslandReport(
            incarnation=self._incarnation,
            address=self._place.address,
            order=SampleOrder(
                section=join.section,
                is_stream=join.is_stream,
                total=join.total,
                limit=join.limit,
                global_batch=join.global_batch,
                digest=join.digest,
            ),
            origin=Origin(
                next=left.next,
                free=tuple(Samples(start=start, stop=stop) for start, stop in left.earlier),
                samples=left.committed,
                marks=left.marks,
            ),
            fragments=tuple(self._part(number) for number in range(len(self._fragments))),
            seat=self._seat,
            claim=claim,
            ahead=min(max(1, ahead), MOST_AHEAD) if trains else 0,
            ends=self._progress.ends if self._progress is not None else (),
            is_over=self._is_over(),
            run=self._place.run,
        )

    def _is_over(self) -> bool:
        """Returns whether the workers have no samples and nothing left to contribute, and have
        taken the newest outer states."""
        if self._progress is None or not self._waits:
            return False
        pairs = zip(self._progress.fragments, self._fragments, strict=True)
        return all(
            part.sent is None and not part.steps and part.digest == kept.outer.digest
            for part, kept in pairs
        )

    def _part(self, number: int) -> FragmentReport:
        kept, at = self._fragments[number], self._progress
        sent = at.fragments[number].sent if at is not None else None
        contribution = None
        if sent is not None and self._join is not None and kept.digests.get(sent.number):
            contribution = Contribution(
                number=sent.number,
                base=sent.base,
                samples=sent.samples,
                steps=sent.steps,
                claim=sent.claim,
                upto=sent.upto,
                mark=sent.mark,
                digest=kept.digests[sent.number],
                waits=self._waits or sent.since >= self._join.settings.grace,
            )
        return FragmentReport(
            outer=kept.outer,
            contribution=contribution,
            sum=kept.sum,
            unreachable=kept.unreachable,
        )

    # What the workers are told.

    def _tell_news(self, rounds: Rounds, others: Collection[str]) -> None:
        """Tells the workers how the rounds stand, if that is new to them (IK3).

        Args:
            rounds: The rounds.
            others: The other islands that live.
        """
        if not self._workers.are_there or (self._news is not None and self._news.refused):
            return
        if rounds.done and not self._takes_part(rounds) and not others:
            self._refuse("has come after the last round, and no other island is there any more")
        seat = rounds.seat(self._place.name, self._incarnation)
        if seat is None and rounds.done:
            seat = seat_after_the_end(rounds, self._place.name, self._incarnation)
        if seat is None or seat.number != self._seat or not self._takes_part(rounds):
            return
        outers = [kept.outer for kept in self._fragments]
        if self._left is None or outers == [fragment.outer for fragment in rounds.fragments]:
            left, before = left_of(rounds), self._left or SamplesLeft(next=-1)
            if (left.committed, left.first) != (before.committed, before.first):
                self._left = left
        version = 0 if self._news is None else self._news.version
        assert self._left is not None
        news = news_of(rounds, seat, outers, self._left, version)
        if news != self._news:
            self._news = replace(news, version=version + 1)
            self._outlets.tell(self._news)

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
            sent = [sent_name(number, self._incarnation, n) for n in kept.digests]
            names |= {*sent, *map(encoded_name, sent)}
        busy = tuple(f"{kind}-{n}-" for n in self._busy for kind in ("outer", "mean"))
        self._files.keep_only(names | self._written_by_workers(), busy)

    def _is_read(self, number: int, kept: _Fragment, state: Outer) -> bool:
        """Returns whether an earlier outer state may still be read."""
        names = [outer_name(number, state.round, state.digest, part) for part in PARTS]
        fetched = any(self._files.was_read(name, SILENCE_S) for name in names)
        return fetched or state.round >= kept.base

    def _written_by_workers(self) -> set[str]:
        """Returns the names of files that workers may be writing."""
        at = self._progress
        numbers = range(len(self._fragments))
        newest = [0 if at is None else at.fragments[n].number for n in numbers]
        return {
            sent_name(n, self._incarnation, number)
            for n in numbers
            for number in (newest[n], newest[n] + 1)
        }

    def close(self) -> None:
        """Leaves the rounds."""
        if self._exchange is not None:
            self._exchange.close()
        self._documents.leave()
        for _, source in self._sources.values():
            source.close()


def _digests(task: SumUp, reports: Mapping[str, IslandReport]) -> dict[str, str]:
    """Returns the digest that each island has told of its contribution."""
    digests = {}
    for contributor in task.contributors:
        report = reports.get(contributor.island)
        part = report.fragments[task.fragment].contribution if report is not None else None
        if part is not None and part.number == contributor.number:
            digests[contributor.island] = part.digest
    return digests
