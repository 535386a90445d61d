"""Keeps what messages have left out of gradients, and adds it to those of the next steps.

That is error feedback (Seide et al., "1-bit stochastic gradient descent and its application to
data-parallel distributed training of speech DNNs", 2014; Karimireddy et al., "Error feedback fixes
SignSGD", 2019): nothing of a gradient is lost by its encoding, it comes in a later step.

Rules:
 EF1  As the gradients of a bucket begin to be summed the rank's residual is added to them, and
      what its messages leave out of them is the next residual. Only the sum of residuals over all
      ranks means anything: whichever rank has a part of it sends it.
 EF2  The residual of a boundary stays as it is until a step is applied. So a step that is skipped
      or made again begins with the same one, and what is captured at a boundary has its own. It is
      without the loss scale, by which a step multiplies its gradients.
 EF3  The residual of a parameter that no rank has used in a global batch, or whose bucket was not
      summed, stays as it is in that step.
 EF4  A rank that comes in has none. One that leaves inside of the loops gives its own to one that
      stays. In a stored state each rank has its own; fewer ranks that load it add up several.
 EF5  Where a rank or a node holds the whole state, and a peer is lost, that is stored without
      residuals, for they differ: each rank that is left keeps its own apart
      (`snapshots/kept_residual.py`), and what the lost ones had is gone. Where all agree to end a
      generation, the sum is stored.
 EF6  With `powersgd` the state has right factors too (`low_rank.py`), which all ranks have alike.
      EF2 and EF3 hold for them. They only say in which directions a step looks first: a run that
      has none of a stored state begins with others, and loses nothing.
Shapes: E elements of a bucket with its padding, those of a parameter's gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elasticzero.options.wire import Wire
from elasticzero.parallel.mesh import Mesh
from elasticzero.parallel.wire.codecs import Encoding, LowRank
from elasticzero.parallel.wire.low_rank import RightFactors
from elasticzero.rank_groups.group import RankGroup
from elasticzero.spans import Span
from elasticzero.state.model import FACTOR, RESIDUAL, LoadTarget, Spec, spec_of

TAG = 0x6578
"""Keeps these messages apart from those that a script sends by itself."""

Views = Callable[[Tensor], Sequence[Tensor]]
"""Returns the places of a bucket's parameters in a flat tensor, in their shapes."""


class BucketResidual:
    """Holds one rank's residual of the gradients in one bucket."""

    def __init__(
        self,
        names: Sequence[str],
        flat_E: Tensor,
        views: Views,
        encoding: Encoding | None = None,
    ) -> None:
        """Begins with zeros.

        Args:
            names: The parameters.
            flat_E: A tensor of the size, dtype and device of the gradients.
            views: Returns the parameters' places in it.
            encoding: How gradients are encoded; None: nothing is known of it.
        """
        self.present_E, self._following_E = torch.zeros_like(flat_E), torch.zeros_like(flat_E)
        self._names, self._views = names, views
        self.factors = RightFactors({}, 0)
        """The right factors of the gradients; none where they are encoded by themselves."""
        if isinstance(encoding, LowRank):
            self.factors = RightFactors(self.by_name(self.present_E), encoding.rank)
        self._is_begun = False
        """Its gradients of the global batch have begun to be summed."""

    def following_E(self, scale: float) -> Tensor:
        """Returns the residual of the next boundary, once all gradients are encoded.

        Args:
            scale: What the gradients were multiplied by.
        """
        if not self._is_begun:
            return self.present_E
        return self._following_E if scale == 1.0 else self._following_E / scale

    def by_name(self, flat_E: Tensor) -> dict[str, Tensor]:
        """Returns the parts of a flat tensor by parameter."""
        return dict(zip(self._names, self._views(flat_E), strict=True))

    def add_to(self, gradients_E: Tensor, scale: float) -> Tensor:
        """Adds the residual to gradients that begin to be summed (EF1).

        Args:
            gradients_E: The gradients.
            scale: What they were multiplied by (EF2).

        Returns:
            Zeros, which become what messages leave out of them.
        """
        if self._is_begun:
            gradients_E.add_(self._following_E)
        else:
            gradients_E.add_(self.present_E, alpha=scale)
        self._is_begun = True
        return self._following_E.zero_()

    def keep(self, names: AbstractSet[str], scale: float) -> None:
        """Has the residual of some parameters stay in the step (EF3)."""
        if not self._is_begun or names.isdisjoint(self._names):
            return
        self.factors.keep(names)
        present = self.by_name(self.present_E)
        for name, following in self.by_name(self._following_E).items():
            if name in names:
                torch.mul(present[name], scale, out=following)

    def end(self, scale: float, *, applied: bool) -> None:
        """Ends a global batch, whose step was applied or not (EF2)."""
        if self._is_begun and applied:
            if scale != 1.0:
                self._following_E.div_(scale)
            self.present_E, self._following_E = self._following_E, self.present_E
        self.factors.end(applied=applied)
        self._is_begun = False

    @property
    def spare_E(self) -> Tensor:
        """Returns memory of the same size, with any contents, which is free between two steps."""
        return self._following_E


@dataclass(frozen=True, slots=True, kw_only=True)
class Squares:
    """Holds the square of the norm of the residual of a boundary."""

    of_rank: float
    """That of this rank."""
    of_all: float
    """The sum of those of all ranks."""


class Residual:
    """Holds one rank's residual of all gradients that its strategy encodes."""

    def __init__(self, wire: Wire, mesh: Mesh, replicas: RankGroup | None) -> None:
        """Begins without buckets, which `lay` gives it.

        Args:
            wire: The format of gradients between ranks.
            mesh: The rows of ranks.
            replicas: The ranks that hold the same part of the state, where they are not this one
                alone: all of `ddp`, or one of each row; None: ranks divide the state among all.
        """
        self.is_kept = wire.is_lossy
        """Whether there is any."""
        self._mesh, self._replicas = mesh, replicas
        self._buckets: Sequence[BucketResidual] = ()
        self._is_brought = False
        """The spare memory of the buckets has what ranks that leave have sent to this one."""
        self.scale = 1.0
        """What the gradients of the global batch are multiplied by: the loss scale."""
        self._is_of_newcomer = False
        self._squares_under_way: tuple[Tensor, Tensor, Any] | None = None
        """The square of this rank, that of all, and what must be waited for."""
        self._squares: tuple[Tensor, Tensor] | None = None
        self.is_complete = False
        """Whether all gradients of the global batch are encoded, so that `following` is known."""
        self.summed: Mapping[str, Tensor] = {}
        """The sum over all ranks by parameter, where all have agreed to end a generation (EF5)."""

    @property
    def differs_among_replicas(self) -> bool:
        """Returns whether other ranks hold the same part of the state as this one, but not its
        residual (EF5)."""
        return self._replicas is not None and len(self._replicas.ranks) > 1

    def lay(self, buckets: Sequence[BucketResidual]) -> None:
        """Goes on in other buckets, with the same residual and factor of each parameter."""
        earlier, factors = self.present(), self.factors()
        self._buckets = buckets
        for named, now in ((earlier, self.present()), (factors, self.factors())):
            for name, present in now.items():
                if name in named:
                    present.copy_(named[name])

    def present(self) -> dict[str, Tensor]:
        """Returns this rank's residual of the newest boundary by parameter."""
        return self._by_name([bucket.present_E for bucket in self._buckets])

    def factors(self) -> dict[str, Tensor]:
        """Returns the right factors of the newest boundary by parameter (EF6)."""
        return {n: f for bucket in self._buckets for n, f in bucket.factors.present.items()}

    def none(self) -> dict[str, Tensor]:
        """Returns zeros by parameter, which stand for that of a rank that is lost."""
        return {n: p.new_zeros(()).expand(p.shape) for n, p in self.present().items()}

    def following(self) -> dict[str, Tensor]:
        """Returns that of the next boundary, where `is_complete`, if the step is applied."""
        return self._by_name([bucket.following_E(self.scale) for bucket in self._buckets])

    def _by_name(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        """Returns the parts of a flat tensor of each bucket by parameter."""
        pairs = zip(self._buckets, flats, strict=True)
        return {name: part for b, flat_E in pairs for name, part in b.by_name(flat_E).items()}

    # A step.

    def begin_squares(self) -> None:
        """Begins to sum the squares of the norms over the ranks, once in a global batch. All ranks
        call this together."""
        if not self._buckets or self._mesh.world_size == 1 or self._squares_under_way is not None:
            return
        flats = [bucket.present_E for bucket in self._buckets]
        norms = [torch.linalg.vector_norm(flat_E).double().to(flats[0].device) for flat_E in flats]
        of_rank = torch.stack(norms).square().sum()
        of_all, group = of_rank.clone(), self._mesh.world_group.process_group
        work = dist.all_reduce(of_all, group=group, async_op=True)
        self._squares_under_way = of_rank, of_all, work

    def completed(self) -> None:
        """Takes note that all gradients of the global batch are encoded, and waits for the
        squares."""
        self.is_complete = self.is_kept
        under_way, self._squares_under_way = self._squares_under_way, None
        if under_way is not None:
            of_rank, of_all, work = under_way
            work.wait()
            self._squares = of_rank, of_all

    def squares(self) -> Squares | None:
        """Returns the newest squares that are known, of the boundary before the newest step; None:
        no step was made in this world."""
        if self._squares is None:
            return None
        of_rank, of_all = (float(square) for square in self._squares)
        return Squares(of_rank=of_rank, of_all=of_all)

    def keep(self, names: AbstractSet[str]) -> None:
        """Has the residual of these parameters, which no rank has used, stay in the step (EF3)."""
        for bucket in self._buckets if names else ():
            bucket.keep(names, self.scale)

    def end_step(self, *, applied: bool) -> None:
        """Ends a global batch, whose step was applied or not (EF2)."""
        for bucket in self._buckets:
            bucket.end(self.scale, applied=applied)
        self.is_complete, self._squares_under_way = False, None

    # Other worlds.

    def hand_over(self, ranks: Sequence[int | None]) -> None:
        """Sends the residual of each rank that leaves to one that stays (EF4). All ranks call this
        together, also those that leave; nothing changes before `enter_world`.

        Args:
            ranks: The rank in this world of each rank of the next one; None: it is none of this.
        """
        self._is_brought, me = False, self._mesh.rank
        for leaver, heir in _heirs(ranks, self._mesh.world_size):
            if leaver == me:
                self._exchange(dist.isend, [bucket.present_E for bucket in self._buckets], heir)
            elif heir == me and self._is_brought:
                rooms = [torch.empty_like(bucket.present_E) for bucket in self._buckets]
                self._exchange(dist.irecv, rooms, leaver)
                for bucket, room_E in zip(self._buckets, rooms, strict=True):
                    bucket.spare_E.add_(room_E)
            elif heir == me:
                self._exchange(dist.irecv, [bucket.spare_E for bucket in self._buckets], leaver)
                self._is_brought = True

    def _exchange(self, function: Any, flats: Sequence[Tensor], other: int) -> None:
        """Sends or receives a tensor for each bucket, and waits for that."""
        if flats:
            group = self._mesh.world_group.process_group
            messages = [dist.P2POp(function, flat_E, other, group, TAG) for flat_E in flats]
            for work in dist.batch_isend_irecv(messages):
                work.wait()

    def enter_world(self, mesh: Mesh, replicas: RankGroup | None) -> None:
        """Goes on in another world, with what was handed over; the buckets are those of before.

        Args:
            mesh: The rows of ranks.
            replicas: As at the beginning.
        """
        is_brought, self._is_brought = self._is_brought, False
        for bucket in self._buckets if is_brought else ():
            bucket.present_E.add_(bucket.spare_E)
        self._mesh, self._replicas = mesh, replicas
        self._squares = self._squares_under_way = None
        self.summed = {}

    def begin_as_newcomer(self) -> None:
        """Takes note that the others have the residuals of the state that this rank will load."""
        self._is_of_newcomer = True

    def sum_up(self) -> None:
        """Sums the residuals of ranks that hold the same part of the state, where all ranks leave
        at this boundary; they call this together (EF5)."""
        if self._replicas is None or not self.differs_among_replicas:
            return
        for bucket in self._buckets:
            bucket.spare_E.copy_(bucket.present_E)
            dist.all_reduce(bucket.spare_E, group=self._replicas.process_group)
        self.summed = self._by_name([bucket.spare_E for bucket in self._buckets])

    # A stored state.

    def loading(self, stored: Mapping[str, Spec]) -> Iterator[list[LoadTarget]]:
        """Yields where the right factors go that a stored state has, then where the residuals go,
        row by row: what was put there is added to this rank's as the next ones are asked for.

        Args:
            stored: Shape and dtype of each stored tensor; a residual has a row for each rank that
                has written the state.
        """
        named = {FACTOR + name: factor for name, factor in self.factors().items()}
        if factors := [
            LoadTarget(name, Span(0, factor.numel()), factor)
            for name, factor in named.items()
            if name in stored and stored[name] == spec_of(factor)
        ]:
            yield factors
        taken = {} if self._is_of_newcomer else self._fitting(stored)
        for present in taken.values():
            present.zero_()
        rows = max((stored[name].shape[0] for name in taken), default=0)
        rooms = {name: torch.empty(p.shape, dtype=stored[name].dtype) for name, p in taken.items()}
        for row in range(self._mesh.rank, rows, self._mesh.world_size):
            targets = []
            for name, room in rooms.items():
                if row < stored[name].shape[0]:
                    span = Span(row * room.numel(), (row + 1) * room.numel())
                    targets.append(LoadTarget(name, span, room))
            yield targets
            for target in targets:
                taken[target.name].add_(target.tensor.to(taken[target.name].device))

    def _fitting(self, stored: Mapping[str, Spec]) -> dict[str, Tensor]:
        """Returns this rank's residuals that a stored state has, by their stored name."""
        named = {RESIDUAL + name: present for name, present in self.present().items()}
        return {n: p for n, p in named.items() if n in stored and stored[n].shape[1:] == p.shape}

    def leaves_out(self, stored: Mapping[str, Spec]) -> bool:
        """Returns whether a stored state has residuals that no rank takes over, as with another
        `--wire`."""
        return {name for name in stored if name.startswith(RESIDUAL)} != self._fitting(
            stored
        ).keys()

    def put(self, parts: Mapping[str, Tensor]) -> None:
        """Takes over what this rank had before (EF5)."""
        for name, present in self.present().items():
            if name in parts and parts[name].shape == present.shape:
                present.copy_(parts[name])


def _heirs(ranks: Sequence[int | None], world_size: int) -> list[tuple[int, int]]:
    """Returns each rank that leaves, with the one that takes over its residual.

    Args:
        ranks: As for `Residual.hand_over`.
        world_size: The number of ranks of the present world.
    """
    stayers = [rank for rank in ranks if rank is not None]
    leavers = [rank for rank in range(world_size) if rank not in stayers]
    return [(rank, stayers[i % len(stayers)]) for i, rank in enumerate(leavers)] if stayers else []
