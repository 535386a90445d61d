"""Follows a job on the whole terminal: `elasticzero top`.

A thread reads the job: who leads it from etcd, and what it does from the agent that leads. So the
screen reacts to keys while a read waits. Agents are asked on while etcd is away, and etcd's
documents are shown while no agent answers.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live

from elasticzero.errors import (
    AccessRefused,
    ElasticZeroError,
    ExitCode,
    StoreUnavailable,
    UserError,
)
from elasticzero.launcher.cli.control import open_job_store
from elasticzero.launcher.cli.job_access import OperatorCredentials
from elasticzero.launcher.cli.status import read_stored_job
from elasticzero.launcher.http.access import AgentAccess
from elasticzero.launcher.observability.job_status import Job, collect_status
from elasticzero.launcher.store.api import Store
from elasticzero.launcher.store.etcd.access import Access
from elasticzero.launcher.store.job_token import HOW
from elasticzero.ops.dashboard.leader_client import query_leader
from elasticzero.ops.dashboard.screen import job_screen
from elasticzero.text import duration_text

REDRAW_S = 0.5
"""Maximum seconds between two drawings, so that the screen follows the size of the terminal."""
STORE_RETRY_S = 3.0
"""Seconds until etcd is read again after it has not answered."""
LATE_S = 5.0
"""Seconds after which the screen says how old it is."""
JOIN_S = 1.0
"""Seconds for which the end of the command waits for a read that goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Holds what was read of a job at one time."""

    status: Mapping[str, Any]
    """Status of the job, as `/job` serves it."""
    store_error: str | None = None
    """Why etcd could not be read; None: it could."""
    silent: bool = False
    """True if no agent that leads the job has answered."""
    token_missing: bool = False
    """True if agents were not asked, for the job's token is not known."""


class JobReader:
    """Reads a job again and again, from etcd and from its agents."""

    def __init__(self, store: Store, name: str, operator: OperatorCredentials) -> None:
        """Reads nothing before the first `read`.

        Args:
            store: store that holds the job's state.
            name: the job's name.
            operator: what the operator has given to read the job with.
        """
        self._store = store
        self._name = name
        self._operator = operator
        self._stored: tuple[Job, Mapping[str, str], AgentAccess | None] | None = None
        self._history: Mapping[str, Any] = {}
        self._store_error: str | None = None
        self._store_due_s = 0.0

    def read(self) -> Reading:
        """Returns what the job does now.

        Raises:
            UserError: etcd has no such job.
            StoreUnavailable: etcd has not answered once.
        """
        job, phases, agents = self._read_stored()
        status: Mapping[str, Any] | None = None
        if job.done is None and agents is not None:
            order = {m.node: m for m in (*job.placed, *job.members.values())}
            status = query_leader(order.values(), agents)
        silent = status is None
        if status is None:
            seen = collect_status(job, phases, {})
            status = {**seen, "at": time.time(), "history": self._history}
        self._history = status["history"]
        return Reading(
            status=status,
            store_error=self._store_error,
            silent=silent and job.done is None and bool(job.placed),
            token_missing=agents is None and job.done is None,
        )

    def _read_stored(self) -> tuple[Job, Mapping[str, str], AgentAccess | None]:
        """Returns what etcd holds of the job, or what it held while it did answer."""
        stored = self._stored
        if stored is not None and time.monotonic() < self._store_due_s:
            return stored
        try:
            stored = read_stored_job(self._store, self._name, self._operator)
        except AccessRefused:
            raise
        except StoreUnavailable as error:
            if stored is None:
                raise
            self._store_due_s = time.monotonic() + STORE_RETRY_S
            self._store_error = str(error)
        else:
            self._stored, self._store_error = stored, None
        return stored


def top(
    name: str,
    endpoints: Sequence[str],
    access: Access,
    operator: OperatorCredentials,
    *,
    interval_s: float,
    once: bool,
) -> ExitCode:
    """Shows the job on the terminal until `q` or Ctrl-C is pressed.

    Args:
        name: the job's name.
        endpoints: HOST:PORT or URL of each member of etcd.
        access: certificates, user and password for etcd.
        operator: what the operator has given to read the job with.
        interval_s: seconds between two readings.
        once: whether the screen is printed once instead.

    Raises:
        UserError: there is no terminal, or etcd has no such job.
        StoreUnavailable: etcd has not answered once.
    """
    console = Console(highlight=False)
    with open_job_store(name, endpoints, access) as store:
        reader = JobReader(store, name, operator)
        if once:
            height = console.size.height if console.is_terminal else None
            console.print(screen_of(reader.read(), 0.0, console.width, height))
            return ExitCode.DONE
        if not (sys.stdin.isatty() and console.is_terminal):
            raise UserError("elasticzero top needs a terminal; --once prints the screen once")
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with suppress(KeyboardInterrupt), _ReadLoop(reader, interval_s) as loop:
            _follow(console, loop, min(REDRAW_S, interval_s))
    return ExitCode.DONE


def _follow(console: Console, loop: _ReadLoop, redraw_s: float) -> None:
    """Draws what the loop reads until `q` is pressed.

    Args:
        console: the terminal.
        loop: reads the job in a thread of its own.
        redraw_s: maximum seconds between two drawings.
    """
    with _single_keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            reading, age_s = loop.latest()
            width, height = console.size
            live.update(screen_of(reading, age_s, width, height), refresh=True)
            if pressed("qQ", redraw_s):
                return


def screen_of(reading: Reading, age_s: float, width: int, height: int | None) -> RenderableType:
    """Returns the screen of `top`, with a note for each thing that could not be read.

    Args:
        reading: what was read of the job.
        age_s: seconds since it was read; a note tells them once they exceed `LATE_S`.
        width: number of characters in a row.
        height: maximum number of rows; None: any number.
    """
    notes = []
    if reading.store_error is not None:
        notes.append(f"etcd is tried again: {reading.store_error}")
    if reading.token_missing:
        notes.append(f"what nodes do needs the job's token: give {HOW}")
    elif reading.silent:
        notes.append("no agent that leads the job answers; this is what etcd holds; trying again")
    if age_s > LATE_S:
        notes.append(f"the last answer came {duration_text(age_s)} ago")
    return job_screen(reading.status, width=width, height=height, clock=_clock, notes=notes)


class _ReadLoop:
    """Reads the job in a thread, every `interval_s`; `with` reads it once and starts the thread."""

    def __init__(self, reader: JobReader, interval_s: float) -> None:
        self._reader = reader
        self._interval_s = interval_s
        self._latest: tuple[Reading, float] | None = None
        self._error: ElasticZeroError | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elasticzero-top", daemon=True)

    def __enter__(self) -> _ReadLoop:
        self._latest = (self._reader.read(), time.monotonic())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(JOIN_S)

    def latest(self) -> tuple[Reading, float]:
        """Returns the last reading and its age in seconds; raises the error that ended the
        thread."""
        if self._error is not None:
            raise self._error
        assert self._latest is not None
        reading, at_s = self._latest
        return reading, time.monotonic() - at_s

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            try:
                self._latest = (self._reader.read(), time.monotonic())
            except ElasticZeroError as error:
                self._error = error
                return


@contextmanager
def _single_keys() -> Iterator[Any]:
    """Has the terminal pass on each key at once; yields a function that waits for keys.

    The function takes the keys and the seconds to wait; it returns whether one of them was pressed,
    or the input has ended.
    """
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed(keys: str, within_s: float) -> bool:
        if not select.select([descriptor], [], [], within_s)[0]:
            return False
        typed = os.read(descriptor, 64)
        return not typed or any(key.encode() in typed for key in keys)

    try:
        tty.setcbreak(descriptor)
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))
