"""Restores the state that a generation starts from: a snapshot in memory, or a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from elasticzero.checkpoint.format.dtypes import tensor_spec as stored_spec_of
from elasticzero.checkpoint.format.dtypes import torch_dtype
from elasticzero.checkpoint.format.names import step_directory
from elasticzero.checkpoint.io.reader import (
    Attempts,
    Checkpoint,
    attempt_once,
    open_snapshot,
    open_step,
)
from elasticzero.checkpoint.ram.store import ShardName, SnapshotStore
from elasticzero.checkpoint.storage.base import Readable
from elasticzero.checkpoint.storage.disk import DiskStorage
from elasticzero.checkpoint.storage.http import HttpStorage
from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.data.position import DataPosition
from elasticzero.data.tag_requests import with_tags
from elasticzero.errors import CheckpointMismatch
from elasticzero.ipc.assignment import Assignment, Source
from elasticzero.nested import tensor_names
from elasticzero.parallel import Strategy
from elasticzero.parallel.optimizers.state import by_parameter, lacks_state
from elasticzero.security.certificates import contexts_of
from elasticzero.serialization import decode
from elasticzero.snapshots.manifest_draft import stored
from elasticzero.snapshots.round_trip import check_modules, check_optimizers, check_shares
from elasticzero.spans import Span
from elasticzero.state.auxiliary import AuxiliaryState
from elasticzero.state.buffers import BufferCopy
from elasticzero.state.model import MODEL, NOT_SAVED, RNG, LoadTarget, RankState, Spec
from elasticzero.state.outer_state import OuterState
from elasticzero.state.rng import RngState, preserve_rng, seed_all
from elasticzero.text import list_text

OTHER_MODEL = ": give the model that wrote it, or start in another checkpoint directory"
"""End of the message about a checkpoint that does not fit the model."""

log = logging.getLogger(__name__)


def open_source(assignment: Assignment, attempt: Attempts = attempt_once) -> Checkpoint:
    """Opens the checkpoint or snapshot that the assignment names.

    Args:
        assignment: The assignment.
        attempt: Opens the shards of a snapshot.
    """
    resume = assignment.resume
    if resume.tier == "storage":
        assert assignment.checkpoint_dir is not None
        directory = open_directory(assignment.checkpoint_dir)
        return open_step(directory.step(step_directory(resume.step)))
    own_first = sorted(resume.sources, key=lambda source: source.node != assignment.node)
    places: dict[int, list[Readable]] = {}
    agents: dict[str, HttpStorage] = {}
    for source in own_first:
        places.setdefault(source.rank, []).append(_place(source, assignment, agents))
    return open_snapshot(places, resume.generation, resume.step, attempt)


def _place(source: Source, assignment: Assignment, agents: dict[str, HttpStorage]) -> Readable:
    """Returns where a shard is read from.

    All shards that a node has are read over the same connections.

    Args:
        source: One of the nodes that hold it.
        assignment: The worker's assignment.
        agents: The agents of other nodes so far, by address; one is added.
    """
    resume = assignment.resume
    generation, step = resume.generation, resume.step
    if source.node == assignment.node:
        world_size = len({source.rank for source in resume.sources})
        shard = ShardName(generation, step, source.rank, world_size)
        return DiskStorage(snapshots_of(assignment).path_of(shard), durable=False)
    if source.address not in agents:
        shown = assignment.tls
        scheme, tls = ("http", None) if shown is None else ("https", contexts_of(shown).client)
        agents[source.address] = HttpStorage(
            f"{scheme}://{source.address}/snapshots/{generation}/{step}",
            assignment.password,
            run=assignment.run,
            tls=tls,
            proofs=assignment.proofs,
        )
    return agents[source.address]


def snapshots_of(assignment: Assignment) -> SnapshotStore:
    """Returns the node's snapshots."""
    overflow = Path(assignment.overflow_root) if assignment.overflow_root else None
    return SnapshotStore(Path(assignment.snapshot_root), overflow)


def restore_state(
    checkpoint: Checkpoint,
    strategy: Strategy,
    auxiliary: AuxiliaryState,
    rank: int,
    *,
    name: str | None = None,
    outer: OuterState | None = None,
) -> DataPosition:
    """Loads a checkpoint into the training state.

    Args:
        checkpoint: The checkpoint or snapshot.
        strategy: The model and its optimizers as they are laid over the ranks.
        auxiliary: The small state: buffers, tracked objects, options and random generators.
        rank: This rank, whose random generators are restored, or seeded anew if none are stored.
        name: The strategy's name; None: any, so that the state may come from another one.
        outer: What islands have agreed on; None: it is left where it is.

    Returns:
        The position in the data.

    Raises:
        CheckpointMismatch: The checkpoint does not fit; nothing is changed then.
    """
    manifest = checkpoint.manifest
    tensors, json = manifest.layout.tensors, manifest.state
    where = f"the checkpoint of step {manifest.step}"
    _check_model(checkpoint, strategy.rank_state(), auxiliary)
    auxiliary.check(json, where)
    specs = {
        name: Spec(dtype=torch_dtype(spec.dtype), shape=spec.shape)
        for name, spec in tensors.items()
    }
    extra: dict[str, torch.Tensor] = {
        name: torch.empty(specs[name].shape, dtype=specs[name].dtype)
        for part in ("tracked", "groups", "modules")
        for name in tensor_names(json.get(part))
    }
    names_of = _stored_buffers(checkpoint, auxiliary)
    buffers = {
        name: torch.empty(specs[full].shape, dtype=specs[full].dtype, device=auxiliary.device)
        for name, full in names_of.items()
    }
    kinds = {n.split("/")[1]: n for n in tensors if n.startswith(RNG) and n.endswith(f"/{rank}")}
    generators = {
        kind: torch.empty(tensors[name].shape, dtype=torch.uint8) for kind, name in kinds.items()
    }
    whole = {names_of[name]: tensor for name, tensor in buffers.items()} | extra
    whole |= {kinds[kind]: tensor for kind, tensor in generators.items()}
    with strategy.filling(specs, json.get("optimizers", {})) as slots:
        targets = [LoadTarget(name, Span(0, t.numel()), t) for name, t in whole.items()]
        slots = list(slots)
        agreed = () if outer is None else outer.targets(specs, json)
        checkpoint.load([*slots, *targets, *agreed])
    for residuals in strategy.residual.loading(specs):
        checkpoint.load(residuals)
    if rank == 0 and strategy.residual.leaves_out(specs):
        log.warning(
            f"{where} has parts of gradients that were not sent yet, which are left out: --wire or "
            "the parameters that are trained have changed"
        )
    if rank == 0 and manifest.step > 0:
        warn_of_lacking_state(strategy, specs, json.get("optimizers", {}), where)
    share = strategy.rank_state()
    check_shares(slots, share, where, converts=manifest.strategy != name)
    check_optimizers(json.get("optimizers", {}), share.optimizers, where)
    aliases, unset = json.get("aliases", {}), tuple(json.get("unset", ()))
    auxiliary.buffers.put(BufferCopy(values=buffers, aliases=aliases, unset=unset))
    changed = (name for name, full in names_of.items() if full.startswith(NOT_SAVED))
    auxiliary.begin(frozenset(changed))
    auxiliary.apply(json, extra)
    if rank == 0 and (change := auxiliary.flags.change()):
        log.warning(f"at {where} the script had {change}; training goes on so")
    position = decode(DataPosition, json.get("position", {}), f"{where}: position")
    asked = with_tags(position.tagging, manifest.step, manifest.tags)
    position = replace(position, tagging=asked)
    auxiliary.restore_rng(
        RngState.from_tensors(generators)
        if generators
        else seeded_generators(rank, manifest.step, auxiliary.device)
    )
    extra_states = json.get("modules", {}), extra
    check_modules(buffers, extra_states, auxiliary.capture(manifest.step, position), where)
    return position


def warn_of_lacking_state(
    strategy: Strategy, stored: Mapping[str, Spec], small: Mapping[str, Any], where: str
) -> None:
    """Says in one line which parameters go on without the state that their optimizer keeps.

    Args:
        strategy: The model and its optimizers.
        stored: Shape and dtype of each stored tensor.
        small: What `RankState.optimizers` was; empty in a checkpoint that was imported.
        where: The checkpoint, for the line.
    """
    optimizers, index = strategy.optimizers, by_parameter(stored)
    unstepped, trees = small.get("unstepped", ()), small.get("state", {})
    names = list(optimizers.group_of)
    lacking = [
        name
        for name in names
        if name not in unstepped
        and lacks_state(index.get(name, {}), optimizers.schema(name), trees.get(name, {}))
    ]
    if lacking:
        kind = type(optimizers.group_of[lacking[0]].optimizer).__name__
        which = "any parameter" if len(lacking) == len(names) else list_text(map(repr, lacking), 3)
        log.warning(
            f"{where} has no state of the optimizer for {which}, of {len(names)}: {kind} begins "
            "anew there, as at step 0"
        )


def seeded_generators(rank: int, step: int, device: torch.device) -> RngState:
    """Returns the generators of a rank that the state of a step has none for.

    Args:
        rank: The rank.
        step: The step.
        device: Its device.
    """
    with preserve_rng(device):
        seed_all(0, rank, step)
        return RngState.capture(device)


def _stored_buffers(checkpoint: Checkpoint, auxiliary: AuxiliaryState) -> dict[str, str]:
    """Returns the full names of the stored buffers that the model has registered, by name."""
    tensors = checkpoint.manifest.layout.tensors
    return {
        name: full
        for name in auxiliary.buffers.names
        for full in (MODEL + name, NOT_SAVED + name)
        if full in tensors
    }


def _check_model(checkpoint: Checkpoint, share: RankState, auxiliary: AuxiliaryState) -> None:
    expected = {n: stored(spec) for n, spec in share.specs.items() if n.startswith(MODEL)}
    tensors, json = checkpoint.manifest.layout.tensors, checkpoint.manifest.state
    elsewhere = {MODEL + name for name in (*json.get("unset", ()), *json.get("aliases", ()))}
    for name, buffer in auxiliary.buffers.saved().items():
        if (full := MODEL + name) not in elsewhere:  # it takes whatever shape and dtype is stored
            expected[full] = tensors.get(full) or stored_spec_of(buffer)
    try:
        checkpoint.check(expected, allow_more=True)
    except CheckpointMismatch as error:
        raise CheckpointMismatch(f"{error}{OTHER_MODEL}") from None
    registered = expected.keys() | set(_stored_buffers(checkpoint, auxiliary).values())
    unknown = [n for n in tensors if n.startswith((MODEL, NOT_SAVED)) and n not in registered]
    if unknown:
        raise CheckpointMismatch(
            f"the checkpoint of step {checkpoint.manifest.step} does not fit the model, which has "
            f"no {', '.join(name.partition('/')[2] for name in unknown[:5])}"
            + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
            + OTHER_MODEL
        )
