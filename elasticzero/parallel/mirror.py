"""Keeps, on one rank, a live copy of another rank's part of divided state: its mirror.

The mirror receives its owner's part of each gradient, and makes the same step with it. So whatever
kills the owner, its part of the state of the newest step is in the memory of another node.

Rules:
 M1  Before the norm of a gradient is summed over the ranks, each rank sends its part of the
     gradient, as it is to be stepped but for clipping, to the rank that keeps its mirror, and waits
     for the parts of which it keeps mirrors itself. A rank that has the norm so knows that every
     rank has all that it needs for the step.
 M2  A rank that has the norm steps its own part and its mirrors, whatever becomes of the others.
 M3  A mirror takes its elements of the parameters anew before each step: from the whole parameters
     where each rank has them (zero1, zero2), else from the owner, which sends them with the
     gradient (zero3). So what a script changes in parameters counts for the mirror too, and
     rounding that differs between two kinds of processors does not add up. A mirror of zero3 is not
     handed over where the script has changed parameters between the last step and the boundary
     after it, on whatever rank: each rank runs the same call, which torch counts there, whether it
     changes the rows of this rank or not.
 M4  A mirror does not have what a script changes in the state of its optimizer, as one does that
     prunes moments. Each rank looks for such a change before each step, and the ranks tell each
     other with the norm: from then on none keeps mirrors until the generation ends. Until that step
     a rank that has found a change in its own state hands over none: each rank runs the same code.
     Ranks of the release before are not told, for their messages have no room for it.
Shapes: C elements of one message, of one chunk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elasticzero.parallel.base import GRADIENT_NORM, NONE_STORED, Setting
from elasticzero.parallel.finite import clipping
from elasticzero.parallel.mesh import Mesh
from elasticzero.parallel.optimizers.groups import Optimizers
from elasticzero.parallel.optimizers.pieces import ParameterPiece
from elasticzero.parallel.optimizers.state import MASTER
from elasticzero.parallel.optimizers.state_marks import state_marks
from elasticzero.parallel.partitioned import Exchange, PartitionedOptimizer
from elasticzero.state.model import LoadTarget, Spec

log = logging.getLogger(__name__)

CHANGED_STATE = (
    "the script has changed the state of its optimizer, which live copies on other nodes do not "
    "have: until the next generation --redundancy mirror keeps none, and after the loss of a node "
    "training goes back to a snapshot or checkpoint"
)
TAG = 0x657B
"""Keeps these messages apart from those of the buckets and of a script."""


@dataclass(slots=True, eq=False)
class MirroredChunk:
    """Holds the pieces of a mirror whose gradients come in one message."""

    pieces: Sequence[ParameterPiece]
    places: Sequence[int]
    """Where the gradient of each piece begins in the message."""
    gradient_C: Tensor
    """The message."""
    renew: Callable[[], None] = lambda: None
    """Takes the elements from whole parameters: M3."""


class Mirror:
    """Holds a copy of one rank's pieces, and steps it as their owner does."""

    def __init__(
        self,
        rank: int,
        chunks: Sequence[MirroredChunk],
        optimizers: Optimizers,
        specs: Mapping[str, Spec],
        mesh: Mesh,
        *,
        rows: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Places the copies of the owner's pieces in the optimizers.

        Args:
            rank: The owner.
            chunks: The pieces, with the room for their gradients.
            optimizers: This mirror's own copies of the optimizers.
            specs: Shape and dtype of each whole parameter, by its name.
            mesh: The rows of ranks.
            rows: Room for the owner's elements of each parameter, where the owner sends them; None:
                each rank has the whole parameters.
        """
        self.rank = rank
        """The owner."""
        self.chunks = chunks
        self.rows = rows or {}
        self.live = False
        """True once the owner has sent what it sends in each step."""
        self._has_masters = not self.rows
        self.pieced = PartitionedOptimizer(optimizers, specs, mesh)
        self.pieced.place({piece.name: piece for chunk in chunks for piece in chunk.pieces})

    @property
    def messages(self) -> list[Tensor]:
        """Returns the room for what the owner sends, in its order."""
        return [*self.rows.values(), *(chunk.gradient_C for chunk in self.chunks)]

    def take(self, used: Collection[str], norm: Tensor, max_norm: float | None) -> None:
        """Gives the pieces the gradient that was received, clipped as the owner clips it.

        Args:
            used: The parameters that any rank has used in the global batch.
            norm: Norm of the whole gradient before clipping: one number.
            max_norm: Limit of the norm; None: no limit.
        """
        self.renew()
        self.live = True
        if not self._has_masters:
            self._has_masters = True
            for piece in self.pieced.pieces.values():
                if piece.values is not None:
                    piece.parameter.data.copy_(piece.values)
        gradients = {
            piece.name: chunk.gradient_C[first : first + piece.parameter.numel()]
            for chunk in self.chunks
            for piece, first in zip(chunk.pieces, chunk.places, strict=True)
            if piece.name in used
        }
        if max_norm is not None and gradients:
            parts = list(gradients.values())
            torch._foreach_mul_(parts, clipping(norm, max_norm).to(parts[0].dtype))
        self.pieced.give(gradients, used)

    def step(self, owners: Optimizers) -> None:
        """Steps the pieces that have a gradient.

        Args:
            owners: The owner's optimizers, whose options may have changed since the last step.
        """
        self.pieced.optimizers.follow(owners)
        self.pieced.prepare_step([list(self.pieced.pieces)])
        self.pieced.step()

    def renew(self) -> None:
        """Takes the elements from whole parameters, where this rank has them (M3)."""
        for chunk in self.chunks:
            chunk.renew()

    @contextmanager
    def filling(
        self, stored: Mapping[str, Spec], small: Mapping[str, Any] = NONE_STORED
    ) -> Iterator[list[LoadTarget]]:
        """Does what `PartitionedOptimizer.filling` does, for the copy."""
        with self.pieced.filling(stored, small) as slots:
            yield slots
            self.renew()
        self._has_masters = self._has_masters or any(n.endswith("/" + MASTER) for n in stored)


class Mirrors:
    """Exchanges gradients with the ranks that keep mirrors of each other, and holds this rank's."""

    def __init__(self, setting: Setting, mirrors: Sequence[Mirror], optimizers: Optimizers) -> None:
        """Takes the mirrors.

        Args:
            setting: This rank's place and the ranks that keep mirrors.
            mirrors: The mirrors that this rank keeps.
            optimizers: This rank's own optimizers, whose parameters are dealt.
        """
        self.kept = mirrors
        self._kept_by = setting.mirrored_by
        self._group = setting.place.world_group
        self._tells_changes = setting.mirrored_by is not None and setting.one_release
        self._on_cpu = setting.device.type == "cpu"
        self._optimizers = optimizers
        self._marks = self._present_marks()

    def _present_marks(self) -> list[Any]:
        """Returns the marks of the state of this rank's optimizers; none where nobody needs
        them."""
        is_needed = self.kept or self._kept_by is not None
        return state_marks(self._optimizers.by_name.values()) if is_needed else []

    def has_changed_state(self) -> bool:
        """Tells whether the script has changed this rank's optimizer state since the newest step or
        restore (M4)."""
        return self._marks != self._present_marks()

    def up_to_date(self) -> Sequence[Mirror]:
        """Returns the mirrors that may be handed over; none where the script has changed this
        rank's optimizer state (M4)."""
        if self.kept and self.has_changed_state():
            log.warning(CHANGED_STATE)
            return ()
        return self.kept

    def _stop(self) -> None:
        """Keeps no mirrors any more, and sends nothing; all ranks do so in the same step (M4)."""
        if self.kept:
            log.warning(CHANGED_STATE)
        self.kept, self._kept_by = (), None

    def exchange(self, sent: Callable[[], Sequence[Tensor]]) -> Exchange:
        """Returns what the ranks tell each other in the next step.

        Args:
            sent: Returns this rank's part of the gradient, as `_begin` takes it.
        """
        changed = self.has_changed_state() if self._tells_changes else None
        return Exchange(lambda: self._begin(sent), changed)

    def _begin(self, sent: Callable[[], Sequence[Tensor]]) -> list[Any]:
        """Begins to send this rank's part of the gradient, and to receive the parts of its mirrors
        (M1).

        Args:
            sent: Returns this rank's part, one tensor for each of `Mirror.messages`; empty ones, of
                buckets whose whole parameters are all other ranks', are not sent.

        Returns:
            What must be waited for.
        """
        sends = [] if self._kept_by is None else [(t, self._kept_by) for t in sent() if t.numel()]
        receives = [(t, mirror.rank) for mirror in self.kept for t in mirror.messages if t.numel()]
        if not sends and not receives:
            return []
        group = self._group.process_group
        if self._on_cpu:
            works: list[Any] = [dist.irecv(t, r, group=group, tag=TAG) for t, r in receives]
            return works + [dist.isend(t, r, group=group, tag=TAG) for t, r in sends]
        operations = [dist.P2POp(dist.irecv, t, r, group=group) for t, r in receives]
        operations += [dist.P2POp(dist.isend, t, r, group=group) for t, r in sends]
        return list(dist.batch_isend_irecv(operations))

    def take(self, pieced: PartitionedOptimizer, max_norm: float | None) -> None:
        """Gives each mirror its gradient, once the norm is known; keeps none any more where a rank
        has told of changed state (M4).

        Args:
            pieced: This rank's own part, which has completed the global batch.
            max_norm: Limit of the norm; None: no limit.
        """
        if not self.kept and self._kept_by is None:
            return  # nothing waits for the norm
        if pieced.outcome.state_changed:
            self._stop()
        norm = pieced.norm()[GRADIENT_NORM]
        for mirror in self.kept:
            mirror.take(pieced.outcome.used, norm, max_norm)

    def step(self) -> None:
        """Steps the mirrors, once this rank's own part is stepped (M2)."""
        for mirror in self.kept:
            mirror.step(self._optimizers)
        self._marks = self._present_marks()

    def restored(self) -> None:
        """Begins anew with the state that this rank's optimizers were just given."""
        self._marks = self._present_marks()

    @contextmanager
    def filling(
        self, stored: Mapping[str, Spec], small: Mapping[str, Any] = NONE_STORED
    ) -> Iterator[list[LoadTarget]]:
        """Yields where the stored state of the mirrors goes."""
        with ExitStack() as stack:
            slots = [stack.enter_context(mirror.filling(stored, small)) for mirror in self.kept]
            yield [slot for targets in slots for slot in targets]
