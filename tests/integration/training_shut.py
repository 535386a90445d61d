"""Shuts one of two groups while collectives of the other go on, and then all groups at once.

Arguments: rank, of four with two ranks a row; a directory.
Rank 0 waits in a collective of a group of all ranks, and rank 1 for what rank 0 sends in it, until
rank 0 shuts that group; meanwhile all ranks sum in another one. Then ranks 0 and 2 wait in a
collective of a row, or of the replicas of a shard, until all groups are shut. Each rank that waits
writes the error that ends its collective. A thread opens connections of its own while groups are
made.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from elasticzero.comm.process_group import APART, ProcessGroups
from elasticzero.rank_groups.connections import shut_connections
from elasticzero.rank_groups.group import RankGroup
from tests.support.meeting import joined

RANKS = 4
WAIT_S = 0.3
PAUSE_S = 0.002
PATIENCE_S = 30.0


class OwnConnections:
    """Connections of the script, which a thread opens one after the other."""

    def __init__(self) -> None:
        self.ends: list[tuple[socket.socket, socket.socket]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._open, daemon=True)
        self._thread.start()

    def _open(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            while not self._stop.wait(PAUSE_S) and len(self.ends) < 200:
                client = socket.create_connection(listener.getsockname())
                self.ends.append((client, listener.accept()[0]))

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        assert len(self.ends) > 2

    def check(self) -> None:
        """Fails unless all of them still work."""
        for client, server in self.ends:
            client.sendall(b"x")
            assert server.recv(1) == b"x"


class Summing:
    """Sums in a group, in a thread on each rank, until all ranks have called `finish`."""

    def __init__(self, group: RankGroup) -> None:
        self.error: Exception | None = None
        self._group = group
        self._finish = threading.Event()
        self._thread = threading.Thread(target=self._sum, daemon=True)
        self._thread.start()

    def _sum(self) -> None:
        finished = 0
        try:
            while finished < RANKS:
                numbers = torch.tensor([1, int(self._finish.is_set())])
                dist.all_reduce(numbers, group=self._group.process_group)
                ranks, finished = numbers.tolist()
                assert ranks == RANKS
                time.sleep(PAUSE_S)
        except (RuntimeError, AssertionError) as error:
            self.error = error

    def finish(self) -> None:
        self._finish.set()
        self._thread.join(PATIENCE_S)
        assert self.error is None and not self._thread.is_alive(), repr(self.error)


def wait_in(group: RankGroup, told: Path, *, source: int | None = None) -> None:
    """Writes the error that ends a collective of this group, or the wait for a rank of it."""
    try:
        if source is None:
            dist.all_reduce(torch.zeros(1), group=group.process_group)
        else:
            dist.recv(torch.zeros(1), source, group=group.process_group)
    except RuntimeError as error:
        told.write_text(str(error))


def wait_for(files: list[Path]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline_s, f"not all of {files} exist"
        time.sleep(0.02)


def shut_one(groups: ProcessGroups, apart: RankGroup, rank: int, directory: Path) -> None:
    """Shuts one group, and ends it; the group of all ranks is used throughout."""
    summing = Summing(groups.world)
    if rank == 0:
        threading.Timer(WAIT_S, shut_connections, [[apart.connections]]).start()
        wait_in(apart, directory / "alone-0")
    elif rank == 1:
        wait_in(apart, directory / "alone-1", source=0)
    wait_for([directory / f"alone-{waiting}" for waiting in (0, 1)])
    summing.finish()
    groups.end(APART)
    total = torch.ones(1)
    dist.all_reduce(total, group=groups.world.process_group)
    assert total.item() == RANKS


def main(rank: int, directory: Path) -> None:
    connections = OwnConnections()
    groups = joined(rank, RANKS, directory / "port")
    row, replicas = groups.divide(2)
    apart = groups.apart()
    connections.stop()
    shut_one(groups, apart, rank, directory)
    if rank in (0, 2):
        threading.Timer(WAIT_S, groups.shut).start()
        wait_in(row if rank == 0 else replicas, directory / f"ended-{rank}")
        connections.check()
    wait_for([directory / f"ended-{waiting}" for waiting in (0, 2)])


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
