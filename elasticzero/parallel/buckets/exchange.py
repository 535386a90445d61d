"""Begins the two halves of an all-reduce over flat tensors: reduce-scatter and all-gather.

On the CPU both are direct messages between each two ranks, which take less time than gloo's own
collectives (`docs/decisions/0026-direct-exchanges.md`). Elsewhere they are the backend's.
Shapes: E elements of a tensor, C = E / ranks elements of one rank's chunk.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

TAG = 0x657A
"""Keeps these messages apart from those that a script sends by itself."""

_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def is_direct(flat_E: Tensor) -> bool:
    """Returns whether a reduce-scatter of this tensor needs room for what is received."""
    return flat_E.device.type == "cpu"


def begin_reduce_scatter(flat_E: Tensor, received: Tensor | None, rank: int) -> list[Any]:
    """Begins to sum the ranks' tensors; returns what must be waited for.

    received: room for the chunks of the other ranks, of shape (ranks - 1, C), which the caller adds
    to its own chunk after the wait; None: this rank's chunk of `flat_E` becomes the sum.
    """
    ranks = dist.get_world_size()
    chunks = flat_E.view(ranks, -1)
    if received is None:
        return [_reduce_scatter(chunks[rank], flat_E, async_op=True)]
    works: list[Any] = []
    for distance in range(1, ranks):
        source, target = (rank - distance) % ranks, (rank + distance) % ranks
        works.append(dist.irecv(received[distance - 1], source, tag=TAG))
        works.append(dist.isend(chunks[target], target, tag=TAG))
    return works


def begin_all_gather(flat_E: Tensor, rank: int) -> list[Any]:
    """Begins to fill in the chunks of the other ranks; returns what must be waited for."""
    ranks = dist.get_world_size()
    chunks = flat_E.view(ranks, -1)
    if not is_direct(flat_E):
        return [_all_gather(flat_E, chunks[rank], async_op=True)]
    works: list[Any] = []
    for distance in range(1, ranks):
        source, target = (rank - distance) % ranks, (rank + distance) % ranks
        works.append(dist.irecv(chunks[source], source, tag=TAG))
        works.append(dist.isend(chunks[rank], target, tag=TAG))
    return works
