"""Gives all ranks, at a boundary, what rank 0 has of the small state."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from elasticzero.comm.process_group import ProcessGroups
from elasticzero.peer_errors import is_peer_error


def broadcast_from_rank_zero(
    groups: ProcessGroups | None, tensors: Mapping[str, Tensor], aborted: Callable[[], object]
) -> RuntimeError | None:
    """Fills these tensors with rank 0's; returns the error of a lost peer, after which each rank
    has its own. All ranks call this together.

    aborted: returns anything but None once the agent has ended the generation.
    """
    if groups is None or not tensors or aborted() is not None:
        return None
    try:
        groups.broadcast(tensors)
    except RuntimeError as error:
        if not is_peer_error(error) and aborted() is None:
            raise
        return error
    return None
