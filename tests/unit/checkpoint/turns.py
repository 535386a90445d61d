"""Two processes that write the same checkpoint directory, in any order of their requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from elasticzero.checkpoint.storage.base import Bytes, Directory, Storage
from elasticzero.errors import ElasticZeroError


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

    def remove(self, name: str, *, holding: bytes | None = None) -> None:
        with self._turns.request(self._process):
            self._storage.remove(name, holding=holding)


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


def run_by_turns(
    directory: Directory, works: Sequence[Callable[[Directory], object]], turns: Turns
) -> list[BaseException | None]:
    """Runs two processes' work; returns the error of each."""
    errors: list[BaseException | None] = [None, None]

    def run(process: int) -> None:
        try:
            works[process](TurnDirectory(directory, turns, process))
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
