"""Strategies `zero1` and `zero2`: parameters whole, optimizer state partitioned in flat buckets.

Parameters, in reverse order, are laid end to end in buckets, padded to equal chunks, one a rank.
The optimizer works on this rank's pieces of the parameters in its chunk, 32-bit masters where the
parameter has 16 bits. Stage 1 keeps a whole gradient and reduces it once a step; stage 2 reduces it
after each micro-batch and keeps only this rank's chunk (Rajbhandari et al., "ZeRO", 2020).

A parameter that no rank has used in a global batch has no gradient, and its pieces stay as they
are; where one rank has used it, zeros stand for the gradients of the others.
Shapes: E elements of a bucket with padding, C elements of one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elasticzero.parallel.base import LoadTarget, Setting
from elasticzero.parallel.finite import Suspects
from elasticzero.parallel.optimizers import open_optimizer, working_dtype
from elasticzero.parallel.partitioned import ParameterPiece, PartitionedGroup, PartitionedOptimizer
from elasticzero.parallel.reducer import check_frozen, sparse
from elasticzero.spans import Span, intersect
from elasticzero.state.model import MODEL, LocalTensor, Partition, RankState, Spec, spec_of

BUCKET_BYTES = 32 << 20
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(slots=True)
class Bucket:
    """Parameters laid end to end; they are views of `flat_E` from here on."""

    names: list[str]
    parameters: list[nn.Parameter]
    rank: int
    world_size: int
    flat_E: Tensor = field(init=False)
    gradient_E: Tensor | None = None
    """Stage 1: the whole gradient, of which the parameters' gradients are views."""
    reduced_C: Tensor = field(init=False)
    """The sum over ranks of this rank's chunk of the gradient."""
    master_C: Tensor | None = None
    offsets: list[int] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    """Parameters that this rank has used in the global batch."""

    def __post_init__(self) -> None:
        first = self.parameters[0]
        total = 0
        for parameter in self.parameters:
            self.offsets.append(total)
            total += parameter.numel()
        chunk = -(-total // self.world_size)
        self.flat_E = first.data.new_zeros(chunk * self.world_size)
        for parameter, view in zip(self.parameters, self.views(self.flat_E), strict=True):
            view.copy_(parameter.data)
            parameter.data = view
        self.reduced_C = torch.zeros_like(self.mine(self.flat_E))
        if working_dtype(first.dtype) != first.dtype:
            self.master_C = self.mine(self.flat_E).to(working_dtype(first.dtype))

    @property
    def chunk(self) -> int:
        return self.flat_E.numel() // self.world_size

    def views(self, flat_E: Tensor) -> list[Tensor]:
        """The parameters' places in `flat_E`, in their shapes."""
        return [
            flat_E[offset : offset + parameter.numel()].view(parameter.shape)
            for offset, parameter in zip(self.offsets, self.parameters, strict=True)
        ]

    def mine(self, flat_E: Tensor) -> Tensor:
        """This rank's chunk."""
        chunk = flat_E.numel() // self.world_size
        return flat_E[self.rank * chunk : (self.rank + 1) * chunk]

    def pieces(self) -> Iterator[ParameterPiece]:
        """This rank's pieces, which share memory with its chunk or its masters."""
        mine = Span(self.rank * self.chunk, (self.rank + 1) * self.chunk)
        own_C, master_C = self.mine(self.flat_E), self.master_C
        for name, parameter, offset in zip(self.names, self.parameters, self.offsets, strict=True):
            part = intersect(mine, Span(offset, offset + parameter.numel()))
            if part:
                inside = slice(part.start - mine.start, part.stop - mine.start)
                yield ParameterPiece(
                    name,
                    part.start - offset,
                    nn.Parameter((own_C if master_C is None else master_C)[inside]),
                    tuple(parameter.shape),
                    values=None if master_C is None else own_C[inside],
                )

    def group(self) -> PartitionedGroup:
        owners = tuple(offset // self.chunk for offset in self.offsets)
        return PartitionedGroup(rule="even", names=tuple(self.names), owners=owners)

    def hold_gradients(self) -> None:
        """Stage 1: have gradients moved into one flat tensor as soon as autograd has them; it adds
        to them in place from then on."""
        self.gradient_E = torch.zeros_like(self.flat_E)
        for parameter, view in zip(self.parameters, self.views(self.gradient_E), strict=True):
            parameter.register_post_accumulate_grad_hook(partial(_move, view))

    def use(self) -> None:
        """A micro-batch is over: what has a gradient now was used."""
        for name, parameter in self.named():
            if (gradient := parameter.grad) is not None:
                if gradient.layout is not torch.strided:
                    raise sparse(name)
                self.used.add(name)

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        return zip(self.names, self.parameters, strict=True)

    def unused(self) -> list[nn.Parameter]:
        """What has no gradient yet."""
        return [parameter for parameter in self.parameters if parameter.grad is None]

    def take_gradients(self) -> Tensor:
        """All gradients in one flat tensor, wherever they were; the parameters let go of them."""
        flat_E = self.gradient_E if self.gradient_E is not None else torch.zeros_like(self.flat_E)
        for parameter, view in zip(self.parameters, self.views(flat_E), strict=True):
            gradient = parameter.grad
            if gradient is None:
                if self.gradient_E is not None:
                    view.zero_()
            elif gradient.data_ptr() != view.data_ptr() or gradient.stride() != view.stride():
                view.copy_(gradient)
            parameter.grad = None
        return flat_E

    def reduce(self, *, add: bool) -> None:
        """Sum the gradients over the ranks; this rank keeps its chunk. add: to what it has."""
        flat_E = self.take_gradients()
        if self.world_size == 1:
            summed_C = flat_E
        else:
            summed_C = torch.empty_like(self.reduced_C)
            _reduce_scatter(summed_C, flat_E)
        if add:
            self.reduced_C += summed_C
        else:
            self.reduced_C.copy_(summed_C)

    def gather(self) -> None:
        """Bring the parameters up to date from the chunks of all ranks."""
        if self.world_size > 1:
            _all_gather(self.flat_E, self.mine(self.flat_E))


def _move(view: Tensor, parameter: Tensor) -> None:
    """Have `view` be the parameter's gradient, with the value that autograd has given it."""
    gradient = parameter.grad
    if gradient is not None and gradient is not view and gradient.layout is torch.strided:
        view.copy_(gradient)
        parameter.grad = view


class FlatBuckets:
    """Implements `Strategy`."""

    def __init__(self, setting: Setting, stage: int) -> None:
        self.model = setting.model
        self.replicated = setting.world_size == 1
        self._stage = stage
        self._parameters = setting.named.parameters
        specs = {name: spec_of(p) for name, p in self._parameters.items()}
        user_optimizer = open_optimizer(setting.factory, setting.named, pieces=True)
        self._pieced = PartitionedOptimizer(user_optimizer, specs, setting.world_size)
        self.optimizer = user_optimizer.optimizer
        self.group_names = user_optimizer.group_names
        self._buckets = list(self._lay_out(setting))
        self._pieced.place({p.name: p for b in self._buckets for p in b.pieces()})
        bucketed = {name for bucket in self._buckets for name in bucket.names}
        self._rest = {n: p for n, p in self._parameters.items() if n not in bucketed}
        self._frozen = {n: p for n, p in self._parameters.items() if not p.requires_grad}
        self._accumulated = False
        if stage == 1:
            for bucket in self._buckets:
                bucket.hold_gradients()

    def _lay_out(self, setting: Setting) -> Iterator[Bucket]:
        optimized = {name for names in self.group_names for name in names}
        open_buckets: dict[Any, list[str]] = {}
        sizes: dict[Any, int] = {}
        for name in reversed(self._parameters):
            parameter = self._parameters[name]
            if name not in optimized or not parameter.requires_grad or not parameter.numel():
                continue
            keys = tuple(sorted(self._pieced.schemas[name]))
            kind = (parameter.dtype, parameter.device, keys)
            size = parameter.numel() * parameter.element_size()
            if kind in open_buckets and sizes[kind] + size > BUCKET_BYTES:
                yield self._bucket(setting, open_buckets.pop(kind))
            open_buckets.setdefault(kind, []).append(name)
            sizes[kind] = size + (sizes[kind] if len(open_buckets[kind]) > 1 else 0)
        for names in open_buckets.values():
            yield self._bucket(setting, names)

    def _bucket(self, setting: Setting, names: list[str]) -> Bucket:
        parameters = [self._parameters[name] for name in names]
        return Bucket(names, parameters, setting.rank, setting.world_size)

    def expect(self, *, last: bool) -> None:
        pass

    def backward(self, loss: Tensor, fraction: float) -> None:
        counts = fraction != 0
        unused = [] if counts else [p for bucket in self._buckets for p in bucket.unused()]
        (loss * fraction).backward()
        for parameter in unused:  # a micro-batch of weight 0 uses nothing
            parameter.grad = None
        if counts:
            self._pieced.losses.add(loss)
            for bucket in self._buckets:
                bucket.use()
        if self._stage == 2:
            for bucket in self._buckets:
                bucket.reduce(add=self._accumulated)
            self._accumulated = True

    def finish(self, factor: float, max_norm: float | None) -> Tensor:
        check_frozen(self._frozen)
        for bucket in self._buckets:
            if self._stage == 1:
                bucket.reduce(add=False)
        self._give_gradients()
        used = {name for bucket in self._buckets for name in bucket.used}
        return self._pieced.complete(used, factor, max_norm)

    def suspects(self) -> Suspects:
        return self._pieced.suspects()

    def _give_gradients(self) -> None:
        for bucket in self._buckets:
            start = bucket.rank * bucket.chunk
            for name, offset in zip(bucket.names, bucket.offsets, strict=True):
                if (piece := self._pieced.pieces.get(name)) is not None:
                    first = offset + piece.start - start
                    part = bucket.reduced_C[first : first + piece.parameter.numel()]
                    piece.parameter.grad = part.to(piece.parameter.dtype)

    def apply(self) -> None:
        self._pieced.step()
        for bucket in self._buckets:
            bucket.gather()
            bucket.used.clear()
        for piece in self._pieced.pieces.values():
            piece.parameter.grad = None
        for parameter in self._rest.values():
            parameter.grad = None
        self._accumulated = False

    def rank_state(self) -> RankState:
        share = RankState()
        share.frozen = {MODEL + n for n, p in self._parameters.items() if not p.requires_grad}
        for bucket in self._buckets:
            names = tuple(MODEL + name for name in bucket.names)
            for name, parameter in zip(names, bucket.parameters, strict=True):
                share.specs[name] = spec_of(parameter)
                share.held[name] = LocalTensor(parameter.detach())
            share.partitions.append(Partition(rule="even", names=names))
            group = bucket.group()
            self._pieced.share(share, group)
        share.add_even({MODEL + name: p.detach() for name, p in self._rest.items()})
        return share

    def replicas(self) -> dict[str, Tensor]:
        whole = {MODEL + name: p.detach() for name, p in self._parameters.items()}
        return whole | self._pieced.norm()

    @contextmanager
    def filling(self, stored: Mapping[str, Spec]) -> Iterator[list[LoadTarget]]:
        slots: list[LoadTarget] = []
        for name, parameter in self._parameters.items():
            slots.append(LoadTarget(MODEL + name, Span(0, parameter.numel()), parameter.data))
        with self._pieced.filling(stored) as more:
            yield [*slots, *more]
