"""Gathers the whole model's state on rank 0, whatever the strategy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from elasticzero.comm.process_group import ProcessGroups
from elasticzero.parallel import Strategy
from elasticzero.state.model import MODEL, NamedModel


def gather_state_dict(
    names: Sequence[str], named: NamedModel, strategy: Strategy, groups: ProcessGroups | None
) -> dict[str, Tensor]:
    """Returns the model's `state_dict` as copies on the CPU, on rank 0; empty on all others.

    All ranks call this together. A parameter that is distributed by rows is assembled one at a
    time: every rank adds its elements to zeros, byte by byte, which changes no bit. names: those of
    the model's own `state_dict`, in order.
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
    found: dict[str, Tensor] = {}
    for name, parameter in named.parameters.items():
        full = MODEL + name
        if groups is not None and groups.rank_info.world_size > 1 and full in by_rows:
            spec, held = share.specs[full], share.held[full]
            whole = torch.zeros(spec.numel, dtype=spec.dtype, device=held.tensor.device)
            whole[held.start : held.start + held.tensor.numel()] = held.tensor.reshape(-1)
            value = groups.sum(whole.view(torch.uint8)).view(spec.dtype).view(spec.shape)
        else:
            value = share.held[full].tensor.view(parameter.shape)
        if first:
            found[name] = value.detach().to("cpu", copy=True)
    if not first:
        return {}
    found |= {name: buffer.detach().to("cpu", copy=True) for name, buffer in named.buffers.items()}
    return {name: found[named.aliases.get(name, name)] for name in names}
