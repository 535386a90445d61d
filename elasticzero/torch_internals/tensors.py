"""Gives access to what torch does not offer in public of tensors, modules and the compiler.

Check after an upgrade of torch:
 - `torch._dynamo.callback_handler` calls what is registered when a compilation begins;
 - `torch.utils.data._utils.worker._worker_info` is what `get_worker_info` returns;
 - a node of autograd that adds to a tensor's gradient has the tensor as `variable`;
 - `Tensor._version` grows with every change in place that autograd sees;
 - the node of a loss function has its `reduction` as the number `_saved_reduction`, 2 for a sum,
   and that of `sum` has the shape of what it adds up as `_saved_self_sym_sizes`;
 - a module's `_buffers` has its buffers, and `_non_persistent_buffers_set` names those that its
   `state_dict` leaves out; `_parameters` and `_modules` have its parameters and children;
 - `_storage_Use_Count` counts the tensors that share a storage, and one for the storage's object of
   Python;
 - under `DisableTorchFunctionSubclass` no `__torch_function__` of a subclass is called.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakMethod

import torch
from torch.utils.data._utils import worker as data_worker


def call_around_compiling(
    before: Callable[[], None], after: Callable[[], None] | None = None
) -> bool:
    """Has methods called each time before and after `torch.compile` traces a function, as long as
    their object lives; returns False, and does nothing, where nothing of the compiler is imported
    yet.

    Args:
        before: Is called before.
        after: Is called after it, whatever came of it; by default nothing is.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None or "torch._dynamo.callback" not in sys.modules:
        return False
    dynamo.callback_handler.register_start_callback(_weakly(before))
    if after is not None:
        dynamo.callback_handler.register_end_callback(_weakly(after))
    return True


def _weakly(method: Callable[[], None]) -> Callable[..., None]:
    """Returns a function that calls a method as long as its object lives."""
    reference = WeakMethod(method)

    def call(*_: object) -> None:
        if (bound := reference()) is not None:
            bound()

    return call


def as_data_worker(number: int, workers: int, dataset: Any) -> None:
    """Has `torch.utils.data.get_worker_info` say from here on that this process is a data worker.

    Args:
        number: The worker's number, from 0.
        workers: Number of data workers; 0: this process is none.
        dataset: The dataset that the worker reads.
    """
    info = None
    if workers:
        seed = torch.initial_seed()
        info = data_worker.WorkerInfo(id=number, num_workers=workers, seed=seed, dataset=dataset)
    data_worker._worker_info = info


def count_of_changes(tensor: torch.Tensor) -> int:
    """Returns how often a tensor, or one that it is a part of, was changed in place; 0 for one of
    inference mode, which torch does not count for."""
    return 0 if tensor.is_inference() else int(tensor._version)


def counts_of_changes(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Returns `count_of_changes` of each tensor; nothing waits for one that is not up to date."""
    with without_torch_functions():
        return [0 if tensor.is_inference() else int(tensor._version) for tensor in tensors]


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Returns the buffers that a module itself has registered, by name, None or not."""
    return module._buffers


def parameters_of(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """Returns the parameters that a module itself has registered, by name."""
    return module._parameters


def children_of(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """Returns the modules that a module itself has registered, by name."""
    return module._modules


def is_of_storage(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    """Tells whether a tensor, which may be one without memory of its own, has this storage."""
    return bool(tensor.untyped_storage()._cdata == storage._cdata)


def sharing_tensors(tensor: torch.Tensor) -> int:
    """Returns the number of tensors that share the memory of this one, which counts too."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def without_torch_functions() -> AbstractContextManager[None]:
    """Returns a context in which reads of a parameter call no `__torch_function__`."""
    return torch._C.DisableTorchFunctionSubclass()


def unsaved_buffers_of(module: torch.nn.Module) -> set[str]:
    """Returns the names of the buffers that a module has registered with `persistent=False`."""
    return module._non_persistent_buffers_set


def reached_parameters(loss: torch.Tensor) -> list[torch.nn.Parameter]:
    """Returns the parameters whose gradients a backward of the loss adds to."""
    if loss.grad_fn is None:
        return []
    seen, waiting = {loss.grad_fn}, [loss.grad_fn]
    parameters = []
    while waiting:
        node = waiting.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.nn.Parameter):
            parameters.append(variable)
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        waiting.extend(new)
    return parameters


SUM_REDUCTION = 2
"""The number of `reduction="sum"` in a node of a loss function."""


def is_sum_over(loss: torch.Tensor, samples: int) -> bool:
    """Returns whether the last operation on a loss is a sum over the elements of so many samples,
    by `sum` or by a loss function with `reduction="sum"`."""
    node: Any = loss.grad_fn
    if getattr(node, "_saved_reduction", None) == SUM_REDUCTION:
        return True
    shape: tuple[int, ...] | None = getattr(node, "_saved_self_sym_sizes", None)
    if shape is None or not node.name().startswith("SumBackward"):
        return False
    return math.prod(shape) >= samples and math.prod(shape) % samples == 0
