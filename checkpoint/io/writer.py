"""Writes tensors as a checkpoint; all ranks commit it together or none does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch

from elasticzero.checkpoint.format.dtypes import byte_view, torch_dtype
from elasticzero.checkpoint.format.layout import TensorSpec
from elasticzero.checkpoint.format.manifest import Manifest, ShardFile
from elasticzero.checkpoint.format.names import step_directory
from elasticzero.checkpoint.format.shards import shard_specs, write_shard
from elasticzero.checkpoint.steps import catalog, commit
from elasticzero.checkpoint.storage.base import Bytes, Directory, Storage, explain
from elasticzero.errors import ElasticZeroError, RetryError, StorageError, one_line

WRITE_STAGING_BYTES = 32 << 20
"""Size of the one host buffer through which a save takes tensors that are not plain host memory."""
DEFAULT_WAIT_S = 600.0
_GO, _STANDS, _REPLACE, _FAILED = range(4)
"""What ranks tell each other of a save; the greatest counts."""


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """What this rank holds of one tensor."""

    name: str
    data: torch.Tensor
    """The elements of the layout's span in row-major order; any shape, any device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteResult:
    """What one rank wrote."""

    bytes: int
    seconds: float
    committed: bool
    """This rank created the manifest. False on all others, and where the step stood already."""


def _own(number: int) -> int:
    return number


def _own_words(text: str) -> str:
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCoordination:
    """How the ranks save together."""

    tell: Callable[[str], str] = _own_words
    """Gives every rank the words of the first rank that calls it with any, together, and names that
    rank. Called when a rank has failed."""

    agree: Callable[[int], int] = _own
    """Gives every rank the greatest of the numbers that all ranks call it with, together. By
    default ranks do not talk: rank 0 waits for the others' files, and learns of no failure."""
    wait_s: float = DEFAULT_WAIT_S
    """How long rank 0 waits for the others' files to appear."""
    replacing: bool = False
    """On any rank: the step that stands is known to be damaged, and is to be replaced."""


def write_checkpoint(
    directory: Directory,
    draft: Manifest,
    rank: int | None,
    pieces: Iterable[TensorPiece],
    coordination: SaveCoordination | None = None,
) -> WriteResult:
    """Write this rank's part of a checkpoint; rank 0 then commits it.

    `draft`: the same on every rank, with `files` left empty. `rank`: in
    `draft.layout`; None: this process writes nothing, and only takes part in what the ranks agree
    on. `pieces`: one for each of `draft.layout.spans(rank)`, in any order. A step that stands
    already is left alone (bytes 0).

    A save that fails on any rank fails on all and leaves nothing behind. A rank that failed raises
    its own error, any other a `RetryError` with the words of `coordination.tell`. A save that fails
    because another one of the same step came first is not committed, as if that one had been there
    before.
    """
    coordination = coordination or SaveCoordination()
    started = time.monotonic()
    storage = directory.step(step_directory(draft.step))
    file = ShardFile("", 0, None)

    def look() -> int:
        if coordination.replacing:
            return _REPLACE
        return _STANDS if commit.is_good(storage) else _GO

    def write() -> int:
        nonlocal file
        if rank is None:
            return _GO
        commit.prepare(directory, draft.step)
        file = write_shard(storage, draft, rank, shard_bytes(draft, rank, pieces))
        return _GO

    def finish() -> int:
        again = verdict == _REPLACE
        if rank == 0 and commit.commit(storage, draft, wait_s=coordination.wait_s, replacing=again):
            return _GO
        return _STANDS if rank == 0 else _GO

    def came_first() -> bool:
        if verdict == _REPLACE:
            return False
        with suppress(ElasticZeroError, OSError):
            return catalog.read_manifest(storage).token != draft.token and commit.is_good(storage)
        return False

    verdict = _together(storage, coordination, look)
    if verdict == _STANDS:
        return WriteResult(bytes=0, seconds=time.monotonic() - started, committed=False)
    try:
        late = _together(storage, coordination, write, came_first) == _STANDS
        late = late or _together(storage, coordination, finish, came_first) == _STANDS
    except BaseException:
        if rank is not None:
            commit.discard(directory, draft, rank)
        raise
    if late and rank is not None:
        commit.discard(directory, draft, rank)
    committed = rank == 0 and not late
    return WriteResult(bytes=file.bytes, seconds=time.monotonic() - started, committed=committed)


def _together(
    storage: Storage,
    coordination: SaveCoordination,
    work: Callable[[], int],
    came_first: Callable[[], bool] = lambda: False,
) -> int:
    """Do `work` on every rank; the greatest result. Where it fails on one it fails on all, unless
    it fails because another save came first: then the step stands."""
    result = _FAILED
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:  # noqa: BLE001 - raised below, once all ranks know
        failure = error
        if isinstance(error, (ElasticZeroError, OSError)) and came_first():
            result, failure = _STANDS, None
    agreed = coordination.agree(result)
    if agreed != _FAILED:
        return agreed
    said = coordination.tell("" if failure is None else one_line(failure))
    if isinstance(failure, OSError):
        raise StorageError(f"{storage.where}: {explain(failure)}") from failure
    raise failure or RetryError(f"{storage.where} is not saved: {said}")


def ordered_pieces(
    draft: Manifest, rank: int, pieces: Iterable[TensorPiece]
) -> list[tuple[TensorSpec, torch.Tensor]]:
    """A rank's pieces in the order of its shard file; `ValueError` if they are not the layout's."""
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
    return [(spec, by_name[name].detach()) for name, spec in specs.items()]


def shard_bytes(draft: Manifest, rank: int, pieces: Iterable[TensorPiece]) -> Iterator[Bytes]:
    """The bytes of a rank's pieces, in the order of its shard file."""
    return _stream(data for _, data in ordered_pieces(draft, rank, pieces))


def _stream(tensors: Iterator[torch.Tensor]) -> Iterator[Bytes]:
    staging: torch.Tensor | None = None
    for lazy in tensors:
        tensor = lazy.resolve_conj().resolve_neg()
        if tensor.device.type == "cpu":
            yield byte_view(tensor.contiguous())
            continue
        if staging is None:
            staging = torch.empty(WRITE_STAGING_BYTES, dtype=torch.uint8)
        flat = tensor.contiguous().reshape(-1).view(torch.uint8)
        for start in range(0, flat.numel(), WRITE_STAGING_BYTES):
            part = flat[start : start + WRITE_STAGING_BYTES]
            staged = staging[: part.numel()]
            staged.copy_(part)
            yield byte_view(staged)
