"""Tensors to shards: a checkpoint on storage, or a snapshot in shared memory."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from elasticzero.checkpoint import commit
from elasticzero.checkpoint.manifest import (
    Group,
    Layout,
    Manifest,
    ShardFile,
    snapshot_manifest_name,
    step_directory,
    to_json,
)
from elasticzero.checkpoint.reader import byte_view, local_part, spec_of, torch_dtype
from elasticzero.checkpoint.shards import shard_specs, write_shard
from elasticzero.checkpoint.snapshot import SnapshotStore
from elasticzero.checkpoint.storage import Bytes, DiskStorage, explain, local_path
from elasticzero.errors import ElasticZeroError, RetryError, StorageError, UserError
from elasticzero.spans import Rule

STAGING_BYTES = 32 << 20
"""Size of the one host buffer through which a save takes tensors that are not plain host memory."""
DEFAULT_WAIT_S = 600.0
_GO, _STANDS, _REPLACE, _FAILED = range(4)
"""What ranks tell each other of a save; the greatest counts."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What this rank holds of one tensor."""

    name: str
    data: torch.Tensor
    """The elements of the layout's span in row-major order; any shape, any device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What one rank wrote."""

    bytes: int
    seconds: float
    committed: bool
    """This rank created the manifest. False on all others, and where the step stood already."""


def _own(number: int) -> int:
    return number


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How the ranks save together."""

    agree: Callable[[int], int] = _own
    """Gives every rank the greatest of the numbers that all ranks call it with, together. By
    default ranks do not talk: rank 0 waits for the others' files, and learns of no failure."""
    wait_s: float = DEFAULT_WAIT_S
    """How long rank 0 waits for the others' files to appear."""
    replacing: bool = False
    """On any rank: the step that stands is known to be damaged, and is to be replaced."""


def write_checkpoint(
    directory: Path,
    draft: Manifest,
    rank: int,
    pieces: Iterable[Piece],
    terms: Terms | None = None,
) -> Written:
    """Write this rank's part of a checkpoint; rank 0 then commits it.

    `draft`: the same on every rank, with `files` left empty. `pieces`: one for each of
    `draft.layout.spans(rank)`, in any order. A step that stands already is left alone (bytes 0).
    A save that fails leaves nothing behind; it raises `StorageError`, and `RetryError` where only
    another rank failed.
    """
    terms = terms or Terms()
    started = time.monotonic()
    storage = DiskStorage(directory / step_directory(draft.step))
    file = ShardFile("", 0, None)

    def look() -> int:
        if terms.replacing:
            return _REPLACE
        return _STANDS if commit.stands(storage) else _GO

    def write() -> int:
        nonlocal file
        commit.prepare(directory, draft.step)
        file = write_shard(storage, draft, rank, _chunks(draft, rank, pieces))
        return _GO

    def finish() -> int:
        again = verdict == _REPLACE
        if rank == 0 and commit.commit(storage, draft, wait_s=terms.wait_s, replacing=again):
            return _GO
        return _STANDS if rank == 0 else _GO

    verdict = _together(storage, terms, look)
    if verdict == _STANDS:
        return Written(bytes=0, seconds=time.monotonic() - started, committed=False)
    try:
        _together(storage, terms, write)
        came_first = _together(storage, terms, finish) == _STANDS
    except ElasticZeroError:
        commit.discard(storage, draft, rank)
        raise
    if came_first:
        commit.discard(storage, draft, rank)
    committed = rank == 0 and not came_first
    return Written(bytes=file.bytes, seconds=time.monotonic() - started, committed=committed)


def _together(storage: DiskStorage, terms: Terms, work: Callable[[], int]) -> int:
    """Do `work` on every rank; the greatest result. Where it fails on one it fails on all."""
    result = _FAILED
    failure: ElasticZeroError | None = None
    try:
        result = work()
    except OSError as error:
        failure = StorageError(f"{storage.where}: {explain(error)}")
    except ElasticZeroError as error:
        failure = error
    agreed = terms.agree(result)
    if failure is not None:
        raise failure
    if agreed == _FAILED:
        raise RetryError(f"{storage.where}: another rank could not save; see its error")
    return agreed


def write_snapshot(root: Path, draft: Manifest, rank: int, pieces: Iterable[Piece]) -> Written:
    """Write this rank's part of a snapshot in shared memory, with a manifest of its own.

    `root`: the node's snapshot root (`SnapshotStore`). The rank's manifest comes last, so that its
    existence says that this rank's part is whole.
    """
    started = time.monotonic()
    path = SnapshotStore(root).path(draft.generation, draft.step)
    path.mkdir(parents=True, exist_ok=True)
    storage = DiskStorage(path, durable=False)
    name = snapshot_manifest_name(rank, draft.layout.world_size)
    storage.remove(name)
    own = write_shard(storage, draft, rank, _chunks(draft, rank, pieces))
    files = tuple(
        own if r == rank else ShardFile(draft.file_name(r), 0, None)
        for r in range(draft.layout.world_size)
    )
    storage.write(name, [to_json(replace(draft, files=files))])
    return Written(bytes=own.bytes, seconds=time.monotonic() - started, committed=True)


def _chunks(draft: Manifest, rank: int, pieces: Iterable[Piece]) -> Iterator[Bytes]:
    """The bytes of a rank's pieces, in the order of its shard file."""
    by_name = {piece.name: piece.data for piece in pieces}
    specs = shard_specs(draft, rank)
    if by_name.keys() != specs.keys():
        wrong = sorted(by_name.keys() ^ specs.keys())
        raise ValueError(f"rank {rank}: its pieces and its layout differ in {wrong[:5]}")
    for name, spec in specs.items():
        data = by_name[name]
        if data.numel() != spec.numel or data.dtype != torch_dtype(spec.dtype):
            raise ValueError(
                f"{name}: {data.numel()} elements of {data.dtype} were given for {spec}"
            )
    return _stream(by_name[name].detach() for name in specs)


def _stream(tensors: Iterator[torch.Tensor]) -> Iterator[Bytes]:
    staging: torch.Tensor | None = None
    for tensor in tensors:
        if tensor.device.type == "cpu":
            yield byte_view(tensor.contiguous())
            continue
        if staging is None:
            staging = torch.empty(STAGING_BYTES, dtype=torch.uint8)
        flat = tensor.contiguous().reshape(-1).view(torch.uint8)
        for start in range(0, flat.numel(), STAGING_BYTES):
            part = flat[start : start + STAGING_BYTES]
            staged = staging[: part.numel()]
            staged.copy_(part)
            yield byte_view(staged)


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
