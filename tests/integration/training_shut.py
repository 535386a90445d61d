"""Waits in a collective of a row, or of the replicas of a shard, until the groups are shut.

Arguments: rank, of four with two ranks a row; a directory. Ranks 0 and 2 write the error that ends
their collective; the others take part in none.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support.meeting import joined

WAIT_S = 0.5


def main(rank: int, directory: Path) -> None:
    groups = joined(rank, 4, directory / "port")
    row, replicas = groups.divide(2)
    ends = [directory / "ended-0", directory / "ended-2"]
    if rank in (0, 2):
        threading.Timer(WAIT_S, groups.shut).start()
        try:
            dist.all_reduce(torch.zeros(1), group=row if rank == 0 else replicas)
        except RuntimeError as error:
            (directory / f"ended-{rank}").write_text(str(error))
    while not all(file.exists() for file in ends):
        time.sleep(0.05)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
