"""Writes a checkpoint for another world size, strategy or dtype by copying byte ranges.

No tensor is held whole in memory.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import xxhash

from elasticzero.checkpoint.format.layout import Group, Layout, TensorSpec, check_tensor_names
from elasticzero.checkpoint.format.manifest import TREE, Manifest, to_json
from elasticzero.checkpoint.format.names import checked_step, step_directory
from elasticzero.checkpoint.rewrite.sources import (
    CAST_DTYPES,
    MODEL_PREFIX,
    CheckpointSource,
    OpenSource,
    TensorSource,
    cast_specs,
    open_converted,
)
from elasticzero.checkpoint.rewrite.step_copy import (
    LEAST_BUFFER_BYTES,
    CopyOptions,
    CopyResult,
    write_step,
)
from elasticzero.checkpoint.steps import catalog
from elasticzero.checkpoint.storage.base import Directory, Readable
from elasticzero.errors import UserError
from elasticzero.nested import renamed
from elasticzero.spans import STRATEGIES, Rule, ShardOver, Span

MOST_RANKS = 100_000
_TOKEN_VERSION = b"reshard 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetShape:
    """Describes the world, strategy and dtype that a checkpoint is written for."""

    world_size: int
    strategy: str | None = None
    """Distribute the tensors as this strategy does; None: by their present rules."""
    dtype: str | None = None
    """The dtype of the model's floating-point tensors: bf16, fp16 or fp32. None: as they are."""
    allow_overflow: bool = False
    """True: finite values beyond the range of `dtype` become infinite; False: they are refused."""
    shard: ShardOver = "world"
    """Divide the state among all ranks, or among those of each node."""
    nodes: int | None = None
    """Number of nodes, of as many ranks each, with shard "node"; else None."""

    def __post_init__(self) -> None:
        if not 1 <= self.world_size <= MOST_RANKS:
            raise UserError(f"a world of {self.world_size} ranks: give 1 to {MOST_RANKS}")
        if self.shard == "node" and self.nodes is None:
            raise UserError("--shard node needs the number of nodes: give --nodes N")
        if self.shard != "node" and self.nodes is not None:
            raise UserError(f"--nodes {self.nodes} is for --shard node: give both or neither")
        if self.nodes is not None and (self.nodes < 1 or self.world_size % self.nodes):
            raise UserError(
                f"a world of {self.world_size} ranks cannot be {self.nodes} nodes of as many ranks "
                "each, which --shard node needs: give another --nodes or --world-size"
            )
        if self.strategy is not None and self.strategy not in STRATEGIES:
            raise UserError(f"strategy {self.strategy!r} is not one of {', '.join(STRATEGIES)}")
        if self.dtype is not None and self.dtype not in CAST_DTYPES:
            raise UserError(f"dtype {self.dtype!r} is not one of {', '.join(CAST_DTYPES)}")
        check_shard(self.shard, self.strategy)


def check_shard(shard: ShardOver, strategy: str | None) -> None:
    """Raises `UserError` for a strategy that divides no state within nodes."""
    if shard == "node" and strategy == "ddp":
        raise UserError(
            "--shard node cannot be had with strategy ddp, which divides no state: give --strategy "
            "zero1, zero2 or zero3"
        )


def rule_of(strategy: str) -> Rule:
    """Returns the rule by which a strategy distributes the tensors that it divides."""
    return "fsdp_rows" if strategy == "zero3" else "even"


def reshape_layout(layout: Layout, shape: TargetShape) -> Layout:
    """Returns a layout of the same tensors for another world.

    Tensors that lie whole with ranks beyond the new world move to rank modulo its size.
    """
    rule = None if shape.strategy is None else rule_of(shape.strategy)
    groups = tuple(
        replace(group, ranks=tuple(rank % shape.world_size for rank in group.ranks))
        if group.rule == "whole"
        else Group(rule or group.rule, group.tensors)
        for group in layout.groups
    )
    tensors = cast_specs(layout.tensors, shape.dtype)
    return Layout(
        world_size=shape.world_size, tensors=tensors, groups=groups, replicas=shape.nodes or 1
    )


def reshard(
    source: Readable,
    directory: Directory,
    shape: TargetShape,
    copy_options: CopyOptions | None = None,
) -> CopyResult:
    """Writes the step in `source` to `directory` as a world of another shape would have written it.

    The same source and shape give the same file names, so a run that was interrupted continues
    where it stopped.

    Args:
        source: The checkpoint's step.
        directory: The checkpoint directory of the new one.
        shape: The world size, strategy and dtypes of the new one.
        copy_options: Memory, threads and progress of the copy; None: the defaults.

    Raises:
        UserError: `directory` has another checkpoint of that step.
    """
    catalog.check_outside_steps(directory.where)
    old = catalog.read_manifest(source)
    check_shard(shape.shard, shape.strategy or old.strategy)
    target = directory.step(step_directory(old.step))
    if target.where == source.where:
        raise UserError(f"{source.where} cannot be resharded into its own directory: give another")
    layout = reshape_layout(old.layout, shape)
    draft = replace(
        old,
        token=_token(old, layout, shape),
        strategy=shape.strategy or old.strategy,
        layout=layout,
        files=(),
    )

    def open_plain(buffer_bytes: int) -> TensorSource:
        return CheckpointSource(source, old, buffer_bytes)

    open_source = open_converted(open_plain, shape.dtype, shape.allow_overflow)
    return write_step(directory, draft, open_source, copy_options or CopyOptions(), resumable=True)


def _token(old: Manifest, layout: Layout, shape: TargetShape) -> str:
    """Returns a token that follows from everything the new files' bytes depend on.

    The digests in the old manifest cover every byte of the old files.

    Args:
        old: Manifest of the old step.
        layout: Layout of the new step.
        shape: Shape of the new step, of which strategy and dtype count besides.
    """
    kind = f"{shape.dtype} with overflow" if shape.allow_overflow else shape.dtype
    target = f"{layout.digest()} {shape.strategy} {kind}".encode()
    return xxhash.xxh3_64_hexdigest(b"\0".join([_TOKEN_VERSION, to_json(old), target]))


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignCheckpoint:
    """Presents the checkpoint of another program, ready to be read."""

    specs: Mapping[str, TensorSpec]
    """The tensors by the names that they get here."""
    state: Mapping[str, Any]
    """JSON of the values that are not tensors."""
    open_source: OpenSource
    notes: tuple[str, ...] = ()
    """Lines for the user about what was chosen, or left out, when it was opened."""


def tie_aliases(foreign: ForeignCheckpoint, aliases: Mapping[str, str]) -> ForeignCheckpoint:
    """Returns the same checkpoint with tensors that have two names stored under one.

    Args:
        foreign: The checkpoint.
        aliases: By a name in the model, the other name, which is kept.

    Raises:
        UserError: A name does not exist, or the two tensors are not equal.
    """
    specs, source = dict(foreign.specs), foreign.open_source(LEAST_BUFFER_BYTES)
    for alias, kept in aliases.items():
        pair = (MODEL_PREFIX + alias, MODEL_PREFIX + kept)
        if missing := [name for name in pair if name not in specs]:
            raise UserError(f"--alias {alias}={kept}: there is no tensor {missing[0]}")
        if specs[pair[0]] != specs[pair[1]] or len({_sum(source, name) for name in pair}) > 1:
            raise UserError(f"--alias {alias}={kept}: the two are not the same")
        del specs[pair[0]]
    state = {**foreign.state, "aliases": {**foreign.state.get("aliases", {}), **aliases}}
    if TREE in state:
        kept_of = {MODEL_PREFIX + alias: MODEL_PREFIX + kept for alias, kept in aliases.items()}
        state[TREE] = renamed(state[TREE], kept_of)
    return replace(foreign, specs=specs, state=state)


def _sum(source: TensorSource, name: str) -> str:
    """Returns the xxh3_128 of a tensor's elements."""
    state = xxhash.xxh3_128()
    for chunk in source.chunks(name, Span(0, source.specs[name].numel)):
        state.update(chunk)
    return state.hexdigest()


def import_foreign(
    foreign: ForeignCheckpoint,
    directory: Directory,
    step: int,
    shape: TargetShape,
    copy_options: CopyOptions | None = None,
) -> CopyResult:
    """Writes another program's checkpoint as a step.

    Args:
        foreign: The checkpoint.
        directory: The checkpoint directory.
        step: The number that the step gets.
        shape: World size, strategy and dtypes of the step.
        copy_options: Memory, threads and progress of the copy; None: the defaults.

    Raises:
        UserError: `directory` has that step, or a checkpoint cannot hold the tensors.
    """
    step = checked_step(step)
    specs = cast_specs(foreign.specs, shape.dtype)
    try:
        check_tensor_names(specs)
    except ValueError as error:
        raise UserError(f"this cannot be imported: {error}") from None
    draft = Manifest(
        step=step,
        generation=0,
        token=secrets.token_hex(8),
        strategy=shape.strategy or "imported",
        layout=new_layout(specs, shape),
        state=foreign.state,
    )

    open_source = open_converted(foreign.open_source, shape.dtype, shape.allow_overflow)
    return write_step(directory, draft, open_source, copy_options or CopyOptions())


def new_layout(specs: Mapping[str, TensorSpec], shape: TargetShape) -> Layout:
    """Returns the layout of new tensors by a strategy's rule, with one group for each dtype."""
    by_dtype: dict[str, list[str]] = {}
    for name, spec in specs.items():
        by_dtype.setdefault(spec.dtype, []).append(name)
    rule = rule_of(shape.strategy or "ddp")
    groups = tuple(Group(rule, tuple(names)) for names in by_dtype.values())
    return Layout(world_size=shape.world_size, tensors=specs, groups=groups)
