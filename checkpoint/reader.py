"""Shards to tensors: one reader for shared memory, another node and storage."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from elasticzero.checkpoint import commit
from elasticzero.checkpoint.blocks import BLOCK_BYTES
from elasticzero.checkpoint.manifest import (
    Manifest,
    TensorSpec,
    itemsize,
    snapshot_manifest_name,
)
from elasticzero.checkpoint.plan import Copy, plan
from elasticzero.checkpoint.shards import ShardReader, open_shard
from elasticzero.checkpoint.storage import Readable
from elasticzero.errors import CheckpointDamaged, CheckpointMismatch, StorageError, UserError
from elasticzero.spans import Span

LANES = 4
"""Parts of shards read at the same time, each by a thread."""
PART_BYTES = 16 << 20
"""About what a lane reads in one go."""
STAGING_BYTES = 8 << 20
"""Size of a lane's host buffer, through which tensors that are not plain host memory are filled."""
_OPEN_SHARDS = 16
"""Shards kept open at once."""

_TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
}
_TORCH_DTYPES: dict[str, torch.dtype] = {
    spelling: getattr(torch, name) for spelling, name in _TORCH_NAMES.items()
}
_SPELLINGS = {dtype: spelling for spelling, dtype in _TORCH_DTYPES.items()}


def torch_dtype(spelling: str) -> torch.dtype:
    """The dtype that safetensors spells so."""
    return _TORCH_DTYPES[spelling]


def spelling_of(dtype: torch.dtype) -> str:
    """Safetensors' spelling of a dtype; `UserError` where it has none."""
    if dtype not in _SPELLINGS:
        raise UserError(f"a checkpoint cannot hold tensors of {dtype}: safetensors has none")
    return _SPELLINGS[dtype]


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """A tensor's description (a DTensor's: of the whole); `UserError` for an unknown dtype."""
    return TensorSpec(spelling_of(tensor.dtype), tuple(tensor.shape))


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, not copied."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return flat.numpy().data


@dataclass(frozen=True, slots=True)
class Target:
    """A span of a checkpoint's tensor, and where to put it."""

    name: str
    span: Span
    tensor: torch.Tensor
    """As many elements as the span, any shape, any device."""


class Checkpoint:
    """An open checkpoint or snapshot; shards are opened when they are first needed."""

    def __init__(
        self, manifest: Manifest, shards: Mapping[int, Sequence[Callable[[], ShardReader]]]
    ) -> None:
        """`shards`: for each rank that wrote, the ways to open its shard, best first."""
        self.manifest = manifest
        self.bytes_read = 0
        self._ways = {rank: list(ways) for rank, ways in shards.items()}
        self._open: dict[int, ShardReader] = {}
        self._lock = threading.Lock()

    def check(self, expected: Mapping[str, TensorSpec], *, allow_more: bool = False) -> None:
        """Raise `CheckpointMismatch` naming the first few tensors that are missing, not expected
        (unless `allow_more`), or of another dtype or shape."""
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
            more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise CheckpointMismatch(
                f"the checkpoint of step {self.manifest.step} does not fit: "
                + "; ".join(wrong[:5])
                + more
            )

    def read(self, name: str, span: Span, out: torch.Tensor) -> None:
        """Fill `out` with elements `span` of a tensor."""
        self.load([Target(name, span, out)])

    def load(self, targets: Iterable[Target]) -> None:
        """Fill every target: each shard front to back, up to `LANES` parts of them at a time.

        A part that one source of its shard cannot give comes from the next source. Raises
        `StorageError` or `CheckpointDamaged` when no source is left; the targets are then partly
        filled.
        """
        by_rank: dict[int, list[_Fill]] = {}
        size = 0
        for target in targets:
            self._fits(target)
            size += len(target.span) * target.tensor.element_size()
            for copy in plan(self.manifest.layout, {target.name: target.span}):
                by_rank.setdefault(copy.rank, []).append((copy, target.tensor))
        work = _Work(self._parts(by_rank))
        lanes = min(LANES, -(-size // PART_BYTES))
        if lanes <= 1:
            self._read_parts(work)
            return
        with ThreadPoolExecutor(lanes, thread_name_prefix="checkpoint-read") as pool:
            try:
                for lane in [pool.submit(self._read_parts, work) for _ in range(lanes)]:
                    lane.result()
            finally:
                work.stop()

    def _fits(self, target: Target) -> None:
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

    def _parts(self, by_rank: Mapping[int, list[_Fill]]) -> Iterator[_Part]:
        for rank in sorted(by_rank):
            for fills in _cut(self._shard(rank), by_rank[rank]):
                yield _Part(rank, fills)

    def _read_parts(self, work: _Work) -> None:
        """One lane: part after part until none is left or another lane has failed."""
        lane = _Lane()
        try:
            while (part := work.take()) is not None:
                self._read_part(part, lane)
        except BaseException:
            work.stop()
            raise

    def _read_part(self, part: _Part, lane: _Lane) -> None:
        """Fill from one rank's shard; from its next source when one fails on the way."""
        while True:
            shard = self._shard(part.rank)
            try:
                count = _fill_all(lane.own(shard), part.fills, lane)
            except (StorageError, CheckpointDamaged):
                if not self._give_up(part.rank, shard):
                    raise
                continue
            with self._lock:
                self.bytes_read += count
            return

    def _shard(self, rank: int) -> ShardReader:
        """A rank's shard, from the first of its sources that opens."""
        with self._lock:
            while rank not in self._open:
                if not self._ways.get(rank):
                    raise StorageError(f"nobody holds the shard of rank {rank}")
                try:
                    shard = self._ways[rank][0]()
                except (StorageError, CheckpointDamaged):
                    if len(self._ways[rank]) == 1:
                        raise
                    del self._ways[rank][0]
                    continue
                if len(self._open) >= _OPEN_SHARDS:
                    del self._open[next(iter(self._open))]
                self._open[rank] = shard
            return self._open[rank]

    def _give_up(self, rank: int, shard: ShardReader) -> bool:
        """Whether there is another source to try than the one that gave `shard`."""
        with self._lock:
            if self._open.get(rank) is not shard:
                return True
            del self._open[rank]
            if len(self._ways[rank]) == 1:
                return False
            del self._ways[rank][0]
            return True


_Fill = tuple[Copy, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Part:
    """What one lane reads in one go: bytes of one shard, front to back."""

    rank: int
    fills: list[_Fill]


class _Work:
    """Parts to read, handed to several lanes."""

    def __init__(self, parts: Iterator[_Part]) -> None:
        self._parts = parts
        self._lock = threading.Lock()
        self._stopped = False

    def take(self) -> _Part | None:
        """The next part, or None when there is none or the work was stopped."""
        with self._lock:
            return None if self._stopped else next(self._parts, None)

    def stop(self) -> None:
        self._stopped = True


class _Lane:
    """What one thread keeps from part to part."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None
        self._shard: ShardReader | None = None
        self._twin: ShardReader | None = None

    def own(self, shard: ShardReader) -> ShardReader:
        """A reader of the shard that only this lane uses."""
        if self._twin is None or self._shard is not shard:
            self._shard, self._twin = shard, shard.twin()
        return self._twin

    def staging(self, size: int) -> torch.Tensor:
        """`size` bytes of host memory, at most `STAGING_BYTES`."""
        if self._buffer is None:
            self._buffer = torch.empty(STAGING_BYTES, dtype=torch.uint8)
        return self._buffer[:size]


def _cut(shard: ShardReader, fills: list[_Fill]) -> Iterator[list[_Fill]]:
    """Parts of about `PART_BYTES` in the file's order, cut where a checksum block ends."""
    part: list[_Fill] = []
    size = 0
    limit = sys.maxsize
    for copy, tensor in sorted(fills, key=lambda fill: _first_byte(shard, fill[0])):
        rest, width = copy, tensor.element_size()
        while rest.span_in_shard:
            start = _first_byte(shard, rest)
            stop = start + len(rest.span_in_shard) * width
            if limit == sys.maxsize and size + stop - start > PART_BYTES:
                limit = -(-(start + PART_BYTES - size) // BLOCK_BYTES) * BLOCK_BYTES
            if stop <= limit:
                part.append((rest, tensor))
                size += stop - start
                break
            head, rest = _split(rest, max(0, limit - start) // width)
            if head.span_in_shard:
                part.append((head, tensor))
            yield part
            part, size, limit = [], 0, sys.maxsize
    if part:
        yield part


def _split(copy: Copy, count: int) -> tuple[Copy, Copy]:
    """The first `count` elements of a copy, and the rest."""
    tensor, shard = copy.span_in_tensor, copy.span_in_shard
    head = replace(
        copy,
        span_in_tensor=Span(tensor.start, tensor.start + count),
        span_in_shard=Span(shard.start, shard.start + count),
    )
    rest = replace(
        copy,
        span_in_tensor=Span(tensor.start + count, tensor.stop),
        span_in_shard=Span(shard.start + count, shard.stop),
        offset_in_wanted=copy.offset_in_wanted + count,
    )
    return head, rest


def _fill_all(shard: ShardReader, fills: list[_Fill], lane: _Lane) -> int:
    """Put every copy's elements in their place; returns their bytes."""
    straight = []
    size = 0
    for copy, tensor in fills:
        start, count = copy.offset_in_wanted, len(copy.span_in_shard)
        size += count * tensor.element_size()
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            part = tensor.detach().reshape(-1)[start : start + count]
            straight.append((copy.name, copy.span_in_shard, byte_view(part)))
        else:
            _fill_staged(shard, copy, tensor, lane)
    shard.fill(straight)
    return size


def _fill_staged(shard: ShardReader, copy: Copy, tensor: torch.Tensor, lane: _Lane) -> None:
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else None
    width = tensor.element_size()
    size = STAGING_BYTES // width
    start, count = copy.offset_in_wanted, len(copy.span_in_shard)
    for done in range(0, count, size):
        step = min(size, count - done)
        staged = lane.staging(step * width)
        at = copy.span_in_shard.start + done
        shard.read_into(copy.name, Span(at, at + step), byte_view(staged))
        values = staged.view(tensor.dtype)
        if flat is not None:
            flat[start + done : start + done + step].copy_(values)
        else:
            _scatter(tensor.detach(), start + done, values)


def _first_byte(shard: ShardReader, copy: Copy) -> int:
    entry = shard.entries[copy.name]
    return entry.start + copy.span_in_shard.start * itemsize(entry.dtype)


def _scatter(tensor: torch.Tensor, start: int, values: torch.Tensor) -> None:
    """Put values at row-major positions from `start` on of a tensor laid out in another order."""
    positions = torch.arange(start, start + values.numel(), device=tensor.device)
    where = torch.unravel_index(positions, tensor.shape)
    tensor[where] = values.to(tensor.device)


def open_step(storage: Readable) -> Checkpoint:
    """The checkpoint in one step's directory; `CheckpointDamaged` if its manifest is not there."""
    manifest = commit.read_manifest(storage)
    return Checkpoint(
        manifest,
        {r: [_way(storage, manifest, r)] for r in range(manifest.layout.world_size)},
    )


def open_snapshot(
    places: Mapping[int, Sequence[Readable]], generation: int, step: int
) -> Checkpoint:
    """The snapshot of a step whose shards lie with several nodes.

    `places`: for every rank that wrote, the storages of that step's directory that may hold its
    shard, best first. Raises `StorageError` or `CheckpointDamaged` when no source of a rank works.
    """
    world = len(places)
    if sorted(places) != list(range(world)) or not world:
        raise StorageError(
            f"the snapshot of step {step} has no source for some of its ranks: "
            f"only ranks {sorted(places)} are held"
        )
    manifest = _first_manifest(places[0], world)
    if (manifest.generation, manifest.step) != (generation, step):
        raise CheckpointDamaged(
            f"{places[0][0].where} is step {manifest.step} of generation {manifest.generation}, "
            f"not step {step} of generation {generation}"
        )
    return Checkpoint(
        manifest,
        {
            rank: [_snapshot_way(storage, manifest, rank) for storage in storages]
            for rank, storages in places.items()
        },
    )


def _first_manifest(sources: Sequence[Readable], world_size: int) -> Manifest:
    """Rank 0's own manifest, from the first source that has it whole."""
    name = snapshot_manifest_name(0, world_size)
    for number, storage in enumerate(sources, 1):
        try:
            return commit.read_manifest(storage, name)
        except (StorageError, CheckpointDamaged):
            if number == len(sources):
                raise
    raise StorageError("nobody holds the shard of rank 0")


def _way(storage: Readable, manifest: Manifest, rank: int) -> Callable[[], ShardReader]:
    return lambda: open_shard(storage, manifest, rank)


def _snapshot_way(storage: Readable, manifest: Manifest, rank: int) -> Callable[[], ShardReader]:
    """Opens a rank's shard by that rank's own manifest, which alone knows its digest."""

    def open_own() -> ShardReader:
        name = snapshot_manifest_name(rank, manifest.layout.world_size)
        own = commit.read_manifest(storage, name)
        same = (own.step, own.generation, own.token) == (
            manifest.step,
            manifest.generation,
            manifest.token,
        )
        if not same or own.layout != manifest.layout:
            raise CheckpointDamaged(f"{storage.where}/{name} belongs to another snapshot")
        return open_shard(storage, own, rank)

    return open_own
