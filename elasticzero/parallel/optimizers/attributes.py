"""Copies, compares and searches what an optimizer keeps in attributes of its own, besides torch's.

A copy is stepped by dummies, and must neither change the optimizer nor step its parameters: so
tensors, containers, random generators, plain objects and optimizers inside of it are copied too.
Modules, functions and classes are not.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from elasticzero.torch_internals.hooks import drop_step_hooks
from elasticzero.torch_internals.tensors import count_of_changes

TORCH_OWN = frozenset({"state", "param_groups", "defaults", "step", "zero_grad", "add_param_group"})
"""Attributes that are torch's, a scheduler's or the session's, besides those with a prefix."""
TORCH_PREFIXES = (
    "_optimizer_",
    "_zero_grad",
    "_warned_",
    "_opt_called",
    "_step_count",
    "_hook_for",
)
CONTAINERS = (list, tuple, set, deque, dict)
SMALL_ARRAY_BYTES = 1 << 16
"""Size in bytes of the largest array of numpy that is read to mark it; a larger one counts by
identity."""
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)


def own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the attributes of an optimizer that are not those of each optimizer of torch."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in TORCH_OWN and not name.startswith(TORCH_PREFIXES)
    }


def copy_for_trial(
    optimizer: torch.optim.Optimizer, copies: dict[int, Any]
) -> torch.optim.Optimizer:
    """Returns a copy whose steps change nothing of the optimizer.

    A scheduler that was built on the optimizer has wrapped its `step`, which stays behind: it would
    step the optimizer itself.

    Args:
        optimizer: The optimizer.
        copies: What takes the place of its parameters and groups, by their `id`; copies are added.
    """
    clone = copies[id(optimizer)] = object.__new__(type(optimizer))
    clone.__dict__ = {name: value for name, value in vars(optimizer).items() if name != "step"}
    clone.__dict__["defaults"] = dict(getattr(optimizer, "defaults", {}))
    drop_step_hooks(clone)
    clone.param_groups = deep_copy(optimizer.param_groups, copies)
    clone.state = deep_copy(optimizer.state, copies)
    for name, value in own_attributes(optimizer).items():
        clone.__dict__[name] = deep_copy(value, copies)
    return clone


def deep_copy(value: Any, copies: dict[int, Any]) -> Any:
    """Returns a copy of a value that shares nothing that a step could change in place.

    Args:
        value: The value.
        copies: What takes the place of objects, by their `id`; copies are added.
    """
    if id(value) not in copies:
        _copy(value, copies)
    return copies[id(value)]


def _copy(value: Any, copies: dict[int, Any]) -> None:
    if isinstance(value, Tensor):
        copies[id(value)] = value.detach().clone().requires_grad_(value.requires_grad)
    elif isinstance(value, torch.Generator):
        copies[id(value)] = value.clone_state()
    elif isinstance(value, (*GENERATORS, np.ndarray)):
        copies[id(value)] = copy.deepcopy(value)
    elif isinstance(value, MethodType):
        bound = copies.get(id(value.__self__), value.__self__)
        copies[id(value)] = MethodType(value.__func__, bound)
    elif isinstance(value, tuple):
        items = [deep_copy(item, copies) for item in value]
        copies[id(value)] = type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    elif isinstance(value, CONTAINERS):
        _copy_container(value, copies)
    elif _is_plain_object(value):
        made = copies[id(value)] = object.__new__(type(value))
        for name, attribute in vars(value).items():
            made.__dict__[name] = deep_copy(attribute, copies)
    else:
        copies[id(value)] = value


def _copy_container(value: Any, copies: dict[int, Any]) -> None:
    made = copies[id(value)] = copy.copy(value)
    made.clear()
    if isinstance(value, dict):
        made.update({copies.get(id(k), k): deep_copy(item, copies) for k, item in value.items()})
    else:
        items = [deep_copy(item, copies) for item in value]
        made.update(items) if isinstance(value, set) else made.extend(items)


def _is_plain_object(value: Any) -> bool:
    """Tells whether a value is an object of a class written in Python, whose attributes are all
    that it has."""
    kind = type(value)
    return (
        hasattr(value, "__dict__")
        and not hasattr(kind, "__del__")
        and not isinstance(value, (nn.Module, type))
        and kind.__module__ not in ("builtins", "types", "functools")
        and getattr(kind, "__reduce__", None) is getattr(object, "__reduce__", None)
        and getattr(kind, "__new__", None) is getattr(object, "__new__", None)
    )


def is_same(first: Any, second: Any, compared: set[tuple[int, int]]) -> bool:
    """Tells whether two values are equal, as one is and its copy that was stepped or restored.

    Args:
        first: A value.
        second: Another one.
        compared: The pairs under comparison, by their `id`.
    """
    if first is second:
        return True
    if isinstance(first, Tensor):
        return isinstance(second, Tensor) and _is_same_tensor(first, second)
    if isinstance(first, (*CONTAINERS, torch.optim.Optimizer)) or _is_plain_object(first):
        if (pair := (id(first), id(second))) in compared:
            return True
        compared.add(pair)
    if isinstance(first, np.ndarray):
        return isinstance(second, np.ndarray) and np.array_equal(first, second)
    if isinstance(first, MethodType):
        return isinstance(second, MethodType)
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Generator):
        return torch.equal(first.get_state(), second.get_state())
    if isinstance(first, (np.random.Generator, np.random.RandomState)):
        return repr(_numpy_state(first)) == repr(_numpy_state(second))
    if isinstance(first, random.Random):
        return bool(first.getstate() == second.getstate())
    if isinstance(first, torch.optim.Optimizer):
        return not changed_names(_state_of(first), _state_of(second), compared)
    if isinstance(first, dict):
        return _are_same_items(first, second, compared)
    if isinstance(first, (list, tuple, deque)):
        pairs = zip(first, second, strict=False)
        return len(first) == len(second) and all(is_same(a, b, compared) for a, b in pairs)
    if _is_plain_object(first):
        return not changed_names(vars(first), vars(second), compared)
    return bool(first == second) or bool(first != first and second != second)


def _state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    inner = own_attributes(optimizer)
    return inner | {"state": optimizer.state, "param_groups": optimizer.param_groups}


def _numpy_state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def _is_same_tensor(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if first.device.type == "meta" or second.device.type == "meta":
        return True
    equal = first.detach() == second.detach().to(first.device)
    return bool((equal | ((first != first) & (second != second).to(first.device))).all())


def _are_same_items(first: Any, second: Any, compared: set[tuple[int, int]]) -> bool:
    """Compares two dicts; those by parameters are compared in their order."""
    if len(first) != len(second):
        return False
    if any(isinstance(key, Tensor) for key in (*first, *second)):
        pairs = zip(first.values(), second.values(), strict=True)
        return all(is_same(a, b, compared) for a, b in pairs)
    return first.keys() == second.keys() and not changed_names(first, second, compared)


def attribute_marks(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns a mark of each attribute of an optimizer's own, which is another one once the
    attribute has changed. No tensor is copied.

    What a step changes anyway counts as unchanged: parameters, groups and the state by parameter.
    An optimizer inside of this one, and objects that are no plain ones, count by identity.
    """
    passed = {id(optimizer), id(optimizer.state), id(optimizer.param_groups)}
    for group in optimizer.param_groups:
        passed |= {id(group), *map(id, group["params"])}
    return {name: _mark(value, passed.copy()) for name, value in own_attributes(optimizer).items()}


@dataclass(frozen=True, slots=True, eq=False)
class _TensorMark:
    """Marks a tensor, which is read only where another one has taken its place."""

    tensor: Tensor
    changes: int

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _TensorMark):
            return False
        if self.tensor is other.tensor:
            return self.changes == other.changes
        return _is_same_tensor(self.tensor, other.tensor)


def _mark(value: Any, passed: set[int]) -> Any:
    if value is None or isinstance(value, (int, str, bytes)):
        return value
    if isinstance(value, (float, complex, np.generic)):
        return repr(value)  # NaN is not equal to itself
    if id(value) in passed:
        return None
    if isinstance(value, Tensor):
        return _TensorMark(value, count_of_changes(value))
    if isinstance(value, np.ndarray):
        return hash(value.tobytes()) if value.nbytes <= SMALL_ARRAY_BYTES else id(value)
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().numpy())
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, (np.random.Generator, np.random.RandomState)):
        return repr(_numpy_state(value))
    passed.add(id(value))
    if isinstance(value, dict):
        keys = (id(key) if isinstance(key, Tensor) else _mark(key, passed) for key in value)
        return tuple(zip(keys, [_mark(item, passed) for item in value.values()], strict=True))
    if isinstance(value, set):
        return frozenset(value)
    if isinstance(value, CONTAINERS):
        return tuple(_mark(item, passed) for item in value)
    if isinstance(value, torch.optim.Optimizer) or not _is_plain_object(value):
        return id(value)
    return tuple((name, _mark(item, passed)) for name, item in vars(value).items())


def changed_names(
    before: Mapping[Any, Any], after: Mapping[Any, Any], compared: set[tuple[int, int]]
) -> list[Any]:
    """Returns the names whose values differ, or that only one of two has.

    Args:
        before: Values by name.
        after: Other ones.
        compared: The pairs under comparison, by their `id`.
    """
    names = {**before, **after}
    return [
        name
        for name in names
        if name not in before
        or name not in after
        or not is_same(before[name], after[name], compared)
    ]


def tensors_in(value: Any, passed: set[int]) -> Iterator[Tensor]:
    """Yields the tensors in a value: in containers, plain objects and optimizers.

    Args:
        value: The value.
        passed: The objects that are passed over, by their `id`; those that were passed are added.
    """
    if id(value) in passed:
        return
    passed.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(key, passed)
            yield from tensors_in(item, passed)
    elif isinstance(value, CONTAINERS):
        for item in value:
            yield from tensors_in(item, passed)
    elif _is_plain_object(value):
        for item in vars(value).values():
            yield from tensors_in(item, passed)
