"""Strategies `zero1` and `zero2`: parameters whole, optimizer state partitioned in flat buckets.

The optimizer works on this rank's pieces of the parameters in its chunk of each bucket, on 32-bit
masters where the parameter has 16 bits. `scatter` sums the gradients while a backward runs;
`gather` brings the parameters up to date while the script goes on to its next forward
(Rajbhandari et al., "ZeRO", 2020).

A parameter that no rank has used in a global batch has no gradient, and its pieces stay as they
are; where one rank has used it, zeros stand for the gradients of the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from elasticzero.data.sampling import MicroBatch
from elasticzero.parallel.base import LoadTarget, Setting
from elasticzero.parallel.buckets.gather import ParameterGather
from elasticzero.parallel.buckets.layout import FlatBucket, deal
from elasticzero.parallel.buckets.scatter import GradientScatter
from elasticzero.parallel.finite import Suspects
from elasticzero.parallel.gradients import GradientHook
from elasticzero.parallel.optimizers import open_optimizer
from elasticzero.parallel.partitioned import PartitionedOptimizer
from elasticzero.parallel.reducer import check_frozen
from elasticzero.spans import Span
from elasticzero.state.model import MODEL, LocalTensor, Partition, RankState, Spec, spec_of


class FlatBuckets:
    """Implements `Strategy`."""

    def __init__(self, setting: Setting, stage: int) -> None:
        self.model = setting.model
        mesh = setting.place
        self.shards = mesh.shards
        self._parameters = setting.named.parameters
        specs = {name: spec_of(p) for name, p in self._parameters.items()}
        user_optimizer = open_optimizer(setting.factory, setting.named, pieces=True)
        self._pieced = PartitionedOptimizer(user_optimizer, specs, mesh, setting.agreement)
        self.optimizer = user_optimizer.optimizer
        self.group_names = user_optimizer.group_names
        optimized = {name for names in self.group_names for name in names}
        trained = {
            name: parameter
            for name, parameter in self._parameters.items()
            if name in optimized and parameter.requires_grad and parameter.numel()
        }
        self._buckets = [
            FlatBucket(list(names), [trained[n] for n in names], mesh.shard, mesh.shards)
            for names in deal(trained, self._pieced.schemas)
        ]
        self._forward_order = list(reversed(self._buckets))
        self._pieced.place({p.name: p for b in self._buckets for p in b.pieces()})
        self._rest = {n: p for n, p in self._parameters.items() if n not in trained}
        self._frozen = {n: p for n, p in self._parameters.items() if not p.requires_grad}
        self._scatter = GradientScatter(self._buckets, stage, mesh)
        self._gather = ParameterGather(setting.model, self._buckets, mesh)
        self._last = True

    def expect(self, part: MicroBatch) -> None:
        self._last = part.last

    def backward(self, loss: Tensor, fraction: float) -> None:
        self._gather.finish()  # of what no module has needed
        if fraction != 0:
            self._pieced.losses.add(loss)
        self._scatter.backward(loss, fraction, last=self._last)

    def finish(self, factor: float, max_norm: float | None) -> Tensor:
        check_frozen(self._frozen)
        for bucket, reduced_C in zip(self._buckets, self._scatter.reduced(), strict=True):
            self._give_gradients(bucket, reduced_C)
        return self._pieced.complete(self._scatter.used, factor, max_norm)

    @property
    def gradient_hook(self) -> GradientHook | None:
        return self._pieced.gradient_hook

    @gradient_hook.setter
    def gradient_hook(self, hook: GradientHook | None) -> None:
        self._pieced.gradient_hook = hook

    def suspects(self) -> Suspects:
        return self._pieced.suspects()

    def _give_gradients(self, bucket: FlatBucket, reduced_C: Tensor) -> None:
        start = bucket.rank * bucket.chunk
        for name, offset in zip(bucket.names, bucket.offsets, strict=True):
            if (piece := self._pieced.pieces.get(name)) is not None:
                first = offset + piece.start - start
                part = reduced_C[first : first + piece.parameter.numel()]
                piece.parameter.grad = part.to(piece.parameter.dtype)

    def apply(self) -> None:
        self._scatter.clear()
        for parameter in self._rest.values():
            parameter.grad = None
        order = self._forward_order
        self._pieced.step([b.names for b in order], lambda index: self._gather.begin(order[index]))
        for piece in self._pieced.pieces.values():
            piece.parameter.grad = None
        self._gather.leave_pending()

    def settle(self) -> None:
        self._gather.finish()

    def rank_state(self) -> RankState:
        share = RankState()
        # Nothing here asks a bucket's parameter, whose every use waits while it is gathered: what
        # this rank writes is up to date already, and a peer that is gone would fail the wait.
        share.frozen = {MODEL + name for name in self._frozen}
        for bucket in self._buckets:
            names = tuple(MODEL + name for name in bucket.names)
            for name, view in zip(names, bucket.views(bucket.flat_E), strict=True):
                share.specs[name] = spec_of(view)
                share.held[name] = LocalTensor(view)
            share.partitions.append(Partition(rule="even", names=names))
            self._pieced.share(share, bucket.group())
        share.add_even({MODEL + name: p.detach() for name, p in self._rest.items()})
        return share

    def replicas(self) -> dict[str, Tensor]:
        self.settle()
        whole = {MODEL + name: p.detach() for name, p in self._parameters.items()}
        return whole | self._pieced.norm()

    @contextmanager
    def filling(self, stored: Mapping[str, Spec]) -> Iterator[list[LoadTarget]]:
        self.settle()
        slots: list[LoadTarget] = []
        for name, parameter in self._parameters.items():
            slots.append(LoadTarget(MODEL + name, Span(0, parameter.numel()), parameter.data))
        with self._pieced.filling(stored) as more:
            yield [*slots, *more]
