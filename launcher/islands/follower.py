"""Follows the rounds on a node of an island whose *head* is another node.

The head is the node of the island's rank 0. It keeps the island in the rounds (`keeper`), and what
it tells its workers it writes for the other nodes of the island too, which tell theirs the same. So
all ranks see the same news, in the order of their numbers. Rules:
 IF1  News counts for the generation that it was written in. It is told to this node's workers once
      these have their state, and the node has all files that they read then: the outer states, and
      each contribution that is not settled. Older news is passed over where files are lacking.
 IF2  A file that the node lacks, as it came later, is fetched from the head. So are contributions
      of an earlier generation, of which workers that died may have left a part.
 IF3  A contribution is rounded as the head rounds its own, where `DiLoCo.wire` says so, before the
      workers learn what has become of it: all nodes of an island have the same bits of it.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from typing import Any

from elasticzero.checkpoint.storage.http import HttpStorage
from elasticzero.ipc.rounds import (
    NONE,
    PARTS,
    JoinRounds,
    RoundNews,
    encoded_name,
    outer_name,
    sent_name,
)
from elasticzero.launcher.islands.exchange import (
    HEAD,
    Agreed,
    Exchange,
    Exchanged,
    PrepareSent,
    TakeSent,
    ToDo,
    agreed_in,
    read_name,
)
from elasticzero.launcher.islands.files import RoundFiles
from elasticzero.launcher.islands.news import refusal
from elasticzero.launcher.islands.news_board import IslandNews
from elasticzero.launcher.islands.node import RETRY_S, AtHand, NodeOutlets, NodeWorkers, RareLine
from elasticzero.launcher.protocol.rounds.documents import Outer
from elasticzero.launcher.protocol.rounds.island import TakeOuter


class IslandFollower:
    """Tells this node's workers what the head tells its own."""

    def __init__(self, workers: int, files: RoundFiles, outlets: NodeOutlets) -> None:
        """Begins before the workers have their state.

        Args:
            workers: Number of this node's workers.
            files: The files of this node.
            outlets: What the follower calls.
        """
        self._workers, self._files, self._outlets = NodeWorkers(workers), files, outlets
        self._progress = NONE
        """How far this node's workers are, by what all of them have said."""
        self._has_old_files = True
        """True until contributions of earlier generations are removed."""
        self._agreed: Agreed | None = None
        self._exchange: Exchange | None = None
        self._head: HttpStorage | None = None
        self._place, self._told = (0, 0), 0
        self._at_hand: AtHand | None = None
        self._read: dict[int, list[tuple[int, str]]] = {}
        """Round and digest of the outer states that workers may read, by fragment, oldest first."""
        self._busy: set[ToDo] = set()
        self._retry_s: dict[ToDo, float] = {}
        """When a task that has failed may be tried again."""
        self._ended: queue.SimpleQueue[Exchanged] = queue.SimpleQueue()
        self._failures = RareLine(outlets.log_line)

    @property
    def at_hand(self) -> AtHand | None:
        """Returns what this node knows of the rounds; None: nothing."""
        return self._at_hand

    def generation_begins(self, place: tuple[int, int]) -> None:
        """Notes that workers of another generation begin, which have said nothing yet.

        Args:
            place: The run and the generation.
        """
        self._place, self._told, self._has_old_files = place, 0, True
        self._workers.begin_anew()

    def received(self, rank: int, message: Any) -> None:
        """Takes in a message of a worker.

        Args:
            rank: Local rank of the worker.
            message: The message; all but those of rounds are ignored.
        """
        whole = self._workers.take(rank, message)
        if whole is not None:
            self._progress = whole.progress
        if isinstance(whole, JoinRounds) and self._exchange is None:
            self._agreed = agreed_in(whole)
            self._exchange = Exchange(
                self._files,
                self._agreed,
                lambda _: self._head,
                self._task_ended,
                self._outlets.count_bytes,
            )

    def turn(self, now_s: float, doc: IslandNews | None, head: HttpStorage) -> None:
        """Does what is to be done now.

        Args:
            now_s: Present time, on the monotonic clock.
            doc: What the head has written last.
            head: The files of the head.
        """
        self._head = head
        while not self._ended.empty():
            self._take(self._ended.get(), now_s)
        if not self._workers.are_there or (self._has_old_files and self._busy):
            return
        if self._has_old_files:
            self._files.remove("sent-")
            self._has_old_files = False
        for contribution in self._unprepared():
            self._begin(contribution, now_s)
        if doc is not None and doc.place == self._place:
            self._follow([news for news in doc.recent if news.version > self._told], now_s)

    def _follow(self, newer: Sequence[RoundNews], now_s: float) -> None:
        """Tells what can be told of some news, and has fetched what the newest needs."""
        for news in newer:
            if self._is_early(news):
                return
            lacking = [] if news.refused else [*self._lacking(news)]
            if news is newer[-1]:
                for task in lacking:
                    self._begin(task, now_s)
            if not lacking and not self._busy:
                self._tell(news)
                if news is newer[-1]:
                    self._clean(news)

    def _tell(self, news: RoundNews) -> None:
        self._told = news.version
        outers = [Outer(round=f.round, digest=f.digest) for f in news.fragments]
        if not news.refused:
            self._at_hand = AtHand(outers=outers, left=news.left)
        for number, outer in enumerate(outers):
            self._read.setdefault(number, []).append((outer.round, outer.digest))
        self._outlets.tell(news)

    def _is_early(self, news: RoundNews) -> bool:
        """Returns whether news settles a contribution that this node's workers have not all told
        of, which they are about to: it may have to be rounded (IF3)."""
        progress = self._progress
        return progress.incarnation == news.incarnation and any(
            fragment.settled > part.number
            for fragment, part in zip(news.fragments, progress.fragments, strict=True)
        )

    def _unprepared(self) -> Iterator[PrepareSent]:
        """Yields the contributions that are to be rounded, and are not (IF3)."""
        assert self._agreed is not None  # workers have joined
        progress = self._progress
        pairs = zip(progress.fragments, self._agreed.wires, strict=False)
        for number, (part, wire) in enumerate(pairs):
            if part.sent is None:
                continue
            name = sent_name(number, progress.incarnation, part.sent.number)
            if self._has(name) and not self._has(read_name(name, wire)):
                yield PrepareSent(
                    fragment=number, incarnation=progress.incarnation, number=part.sent.number
                )

    def _lacking(self, news: RoundNews) -> Iterator[ToDo]:
        """Yields what brings the files that workers read with some news (IF1)."""
        for number, fragment in enumerate(news.fragments):
            yield from self._lacking_outer(number, fragment.round, fragment.digest)
        progress = self._progress
        if progress.incarnation != news.incarnation:
            return
        for number, part in enumerate(progress.fragments):
            yield from self._lacking_outer(number, part.base, part.digest)
            if part.sent is not None:
                name = sent_name(number, news.incarnation, part.sent.number)
                if not self._has(name):
                    yield TakeSent(
                        fragment=number, incarnation=news.incarnation, number=part.sent.number
                    )

    def _lacking_outer(self, number: int, round: int, digest: str) -> Iterator[TakeOuter]:
        if not all(self._has(outer_name(number, round, digest, part)) for part in PARTS):
            outer = Outer(round=round, digest=digest)
            yield TakeOuter(fragment=number, outer=outer, sources=(HEAD,))

    def _has(self, name: str) -> bool:
        return self._files.path(name).exists()

    def _begin(self, task: ToDo, now_s: float) -> None:
        if task not in self._busy and now_s >= self._retry_s.get(task, 0.0):
            assert self._exchange is not None
            self._busy.add(task)
            self._exchange.begin(task)

    def _task_ended(self, outcome: Exchanged) -> None:
        self._ended.put(outcome)
        self._outlets.wake()

    def _take(self, outcome: Exchanged, now_s: float) -> None:
        self._busy.discard(outcome.task)
        self._retry_s.pop(outcome.task, None)
        if not outcome.error:
            return
        self._retry_s[outcome.task] = now_s + RETRY_S
        self._failures.log(f"following the island's rounds: {outcome.error}; trying again")

    def _clean(self, news: RoundNews) -> None:
        """Removes files that this node's workers do not read any more."""
        progress, names = self._progress, set[str]()
        for number, part in enumerate(progress.fragments):
            taken, read = (part.base, part.digest), self._read.setdefault(number, [])
            self._read[number] = read[read.index(taken) :] if taken in read else [taken, *read]
        for number, outers in self._read.items():
            names |= {outer_name(number, *outer, part) for outer in outers for part in PARTS}
        for number in self._read:
            parts = progress.fragments[number : number + 1]
            newest = {(progress.incarnation, part.number) for part in parts} | {
                (news.incarnation, 0)
            }
            for incarnation, at in newest:
                sent = [sent_name(number, incarnation, n) for n in (at, at + 1)]
                names |= {*sent, *map(encoded_name, sent)}
        self._files.keep_only(names)

    def fail(self, error: Exception) -> None:
        """Ends this node's workers, as something has failed that must not."""
        self.close()
        why = f"the agent of this node has failed ({type(error).__name__}); its log has more"
        # All ranks look at the same number: so that of the newest that these workers have.
        self._outlets.tell(refusal(max(1, self._told), f"the island cannot go on: {why}"))

    def close(self) -> None:
        """Ends the transfers."""
        if self._exchange is not None:
            self._exchange.close()
