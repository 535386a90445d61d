"""Gathers the rows of all ranks' micro-batches for `session.gather`, with their gradients.

Each rank gets the rows of the whole global batch. In the backward the gradients that the ranks have
computed for a row are summed, and its own rank takes the sum. `session.backward` weighs each rank's
loss by its part of the global batch. So a loss of all rows, computed on each rank, has the gradient
of one process, and so has a mean over a rank's own rows.

The collectives are of a group of their own: in a backward each rank comes to them at its own time
among the exchanges of the strategy, of which one may begin earlier where a rank has used fewer
parameters.

It stands apart from `process_group.py`, whose collectives have no gradient.
Shapes: N rows of this rank, R of all ranks, P of the rank that has most.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elasticzero.comm.process_group import ProcessGroups
from elasticzero.errors import UserError

NARROW = (torch.float16, torch.bfloat16)
"""Types whose gradients are summed in 32 bits."""


@dataclass(slots=True)
class Contribution:
    """Says whether the loss of this rank's micro-batch counts, which its backward knows first."""

    counts: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Says where this rank's rows are among those of all."""

    rank: int
    counts: Sequence[int]
    """The number of rows of each rank."""
    groups: ProcessGroups
    """The process groups, of which nothing that a script keeps may refer to one by itself."""

    @property
    def span(self) -> slice:
        """Returns the rows of this rank."""
        return slice(sum(self.counts[: self.rank]), sum(self.counts[: self.rank + 1]))


def gather_rows(rows_N: Tensor, groups: ProcessGroups, contribution: Contribution) -> Tensor:
    """Returns the rows of all ranks in the order of ranks; all ranks call this together.

    Args:
        rows_N: This rank's rows; those of ranks may differ in number, and in nothing else.
        groups: The process groups.
        contribution: Says in the backward whether gradients of this rank's loss count. A loss that
            does not may be 0/0, whose gradients would make those of all ranks NaN.

    Raises:
        UserError: Ranks give tensors of different types or shapes, or only some have a gradient.
    """
    info = groups.rank_info
    has_gradient = rows_N.requires_grad and torch.is_grad_enabled()
    kind = f"{rows_N.dtype} {tuple(rows_N.shape[1:])} {has_gradient}"
    table = torch.zeros(info.world_size, 2, dtype=torch.int64)
    table[info.rank] = torch.tensor([len(rows_N), zlib.crc32(kind.encode())])
    groups.apart()  # all ranks make it together
    counts, kinds = groups.sum(table).unbind(1)
    if len(set(kinds.tolist())) > 1:
        gradient = "with a gradient" if has_gradient else "without a gradient"
        raise UserError(
            f"ranks gave session.gather different tensors; rank {info.rank} gave {rows_N.dtype} of "
            f"shape {tuple(rows_N.shape)} {gradient}: only the first dimension may differ"
        )
    place = Place(rank=info.rank, counts=counts.tolist(), groups=groups)
    gathered: Tensor = _Rows.apply(rows_N, place, contribution)  # type: ignore[no-untyped-call]
    return gathered


def assembled(
    part: Tensor | None, start: int, numel: int, dtype: torch.dtype, groups: ProcessGroups
) -> Tensor:
    """Returns a whole tensor of which ranks have parts, flat and on the CPU; all ranks call this
    together.

    Each rank adds its elements to zeros, byte by byte, which changes no bit.

    Args:
        part: This rank's elements, which no other rank gives; None: it gives none.
        start: The index of the first of them.
        numel: Number of elements of the whole tensor.
        dtype: Its type.
        groups: The process groups.
    """
    whole = torch.zeros(numel, dtype=dtype, device=groups.device)
    if part is not None:
        whole[start : start + part.numel()] = part.detach().reshape(-1)
    return groups.sum(whole.view(torch.uint8)).view(dtype) if numel else whole.cpu()


class _Rows(torch.autograd.Function):
    """Gathers rows in the forward, and sums their gradients in the backward."""

    @staticmethod
    def forward(ctx: Any, rows_N: Tensor, place: Place, contribution: Contribution) -> Tensor:
        ctx.place, ctx.contribution, counts = place, contribution, place.counts
        shape = (max(counts), *rows_N.shape[1:])
        padded_P = rows_N.new_zeros(shape)
        padded_P[: len(rows_N)] = rows_N
        if not padded_P.numel():
            return rows_N.new_zeros((sum(counts), *rows_N.shape[1:]))
        sent = padded_P.reshape(-1).view(torch.uint8)
        received = [torch.empty_like(sent) for _ in counts]
        dist.all_gather(received, sent, group=place.groups.apart().process_group)
        parts = zip(received, counts, strict=True)
        return torch.cat([part.view(rows_N.dtype).view(shape)[:count] for part, count in parts])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient_R: Tensor) -> tuple[Tensor, None, None]:
        dtype = gradient_R.dtype
        if not ctx.contribution.counts:
            gradient_R = torch.zeros_like(gradient_R)
        summed_R = gradient_R.to(torch.float32 if dtype in NARROW else dtype, copy=True)
        summed_R = summed_R.contiguous()
        if summed_R.numel():
            values = torch.view_as_real(summed_R) if dtype.is_complex else summed_R
            dist.all_reduce(values, group=ctx.place.groups.apart().process_group)
        return summed_R[ctx.place.span].to(dtype), None, None
