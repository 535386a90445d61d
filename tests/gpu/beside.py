"""One of two ranks that go over to other groups while they make collectives; argument: JSON with
rank and port_file.

Rank 0 prints, as JSON, what it saw.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from elasticzero.comm.process_group import ProcessGroups
from elasticzero.comm.worlds.next_world import connect_beside
from tests.support.meeting import joined, place_of

ELEMENTS = 1 << 20
LIMIT_S = 30.0


def summed(groups: ProcessGroups) -> bool:
    """Makes one collective as a step does; returns whether it gave the sum."""
    values = torch.full((ELEMENTS,), groups.rank_info.rank + 1.0, device=groups.device)
    dist.all_reduce(values, group=groups.world.process_group)
    groups.verify_collectives()
    return bool(values.eq(3.0).all())


def main(rank: int, port_file: str) -> None:
    groups = joined(rank, 2, Path(port_file), on_gpu=True)
    right, beside = summed(groups), 0
    made: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def connect() -> None:
        try:
            place = replace(place_of(rank, 2, Path(port_file + ".next")), token="next")
            made.put(connect_beside(place, groups.device, LIMIT_S, lambda store: None))
        except BaseException as error:  # noqa: BLE001 - raised by the main thread
            made.put(error)

    threading.Thread(target=connect).start()
    while groups.control_tree.allreduce_max(int(made.empty())):
        right &= summed(groups)
        if groups.device.type == "cuda":  # both wait for all that the GPU does
            torch.cuda.empty_cache()
            torch.cuda.synchronize()
        beside += 1
    following = made.get()
    if isinstance(following, BaseException):
        raise following
    before = dist.group.WORLD
    groups.enter(following)
    right &= summed(groups)
    following.retire()
    for _ in range(20):
        right &= summed(groups)
    changed = dist.group.WORLD is not before and groups.rank_info.token == "next"
    groups.control_tree.allreduce_max(0)
    print(json.dumps({"right": right, "changed": changed, "beside": beside}), flush=True)
    groups.control_tree.allreduce_max(0)
    os._exit(0)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
