"""Sums gradients in flat buckets in place, and leaves the sums on all ranks: the exchange of `ddp`.

Behind the gradients a bucket has one element for each of its parameters, 1 where this rank used it,
and one that is the rank's part of the mean loss, NaN where it is not finite: what all ranks must
know of these needs no message of its own. The rules are those of `queue.py`.
Shapes: E elements of a bucket's gradients, N of its parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elasticzero.options.wire import Wire
from elasticzero.parallel.buckets.plan import BucketPlan
from elasticzero.parallel.buckets.queue import GradientBucket
from elasticzero.parallel.finite import LossCheck
from elasticzero.parallel.mesh import Mesh
from elasticzero.parallel.wire.codecs import Encoding, LowRank, encoding_of
from elasticzero.parallel.wire.low_rank import LowRankSum
from elasticzero.parallel.wire.residual import BucketResidual, Residual
from elasticzero.parallel.wire.sums import CompressedSum, EncodedSum, Peers
from elasticzero.step_clock import wait_for

BUCKET_BYTES = 25 << 20
FIRST_BUCKET_BYTES = 1 << 20
"""The first is small, so that its sum begins early in the backward."""
LOSS_BYTES = 4
"""Bytes of a format that holds a loss; one of 16 bits rounds it to two or three digits."""


class SummedBucket(GradientBucket):
    """Holds gradients whose sum every rank has."""

    flat: Tensor
    """E gradients, N uses, the loss; or 0, where losses have a message of their own."""
    residual: BucketResidual | None = None
    """Holds what was not sent of encoded gradients; None: they are sent as they are."""
    encoding: Encoding | None = None
    """Encodes what is sent; None: it is sent as it is."""

    def views(self, flat_E: Tensor) -> list[Tensor]:
        """Returns the places of the parameters in a flat tensor, in their shapes."""
        parts = flat_E.split([parameter.numel() for parameter in self.parameters])
        return [
            part.as_strided(parameter.shape, _strides(parameter))
            for parameter, part in zip(self.parameters, parts, strict=True)
        ]

    @property
    def gradients_E(self) -> Tensor:
        """Returns the gradients."""
        return self.flat[: -len(self.names) - 1]

    @property
    def tail(self) -> Tensor:
        """Returns the uses and the loss."""
        return self.flat[-len(self.names) - 1 :]


class AllReduce:
    """Implements `Exchange`."""

    keeps = True

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer_of: Mapping[str, str],
        plan: BucketPlan,
        losses: LossCheck,
        peers: Peers,
        residual: Residual,
    ) -> None:
        """Fills the buckets.

        Args:
            parameters: All parameters of the model, by name, in the order of registration.
            optimizer_of: The name of a parameter's optimizer; empty: there is one optimizer.
            plan: The order in which buckets are filled, and their size.
            losses: The losses of this rank's part of the global batch.
            peers: The ranks over which gradients are summed, and their format between these.
            residual: What is left out of gradients that are encoded.
        """
        order = plan.filling_order(list(parameters))
        trained = {n: p for n in order if (p := parameters[n]).requires_grad and p.numel()}
        self.buckets = [
            SummedBucket(names, [parameters[n] for n in names])
            for names in _deal(trained, optimizer_of, plan.size_bytes or BUCKET_BYTES, peers.wire)
        ]
        self._losses = losses
        self._peers, self._residual = peers, residual
        for bucket in self.buckets:
            bucket.encoding = encoding_of(peers.wire, bucket.parameters[0])
            if bucket.encoding is not None:
                total = sum(parameter.numel() for parameter in bucket.parameters)
                flat_E = bucket.parameters[0].data.new_empty(total)
                bucket.residual = BucketResidual(
                    bucket.names, flat_E, bucket.views, bucket.encoding
                )
        residual.lay([b.residual for b in self.buckets if b.residual is not None])
        self._under_way: list[tuple[SummedBucket, Any, EncodedSum | None]] = []
        """The buckets, what must be waited for, and the sum of gradients that are encoded: then
        only the tail is waited for."""
        self._losses_apart = losses.has_own_message and any(
            p.dtype.itemsize < LOSS_BYTES for p in trained.values()
        )
        """A bucket may have a format that holds no loss: they are summed in a message of their own,
        whichever buckets a global batch has."""
        self._summed_losses: tuple[Tensor, Any] | None = None
        """This message, once the first bucket is under way."""
        self.loss = torch.zeros(())
        """Mean loss of the global batch; NaN where a loss of any rank is not finite."""

    def enter_world(self, mesh: Mesh) -> None:
        """Sums over the ranks of another world from the next step on; the buckets stay."""
        self._peers = replace(self._peers, index=mesh.rank, group=mesh.world_group)

    def lend(self, bucket: SummedBucket) -> None:
        total = sum(parameter.numel() for parameter in bucket.parameters)
        bucket.flat = bucket.parameters[0].data.new_zeros(total + len(bucket.names) + 1)
        bucket.views_N = bucket.views(bucket.gradients_E)

    def begin(self, bucket: SummedBucket, *, complete: bool) -> None:
        tail, loss, group = bucket.tail, self._part_of_loss, self._peers.group.process_group
        if all(bucket.used_N):
            tail.fill_(1)
        else:
            tail[:-1].copy_(torch.tensor(bucket.used_N))
        if loss is None or self._losses_apart:
            tail[-1].zero_()
        else:
            tail[-1].copy_(_limited(loss, tail.dtype))
        if self._losses_apart and self._summed_losses is None:
            losses = bucket.flat.new_zeros(1, dtype=torch.float32)
            if loss is not None:
                losses.copy_(loss)
            self._summed_losses = losses, dist.all_reduce(losses, group=group, async_op=True)
        encoded: EncodedSum | None = None
        if bucket.residual is not None:
            self._residual.begin_squares()
            errors_E = bucket.residual.add_to(bucket.gradients_E, self._residual.scale)
            if self._peers.count > 1:
                encoded = self._begin_encoded(bucket, bucket.residual, errors_E)
        summed = bucket.flat if encoded is None else tail
        self._peers.traffic.count_halves("gradients", summed.nbytes, self._peers.count, halves=2)
        work = dist.all_reduce(summed, group=group, async_op=True)
        self._under_way.append((bucket, work, encoded))

    def _begin_encoded(
        self, bucket: SummedBucket, residual: BucketResidual, errors_E: Tensor
    ) -> EncodedSum:
        """Begins to sum gradients in messages that are encoded.

        Args:
            bucket: The bucket.
            residual: What is not sent of its gradients.
            errors_E: Becomes that.
        """
        encoding, gradients_E = bucket.encoding, bucket.gradients_E
        assert encoding is not None
        if isinstance(encoding, LowRank):
            gradients, errors = residual.by_name(gradients_E), residual.by_name(errors_E)
            return LowRankSum(gradients, residual.factors, self._peers, errors)
        return CompressedSum(gradients_E, encoding, self._peers, errors_E)

    def finish(self) -> None:
        """Waits for the sums; takes those from parameters that no rank has used (F5)."""
        under_way, self._under_way = self._under_way, []
        if not under_way:
            return
        encoded = [gradients for _, _, gradients in under_way if gradients is not None]
        for gradients in encoded:
            gradients.add_up()
        self._residual.completed()
        for gradients in encoded:
            gradients.finish()
        summed, self._summed_losses = self._summed_losses, None
        wait_for([work for _, work, _ in under_way] + ([summed[1]] if summed is not None else []))
        last = under_way[-1][0]
        self.loss = last.tail[-1].to(torch.float32) if summed is None else summed[0][0]
        # Nothing waits for the uses of buckets that this rank has used as a whole.
        partly_used = [bucket for bucket, _, _ in under_way if not all(bucket.used_N)]
        if not partly_used:
            return
        tails = [bucket.tail[:-1].to(torch.float32) for bucket in partly_used]
        uses, unused = iter(torch.cat(tails).tolist()), set()
        for bucket in partly_used:
            places = zip(bucket.names, bucket.parameters, bucket.views_N, strict=True)
            for name, parameter, view in places:
                parameter.grad = view if next(uses) else None
                if parameter.grad is None:
                    unused.add(name)
        self._residual.keep(unused)

    def late(self) -> Sequence[SummedBucket]:
        return ()

    @property
    def _part_of_loss(self) -> Tensor | None:
        """Returns this rank's part of the mean loss; NaN where a loss is not finite."""
        losses = self._losses
        if losses.value is None or losses.mean is None:
            return None
        return losses.mean + losses.value


def _limited(loss: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a loss of which a sum over ranks does not overflow in a format."""
    if dtype is not torch.float16:
        return loss
    most = torch.finfo(dtype).max / 2**16
    return loss.clamp(-most, most)


def _deal(
    parameters: Mapping[str, nn.Parameter],
    optimizer_of: Mapping[str, str],
    size_bytes: int,
    wire: Wire,
) -> Iterable[list[str]]:
    """Returns the names in each bucket, in the order in which they are summed.

    Args:
        parameters: The parameters by name, in the order in which buckets are filled.
        optimizer_of: The name of each parameter's optimizer; parameters of one bucket have the
            same.
        size_bytes: A bucket of this size takes no further parameter; the first bucket may be
            smaller.
        wire: The format between ranks; what is encoded is apart from what is not, and the first
            bucket of what is encoded may be smaller.
    """
    buckets: list[list[str]] = []
    first: list[str] | None = None
    open_buckets: dict[Any, tuple[list[str], int]] = {}
    first_bytes = min(size_bytes, FIRST_BUCKET_BYTES)
    for name, parameter in parameters.items():
        is_encoded = encoding_of(wire, parameter) is not None
        kind = (parameter.dtype, parameter.device, optimizer_of.get(name, ""), is_encoded)
        names, size = open_buckets.get(kind, ([], 0))
        limit = first_bytes if names is first else size_bytes
        if not names or size >= limit:
            names, size = [], 0
            buckets.append(names)
            if first is None and is_encoded == wire.is_lossy:
                first = names
        names.append(name)
        open_buckets[kind] = names, size + parameter.numel() * parameter.element_size()
    if wire.is_lossy:  # else a small bucket of vectors would hold up those of all matrices
        place = {name: index for index, name in enumerate(parameters)}
        buckets.sort(key=lambda names: place[names[-1]])
    return buckets


def _strides(parameter: Tensor) -> tuple[int, ...]:
    """Returns the strides of a gradient that lies as its parameter does, where that has no gaps."""
    return torch.empty_like(parameter, device="meta").stride()
