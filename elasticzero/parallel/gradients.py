"""Hides gradients that are not complete from the script until its step, and gives the script's own
function what it may change of them.

Between `session.backward` and `session.step` a parameter's own gradient is that of one rank, or is
gone already, or lacks micro-batches or its divisor (`ddp`). What a script does to it there
(`clip_grad_norm_`, `clip_grad_value_`, a backward of its own) would have no effect, or a wrong one
on each rank. So another tensor stands in its place, which refuses every use. Gradients that a
backward of the script's own has left before are refused, as is one that no strategy sums, of a
parameter that was frozen at first, and hooks on parameters where no rank has whole gradients.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from elasticzero.errors import UserError
from elasticzero.torch_internals.hooks import (
    GradientReady,
    has_hook_of_several,
    with_gradient_hooks,
)
from elasticzero.torch_internals.tensors import call_around_compiling, without_torch_functions

REFUSED = (
    "the script uses parameters' gradients between session.backward and session.step, where the "
    "strategies zero1, zero2 and zero3 have them in parts: give session.on_gradients a function, "
    "which looks at them or changes them in every strategy; the session clips them by their norm "
    "with session.step(max_grad_norm=…)"
)

INCOMPLETE = (
    "the script uses parameters' gradients between session.backward and session.step, where they "
    "are not complete: they lack micro-batches (micro_batch=), the sum of weights (weight=) or are "
    "scaled (fp16); clip them with session.step(max_grad_norm=…), or give session.on_gradients a "
    "function, which looks at the complete ones or changes them"
)

OWN_BACKWARD = (
    "a backward of the script's own adds to gradients that session.backward averages over "
    "micro-batches and ranks, and is averaged over none: add its loss to the one that "
    "session.backward is given, or take its gradients by torch.autograd.grad"
)

GradientFunction = Callable[[str, Tensor], Tensor | float | None]
"""Takes a parameter's name and the elements of its gradient that are stepped here."""


@dataclass(slots=True)
class GradientHook:
    """Calls the script's function with the gradients of a step; `session.on_gradients` makes it."""

    function: GradientFunction
    step: Callable[[], int]
    """Returns the number of steps applied so far."""
    sums: dict[str, float] = field(default_factory=dict)
    """Values of the function in the newest step, summed over all ranks, by parameter."""

    def call(self, gradients: Mapping[str, tuple[int, Tensor]]) -> dict[str, float]:
        """Calls the function with each gradient, which it may change, and returns its results.

        Random numbers that the function draws from torch are the same on all ranks that have the
        same elements, and those of the script itself are not disturbed.

        Args:
            gradients: The number of this rank's first element, and its elements, by parameter.
        """
        gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        returned: dict[str, Tensor | float | None] = {}
        with torch.random.fork_rng(devices=gpus), torch.no_grad():
            for name, (start, gradient) in gradients.items():
                torch.manual_seed(zlib.crc32(f"{name}/{start}".encode()) << 31 | self.step())
                elements = gradient.reshape(-1)
                returned[name] = self.function(name, elements)
                if not gradient.is_contiguous():  # `elements` is a copy then
                    gradient.copy_(elements.view(gradient.shape))
        return {name: 0.0 if value is None else float(value) for name, value in returned.items()}


class Refusing(Tensor):
    """Raises `UserError` at any use, and where autograd adds to it."""

    sentence: str

    @staticmethod
    def __new__(cls, parameter: Tensor, sentence: str) -> Refusing:
        made: Refusing = Tensor._make_wrapper_subclass(  # noqa: SLF001 - as torch documents it
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        made.sentence = sentence
        return made

    def __init__(self, parameter: Tensor, sentence: str) -> None:
        """Takes the place of a gradient.

        Args:
            parameter: The parameter that the gradient is of.
            sentence: The message of the error.
        """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise UserError(_sentence_of(args))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise UserError(OWN_BACKWARD)  # of the script's code `__torch_function__` has raised before


def _sentence_of(values: Any) -> str:
    """Returns the sentence of the first gradient among these arguments of a function."""
    for value in values:
        if isinstance(value, Refusing):
            return value.sentence
        if isinstance(value, list | tuple) and any(isinstance(v, Refusing) for v in value):
            return _sentence_of(value)
    return REFUSED


class HiddenGradients:
    """Hides the gradients of a model's parameters, and shows them again."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, partitioned: bool) -> None:
        """Hides nothing yet.

        Args:
            parameters: The model's parameters by name.
            partitioned: True: a rank never has a whole gradient between backward and step.
        """
        self._partitioned = partitioned
        self._parameters = {n: p for n, p in parameters.items() if p.requires_grad}
        sentence = REFUSED if partitioned else INCOMPLETE
        made: dict[object, Refusing] = {}
        self._refusing = []
        """What stands in the place of each gradient; one for all of a kind, which stays in the
        processor's cache."""
        for parameter in self._parameters.values():
            kind = (parameter.shape, parameter.dtype, parameter.device)
            if kind not in made:
                made[kind] = Refusing(parameter, sentence)
            self._refusing.append(made[kind])
        self._hidden: list[Tensor | None] | None = None
        self._uncovered: list[tuple[nn.Parameter, Refusing]] = []
        """The parameters whose gradients a compiler sees none of at the moment."""
        self._awaits_compiler = True

    def hide(self, *, complete: bool) -> None:
        """Hides the gradients, unless a rank has whole ones and they are complete."""
        if complete and not self._partitioned:
            return
        self._hidden = [parameter.grad for parameter in self._parameters.values()]
        self._cover()
        if self._awaits_compiler:
            self._awaits_compiler = not call_around_compiling(self._uncover, self._cover_again)

    def _cover(self) -> None:
        for parameter, refusing in zip(self._parameters.values(), self._refusing, strict=True):
            parameter.grad = refusing

    def _uncover(self) -> None:
        """Lets a compiler, which looks at gradients, see none where they are hidden."""
        pairs = zip(self._parameters.values(), self._refusing, strict=True)
        hidden = () if self._hidden is None else pairs
        self._uncovered = [(p, refusing) for p, refusing in hidden if p.grad is refusing]
        for parameter, _ in self._uncovered:
            parameter.grad = None

    def _cover_again(self) -> None:
        uncovered, self._uncovered = self._uncovered, []
        for parameter, refusing in uncovered:
            parameter.grad = refusing

    def show(self, *, before_step: bool = False) -> None:
        """Puts back what `hide` has hidden; raises `UserError` where the script has set another.

        A gradient that the script has taken away since the last backward would not be stepped in
        one process, so that is refused `before_step`; between micro-batches it has no effect, since
        a `zero_grad` of the model belongs before a global batch.
        """
        if self._hidden is None:
            return
        parameters = self._parameters.values()
        hidden, self._hidden = self._hidden, None
        present = [parameter.grad for parameter in parameters]
        if not all(map(is_, present, self._refusing)):
            for gradient, refusing in zip(present, self._refusing, strict=True):
                taken_away = gradient is None and not before_step
                if gradient is not refusing and not taken_away:
                    raise UserError(refusing.sentence)
        for parameter, gradient in zip(parameters, hidden, strict=True):
            parameter.grad = gradient

    def require_none(self) -> None:
        """Raises `UserError` where a parameter has a gradient before the first backward of a global
        batch."""
        with without_torch_functions():
            for name, parameter in self._parameters.items():
                if parameter.grad is not None:
                    text = f"parameter {name!r} has a gradient before session.backward: "
                    raise UserError(text + OWN_BACKWARD)


WATCHED_EVERY = 100
"""Steps from one in which late gradients are looked for to the next."""


class LateGradients:
    """Refuses what a backward of the script's own adds once the last of the session's is over.

    Where gradients are summed over ranks, their buckets refuse it in every step. A single process
    has none, and calls to Python for each parameter would cost more than the sums: so it looks in
    the first step, and in one of WATCHED_EVERY.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Takes the parameters by name; looks for nothing yet."""
        self._parameters = parameters
        self._steps = 0
        """The steps that have ended."""
        self._handles: list[Any] = []

    def begin(self) -> None:
        """Looks for gradients that come from here on, if it is the step to do so."""
        if self._steps % WATCHED_EVERY:
            return
        for name, parameter in self._parameters.items():
            if parameter.requires_grad:
                hook = GradientReady(partial(_refuse, name))
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def end(self) -> None:
        """Looks no more, since the step of these gradients begins."""
        self.stop()
        self._steps += 1

    def stop(self) -> None:
        """Looks no more, since a backward of the session's own begins."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _refuse(name: str, parameter: Tensor) -> None:
    raise UserError(f"parameter {name!r} has got a gradient after session.backward: {OWN_BACKWARD}")


def check_frozen(frozen: Mapping[str, nn.Parameter]) -> None:
    """Raises `UserError` where one of these, which needed no gradient at first, has one."""
    for name, parameter in frozen.items():
        if parameter.grad is not None:
            raise UserError(
                f"parameter {name!r} has a gradient, but needed none when session.prepare was "
                "called, so it is not summed over the ranks: what is to be trained later needs one "
                "at session.prepare, in every generation, and is frozen after it by "
                "requires_grad_(False) until then"
            )


def check_hooks(parameters: Mapping[str, Tensor], strategy: str) -> None:
    """Raises `UserError` where the script has registered a hook on one of these parameters, which
    autograd would call with one rank's part of the gradient, or never."""
    refuse_hooks(with_gradient_hooks(parameters), strategy)


def refuse_hooks(names: Iterable[str], strategy: str) -> None:
    """Raises `UserError` for the first of these parameters, which have hooks of the script."""
    for name in names:
        raise UserError(
            f"parameter {name!r} has a hook on its gradient (register_hook or "
            f"register_post_accumulate_grad_hook), and no rank has whole gradients under "
            f"{strategy}: give session.on_gradients the function, or use ddp, which calls the "
            "hook once in a step, with the whole gradient"
        )


def check_hooks_of_several(parameters: Mapping[str, Tensor]) -> None:
    """Raises `UserError` where the script has registered a hook on several gradients, which torch
    calls inside a backward only, where they are one rank's."""
    for name, parameter in parameters.items():
        if has_hook_of_several(parameter):
            raise UserError(
                f"parameter {name!r} has a hook of register_multi_grad_hook, which torch calls "
                "with one rank's part of the gradient: use register_hook, which ddp calls with the "
                "whole gradient, or session.on_gradients"
            )
