"""Gives access to the parts of `torch.distributed` that torch does not offer in public.

Two other files depend on torch's internals, and each says what to check: `comm/gloo.py` replaces a
function of torch and reads the names of threads, and `parallel/fsdp_uses.py` reads FSDP2's groups.
ruff (SLF001, TID251) refuses private names and `torch._C` in every other file.

Check after an upgrade of torch; `tests/unit/test_torch_internals.py` and those that it names, which
`make versions` runs, check what needs no GPU:
 - `torch._C._distributed_c10d` has the stores, which `torch.distributed` does not declare to type
   checkers;
 - torch's C++ calls the methods of a store that is a class of Python by the names that they have
   there, but for `deleteKey` and `getNumKeys`; `tests/unit/comm/store` calls all of them so;
 - `_world.pg_map` has every process group of this process as a key, the default one too;
 - `_world.group_count` grows with every group that is made;
 - a `ProcessGroup` with a backend of gloo needs no entry in `_world` for its own methods, and may
   become the default group by entries in the tables of `_world` that `replace_default_group` fills,
   after which `destroy_process_group` ends the one before alone;
 - `_get_sequence_number_for_group` grows with every collective that begins, under NCCL;
 - `_get_backend(device)` gives the NCCL backend, which has `name`, `abort` and, from torch 2.7 on,
   `get_error`. `make gpu` runs all of these;
 - with `TORCH_DIST_USE_NCCL2=0` in the environment before the first group is made, `nccl` is the
   backend of before torch 2.15;
 - `torch._dynamo.callback_handler` calls what is registered when a compilation begins;
 - `torch.utils.data._utils.worker._worker_info` is what `get_worker_info` returns;
 - `_optimizer_step_pre_hooks` and `_global_optimizer_pre_hooks`, and those named `post`, hold what
   runs at an optimizer's step, and `_optimizer_state_dict_pre_hooks` and the one named `post` what
   runs where its state is taken;
 - a node of autograd that adds to a tensor's gradient has the tensor as `variable`;
 - `Tensor._version` grows with every change in place that autograd sees;
 - the node of a loss function has its `reduction` as the number `_saved_reduction`, 2 for a sum,
   and that of `sum` has the shape of what it adds up as `_saved_self_sym_sizes`;
 - a module's `_buffers` has its buffers, and `_non_persistent_buffers_set` names those that its
   `state_dict` leaves out; `_parameters` and `_modules` have its parameters and children;
 - `_storage_Use_Count` counts the tensors that share a storage, and one for the storage's object of
   Python;
 - under `DisableTorchFunctionSubclass` no `__torch_function__` of a subclass is called;
 - `_backward_hooks` and `_post_accumulate_grad_hooks` of a tensor are dicts that autograd reads
   when it calls them, or None; what `register_multi_grad_hook` puts there is of the module
   `torch.autograd.graph`, and is called inside a backward only.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import wraps
from typing import Any, ClassVar, cast
from weakref import ReferenceType, WeakMethod, WeakSet, finalize, ref

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (  # noqa: TID251 - the one place
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_pre_hook,
)
from torch.utils.data._utils import worker as data_worker

__all__ = [
    "OWN_GROUP",
    "GradientHooks",
    "GradientReady",
    "PrefixStore",
    "PythonStore",
    "StepCheck",
    "Store",
    "TCPStore",
    "TorchStore",
    "as_data_worker",
    "buffers_of",
    "call_around_compiling",
    "call_gradient_hooks",
    "children_of",
    "collectives_begun",
    "count_of_changes",
    "counts_of_changes",
    "drop_step_hooks",
    "group_beside",
    "group_of_one",
    "has_hook_of_several",
    "has_state_dict_hooks",
    "has_step_hooks",
    "is_of_storage",
    "nccl_backends",
    "order_hooks",
    "parameters_of",
    "replace_default_group",
    "replace_init",
    "script_groups",
    "sharing_tensors",
    "unsaved_buffers_of",
    "with_gradient_hooks",
    "without_gradient_hooks",
    "without_torch_functions",
]


OWN_GROUP = "elasticzero"
"""Description of the process groups that are not the script's."""


class PythonStore(Store):
    """Base class of a store in Python that torch's process groups call from C++.

    A reference of C++ does not keep the object of Python, without which a call from C++ fails.
    """

    @property
    def default_timeout(self) -> timedelta:
        """Returns how long a wait takes that has no limit of its own; `set_timeout` sets it."""
        timeout: timedelta = self.timeout  # type: ignore[attr-defined]
        return timeout

    def deleteKey(self, key: str) -> bool:
        return self.delete_key(key)

    def getNumKeys(self) -> int:
        return self.num_keys()

    def has_extended_api(self) -> bool:
        """Returns True: the store has `append`, `multi_get` and `multi_set`."""
        return True

    def clone(self) -> PythonStore:
        """Returns this store, which several threads may use."""
        return self


class TorchStore(TCPStore):
    """torch's own store, with what ours has besides."""

    @property
    def default_timeout(self) -> timedelta:
        """Returns how long a wait takes that has no limit of its own."""
        timeout: timedelta = self.timeout  # type: ignore[attr-defined]
        return timeout

    def close(self) -> None:
        """Does nothing: torch closes a store with the last reference to it."""


def group_of_one() -> dist.ProcessGroup:
    """Returns torch's default group of a process that trains alone, which is made if there is
    none: FSDP2 takes no process without a group."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def group_beside(store: Store, rank: int, world_size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Returns a group over gloo that torch has no record of, beside those that it has; any thread
    may make it.

    Its own methods are its collectives. The functions of `torch.distributed` take it once
    `replace_default_group` was called.

    Args:
        store: The store at which its ranks meet.
        rank: This process's rank.
        world_size: Number of ranks.
        timeout: Time limit of its collectives.
    """
    backend_type = dist.ProcessGroup.BackendType.GLOO
    backend = dist.ProcessGroupGloo(PrefixStore("cpu", store), rank, world_size, timeout)
    group = dist.ProcessGroup(store, rank, world_size)
    group._set_default_backend(backend_type)
    group._register_backend(torch.device("cpu"), backend_type, backend)
    group._set_group_desc(OWN_GROUP)
    return group


def replace_default_group(group: dist.ProcessGroup, name: str, store: Store) -> None:
    """Makes a group of `group_beside` torch's default group; the one before stays one of this
    package's, until it is destroyed.

    Args:
        group: The new default group, of all ranks.
        name: A name that no other group of this process has.
        store: The store at which its ranks have met.
    """
    c10d: Any = dist.distributed_c10d
    world, before = c10d._world, dist.group.WORLD
    tag = f"ptd:{name}"
    named: Any = group
    named._set_group_name(name)
    world.pg_map[group] = "gloo", store
    world.pg_names[group] = name
    world.pg_group_ranks[group] = {rank: rank for rank in range(group.size())}
    world.pg_backend_config[group] = str(c10d.BackendConfig(dist.Backend("gloo")))
    world.pg_to_tag[group] = tag
    for label in ("", tag):
        world.tags_to_pg.setdefault(label, []).append(group)
    c10d._register_process_group(name, group)
    if before is not None:
        before._set_group_desc(OWN_GROUP)
    c10d._update_default_pg(group)


def replace_init(function: Callable[..., None]) -> Callable[[], object]:
    """Has `init_process_group` of torch be this function; returns what puts torch's own back."""
    before = dist.init_process_group
    cast(Any, dist.distributed_c10d).init_process_group = dist.init_process_group = function
    return lambda: replace_init(before)


def script_groups() -> list[dist.ProcessGroup]:
    """Returns the process groups that the script has made."""
    groups = list(dist.distributed_c10d._world.pg_map)
    return [g for g in groups if g is not dist.group.WORLD and g.group_desc != OWN_GROUP]


def collectives_begun(group: dist.ProcessGroup) -> tuple[int, int] | None:
    """Returns (groups made, collectives of this group begun) so far.

    Returns None if the script has groups of its own, which are not counted.
    """
    if script_groups():
        return None
    collectives = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return dist.distributed_c10d._world.group_count, int(collectives)


def nccl_backends(groups: Iterable[dist.ProcessGroup]) -> Iterator[Any]:
    """Returns the NCCL backend of each of these process groups that has one."""
    for group in groups:
        with suppress(RuntimeError):
            backend = group._get_backend(torch.device("cuda"))
            if backend.name() == "nccl":
                yield backend


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
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # noqa: TID251 - the one place


def without_torch_functions() -> AbstractContextManager[None]:
    """Returns a context in which reads of a parameter call no `__torch_function__`."""
    return torch._C.DisableTorchFunctionSubclass()  # noqa: TID251 - the one place


def unsaved_buffers_of(module: torch.nn.Module) -> set[str]:
    """Returns the names of the buffers that a module has registered with `persistent=False`."""
    return module._non_persistent_buffers_set


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
