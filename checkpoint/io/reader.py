"""Reads tensors from a checkpoint, or from a snapshot in the memory of this or another node."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar

import torch

from elasticzero.checkpoint.format.dtypes import torch_dtype
from elasticzero.checkpoint.format.layout import TensorSpec
from elasticzero.checkpoint.format.manifest import Manifest
from elasticzero.checkpoint.format.names import snapshot_manifest_name
from elasticzero.checkpoint.format.plan import plan
from elasticzero.checkpoint.format.shards import ShardReader, open_shard
from elasticzero.checkpoint.io.read_parts import (
    READ_PART_BYTES,
    Fill,
    ReaderState,
    ReadPart,
    fill_all,
    split_reads,
)
from elasticzero.checkpoint.io.read_pool import MAX_THREADS, run_adaptive
from elasticzero.checkpoint.steps import catalog
from elasticzero.checkpoint.storage.base import Readable
from elasticzero.errors import CheckpointDamaged, CheckpointMismatch, StorageError
from elasticzero.spans import Span
from elasticzero.state.model import LoadTarget

_OPEN_SHARDS = 16
"""Maximum number of shards that are open at once."""
T = TypeVar("T")


class Attempts(Protocol):
    """Calls a function that opens something, again where it raises an error that may pass."""

    def __call__(self, open_it: Callable[[], T], /) -> T:
        """Returns what the function does."""
        ...


def attempt_once(open_it: Callable[[], T]) -> T:
    """Returns what the function does, or raises its error."""
    return open_it()


class Checkpoint:
    """Reads an open checkpoint or snapshot; each shard is opened when it is first needed."""

    def __init__(
        self, manifest: Manifest, shards: Mapping[int, Sequence[Callable[[], ShardReader]]]
    ) -> None:
        """Takes, for each rank that wrote, the functions that may open its shard, best first."""
        self.manifest = manifest
        self.bytes_read = 0
        self._sources = {rank: list(ways) for rank, ways in shards.items()}
        self._open: dict[int, ShardReader] = {}
        self._lock = threading.Lock()

    def check(self, expected: Mapping[str, TensorSpec], *, allow_more: bool = False) -> None:
        """Raises `CheckpointMismatch` if the checkpoint's tensors are not the expected ones.

        The error names the first few tensors that are missing, not expected (unless `allow_more`),
        or of another dtype or shape.
        """
        held = self.manifest.layout.tensors
        wrong = [f"{name} is missing" for name in expected if name not in held]
        if not allow_more:
            wrong += [f"{name} is not expected" for name in held if name not in expected]
        wrong += [
            f"{name} is {held[name]}, and {spec} is expected"
            for name, spec in expected.items()
            if name in held and held[name] != spec
        ]
        if wrong:
            unlisted = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise CheckpointMismatch(
                f"the checkpoint of step {self.manifest.step} does not fit: "
                + "; ".join(wrong[:5])
                + unlisted
            )

    def read(self, name: str, span: Span, out: torch.Tensor) -> None:
        """Fills `out` with elements `span` of a tensor.

        Args:
            name: The tensor's name.
            span: Elements of the whole tensor, in row-major order.
            out: Tensor of that dtype with as many elements.

        Raises:
            CheckpointMismatch: There is no such tensor, or `out` does not fit.
        """
        self.load([LoadTarget(name, span, out)])

    def load(self, targets: Iterable[LoadTarget]) -> None:
        """Fills every target: each shard front to back, in up to `MAX_THREADS` parts at a time.

        If one source of a shard fails, the next one is read. Raises `StorageError` or
        `CheckpointDamaged` when no source is left; the targets are then partly filled.
        """
        by_rank: dict[int, list[Fill]] = {}
        size = 0
        for target in targets:
            self._fits(target)
            size += len(target.span) * target.tensor.element_size()
            for copy in plan(self.manifest.layout, {target.name: target.span}):
                by_rank.setdefault(copy.rank, []).append((copy, target.tensor))
        threads = min(MAX_THREADS, -(-size // READ_PART_BYTES))
        run_adaptive(self._parts(by_rank), lambda: partial(self._read_part, ReaderState()), threads)

    def _fits(self, target: LoadTarget) -> None:
        spec = self.manifest.layout.tensors.get(target.name)
        if spec is None:
            raise CheckpointMismatch(
                f"the checkpoint of step {self.manifest.step} has no tensor {target.name!r}"
            )
        if torch_dtype(spec.dtype) != target.tensor.dtype:
            raise CheckpointMismatch(
                f"{target.name} is {spec} in the checkpoint of step {self.manifest.step}, "
                f"and {target.tensor.dtype} is expected"
            )
        if target.tensor.numel() != len(target.span):
            raise CheckpointMismatch(
                f"{target.name}: {len(target.span)} elements were asked for, to fill a tensor of "
                f"{target.tensor.numel()}"
            )

    def _parts(self, by_rank: Mapping[int, list[Fill]]) -> Iterator[ReadPart]:
        for rank in sorted(by_rank):
            for fills in split_reads(self._shard(rank), by_rank[rank]):
                yield ReadPart(rank, fills)

    def _read_part(self, state: ReaderState, part: ReadPart) -> None:
        """Reads a part of one rank's shard, from the next source if one fails."""
        while True:
            shard = self._shard(part.rank)
            try:
                count = fill_all(state.reader_of(shard), part.fills, state)
            except (StorageError, CheckpointDamaged):
                if not self._drop_source(part.rank, shard):
                    raise
                continue
            with self._lock:
                self.bytes_read += count
            return

    def _shard(self, rank: int) -> ShardReader:
        """Returns a rank's shard, from the first of its sources that opens."""
        with self._lock:
            while rank not in self._open:
                if not self._sources.get(rank):
                    raise StorageError(f"no node holds the shard of rank {rank}")
                try:
                    shard = self._sources[rank][0]()
                except (StorageError, CheckpointDamaged):
                    if len(self._sources[rank]) == 1:
                        raise
                    del self._sources[rank][0]
                    continue
                if len(self._open) >= _OPEN_SHARDS:
                    del self._open[next(iter(self._open))]
                self._open[rank] = shard
            return self._open[rank]

    def _drop_source(self, rank: int, shard: ShardReader) -> bool:
        """Returns whether there is a source other than the one that gave `shard`."""
        with self._lock:
            if self._open.get(rank) is not shard:
                return True
            if len(self._sources[rank]) == 1:
                return False
            del self._open[rank], self._sources[rank][0]
            return True


def open_step(storage: Readable, manifest: Manifest | None = None) -> Checkpoint:
    """Opens the checkpoint in one step's directory.

    Args:
        storage: The step's files.
        manifest: Manifest of the step; None: it is read.

    Raises:
        CheckpointDamaged: There is no manifest.
    """
    manifest = manifest or catalog.read_manifest(storage)
    return Checkpoint(
        manifest,
        {r: [_shard_opener(storage, manifest, r)] for r in range(manifest.layout.world_size)},
    )


def open_snapshot(
    places: Mapping[int, Sequence[Readable]],
    generation: int,
    step: int,
    attempt: Attempts = attempt_once,
) -> Checkpoint:
    """Opens the snapshot of a step whose shards several nodes hold.

    Args:
        places: For every rank that wrote, the storages of the step's directory that may hold its
            shard, best first.
        generation: The generation that took the snapshot.
        step: The step of the snapshot.
        attempt: Opens a rank's shard, and the first manifest. A node that still writes its shard
            has no manifest of it.

    Raises:
        StorageError: No source of a rank can be reached.
        CheckpointDamaged: No source of a rank has its shard whole.
    """
    world = len(places)
    if sorted(places) != list(range(world)) or not world:
        raise StorageError(
            f"the snapshot of step {step} has no source for some of its ranks: "
            f"only ranks {sorted(places)} are held"
        )
    manifest = attempt(lambda: _first_manifest(places[0], world))
    if (manifest.generation, manifest.step) != (generation, step):
        raise CheckpointDamaged(
            f"{places[0][0].where} is step {manifest.step} of generation {manifest.generation}, "
            f"not step {step} of generation {generation}"
        )
    return Checkpoint(
        manifest,
        {
            rank: [
                partial(attempt, _snapshot_shard_opener(storage, manifest, rank))
                for storage in storages
            ]
            for rank, storages in places.items()
        },
    )


def _first_manifest(sources: Sequence[Readable], world_size: int) -> Manifest:
    """Returns rank 0's own manifest, from the first source that has it whole."""
    name = snapshot_manifest_name(0, world_size)
    for number, storage in enumerate(sources, 1):
        try:
            return catalog.read_manifest(storage, name)
        except (StorageError, CheckpointDamaged):
            if number == len(sources):
                raise
    raise StorageError("no node holds the shard of rank 0")


def _shard_opener(storage: Readable, manifest: Manifest, rank: int) -> Callable[[], ShardReader]:
    return lambda: open_shard(storage, manifest, rank)


def _snapshot_shard_opener(
    storage: Readable, manifest: Manifest, rank: int
) -> Callable[[], ShardReader]:
    """Returns a function that opens a rank's shard by that rank's own manifest, which alone has its
    digest.

    Args:
        storage: The step's files on one node.
        manifest: Manifest of rank 0, which the rank's own must agree with.
        rank: The rank whose shard is opened.
    """

    def open_ranks_shard() -> ShardReader:
        name = snapshot_manifest_name(rank, manifest.layout.world_size)
        ranks_manifest = catalog.read_manifest(storage, name)
        same = (ranks_manifest.step, ranks_manifest.generation, ranks_manifest.token) == (
            manifest.step,
            manifest.generation,
            manifest.token,
        )
        if not same or ranks_manifest.layout != manifest.layout:
            raise CheckpointDamaged(f"{storage.where}/{name} belongs to another snapshot")
        return open_shard(storage, ranks_manifest, rank)

    return open_ranks_shard
