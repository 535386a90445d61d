"""How far a rank's memory grows during one save or load; a part of benchmarks/checkpoint.py.

Counted is what the process allocates (not files that it maps, which the kernel can drop) and what
lies in the snapshots' shared memory, sampled every 2 ms from before the first allocation on.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoint_ranks import Rank, Variant, finish, start

SAMPLE_S = 0.002


def private_bytes() -> int:
    status = Path("/proc/self/status").read_text().split()
    return int(status[status.index("RssAnon:") + 1]) << 10


def shared_bytes(folder: Path) -> int:
    """Of all files in a folder; a file with several names counts once."""
    bytes_by_inode = {}
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                status = os.stat(os.path.join(place, name))
                bytes_by_inode[status.st_ino] = status.st_blocks * 512
    return sum(bytes_by_inode.values())


class Peak:
    """The growth of memory from its making to `end`."""

    def __init__(self, folder: Path, world: int) -> None:
        self._folder, self._world = folder, world
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory")
        self._before = self._most = self._now()
        self._thread.start()

    def end(self) -> int:
        """The most bytes in use at once, above those at the beginning."""
        if not self._ended.is_set():
            self._ended.set()
            self._thread.join()
            self._most = max(self._most, self._now())
        return self._most - self._before

    def _now(self) -> int:
        return private_bytes() + shared_bytes(self._folder) // self._world

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self._most = max(self._most, self._now())


def variants(rank: Rank) -> Mapping[str, Callable[[], Variant]]:
    """By what they do: loads fill tensors that are there."""
    return {
        "save": lambda: rank.write()["elasticzero, straight"],
        "save in the background": lambda: rank.write()["elasticzero, from shared memory"],
        "dcp.save": lambda: rank.write()["dcp.save"],
        "dcp.async_save": lambda: rank.stall()["dcp.async_save"],
        "safetensors save": lambda: rank.write()["safetensors"],
        "load": lambda: rank.load()["elasticzero"],
        "dcp.load": lambda: rank.load()["dcp.load"],
        "safetensors load": lambda: rank.load()["safetensors"],
    }


def main() -> None:
    order = start()
    rank = Rank(order)
    (what,) = order.cases
    if "load" in what:
        rank.files()
    variant = variants(rank)[what]()
    peak = Peak(Path(order.shared), order.world)
    with variant() as work:
        work()
        if "load" in what:
            peak.end()  # what follows is the look at what was loaded
    grown = torch.tensor([peak.end()])
    dist.all_reduce(grown, dist.ReduceOp.MAX)
    rank.tell({"what": what, "bytes": int(grown), "shard_bytes": rank.state.bytes})
    finish()


if __name__ == "__main__":
    main()
