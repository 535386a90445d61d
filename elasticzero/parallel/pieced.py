"""Does what is the same in every strategy whose optimizers work on pieces of parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from elasticzero.errors import UserError
from elasticzero.parallel.buckets.plan import BucketPlan
from elasticzero.parallel.finite import Suspects
from elasticzero.parallel.mesh import Mesh
from elasticzero.parallel.optimizers.moves import CPU, Division, PieceState, lack_of_memory
from elasticzero.parallel.parameter_changes import ForwardChanges
from elasticzero.parallel.partitioned import PartitionedOptimizer
from elasticzero.parallel.wire.residual import Residual
from elasticzero.state.model import LocalTensor, RankState


class PiecedStrategy:
    """Does what is the same in every `Strategy` whose optimizers work on pieces."""

    divides = True
    tells_waits = True

    _pieced: PartitionedOptimizer
    _parameters: Mapping[str, nn.Parameter]
    _changes: ForwardChanges
    shards: int
    residual: Residual
    _brought: Mapping[str, PieceState] | None = None
    """The state of this rank's pieces of the next world, once it was brought; None: it was not."""

    @property
    def may_be_tied(self) -> bool:
        return self._trained_on.type == "cuda"

    @property
    def _trained_on(self) -> torch.device:
        """Returns the device of the model's parameters."""
        return next((p.device for p in self._parameters.values()), CPU)

    def tied_to_world(self, growth: float = 1.0) -> str:
        return lack_of_memory(self._pieced.nbytes, growth, self._trained_on)

    def bring_state(self, ranks: Sequence[int | None], plan: BucketPlan | None = None) -> None:
        self.settle()
        self.residual.hand_over(ranks)
        present, following = self._division(self.shards), self._division(len(ranks), plan)
        self._brought = self._pieced.bring(present, following, ranks)

    def lay(self, mesh: Mesh, plan: BucketPlan) -> None:
        self.residual.begin_as_newcomer()
        self._brought = self._pieced.room(self._division(mesh.shards, plan).spans(mesh.shard))
        self.enter_world(mesh, plan)

    def enter_world(self, mesh: Mesh, plan: BucketPlan | None = None) -> None:
        raise NotImplementedError

    def connect(self) -> None:
        """Does nothing: its groups are asked for where they are used."""

    def _take_brought(self) -> Mapping[str, PieceState]:
        """Returns what `bring_state` has brought, once."""
        brought, self._brought = self._brought, None
        assert brought is not None, "a world is entered once its state was brought"
        return brought

    def _division(self, shards: int, plan: BucketPlan | None = None) -> Division:
        """Returns how so many ranks divide the elements that they step.

        Args:
            shards: The number of ranks.
            plan: How buckets are filled; None: as they are.
        """
        raise NotImplementedError

    def settle(self) -> None:
        raise NotImplementedError

    def take_changes(self) -> UserError | None:
        raise NotImplementedError

    def rank_state(self) -> RankState:
        raise NotImplementedError

    @contextmanager
    def changing(self) -> Iterator[RankState]:
        self.settle()
        if (error := self.take_changes()) is not None:
            raise error
        yield self.rank_state()

    @property
    def norm(self) -> float:
        return self._pieced.outcome.norm

    @property
    def loss(self) -> float:
        return self._pieced.outcome.loss

    def suspects(self) -> Suspects:
        if self._pieced.outcome.differ:
            raise UserError(self._difference())
        return self._pieced.suspects()

    def _difference(self) -> str:
        """Returns a sentence on what was not the same on all ranks in the global batch."""
        raise NotImplementedError

    @property
    def comparison_s(self) -> float:
        return 0.0

    def changed_names(self) -> Collection[str]:
        return self._changes.names

    def pieces(self) -> dict[str, LocalTensor]:
        pieces = self._pieced.pieces.values()
        return {piece.name: LocalTensor(piece.parameter, piece.start) for piece in pieces}

    def discard(self) -> None:
        self.residual.end_step(applied=False)
        self._drop_whole()
        self._pieced.discard()

    def _mark_changed(self) -> None:
        """Lets autograd see that a step has changed parameters that others share memory with: it
        then refuses the backward of a loss from before the step."""
        if self._pieced.optimizers.only is not None:
            increment_version(self._leaves(self._pieced.outcome.used))

    def _leaves(self, names: Collection[str]) -> list[Tensor]:
        """Returns the tensors that forwards have used for these parameters."""
        return [self._parameters[name] for name in names]

    def _drop_whole(self) -> None:
        """Drops what a global batch has left in the model's own parameters."""
        raise NotImplementedError
