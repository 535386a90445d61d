"""The interface of a strategy, what a strategy is built from, and the choice of one by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from elasticzero.errors import UserError
from elasticzero.parallel.finite import Suspects
from elasticzero.spans import STRATEGIES, Span
from elasticzero.state.model import NamedModel, RankState, Spec

GRADIENT_NORM = "gradient/norm"
"""The name of the gradient's norm among what must be equal on all ranks."""

OptimizerFactory = Callable[[Any], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """Where the elements `span` of a stored tensor are to be put."""

    name: str
    span: Span
    tensor: Tensor
    """As many elements as the span, of the stored dtype, in any shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a strategy is built from."""

    model: nn.Module
    named: NamedModel
    factory: OptimizerFactory
    device: torch.device
    rank: int
    world_size: int


class Strategy(Protocol):
    """One model and optimizer, laid over the ranks of one generation."""

    model: nn.Module
    """What the user calls."""
    optimizer: torch.optim.Optimizer
    group_names: list[list[str]]
    """The parameters of each optimizer group, by name."""
    replicated: bool
    """Whether each rank alone holds the whole training state."""

    def expect(self, *, last: bool) -> None:
        """A micro-batch follows; last: of its global batch."""

    def backward(self, loss: Tensor, fraction: float) -> None:
        """Add the gradient of `fraction * loss`, to be summed over ranks and micro-batches.

        A micro-batch of fraction 0 uses no parameter, and its loss may be anything.
        """

    def finish(self, factor: float, max_norm: float | None) -> Tensor:
        """After the last micro-batch: complete the gradients, multiply them by `factor`, and scale
        them to a global norm of at most `max_norm`. Changes no parameter.

        A parameter that any rank has used has a gradient on all of them then, and one that no rank
        has used has none. Returns the norm before scaling: 0-dim, equal on all ranks; NaN where a
        loss of any rank is not finite.
        """

    def suspects(self) -> Suspects:
        """After `finish` gave a norm that is not finite: what this rank has of the reason."""

    def apply(self) -> None:
        """Step the optimizer, begin to bring the parameters up to date everywhere, drop the
        gradients."""

    def settle(self) -> None:
        """Wait until the parameters are up to date everywhere; raises torch's error where a peer is
        gone. All ranks call this before a generation ends."""

    def rank_state(self) -> RankState:
        """The parameters and optimizer state, by name, and how ranks shall write them."""

    def replicas(self) -> Mapping[str, Tensor]:
        """What every rank has whole, by name: it must be equal on all of them between two steps."""

    def filling(self, stored: Mapping[str, Spec]) -> AbstractContextManager[Iterable[LoadTarget]]:
        """Where a stored state goes; what is put there takes effect when the context ends.

        Creates optimizer state as `stored` has it; raises `CheckpointMismatch` when it is another
        optimizer's.
        """


def create(name: str, setting: Setting) -> Strategy:
    """The strategy `name` over `setting`; the model is on its device already."""
    if name == "ddp":
        from elasticzero.parallel.ddp import Replicated

        return Replicated(setting)
    if name in ("zero1", "zero2"):
        from elasticzero.parallel.zero import FlatBuckets

        return FlatBuckets(setting, stage=int(name[-1]))
    if name == "zero3":
        from elasticzero.parallel.fsdp import FullyPartitioned

        return FullyPartitioned(setting)
    raise UserError(f"strategy {name!r} is not one of {', '.join(STRATEGIES)}")
