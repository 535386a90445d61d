"""Measures what an exchange of gradients costs on the ranks of this world, for
`--bucket-bytes auto`."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor

from elasticzero.parallel.buckets.exchange import (
    begin_all_gather,
    begin_reduce_scatter,
    begin_replica_sum,
    is_direct,
)
from elasticzero.parallel.buckets.plan import ExchangeCost
from elasticzero.parallel.mesh import Mesh

SMALL_BYTES, LARGE_BYTES = 1 << 20, 16 << 20
TRIES = 5
"""Number of exchanges of each size, of which the fastest counts; one before them is not timed."""


def exchange_cost(strategy: str, mesh: Mesh, device: torch.device) -> ExchangeCost:
    """Returns what the exchange of one bucket costs under a strategy; all ranks call this together.

    The exchange is what the strategy does with a bucket in a step: an all-reduce, or its two
    halves.

    Args:
        strategy: ddp for an all-reduce; any other name for its two halves.
        mesh: The rows of ranks.
        device: The device of the messages.
    """
    timed = []
    for size in (SMALL_BYTES, LARGE_BYTES):
        chunk = -(-size // (4 * mesh.shards))
        flat_E = torch.zeros(chunk * mesh.shards, device=device)
        found_s = [_seconds(strategy, mesh, flat_E) for _ in range(1 + TRIES)]
        timed.append((size, min(found_s[1:])))
    return ExchangeCost.fit(timed[0], timed[1])


def _seconds(strategy: str, mesh: Mesh, flat_E: Tensor) -> float:
    if flat_E.is_cuda:
        torch.cuda.synchronize(flat_E.device)
    began_s = time.perf_counter()
    if strategy == "ddp":
        dist.all_reduce(flat_E, group=mesh.world_group.process_group)
    else:
        chunks = list(flat_E.chunk(mesh.shards))
        received = None
        if is_direct(flat_E):
            received = flat_E.new_empty(mesh.shards - 1, chunks[0].numel())
        for work in begin_reduce_scatter(flat_E, chunks, received, mesh):
            work.wait()
        for work in begin_replica_sum(chunks[mesh.shard], mesh):
            work.wait()
        for work in begin_all_gather(flat_E, chunks, mesh):
            work.wait()
    if flat_E.is_cuda:
        torch.cuda.synchronize(flat_E.device)
    return time.perf_counter() - began_s
