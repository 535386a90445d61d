"""Brings an island's agent into the rounds, as an extension of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

from elasticzero.checkpoint.storage.http import HttpStorage
from elasticzero.errors import StoreUnavailable
from elasticzero.ipc.messages import Message
from elasticzero.ipc.rounds import ROUNDS_FOLDER, RoundNews
from elasticzero.launcher.agent.console import log_for_node
from elasticzero.launcher.agent.extensions.base import AgentContext, AgentExtension
from elasticzero.launcher.http.access import AgentAccess
from elasticzero.launcher.http.agent_client import open_files
from elasticzero.launcher.http.routes import Answer, Route, json_answer
from elasticzero.launcher.islands.documents import RoundDocuments
from elasticzero.launcher.islands.files import RoundFiles
from elasticzero.launcher.islands.follower import IslandFollower
from elasticzero.launcher.islands.keeper import IslandKeeper, Outlets
from elasticzero.launcher.islands.lead import IslandPlace
from elasticzero.launcher.islands.newcomers.lending import LENT, SnapshotLender, asked_in
from elasticzero.launcher.islands.news_board import IslandNews, NewsBoard
from elasticzero.launcher.islands.node import AtHand, NodeOutlets
from elasticzero.launcher.islands.places import Reservation
from elasticzero.launcher.protocol.documents import Member, World
from elasticzero.launcher.protocol.rounds.documents import Committed
from elasticzero.launcher.protocol.rounds.summary import summary_of
from elasticzero.launcher.protocol.view import View
from elasticzero.launcher.store.api import Store
from elasticzero.launcher.store.membership import Membership
from elasticzero.launcher.workers.group import Ended
from elasticzero.serialization import encode

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandInEtcd:
    """Holds what an island's agent has of etcd."""

    job: Store
    """The part that all islands of the job share."""
    island: Store
    """The part that the nodes of this island share."""
    reservation: Reservation | None
    """That of this node's place on the island; None: it needs none."""
    membership: Membership
    """Registers this node."""


class IslandExtension(AgentExtension):
    """Keeps this node's island in the rounds, where the node has rank 0; else follows the node that
    does."""

    def __init__(
        self, context: AgentContext, *, in_etcd: IslandInEtcd, me: Member, islands: int
    ) -> None:
        """Begins to follow the rounds.

        Args:
            context: What the agent offers.
            in_etcd: What the agent has of etcd.
            me: The registration of this node.
            islands: Number of islands with which the rounds begin.
        """
        options = self._options = context.options
        self._name, self._me, self._context = str(options.island), me, context
        self._log_line = partial(log_for_node, options.node)
        self._files = RoundFiles(options.snapshot_dir / ROUNDS_FOLDER)
        assert context.snapshots is not None
        self._lender = SnapshotLender(context.snapshots)
        self._access: AgentAccess | None = None
        self._has_failed = False
        ttl_s = options.policy.lease_ttl_s
        self._place = IslandPlace(
            name=self._name,
            address=me.address,
            run=me.run,
            workers=options.nproc,
            least=islands,
            join_timeout_s=options.policy.join_timeout_s,
            ttl_s=ttl_s,
        )
        self._note, self._metrics = context.note, context.metrics
        self._documents = RoundDocuments(
            in_etcd.job, self._name, int(ttl_s), context.wake, self._log_line
        )
        self._board = NewsBoard(in_etcd.island, context.wake, self._log_line)
        self._outage_end_s = lambda: in_etcd.job.last_outage_end_s
        self._first_rank = 0
        self._part: IslandKeeper | IslandFollower | None = None
        """Plays this node's part in the island; None: it has no workers in the island's world."""
        self._news: IslandNews | None = None
        """Holds what the head tells the island's other nodes; None: this node is not the head of
        others."""
        self._reservation, self._membership = in_etcd.reservation, in_etcd.membership
        self._head: tuple[str, HttpStorage] | None = None
        """Files of the head that this node follows, and its address."""

    def _reach(self, address: str, run: int) -> HttpStorage:
        assert self._access is not None  # the exchange begins in a turn
        return open_files(address, run, ROUNDS_FOLDER, self._access)

    def started(self, world: World, ranks: tuple[int, ...]) -> None:
        """Notes that other workers begin."""
        self._membership.brings(0, 0)  # what the world does not begin with is gone
        self._contained(lambda: self._begin(world, ranks[0]))

    def _begin(self, world: World, first_rank: int) -> None:
        part, self._first_rank, self._news = self._part, first_rank, None
        run, generation = self._me.run, world.generation
        self._forget_head()
        if first_rank == 0:
            if len(world.members) > 1:
                self._news = IslandNews(run=run, generation=generation, recent=())
            if not isinstance(part, IslandKeeper):
                self._part = part = self._keeper(self._ended(part))
            part.generation_begins()
        else:
            if not isinstance(part, IslandFollower):
                self._ended(part)
                self._part = part = self._follower()
            part.generation_begins((run, generation))

    def _ended(self, part: IslandKeeper | IslandFollower | None) -> AtHand | None:
        """Ends what this node has done so far; returns what it knows of the rounds then."""
        if part is not None:
            part.close()
        return part.at_hand if isinstance(part, IslandFollower) else None

    def _keeper(self, at_hand: AtHand | None) -> IslandKeeper:
        outlets = Outlets(
            reach=lambda report: self._reach(report.address, report.run),
            tell=self._tell,
            wake=self._context.wake,
            log_line=self._log_line,
            note_round=self._note_round,
            count_bytes=self._metrics.round_bytes.inc,
            outage_end_s=self._outage_end_s,
        )
        return IslandKeeper(self._place, self._files, self._documents, outlets, at_hand)

    def _follower(self) -> IslandFollower:
        outlets = NodeOutlets(
            tell=self._context.tell,
            wake=self._context.wake,
            log_line=self._log_line,
            count_bytes=self._metrics.round_bytes.inc,
        )
        return IslandFollower(self._options.nproc, self._files, outlets)

    def _tell(self, news: RoundNews) -> None:
        """Tells this node's workers some news, and those of the island's other nodes."""
        self._context.tell(news)
        if self._news is not None:
            self._news = self._news.followed_by(news)
            self._write_news()

    def _write_news(self) -> None:
        """Has the news be there for the island's other nodes; what the store does not take is
        written in a later turn."""
        with suppress(StoreUnavailable):
            if self._news is not None and self._news.recent:
                self._board.keep(self._news)

    def received(self, rank: int, message: Message | Ended) -> None:
        """Passes on what workers say of the rounds."""
        part = self._part
        if part is not None:
            self._contained(lambda: part.received(rank - self._first_rank, message))

    def turn(self, view: View, access: AgentAccess) -> None:
        """Does what is to be done of the rounds."""
        self._access = access
        self._lender.turn(time.monotonic())
        self._contained(lambda: self._turn(view))
        self._write_news()
        self._metrics.islands.set(len(self._documents.read().reports))

    def _turn(self, view: View) -> None:
        world, now_s = view.world, time.monotonic()
        if self._reservation is not None:
            with suppress(StoreUnavailable):
                self._reservation.keep()
        if world is None or self._part is None:
            return
        if isinstance(self._part, IslandFollower):
            self._part.turn(now_s, self._board.read(), self._files_of(world.members[0]))
        elif world.members[0].node != self._me.node:
            # There is another world, which this node has not begun.
            self._part.close()
            self._part = self._news = None
        else:
            self._part.turn(now_s, leaves=view.leaving and len(world.members) == 1)

    def _files_of(self, head: Member) -> HttpStorage:
        """Returns the files of the head."""
        if self._head is None or self._head[0] != head.address:
            self._forget_head()
            self._head = head.address, self._reach(head.address, self._me.run)
        return self._head[1]

    def _forget_head(self) -> None:
        if self._head is not None:
            self._head[1].close()
            self._head = None

    def _note_round(self, history: int, fragment: int, past: Committed) -> None:
        """Notes a committed round in the agent's log and metrics."""
        parts = [
            {"island": c.island, "samples": c.samples, "staleness": c.staleness}
            for c in past.contributors
        ]
        self._note(
            "averaged",
            history=history,
            fragment=fragment,
            round=past.outer.round,
            contributors=parts,
        )
        part = next((c for c in past.contributors if c.island == self._name), None)
        self._metrics.observe_round(part.samples if part else 0, part.staleness if part else None)

    def _contained(self, work: Callable[[], None]) -> None:
        """Does some work; where it fails, the island leaves the rounds, so that no other one counts
        on it, and its workers end."""
        if self._has_failed:
            return
        try:
            work()
        except Exception as error:
            self._has_failed = True
            log.exception("the island's part in the rounds has failed")
            if self._part is not None:
                self._part.fail(error)

    def files(self) -> Mapping[str, Callable[[str], BinaryIO]]:
        """Returns what opens the files of the rounds for other agents."""
        return {ROUNDS_FOLDER: self._files.open_file, LENT: self._lender.open_file}

    def status(self) -> Mapping[str, Any]:
        """Returns how the rounds stand."""
        read = self._documents.read()
        if read.rounds is None:
            return {}
        return {"rounds": encode(summary_of(read.rounds, read.reports), complete=True)}

    def routes(self) -> Mapping[str, Route]:
        """Returns what other islands that come ask for."""
        return {f"/{LENT}": Route(answer=self._lend, served_to="other agents")}

    def _lend(self, query: str) -> Answer:
        return json_answer(self._lender.answer(asked_in(query)))

    def close(self, outcome: str | None) -> None:
        """Leaves the rounds."""
        if self._part is not None and not self._has_failed:
            self._part.close()
        self._forget_head()
        self._lender.close()
        self._board.close()
        self._documents.close()
