"""Starts, watches and ends the processes that stand by for the workers of a node."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field

from elasticzero.ipc.assignment import NodePlace
from elasticzero.ipc.channel import readable
from elasticzero.ipc.messages import CannotStandBy, Confirm, Outdated, StandsBy
from elasticzero.launcher.workers.error_file import error_file
from elasticzero.launcher.workers.forking.client import ForkServer
from elasticzero.launcher.workers.forking.requests import Launch
from elasticzero.launcher.workers.process import Logs, Worker, fork_standby, kill_all
from elasticzero.launcher.workers.reserve.standby_rules import (
    MOST_CHANGES,
    MOST_DEATHS,
    StandbyFacts,
    must_end,
    reason_for_none,
)
from elasticzero.processes import is_alive
from elasticzero.text import shown, size_text

CONFIRM_S = 0.25
"""Seconds within which a process that stands by must say that it can be a worker."""
LEAVE_S, CLOSE_S, POLL_S = 5.0, 1.0, 0.01
"""Seconds within which a process must have unwound its script: while the job runs, and at its end;
and between two looks at that."""
LEAST_LIMIT_S, LIMIT_FACTOR = 120.0, 20.0
"""Seconds within which a process must come to `elasticzero.run`: so many at least, and so many
times as long as a worker takes, because it runs where a core rests."""
OUTPUT_BYTES = 2000
"""Number of bytes at the end of a process's output of which the last line is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Says that the process of a local rank stands by, or that none will for this script."""

    local_rank: int = 0
    seconds: float = 0.0
    """Time from its fork to `elasticzero.run`."""
    private_bytes: int = 0
    """Memory that it shares with no other process."""
    refused: str = ""
    """Why none will; empty: one does."""

    @property
    def message(self) -> str:
        """Returns this in a sentence."""
        if self.refused:
            return (
                f"no process stands by for a lost worker: {self.refused}; one that takes its place "
                "runs the script from its beginning"
            )
        return (
            "a process stands by for a lost worker: it has run the script up to elasticzero.run in "
            f"{self.seconds:.1f} s, and takes {size_text(self.private_bytes)} of memory (--standby)"
        )


@dataclass(slots=True)
class _Standby:
    worker: Worker
    output: int
    """Descriptor of the file that has its output."""
    began_s: float
    waits: bool = False
    """True if it has come to `elasticzero.run`, and waits there."""
    private_bytes: int = 0


@dataclass(slots=True)
class Standbys:
    """Holds one process for each local rank at most."""

    places: Sequence[NodePlace]
    launch: Launch
    logs: Logs
    wakeup_fd: int
    refused: str = ""
    """Why the script cannot be held."""
    _held: dict[int, _Standby] = field(default_factory=dict)
    _leaving: list[tuple[Worker, float]] = field(default_factory=list)
    """Processes that unwind their scripts, and when they are killed if they are not done."""
    _deaths: int = 0
    """Number of processes that have ended by themselves."""
    _told: list[Standing] = field(default_factory=list)
    """What the next poll tells."""
    _changes: set[tuple[str, str]] = field(default_factory=set)
    """Files that were changed after the script had read them, and what they were then."""

    @property
    def beginning(self) -> bool:
        """Returns whether a process is on its way to `elasticzero.run`."""
        return any(not standby.waits for standby in self._held.values())

    @property
    def private_bytes(self) -> int:
        """Returns the memory that those that stand by share with no other process."""
        return sum(standby.private_bytes for standby in self._held.values())

    def turn(self, server: ForkServer, facts: StandbyFacts, now_s: float) -> None:
        """Starts another process if there is room for one, and ends all where memory is exhausted.

        Args:
            server: Forks the process.
            facts: What is known of this node and its script.
            now_s: Present time, on the monotonic clock.
        """
        if self._held and must_end(facts):
            self._refuse("memory is exhausted", now_s)
        missing = [place for place in self.places if place.local_rank not in self._held]
        if missing and not reason_for_none(facts):
            place = missing[0]
            worker, output = fork_standby(server, place, self.launch, self.logs, self.wakeup_fd)
            self._held[place.local_rank] = _Standby(worker, output, now_s)

    def poll(
        self, ended: Sequence[tuple[int, int]], now_s: float, script_s: float | None = None
    ) -> list[Standing]:
        """Returns what has become of the processes since the last call; does not wait.

        Args:
            ended: Process id and exit code of each process of this node that has ended.
            now_s: Present time, on the monotonic clock.
            script_s: Seconds that a worker takes to `elasticzero.run`; None: not known.
        """
        codes = dict(ended)
        limit_s = max(LEAST_LIMIT_S, LIMIT_FACTOR * (script_s or 0.0))
        for local_rank, standby in list(self._held.items()):
            if local_rank in self._held:  # it may have ended with the one before
                self._receive(local_rank, standby, now_s)
            if local_rank not in self._held:
                continue
            if (code := codes.get(standby.worker.pid)) is not None:
                self._count_death(standby, f"ends by itself, with exit code {code}", now_s)
                self._let_go(local_rank, now_s)
            elif not standby.waits and now_s - standby.began_s > limit_s:
                what = f"has not come to elasticzero.run after {limit_s:.0f} s"
                self._count_death(standby, what, now_s)
                self._let_go(local_rank, now_s)
        for worker, until_s in list(self._leaving):
            if worker.pid in codes or now_s > until_s:
                self._leaving.remove((worker, until_s))
                kill_all([worker])
        told, self._told = self._told, []
        return told

    def _receive(self, local_rank: int, standby: _Standby, now_s: float) -> None:
        """Takes in what a process has sent."""
        for message in standby.worker.receive():
            match message:
                case StandsBy(private_bytes=private_bytes):
                    standby.waits, standby.private_bytes = True, private_bytes
                    seconds = now_s - standby.began_s
                    self._told.append(
                        Standing(
                            local_rank=local_rank, seconds=seconds, private_bytes=private_bytes
                        )
                    )
                case CannotStandBy(reason=reason):
                    self._let_leave(local_rank, now_s)
                    self._refuse(reason, now_s)
                    return
                case Outdated(path=path, stamp=stamp):
                    self._let_leave(local_rank, now_s)
                    self._changes.add((path, stamp))
                    if len(self._changes) >= MOST_CHANGES:
                        text = f"{path}, which the script reads first, changes again and again"
                        self._refuse(text, now_s)
                    return
                case _:
                    pass

    def take(self, server: ForkServer, local_ranks: Set[int]) -> dict[int, Worker]:
        """Removes and returns the processes that are to be workers, by local rank.

        Each confirms that it can be one, within CONFIRM_S; others that wait are ended. Those that
        are on their way stay.

        Args:
            server: Has forked them.
            local_ranks: Local ranks that are without a process.
        """
        asked = {r: s for r, s in self._held.items() if s.waits and r in local_ranks}
        confirmed = confirm([standby.worker for standby in asked.values()])
        taken: dict[int, Worker] = {}
        for rank, standby in asked.items():
            if standby.worker.pid not in confirmed:
                self._let_go(rank, time.monotonic())
                continue
            del self._held[rank]
            os.close(standby.output)
            taken[rank] = standby.worker
            server.promote(standby.worker.pid)
            with suppress(OSError):  # of the worker before
                error_file(self.logs.directory, rank).unlink(missing_ok=True)
        return taken

    def end_all(self, now_s: float) -> None:
        """Ends all processes; those that are on their way release what their scripts hold.

        Args:
            now_s: Present time, on the monotonic clock.
        """
        for rank in list(self._held):
            self._let_go(rank, now_s)

    def close(self) -> None:
        """Ends all processes, and waits for those that unwind their scripts."""
        self.end_all(time.monotonic())
        deadline_s = time.monotonic() + CLOSE_S
        while time.monotonic() < deadline_s and any(is_alive(w.pid) for w, _ in self._leaving):
            time.sleep(POLL_S)

    def forget_all(self) -> None:
        """Forgets all processes, which have died with their fork server."""
        for standby in self._held.values():
            standby.worker.channel.close()
            os.close(standby.output)
        for worker, _ in self._leaving:
            worker.channel.close()
        self._held.clear()
        self._leaving.clear()

    def _let_leave(self, local_rank: int, now_s: float) -> None:
        """Lets a process end by itself, within LEAVE_S."""
        standby = self._held.pop(local_rank)
        os.close(standby.output)
        self._leaving.append((standby.worker, now_s + LEAVE_S))

    def _let_go(self, local_rank: int, now_s: float) -> None:
        """Ends a process: by SIGINT if it is on its way, which unwinds its script."""
        if local_rank not in self._held:
            return
        standby = self._held[local_rank]
        if standby.waits:
            del self._held[local_rank]
            os.close(standby.output)
            kill_all([standby.worker])
            return
        with suppress(ProcessLookupError):
            os.kill(standby.worker.pid, signal.SIGINT)
        self._let_leave(local_rank, now_s)

    def _refuse(self, reason: str, now_s: float) -> None:
        """Ends all for good, and tells that once."""
        if not self.refused:
            self.refused = reason
            self._told.append(Standing(refused=reason))
            self.end_all(now_s)

    def _count_death(self, standby: _Standby, what: str, now_s: float) -> None:
        self._deaths += 1
        if self._deaths >= MOST_DEATHS:
            last = _last_line(standby.output)
            self._refuse(f"it {what}{f': {last}' if last else ''}", now_s)


def confirm(workers: Sequence[Worker]) -> set[int]:
    """Returns the ids of the processes that say within CONFIRM_S that they could be workers now."""
    for worker in workers:
        worker.send(Confirm())
    deadline_s = time.monotonic() + CONFIRM_S
    confirmed: set[int] = set()
    silent = list(workers)
    while silent and (left_s := deadline_s - time.monotonic()) > 0.0:
        readable([worker.channel.fileno() for worker in silent], left_s)
        for worker in list(silent):
            answers = worker.receive()
            if any(isinstance(answer, StandsBy) for answer in answers):
                confirmed.add(worker.pid)
            if answers or worker.channel_closed:
                silent.remove(worker)
    return confirmed


def _last_line(output: int) -> str:
    """Returns the last line of a file with a process's output."""
    with suppress(OSError):
        size = os.fstat(output).st_size
        text = os.pread(output, OUTPUT_BYTES, max(0, size - OUTPUT_BYTES)).decode(errors="replace")
        return shown(text.strip().rpartition("\n")[2])
    return ""
