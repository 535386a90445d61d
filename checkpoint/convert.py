"""A checkpoint in another shape: other world sizes and strategies, Hugging Face safetensors.

Byte ranges are copied through one bounded buffer; no tensor is ever whole in memory.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from elasticzero.checkpoint import commit
from elasticzero.checkpoint.disk import DiskStorage
from elasticzero.checkpoint.manifest import Group, Layout, Manifest, TensorSpec, itemsize
from elasticzero.checkpoint.plan import plan
from elasticzero.checkpoint.shards import ShardReader, header, open_shard, shard_specs, write_shard
from elasticzero.checkpoint.storage import Bytes, Directory, Readable, Storage, explain
from elasticzero.errors import StorageError, UserError
from elasticzero.spans import Rule, Span

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
MODEL_PREFIX = "model/"
INDEX_NAME = "model.safetensors.index.json"
DEFAULT_MAX_SHARD_BYTES = 5_000_000_000
_BUFFER_BYTES = 8 << 20
_OPEN_SHARDS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What an export wrote."""

    path: Path
    files: tuple[str, ...]
    tensors: int
    bytes: int
    """Of the tensors alone."""


def reshard(
    origin: Storage, directory: Directory, world_size: int, strategy: str | None = None
) -> Storage:
    """Write the step in `origin` again, into `directory`, as `world_size` ranks would have.

    `strategy`: deal the tensors as that strategy does, instead of by the rules they have. Returns
    the new step's files. Raises `UserError` if `directory` has that step already.
    """
    old = commit.read_manifest(origin)
    layout = reshaped(old.layout, world_size, strategy)
    commit.check_writable(directory)
    storage = commit.prepare(directory, old.step)
    if commit.stands(storage):
        raise UserError(f"{storage.where} holds a checkpoint already: give another directory")
    draft = replace(
        old,
        token=secrets.token_hex(8),
        strategy=strategy or old.strategy,
        layout=layout,
        files=(),
    )
    source_bytes = _Source(origin, old)
    try:
        for rank in range(world_size):
            wanted = layout.spans(rank)
            chunks = source_bytes.chunks({name: wanted[name] for name in shard_specs(draft, rank)})
            write_shard(storage, draft, rank, chunks)
        commit.commit(storage, draft, wait_s=0.0)
    except BaseException:
        for rank in range(world_size):
            commit.discard(directory, draft, rank)
        raise
    return storage


def reshaped(layout: Layout, world_size: int, strategy: str | None = None) -> Layout:
    """The same tensors dealt to another world, by the rules they have or as a strategy deals them.

    Tensors that lie whole with ranks beyond the new world move to rank modulo its size.
    """
    if world_size < 1:
        raise UserError(f"a world of {world_size} ranks: give 1 or more")
    if strategy is not None and strategy not in STRATEGIES:
        raise UserError(f"strategy {strategy!r} is not one of {', '.join(STRATEGIES)}")
    dealt: Rule | None = None if strategy is None else "even"
    if strategy == "zero3":
        dealt = "fsdp_rows"
    groups = tuple(
        replace(group, ranks=tuple(rank % world_size for rank in group.ranks))
        if group.rule == "whole"
        else Group(dealt or group.rule, group.tensors)
        for group in layout.groups
    )
    return Layout(world_size=world_size, tensors=layout.tensors, groups=groups)


def export_hf(
    origin: Storage, target: Path, max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES
) -> Exported:
    """Write the model's own tensors as Hugging Face safetensors, each whole, under its own name.

    `target`: a new or empty directory. A shard is larger than `max_shard_bytes` only where one
    tensor is. The index, which only several files need, comes last. An export that fails leaves
    `target` as it was.
    """
    manifest = commit.read_manifest(origin)
    specs = {n: s for n, s in manifest.layout.tensors.items() if n.startswith(MODEL_PREFIX)}
    if not specs:
        raise UserError(f"{origin.where} has no tensors named {MODEL_PREFIX}...: nothing to export")
    parts = _packed(specs, max_shard_bytes)
    names = ["model.safetensors"]
    if len(parts) > 1:
        count = len(parts)
        names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    source_bytes = _Source(origin, manifest)
    with _made_empty(target) as storage:
        for file, part in zip(names, parts, strict=True):
            storage.write(file, _plain_file(source_bytes, part))
        if len(parts) > 1:
            storage.write(INDEX_NAME, [_index(dict(zip(names, parts, strict=True)))])
    total = sum(spec.nbytes for spec in specs.values())
    return Exported(path=target, files=tuple(names), tensors=len(specs), bytes=total)


class _Source:
    """Verified byte ranges of a checkpoint's tensors."""

    def __init__(self, storage: Readable, manifest: Manifest) -> None:
        self._layout = manifest.layout
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))

        def opened(rank: int) -> ShardReader:
            return open_shard(storage, manifest, rank)

        self._shard = lru_cache(maxsize=_OPEN_SHARDS)(opened)

    def chunks(self, wanted: Mapping[str, Span]) -> Iterator[Bytes]:
        """The bytes of the spans, one after the other; a chunk is valid until the next."""
        for copy in plan(self._layout, wanted):
            width = itemsize(self._layout.tensors[copy.name].dtype)
            most = _BUFFER_BYTES // width
            span = copy.span_in_shard
            for start in range(span.start, span.stop, most):
                part = Span(start, min(start + most, span.stop))
                view = self._buffer[: len(part) * width]
                self._shard(copy.rank).read_into(copy.name, part, view)
                yield view


def _plain_file(source: _Source, specs: Mapping[str, TensorSpec]) -> Iterator[Bytes]:
    """A safetensors file of whole tensors under their names in the model, wide dtypes first."""
    ordered = dict(sorted(specs.items(), key=lambda item: -itemsize(item[1].dtype)))
    bare = {name.removeprefix(MODEL_PREFIX): spec for name, spec in ordered.items()}
    yield header(bare, {"format": "pt"})
    yield from source.chunks({name: Span(0, spec.numel) for name, spec in ordered.items()})


def _packed(specs: Mapping[str, TensorSpec], max_shard_bytes: int) -> list[dict[str, TensorSpec]]:
    """The tensors in their order, cut into parts of at most `max_shard_bytes`, none empty."""
    parts: list[dict[str, TensorSpec]] = [{}]
    room = max_shard_bytes
    for name, spec in specs.items():
        if spec.nbytes > room and parts[-1]:
            parts.append({})
            room = max_shard_bytes
        parts[-1][name] = spec
        room -= spec.nbytes
    return parts


def _index(parts: Mapping[str, Mapping[str, TensorSpec]]) -> bytes:
    """Which file holds which tensor; parts: by file."""
    total = sum(spec.nbytes for part in parts.values() for spec in part.values())
    weight_map = {n.removeprefix(MODEL_PREFIX): file for file, part in parts.items() for n in part}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return json.dumps(index, indent=2).encode() + b"\n"


@contextmanager
def _made_empty(target: Path) -> Iterator[DiskStorage]:
    """A new or empty directory to write into; where that fails it is again as it was."""
    try:
        new = not target.is_dir()
        target.mkdir(parents=True, exist_ok=True)
        if os.listdir(target):
            raise UserError(f"{target} is not empty: give a new directory")
    except OSError as error:
        raise StorageError(f"cannot use the directory {target}: {explain(error)}") from error
    storage = DiskStorage(target)
    try:
        yield storage
    except BaseException:
        with suppress(OSError, StorageError):
            for name in storage.names():
                storage.remove(name)
            if new:
                target.rmdir()
        raise
