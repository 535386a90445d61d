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
from elasticzero.checkpoint.storage.base import Bytes, Directory, explain
from elasticzero.errors import ElasticZeroError, RetryError, StorageError, one_line

WRITE_STAGING_BYTES = 32 << 20
"""Size of the one host buffer through which a save takes tensors that are not plain host memory."""
DEFAULT_WAIT_S = 600.0
_GO, _COMMITTED, _REPLACE, _FAILED = range(4)
"""The states of a save that ranks report; the greatest value of all ranks counts."""


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """Holds this rank's elements of one tensor."""

    name: str
    data: torch.Tensor
    """The elements of the layout's span in row-major order; any shape, any device."""
    frozen: bool = False
    """True if they are likely to be those of the last capture too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteResult:
    """Describes what one rank wrote."""

    bytes: int
    seconds: float
    committed: bool
    """True if this rank created the manifest: False on all other ranks, and if the step existed
    already."""


def _unchanged(number: int) -> int:
    return number


def _own_error(text: str) -> str:
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCoordination:
    """Supplies the communication by which the ranks save together."""

    share_error: Callable[[str], str] = _own_error
    """Returns on every rank the text of the first rank that gives one, with that rank's number. All
    ranks call it together after one of them has failed."""

    allreduce_max: Callable[[int], int] = _unchanged
    """Returns on every rank the greatest of the numbers that all ranks give; they call it together.
    By default the ranks do not communicate: rank 0 waits for the others' files, and learns of no
    failure."""
    wait_s: float = DEFAULT_WAIT_S
    """Time in seconds that rank 0 waits for the others' files to appear."""
    replacing: bool = False
    """True on any rank: the committed step is known to be damaged, and is to be replaced."""


def write_checkpoint(
    directory: Directory,
    draft: Manifest,
    rank: int | None,
    pieces: Iterable[TensorPiece],
    coordination: SaveCoordination | None = None,
) -> WriteResult:
    """Writes this rank's part of a checkpoint; rank 0 then commits it.

    A save that fails on any rank fails on all and leaves nothing behind. A rank that failed raises
    its own error. A save is not committed if another save of the same step came first.

    Args:
        directory: The checkpoint directory.
        draft: The manifest without `files`, the same on every rank.
        rank: This process's rank in `draft.layout`; None: it writes nothing, and only takes part in
            the ranks' decisions.
        pieces: One for each of `draft.layout.spans(rank)`, in any order.
        coordination: How the ranks communicate; None: there is one rank.

    Returns:
        What this rank wrote: 0 bytes if the step was committed already.

    Raises:
        RetryError: Another rank failed; the text is that of `coordination.share_error`.
    """
    started = time.monotonic()
    save = _Save(directory, draft, rank, coordination or SaveCoordination())
    if save.begin() == _COMMITTED:
        return WriteResult(bytes=0, seconds=time.monotonic() - started, committed=False)
    try:
        late = save.write(pieces) == _COMMITTED or save.commit() == _COMMITTED
    except BaseException:
        save.discard()
        raise
    if late:
        save.discard()
    committed = rank == 0 and not late
    return WriteResult(
        bytes=save.file.bytes, seconds=time.monotonic() - started, committed=committed
    )


class _Save:
    """Carries out one rank's part of a save, in three steps that all ranks take together.

    Each step returns the greatest of the ranks' results. A step that fails on one rank fails on
    all, unless it fails because another save of this checkpoint step came first.
    """

    def __init__(
        self,
        directory: Directory,
        draft: Manifest,
        rank: int | None,
        coordination: SaveCoordination,
    ) -> None:
        self.file = ShardFile("", 0, None)
        self._directory = directory
        self._draft = draft
        self._rank = rank
        self._coordination = coordination
        self._storage = directory.step(step_directory(draft.step))
        self._replacing = False

    def begin(self) -> int:
        """Checks whether the step is committed already, or is to be replaced."""

        def check() -> int:
            if self._coordination.replacing:
                return _REPLACE
            return _COMMITTED if commit.is_good(self._storage) else _GO

        verdict = self._run_on_all_ranks(check, lambda: False)
        self._replacing = verdict == _REPLACE
        return verdict

    def write(self, pieces: Iterable[TensorPiece]) -> int:
        """Writes this rank's shard."""

        def write() -> int:
            if self._rank is None:
                return _GO
            commit.prepare(self._directory, self._draft.step)
            data = shard_bytes(self._draft, self._rank, pieces)
            self.file = write_shard(self._storage, self._draft, self._rank, data)
            return _GO

        return self._run_on_all_ranks(write, self._came_first)

    def commit(self) -> int:
        """Commits the step on rank 0, once every rank's shard exists."""

        def finish() -> int:
            if self._rank != 0:
                return _GO
            wait_s, again = self._coordination.wait_s, self._replacing
            done = commit.commit(self._storage, self._draft, wait_s=wait_s, replacing=again)
            return _GO if done else _COMMITTED

        return self._run_on_all_ranks(finish, self._came_first)

    def discard(self) -> None:
        """Removes the files that this rank has written."""
        if self._rank is not None:
            commit.discard(self._directory, self._draft, [self._rank])

    def _came_first(self) -> bool:
        """Returns whether another save of the step was committed before this one."""
        if self._replacing:
            return False
        with suppress(ElasticZeroError, OSError):
            other = catalog.read_manifest(self._storage).token != self._draft.token
            return other and commit.is_good(self._storage)
        return False

    def _run_on_all_ranks(self, work: Callable[[], int], came_first: Callable[[], bool]) -> int:
        result = _FAILED
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - raised below, once all ranks know
            failure = error
            if isinstance(error, (ElasticZeroError, OSError)) and came_first():
                result, failure = _COMMITTED, None
        agreed = self._coordination.allreduce_max(result)
        if agreed != _FAILED:
            return agreed
        reason = self._coordination.share_error("" if failure is None else one_line(failure))
        if isinstance(failure, OSError):
            raise StorageError(f"{self._storage.where}: {explain(failure)}") from failure
        raise failure or RetryError(f"{self._storage.where} is not saved: {reason}")


def ordered_pieces(
    draft: Manifest, rank: int, pieces: Iterable[TensorPiece]
) -> list[tuple[TensorSpec, torch.Tensor]]:
    """Returns a rank's pieces in the order of its shard file.

    Args:
        draft: The manifest without `files`, the same on every rank.
        rank: The rank whose pieces these are.
        pieces: One for each of `draft.layout.spans(rank)`, in any order.

    Raises:
        ValueError: The pieces do not fit the layout.
    """
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
    """Yields the bytes of a rank's pieces, in the order of its shard file.

    Args:
        draft: The manifest without `files`, the same on every rank.
        rank: The rank whose pieces these are.
        pieces: One for each of `draft.layout.spans(rank)`, in any order.

    Raises:
        ValueError: The pieces do not fit the layout.
    """
    return _stream(data for _, data in ordered_pieces(draft, rank, pieces))


def _stream(tensors: Iterator[torch.Tensor]) -> Iterator[Bytes]:
    staging: torch.Tensor | None = None
    for lazy in tensors:
        tensor = lazy.resolve_conj().resolve_neg() if lazy.is_conj() or lazy.is_neg() else lazy
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
