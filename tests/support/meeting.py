"""Process groups of ranks that a test starts by itself, without an agent that gives them a port."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import torch
import torch.distributed as dist

from elasticzero.comm.nccl import device_of
from elasticzero.comm.process_group import ProcessGroups, connect
from elasticzero.comm.rendezvous import RankInfo, rendezvous
from elasticzero.parallel.mesh import Mesh
from elasticzero.rank_groups.group import RankGroup

LATE_S = 60.0


def joined(rank: int, world_size: int, port_file: Path, *, on_gpu: bool = False) -> ProcessGroups:
    """The groups of the ranks that were given this file, which rank 0 writes its port to."""
    place = place_of(rank, world_size, port_file)
    device = device_of(place.local_rank) if on_gpu else torch.device("cpu")
    return connect(place, device, rendezvous(place))


def place_of(rank: int, world_size: int, port_file: Path) -> RankInfo:
    """Where a rank meets the others that were given this file.

    Rank 0 binds before it says where: a port chosen ahead is free to others until then.
    """
    store_fd = None
    if rank == 0:
        store = socket.socket()
        store.bind(("127.0.0.1", 0))
        port = store.getsockname()[1]
        store_fd = store.detach()
        partial = port_file.with_suffix(".partial")
        partial.write_text(str(port))
        os.replace(partial, port_file)
    else:
        port = _port_in(port_file)
    return RankInfo(
        rank=rank, world_size=world_size, master_port=port, store_fd=store_fd, token="meeting"
    )


def mesh_of_world() -> Mesh:
    """One row of all ranks, in torch's default group."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return Mesh.of_world(rank, ranks, RankGroup("all ranks", range(ranks), dist.group.WORLD))


def _port_in(port_file: Path) -> int:
    deadline_s = time.monotonic() + LATE_S
    while not port_file.exists():
        assert time.monotonic() < deadline_s, f"rank 0 has not written {port_file}"
        time.sleep(0.01)
    return int(port_file.read_text())
