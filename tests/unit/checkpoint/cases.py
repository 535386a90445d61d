"""Random checkpoints, and the dumb alternative they are compared with: whole tensors as bytes."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from pathlib import Path

from hypothesis import strategies as st

from elasticzero.checkpoint.format.layout import (
    ITEM_BYTES,
    PAIRED,
    Group,
    Layout,
    TensorSpec,
    itemsize,
)
from elasticzero.checkpoint.format.manifest import Manifest
from elasticzero.checkpoint.format.names import step_directory
from elasticzero.checkpoint.format.shards import shard_specs, write_shard
from elasticzero.checkpoint.io.writer import TensorPiece
from elasticzero.checkpoint.ram.staging import SharedMemoryStager
from elasticzero.checkpoint.ram.store import ShardName, SnapshotStore
from elasticzero.checkpoint.steps.commit import commit
from elasticzero.checkpoint.storage.base import Storage
from elasticzero.checkpoint.storage.disk import DiskStorage
from elasticzero.spans import Rule, Span

RULES: tuple[Rule, ...] = ("even", "fsdp_rows", "whole")


@st.composite
def specs(draw: st.DrawFn) -> dict[str, TensorSpec]:
    """Up to six tensors, among them scalars and empty ones."""
    shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
    kinds = st.tuples(st.sampled_from(sorted(ITEM_BYTES)), shapes)
    spec = kinds.filter(lambda kind: kind != (PAIRED, ())).map(lambda kind: TensorSpec(*kind))
    return {f"t{i}": s for i, s in enumerate(draw(st.lists(spec, max_size=6)))}


@st.composite
def layouts(draw: st.DrawFn, tensors: Mapping[str, TensorSpec] | None = None) -> Layout:
    """Tensors dealt at random to up to seven ranks."""
    if tensors is None:
        tensors = draw(specs())
    world_size = draw(st.integers(1, 7))
    rest = draw(st.permutations(sorted(tensors)))
    groups = []
    while rest:
        count = draw(st.integers(1, len(rest)))
        rule = draw(st.sampled_from(RULES))
        ranks = st.lists(st.integers(0, world_size - 1), min_size=count, max_size=count)
        names, rest = tuple(rest[:count]), rest[count:]
        groups.append(Group(rule, names, tuple(draw(ranks)) if rule == "whole" else ()))
    replicas = draw(st.sampled_from([n for n in range(1, 8) if world_size % n == 0]))
    return Layout(world_size=world_size, tensors=tensors, groups=tuple(groups), replicas=replicas)


def elements(tensors: Mapping[str, TensorSpec], seed: int = 0) -> dict[str, bytes]:
    """Random bytes for each tensor; of a BOOL, zeros and ones."""
    source = random.Random(seed)
    return {
        name: bytes(b & 1 for b in source.randbytes(spec.nbytes))
        if spec.dtype == "BOOL"
        else source.randbytes(spec.nbytes)
        for name, spec in tensors.items()
    }


def draft_of(layout: Layout, *, step: int = 7, token: str = "token", **rest: object) -> Manifest:
    fields = {"generation": 3, "strategy": "zero2", "state": {"epoch": 1}} | rest
    return Manifest(step=step, token=token, layout=layout, **fields)  # type: ignore[arg-type]


def cut(whole: bytes, dtype: str, span: Span) -> bytes:
    """The bytes of a span."""
    return whole[span.start * itemsize(dtype) : span.stop * itemsize(dtype)]


def write_ranks(storage: Storage, draft: Manifest, contents: Mapping[str, bytes]) -> None:
    """The shard files of every rank, without a manifest."""
    for rank in range(draft.layout.world_size):
        held = draft.layout.spans(rank)
        chunks = [cut(contents[n], s.dtype, held[n]) for n, s in shard_specs(draft, rank).items()]
        write_shard(storage, draft, rank, chunks)


def write_step(directory: Path, draft: Manifest, contents: Mapping[str, bytes]) -> DiskStorage:
    """A committed step, written without fsync."""
    path = directory / step_directory(draft.step)
    path.mkdir(parents=True)
    storage = DiskStorage(path, durable=False)
    write_ranks(storage, draft, contents)
    assert commit(storage, draft, wait_s=0.0)
    return storage


def simple_layout(world_size: int = 2, numel: int = 1000) -> Layout:
    """Two tensors of doubles, dealt evenly, and a scalar on rank 0."""
    tensors = {
        "model/w": TensorSpec("F64", (numel // 10, 10)),
        "model/b": TensorSpec("F64", (numel,)),
        "optimizer/w/step": TensorSpec("F32", ()),
    }
    groups = (
        Group("even", ("model/w", "model/b")),
        Group("whole", ("optimizer/w/step",), (0,)),
    )
    return Layout(world_size=world_size, tensors=tensors, groups=groups)


def flip(path: Path, position: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def write_snapshot(root: Path, draft: Manifest, rank: int, pieces: Iterable[TensorPiece]) -> None:
    """One rank's sealed part of a snapshot."""
    store = SnapshotStore(root)
    states = {(held.generation, held.step) for held in store.held()}
    shard = ShardName(draft.generation, draft.step, rank, draft.layout.world_size)
    store.drop(shard)
    writer = SharedMemoryStager(root, 1000 * draft.step + rank)
    writer.write(draft, rank, pieces, states, extra=True)
    writer.close()
    store.seal(shard)
