"""Begins the two halves of an all-reduce over flat tensors: reduce-scatter and all-gather.

On the CPU both are direct messages between each two ranks, which take less time than gloo's own
collectives (`docs/decisions/0026-direct-exchanges.md`). Elsewhere they are the backend's.
The ranks are those of one row of the mesh.
Shapes: E elements of a tensor, C of one rank's chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from elasticzero.parallel.mesh import Mesh

TAG = 0x657A
"""Keeps these messages apart from those that a script sends by itself."""

_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def is_direct(flat_E: Tensor) -> bool:
    """Returns whether a reduce-scatter of this tensor needs room for what is received."""
    return flat_E.device.type == "cpu"


def is_launched(flat_E: Tensor) -> bool:
    """Returns whether operations on this tensor are launched on a device: a few large ones cost the
    processor less than many small ones, which the CPU itself computes as fast."""
    return flat_E.device.type != "cpu"


def begin_reduce_scatter(
    flat_E: Tensor, chunks: Sequence[Tensor], received: Tensor | None, mesh: Mesh
) -> list[Any]:
    """Begins to sum the ranks' tensors.

    Args:
        flat_E: This rank's tensor.
        chunks: The part of `flat_E` of each rank.
        received: Room for this rank's chunk from each of the other ranks, which the caller adds to
            its own after the wait; None: this rank's chunk of `flat_E` becomes the sum.
        mesh: The row of ranks.

    Returns:
        What must be waited for.
    """
    ranks, shard, group = mesh.shards, mesh.shard, mesh.shard_group.process_group
    if received is None:
        if _are_equal(chunks):
            return [_reduce_scatter(chunks[shard], flat_E, group=group, async_op=True)]
        return [dist.reduce_scatter(chunks[shard], list(chunks), group=group, async_op=True)]
    works: list[Any] = []
    for distance in range(1, ranks):
        source, target = (shard - distance) % ranks, (shard + distance) % ranks
        if chunks[shard].numel():
            room, rank = received[distance - 1], mesh.rank_of(source)
            works.append(dist.irecv(room, rank, group=group, tag=TAG))
        if chunks[target].numel():
            rank = mesh.rank_of(target)
            works.append(dist.isend(chunks[target], rank, group=group, tag=TAG))
    return works


def begin_all_gather(flat_E: Tensor, chunks: Sequence[Tensor], mesh: Mesh) -> list[Any]:
    """Begins to fill in the chunks of the other ranks.

    Args:
        flat_E: The tensor, of which this rank has its chunk.
        chunks: The part of `flat_E` of each rank.
        mesh: The row of ranks.

    Returns:
        What must be waited for.
    """
    ranks, shard, group = mesh.shards, mesh.shard, mesh.shard_group.process_group
    if not is_direct(flat_E):
        if _are_equal(chunks):
            return [_all_gather(flat_E, chunks[shard], group=group, async_op=True)]
        return [dist.all_gather(list(chunks), chunks[shard], group=group, async_op=True)]
    works: list[Any] = []
    for distance in range(1, ranks):
        source, target = (shard - distance) % ranks, (shard + distance) % ranks
        if chunks[source].numel():
            rank = mesh.rank_of(source)
            works.append(dist.irecv(chunks[source], rank, group=group, tag=TAG))
        if chunks[shard].numel():
            rank = mesh.rank_of(target)
            works.append(dist.isend(chunks[shard], rank, group=group, tag=TAG))
    return works


def begin_replica_sum(reduced_C: Tensor, mesh: Mesh) -> list[Any]:
    """Begins to sum the chunks of one place in all rows; returns what must be waited for."""
    if mesh.replicas == 1 or not reduced_C.numel():
        return []
    return [dist.all_reduce(reduced_C, group=mesh.replica_group.process_group, async_op=True)]


def _are_equal(chunks: Sequence[Tensor]) -> bool:
    return len({chunk.numel() for chunk in chunks}) == 1
