"""Gathers the whole model's state on rank 0, whatever the strategy.

It stands alone because it needs a model's names from before the strategy has changed it, and its
state from any time after.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from elasticzero.comm.process_group import ProcessGroups
from elasticzero.parallel import Strategy
from elasticzero.state.model import MODEL, NamedModel


@dataclass(frozen=True, slots=True)
class StateNames:
    """Holds the names in a model's `state_dict`; it refers to none of its parameters, which zero3
    replaces by parts of them."""

    entries: Sequence[str]
    """All names, in order."""
    parameters: Sequence[str]
    """The first name of each parameter."""
    buffers: Mapping[str, Tensor]
    aliases: Mapping[str, str]
    """Further names, each with the first one of the same tensor."""

    @classmethod
    def of(cls, model: nn.Module, named: NamedModel) -> StateNames:
        """Takes the names before a strategy has changed the model."""
        return cls(tuple(model.state_dict()), tuple(named.parameters), named.buffers, named.aliases)


def gather_state_dict(
    names: StateNames, strategy: Strategy, groups: ProcessGroups | None
) -> dict[str, Tensor]:
    """Returns the model's `state_dict` as copies on the CPU, on rank 0; empty on all others.

    All ranks call this together. A parameter that is distributed by rows is assembled one at a
    time: every rank adds its elements to zeros, byte by byte, which changes no bit.

    Args:
        names: The names of the model from before the strategy has changed it.
        strategy: The model as it is laid over the ranks.
        groups: The process groups; None for one process alone.
    """
    strategy.settle()
    share = strategy.rank_state()
    by_rows = {
        name
        for partition in share.partitions
        if partition.rule == "fsdp_rows"
        for name in partition.names
        if share.specs[name].shape
    }
    first = groups is None or groups.rank_info.rank == 0
    gathered: dict[str, Tensor] = {}
    for name in names.parameters:
        full = MODEL + name
        if groups is not None and groups.rank_info.world_size > 1 and full in by_rows:
            spec, held = share.specs[full], share.held[full]
            whole = torch.zeros(spec.numel, dtype=spec.dtype, device=held.tensor.device)
            if groups.rank_info.rank < strategy.shards:  # other rows hold the same
                whole[held.start : held.start + held.tensor.numel()] = held.tensor.reshape(-1)
            value = groups.sum(whole.view(torch.uint8)).view(spec.dtype).view(spec.shape)
        else:
            value = share.held[full].tensor.view(share.specs[full].shape)
        if first:
            gathered[name] = value.detach().to("cpu", copy=True)
    if not first:
        return {}
    gathered |= {
        name: buffer.detach().to("cpu", copy=True) for name, buffer in names.buffers.items()
    }
    return {name: gathered[names.aliases.get(name, name)] for name in names.entries}
