"""Resharding against tensors that were never cut."""

from __future__ import annotations

import io
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticzero.checkpoint.format.checksums import BLOCK_BYTES
from elasticzero.checkpoint.format.layout import Group, Layout, TensorSpec
from elasticzero.checkpoint.format.manifest import Manifest
from elasticzero.checkpoint.format.plan import plan
from elasticzero.checkpoint.format.shards import open_shard, shard_specs
from elasticzero.checkpoint.rewrite.progress import ProgressBar
from elasticzero.checkpoint.rewrite.reshard import TargetShape, reshape_layout, reshard
from elasticzero.checkpoint.rewrite.sources import CheckpointSource
from elasticzero.checkpoint.rewrite.step_copy import CopyOptions, CopyResult
from elasticzero.checkpoint.steps import catalog
from elasticzero.checkpoint.storage.base import Readable, Storage
from elasticzero.checkpoint.storage.disk import DiskDirectory
from elasticzero.checkpoint.storage.urls import open_directory, open_storage
from elasticzero.errors import CheckpointDamaged, UserError
from elasticzero.spans import EMPTY, STRATEGIES, Rule, Span
from tests.unit.checkpoint.cases import (
    cut,
    draft_of,
    elements,
    flip,
    layouts,
    simple_layout,
    write_step,
)


def assert_holds(storage: Storage, contents: dict[str, bytes]) -> Manifest:
    """A step's shards hold exactly their spans of `contents`."""
    manifest = catalog.read_manifest(storage)
    assert catalog.step_error_text(storage) is None
    assert manifest.layout.tensors.keys() == contents.keys()
    for rank in range(manifest.layout.world_size):
        shard = open_shard(storage, manifest, rank)
        spans = manifest.layout.spans(rank)
        for name, spec in shard_specs(manifest, rank).items():
            read = bytearray(spec.nbytes)
            shard.read_into(name, Span(0, spec.numel), memoryview(read))
            assert read == cut(contents[name], spec.dtype, spans[name])
    return manifest


def resharded(source: Readable, directory: Path, world_size: int, **wishes: Any) -> Storage:
    done = reshard(source, DiskDirectory(directory), TargetShape(world_size=world_size, **wishes))
    assert not done.already
    return open_storage(done.where)


class Watched:
    """A storage that counts what is read of it, and fails where it is told to."""

    def __init__(self, inner: Readable) -> None:
        self.inner = inner
        self.where = inner.where
        self.read_bytes = 0
        self.interrupt_after_bytes: int | None = None

    def size(self, name: str) -> int:
        return self.inner.size(name)

    def read_into(self, name: str, start: int, *buffers: memoryview) -> int:
        self.read_bytes += sum(map(len, buffers))
        if self.interrupt_after_bytes is not None and self.read_bytes > self.interrupt_after_bytes:
            raise KeyboardInterrupt
        return self.inner.read_into(name, start, *buffers)


@settings(max_examples=30)
@given(layouts(), st.integers(1, 7), st.sampled_from([None, *STRATEGIES]), st.data())
def test_resharding_keeps_every_element(
    layout: Layout, world: int, strategy: str | None, data: st.DataObject
) -> None:
    """Over the world, and within nodes."""
    contents = elements(layout.tensors)
    counts = [n for n in range(1, world + 1) if world % n == 0 and strategy != "ddp"]
    nodes = data.draw(st.sampled_from([None, *counts]))
    shape = TargetShape(
        world_size=world, strategy=strategy, shard="node" if nodes else "world", nodes=nodes
    )
    with tempfile.TemporaryDirectory() as directory:
        source = write_step(Path(directory) / "old", draft_of(layout), contents)
        done = reshard(source, DiskDirectory(Path(directory) / "new"), shape)
        manifest = assert_holds(open_storage(done.where), contents)
        assert manifest.layout == reshape_layout(layout, shape)
        assert (manifest.step, manifest.generation, manifest.state) == (7, 3, {"epoch": 1})
        assert manifest.strategy == (strategy or "zero2")
        assert manifest.token != "token"


def test_two_to_three_and_back_is_the_same_bytes(tmp_path: Path) -> None:
    layout = simple_layout(world_size=2)
    contents = elements(layout.tensors)
    source = write_step(tmp_path / "a", draft_of(layout), contents)
    three = resharded(source, tmp_path / "b", 3)
    two = resharded(three, tmp_path / "c", 2)
    assert assert_holds(two, contents).layout == layout


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_nodes_of_a_resharded_step_divide_it_as_those_of_a_job(
    tmp_path: Path, strategy: str
) -> None:
    """Two nodes of three ranks: ranks 1 and 4 have the halves of the second shard of three."""
    layout = simple_layout(world_size=4)
    contents = elements(layout.tensors)
    source = write_step(tmp_path / "a", draft_of(layout), contents)
    shape = TargetShape(world_size=6, strategy=strategy, shard="node", nodes=2)
    done = reshard(source, DiskDirectory(tmp_path / "b"), shape)
    node_layout = assert_holds(open_storage(done.where), contents).layout
    assert (node_layout.world_size, node_layout.replicas) == (6, 2)
    three = reshape_layout(layout, TargetShape(world_size=3, strategy=strategy))
    for shard in range(3):
        for name, whole in three.spans(shard).items():
            parts = [node_layout.spans(rank).get(name, EMPTY) for rank in (shard, shard + 3)]
            if name == "optimizer/w/step":  # which is on one rank
                assert parts[0] == whole
                continue
            assert sum(map(len, parts)) == len(whole)
            assert all(whole.start <= p.start <= p.stop <= whole.stop for p in parts if p)
    again = reshard(source, DiskDirectory(tmp_path / "b"), shape)
    assert again.already
    with pytest.raises(UserError, match="holds a checkpoint already"):
        reshard(source, DiskDirectory(tmp_path / "b"), TargetShape(world_size=6, strategy=strategy))
    back = resharded(open_storage(done.where), tmp_path / "c", 4, strategy="zero2")
    assert assert_holds(back, contents).layout == layout


def test_strategies_deal_by_their_own_rules() -> None:
    layout = Layout(
        world_size=5,
        tensors={n: TensorSpec("F32", (4, 2)) for n in ("a", "b", "c")},
        groups=(Group("even", ("a",)), Group("fsdp_rows", ("b",)), Group("whole", ("c",), (4,))),
    )

    def rules(strategy: str | None) -> list[str]:
        groups = reshape_layout(layout, TargetShape(world_size=3, strategy=strategy)).groups
        assert groups[2].ranks == (1,)
        return [group.rule for group in groups]

    assert rules("zero3") == ["fsdp_rows", "fsdp_rows", "whole"]
    for strategy in ("ddp", "zero1", "zero2"):
        assert rules(strategy) == ["even", "even", "whole"]
    assert rules(None) == ["even", "fsdp_rows", "whole"]


def test_bad_wishes_are_refused(tmp_path: Path) -> None:
    layout = simple_layout()
    source = write_step(tmp_path / "a", draft_of(layout), elements(layout.tensors))
    with pytest.raises(UserError, match="0 ranks"):
        TargetShape(world_size=0)
    with pytest.raises(UserError, match="'zero9' is not one of"):
        TargetShape(world_size=1, strategy="zero9")
    with pytest.raises(UserError, match="needs the number of nodes: give --nodes N"):
        TargetShape(world_size=4, shard="node")
    with pytest.raises(UserError, match="--nodes 2 is for --shard node"):
        TargetShape(world_size=4, nodes=2)
    with pytest.raises(UserError, match="4 ranks cannot be 3 nodes of as many ranks"):
        TargetShape(world_size=4, shard="node", nodes=3)
    with pytest.raises(UserError, match="cannot be had with strategy ddp"):
        TargetShape(world_size=4, strategy="ddp", shard="node", nodes=2)
    ddp = write_step(tmp_path / "ddp", draft_of(layout, strategy="ddp"), elements(layout.tensors))
    with pytest.raises(UserError, match="cannot be had with strategy ddp"):
        reshard(
            ddp, DiskDirectory(tmp_path / "d"), TargetShape(world_size=4, shard="node", nodes=2)
        )
    with pytest.raises(UserError, match="'int8' is not one of"):
        TargetShape(world_size=1, dtype="int8")
    with pytest.raises(UserError, match="too small: give 4 MiB or more"):
        CopyOptions(buffer_bytes=1000)
    with pytest.raises(UserError, match="0 workers"):
        CopyOptions(workers=0)
    with pytest.raises(UserError, match="into its own directory"):
        resharded(source, tmp_path / "a", 1)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "thesis.tex").write_bytes(b"")
    with pytest.raises(UserError, match="other things"):
        resharded(source, tmp_path / "c", 1)


def test_what_stands_is_told_from_another_checkpoint(tmp_path: Path) -> None:
    layout = simple_layout()
    source = write_step(tmp_path / "a", draft_of(layout), elements(layout.tensors))
    other = write_step(tmp_path / "o", draft_of(layout, token="x"), elements(layout.tensors, 1))
    target = DiskDirectory(tmp_path / "b")
    first = reshard(source, target, TargetShape(world_size=3))
    again = reshard(source, target, TargetShape(world_size=3))
    assert again == replace(first, already=True)
    for stranger, shape in (
        (source, TargetShape(world_size=4)),
        (source, TargetShape(world_size=3, strategy="zero1")),
        (source, TargetShape(world_size=3, dtype="bf16")),
        (other, TargetShape(world_size=3)),
    ):
        with pytest.raises(UserError, match="holds a checkpoint already"):
            reshard(stranger, target, shape)


def test_a_damaged_source_gives_no_checkpoint(tmp_path: Path) -> None:
    layout = simple_layout()
    source = write_step(tmp_path / "a", draft_of(layout), elements(layout.tensors))
    flip(source.path / draft_of(layout).file_name(1), -1)
    with pytest.raises(CheckpointDamaged, match="rank-00001"):
        resharded(source, tmp_path / "b", 3)
    assert os.listdir(tmp_path / "b") == []


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_little_more_is_read_than_is_needed(tmp_path: Path, strategy: str) -> None:
    tensors = {f"t{i}": TensorSpec("F32", (1 << 11, 1 << 10)) for i in range(4)}
    rule: Rule = "fsdp_rows" if strategy == "zero3" else "even"
    layout = Layout(world_size=2, tensors=tensors, groups=(Group(rule, tuple(tensors)),))
    contents = elements(tensors)
    source = Watched(write_step(tmp_path / "old", draft_of(layout), contents))
    new = resharded(source, tmp_path / "new", 3)
    cuts = sum(
        span.start > 0 or span.stop < layout.tensors[copy.name].numel
        for rank in range(3)
        for copy in plan(layout, catalog.read_manifest(new).layout.spans(rank))
        for span in [copy.span_in_tensor]
    )
    needed = sum(spec.nbytes for spec in tensors.values())
    assert needed < source.read_bytes <= 1.02 * needed + BLOCK_BYTES * cuts
    assert_holds(new, contents)


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    tensors = {f"t{i}": TensorSpec("F32", (1 << 10, 1 << 10)) for i in range(2)}
    layout = Layout(world_size=2, tensors=tensors, groups=(Group("even", tuple(tensors)),))
    contents = elements(tensors)
    source = Watched(write_step(tmp_path / "old", draft_of(layout), contents))
    resharded(source, tmp_path / "whole", 8)
    whole_run_bytes = source.read_bytes
    source.read_bytes, source.interrupt_after_bytes = 0, whole_run_bytes // 2
    target = DiskDirectory(tmp_path / "new")

    def run() -> CopyResult:
        return reshard(source, target, TargetShape(world_size=8), CopyOptions(workers=1))

    with pytest.raises(KeyboardInterrupt):
        run()
    (step,) = catalog.uncommitted(target)
    finished = [n for n in step.storage.names() if n.endswith(".sums")]
    assert 1 < len(finished) < 8 and catalog.steps(target) == []
    # As a process killed in the middle of a write leaves it.
    partial = f".{finished[0].removesuffix('.sums')}.partial"
    (tmp_path / "new" / step.name / partial).write_bytes(b"half")
    source.read_bytes, source.interrupt_after_bytes = 0, None
    done = run()
    assert done.kept == len(finished)
    assert source.read_bytes <= 0.8 * whole_run_bytes
    assert len(step.storage.names()) == 8 * 2 + 1
    assert_holds(step.storage, contents)


def test_partial_files_of_an_interrupted_run_are_written_again(tmp_path: Path) -> None:
    layout = simple_layout()
    contents = elements(layout.tensors)
    source = write_step(tmp_path / "a", draft_of(layout), contents)
    step = resharded(source, tmp_path / "b", 3)
    cut_off, unsummed = (catalog.read_manifest(step).file_name(rank) for rank in (0, 2))
    step.remove("manifest.json")
    path = Path(step.where)
    os.truncate(path / cut_off, 100)
    os.truncate(path / f"{unsummed}.sums", 20)
    done = reshard(source, DiskDirectory(tmp_path / "b"), TargetShape(world_size=3))
    assert done.kept == 1
    assert_holds(step, contents)


def test_a_conversion_is_torchs_own_and_leaves_the_rest(tmp_path: Path) -> None:
    values = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    values[0, :2] = torch.tensor([float("nan"), float("inf")])
    contents = {
        "model/w": values.numpy().tobytes(),
        "model/mask": bytes([1, 0, 1]),
        "model/none": b"",
        "optimizer/w/m": values.numpy().tobytes(),
    }
    tensors = {
        "model/w": TensorSpec("F32", (3, 7)),
        "model/mask": TensorSpec("BOOL", (3,)),
        "model/none": TensorSpec("F32", (0, 7)),
        "optimizer/w/m": TensorSpec("F32", (3, 7)),
    }
    layout = Layout(world_size=2, tensors=tensors, groups=(Group("even", tuple(tensors)),))
    source = write_step(tmp_path / "a", draft_of(layout), contents)
    for dtype, spelling, kind in (("bf16", "BF16", torch.bfloat16), ("fp16", "F16", torch.half)):
        new = resharded(source, tmp_path / dtype, 3, dtype=dtype)
        manifest = catalog.read_manifest(new)
        held = manifest.layout.tensors
        assert held["model/w"] == TensorSpec(spelling, (3, 7))
        assert held["model/none"] == TensorSpec(spelling, (0, 7))
        expected = values.to(kind).view(torch.int16).numpy().tobytes()
        assert_holds(new, contents | {"model/w": expected})


def test_a_small_buffer_opens_many_shards_by_turns(tmp_path: Path) -> None:
    tensors = {f"t{i}": TensorSpec("F32", (50, 3)) for i in range(4)}
    layout = Layout(world_size=25, tensors=tensors, groups=(Group("fsdp_rows", tuple(tensors)),))
    contents = elements(tensors)
    source = write_step(tmp_path / "a", draft_of(layout), contents)
    reader = CheckpointSource(source, catalog.read_manifest(source), 64)
    for name in tensors:
        assert b"".join(map(bytes, reader.chunks(name, Span(0, 150)))) == contents[name]
        assert max(len(chunk) for chunk in reader.chunks(name, Span(0, 150))) <= 32


def test_to_an_object_store_and_back(tmp_path: Path) -> None:
    tensors = {f"t{i}": TensorSpec("F32", (3 << 10, 1 << 10)) for i in range(2)}
    layout = Layout(world_size=2, tensors=tensors, groups=(Group("fsdp_rows", tuple(tensors)),))
    contents = elements(tensors)
    source = write_step(tmp_path / "old", draft_of(layout), contents)
    url = f"memory://{tmp_path.name}/new"
    done = reshard(source, open_directory(url), TargetShape(world_size=1))
    there = catalog.resolve(url)
    assert done.where == there.where
    assert_holds(there, contents)
    assert reshard(source, open_directory(url), TargetShape(world_size=1)).already
    back = resharded(there, tmp_path / "back", 2)
    assert assert_holds(back, contents).layout == layout


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_and_in_a_log() -> None:
    for stream, expected in (
        (
            Terminal(),
            "\r[######..................]  25%  256.0 MiB of 1.0 GiB, 128.0 MiB/s, 0:06 left"
            "\r[########################] 100%  1.0 GiB of 1.0 GiB, 341.3 MiB/s, 0:00 left  "
            "\r" + " " * 75 + "\r",
        ),
        (
            io.StringIO(),
            "[########################] 100%  1.0 GiB of 1.0 GiB, 85.3 MiB/s, 0:00 left\n",
        ),
    ):
        times = iter([0.0, 0.1, 2.0, 3.0] if stream.isatty() else [0.0, 0.1, 2.0, 12.0])
        with ProgressBar(stream, clock=lambda times=times: next(times)) as progress:  # type: ignore[misc]
            progress.expect(1 << 30)
            progress.add(0)
            progress.add(256 << 20)
            progress.add(768 << 20)
        assert stream.getvalue() == expected
