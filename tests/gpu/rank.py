"""One of two ranks of NCCL; argument: JSON with rank, port_file and what the other rank does.

Rank 0 prints, as JSON, what it saw of a collective that rank 1 takes no part in.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support.meeting import joined

ELEMENTS = 1 << 20


def summed() -> torch.Tensor:
    values = torch.ones(ELEMENTS, device="cuda")
    dist.all_reduce(values)
    return values + 0


def main(rank: int, port_file: str, other: str) -> None:
    groups = joined(rank, 2, Path(port_file), on_gpu=True)
    for _ in range(3):
        assert summed().eq(2).all()
    groups.verify_collectives()
    groups.control_tree.allreduce_max(0)  # one rank's end of a collective is not the other's
    if rank == 1:
        if other == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        print("left out", flush=True)
        time.sleep(60)
    assert groups.no_collective_since_verified
    alone = summed()
    assert not groups.no_collective_since_verified
    if other == "waits":
        threading.Timer(0.5, groups.shut).start()
    began_s = time.monotonic()
    error = ""
    try:
        groups.verify_collectives()
    except dist.DistBackendError as raised:
        error = str(raised)
    took_s = time.monotonic() - began_s
    right = bool(alone.eq(2).all())
    print(json.dumps({"error": error, "took_s": took_s, "right": right}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
