"""Two processes that write the same checkpoint directory, in any order of their requests."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from elasticzero.checkpoint.storage import disk
from elasticzero.checkpoint.storage.base import Bytes, Directory, Storage
from elasticzero.checkpoint.storage.disk import DiskDirectory
from elasticzero.errors import ElasticZeroError
from tests.unit.checkpoint.disk_faults import CREATING, OTHERS


class Stopped(BaseException):
    """The process is no more: none of its requests reaches the storage."""


class Turns:
    """Lets process 0 make some requests, then process 1, and so on; the last one makes all.

    A process that ends gives its turn away. The requests that a process makes in several threads
    come one after the other.
    """

    def __init__(self, counts: Sequence[int], *, killed: int | None = None) -> None:
        """Takes the numbers of requests.

        Args:
            counts: Number of requests of each turn.
            killed: A process whose requests have no effect from its second turn on.
        """
        self.calls = [0, 0]
        self._counts = list(counts)
        self._killed = killed
        self._current = 0
        self._ended = [False, False]
        self._turns = [1, 0]
        self._changed = threading.Condition()
        with self._changed:
            self._skip()

    @contextmanager
    def request(self, process: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._current == process, 60.0)
            if process == self._killed and self._turns[process] > 1:
                raise Stopped
            self.calls[process] += 1
            try:
                yield
            finally:
                if self._counts:
                    self._counts[0] -= 1
                    self._skip()

    def end(self, process: int) -> None:
        with self._changed:
            self._ended[process] = True
            if self._current == process:
                self._give(1 - process)

    def _skip(self) -> None:
        """Gives the turn away as long as no request is left in it."""
        while self._counts and self._counts[0] == 0:
            del self._counts[0]
            if not self._ended[1 - self._current]:
                self._give(1 - self._current)

    def _give(self, process: int) -> None:
        self._current = process
        self._turns[process] += 1
        self._changed.notify_all()


class TurnStorage:
    """One step's files, as a process of `Turns` has them."""

    def __init__(self, storage: Storage, turns: Turns, process: int) -> None:
        self._storage = storage
        self._turns = turns
        self._process = process
        self.where = storage.where

    def size(self, name: str) -> int:
        with self._turns.request(self._process):
            return self._storage.size(name)

    def read_into(self, name: str, start: int, *buffers: memoryview) -> int:
        with self._turns.request(self._process):
            return self._storage.read_into(name, start, *buffers)

    def write(
        self, name: str, chunks: Iterable[Bytes], *, size: int | None = None, cached: bool = True
    ) -> None:
        with self._turns.request(self._process):
            self._storage.write(name, chunks, size=size, cached=cached)

    def create_exclusive(self, name: str, data: bytes, *, instead_of: bytes | None = None) -> bool:
        with self._turns.request(self._process):
            return self._storage.create_exclusive(name, data, instead_of=instead_of)

    def names(self) -> list[str]:
        with self._turns.request(self._process):
            return self._storage.names()

    def versions(self) -> dict[str, str]:
        with self._turns.request(self._process):
            return self._storage.versions()

    def remove(
        self, name: str, *, holding: bytes | None = None, version: str | None = None
    ) -> None:
        with self._turns.request(self._process):
            self._storage.remove(name, holding=holding, version=version)


class TurnDirectory:
    """A checkpoint directory, as a process of `Turns` has it."""

    def __init__(self, directory: Directory, turns: Turns, process: int) -> None:
        self._directory = directory
        self._turns = turns
        self._process = process
        self.where = directory.where

    def names(self) -> list[str]:
        with self._turns.request(self._process):
            return self._directory.names()

    def files(self) -> dict[str, dict[str, float]]:
        with self._turns.request(self._process):
            return self._directory.files()

    def step(self, name: str) -> TurnStorage:
        return TurnStorage(self._directory.step(name), self._turns, self._process)

    def make(self, name: str) -> TurnStorage:
        with self._turns.request(self._process):
            return TurnStorage(self._directory.make(name), self._turns, self._process)

    def remove(self, name: str) -> None:
        with self._turns.request(self._process):
            self._directory.remove(name)

    def check_writable(self) -> None:
        with self._turns.request(self._process):
            self._directory.check_writable()


class CallTurns:
    """While entered, each call into the operating system of a process of `Turns` is a request."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._processes: dict[int, int] = {}
        """The process that each thread is."""
        self._inside = threading.local()
        self._real: list[tuple[Any, str, Callable[..., Any]]] = []

    def enter(self, process: int) -> None:
        """Makes this thread a process."""
        self._processes[threading.get_ident()] = process

    def __enter__(self) -> CallTurns:
        called = [(os, name) for name in (*CREATING, *OTHERS)] + [(disk, "exchange")]
        self._real = [(module, name, getattr(module, name)) for module, name in called]
        for module, name, real in self._real:
            setattr(module, name, self._by_turns(real))
        return self

    def __exit__(self, *_: object) -> None:
        for module, name, real in self._real:
            setattr(module, name, real)

    def _by_turns(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            process = self._processes.get(threading.get_ident())
            if process is None or getattr(self._inside, "call", False):
                return real(*arguments, **options)
            with self._turns.request(process):
                self._inside.call = True
                try:
                    return real(*arguments, **options)
                finally:
                    self._inside.call = False

        return call


def run_by_turns(
    directory: Directory, works: Sequence[Callable[[Directory], object]], turns: Turns
) -> list[BaseException | None]:
    """Runs two processes' work by turns of requests to storage; returns the error of each."""
    return _run_both(
        lambda process: works[process](TurnDirectory(directory, turns, process)), turns
    )


def run_by_calls(
    directory: DiskDirectory, works: Sequence[Callable[[Directory], object]], turns: Turns
) -> list[BaseException | None]:
    """Runs two processes' work by turns of calls into the system; returns the error of each.

    Each does all in one thread: see `one_by_one`.
    """
    calls = CallTurns(turns)

    def work(process: int) -> None:
        calls.enter(process)
        works[process](directory)

    with calls:
        return _run_both(work, turns)


def one_by_one(items: Iterable[Any], work: Callable[[Any], Any], *, threads: int = 1) -> list[Any]:
    """Does in one thread what `run_parallel` does in several."""
    return [work(item) for item in items]


def _run_both(work: Callable[[int], object], turns: Turns) -> list[BaseException | None]:
    """Runs the work of process 0 and of process 1; returns the error of each."""
    errors: list[BaseException | None] = [None, None]

    def run(process: int) -> None:
        try:
            work(process)
        except (ElasticZeroError, OSError, Stopped) as error:
            errors[process] = error
        finally:
            turns.end(process)

    threads = [threading.Thread(target=run, args=(process,)) for process in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()
    return errors
