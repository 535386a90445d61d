"""Collects what all nodes have logged, where this agent leads the job, and feeds the trackers.

The leader asks every agent of the world now and then (`NodeScalars.since`), and those of the world
before once more. It gives out the steps that are complete. When another agent takes over, that one
asks for everything again; a tracker leaves out the steps that its run holds already.

An agent that ends stays until the leader has received all that its workers have logged, for
LINGER_S at most.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elasticzero.concurrency import run_parallel
from elasticzero.ipc.messages import Message
from elasticzero.launcher.agent.console import log_for_node
from elasticzero.launcher.agent.extensions.base import AgentContext, AgentExtension
from elasticzero.launcher.http.access import AgentAccess
from elasticzero.launcher.http.agent_client import query_agent
from elasticzero.launcher.http.routes import Answer, Route, json_answer
from elasticzero.launcher.protocol.documents import Member, World
from elasticzero.launcher.protocol.leader import is_leader
from elasticzero.launcher.protocol.view import View
from elasticzero.launcher.workers.group import Ended
from elasticzero.ops.trackers.averages import Row, StepAverages, least
from elasticzero.ops.trackers.node_scalars import NodeScalars
from elasticzero.ops.trackers.process import TrackerProcess

SCALARS = "/scalars"
"""Path of what a node's workers have logged; `?after=` names the last entry that is known."""
_AFTER = re.compile(r"after=(\d{1,12})\Z")
POLL_S = 2.0
"""Least seconds from one round of questions to the next."""
POLL_A_NODE_S = 0.05
"""Least seconds for each node between two rounds, in large worlds."""
THREADS = 8
"""Number of agents that are asked at a time."""
HOLD_S = 30.0
"""Seconds for which steps wait for an agent that does not answer."""
LINGER_S = 3.0
"""Maximum number of seconds for which the end of an agent waits for other agents."""
CLOSE_S = 10.0
"""Maximum number of seconds for which the end of an agent waits for the trackers."""
ASKED_S = 15.0
"""Seconds for which an agent that was asked expects to be asked again."""
UNKNOWN = -1
"""Stands for the last complete step of a node that has not answered yet in this generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lead:
    """Says which world this agent leads."""

    world: World
    me: Member
    access: AgentAccess


@dataclass(slots=True, eq=False)
class _Source:
    """Holds how much one agent has sent of what its workers have logged."""

    member: Member
    answered_s: float
    """Time of its last answer (monotonic clock); before that, of the first question."""
    serial: int = 0
    """Serial number of the last entry that it has sent."""
    through: int | None = UNKNOWN
    """Last step for which its workers will log nothing more; None: they log nothing at all."""
    logs: bool = True
    """False: none of its workers will log anything more."""
    gone: bool = False
    """True: its node is in no world any more, and the agent has sent everything or does not
    answer."""


def begins_run(world: World, me: Member) -> bool:
    """Returns whether this member is the first one of a job that begins at its first step: a later
    world, and one that starts from a checkpoint, go on with the run of the one before."""
    return world.generation == 1 and world.resume.tier == "fresh" and world.members[0] == me


class TrackerFeed(AgentExtension):
    """Feeds the trackers of `--log-to` in a thread, while this agent leads; serves what this node's
    workers log to the agent that leads."""

    def __init__(self, context: AgentContext) -> None:
        self._options = context.options
        self._note = context.note
        self._scalars = NodeScalars()
        self._unwritten: queue.SimpleQueue[tuple[str, bool]] = queue.SimpleQueue()
        """Printed lines that are not in the event log yet, which the agent's thread writes; with
        True for a failure."""
        self._lead: Lead | None = None
        """The world that this agent leads, or has led until a round began; None: another leads."""
        self._may_write = False
        """True: no round is open, in which another agent may begin to lead."""
        self._alone = False
        """True: no other node is registered, which could lead."""
        self._worlds: tuple[World, ...] = ()
        """The present world and the one before it, as far as this agent has seen them."""
        self._sources: dict[tuple[str, str], _Source] = {}
        self._averages = StepAverages()
        self._processes: list[TrackerProcess] = []
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    def started(self, world: World, ranks: tuple[int, ...]) -> None:
        self._scalars.begin(world.generation, world.resume.step, ranks)

    def received(self, rank: int, message: Message | Ended) -> None:
        self._scalars.received(rank, message)

    def routes(self) -> dict[str, Route]:
        """Returns what this node's workers have logged, for the agent that leads."""
        return {SCALARS: Route(answer=self._logged, served_to="token holders")}

    def _logged(self, query: str) -> Answer:
        after = _AFTER.match(query)
        return json_answer(self._scalars.answer(int(after[1]) if after else 0), end="")

    def turn(self, view: View, access: AgentAccess) -> None:
        """Notes which world this agent leads; called in each turn of the agent's loop."""
        self._write_events()
        world = view.world
        if not self._options.log_to or world is None:
            return
        if not self._worlds or world.generation != self._worlds[0].generation:
            self._worlds = (world, *self._worlds[:1])
        self._alone = not any(node != view.me.node for node in view.members or ())
        self._may_write = view.round_s is None and view.store.reachable
        if not is_leader(view):
            self._lead = None
        elif self._may_write:
            self._lead = Lead(world=world, me=view.me, access=access)
        if self._lead is not None and self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="elasticzero-trackers", daemon=True
            )
            self._thread.start()

    def close(self, outcome: str | None) -> None:
        """Ends the trackers.

        The leader of a job that is over writes all that was logged, and so does one that leaves no
        other node behind. Another agent waits until the leader has received what this node's
        workers have logged.

        Args:
            outcome: outcome of the job; None: it goes on without this node, or later.
        """
        self._end(outcome)
        self._write_events()

    def _end(self, outcome: str | None) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(LINGER_S)
        lead = self._lead
        if lead is not None and (outcome is not None or self._alone):
            self._open_processes(lead)
            deadline_s = time.monotonic() + LINGER_S
            while not self._ask_all(lead) and time.monotonic() < deadline_s:
                time.sleep(0.05)
            self._write(self._averages.complete(None))
            self._end_processes(outcome, discard=False)
            return
        self._end_processes(None, discard=True)
        asked_s = self._scalars.asked_s
        asked = asked_s is not None and time.monotonic() - asked_s < ASKED_S
        if asked or self._thread is not None:  # by the next leader, where this agent has led
            self._scalars.drained.wait(LINGER_S)

    def _tell(self, text: str, failed: bool) -> None:
        """Prints a line, which the event log gets too; callable from any thread."""
        log_for_node(self._options.node, text)
        self._unwritten.put((text, failed))

    def _write_events(self) -> None:
        while not self._unwritten.empty():
            text, failed = self._unwritten.get()
            opened, error = (None, text) if failed else (text, None)
            self._note("tracker", opened=opened, error=error)

    def _run(self) -> None:
        pause_s = 0.0
        while not self._ended.wait(pause_s):
            pause_s = POLL_S
            lead = self._lead
            if lead is None:
                self._end_processes(None, discard=True)
            elif self._may_write:
                pause_s = max(POLL_S, POLL_A_NODE_S * len(lead.world.members))
                self._open_processes(lead)
                self._ask_all(lead)
                if self._may_write:
                    self._write(self._averages.complete(self._through(lead)))

    def _open_processes(self, lead: Lead) -> None:
        """Starts the trackers' processes where this agent has begun to lead."""
        if not self._processes:
            self._sources, self._averages = {}, StepAverages()
            self._processes = [
                TrackerProcess(
                    target,
                    self._options.job,
                    begins=begins_run(lead.world, lead.me),
                    log=self._options.log_dir / f"{target.kind}.log",
                    tell=self._tell,
                )
                for target in self._options.log_to
            ]

    def _write(self, rows: Sequence[Row]) -> None:
        if rows:
            for process in self._processes:
                process.write(rows)

    def _end_processes(self, outcome: str | None, *, discard: bool) -> None:
        """Ends the trackers' processes, all at a time.

        Args:
            outcome: outcome of the job; None: the job goes on.
            discard: whether the rows that wait are dropped, because the next leader writes them.
        """
        run_parallel(
            self._processes,
            lambda process: process.close(outcome, CLOSE_S, discard=discard),
            threads=len(self._processes),
        )
        self._processes = []

    def _ask_all(self, lead: Lead) -> bool:
        """Asks the agents of this world, and those of the world before until they have sent
        everything; returns whether no worker of this world logs any more."""
        for world in reversed(self._worlds):
            self._averages.begin(world.generation, world.resume.step)
            for member in world.members:
                key = (member.node, member.incarnation)
                self._sources.setdefault(key, _Source(member, time.monotonic()))
        members = [s for s in self._sources.values() if lead.world.names(s.member)]
        former = [s for s in self._sources.values() if s not in members and not s.gone]
        asked = [*members, *former]
        answered = run_parallel(asked, lambda source: self._ask(source, lead), threads=THREADS)
        for source, has_answered in zip(asked, answered, strict=True):
            source.gone = source not in members and not (has_answered and source.logs)
        return not any(source.logs for source in members)

    def _ask(self, source: _Source, lead: Lead) -> bool:
        """Fetches what an agent has that is new; returns whether it has answered."""
        while True:
            answer = self._answer(source, lead)
            if answer is None:
                return False
            self._averages.add(answer["rows"])
            if answer["left_out"]:
                self._tell(
                    f"--log-to: {answer['left_out']} steps of {source.member.node} came too fast, "
                    "and are left out",
                    True,
                )
            source.serial = answer["serial"]
            if not answer["more"]:
                break
        source.answered_s = time.monotonic()
        source.logs = answer["through"] is not None
        has_begun = answer["generation"] == lead.world.generation
        source.through = answer["through"] if has_begun else UNKNOWN
        return True

    def _answer(self, source: _Source, lead: Lead) -> Mapping[str, Any] | None:
        if source.member == lead.me:
            return self._scalars.since(source.serial)
        return query_agent(source.member, lead.access, f"{SCALARS}?after={source.serial}")

    def _through(self, lead: Lead) -> int | None:
        """Returns the last step that is complete on all nodes that have answered within `HOLD_S`;
        None: all steps are."""
        now_s = time.monotonic()
        return least(
            source.through
            for source in self._sources.values()
            if lead.world.names(source.member) and now_s - source.answered_s <= HOLD_S
        )
