"""Finds out, on a copy of a whole optimizer, what it keeps besides the state of its parameters.

Rules:
 OT1  What changes in attributes of the optimizer's own while it steps is state. It is stored only
      by a `state_dict` of the optimizer's own, and only where every rank has whole parameters.
 OT2  That is tried too: a fresh copy that is given it must come to the same attributes.
 OT3  Tensors in attributes that have the shape of a parameter are copies of parameters. Where parts
      are dealt, they would not fit; else the copy is stepped on parameters of the real shapes, and
      so often that an average which is written back every few steps is among the changes.
 OT4  What changes in a later step only, as a rate at the end of a warm-up, no trial shows. So each
      step of an optimizer whose attributes are not stored is looked at.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from elasticzero.errors import (
    CheckpointMismatch,
    ElasticZeroError,
    UserError,
    is_peer_error,
)
from elasticzero.nested import flatten, unflatten
from elasticzero.parallel.optimizers.attributes import (
    attribute_marks,
    copy_for_trial,
    own_attributes,
    tensors_in,
)
from elasticzero.parallel.optimizers.packed import is_packed
from elasticzero.parallel.optimizers.probe import (
    FAILURES,
    PACKING,
    SHAPES,
    GroupNature,
    begin_training,
    changed_attributes,
    has_modes,
    unchanged_generator,
    with_moving_rate,
)
from elasticzero.parallel.optimizers.state_dicts import changes_state_dict, load_state_dict

STEPS = 3
STEPS_WITH_COPIES = 20
"""Steps of an optimizer that has copies of parameters: Lookahead's default is every 5 or 6."""
DUMMIES = 8
"""Parameters of a group that have a dummy of their number of dimensions."""
ELEMENTWISE = "an optimizer that treats each element by itself, as SGD, Adam, AdamW and RMSprop do"
FOREIGN = ("torch", PACKING, "bitsandbytes")
"""Packages whose own optimizers keep in attributes only what they find anew."""


class PartsRefused(UserError):
    """An optimizer cannot work on parts of parameters. The message ends before any advice, since
    strategy ddp, which gives it whole ones, may refuse it as well."""

    def __init__(self, why: str, instead: str = "") -> None:
        """Makes the error.

        Args:
            why: Why it cannot, in a sentence without its end.
            instead: What the script may do other than take strategy ddp; empty: nothing is known.
        """
        super().__init__(why)
        self.instead = instead
        """The advice to a script besides that to take strategy ddp."""


def with_advice(refused: PartsRefused, optimizer: torch.optim.Optimizer) -> UserError:
    """Returns the error with the advice that holds for this optimizer: strategy ddp only where that
    takes it.

    Args:
        refused: Why the optimizer cannot work on parts.
        optimizer: The optimizer.
    """
    try:
        is_tried = check_whole(optimizer)
    except UserError as error:
        return UserError(f"{refused}, and strategy ddp does not take it either: {error}")
    if is_tried:
        instead = f", or {refused.instead}" if refused.instead else ""
        return UserError(f"{refused}; use strategy ddp{instead}")
    return UserError(
        f"{refused}, and a step of whole parameters has failed in a trial too: use "
        f"{refused.instead or ELEMENTWISE}; strategy ddp shows in its first step whether it "
        "can"
    )


def closure_sentence(kind: str) -> str:
    """Returns the sentence for an optimizer, of this class, that computes the loss in its step."""
    return (
        f"{kind} computes the loss anew inside its step, by a closure that session.step() cannot "
        "give it: use an optimizer that takes one gradient a step, such as AdamW; a first gradient "
        "that moves the weights, as SAM has it, is taken by torch.autograd.grad (docs/training.md)"
    )


def _takes_closure(optimizer: torch.optim.Optimizer) -> bool:
    return "closure" in inspect.signature(type(optimizer).step).parameters


def check_whole(optimizer: torch.optim.Optimizer) -> bool:
    """Checks that all is stored that an optimizer of whole parameters keeps (OT1, OT2).

    Returns whether that is known; it is not where the optimizer cannot step dummies.

    Raises:
        UserError: Something is not, or cannot be.
    """
    if type(optimizer).__module__.partition(".")[0] in FOREIGN:
        return True
    kind = type(optimizer).__name__
    with unchanged_generator(), torch.compiler.set_stance("force_eager"):
        if (trial := _tried(optimizer)) is None:
            if _takes_closure(optimizer) and _tried(optimizer, with_closure=True) is not None:
                raise UserError(closure_sentence(kind))
            return False  # it may step the parameters all the same
        _check_storable(trial.stepped, kind)
        changed = changed_attributes(trial.fresh, trial.stepped)
        if changed and not changes_state_dict(optimizer):
            raise UserError(_lost(kind, changed))
        if changes_state_dict(optimizer) and (lost := _lost_by_round_trip(trial)):
            raise UserError(
                f"{kind} changes {_listed(lost)} when it steps, and has another value there once "
                "its load_state_dict is given what its state_dict returns, so that a recovery "
                "would lose it: let both hold it"
            )
    return True


def check_before_parts(optimizer: torch.optim.Optimizer) -> None:
    """Checks that an optimizer holds nothing that parts of parameters do not fit (OT3).

    Raises:
        UserError: It holds something of the kind.
    """
    if type(optimizer).__module__.partition(".")[0] in FOREIGN:
        return
    kind = type(optimizer).__name__
    if has_modes(optimizer):
        raise PartsRefused(
            f"{kind} changes parameters in its train() and eval(), which would change only this "
            "rank's part of them"
        )
    if names := holders_of_parameters(optimizer):
        raise PartsRefused(
            f"{kind} keeps parameters, or copies of them, in {_listed(names)}, and each rank has "
            "parts of parameters",
            "an optimizer that keeps such copies in its state by parameter",
        )


def check_parts(optimizer: torch.optim.Optimizer, nature: GroupNature) -> None:
    """Checks that an optimizer of parts of parameters keeps only what is kept by parameter (OT1).

    Args:
        optimizer: The optimizer.
        nature: What it has done with dummies.

    Raises:
        UserError: It keeps more.
    """
    if type(optimizer).__module__.partition(".")[0] in FOREIGN:
        return
    kind = type(optimizer).__name__
    if nature.attributes:
        raise PartsRefused(_not_dealt(kind, nature.attributes))
    if nature.entries:
        raise PartsRefused(
            f"{kind} keeps {nature.entries[0]!r} in its state, which is no parameter, and only "
            "what it keeps by parameter can be dealt to ranks"
        )


def checked_step(optimizer: torch.optim.Optimizer) -> None:
    """Steps an optimizer that could not step dummies, and checks that all is stored that it keeps.

    Raises:
        UserError: Something is not.
    """
    kept: list[Any] = [optimizer.param_groups, optimizer.state, *optimizer.param_groups]
    kept += [p for group in optimizer.param_groups for p in group["params"]]
    before = copy_for_trial(optimizer, {id(value): value for value in kept})
    try:
        optimizer.step()
    except FAILURES as error:
        if isinstance(
            error, (ElasticZeroError, MemoryError, torch.OutOfMemoryError)
        ) or is_peer_error(error):
            raise
        raise UserError(
            f"{type(optimizer).__name__}.step() has failed ({type(error).__name__}: {error}): give "
            "session.prepare an optimizer that steps by the gradients alone, without a closure"
        ) from error
    changed = changed_attributes(before, optimizer)
    if changed and not changes_state_dict(optimizer):
        raise UserError(_lost(type(optimizer).__name__, changed))
    _check_storable(optimizer, type(optimizer).__name__)


def has_unstored_attributes(optimizer: torch.optim.Optimizer, *, in_parts: bool) -> bool:
    """Tells whether what an optimizer keeps in attributes of its own would not be stored.

    Args:
        optimizer: The optimizer.
        in_parts: Whether each rank has parts of the parameters.
    """
    if type(optimizer).__module__.partition(".")[0] in FOREIGN:
        return False
    return in_parts or not changes_state_dict(optimizer)


def watched_step(optimizer: torch.optim.Optimizer, *, in_parts: bool) -> None:
    """Steps an optimizer, and checks that the step leaves its attributes as they were (OT4).

    Args:
        optimizer: The optimizer.
        in_parts: Whether each rank has parts of the parameters.

    Raises:
        UserError: It has changed one.
    """
    before = attribute_marks(optimizer)
    optimizer.step()
    after = attribute_marks(optimizer)
    if before != after:
        both = before.keys() & after.keys()
        names = [n for n in {**before, **after} if n not in both or before[n] != after[n]]
        kind = type(optimizer).__name__
        if not in_parts:
            raise UserError(_lost(kind, names))
        raise UserError(
            f"{_not_dealt(kind, names)}: use strategy ddp, with a state_dict and a load_state_dict "
            "that hold it too"
        )


def holders_of_parameters(optimizer: torch.optim.Optimizer) -> list[str]:
    """Returns the names of attributes that hold parameters or copies of them: tensors of the
    largest one's shape, or of as many elements as all have."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    largest = max(parameters, key=lambda parameter: parameter.numel(), default=torch.empty(0))
    total = sum(parameter.numel() for parameter in parameters)
    passed = {id(optimizer), id(optimizer.param_groups), id(optimizer.state)}
    passed |= {id(group) for group in optimizer.param_groups}
    parameter_ids = {id(parameter) for parameter in parameters}

    def is_copy(tensor: Tensor) -> bool:
        alike = tensor.shape == largest.shape or tensor.numel() == total
        return id(tensor) in parameter_ids or (alike and tensor.numel() > 1)

    return [
        name
        for name, value in own_attributes(optimizer).items()
        if any(map(is_copy, tensors_in(value, set(passed))))
    ]


def _tried(optimizer: torch.optim.Optimizer, *, with_closure: bool = False) -> _WholeTrial | None:
    """Returns copies of an optimizer of which one was stepped; None: it cannot step dummies.

    Args:
        optimizer: The optimizer.
        with_closure: Whether its step is given a closure.
    """
    for real_shapes in (False, True):
        try:
            trial = _WholeTrial(optimizer, real_shapes=real_shapes)
            trial.step(with_closure=with_closure)
        except FAILURES:
            continue
        return trial
    return None


class _WholeTrial:
    """Holds two copies of an optimizer: a fresh one, and one to be stepped."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, real_shapes: bool) -> None:
        groups = optimizer.param_groups
        self._has_copies = bool(holders_of_parameters(optimizer))
        has_state = any(isinstance(key, Tensor) for key in optimizer.state)
        real_shapes = real_shapes or self._has_copies or has_state
        copies: dict[int, Any] = {}
        self._dummies: list[nn.Parameter] = []
        for group in groups:
            for index, parameter in enumerate(group["params"]):
                shape = parameter.shape if real_shapes else torch.Size(SHAPES[: parameter.dim()])
                on_meta = not real_shapes and index >= DUMMIES
                dummy = _dummy(parameter, shape, on_meta=on_meta)
                copies[id(parameter)] = dummy
                if not on_meta:
                    self._dummies.append(dummy)
        self.fresh = self._copy(optimizer, copies)
        self.stepped = self._copy(optimizer, copies)

    @staticmethod
    def _copy(
        optimizer: torch.optim.Optimizer, parameters: dict[int, Any]
    ) -> torch.optim.Optimizer:
        copies = dict(parameters)
        groups = []
        for group in optimizer.param_groups:
            dummies = [parameters[id(p)] for p in group["params"]]
            copied = {k: copy.deepcopy(v) for k, v in group.items() if k != "params"}
            copies[id(group)] = with_moving_rate(copied)
            copies[id(group)]["params"] = [d for d in dummies if d.device.type != "meta"]
            groups.append(copies[id(group)])
        copies[id(optimizer.param_groups)] = groups
        return copy_for_trial(optimizer, copies)

    def step(self, *, with_closure: bool = False) -> None:
        """Steps the copy on random gradients; with a closure, which draws such gradients anew, if
        that is said."""
        generator = torch.Generator().manual_seed(0)
        begin_training(self.fresh)
        begin_training(self.stepped)

        def draw() -> float:
            for dummy in self._dummies:
                if dummy.requires_grad:
                    drawn = torch.randn(dummy.shape, generator=generator)
                    dummy.grad = drawn.to(dummy.device, dummy.dtype)
            return 1.0

        for _ in range(STEPS_WITH_COPIES if self._has_copies else STEPS):
            draw()
            if with_closure:
                self.stepped.step(draw)
            else:
                self.stepped.step()


def _dummy(parameter: Tensor, shape: torch.Size, *, on_meta: bool) -> nn.Parameter:
    if shape == parameter.shape:
        values = parameter.detach().clone()
    else:
        device = torch.device("meta") if on_meta else parameter.device
        values = torch.full(shape, 0.5, dtype=parameter.dtype, device=device)
    return nn.Parameter(values, requires_grad=parameter.requires_grad)


def _lost_by_round_trip(trial: _WholeTrial) -> list[str]:
    """Returns the attributes that the fresh copy has otherwise once it has the other one's state.

    Raises:
        UserError: It cannot take that state.
    """
    tensors: dict[str, Tensor] = {}
    tree = flatten(trial.stepped.state_dict(), "state_dict", tensors)
    values = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    try:
        load_state_dict(trial.fresh, unflatten(tree, lambda name: values[name]))
    except CheckpointMismatch as error:
        raise UserError(str(error)) from error
    return changed_attributes(trial.fresh, trial.stepped)


def _check_storable(optimizer: torch.optim.Optimizer, kind: str) -> None:
    parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if any(isinstance(key, Tensor) and id(key) not in parameters for key in optimizer.state):
        raise UserError(
            f"{kind} keeps state for a tensor that is no parameter of its groups, which torch "
            "itself cannot save: use another key, as a text"
        )
    try:
        for key, value in optimizer.state.items():
            items = value.items() if isinstance(value, dict) else [("", value)]
            rest = {name: item for name, item in items if not is_packed(item)}
            flatten(rest, "state of a parameter" if isinstance(key, Tensor) else f"state/{key}", {})
        if changes_state_dict(optimizer):
            flatten(optimizer.state_dict(), "state_dict", {})
    except UserError as error:
        raise UserError(f"{kind} keeps what no checkpoint can hold: {error}") from error


def _lost(kind: str, names: Sequence[str]) -> str:
    return (
        f"{kind} changes {_listed(names)} when it steps, which its state_dict does not hold, so "
        "that a recovery would lose it: give the optimizer a state_dict and a load_state_dict that "
        "hold it too, or keep it in optimizer.state"
    )


def _not_dealt(kind: str, names: Sequence[str]) -> str:
    return (
        f"{kind} changes {_listed(names)} when it steps, and only what it keeps by parameter can "
        "be dealt to ranks"
    )


def _listed(names: Sequence[str]) -> str:
    attributes = ", ".join(f"self.{name}" for name in sorted(names)[:4])
    return f"its attribute{'s' if len(names) > 1 else ''} {attributes}"
