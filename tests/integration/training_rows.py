"""Loses a node in a step's last collective, whose result not all ranks of the other node receive;
or counts the sums over nodes.

Arguments: JSON as for `training_exact`, with lose: {step, ranks (that are killed once they have the
result), without (rank that does not receive it), first (which of the two that are left goes on
first)}, or count (a file).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

import elasticzero as ez
from tests.integration.training_exact import train

HEAD_START_S = 0.7


def lose(session: ez.Session, told: dict[str, Any]) -> None:
    """Makes the collective of the norm in this step end as told."""
    all_reduce: Any = dist.all_reduce

    def wrapped(tensor: Tensor, *args: Any, **options: Any) -> Any:
        work = all_reduce(tensor, *args, **options)
        norm = not args and [*options] == ["group"] and tensor.dim() == 1 and tensor.numel() > 5
        if not norm or session.step_count != told["step"] or session.generation > 1:
            return work
        if session.rank in told["ranks"]:
            time.sleep(HEAD_START_S / 2)
            os.kill(os.getpid(), 9)
        if session.rank != told["first"]:
            time.sleep(HEAD_START_S)
        if session.rank == told["without"]:
            tensor.zero_()
            raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")
        return work

    dist.all_reduce = wrapped


def count(session: ez.Session, told: dict[str, Any]) -> None:
    """Trains, and writes how often rank 0 has summed over two ranks: those of one place in both
    rows, with two workers a node."""
    all_reduce: Any = dist.all_reduce
    sums = 0

    def wrapped(tensor: Tensor, *args: Any, **options: Any) -> Any:
        nonlocal sums
        group = options.get("group")
        sums += group is not None and dist.get_process_group_ranks(group) == [0, 2]
        return all_reduce(tensor, *args, **options)

    dist.all_reduce = wrapped
    train(session, told)
    if session.rank == 0:
        Path(told["count"]).write_text(str(sums))


def main(session: ez.Session, told: dict[str, Any]) -> None:
    if "count" in told:
        count(session, told)
        return
    lose(session, told["lose"])
    train(session, told)


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    ez.run(lambda session: main(session, told))
