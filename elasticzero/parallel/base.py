"""Defines the interface of a strategy, and what a strategy is built from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from elasticzero.data.position import MicroBatch
from elasticzero.errors import UserError
from elasticzero.options.settings import TrainingSettings
from elasticzero.parallel.buckets.plan import DEFAULT_PLAN, BucketPlan
from elasticzero.parallel.finite import Suspects
from elasticzero.parallel.gradients import GradientHook
from elasticzero.parallel.mesh import Mesh
from elasticzero.parallel.optimizers.groups import MadeOptimizers, Optimizers
from elasticzero.parallel.wire.residual import Residual
from elasticzero.parallel.wire.traffic import Traffic
from elasticzero.state.model import LoadTarget, LocalTensor, NamedModel, RankState, Spec

GRADIENT_NORM = "gradient/norm"
"""The name of the gradient's norm among what must be equal on all ranks."""

NONE_STORED: Mapping[str, Any] = MappingProxyType({})
"""The small state of optimizers where none is stored."""

OptimizerFactory = Callable[[Any], MadeOptimizers]


class Agreement(Protocol):
    """Makes the result of a step's last collective that of all ranks of a node, or of none."""

    def begin(self) -> None:
        """Begins another global batch."""

    def offer(self, values: Tensor) -> None:
        """Takes the values that this rank has received."""

    def learn(self) -> Tensor | None:
        """Returns the values that another rank of the node has committed, on the CPU, after this
        rank's own collective has failed; None: none has, and none will."""

    def commit(self) -> None:
        """Binds all ranks of the node to the values that were offered; raises the error of a lost
        peer where another rank was told first that there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Holds what a strategy is built from."""

    model: nn.Module
    named: NamedModel
    factory: OptimizerFactory
    device: torch.device
    rank: int
    world_size: int
    alone: bool = False
    """No other rank takes part, now or later."""
    materialize: Callable[[nn.Module], list[nn.Parameter]] = lambda module: []
    """Gives the module memory and values where it has none yet, and returns those parameters."""
    gathered_dtype: torch.dtype | None = None
    """Format in which partitioned parameters are gathered for the forward; None: their own."""
    bucket_plan: BucketPlan = DEFAULT_PLAN
    """Says how ddp, zero1 and zero2 fill their buckets."""
    options: TrainingSettings = field(default_factory=TrainingSettings)
    """Training options, the same for every worker."""
    mesh: Mesh | None = None
    """The rows that hold the whole state each; None: all ranks are one row."""
    agreement: Agreement | None = None
    """Lets the ranks of a row agree on each step; None: they need not agree."""
    cpu_offload: bool = False
    """Divided state lies in host memory, from which a GPU gets parameters block by block."""
    mirrors: Sequence[int] = ()
    """Ranks of whose part of divided state this one keeps a live copy."""
    mirrored_by: int | None = None
    """Rank that keeps a live copy of this one's part; None: none does."""
    one_release: bool = True
    """No rank is of the release before."""
    by_node: bool = False
    """Each node holds the whole state, as soon as there are several."""

    @property
    def ranks_of_one_release(self) -> int:
        """Returns the number of ranks that can tell each other what the release before did not."""
        return self.world_size if self.one_release else 1

    @property
    def place(self) -> Mesh:
        return self.mesh or Mesh.of_world(self.rank, self.world_size)

    @property
    def state_device(self) -> torch.device:
        """Returns the device of the pieces that an optimizer works on."""
        return torch.device("cpu") if self.cpu_offload else self.device


class Strategy(Protocol):
    """Lays one model and its optimizer over the ranks of one generation."""

    model: nn.Module
    """The model that the user calls."""
    optimizers: Optimizers
    shards: int
    """Number of ranks that hold the whole training state together: those of one row."""
    residual: Residual
    """Holds what this rank has not sent of gradients yet."""
    traffic: Traffic
    """Counts what this rank sends; zero3 and `--deterministic` do not count."""
    tells_waits: bool
    """True if the time for which a backward waits for other ranks is known (`step_clock.py`)."""

    divides: bool
    """True if ranks divide the state as soon as there are several."""

    @property
    def may_be_tied(self) -> bool:
        """Returns whether `tied_to_world` may say something, the same on all ranks: they divide
        parameters too, of which a script may keep some, or state moves between GPUs."""

    def tied_to_world(self, growth: float = 1.0) -> str:
        """Returns what the script has that another world would make wrong, or what this rank lacks
        to go over to one; empty: nothing is known of such a thing. With rows of parameters it looks
        at all objects of the process: some 30 ms.

        Args:
            growth: By what this rank's part of the state is multiplied there.
        """

    def bring_state(self, ranks: Sequence[int | None], plan: BucketPlan | None = None) -> None:
        """Brings this rank what it is to have of the state in the next world, which it has not yet,
        where the ranks divide it, and what ranks that leave have not sent of gradients. All ranks
        call this together, also those that leave; nothing of the present state changes before
        `enter_world`.

        Args:
            ranks: The rank in this world of each rank of the next one; None: it is none of this.
            plan: How buckets are filled from then on; None: as they are.
        """

    def enter_world(self, mesh: Mesh, plan: BucketPlan | None = None) -> None:
        """Lays the state over the ranks of another world between two steps, once it was brought.

        Args:
            mesh: The rows of ranks.
            plan: How all fill their buckets, where others come into the world: then nothing is
                known of their gradients that these do not know; None: none come.
        """

    def lay(self, mesh: Mesh, plan: BucketPlan) -> None:
        """Lays a state that is yet to be loaded over the ranks by another plan than that which this
        was made with. The rows of ranks are the same."""

    def connect(self) -> None:
        """Takes note that the groups of the ranks that the state is laid over are connected, which
        they were not yet."""

    def expect(self, part: MicroBatch) -> None:
        """Announces the micro-batch of the next backward."""

    def backward(self, loss: Tensor, fraction: float, only: tuple[str, ...] | None = None) -> None:
        """Adds the gradient of `fraction * loss`, to be summed over ranks and micro-batches.

        Args:
            loss: The mean loss of a micro-batch.
            fraction: Its share of the global batch. With 0 it uses no parameter, and the loss may
                be anything.
            only: Names of the optimizers that the global batch is for, the same for all of its
                micro-batches; None: all.
        """

    def take_changes(self) -> UserError | None:
        """Takes in parameters to which the script has given other memory, at a boundary and before
        a step; returns the error for one whose shape, dtype or device has changed."""

    def changed_names(self) -> Collection[str]:
        """Returns the names of the parameters whose values the script has changed since the global
        batch began, or in the last one, if these steps compare values; else none."""

    def finish(
        self, factor: float, max_norm: float | None, hook: GradientHook | None = None
    ) -> None:
        """Completes the gradients after the last micro-batch, multiplies them by `factor`, scales
        them to a global norm of at most `max_norm`, and prepares the step. It changes no parameter.

        A parameter that any rank has used has a gradient on all of them at the step, and one that
        no rank has used has none. Nothing waits for a GPU: `norm`, `loss` and what uses them do.

        Args:
            factor: What the gradients are multiplied by.
            max_norm: The limit of their norm; None: there is none.
            hook: Called with the gradients before their norm is taken; None: none is.
        """

    @property
    def norm(self) -> float:
        """Returns the norm of the gradient of the global batch before scaling, after `finish`:
        equal on all ranks; NaN where a loss of any rank is not finite."""

    @property
    def loss(self) -> float:
        """Returns the mean loss of the global batch over all ranks, after `finish`; it comes from
        the device together with `norm`."""

    def suspects(self) -> Suspects:
        """Returns this rank's part of the reason, after `finish`, where `norm` is not finite."""

    def discard(self) -> None:
        """Drops the gradients of a global batch that is not applied, after `finish`."""

    def apply(self) -> None:
        """Steps the optimizer, begins to bring the parameters up to date on all ranks, and drops
        the gradients."""

    def settle(self) -> None:
        """Waits until the parameters are up to date on all ranks; raises torch's error where a peer
        is gone. All ranks call this before a generation ends."""

    def rank_state(self) -> RankState:
        """Returns the parameters and optimizer state, by name, and how ranks write them."""

    def changing(self) -> AbstractContextManager[RankState]:
        """Yields the state between two steps, whose parameters and masters the caller may change in
        place, in the same way on all ranks; what it has changed counts once the context ends. All
        ranks call this together."""

    def pieces(self) -> Mapping[str, LocalTensor]:
        """Returns what the optimizers step of each parameter on this rank, by the parameter's name:
        its elements, or those of its 32-bit master."""

    def mirrored_states(self) -> Mapping[int, RankState]:
        """Returns the state of each rank of which this one keeps a live copy, as `rank_state`
        returns it there. A copy is as new as this rank's own part."""

    def replicas(self) -> Mapping[str, Tensor]:
        """Returns what every rank has whole, by name: it must be equal on all ranks between two
        steps. Whoever asks verifies, and values are compared in the next step."""

    @property
    def comparison_s(self) -> float:
        """Returns the seconds that such a comparison of values has taken, where that is not small
        beside the digest of replicas."""

    def filling(
        self, stored: Mapping[str, Spec], small: Mapping[str, Any] = NONE_STORED
    ) -> AbstractContextManager[Iterable[LoadTarget]]:
        """Yields where a stored state goes; what is put there takes effect when the context ends.

        Creates optimizer state as it is stored; raises `CheckpointMismatch` when it is another
        optimizer's.

        Args:
            stored: Shape and dtype of each stored tensor.
            small: What `RankState.optimizers` was; empty in checkpoints of an older release.
        """
