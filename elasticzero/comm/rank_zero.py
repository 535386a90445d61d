"""Gives all ranks, at a boundary, what rank 0 has of the small state, once results are verified."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from elasticzero.comm.process_group import ProcessGroups
from elasticzero.errors import is_peer_error
from elasticzero.ipc.agent_client import AgentClient


def broadcast_from_rank_zero(
    groups: ProcessGroups | None, tensors: Mapping[str, Tensor], link: AgentClient
) -> RuntimeError | None:
    """Fills these tensors with rank 0's; all ranks call this together.

    Of buffers each rank's own are as valid for the step: a complete snapshot has one rank's, and a
    divided one has rank 0's.

    Args:
        groups: The process groups; None for one process alone, which changes nothing.
        tensors: The tensors that are filled in place, by names that are the same on all ranks.
        link: The client of the agent, which says whether the generation has ended.

    Returns:
        The error of a lost peer, after which each rank has its own values; None: there was none.
    """
    if groups is None or not tensors or link.aborted is not None:
        return None
    try:
        groups.broadcast(tensors)
    except RuntimeError as error:
        if not is_peer_error(error) and link.aborted is None:
            raise
        return error
    return None


def verify_unless_no_collective(groups: ProcessGroups | None) -> RuntimeError | None:
    """Raises if results may be wrong; returns a lost peer's error if none has been begun."""
    untouched = groups is not None and groups.no_collective_since_verified
    try:
        if groups is not None:
            groups.verify_collectives()
    except RuntimeError as error:
        if not untouched or not is_peer_error(error):
            raise
        return error
    return None
