"""Leaves the optimizers that a script has made to the session, and refuses others beside them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from elasticzero.errors import UserError
from elasticzero.parallel.optimizers.state_dicts import unchanged_groups
from elasticzero.torch_internals.hooks import AnyStepCheck, NewOptimizers, StepCheck
from elasticzero.torch_internals.tensors import reached_parameters


def take_over_optimizer(
    optimizer: torch.optim.Optimizer,
    applying: Callable[[], bool],
    model: nn.Module,
    *,
    strategy: str = "ddp",
) -> None:
    """Leaves it to the session alone to step the optimizer and to drop gradients.

    A script's own `zero_grad` does nothing, because the gradient of a global batch accumulates
    until its step is applied. A script's own `step` is refused, and so are further parameters. So
    is its state where it is that of parts of parameters: taken or loaded by the script, or looked
    up by a parameter of the model.

    Args:
        optimizer: The optimizer.
        applying: Returns whether the session lets the optimizer take its step now.
        model: The model as it is laid over the ranks.
        strategy: The strategy's name.
    """
    load = optimizer.load_state_dict

    def check() -> None:
        if not applying():
            raise UserError(
                "the script calls optimizer.step() itself: leave it out, for session.step() steps "
                "the optimizer once the global batch is complete. A GradScaler steps it too: "
                "session.prepare(…, precision='fp16') scales losses by itself"
            )

    def refuse(_: Any) -> NoReturn:
        raise UserError(
            "the script calls optimizer.add_param_group() after session.prepare, which has dealt "
            "the parameters to the ranks: make all groups in the function it is given, and freeze "
            "by requires_grad_(False) after session.prepare what is to be trained later"
        )

    def refuse_parts(*_: Any) -> NoReturn:
        raise UserError(
            f"the script takes or loads the optimizer's state_dict under {strategy}, where each "
            "rank has the state of its parts of the parameters: leave it to the session, whose "
            "checkpoints hold all of it, or use strategy ddp"
        )

    def load_in_place(state_dict: Any) -> None:
        with unchanged_groups(optimizer):
            load(state_dict)

    if strategy == "ddp":
        optimizer.__dict__["load_state_dict"] = load_in_place
    else:
        optimizer.__dict__["state_dict"] = optimizer.__dict__["load_state_dict"] = refuse_parts
        optimizer.state = StateOfParts(optimizer, model, strategy)
    optimizer.register_step_pre_hook(StepCheck(check))
    optimizer.__dict__["add_param_group"] = refuse
    optimizer.__dict__["zero_grad"] = lambda set_to_none=True: None


class StateOfParts(defaultdict[Any, Any]):
    """Holds an optimizer's state by the parts of parameters that a rank has, and refuses to be
    asked by a whole parameter of the model, for which a script would find nothing."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module, strategy: str) -> None:
        """Takes over the state that the optimizer has.

        Args:
            optimizer: The optimizer, whose groups have the parts.
            model: The model as it is laid over the ranks.
            strategy: The strategy's name, for the error.
        """
        super().__init__(dict, optimizer.state)
        self._strategy = strategy
        parts = {id(part) for group in optimizer.param_groups for part in group["params"]}
        self._whole = {
            id(parameter): (name, parameter)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and id(parameter) not in parts
        }
        """Name of each parameter by its number, with the parameter, so that no other object gets
        the number."""

    def _require_part(self, key: Any) -> None:
        if (whole := self._whole.get(id(key))) is not None:
            raise UserError(
                f"the script looks up the optimizer's state of parameter {whole[0]!r}, and under "
                f"{self._strategy} each rank has the state of its parts of the parameters: change "
                "the tensors of optimizer.state.values() in place, or use strategy ddp"
            )

    def __missing__(self, key: Any) -> Any:
        self._require_part(key)
        return super().__missing__(key)

    def __contains__(self, key: object) -> bool:
        self._require_part(key)
        return super().__contains__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._require_part(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        self._require_part(key)
        super().__delitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self._require_part(key)
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        self._require_part(key)
        return super().pop(key, *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        self._require_part(key)
        return super().setdefault(key, default)

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())  # a copy is of other parameters


class OtherOptimizers:
    """Refuses optimizers besides those of `session.prepare`.

    Of the model's parameters, `session.step()` would not step one that the script makes later, and
    one that the script steps itself would find no gradient. One of other parameters that steps in
    several global batches is state of one rank, which nobody keeps.
    """

    def __init__(
        self,
        model: nn.Module,
        applying: Callable[[], bool],
        *,
        batch: Callable[[], object | None] = lambda: None,
        tracked: Callable[[], Iterable[object]] = tuple,
    ) -> None:
        """Takes note of optimizers from here on.

        Args:
            model: The model as it is laid over the ranks.
            applying: Returns whether the session lets its optimizers take their step now.
            batch: Returns the global batch that the ranks work on; None: there is none, or one
                process alone.
            tracked: Returns the objects that the script tracks.
        """
        self._model, self._applying = model, applying
        self._batch, self._tracked = batch, tracked
        self._stepped: WeakKeyDictionary[torch.optim.Optimizer, object] = WeakKeyDictionary()
        """The first global batch in which each optimizer of other parameters has stepped."""
        self._new = NewOptimizers()
        AnyStepCheck(self._check)

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        if self._applying():
            return
        if (name := self._shared_parameter(optimizer)) is not None:
            raise UserError(
                f"the script steps an optimizer ({type(optimizer).__name__}) of parameter "
                f"{name!r} that session.prepare has not returned: leave it out, for session.step() "
                "steps those that session.prepare has returned"
            )
        batch = self._batch()
        if batch is None or self._stepped.setdefault(optimizer, batch) == batch:
            return
        if not any(holds(thing, optimizer) for thing in self._tracked()):
            raise UserError(
                f"the script steps an optimizer ({type(optimizer).__name__}) of parameters that "
                "the model given to session.prepare does not have, in one global batch after the "
                "other: their gradients are of this rank's samples alone, and no snapshot holds "
                "them. Make them a part of the model before session.prepare, with an optimizer in "
                "the dict that its function returns (session.backward and session.step with "
                "only=…); or, where they are the same on all ranks, track both by session.track"
            )

    def difference(self) -> UserError | None:
        """Returns the error for an optimizer that the script has made and still has; None: there
        is none."""
        for optimizer in self._new.alive():
            if (name := self._shared_parameter(optimizer)) is not None:
                return UserError(
                    f"the script has made another optimizer ({type(optimizer).__name__}) of "
                    f"parameter {name!r} after session.prepare, and session.step() steps those "
                    "that session.prepare has returned: leave the other one out, and write what is "
                    "to change into their param_groups. For another kind from some step on, end "
                    "the run there, and begin one with load= of its exported checkpoint"
                )
        return None

    def _shared_parameter(self, optimizer: torch.optim.Optimizer) -> str | None:
        """Returns the name of a parameter of the model that this optimizer has; None: it has
        none."""
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        return next((names[id(p)] for p in parameters_of(optimizer) if id(p) in names), None)


class OutsideParameters:
    """Refuses an optimizer of the script's own that steps parameters which a loss reaches, and
    which the model does not have: their gradients are of one rank's samples, and no state holds
    them."""

    def __init__(self, model: nn.Module, loss: Tensor) -> None:
        """Looks at what a loss reaches, before its backward.

        Args:
            model: The model that is trained.
            loss: The loss of a micro-batch.
        """
        inside = {id(parameter) for parameter in model.parameters()}
        outside = [p for p in reached_parameters(loss) if id(p) not in inside]
        self._shapes: Mapping[int, tuple[int, ...]] = {id(p): tuple(p.shape) for p in outside}
        self._outside = outside
        """Keeps them alive, so that no other object has the number of one of them."""
        if outside:
            AnyStepCheck(self._check)

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in parameters_of(optimizer):
            if (shape := self._shapes.get(id(parameter))) is not None:
                raise UserError(
                    f"the script's own {type(optimizer).__name__} steps a parameter of shape "
                    f"{shape} that the model given to session.prepare does not have: its "
                    "gradient is of this rank's samples alone, and no snapshot holds it. Make "
                    "it a part of the model before session.prepare (model.log_vars = "
                    "nn.Parameter(…)), and give it a group or an optimizer in the function "
                    "that session.prepare is given"
                )


def holds(thing: object, optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether an object that is tracked is this optimizer, or has it as an attribute."""
    attributes = getattr(thing, "__dict__", {}).values()
    return thing is optimizer or any(value is optimizer for value in attributes)


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    """Yields the parameters of all groups of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]
