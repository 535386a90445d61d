"""Sums gradients over the ranks and leaves each rank its chunk: the exchange of `zero1`, `zero2`.

Stage 1 keeps one whole gradient, and sums it in place in the last micro-batch of a global batch.
Stage 2 sums each micro-batch and adds it to this rank's chunk; a bucket's gradient exists only from
its first parameter's gradient until its sum, in memory that a small pool lends. The rules are those
of `queue.py`.
Shapes: E elements of a bucket with its padding, C of this rank's chunk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elasticzero.memory_estimate import POOL_BUCKETS
from elasticzero.options.wire import Wire
from elasticzero.parallel.buckets.exchange import (
    begin_reduce_scatter,
    begin_replica_sum,
    is_direct,
)
from elasticzero.parallel.buckets.layout import FlatBucket
from elasticzero.parallel.buckets.queue import GradientBucket
from elasticzero.parallel.mesh import Mesh
from elasticzero.parallel.wire.codecs import Encoding, LowRank, encoding_of
from elasticzero.parallel.wire.low_rank import LowRankSum
from elasticzero.parallel.wire.residual import BucketResidual, Residual
from elasticzero.parallel.wire.sums import ChunkSum, CompressedSum, EncodedSum, Peers, Take
from elasticzero.parallel.wire.traffic import Traffic
from elasticzero.step_clock import wait_for


class BufferPool:
    """Lends flat buffers of one dtype and device, and keeps those that come back."""

    def __init__(self, like: Tensor, capacity: int) -> None:
        """Starts empty.

        Args:
            like: A tensor of the dtype and device.
            capacity: Number of elements that may be lent at a time.
        """
        self._like = like
        self._capacity = capacity
        self._free: list[Tensor] = []
        self._lent = 0

    def take(self, numel: int, *, even_if_over: bool) -> Tensor | None:
        """Returns a buffer with any contents; None: too much is lent.

        Args:
            numel: The least number of its elements.
            even_if_over: True: more than the capacity is lent where it does not suffice.
        """
        fitting = [buffer for buffer in self._free if numel <= buffer.numel() <= 2 * numel]
        if fitting:
            lent = min(fitting, key=Tensor.numel)
            self._free = [buffer for buffer in self._free if buffer is not lent]
        else:
            while self._free and self._lent + self._idle + numel > self._capacity:
                self._free.pop()
            if self._lent + numel > self._capacity and not even_if_over:
                return None
            lent = self._like.new_empty(numel)
        self._lent += lent.numel()
        return lent

    def give(self, buffer: Tensor) -> None:
        """Takes back a buffer that `take` has returned."""
        self._lent -= buffer.numel()
        if self._lent + self._idle + buffer.numel() <= self._capacity:
            self._free.append(buffer)

    @property
    def _idle(self) -> int:
        return sum(buffer.numel() for buffer in self._free)


class ScatteredBucket(GradientBucket):
    """Holds gradients of which every rank gets a chunk of the sum."""

    reduced_C: Tensor
    """The sum over ranks of this rank's chunk; a part of `flat_E` where the bucket is kept."""

    residual: BucketResidual | None = None
    """Holds what was not sent of encoded gradients; None: they are sent as they are."""
    errors_E: Tensor
    """Takes what the messages of the exchange under way leave out."""

    def __init__(
        self, bucket: FlatBucket, pool: BufferPool, encoding: Encoding | None, *, keeps: bool
    ) -> None:
        """Begins without memory for gradients, which `ReduceScatter.lend` gives.

        Args:
            bucket: The parameters.
            pool: Lends memory for gradients and for messages.
            encoding: Encodes what is sent; None: it is sent as it is.
            keeps: True: the gradients stay through a global batch, and are summed in place.
        """
        self.bucket = bucket
        """The parameters of these gradients."""
        if not keeps:
            self.reduced_C = torch.zeros_like(bucket.own_part(bucket.flat_E))
        self.pool, self.encoding = pool, encoding
        if encoding is not None:
            self.residual = BucketResidual(bucket.names, bucket.flat_E, bucket.views, encoding)
        self.flat_E: Tensor | None = None
        """The gradients; None: it has no memory now."""
        self.received: Tensor | None = None
        """The other ranks' parts of the sum under way, one row each."""
        self.works: list[Any] = []
        self.encoded: EncodedSum | None = None
        """The sum under way, where what is sent is encoded."""
        self.complete = False
        """The exchange under way is the global batch's last of this bucket."""
        self.buffers: list[Tensor] = []
        """Buffers that the pool has lent."""
        super().__init__(bucket.names, bucket.parameters)

    def clear(self) -> None:
        super().clear()
        self.is_exchanged = False
        """An exchange of the global batch has begun."""
        self.has_sum = False
        """Stage 2: a micro-batch of the global batch is in `reduced_C`."""
        self.replica_works: list[Any] | None = None
        """The sum over the replicas of the chunk; None: it has not begun."""
        self.replica_sum: CompressedSum | None = None
        """This sum where it is encoded."""


class ReduceScatter:
    """Implements `Exchange`."""

    def __init__(
        self,
        buckets: Sequence[FlatBucket],
        stage: int,
        mesh: Mesh,
        wire: Wire,
        residual: Residual,
        traffic: Traffic,
    ) -> None:
        """Makes one pool of memory for the buckets of each dtype and device.

        Args:
            buckets: The parameters, in the order in which a backward fills the buckets.
            stage: 1 for `zero1`, 2 for `zero2`.
            mesh: The rows of ranks; each rank of a row gets a chunk.
            wire: The format of gradients between ranks; where there are several rows, of sums
                between these.
            residual: What is left out of gradients that are encoded.
            traffic: Counts what is sent.
        """
        self._mesh, self._traffic = mesh, traffic
        self.keeps = stage == 1 or mesh.shards == 1
        largest: dict[Any, int] = {}
        for bucket in buckets:
            kind = (bucket.flat_E.dtype, bucket.flat_E.device)
            largest[kind] = max(largest.get(kind, 0), bucket.flat_E.numel())
        pools: dict[Any, BufferPool] = {}
        self.buckets: list[ScatteredBucket] = []
        for bucket in buckets:
            kind = (bucket.flat_E.dtype, bucket.flat_E.device)
            pool = pools.setdefault(kind, BufferPool(bucket.flat_E, POOL_BUCKETS * largest[kind]))
            encoding = encoding_of(wire, bucket.parameters[0])
            self.buckets.append(ScatteredBucket(bucket, pool, encoding, keeps=self.keeps))
        self._residual = residual
        residual.lay([b.residual for b in self.buckets if b.residual is not None])
        self._under_way: deque[ScatteredBucket] = deque()

    def lend(self, bucket: ScatteredBucket) -> None:
        flat_bucket = bucket.bucket
        if self.keeps:
            bucket.flat_E = torch.zeros_like(flat_bucket.flat_E)
            bucket.reduced_C = flat_bucket.own_part(bucket.flat_E)
        else:
            bucket.flat_E = self._borrow(bucket, flat_bucket.flat_E.numel())
        bucket.views_N = flat_bucket.views(bucket.flat_E)

    def begin(self, bucket: ScatteredBucket, *, complete: bool) -> None:
        flat_bucket, flat_E = bucket.bucket, bucket.flat_E
        assert flat_E is not None
        flat_E = flat_E[: flat_bucket.flat_E.numel()]
        if flat_E.numel() > flat_bucket.numel:
            flat_E[flat_bucket.numel :].zero_()
        bucket.complete, bucket.is_exchanged = complete, True
        if bucket.residual is not None:
            self._residual.begin_squares()
            bucket.errors_E = bucket.residual.add_to(flat_E, self._residual.scale)
        if self._mesh.shards > 1:
            self._send(bucket, flat_bucket.chunks(flat_E), flat_E)
        self._under_way.append(bucket)

    def _send(self, bucket: ScatteredBucket, chunks: Sequence[Tensor], flat_E: Tensor) -> None:
        """Begins to sum a bucket over the ranks of the row.

        Args:
            bucket: The bucket.
            chunks: The chunk of each rank.
            flat_E: All chunks, end to end.
        """
        encoding = bucket.encoding
        if encoding is not None and self._mesh.replicas == 1:
            row = Peers.of_row(self._mesh, self._traffic)
            if isinstance(encoding, LowRank):
                assert bucket.residual is not None
                by_name, factors = bucket.residual.by_name, bucket.residual.factors
                errors_by_name = by_name(bucket.errors_E)
                bucket.encoded = LowRankSum(by_name(flat_E), factors, row, errors_by_name)
            else:
                errors = bucket.bucket.chunks(bucket.errors_E)
                bucket.encoded = ChunkSum(chunks, encoding, row, errors, self._lender(bucket))
            return
        if is_direct(flat_E):
            others, chunk = self._mesh.shards - 1, bucket.bucket.chunk
            room = self._borrow(bucket, others * chunk)
            bucket.received = room[: others * chunk].view(others, chunk)
        self._traffic.count_halves("gradients", flat_E.nbytes, self._mesh.shards, halves=1)
        bucket.works = begin_reduce_scatter(flat_E, chunks, bucket.received, self._mesh)

    def finish(self) -> None:
        for bucket in self._under_way:
            if bucket.encoded is not None:
                bucket.encoded.add_up()
        while self._under_way:
            self._finish(self._under_way.popleft())

    def late(self) -> Sequence[ScatteredBucket]:
        self.finish()
        are_late = [any(p.grad is not None for p in b.parameters) for b in self.buckets]
        if not are_late:
            return ()
        table = torch.tensor(are_late, dtype=torch.int32, device=self.buckets[0].reduced_C.device)
        if self._mesh.shards > 1:
            group = self._mesh.world_group.process_group
            dist.all_reduce(table, dist.ReduceOp.MAX, group=group)
        return [b for b, is_late in zip(self.buckets, table.tolist(), strict=True) if is_late]

    def reduced(self) -> list[Tensor]:
        """Returns this rank's chunk of each bucket's gradient, once its sums are complete; that of
        a bucket which no backward was for has no meaning."""
        self.finish()
        exchanged = [bucket for bucket in self.buckets if bucket.is_exchanged]
        for bucket in exchanged:
            self._begin_replicas(bucket)
        for bucket in exchanged:
            for work in bucket.replica_works or ():
                work.wait()
        sums = [bucket.replica_sum for bucket in exchanged if bucket.replica_sum is not None]
        for chunk in sums:
            chunk.add_up()
        self._residual.completed()
        for chunk in sums:
            chunk.finish()
        return [bucket.reduced_C for bucket in self.buckets]

    def _borrow(self, bucket: ScatteredBucket, numel: int) -> Tensor:
        """Returns memory for a bucket, and waits for exchanges under way where the pool is used up
        (F7)."""
        while True:
            buffer = bucket.pool.take(numel, even_if_over=not self._under_way)
            if buffer is not None:
                bucket.buffers.append(buffer)
                return buffer
            self._finish(self._under_way.popleft())

    def _lender(self, bucket: ScatteredBucket) -> Take:
        """Returns what lends a bucket memory for messages, as bytes."""

        def take(size: int) -> Tensor:
            numel = -(-size // bucket.bucket.flat_E.element_size())
            return self._borrow(bucket, numel).view(torch.uint8)[:size]

        return take

    def _finish(self, bucket: ScatteredBucket) -> None:
        """Waits for an exchange; afterwards this rank's chunk holds the sum."""
        wait_for(bucket.works)
        if bucket.encoded is not None:
            bucket.encoded.finish()
        assert bucket.flat_E is not None
        chunk_C = bucket.bucket.own_part(bucket.flat_E)
        if bucket.received is not None:
            for part_C in bucket.received:
                chunk_C.add_(part_C)
        bucket.works, bucket.received, bucket.encoded = [], None, None
        if not self.keeps:
            if bucket.has_sum:
                bucket.reduced_C.add_(chunk_C)
            else:
                bucket.reduced_C.copy_(chunk_C)
            bucket.has_sum = True
            bucket.flat_E = None
            bucket.drop_memory()
        for buffer in bucket.buffers:
            bucket.pool.give(buffer)
        bucket.buffers = []
        if bucket.complete:
            self._begin_replicas(bucket)

    def _begin_replicas(self, bucket: ScatteredBucket) -> None:
        """Begins to sum a complete chunk over its replicas, unless this has begun (F8)."""
        if bucket.replica_works is not None:
            return
        reduced_C, mesh = bucket.reduced_C, self._mesh
        encoding = bucket.encoding
        if encoding is not None and mesh.replicas > 1 and reduced_C.numel():
            assert not isinstance(encoding, LowRank), "a chunk is no matrix"
            bucket.replica_works = []
            peers = Peers.of_replicas(mesh, self._traffic)
            errors_C = bucket.bucket.own_part(bucket.errors_E)
            bucket.replica_sum = CompressedSum(reduced_C, encoding, peers, errors_C)
        else:
            self._traffic.count_halves("gradients", reduced_C.nbytes, mesh.replicas, halves=2)
            bucket.replica_works = begin_replica_sum(reduced_C, mesh)
