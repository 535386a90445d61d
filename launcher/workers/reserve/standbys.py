"""Starts, watches and ends the processes that stand by for the workers of a node."""

from __future__ import annotations

import os
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field

from elasticzero.ipc.assignment import NodePlace
from elasticzero.ipc.messages import CannotStandBy, Outdated, StandsBy
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
from elasticzero.processes import process_state
from elasticzero.text import shown, size_text

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
    came: bool = False
    """True if it has come to `elasticzero.run`."""
    ready: bool = False
    """True if it waits there, and nothing that it has read has changed since."""
    private_bytes: int = 0

    @property
    def is_able(self) -> bool:
        """Returns whether it waits for an assignment, and would take it."""
        runs = process_state(self.worker.pid) not in ("", "Z", "T", "t")
        return self.ready and not self.worker.channel_closed and runs


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
    _changes: int = 0
    """Number of processes that have ended because a file that the script has read was changed."""
    _deaths: int = 0
    """Number of processes that have ended before they came to `elasticzero.run`."""

    @property
    def beginning(self) -> bool:
        """Returns whether a process is on its way to `elasticzero.run`."""
        return any(not standby.came for standby in self._held.values())

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
        if must_end(facts):
            self.end_all()
        missing = [place for place in self.places if place.local_rank not in self._held]
        if missing and not reason_for_none(facts):
            place = missing[0]
            worker, output = fork_standby(server, place, self.launch, self.logs, self.wakeup_fd)
            self._held[place.local_rank] = _Standby(worker, output, now_s)

    def poll(self, ended: Sequence[tuple[int, int]], now_s: float) -> list[Standing]:
        """Returns what has become of the processes since the last call; does not wait.

        Args:
            ended: Process id and exit code of each process of this node that has ended.
            now_s: Present time, on the monotonic clock.
        """
        told: list[Standing] = []
        codes = dict(ended)
        for local_rank, standby in list(self._held.items()):
            for message in standby.worker.receive():
                match message:
                    case StandsBy(private_bytes=private_bytes):
                        standby.came = standby.ready = True
                        standby.private_bytes = private_bytes
                        seconds = now_s - standby.began_s
                        told.append(
                            Standing(
                                local_rank=local_rank, seconds=seconds, private_bytes=private_bytes
                            )
                        )
                    case CannotStandBy(reason=reason):
                        told += self._refuse(reason)
                    case Outdated(path=path):
                        standby.ready = False
                        told += self._count_change(path)
                    case _:
                        pass
            if (code := codes.get(standby.worker.pid)) is not None:
                told += self._count_death(standby, code) if not standby.came else []
                self._forget(local_rank)
        return told

    def take(self, server: ForkServer, local_ranks: Set[int]) -> dict[int, Worker]:
        """Removes and returns the processes that are to be workers, by local rank; it ends those
        that are not there yet, or are suspended.

        Args:
            server: Has forked them.
            local_ranks: Local ranks that are without a process.
        """
        ready = {
            rank: standby.worker
            for rank, standby in self._held.items()
            if standby.is_able and rank in local_ranks
        }
        unable = [rank for rank, standby in self._held.items() if not standby.is_able]
        kill_all(self._held[rank].worker for rank in unable)
        for rank in (*ready, *unable):
            self._forget(rank)
        for rank, worker in ready.items():
            server.promote(worker.pid)
            with suppress(OSError):  # of the worker before
                error_file(self.logs.directory, rank).unlink(missing_ok=True)
        return ready

    def end_all(self) -> None:
        """Ends all processes, also those whose fork server has died."""
        kill_all(standby.worker for standby in self._held.values())
        for rank in list(self._held):
            self._forget(rank)

    def _forget(self, local_rank: int) -> None:
        standby = self._held.pop(local_rank, None)
        if standby is not None:
            os.close(standby.output)

    def _refuse(self, reason: str) -> list[Standing]:
        """Ends all for good; returns what to tell, once."""
        if self.refused:
            return []
        self.refused = reason
        self.end_all()
        return [Standing(refused=reason)]

    def _count_change(self, path: str) -> list[Standing]:
        self._changes += 1
        if self._changes < MOST_CHANGES:
            return []
        return self._refuse(f"{path}, which the script reads first, changes again and again")

    def _count_death(self, standby: _Standby, code: int) -> list[Standing]:
        self._deaths += 1
        if self._deaths < MOST_DEATHS:
            return []
        last = _last_line(standby.output)
        line = f": {last}" if last else ""
        return self._refuse(f"it ends before elasticzero.run, with exit code {code}{line}")


def _last_line(output: int) -> str:
    """Returns the last line of a file with a process's output."""
    with suppress(OSError):
        size = os.fstat(output).st_size
        text = os.pread(output, OUTPUT_BYTES, max(0, size - OUTPUT_BYTES)).decode(errors="replace")
        return shown(text.strip().rpartition("\n")[2])
    return ""
