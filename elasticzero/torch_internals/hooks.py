"""Gives access to hooks on gradients and at optimizers' steps, where torch offers none in public.

Check after an upgrade of torch:
 - `_optimizer_step_pre_hooks` and `_global_optimizer_pre_hooks`, and those named `post`, hold what
   runs at an optimizer's step, and `_optimizer_state_dict_pre_hooks` and the one named `post` what
   runs where its state is taken;
 - `_backward_hooks` and `_post_accumulate_grad_hooks` of a tensor are dicts that autograd reads
   when it calls them, or None; what `register_multi_grad_hook` puts there is of the module
   `torch.autograd.graph`, and is called inside a backward only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, ClassVar
from weakref import ReferenceType, WeakMethod, WeakSet, finalize, ref

import torch
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_pre_hook,
)


class StepCheck:
    """Is called before each step of an optimizer, or, of one taken in parts, before each part."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check

    def __call__(self, *_: object) -> None:
        self._check()


class AnyStepCheck:
    """Calls a method with each optimizer of the process before its step, while the method's object
    lives, but for optimizers that have a `StepCheck` of their own."""

    _ended: ClassVar[list[Any]] = []
    """Handles of those whose object has ended, which may be in the middle of a step, while torch
    goes over its hooks; the next one removes them."""

    def __init__(self, check: Callable[[torch.optim.Optimizer], None]) -> None:
        self._check = WeakMethod(check)
        while self._ended:
            self._ended.pop().remove()
        handle = register_optimizer_step_pre_hook(self)
        finalize(getattr(check, "__self__"), self._ended.append, handle)  # noqa: B009

    def __call__(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        check = self._check()
        if check is None or any(type(h) is StepCheck for h in _pre_hooks(optimizer)):
            return
        check(optimizer)


def _pre_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Returns what an optimizer alone calls before its step."""
    return list(getattr(optimizer, "_optimizer_step_pre_hooks", {}).values())


class NewOptimizers:
    """Knows the optimizers that are made in this process while it lives."""

    _all: ClassVar[WeakSet[NewOptimizers]] = WeakSet()
    """All objects of this class that live."""

    def __init__(self) -> None:
        self._made: list[ReferenceType[torch.optim.Optimizer]] = []
        if not self._all:
            _watch_new_optimizers()
        self._all.add(self)

    def alive(self) -> list[torch.optim.Optimizer]:
        """Returns those that have not ended."""
        if not self._made:
            return []
        pairs = [(made, optimizer) for made in self._made if (optimizer := made()) is not None]
        self._made = [made for made, _ in pairs]
        return [optimizer for _, optimizer in pairs]

    @classmethod
    def add(cls, optimizer: torch.optim.Optimizer) -> None:
        """Takes note of one, in each that lives."""
        for new in list(cls._all):
            new._made.append(ref(optimizer))


def _watch_new_optimizers() -> None:
    """Has `NewOptimizers` told of each optimizer, once its own base class has made it."""
    make = torch.optim.Optimizer.__init__
    if hasattr(make, "__wrapped__"):
        return

    @wraps(make)
    def make_and_tell(self: torch.optim.Optimizer, *args: Any, **named: Any) -> None:
        make(self, *args, **named)
        NewOptimizers.add(self)

    torch.optim.Optimizer.__init__ = make_and_tell  # type: ignore[method-assign]


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether something, other than a check of ours, is to run once at each step of this
    optimizer, or of any."""
    of_all = [*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values()]
    of_all = [hook for hook in of_all if not isinstance(hook, AnyStepCheck)]
    return bool(step_hooks(optimizer) or of_all)


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Returns what is to run at each step of this optimizer, other than a `StepCheck`."""
    order_hooks(optimizer)
    hooks = [
        *optimizer._optimizer_step_pre_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
    ]
    return [hook for hook in hooks if not isinstance(hook, StepCheck)]


def has_state_dict_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether a script has hooks run where this optimizer's `state_dict` is taken."""
    before, after = "_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"
    return bool(getattr(optimizer, before, None) or getattr(optimizer, after, None))


def drop_step_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Leaves the optimizer, a copy of another one, none of what is to run at each step of that."""
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._optimizer_step_post_hooks = OrderedDict()


HOOKS_OF_STEP = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"


def order_hooks(owner: torch.optim.Optimizer | torch.nn.Module) -> None:
    """Gives an optimizer or a module ordered dicts of hooks, as torch makes them, where it has
    plain ones, to which torch adds nothing, or an optimizer has none."""
    missing = HOOKS_OF_STEP if isinstance(owner, torch.optim.Optimizer) else ()
    for name in {*(n for n in vars(owner) if n.endswith("_hooks")), *missing}:
        hooks = vars(owner).get(name, {})
        if isinstance(hooks, dict) and not isinstance(hooks, OrderedDict):
            vars(owner)[name] = OrderedDict(hooks)


class GradientReady:
    """Is called when autograd has added to a parameter's gradient, and is no hook of the script."""

    def __init__(self, function: Callable[[torch.Tensor], None]) -> None:
        self._function = function

    def __call__(self, parameter: torch.Tensor) -> None:
        self._function(parameter)


_HookDict = dict[int, Callable[..., Any]]


def _gradient_hooks(tensor: torch.Tensor) -> Iterator[tuple[_HookDict, _HookDict]]:
    """Yields autograd's dicts of hooks on a gradient, each with those of the script in it that can
    be called by themselves: first what the gradient is passed through, then what is called once it
    is in `grad`."""
    hooks: Any
    for hooks in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks):
        of_script = {}
        for number, hook in (hooks or {}).items():
            if not isinstance(hook, GradientReady) and not _is_of_several(hook):
                of_script[number] = hook
        yield hooks, of_script


def _is_of_several(hook: Any) -> bool:
    return getattr(hook, "__module__", None) == "torch.autograd.graph"


def has_hook_of_several(tensor: torch.Tensor) -> bool:
    """Returns whether the script has called `register_multi_grad_hook` with a leaf."""
    hooks: Any = tensor._backward_hooks
    return any(_is_of_several(hook) for hook in (hooks or {}).values())


def with_gradient_hooks(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Returns the names of leaves on whose gradients the script has registered hooks of any kind;
    of 2,000 in a third of a millisecond."""
    return [
        name
        for name, tensor in tensors.items()
        if tensor._backward_hooks
        or (
            (hooks := tensor._post_accumulate_grad_hooks)
            and any(type(hook) is not GradientReady for hook in hooks.values())
        )
    ]


class GradientHooks:
    """Finds leaves with hooks of the script on their gradients, again and again.

    As long as the number of all hooks is that of the newest look that has found none, no hook is
    looked at: of 2,000 leaves that takes a third of the time.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Looks at nothing yet.

        Args:
            tensors: The leaves by name.
        """
        self._tensors = tensors
        self._count = -1
        """The number of hooks on all, of which none was the script's; -1: no such number."""

    def names(self) -> list[str]:
        """Returns what `with_gradient_hooks` does."""
        tensors = self._tensors.values()
        once_added: list[Any] = [tensor._post_accumulate_grad_hooks for tensor in tensors]
        passed: list[Any] = [tensor._backward_hooks for tensor in tensors]
        count = sum(map(len, filter(None, once_added)))
        if count == self._count and not any(passed):
            return []
        names = with_gradient_hooks(self._tensors)
        self._count = -1 if names else count
        return names


@contextmanager
def without_gradient_hooks(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Keeps the script's hooks on the gradients of these leaves from being called."""
    removed = [
        (hooks, of_script)
        for tensor in tensors
        for hooks, of_script in _gradient_hooks(tensor)
        if of_script
    ]
    for hooks, of_script in removed:
        for number in of_script:
            del hooks[number]
    try:
        yield
    finally:
        for hooks, of_script in removed:
            hooks.update(of_script)


def call_gradient_hooks(parameter: torch.nn.Parameter) -> None:
    """Calls the script's hooks on a parameter's gradient, as autograd does once it has it."""
    (_, on_gradient), (_, once_added) = _gradient_hooks(parameter)
    for hook in on_gradient.values():
        if (changed := hook(parameter.grad)) is not None:
            parameter.grad = changed
    for hook in once_added.values():
        hook(parameter)
