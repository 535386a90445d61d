"""`checkpoint.save` and `load` by hand: any training script, without an agent."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from elasticzero.checkpoint import commit
from elasticzero.checkpoint.manifest import Group, Layout, Manifest, step_directory
from elasticzero.checkpoint.reader import Target, local_part, open_step, spec_of, torch_dtype
from elasticzero.checkpoint.storage import DiskStorage, local_path
from elasticzero.checkpoint.writer import DEFAULT_WAIT_S, Piece, Terms, write_checkpoint
from elasticzero.errors import RetryError, StorageError, UserError
from elasticzero.spans import Rule, Span


def save(
    path: str | os.PathLike[str],
    tensors: Mapping[str, torch.Tensor],
    *,
    step: int = 0,
    state: Mapping[str, Any] | None = None,
    wait_s: float = DEFAULT_WAIT_S,
) -> Path:
    """Write a checkpoint by hand, without an agent; returns the step's directory.

    `path`: the checkpoint directory; the step gets a directory in it. `tensors`: by name. Where
    torch.distributed is initialised every rank calls this: plain tensors must be equal on all, and
    each rank writes its share of them; of a DTensor each writes its own rows. `state`: JSON, the
    same on all ranks. Returns on every rank once the checkpoint is committed. Raises `UserError` if
    the step stands there already, or for what a checkpoint cannot hold; a save that fails leaves
    nothing behind.
    """
    _check_savable(tensors, step, state)
    directory = local_path(path)
    together = dist.is_available() and dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
    layout = _layout(tensors, world)
    storage = DiskStorage(directory / step_directory(step))
    token = _from_rank_0(0 if commit.stands(storage) else secrets.randbits(62) | 1)
    if not token:
        raise UserError(f"{storage.where} holds a checkpoint already: save under another step")
    draft = Manifest(
        step=step,
        generation=0,
        token=f"{token:016x}",
        strategy="saved",
        layout=layout,
        state=dict(state or {}),
    )
    terms = Terms(agree=_greatest, wait_s=wait_s)
    try:
        written = write_checkpoint(directory, draft, rank, _pieces(layout, rank, tensors), terms)
    except RetryError as error:
        raise StorageError(str(error)) from None
    if not _from_rank_0(int(written.committed)):
        raise StorageError(f"{storage.where}: another save of this step came first")
    return storage.path


def load(
    path: str | os.PathLike[str], into: Mapping[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Read a checkpoint's tensors.

    `path`: a checkpoint directory (its newest good step) or one step's directory. `into`: fill
    these in place (a DTensor: this rank's part of it) instead of making new ones; its names must be
    in the checkpoint, which may hold more. Returns the tensors by name. Needs no process group.
    """
    checkpoint = open_step(DiskStorage(commit.resolve(local_path(path))))
    held = checkpoint.manifest.layout.tensors
    if into is None:
        whole = {
            name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
            for name, spec in held.items()
        }
        checkpoint.load(Target(n, Span(0, t.numel()), t) for n, t in whole.items())
        return whole
    wanted = {name: spec_of(tensor) for name, tensor in into.items()}
    checkpoint.check(wanted, allow_more=True)
    checkpoint.load(Target(n, *local_part(t)) for n, t in into.items())
    return dict(into)


def load_state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The `state` that the checkpoint was saved with; `path` as in `load`."""
    return dict(commit.read_manifest(DiskStorage(commit.resolve(local_path(path)))).state)


def _check_savable(tensors: Mapping[str, torch.Tensor], step: int, state: Any) -> None:
    """Raise `UserError` for what a checkpoint cannot hold, before anything is written."""
    if not tensors:
        raise UserError("checkpoint.save was given no tensors: there is nothing to save")
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise UserError(
                f"checkpoint.save: {name!r} has the type {type(tensor).__name__}; it takes tensors "
                "by name, and what is no tensor goes into `state`"
            )
    if not isinstance(step, int) or step < 0:
        raise UserError(f"checkpoint.save: step is {step!r}; it must be a whole number from 0 on")
    try:
        json.dumps(dict(state or {}))
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"checkpoint.save: `state` is not JSON: {error}") from None


def _layout(tensors: Mapping[str, torch.Tensor], world_size: int) -> Layout:
    """DTensors by their own rows, everything else dealt evenly, one group for each dtype."""
    specs = {name: spec_of(tensor) for name, tensor in tensors.items()}
    by_kind: dict[tuple[Rule, str], list[str]] = {}
    for name, tensor in tensors.items():
        mesh: Any = getattr(tensor, "device_mesh", None)
        if mesh is not None and mesh.mesh.flatten().tolist() != list(range(world_size)):
            raise UserError(f"{name} lies on {mesh}, which is not all ranks in their order")
        placements: Any = getattr(tensor, "placements", None)
        by_rows = placements is not None and placements[0].is_shard()
        kind: tuple[Rule, str] = ("fsdp_rows", "") if by_rows else ("even", specs[name].dtype)
        by_kind.setdefault(kind, []).append(name)
    groups = tuple(Group(rule, tuple(names)) for (rule, _), names in by_kind.items())
    return Layout(world_size=world_size, tensors=specs, groups=groups)


def _pieces(layout: Layout, rank: int, tensors: Mapping[str, torch.Tensor]) -> list[Piece]:
    pieces = []
    for name, span in layout.spans(rank).items():
        held, local = local_part(tensors[name])
        flat = local.detach().reshape(-1)
        pieces.append(Piece(name, flat[span.start - held.start : span.stop - held.start]))
    return pieces


def _from_rank_0(value: int) -> int:
    """Rank 0's value, on every rank; the value itself where there is no process group."""
    return _exchanged(value, lambda tensor: dist.broadcast(tensor, src=0))


def _greatest(value: int) -> int:
    """The greatest value of all ranks; the value itself where there is no process group."""
    return _exchanged(value, lambda tensor: dist.all_reduce(tensor, dist.ReduceOp.MAX))


def _exchanged(value: int, exchange: Callable[[torch.Tensor], object]) -> int:
    if not (dist.is_available() and dist.is_initialized()):
        return value
    device = "cuda" if "cpu:" not in dist.get_backend_config() else "cpu"
    tensor = torch.tensor([value], dtype=torch.int64, device=device)
    exchange(tensor)
    return int(tensor.item())
