"""Sums gradients over the ranks bucket by bucket, while the backward that makes them still runs,
and leaves each rank its chunk: a reduce-scatter.

Stage 1 keeps one whole gradient, and sums it in place in the last micro-batch of a global batch.
Stage 2 sums each micro-batch and adds it to this rank's chunk; a bucket's gradient exists only from
its first parameter's gradient until its sum, in memory that a small pool lends
(Rajbhandari et al., "ZeRO", 2020, section 5.2).

Rules:
 F1  When autograd has a gradient it is copied into its bucket. Under stage 1 `grad` is a view of
     the bucket from then on; under stage 2 the parameter has no gradient any more.
 F2  In a backward that is summed, a bucket's exchange begins once each of its parameters has its
     gradient and the exchanges of the buckets before it have begun: the order is the same on all
     ranks.
 F3  When that backward is over, zeros stand for the gradients that this rank does not have, and
     the exchanges of the rest begin. Every bucket is exchanged, whatever a rank has used.
 F4  Autograd may give a parameter's gradient in several parts (a layer shared by segments that are
     checkpointed with `use_reentrant=True`). The first global batch shows which these are; from
     then on their buckets are exchanged at the end. Under stage 1 all exchanges of the first
     global batch begin at the end; under stage 2, to save memory, what came too late is exchanged
     once more.
 F5  A pool lends memory for at most POOL_BUCKETS of the largest buckets. Where it is used up, the
     oldest exchange is waited for; where none is under way, it lends more for this time.
 F6  Where state is divided within nodes, a chunk that is complete is summed over its replicas too,
     once in a global batch, in the order of the buckets.
Shapes: E elements of a bucket with its padding, N of its parameters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elasticzero.memory_estimate import POOL_BUCKETS
from elasticzero.parallel.buckets.exchange import (
    begin_reduce_scatter,
    begin_replica_sum,
    is_direct,
)
from elasticzero.parallel.buckets.layout import FlatBucket
from elasticzero.parallel.mesh import Mesh
from elasticzero.parallel.reducer import too_late
from elasticzero.step_clock import wait_for


class BufferPool:
    """Lends flat buffers of one dtype and device, and keeps those that come back."""

    def __init__(self, like: Tensor, capacity: int) -> None:
        """Starts empty. like: a tensor of the dtype and device. capacity: elements that may be lent
        at a time."""
        self._like = like
        self._capacity = capacity
        self._free: list[Tensor] = []
        self._lent = 0

    def take(self, numel: int, *, even_if_over: bool) -> Tensor | None:
        """Returns a buffer of at least `numel` elements with any contents; None: too much is lent.

        even_if_over: then lend more than the capacity.
        """
        fitting = [buffer for buffer in self._free if numel <= buffer.numel() <= 2 * numel]
        if fitting:
            found = min(fitting, key=Tensor.numel)
            self._free = [buffer for buffer in self._free if buffer is not found]
        else:
            while self._free and self._lent + self._idle + numel > self._capacity:
                self._free.pop()
            if self._lent + numel > self._capacity and not even_if_over:
                return None
            found = self._like.new_empty(numel)
        self._lent += found.numel()
        return found

    def give(self, buffer: Tensor) -> None:
        """Takes back a buffer that `take` has returned."""
        self._lent -= buffer.numel()
        if self._lent + self._idle + buffer.numel() <= self._capacity:
            self._free.append(buffer)

    @property
    def _idle(self) -> int:
        return sum(buffer.numel() for buffer in self._free)


@dataclass(slots=True, eq=False)
class _Gradient:
    """Tracks the gradient of one bucket through a global batch."""

    bucket: FlatBucket
    pool: BufferPool
    kept: bool
    """Stage 1: the whole gradient exists all the time."""
    flat_E: Tensor | None = None
    views_N: list[Tensor] = field(default_factory=list)
    reduced_C: Tensor = field(init=False)
    """The sum over ranks of this rank's chunk."""
    summed: bool = False
    """Stage 2: a micro-batch of the global batch is in `reduced_C`."""
    filled_N: list[bool] = field(init=False)
    """The gradient lies in `flat_E`."""
    parts_N: list[int] = field(init=False)
    """How often autograd has added to the gradient in this backward."""
    missing: int = field(init=False)
    begun: bool = False
    """The exchange of this backward has begun."""
    late: bool = False
    """It is exchanged at the end of a backward: F4."""
    works: list[Any] = field(default_factory=list)
    replica_works: list[Any] | None = None
    """The sum over the replicas of the chunk; None: it has not begun."""
    received: Tensor | None = None
    lent: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        bucket = self.bucket
        if self.kept:
            self.flat_E = torch.zeros_like(bucket.flat_E)
            self.views_N = bucket.views(self.flat_E)
            self.reduced_C = bucket.mine(self.flat_E)
        else:
            self.reduced_C = torch.zeros_like(bucket.mine(bucket.flat_E))
        self.filled_N = [False] * len(bucket.names)
        self.new_backward()

    def new_backward(self) -> None:
        self.parts_N = [0] * len(self.bucket.names)
        self.missing, self.begun = len(self.parts_N), False

    def clear(self) -> None:
        """Begins a new global batch."""
        for parameter in self.bucket.parameters:
            parameter.grad = None
        self.filled_N = [False] * len(self.filled_N)
        self.summed, self.replica_works = False, None
        self.new_backward()


class GradientScatter:
    """Sums the gradients of flat buckets over all ranks, and leaves this rank its chunks."""

    def __init__(self, buckets: Sequence[FlatBucket], stage: int, mesh: Mesh) -> None:
        self._mesh = mesh
        self._world_size = mesh.shards
        self._keeps = stage == 1 or self._world_size == 1
        pools: dict[Any, BufferPool] = {}
        largest: dict[Any, int] = {}
        for bucket in buckets:
            kind = (bucket.flat_E.dtype, bucket.flat_E.device)
            largest[kind] = max(largest.get(kind, 0), bucket.flat_E.numel())
        for bucket in buckets:
            kind = (bucket.flat_E.dtype, bucket.flat_E.device)
            pools.setdefault(kind, BufferPool(bucket.flat_E, POOL_BUCKETS * largest[kind]))
        self._gradients = [
            _Gradient(b, pools[b.flat_E.dtype, b.flat_E.device], self._keeps) for b in buckets
        ]
        self.used: set[str] = set()
        """Parameters that this rank has used in the global batch."""
        self._under_way: deque[_Gradient] = deque()
        self._active = self._gradients
        """The buckets that the newest backward gives gradients to."""
        self._next = 0
        """The first of them whose exchange has not begun in this backward."""
        self._inside = self._sums = self._counts = False
        """A backward of the session's runs; it is summed; its weight is not 0."""
        self._last = False
        """The backward is the last of its global batch."""
        self._over = False
        """The global batch's gradients are summed."""
        self._learnt = False
        """The first global batch that all parameters take part in is over."""
        self._knows_late = False
        """It is known which gradients come in several parts: none where inputs are named."""
        for gradient in self._gradients:
            for index, parameter in enumerate(gradient.bucket.parameters):
                parameter.register_post_accumulate_grad_hook(self._hook(gradient, index))

    def backward(
        self,
        loss: Tensor,
        fraction: float,
        *,
        last: bool,
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """Adds the gradient of `fraction * loss`; a micro-batch of fraction 0 uses no parameter.

        last: the micro-batch is the last of its global batch. inputs: the parameters whose
        gradients are computed, which are those of whole buckets; None: all.
        """
        self._finish_all()  # what the micro-batch before has begun
        self._inside, self._counts = True, fraction != 0
        self._sums, self._next, self._last = last or not self._keeps, 0, last
        if inputs is None:
            self._active, self._knows_late = self._gradients, self._learnt
        else:
            ids = {id(parameter) for parameter in inputs}
            named = [g for g in self._gradients if any(id(p) in ids for p in g.bucket.parameters)]
            self._active, self._knows_late = named, True
        for gradient in self._active:
            gradient.new_backward()
        try:
            (loss * fraction).backward(inputs=inputs)
        finally:
            self._inside = False
        if self._sums:
            self._complete()
        self._over = last

    def reduced(self) -> list[Tensor]:
        """Returns this rank's chunk of each bucket's gradient, once its sums are complete; that of
        a bucket which no backward was for has no meaning."""
        self._finish_all()
        for gradient in self._active:
            self._begin_replicas(gradient)
        for gradient in self._active:
            for work in gradient.replica_works or ():
                work.wait()
        return [gradient.reduced_C for gradient in self._gradients]

    def clear(self) -> None:
        """Drops the gradients, which were applied."""
        for gradient in self._gradients:
            gradient.clear()
        self.used.clear()
        self._over = False
        self._learnt = self._learnt or self._active is self._gradients

    def _hook(self, gradient: _Gradient, index: int) -> Callable[[Tensor], None]:
        name = gradient.bucket.names[index]

        def added(parameter: Tensor) -> None:
            given = parameter.grad
            if given is None:
                return
            if given.layout is not torch.strided:
                parameter.grad = given.to_dense()
            if self._over or (gradient.begun and (self._keeps or self._knows_late)):
                raise too_late(name)
            if self._counts or not self._inside:
                self.used.add(name)
            if not self._inside and not self._keeps:
                return  # autograd adds the next backward's to it
            gradient.parts_N[index] += 1
            if gradient.begun:
                return  # F4: `_repeat_late` exchanges it
            self._lay(gradient, index)
            if self._sums and self._inside and gradient.parts_N[index] == 1:
                gradient.missing -= 1
                if not gradient.missing and (self._knows_late or not self._keeps):
                    self._begin_ready()

        return added

    def _lay(self, gradient: _Gradient, index: int) -> None:
        """Follows F1."""
        parameter = gradient.bucket.parameters[index]
        if gradient.flat_E is None:
            gradient.flat_E = self._borrow(gradient, gradient.bucket.flat_E.numel())
            gradient.views_N = gradient.bucket.views(gradient.flat_E)
        view, given = gradient.views_N[index], parameter.grad
        if given is None or given is view:
            return
        if gradient.filled_N[index]:
            view.add_(given)
        else:
            view.copy_(given)
        gradient.filled_N[index] = True
        parameter.grad = view if self._keeps else None

    def _begin_ready(self) -> None:
        """Follows F2."""
        while self._next < len(self._active):
            gradient = self._active[self._next]
            if gradient.missing or gradient.late:
                return
            self._begin(gradient)
            self._next += 1

    def _begin(self, gradient: _Gradient) -> None:
        """Begins to exchange the gradients that lie in the bucket, zeros for the others."""
        bucket = gradient.bucket
        for index, parameter in enumerate(bucket.parameters):
            if parameter.grad is not None or gradient.flat_E is None:
                self._lay(gradient, index)
            if not gradient.filled_N[index]:
                gradient.views_N[index].zero_()
        flat_E = gradient.flat_E
        assert flat_E is not None
        flat_E[bucket.numel : bucket.flat_E.numel()].zero_()
        gradient.begun = True
        flat_E = flat_E[: bucket.flat_E.numel()]
        if self._world_size > 1:
            if is_direct(flat_E):
                room = (self._world_size - 1) * bucket.chunk
                received = self._borrow(gradient, room)[:room]
                gradient.received = received.view(self._world_size - 1, bucket.chunk)
            chunks = bucket.chunks(flat_E)
            gradient.works = begin_reduce_scatter(flat_E, chunks, gradient.received, self._mesh)
        self._under_way.append(gradient)

    def _borrow(self, gradient: _Gradient, numel: int) -> Tensor:
        """Follows F5."""
        while True:
            found = gradient.pool.take(numel, even_if_over=not self._under_way)
            if found is not None:
                gradient.lent.append(found)
                return found
            self._finish(self._under_way.popleft())

    def _finish_all(self) -> None:
        while self._under_way:
            self._finish(self._under_way.popleft())

    def _finish(self, gradient: _Gradient) -> None:
        """Waits for an exchange; afterwards this rank's chunk holds the sum."""
        wait_for(gradient.works)
        assert gradient.flat_E is not None
        mine_C = gradient.bucket.mine(gradient.flat_E)
        if gradient.received is not None:
            for chunk in gradient.received:
                mine_C.add_(chunk)
        gradient.works, gradient.received = [], None
        if not self._keeps:
            if gradient.summed:
                gradient.reduced_C.add_(mine_C)
            else:
                gradient.reduced_C.copy_(mine_C)
            gradient.summed = True
            gradient.flat_E, gradient.views_N = None, []
            gradient.filled_N = [False] * len(gradient.filled_N)
        for buffer in gradient.lent:
            gradient.pool.give(buffer)
        gradient.lent = []
        if self._last and (self._keeps or self._knows_late):  # nothing is exchanged once more
            self._begin_replicas(gradient)

    def _begin_replicas(self, gradient: _Gradient) -> None:
        """Follows F6."""
        if gradient.replica_works is None:
            gradient.replica_works = begin_replica_sum(gradient.reduced_C, self._mesh)

    def _complete(self) -> None:
        """Follows F3 and F4."""
        for gradient in self._active[self._next :]:
            self._begin(gradient)
        if not self._knows_late:
            if not self._keeps:
                self._repeat_late()
            for gradient in self._active:
                gradient.late = gradient.late or max(gradient.parts_N) > 1

    def _repeat_late(self) -> None:
        """Exchanges what came after its bucket's exchange had begun, on any rank."""
        self._finish_all()
        late = [any(p.grad is not None for p in g.bucket.parameters) for g in self._gradients]
        if not late:
            return
        table = torch.tensor(late, dtype=torch.int32, device=self._gradients[0].reduced_C.device)
        if self._world_size > 1:
            dist.all_reduce(table, dist.ReduceOp.MAX)
        for gradient, again in zip(self._gradients, table.tolist(), strict=True):
            if again:
                gradient.begun = False
                self._begin(gradient)
