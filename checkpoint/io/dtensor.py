"""Finds the part of each tensor that a rank saves: a DTensor's own rows, or an even share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from elasticzero import spans
from elasticzero.checkpoint.format.dtypes import tensor_spec
from elasticzero.checkpoint.format.layout import Group, Layout
from elasticzero.checkpoint.io.writer import TensorPiece
from elasticzero.errors import UserError
from elasticzero.spans import EMPTY, Rule, Span


def shard_dim(name: str, tensor: torch.Tensor) -> int | None:
    """Returns the mesh dimension that shards a DTensor's rows; None: every rank holds all of it.

    Raises `UserError` unless the DTensor is sharded by rows in at most one dimension of its mesh
    and replicated in the others.
    """
    placements: Any = getattr(tensor, "placements", ())
    sharded = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
    if not sharded:
        return None
    placement = placements[sharded[0]]
    if len(sharded) > 1 or type(placement).__name__ != "Shard" or placement.dim != 0:
        raise UserError(
            f"{name} is a DTensor placed {placements}, which cannot be saved or loaded: only "
            "Replicate() and one Shard(0) can; use tensor.full_tensor() or redistribute it"
        )
    return sharded[0]


def local_part(name: str, tensor: torch.Tensor) -> tuple[Span, torch.Tensor]:
    """Returns (span, elements) of the part of a tensor that this process holds: of a DTensor its
    own rows."""
    mesh: Any = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return Span(0, tensor.numel()), tensor
    local: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    dim = shard_dim(name, tensor)
    if mesh.get_coordinate() is None:
        return EMPTY, local
    if dim is None:
        return Span(0, tensor.numel()), local
    rows = spans.fsdp_rows(tuple(tensor.shape), mesh.size(dim), mesh.get_local_rank(dim))
    return rows, local


def writing_ranks(tensors: Mapping[str, torch.Tensor], world_size: int) -> list[int]:
    """Returns the ranks that write, in the order of their rows.

    These are all ranks or, if DTensors are both replicated and sharded, the ranks of the first
    copy.
    """
    all_ranks = list(range(world_size))
    ranks_of: dict[str, list[int]] = {}
    for name, tensor in tensors.items():
        mesh: Any = getattr(tensor, "device_mesh", None)
        if mesh is None:
            continue
        if sorted(mesh.mesh.flatten().tolist()) != all_ranks:
            raise UserError(
                f"{name} is on the device mesh {mesh}, which does not have every rank once"
            )
        if (dim := shard_dim(name, tensor)) is not None:
            first_copy = tuple(slice(None) if d == dim else 0 for d in range(mesh.ndim))
            ranks_of[name] = mesh.mesh[first_copy].tolist()
    if not ranks_of:
        return all_ranks
    first, ranks = next(iter(ranks_of.items()))
    for name, others in ranks_of.items():
        if others != ranks:
            raise UserError(
                f"{first} and {name} are sharded over different ranks ({ranks}, {others}): save "
                "them as two checkpoints"
            )
    return ranks


def layout_of(tensors: Mapping[str, torch.Tensor], world_size: int) -> Layout:
    """Returns a layout with DTensors by their own rows and all else evenly, one group for each
    dtype."""
    specs = {name: tensor_spec(tensor, name) for name, tensor in tensors.items()}
    by_kind: dict[tuple[Rule, str], list[str]] = {}
    for name, tensor in tensors.items():
        by_rows = shard_dim(name, tensor) is not None
        kind: tuple[Rule, str] = ("fsdp_rows", "") if by_rows else ("even", specs[name].dtype)
        by_kind.setdefault(kind, []).append(name)
    groups = tuple(Group(rule, tuple(names)) for (rule, _), names in by_kind.items())
    return Layout(world_size=world_size, tensors=specs, groups=groups)


def pieces_of(
    layout: Layout, rank: int, tensors: Mapping[str, torch.Tensor]
) -> Iterator[TensorPiece]:
    """Yields the parts of all tensors that a rank of the layout saves.

    Args:
        layout: Layout of the checkpoint.
        rank: The rank of the layout that writes.
        tensors: Every tensor of the layout by name; of a DTensor this process has that rank's rows.
    """
    for name, span in layout.spans(rank).items():
        held, local = local_part(name, tensors[name])
        if span == held and local.is_contiguous():
            yield TensorPiece(name, local)  # most tensors are whole, and many are small
            continue
        flat = local.detach().reshape(-1)
        yield TensorPiece(name, flat[span.start - held.start : span.stop - held.start])
