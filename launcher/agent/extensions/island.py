"""Brings an island's agent into the rounds, as an extension of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import BinaryIO

from elasticzero.checkpoint.storage.http import HttpStorage
from elasticzero.ipc.messages import Message
from elasticzero.ipc.rounds import ROUNDS_FOLDER
from elasticzero.launcher.agent.console import log_for_node
from elasticzero.launcher.agent.extensions.base import AgentContext, AgentExtension
from elasticzero.launcher.http.access import AgentAccess
from elasticzero.launcher.islands.documents import RoundDocuments
from elasticzero.launcher.islands.files import RoundFiles
from elasticzero.launcher.islands.keeper import SILENCE_S, IslandKeeper, Outlets
from elasticzero.launcher.islands.lead import IslandPlace
from elasticzero.launcher.protocol.documents import Member, World
from elasticzero.launcher.protocol.rounds.documents import Committed, IslandReport
from elasticzero.launcher.protocol.view import View
from elasticzero.launcher.store.api import Store
from elasticzero.launcher.workers.group import Ended
from elasticzero.security.proofs import run_secret

log = logging.getLogger(__name__)


class IslandExtension(AgentExtension):
    """Keeps this node's island in the rounds."""

    def __init__(self, context: AgentContext, *, store: Store, me: Member, islands: int) -> None:
        """Begins to follow the rounds.

        Args:
            context: What the agent offers.
            store: The part of etcd that all islands of the job share.
            me: The registration of this node.
            islands: Number of islands with which the rounds begin.
        """
        options = context.options
        log_line = partial(log_for_node, options.node)
        self._files = RoundFiles(options.snapshot_dir / ROUNDS_FOLDER)
        self._access: AgentAccess | None = None
        self._first_rank = 0
        self._has_failed = False
        ttl_s = options.policy.lease_ttl_s
        place = IslandPlace(
            name=options.node,
            address=me.address,
            run=me.run,
            workers=options.nproc,
            least=islands,
            join_timeout_s=options.policy.join_timeout_s,
            ttl_s=ttl_s,
        )
        self._note, self._metrics, self._name = context.note, context.metrics, options.node
        self._documents = documents = RoundDocuments(
            store, options.node, int(ttl_s), context.wake, log_line
        )
        outlets = Outlets(
            reach=self._reach,
            tell=context.tell,
            wake=context.wake,
            log_line=log_line,
            note_round=self._note_round,
            count_bytes=context.metrics.round_bytes.inc,
            outage_end_s=lambda: store.last_outage_end_s,
        )
        self._keeper = IslandKeeper(place, self._files, documents, outlets)

    def _reach(self, report: IslandReport) -> HttpStorage:
        access = self._access
        assert access is not None  # the exchange begins in a turn
        return HttpStorage(
            f"{access.scheme}://{report.address}/{ROUNDS_FOLDER}",
            run_secret(access.token.reveal, report.run),
            timeout_s=SILENCE_S,
            run=report.run,
            tls=None if access.tls is None else access.tls(),
        )

    def started(self, world: World, ranks: tuple[int, ...]) -> None:
        """Notes that other workers begin."""
        self._first_rank = ranks[0]
        self._keeper.generation_begins()

    def received(self, rank: int, message: Message | Ended) -> None:
        """Passes on what workers say of the rounds."""
        self._contained(lambda: self._keeper.received(rank - self._first_rank, message))

    def turn(self, view: View, access: AgentAccess) -> None:
        """Does what is to be done of the rounds."""
        self._access = access
        self._contained(lambda: self._keeper.turn(time.monotonic(), leaves=view.leaving))
        self._metrics.islands.set(len(self._documents.read().reports))

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
            self._keeper.fail(error)

    def files(self) -> Mapping[str, Callable[[str], BinaryIO]]:
        """Returns what opens the files of the rounds for other agents."""
        return {ROUNDS_FOLDER: self._files.open_file}

    def close(self, outcome: str | None) -> None:
        """Leaves the rounds."""
        if not self._has_failed:
            self._keeper.close()
