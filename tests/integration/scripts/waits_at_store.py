"""All ranks get a value of the last one. Then rank 0 exits while the others wait for a key at its
store, which never comes."""

import os
import signal
import sys

import torch
import torch.distributed as dist

import elasticzero as ez
from elasticzero.comm.broadcast_value import broadcast_value

OTHERS = int(sys.argv[1])


def train(session: ez.Session) -> None:
    of_this_rank = {"rank": session.rank, "tensor": torch.full((2,), session.rank)}
    assert dist.group.WORLD is not None
    value = broadcast_value(of_this_rank, dist.group.WORLD, source=OTHERS)
    assert value["rank"] == OTHERS and value["tensor"].tolist() == [OTHERS, OTHERS]
    store = dist.distributed_c10d._get_default_store()
    if session.rank == 0:
        store.wait([f"waits/{rank}" for rank in range(1, OTHERS + 1)])
        os.kill(os.getpid(), signal.SIGKILL)
    store.set(f"waits/{session.rank}", "1")
    store.get("never")


ez.run(train)
