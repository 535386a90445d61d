"""The harness tells workers apart that had the same process id one after the other."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticzero.launcher.workers.forking.requests import Launch
from tests.integration import training_harness
from tests.integration.training_harness import Pool, Running

PID = 4711


class ServerOfOnePid:
    """A fork server all of whose workers have the same process id, as if the kernel had come round
    to it each time."""

    def __init__(self, preload: tuple[str, ...]) -> None:
        self._near, self._far = socket.socketpair()
        self._held: list[int] = []
        self.ends: list[tuple[int, int]] = []

    def wait_until_ready(self) -> None:
        pass

    def fileno(self) -> int:
        return self._near.fileno()

    def start(self, launch: Launch, fds: list[int]) -> tuple[int, list[int]]:
        self._held += [os.dup(fd) for fd in fds]
        return PID, list(range(len(fds)))

    def ended(self) -> list[tuple[int, int]]:
        ends, self.ends = self.ends, []
        return ends

    def close(self) -> None:
        for fd in self._held:
            os.close(fd)
        self._near.close()
        self._far.close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> ServerOfOnePid:
    made = ServerOfOnePid(())
    monkeypatch.setattr(training_harness, "ForkServer", lambda preload: made)
    return made


@pytest.fixture
def own_pool(server: ServerOfOnePid, tmp_path: Path) -> Iterator[Pool]:
    with Pool(tmp_path) as pool:
        yield pool


def start(pool: Pool) -> Running:
    return pool.start(Path("train.py"), [], 1)


def hear(running: Running) -> int | None:
    """Hears a world once; returns the exit code of its worker."""
    once = iter([False, True])
    running.until(lambda: next(once))
    return running.workers[0].exit_code


@pytest.mark.parametrize("heard", [True, False])
def test_a_worker_has_not_ended_because_one_with_its_process_id_has(
    own_pool: Pool, server: ServerOfOnePid, heard: bool
) -> None:
    first = start(own_pool)
    server.ends = [(PID, 0)]
    if heard:
        assert hear(first) == 0
    second = start(own_pool)
    assert hear(second) is None
    server.ends = [(PID, 75)]
    assert hear(second) == 75
    assert hear(first) == 0
