"""Gathers the whole model's state on rank 0, whatever the strategy.

It stands alone because it needs a model's names from before the strategy has changed it, and its
state from any time after.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from elasticzero.comm.gather import assembled
from elasticzero.comm.process_group import ProcessGroups
from elasticzero.parallel import Strategy
from elasticzero.state.extra_state import KEY
from elasticzero.state.model import MODEL, NamedModel
from elasticzero.torch_internals.tensors import buffers_of


@dataclass(frozen=True, slots=True)
class _Entry:
    """Describes an entry of a model's `state_dict`."""

    name: str
    kind: Literal["parameter", "buffer", "extra state"]
    first: str
    """The first of the names of the same object."""


class StateNames:
    """Knows the entries of a model's `state_dict`; it refers to none of its parameters, which zero3
    replaces by parts of them."""

    def __init__(self, model: nn.Module, named: NamedModel) -> None:
        """Takes the names before a strategy has changed the model."""
        self.parameters = tuple(named.parameters)
        """The first name of each parameter."""
        self.buffers, self.extra_states = named.buffers, named.extra_states
        self.entries: list[_Entry] = []
        """All entries in order, with buffers that are None."""
        saved, first_path = named.buffers.saved_names, dict[int, str]()
        for path, module in model.named_modules(remove_duplicate=False):
            prefix = f"{path}." if path else ""
            first = first_path.setdefault(id(module), prefix)
            for key, _ in module.named_parameters(recurse=False, remove_duplicate=False):
                kept = named.aliases.get(prefix + key, prefix + key)
                self.entries.append(_Entry(prefix + key, "parameter", kept))
            for key in buffers_of(module):
                if first + key in saved:
                    self.entries.append(_Entry(prefix + key, "buffer", first + key))
            if first + KEY in named.extra_states.names:
                self.entries.append(_Entry(prefix + KEY, "extra state", first + KEY))

    def rest(self) -> dict[str, Any]:
        """Returns all that are no parameters, as they are now: tensors as copies on the CPU."""
        copies, extra = self.buffers.copy(), self.extra_states.values()
        values: dict[str, Any] = {}
        for entry in self.entries:
            if entry.kind == "extra state":
                value = extra[entry.first]
                values[entry.name] = _on_cpu(value) if isinstance(value, Tensor) else value
            elif entry.kind == "buffer" and entry.first not in copies.unset:
                values[entry.name] = _on_cpu(copies.of(entry.first))
        return values


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def gather_state_dict(
    names: StateNames, strategy: Strategy, groups: ProcessGroups | None
) -> dict[str, Any]:
    """Returns the model's `state_dict` as copies on the CPU, on rank 0; empty on all others.

    All ranks call this together. A parameter that is distributed by rows is assembled one at a
    time: every rank adds its elements to zeros, byte by byte, which changes no bit.

    Args:
        names: The names of the model from before the strategy has changed it.
        strategy: The model as it is laid over the ranks.
        groups: The process groups; None for one process alone.
    """
    strategy.settle()
    strategy.take_changes()
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
            # Other rows hold the same.
            part = held.tensor if groups.rank_info.rank < strategy.shards else None
            whole = assembled(part, held.start, spec.numel, spec.dtype, groups)
            value = whole.view(spec.shape)
        else:
            value = share.held[full].tensor.view(share.specs[full].shape)
        if first:
            gathered[name] = _on_cpu(value)
    if not first:
        return {}
    entries = {e.name: gathered[e.first] for e in names.entries if e.kind == "parameter"}
    entries |= names.rest()
    return {entry.name: entries[entry.name] for entry in names.entries if entry.name in entries}
