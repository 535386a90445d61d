"""Brings gradients to their sums over the ranks, bucket by bucket, while a backward still runs.

Parameters are laid end to end in buckets of one dtype and device, in the order in which a backward
has their gradients (`plan.py`). An exchange says what the ranks do with a full bucket: `AllReduce`
leaves the sum on all of them, for `ddp`; `ReduceScatter` leaves each rank its chunk, for `zero1`
and `zero2` (Rajbhandari et al., "ZeRO", 2020, section 5.2). A bucket is *kept* where it holds its
gradients through the whole global batch, which is summed in its last micro-batch (`ddp`, `zero1`,
and a row of one rank); else each micro-batch is summed, and added to this rank's chunk (`zero2`).

Rules:
 F1  When autograd has a gradient it is copied into its bucket: on the CPU at once, while it is in
     the cache; on a device by one operation with all others of the bucket, once the backward has
     given the last of them or is over. Of a kept bucket `grad` is a view from then on, so that
     later micro-batches add to it in place; of another one the parameter has no gradient any more.
 F2  In a backward that is summed, a bucket's exchange begins once each of its parameters has its
     gradient and the exchanges of the buckets before it have begun: the order is the same on all
     ranks.
 F3  When that backward is over, zeros stand for the gradients that this rank does not have, and
     the exchanges of the rest begin. Every bucket is exchanged, whatever a rank has used.
 F4  Autograd may give a parameter's gradient in several parts (a layer shared by segments that are
     checkpointed with `use_reentrant=True`). The first global batch shows which these are; from
     then on their buckets are exchanged at the end. Of kept buckets all exchanges of the first
     global batch begin at the end; of others, to save memory, what came too late is exchanged once
     more. After that a gradient that comes too late is refused.
 F5  A parameter that no rank has used in the global batch has no gradient afterwards; one that any
     has used has the sum on all of them. A micro-batch of weight 0 uses nothing: its gradients are
     dropped, for they may be NaN, and those of the micro-batches before are kept from them.
 F6  Parameters of one bucket are of one optimizer, where the script has several. A backward for
     some of them fills and exchanges their buckets alone; all ranks name the same.
 F7  A pool lends memory for at most POOL_BUCKETS of the largest buckets that are not kept. Where it
     is used up, the oldest exchange is waited for; where none is under way, it lends more for this
     time.
 F8  Where state is divided within nodes, a chunk that is complete is summed over its replicas too,
     once in a global batch, in the order of the buckets.
Shapes: N parameters of a bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from elasticzero.data.position import MicroBatch
from elasticzero.errors import UserError
from elasticzero.parallel.buckets.exchange import is_launched
from elasticzero.torch_internals.hooks import GradientReady


class Intake(Enum):
    """Says what becomes of the next gradient that autograd has for a bucket."""

    OPEN = auto()
    """It is laid in the bucket, whose exchange has not begun."""
    AGAIN = auto()
    """It is exchanged once more after the backward, by F4."""
    CLOSED = auto()
    """It is refused, since the sum over the ranks would not have it."""


class GradientBucket:
    """Holds gradients that are exchanged together."""

    def __init__(self, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
        self.names = names
        self.parameters = parameters
        self.views_N: list[Tensor] = []
        """The gradients' places, in their parameters' shapes; empty: it has no memory now."""
        self.late = False
        """It is exchanged at the end of a backward: F4."""
        self.kept_N: list[Tensor | None] | None = None
        """The gradients of before, while a micro-batch of weight 0 is computed; None: none is."""
        self.clear()

    def clear(self) -> None:
        """Begins a new global batch."""
        self.used_N = [False] * len(self.names)
        """This rank has used the parameter in the global batch."""
        self.filled_N = [False] * len(self.names)
        """The gradient lies in its place."""
        self.open()

    def drop_memory(self) -> None:
        """Gives up the gradients, whose sum is elsewhere."""
        self.views_N = []
        self.filled_N = [False] * len(self.names)

    def keep_apart(self) -> None:
        """Keeps the gradients from those of a micro-batch of weight 0, which follow."""
        self.kept_N = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None

    def put_back(self) -> None:
        """Puts back the gradients that `keep_apart` has kept, if it has."""
        if self.kept_N is not None:
            for parameter, gradient in zip(self.parameters, self.kept_N, strict=True):
                parameter.grad = gradient
            self.kept_N = None

    def open(self) -> None:
        """Begins a new backward."""
        self.intake = Intake.OPEN
        self.parts_N = [0] * len(self.names)
        """How often autograd has added to the gradient in this backward."""
        self.missing = len(self.names)
        """Number of parameters whose gradient this backward has not given yet."""


B = TypeVar("B", bound=GradientBucket)


class Exchange(Protocol[B]):
    """Sums full buckets over the ranks; the queue calls it for the same ones in the same order on
    all ranks."""

    @property
    def buckets(self) -> Sequence[B]:
        """Returns the buckets in the order in which a backward fills them."""

    @property
    def keeps(self) -> bool:
        """Tells whether buckets keep their gradients through a global batch, which is summed once
        then."""

    def lend(self, bucket: B) -> None:
        """Gives a bucket memory with any contents: once and for good where buckets are kept."""

    def begin(self, bucket: B, *, complete: bool) -> None:
        """Begins to sum the gradients in a bucket over the ranks.

        Args:
            bucket: The bucket, which is full.
            complete: True: the global batch adds nothing more to this bucket, on any rank.
        """

    def finish(self) -> None:
        """Waits for all sums that have begun, and puts them where they belong."""

    def late(self) -> Sequence[B]:
        """Returns the buckets that have got a gradient on any rank since their exchange began; all
        ranks call this together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """Says what a backward means to the buckets that it gives gradients to: F2 and F4."""

    counts: bool
    """The weight of its micro-batch is not 0."""
    summed: bool
    """The buckets that it gives gradients to are exchanged."""
    overlaps: bool
    """Exchanges begin while it runs."""
    complete: bool
    """The exchanges bring the last that the global batch adds to a bucket."""
    after: Intake
    """Treatment of a gradient that comes after its bucket's exchange has begun."""


class BucketQueue(Generic[B]):
    """Fills buckets with gradients, and has an exchange sum them in one order on all ranks."""

    def __init__(self, exchange: Exchange[B]) -> None:
        self._exchange = exchange
        self._active = exchange.buckets
        """The buckets that the newest backward gives gradients to."""
        self._next = 0
        """The first of them whose exchange has not begun in this backward."""
        self._running: Backward | None = None
        """The session's backward that runs; None: none does."""
        self._parts_known = False
        """A global batch in which all parameters take part is over."""
        self._closed_for = ""
        """A parameter of a global batch that takes no further backward, by F4; empty: it does."""
        self._hooks: list[RemovableHandle] = []
        for bucket in exchange.buckets:
            if exchange.keeps:
                exchange.lend(bucket)
            for index, parameter in enumerate(bucket.parameters):
                ready = GradientReady(self._hook(bucket, index))
                self._hooks.append(parameter.register_post_accumulate_grad_hook(ready))

    def close(self) -> None:
        """Takes no gradients any more, so that another queue may take them."""
        for hook in self._hooks:
            hook.remove()

    @property
    def used(self) -> set[str]:
        """Returns the names of the parameters that this rank has used in the global batch."""
        return {
            name
            for bucket in self._exchange.buckets
            for name, is_used in zip(bucket.names, bucket.used_N, strict=True)
            if is_used
        }

    def backward(
        self,
        loss: Tensor,
        fraction: float,
        part: MicroBatch,
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """Adds the gradient of `fraction * loss` to the buckets, and begins their exchanges.

        Args:
            loss: The loss of a micro-batch: one number.
            fraction: Its part of the global batch's mean; a micro-batch of 0 uses no parameter.
            part: The micro-batch.
            inputs: The parameters whose gradients are computed, which are those of whole
                optimizers and so of whole buckets; None: all.

        Raises:
            UserError: A gradient came after its bucket's exchange had begun.
        """
        if self._closed_for:
            raise too_late(self._closed_for)
        exchange, everything = self._exchange, inputs is None
        # where inputs are named, each has its gradient in one part
        parts_known = self._parts_known or not everything
        all_in_time = exchange.keeps or parts_known
        exchange.finish()  # what the micro-batch before has begun
        self._active = exchange.buckets if inputs is None else self._with_any(inputs)
        self._next = 0
        for bucket in self._active:
            bucket.open()
        self._running = running = Backward(
            counts=fraction != 0,
            summed=part.last or not exchange.keeps,
            overlaps=parts_known or not exchange.keeps,
            complete=part.last and all_in_time,
            after=Intake.CLOSED if all_in_time else Intake.AGAIN,
        )
        if not running.counts:
            for bucket in self._active:
                bucket.keep_apart()
        try:
            if running.counts or loss.requires_grad:
                (loss * fraction).backward(inputs=inputs)
            if running.summed:
                self._begin_rest(running)
            elif running.counts:
                for bucket in self._active:
                    self._lay(bucket, range(len(bucket.names)))
        except BaseException:
            if any(bucket.intake is not Intake.OPEN for bucket in self._active):
                self._close()
            raise
        finally:
            for bucket in self._active:
                bucket.put_back()
            self._running = None
        if part.last:
            self._parts_known = self._parts_known or everything
            self._close()

    def _close(self) -> None:
        """Takes no further gradient until the next global batch."""
        self._closed_for = next((bucket.names[0] for bucket in self._active), "")
        for bucket in self._exchange.buckets:
            bucket.intake = Intake.CLOSED

    def clear(self) -> None:
        """Drops the gradients, which were applied."""
        self._closed_for = ""
        for bucket in self._exchange.buckets:
            for parameter in bucket.parameters:
                parameter.grad = None
            bucket.clear()

    def _with_any(self, inputs: Iterable[Tensor]) -> list[B]:
        """Returns the buckets of these parameters."""
        ids = {id(parameter) for parameter in inputs}
        return [b for b in self._exchange.buckets if any(id(p) in ids for p in b.parameters)]

    def _hook(self, bucket: B, index: int) -> Callable[[Tensor], None]:
        keeps, is_copied_whole = self._exchange.keeps, is_launched(bucket.parameters[index])

        def added(parameter: Tensor) -> None:
            gradient, running = parameter.grad, self._running
            if gradient is None:
                return
            if bucket.intake is Intake.CLOSED:
                raise too_late(bucket.names[index])
            if running is not None and not running.counts:
                parameter.grad = None
            elif gradient.layout is not torch.strided:
                parameter.grad = gradient.to_dense()
            if running is None or running.counts:
                bucket.used_N[index] = True
            if running is None and not keeps:
                return  # autograd adds the next backward's to it
            bucket.parts_N[index] += 1
            if bucket.intake is Intake.AGAIN:
                return
            if not is_copied_whole and (running is None or running.counts):
                self._lay(bucket, (index,))
            if running is None or bucket.parts_N[index] > 1:
                return
            bucket.missing -= 1
            if bucket.missing:
                return
            if is_copied_whole and running.counts:
                self._lay(bucket, range(len(bucket.names)))
            if running.summed and running.overlaps:
                self._begin_ready(running)

        return added

    def _lay(self, bucket: B, indices: Iterable[int]) -> None:
        """Lays the gradients that these parameters have into their bucket: F1."""
        if not bucket.views_N:
            self._exchange.lend(bucket)
        keeps, filled_N = self._exchange.keeps, bucket.filled_N
        copied: list[tuple[Tensor, Tensor]] = []
        added: list[tuple[Tensor, Tensor]] = []
        for index in indices:
            parameter, view = bucket.parameters[index], bucket.views_N[index]
            gradient = parameter.grad
            if gradient is None or gradient is view:
                continue
            pairs = added if filled_N[index] and not keeps else copied
            pairs.append((view, gradient))
            filled_N[index] = True
            parameter.grad = view if keeps else None
        if copied:
            torch._foreach_copy_([view for view, _ in copied], [part for _, part in copied])
        if added:
            torch._foreach_add_([view for view, _ in added], [part for _, part in added])

    def _begin_ready(self, running: Backward) -> None:
        """Begins the exchanges whose turn it is: F2."""
        while self._next < len(self._active):
            bucket = self._active[self._next]
            if bucket.missing or bucket.late:
                return
            self._begin(bucket, running)
            self._next += 1

    def _begin_rest(self, running: Backward) -> None:
        """Begins all other exchanges, once the backward is over: F3 and F4."""
        for bucket in self._active[self._next :]:
            self._begin(bucket, running)
        if running.after is Intake.AGAIN:
            for bucket in self._exchange.late():
                self._begin(bucket, running)
        for bucket in self._active:
            bucket.late = bucket.late or max(bucket.parts_N) > 1

    def _begin(self, bucket: B, running: Backward) -> None:
        """Begins to exchange the gradients that lie in a bucket, zeros for the others."""
        bucket.put_back()
        self._lay(bucket, range(len(bucket.names)))
        keeps, filled_N = self._exchange.keeps, bucket.filled_N
        empty: list[Tensor] = []
        places = zip(bucket.parameters, bucket.views_N, strict=True)
        for index, (parameter, view) in enumerate(places):
            if parameter.grad is view:
                filled_N[index] = True
            elif keeps:  # it has no gradient, or has lost it
                filled_N[index] = bucket.used_N[index] = False
            if not filled_N[index]:
                empty.append(view)
        if empty:
            torch._foreach_zero_(empty)
        bucket.intake = running.after
        self._exchange.begin(bucket, complete=running.complete)


def too_late(name: str) -> UserError:
    """Returns the error for a gradient that came after the sum."""
    return UserError(
        f"parameter {name!r} got a gradient after the gradients were summed over the ranks, which "
        "would be this rank's alone. Call session.backward once for each micro-batch, with the sum "
        "of its losses, and take gradients that move inputs or weights (FGM, SAM) by "
        "torch.autograd.grad; a layer that some steps alone run twice under "
        "torch.utils.checkpoint(…, use_reentrant=True) needs use_reentrant=False"
    )
