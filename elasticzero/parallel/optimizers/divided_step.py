"""Steps a script's optimizers on pieces of parameters, all at once or part by part.

It stands alone because a step is prepared before it is decided whether it is made: what a GPU says
of the gradients is on its way meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from elasticzero.parallel.optimizers.groups import Optimizers
from elasticzero.parallel.optimizers.pieces import ParameterPiece
from elasticzero.torch_internals.hooks import has_step_hooks


@dataclass(frozen=True, slots=True, eq=False)
class StepPart:
    """Holds what is stepped together."""

    parameters: list[list[nn.Parameter]]
    """The pieces of each group of the optimizers that step part by part."""
    values: list[Tensor]
    """The model's own elements of the pieces that have masters."""
    masters: list[Tensor]


class DividedStep:
    """Is one step of the optimizers that the present global batch has gradients for.

    Torch's own optimizers step part by part, unless something is to run once at each step.
    """

    def __init__(
        self,
        optimizers: Optimizers,
        pieces: Mapping[str, ParameterPiece],
        parts: Sequence[Collection[str]],
    ) -> None:
        """Prepares the step.

        Args:
            optimizers: The script's optimizers, whose groups have this rank's pieces.
            pieces: The pieces by the names of their parameters.
            parts: The names of the parameters, part by part.
        """
        self._optimizers = optimizers
        stepped = optimizers.stepped
        self._divisible = {n: o for n, o in stepped.items() if _is_divisible(o)}
        self._whole = [name for name in stepped if name not in self._divisible]
        self._groups = [g for g in optimizers.groups if g.optimizer_name in self._divisible]
        self._parts = [self._part(names, pieces) for names in parts]

    def _part(self, names: Collection[str], pieces: Mapping[str, ParameterPiece]) -> StepPart:
        stepped = filter(self._optimizers.has_gradients, names)
        present = {name: piece for name in stepped if (piece := pieces.get(name)) is not None}
        parameters = [
            [present[name].parameter for name in group.names if name in present]
            for group in self._groups
        ]
        mastered = [piece for piece in present.values() if piece.values is not None]
        return StepPart(
            parameters=parameters,
            values=[piece.values for piece in mastered if piece.values is not None],
            masters=[piece.parameter.detach() for piece in mastered],
        )

    def run(self, stepped: Callable[[int], None]) -> None:
        """Steps the optimizers, and rounds the masters to the model's own elements.

        Args:
            stepped: Called with the index of each part once it is up to date.

        Raises:
            UserError: An optimizer keeps or has what it may not.
        """
        for name in self._whole:
            self._optimizers.step_one(name)
        whole = [group.options["params"] for group in self._groups]
        try:
            for index, part in enumerate(self._parts):
                for group, parameters in zip(self._groups, part.parameters, strict=True):
                    group.options["params"] = parameters
                self._step(last=index == len(self._parts) - 1)
                if part.values:
                    torch._foreach_copy_(part.values, part.masters)
                stepped(index)
        finally:
            for group, parameters in zip(self._groups, whole, strict=True):
                group.options["params"] = parameters

    def _step(self, *, last: bool) -> None:
        """Steps those of the optimizers that have parameters now; a scheduler expects one call of
        each in a step, at least for the `last` part."""
        for optimizer in self._divisible.values():
            if last or any(group["params"] for group in optimizer.param_groups):
                optimizer.step()


def _is_divisible(optimizer: torch.optim.Optimizer) -> bool:
    is_of_torch = type(optimizer).__module__.partition(".")[0] == "torch"
    return is_of_torch and not has_step_hooks(optimizer)
