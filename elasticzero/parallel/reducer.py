"""Sums gradients over the ranks in flat buckets, while the backward that makes them still runs.

Parameters are laid end to end in buckets of one dtype and device, in the order in which a backward
has their gradients (`buckets/plan.py`). Behind the gradients a bucket has one element for each of
its parameters, 1 where this rank used it, and one that is the rank's part of the mean loss, NaN
where it is not finite: what all ranks must know of these needs no message of its own.

Rules:
 G1  A gradient is copied into its bucket when autograd has it; `grad` is a view of the bucket from
     then on, so that later micro-batches add to it in place.
 G2  In the last micro-batch of a global batch a bucket is summed once each of its parameters has
     its gradient and the buckets before it are on their way: the order is equal on all ranks.
 G3  When that backward is over, zeros stand for the gradients that this rank does not have, and the
     rest is summed. Every bucket is summed exactly once, whatever a rank has used.
 G4  A parameter that no rank has used has no gradient afterwards; one that any has used has the
     sum on all of them. A micro-batch of weight 0 uses nothing.
 G5  Autograd may give a parameter's gradient in several parts (a layer shared by segments that are
     checkpointed with `use_reentrant=True`). The first global batch is summed at its end alone and
     shows which these are; their buckets are always summed at the end.
 G6  Parameters of one bucket are of one optimizer, where the script has several. A backward for
     some of them fills and sums their buckets alone; all ranks name the same.
Shapes: E elements of a bucket's gradients, N of its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elasticzero.data.position import MicroBatch
from elasticzero.errors import UserError
from elasticzero.parallel.buckets.plan import BucketPlan
from elasticzero.parallel.finite import LossCheck
from elasticzero.step_clock import wait_for

BUCKET_BYTES = 25 << 20
FIRST_BUCKET_BYTES = 1 << 20
"""The first is small, so that its sum begins early in the backward."""


@dataclass(slots=True)
class GradientBucket:
    """Holds gradients that are summed together."""

    names: list[str]
    parameters: list[nn.Parameter]
    flat: Tensor = field(init=False)
    """E gradients, N uses, the loss."""
    views_N: list[Tensor] = field(init=False)
    used_N: list[bool] = field(init=False)
    """By this rank, in the global batch."""
    parts_N: list[int] = field(init=False)
    """How often autograd has added to the gradient in the last micro-batch."""
    missing: int = field(init=False)
    """Parameters whose gradient the last micro-batch has not given yet."""
    late: bool = False
    """It is summed at the end of the backward: G5."""
    work: Any = None

    def __post_init__(self) -> None:
        count = len(self.parameters)
        total = sum(parameter.numel() for parameter in self.parameters)
        self.flat = self.parameters[0].data.new_zeros(total + count + 1)
        self.views_N, offset = [], 0
        for parameter in self.parameters:
            part = self.flat[offset : offset + parameter.numel()]
            self.views_N.append(part.as_strided(parameter.shape, _strides(parameter)))
            offset += parameter.numel()
        self.clear()

    def clear(self) -> None:
        """Begins a new global batch."""
        count = len(self.parameters)
        self.used_N, self.parts_N = [False] * count, [0] * count
        self.missing, self.work = count, None

    @property
    def tail(self) -> Tensor:
        """Returns the uses and the loss."""
        return self.flat[-len(self.parameters) - 1 :]

    def begin(self, check: Tensor | None) -> None:
        """Begins to sum it. check: this rank's part of the loss, or NaN where it is not finite."""
        for index, (parameter, view) in enumerate(zip(self.parameters, self.views_N, strict=True)):
            if parameter.grad is None:
                view.zero_()
                self.used_N[index] = False
        tail = self.tail
        if all(self.used_N):
            tail.fill_(1)
        else:
            tail[:-1].copy_(torch.tensor(self.used_N))
        if check is None:
            tail[-1].zero_()
        else:
            most = torch.finfo(tail.dtype).max / 2**16  # a sum over ranks does not overflow
            tail[-1].copy_(check.clamp(-most, most) if tail.dtype == torch.float16 else check)
        self.work = dist.all_reduce(self.flat, async_op=True)


class Reducer:
    """Sums the gradients of these parameters over all ranks, once a global batch."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer_of: Mapping[str, str],
        plan: BucketPlan,
    ) -> None:
        """optimizer_of: names the optimizer of a parameter; empty: there is one optimizer."""
        order = plan.filling_order(list(parameters))
        trained = {n: p for n in order if (p := parameters[n]).requires_grad and p.numel()}
        self._frozen = {n: p for n, p in parameters.items() if not p.requires_grad}
        self._buckets = [
            GradientBucket(names, [parameters[n] for n in names])
            for names in _deal(trained, optimizer_of, plan.size_bytes or BUCKET_BYTES)
        ]
        self._active = self._buckets
        """The buckets that the newest backward gives gradients to."""
        self._next = 0
        """The first of them that is not on its way."""
        self._inside = self._last = self._counts = False
        """A backward of the session's runs; it is the global batch's last; its weight is not 0."""
        self._over = False
        """The global batch's gradients are summed."""
        self._learnt = False
        """The first global batch that all parameters take part in is over."""
        self._knows_late = False
        """It is known which gradients come in several parts: none where inputs are named."""
        self._losses = LossCheck()
        self.loss = 0.0
        """Mean loss of the global batch, as far as its format holds it; NaN where a loss of any
        rank is not finite."""
        for bucket in self._buckets:
            for index, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(self._hook(bucket, index))

    def backward(
        self,
        loss: Tensor,
        fraction: float,
        part: MicroBatch,
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """Adds the gradient of `fraction * loss`; all gradients are summed in the last one.

        inputs: the parameters whose gradients are computed, which are those of whole
        optimizers; None: all.
        """
        self._inside, self._last, self._counts = True, part.last, fraction != 0
        if inputs is None:
            self._active, self._knows_late = self._buckets, self._learnt
        else:
            ids = {id(parameter) for parameter in inputs}
            self._active = [b for b in self._buckets if any(id(p) in ids for p in b.parameters)]
            self._knows_late = True
        if self._counts:
            self._losses.add(loss, fraction)
        try:
            (loss * fraction).backward(inputs=inputs)
        finally:
            self._inside = False
        if part.last:
            self._complete()

    @property
    def own_loss_bad(self) -> bool:
        """Tells whether a loss of this rank is not finite."""
        return self._losses.bad

    def clear(self) -> None:
        """Drops the gradients, which were applied."""
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.grad = None
            bucket.clear()
        self._next, self._over = 0, False
        self._losses.clear()

    @property
    def _own_loss(self) -> Tensor | None:
        """Returns this rank's part of the mean loss; NaN where a loss is not finite."""
        losses = self._losses
        if losses.value is None or losses.mean is None:
            return None
        return losses.mean + losses.value

    def _hook(self, bucket: GradientBucket, index: int) -> Callable[[Tensor], None]:
        view = bucket.views_N[index]

        def added(parameter: Tensor) -> None:
            gradient = parameter.grad
            if gradient is not None:
                if bucket.work is not None or self._over:
                    raise too_late(bucket.names[index])
                if gradient is not view:
                    dense = gradient.layout is torch.strided
                    view.copy_(gradient if dense else gradient.to_dense())
                    parameter.grad = view
                if self._counts or not self._inside:
                    bucket.used_N[index] = True
            if not self._inside or not self._last:
                return
            bucket.parts_N[index] += 1
            if bucket.parts_N[index] == 1:
                bucket.missing -= 1
                if not bucket.missing and self._knows_late:
                    self._begin_ready()

        return added

    def _begin_ready(self) -> None:
        """Follows G2."""
        while self._next < len(self._active):
            bucket = self._active[self._next]
            if bucket.missing or bucket.late:
                return
            bucket.begin(self._own_loss)
            self._next += 1

    def _complete(self) -> None:
        """Follows G3, G4 and G6."""
        check_frozen(self._frozen)
        for bucket in self._active[self._next :]:
            bucket.begin(self._own_loss)
            bucket.late = bucket.late or max(bucket.parts_N) > 1
        wait_for(bucket.work for bucket in self._active)
        self._over = True
        self._learnt = self._learnt or self._active is self._buckets
        said = torch.cat([bucket.tail.to(torch.float32) for bucket in self._active]).tolist()
        for bucket in self._active:
            count = len(bucket.parameters)
            uses_N, check, said = said[:count], said[count], said[count + 1 :]
            self.loss = check
            if not all(bucket.used_N):
                for parameter, view, uses in zip(
                    bucket.parameters, bucket.views_N, uses_N, strict=True
                ):
                    parameter.grad = view if uses else None


def _deal(
    parameters: dict[str, nn.Parameter], optimizer_of: Mapping[str, str], size_bytes: int
) -> Iterator[list[str]]:
    """Yields the names in each bucket, in the order in which they are summed."""
    buckets: list[list[str]] = []
    open_buckets: dict[Any, tuple[list[str], int]] = {}
    first_bytes = min(size_bytes, FIRST_BUCKET_BYTES)
    for name in parameters:
        parameter = parameters[name]
        kind = (parameter.dtype, parameter.device, optimizer_of.get(name, ""))
        names, size = open_buckets.get(kind, ([], 0))
        limit = first_bytes if buckets and names is buckets[0] else size_bytes
        if not names or size >= limit:
            names, size = [], 0
            buckets.append(names)
        names.append(name)
        open_buckets[kind] = names, size + parameter.numel() * parameter.element_size()
    return iter(buckets)


def _strides(parameter: Tensor) -> tuple[int, ...]:
    """Returns the strides of a gradient that lies as its parameter does, where that has no gaps."""
    return torch.empty_like(parameter, device="meta").stride()


def check_frozen(frozen: Mapping[str, nn.Parameter]) -> None:
    """Raises `UserError` where one of these, which needed no gradient at first, has one."""
    for name, parameter in frozen.items():
        if parameter.grad is not None:
            raise UserError(
                f"parameter {name!r} has a gradient, but needed none when session.prepare was "
                "called, so it is not summed over the ranks: freeze it after session.prepare, "
                "which every generation calls anew"
            )


def too_late(name: str) -> UserError:
    """Returns the error for a gradient that came after the sum."""
    return UserError(
        f"parameter {name!r} got a gradient after the gradients were summed over the ranks, which "
        "would be this rank's alone. Call session.backward once for each micro-batch, with the sum "
        "of its losses; a layer that some steps alone run twice under "
        "torch.utils.checkpoint(…, use_reentrant=True) needs use_reentrant=False"
    )
