"""Loads the state that a generation starts from on one rank: a snapshot, a checkpoint, first values
of optimizers from files, or the state of a boundary at which the others have entered the world."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from elasticzero.checkpoint.io.reader import Checkpoint
from elasticzero.comm.worlds.entering import Boundary
from elasticzero.data.position import DataPosition
from elasticzero.ipc.agent_client import AgentClient
from elasticzero.parallel import Strategy
from elasticzero.parallel.buckets.plan import BucketPlan
from elasticzero.parallel.mesh import Mesh
from elasticzero.snapshots.kept_residual import KeptResidual
from elasticzero.snapshots.restore import open_source, restore_state, seeded_generators
from elasticzero.state.auxiliary import AuxiliaryState
from elasticzero.state.model import RESIDUAL
from elasticzero.state.outer_state import OuterState
from elasticzero.state.schedules import warn_of_changed_rates
from elasticzero.training.worlds.newcomer import Newcomer

if TYPE_CHECKING:
    from elasticzero.snapshots.pretrained.optimizer import PretrainedOptimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedState:
    """Says what was loaded."""

    step: int = 0
    position: DataPosition = field(default_factory=DataPosition)
    bytes_read: int = 0
    boundary: Boundary | None = None
    """The others' boundary, at which this rank begins; None: all begin."""
    stored: bool = True
    """True if the state was stored; False: training begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingState:
    """Holds where the state that a generation starts from is loaded from."""

    link: AgentClient
    strategy: str
    """The strategy's name."""
    plan: Callable[[], BucketPlan]
    """Returns how a generation that begins now fills its buckets."""
    opened: Checkpoint | None = None
    """The state, if `session.prepare` has opened it."""
    kept: KeptResidual
    """What this rank's predecessor has kept by itself."""
    first: PretrainedOptimizer | None = None
    """The first state of optimizers, where training begins with one; None: it begins without."""
    outer: OuterState | None = None
    """Restores what islands have agreed on; None: that is not restored."""
    newcomer: Newcomer | None = None
    """Brings this rank to the boundary at which others enter the world; None: all begin in it."""

    def load(self, strategy: Strategy, auxiliary: AuxiliaryState, mesh: Mesh) -> LoadedState:
        """Loads the state that the assignment names.

        Args:
            strategy: The model and its optimizers as they are laid over the ranks.
            auxiliary: The small state.
            mesh: The rows of ranks.

        Raises:
            CheckpointMismatch: The state does not fit.
        """
        if self.newcomer is not None:
            return self._load_boundary(self.newcomer, strategy, auxiliary, mesh)
        assignment = self.link.assignment
        if assignment.resume.tier == "fresh":
            auxiliary.begin()
            if self.first is not None:
                self.first.load(strategy, auxiliary)
            return LoadedState(stored=False)
        source = self.opened or open_source(assignment)
        loaded = self._load(source, strategy, auxiliary)
        if assignment.resume.tier == "ram":
            names = source.manifest.layout.tensors
            is_stored = any(name.startswith(RESIDUAL) for name in names)
            self.kept.take(loaded.step, len(loaded.position.skipped), is_stored=is_stored)
        if assignment.rank == 0:
            warn_of_changed_rates(auxiliary.tracked)
        if assignment.generation == 1:  # a new run goes on where `session.stop` ended the last
            loaded = replace(loaded, position=replace(loaded.position, stopped=None))
        return loaded

    def _load_boundary(
        self, newcomer: Newcomer, strategy: Strategy, auxiliary: AuxiliaryState, mesh: Mesh
    ) -> LoadedState:
        """Loads the state of the boundary at which the others have entered the world.

        Args:
            newcomer: Waits for that.
            strategy: The model and its optimizers.
            auxiliary: The small state.
            mesh: The rows of ranks.
        """
        boundary = newcomer.await_boundary()
        source, assignment = newcomer.open_source(), self.link.assignment
        auxiliary.take_buckets(source.manifest.state)
        strategy.lay(mesh, self.plan())
        loaded = self._load(source, strategy, auxiliary)
        generators = seeded_generators(assignment.rank, loaded.step, auxiliary.device)
        auxiliary.restore_rng(generators)
        return replace(loaded, boundary=boundary)

    def _load(
        self, source: Checkpoint, strategy: Strategy, auxiliary: AuxiliaryState
    ) -> LoadedState:
        rank = self.link.assignment.rank
        position = restore_state(
            source, strategy, auxiliary, rank, name=self.strategy, outer=self.outer
        )
        return LoadedState(
            step=source.manifest.step, position=position, bytes_read=source.bytes_read
        )

    def json(self) -> Mapping[str, Any]:
        """Returns the state without its tensors; empty: training begins.

        Raises:
            EntryRefused: It is not known yet.
        """
        assignment = self.link.assignment
        if assignment.resume.tier == "fresh":
            return {}
        if self.newcomer is not None:
            self.newcomer.require_boundary("what session.steps_in follows from")
        return (self.opened or open_source(assignment)).manifest.state
