"""Holds what a training state is made of: a model that is laid over the ranks, and its captures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn

from elasticzero.parallel import Strategy
from elasticzero.parallel.buckets.plan import DEFAULT_PLAN, BucketPlan
from elasticzero.parallel.gradients import HiddenGradients
from elasticzero.parallel.optimizers.script_optimizers import OtherOptimizers
from elasticzero.parallel.parameter_changes import ParameterObjects
from elasticzero.snapshots.mirrored_shards import MirroredShards
from elasticzero.snapshots.requests import CheckpointRequests
from elasticzero.snapshots.stager import StateStager
from elasticzero.state.auxiliary import AuxiliaryState
from elasticzero.state.boundary_values import BoundaryValues
from elasticzero.training.step_guard import StepGuard
from elasticzero.training.worlds.change import WorldChange
from elasticzero.training.worlds.rows import Rows
from elasticzero.training.worlds.starting_state import StartingState

if TYPE_CHECKING:
    from elasticzero.ipc.fault_hold import FaultHold
    from elasticzero.rehearsal.probe import Probe


@dataclass(frozen=True, slots=True, kw_only=True)
class LaidModel:
    """Holds a model that is laid over the ranks, with what belongs to its training state."""

    strategy: Strategy
    auxiliary: AuxiliaryState
    rows: Rows
    """The rows of ranks that hold the whole state each."""
    guard: StepGuard = field(default_factory=StepGuard)
    """Decides whether steps are applied."""
    gradients: HiddenGradients = field(
        default_factory=lambda: HiddenGradients({}, partitioned=False)
    )
    """The gradients of the parameters, which the script may not use until they are complete."""
    objects: ParameterObjects = field(default_factory=lambda: ParameterObjects(nn.Module()))
    """The parameters that the model's modules have."""
    others: OtherOptimizers | None = None
    """Refuses optimizers beside those of the strategy; None: nobody looks for them."""
    probe: Probe | None = None
    """Records what each boundary has, for a rehearsal; None: this is none."""
    values: BoundaryValues = field(default_factory=lambda: BoundaryValues({}))
    """What parameters were at the last boundary, where the script has changed them since."""
    plan: Callable[[], BucketPlan] = lambda: DEFAULT_PLAN
    """Returns how a generation that begins now fills its buckets."""
    change: WorldChange | None = None
    """Enters the next world inside of a loop; None: planned changes begin all loops anew."""
    fault_hold: FaultHold | None = None
    """Waits at the steps of faults, for `elasticzero local`; None: it has none at a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captures:
    """Holds what captures a training state, and where it is loaded from."""

    stager: StateStager
    requests: CheckpointRequests
    mirrored: MirroredShards
    start: StartingState
    """Where the state is loaded from that this generation starts from."""

    def release(self) -> None:
        """Frees what earlier generations have left for their successors, once this one has captured
        a state of its own."""
        self.mirrored.release()
        self.start.kept.release()
