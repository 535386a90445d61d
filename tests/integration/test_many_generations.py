"""One pair of processes through many generations: nothing of an old one is left in them."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from elasticzero.ipc.assignment import Assignment, Resume
from elasticzero.ipc.channel import Channel, ChannelClosed
from elasticzero.ipc.failure import Failed
from elasticzero.ipc.messages import (
    FLAG_GROW,
    Message,
    Request,
    SaveState,
    Stepped,
    Stopping,
    Waiting,
)
from elasticzero.launcher.workers.forking.client import ForkServer
from elasticzero.launcher.workers.forking.requests import Launch
from tests.integration.clusters import SCRIPTS
from tests.integration.training_harness import PRELOAD
from tests.support.deadlines import patience

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "training_exact.py"
GENERATIONS = 50
WARM = 5
"""Generations until what is made once, at the first use, is there."""
FEW = 10
"""So many descriptors or threads may be on their way out; one of each generation would be more."""
ALLOWED_BYTES = 32 << 20


class Pair:
    """Two workers whose agent is the test."""

    def __init__(self, folder: Path, script: Path, *arguments: str) -> None:
        self.server = ForkServer(PRELOAD)
        self.server.wait_until_ready()
        self.folder, self.pids = folder, [0, 0]
        self.channels: list[Channel] = []
        self.launch = Launch(
            target=str(script),
            is_module=False,
            arguments=arguments,
            environment={**os.environ, "OMP_NUM_THREADS": "1"},
            directory=str(folder),
        )

    def begin(self, generation: int) -> None:
        """A place in a new generation for both; they are forked for the first."""
        store = socket.socket()
        store.bind(("127.0.0.1", 0))
        token = secrets.token_hex(8)
        for rank in (0, 1):
            assignment = Assignment(
                job="test",
                node="node",
                generation=generation,
                token=token,
                rank=rank,
                local_rank=rank,
                world_size=2,
                local_world_size=2,
                group_rank=0,
                master_address="127.0.0.1",
                master_port=store.getsockname()[1],
                store_fd=None,
                strategy="ddp",
                resume=Resume(tier="fresh"),
                snapshot_root=str(self.folder / "snapshots"),
                keep=True,
            )
            fd = store.fileno() if rank == 0 else None
            if generation == 1:
                self._fork(assignment, fd)
            else:
                self.channels[rank].send_with_fd(assignment, fd, 5.0)
        store.close()

    def _fork(self, assignment: Assignment, fd: int | None) -> None:
        log = os.open(self.folder / f"{assignment.rank}.log", os.O_WRONLY | os.O_CREAT)
        ours, theirs = socket.socketpair()
        bell = os.open(os.devnull, os.O_WRONLY)
        fds = [log, theirs.fileno(), bell] + ([fd] if fd is not None else [])
        self.pids[assignment.rank], numbers = self.server.start(self.launch, fds)
        os.close(log)
        os.close(bell)
        theirs.close()
        channel = Channel(ours)
        channel.send(replace(assignment, store_fd=numbers[3] if fd is not None else None))
        self.channels.append(channel)

    def close(self) -> None:
        self.server.close()
        for channel in self.channels:
            channel.close()

    def until(self, rank: int, so: Callable[[Message], bool]) -> None:
        """Hear a worker until it says that; `Stopping` is answered."""
        deadline_s = time.monotonic() + patience(60.0)
        while time.monotonic() < deadline_s:
            message = self.channels[rank].receive(1.0)
            assert not isinstance(message, Failed), message
            if isinstance(message, Stopping):
                self.channels[rank].send(SaveState(write=True))
            if message is not None and so(message):
                return
        raise AssertionError(f"too late:\n{(self.folder / f'{rank}.log').read_text()}")


def held(pid: int) -> tuple[int, int, int]:
    """Descriptors, threads and resident bytes of a process."""
    fds = len(os.listdir(f"/proc/{pid}/fd"))
    threads = len(os.listdir(f"/proc/{pid}/task"))
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return fds, threads, pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("strategy", ["zero3", pytest.param("ddp", marks=pytest.mark.chaos)])
def test_fifty_generations_leave_no_socket_thread_or_memory(tmp_path: Path, strategy: str) -> None:
    told = {"strategy": strategy, "steps": 1 << 30, "clip": 0.5}
    with closing(Pair(tmp_path, SCRIPT, json.dumps(told))) as pair:
        seen: list[list[tuple[int, int, int]]] = []
        for generation in range(1, GENERATIONS + 1):
            pair.begin(generation)
            for rank in (0, 1):
                pair.until(rank, lambda m: isinstance(m, Stepped) and m.step >= 2)
            pair.channels[1].send(Request(flags=FLAG_GROW))
            for rank in (0, 1):
                pair.until(rank, lambda m: isinstance(m, Waiting))
            seen.append([held(pid) for pid in pair.pids])
        for rank in (0, 1):
            first, last = seen[WARM - 1][rank], seen[-1][rank]
            assert last[0] < first[0] + FEW and last[1] < first[1] + FEW, seen
            assert last[2] <= first[2] + ALLOWED_BYTES, seen


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("thread", "threads still run: reader"),
        ("group", "1 process group(s) of the script's own are left"),
    ],
)
def test_a_process_in_which_something_is_left_ends(tmp_path: Path, what: str, why: str) -> None:
    with closing(Pair(tmp_path, SCRIPTS / "leaves_behind.py", what)) as pair:
        pair.begin(1)
        for rank in (0, 1):
            pair.until(rank, lambda m: isinstance(m, Stepped))
        pair.channels[1].send(Request(flags=FLAG_GROW))
        for rank in (0, 1):
            with pytest.raises(ChannelClosed):
                pair.until(rank, lambda m: isinstance(m, Waiting))
        for rank in (0, 1):
            log = (tmp_path / f"{rank}.log").read_text()
            assert log == f"this worker's process is not kept: {why}\n"
