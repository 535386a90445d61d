"""Chooses a strategy for `--strategy auto`: the first whose state fits the memory of every rank."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping

import torch

from elasticzero.comm.process_group import ProcessGroups
from elasticzero.errors import UserError
from elasticzero.ipc.assignment import Assignment
from elasticzero.memory_estimate import (
    FLAT_BUCKET_BYTES,
    LineUp,
    ModelSize,
    StateSize,
    first_that_fits,
    rank_memory,
    room_for_state,
    snapshot_bytes,
)
from elasticzero.parallel.base import OptimizerFactory
from elasticzero.parallel.optimizers.groups import Dealt, MadeOptimizers, open_optimizers
from elasticzero.parallel.strategies import check_options
from elasticzero.processes import ram
from elasticzero.spans import STRATEGIES
from elasticzero.state.model import NamedModel
from elasticzero.text import size_text

log = logging.getLogger(__name__)

DEALT: Mapping[str, Dealt] = {
    "ddp": "nothing",
    "zero1": "elements",
    "zero2": "elements",
    "zero3": "rows",
}
"""Says what each strategy deals to the ranks, for their optimizers to work on."""


def choose_strategy(
    named: NamedModel,
    factory: OptimizerFactory,
    device: torch.device,
    assignment: Assignment,
    groups: ProcessGroups | None,
    check: Callable[[str], None],
) -> str:
    """Returns the strategy that all ranks are to use; rank 0 prints why. All ranks call this.

    Args:
        named: The model's parameters, on their device already, or with their shapes there.
        factory: The script's function; it is called once more than otherwise, to see what the
            optimizer keeps.
        device: The rank's device, whose memory counts.
        assignment: This rank's place and settings.
        groups: The process groups; None for one process alone.
        check: Raises `UserError` for a strategy that refuses the model.

    Raises:
        UserError: Every strategy refuses the model or the optimizer.
    """
    cuda = device.type == "cuda"
    line_up = line_up_of(assignment, direct=not cuda)
    size, made = model_size(named), factory(list(named.parameters.values()))
    kept = state_size(named, made)
    held = sum(_bytes_held(parameter) for parameter in named.parameters.values())
    memory = torch_bytes(device) if cuda else held + ram().available_bytes // line_up.ranks_per_node
    room = room_for_state(memory, None, cuda=cuda)
    refused = refusals(named, made, assignment, check)
    if len(refused) == len(STRATEGIES):
        raise next(iter(refused.values()))
    needs = {}
    for name in STRATEGIES:
        if name not in refused:
            needs[name] = rank_memory(name, size, kept, line_up).total
            if not cuda:  # snapshots lie in the same memory
                snapshots = snapshot_bytes(name, size, kept, line_up)
                needs[name] += snapshots // line_up.ranks_per_node
    if groups is not None:
        room = -groups.control_tree.allreduce_max(-room)
    chosen = first_that_fits(needs, room)
    if assignment.rank == 0:
        log.info(choice_text(chosen, needs, room, cuda=cuda))
    return chosen or list(needs)[-1]


def refusals(
    named: NamedModel,
    made: MadeOptimizers,
    assignment: Assignment,
    check: Callable[[str], None],
) -> dict[str, UserError]:
    """Returns the error of each strategy with which `session.prepare` would end in one.

    Args:
        named: The model's parameters.
        made: The optimizers that the script's function has made.
        assignment: This rank's settings, of which `deterministic` counts.
        check: Raises `UserError` for a strategy that refuses the model.
    """
    errors: dict[str, UserError] = {}
    for name in STRATEGIES:
        try:
            check(name)
            open_optimizers(made, named, DEALT[name])
            check_options(
                name,
                assignment,
                mirrored=assignment.mirrored_by is not None,
                by_node=assignment.shard == "node",
            )
        except UserError as error:
            errors[name] = error
    return errors


def _bytes_held(tensor: torch.Tensor) -> int:
    """Returns the bytes that a tensor has; one that only shows its shape has those of a number."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def choice_text(chosen: str | None, needs: dict[str, int], room: int, *, cuda: bool) -> str:
    """Returns a sentence that says which strategy is taken and why.

    Args:
        chosen: The first that fits; None: none does.
        needs: Bytes of a rank by strategy, of those that take the model and its optimizer.
        room: Bytes that each rank has for it.
        cuda: Whether the memory is a GPU's, which holds no snapshots.
    """
    taken = chosen or list(needs)[-1]
    smaller = list(needs)[: list(needs).index(taken)]
    too_large = ", ".join(f"{name} {size_text(needs[name])}" for name in smaller)
    what = "training state" if cuda else "training state and snapshots"
    text = (
        f"--strategy auto takes {taken}, which needs {size_text(needs[taken])} a rank for {what}; "
        f"the rank with the least memory has {size_text(room)}"
    )
    if chosen is None:
        return f"{text}, so that no strategy fits (rule of thumb; {too_large})"
    return f"{text} ({too_large} would not fit)" if too_large else text


def line_up_of(assignment: Assignment, *, direct: bool) -> LineUp:
    """Returns the ranks of a generation; nodes have the same number of workers."""
    local, size_bytes = assignment.local_world_size, assignment.bucket_bytes
    return LineUp(
        nodes=-(-assignment.world_size // local),
        ranks_per_node=local,
        shard=assignment.shard,
        direct=direct,
        bucket_bytes=size_bytes if isinstance(size_bytes, int) else FLAT_BUCKET_BYTES,
        mirrored=assignment.mirrored_by is not None,  # alike on all ranks, which must agree
        sent_bytes=assignment.wire.sent_bytes,
    )


def model_size(named: NamedModel) -> ModelSize:
    """Returns the size of a model; its layers are taken as the parts that the names begin with."""
    trained = {n: p for n, p in named.parameters.items() if p.requires_grad}
    frozen = [p for p in named.parameters.values() if not p.requires_grad]
    bytes_trained = sum(p.numel() * p.element_size() for p in trained.values())
    elements = sum(p.numel() for p in trained.values())
    layers: Counter[str] = Counter()
    for name, parameter in trained.items():
        layers[_layer(name)] += parameter.numel()
    outer = layers.pop("", 0)
    return ModelSize(
        elements=elements,
        element_bytes=-(-bytes_trained // max(1, elements)),
        largest=max((p.numel() for p in trained.values()), default=0),
        layer=max(layers.values(), default=0),
        outer=outer,
        frozen_bytes=sum(p.numel() * p.element_size() for p in frozen),
    )


def _layer(name: str) -> str:
    """Returns the name up to the first number in it, which is the place in a list of modules."""
    parts = name.split(".")
    at = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
    return "" if at is None else ".".join(parts[: at + 1])


def state_size(named: NamedModel, made: MadeOptimizers) -> StateSize:
    """Returns what the optimizers keep for each element; of what they pack, the mean."""
    opened = open_optimizers(made, named, "nothing")
    schemas = [schema for group in opened.groups for schema in group.nature.schemas.values()]
    kinds = [[key.kind for key in schema.values()] for schema in schemas]
    numbers = max((kind.count("elementwise") for kind in kinds), default=0)
    if not any(group.nature.packs for group in opened.groups):
        return StateSize(numbers=numbers)
    elements, kept_bytes = 0, 0
    for name, group in opened.group_of.items():
        shape = group.specs[name].shape
        elements += math.prod(shape)
        for entry in group.schema(name).values():
            if entry.kind in ("elementwise", "inner"):
                kept_bytes += math.prod(entry.shape(shape)) * entry.dtype.itemsize
    return StateSize(packed_bytes=kept_bytes / max(1, elements))


def torch_bytes(device: torch.device) -> int:
    """Returns the memory of a GPU that this process has or can take."""
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
