"""Finds what a script has changed of the parameters that `session.prepare` was given.

Rules:
 PC1  A parameter is trained as the object that it was at `prepare`. Where a module has another one
      under its name, or none, or a new name has one, the script is refused.
 PC2  A parameter may lie in other memory than before (`parameter.data = …`, `set_`): its values
      count. It keeps its shape and dtype, and its device if it is trained.
 PC3  Where parameters are dealt to ranks, no two of them share elements.
 PC4  Where each rank has rows of parameters, nobody changes the memory from before that.
The first two are looked at between steps, and where parameters lie before each step too. No value
is read for it, and nothing waits. PC4 is looked at in the first step and after each capture, and
values are read only of what the script still refers to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import pairwise

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from elasticzero.errors import UserError, one_line
from elasticzero.rank_groups import same_number
from elasticzero.state.digests import change_marks, combined, digests
from elasticzero.torch_internals.tensors import (
    children_of,
    is_of_storage,
    parameters_of,
    sharing_tensors,
    without_torch_functions,
)

BEFORE = (
    "change the model before session.prepare, which every generation calls anew, and later its "
    "values alone, in place"
)

OPTIONS_DIFFER = (
    "ranks would step by different options of the optimizers' groups, as lr: what sets them must "
    "not follow from a rank's own loss or samples; take session.loss, which is that of all ranks, "
    "what session.evaluate returns, or session.step_count"
)

MARKS_OF_ROWS = (
    "sharding strategy registered",
    "torch.Tensor and DTensor",
    "sharded dimension",
    "Sharding propagation failed",
    "as_strided not supported with DTensor",
    "in-place operations that require placement changes",
    "not have been used in the graph",
    "attribute '_local_tensor'",
    "autograd.Function with functorch transforms",
)
"""Parts of torch's errors for operations that have no meaning for rows of a tensor, or for which a
forward must have used the tensor itself. The last two come of transforms of torch.func."""


class ParameterObjects:
    """Compares the parameters that a model's modules have with those from before (PC1)."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters = _by_name(model)
        self._record()

    def _record(self) -> None:
        self._modules = list(self._model.modules())
        """Keeps them alive, so that no other object has the number of one of them."""
        self._parts = [
            (objects, [id(held) for held in objects.values()])
            for module in self._modules
            for objects in (parameters_of(module), children_of(module))
        ]

    @property
    def are_same(self) -> bool:
        """Tells whether every module has the parameters and children of before."""
        for objects, ids in self._parts:
            if len(objects) != len(ids) or (ids and list(map(id, objects.values())) != ids):
                return False
        return True

    def difference(self) -> UserError | None:
        """Returns the error for the first parameter that differs; None: none does."""
        if self.are_same:
            return None
        present, before = _by_name(self._model), self._parameters
        for name in (*before, *present):
            if present.get(name) is not before.get(name):
                return UserError(_sentence(name, name in before, name in present))
        self._record()  # modules without parameters are the script's
        return None


def replaced_sentence(name: str) -> str:
    """Returns the sentence for a parameter in whose place the script has put another one."""
    return (
        f"parameter {name!r} is another object than session.prepare was given, which would not be "
        "trained (load_state_dict(assign=True) or a module put in the place of another does "
        f"this): {BEFORE}"
    )


def _sentence(name: str, before: bool, now: bool) -> str:
    if before and now:
        return replaced_sentence(name)
    if before:
        what = (
            "is no parameter of the model any more, which it was at session.prepare (a "
            "parametrization, pruning or merged adapters do this)"
        )
    else:
        what = "was added after session.prepare, and would not be trained"
    return f"parameter {name!r} {what}: {BEFORE}"


def _by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


class ParameterMemory:
    """Knows where parameters lie, and what of them may not change (PC2)."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, may_overlap: bool = True) -> None:
        """Takes note of where the parameters lie.

        Args:
            parameters: The parameters by name.
            may_overlap: False: PC3 holds for them.
        """
        self._may_overlap = may_overlap
        # A class of the script's own may have no memory that torch can compare.
        self._parameters = {n: p for n, p in parameters.items() if type(p) is nn.Parameter}
        self._places = {name: p.detach() for name, p in self._parameters.items()}

    def difference(self) -> UserError | None:
        """Returns the error for a parameter of another kind; takes note of where the others lie."""
        if lie_at(self._parameters.values(), self._places.values()):
            return None
        for name, parameter in self._parameters.items():
            error = kind_difference(name, parameter, self._places[name])
            if error is not None:
                return error
            self._places[name] = parameter.detach()
        return None if self._may_overlap else overlap(self._parameters)


class FixedMemory:
    """Refuses other memory for parameters of which a rank has rows: torch then changes the outer
    tensor alone, and leaves the rows as they are."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        with without_torch_functions():
            self._storages = {n: (p, p.untyped_storage()) for n, p in parameters.items()}

    def difference(self, names: Iterable[str] | None = None) -> UserError | None:
        """Returns the error for the first of these parameters, or of all, that was given other
        memory."""
        with without_torch_functions():
            for name in self._storages if names is None else names:
                if not is_of_storage(*self._storages[name]):
                    return UserError(
                        f"parameter {name!r} was given other memory, as `parameter.data = …` and "
                        "vector_to_parameters do it, which zero3 cannot divide: change its values "
                        "in place, as by `parameter.data.copy_`, or use ddp, zero1 or zero2"
                    )
        return None


def buffer_overlap(model: nn.Module) -> UserError | None:
    """Returns the error for a buffer in the memory of a parameter, which each rank is to have rows
    of; None: there is none."""
    owners = {memory_of(p): name for name, p in model.named_parameters() if not p.is_meta}
    for name, buffer in model.named_buffers():
        if buffer.numel() and not buffer.is_meta and memory_of(buffer) in owners:
            return UserError(
                f"buffer {name!r} shares memory with parameter {owners[memory_of(buffer)]!r}, of "
                "which zero3 gives each rank its rows in other memory: compute it in the forward, "
                "or use ddp, zero1 or zero2"
            )
    return None


class OldMemory:
    """Finds changes of the memory that parameters had before each rank took its rows (PC4)."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        shared = shared_outside(parameters.values())
        self._tensors = {n: p.detach() for n, p in parameters.items() if memory_of(p) in shared}
        self._marks = change_marks(self._tensors)

    def difference(self) -> UserError | None:
        """Returns the error for the first parameter whose old memory was changed."""
        for name in [n for n, t in self._tensors.items() if sharing_tensors(t) == 1]:
            del self._tensors[name]  # nobody else refers to it any more
        marks = change_marks(self._tensors)
        for name in self._tensors:
            if marks[name] != self._marks[name]:
                return UserError(
                    f"parameter {name!r} was changed through a tensor from before session.prepare, "
                    "of which zero3 has given each rank its rows: change the parameters that the "
                    "model has after it, or use ddp, zero1 or zero2"
                )
        return None


def refused_operation(error: BaseException, parameters: Iterable[nn.Parameter]) -> BaseException:
    """Returns the error that tells a user what torch cannot do with rows of a parameter; another
    error of the script is returned as it is."""
    is_of_torch = isinstance(error, RuntimeError | AttributeError)
    is_marked = is_of_torch and any(mark in str(error) for mark in MARKS_OF_ROWS)
    if not is_marked or not any(isinstance(parameter, DTensor) for parameter in parameters):
        return error
    refused = UserError(
        "under zero3 the parameters that a script sees are this rank's rows of those that a "
        "forward uses, DTensors of torch, and torch refuses what the script does with them "
        f"({one_line(error)}): use ddp, zero1 or zero2, or between steps their `full_tensor()` or "
        "`to_local()`"
    )
    refused.__cause__ = error
    return refused.with_traceback(error.__traceback__)


def lie_at(parameters: Iterable[nn.Parameter], places: Iterable[Tensor]) -> bool:
    """Returns whether each parameter lies where the tensor beside it does; of 2,000 in a third of a
    millisecond."""
    with without_torch_functions():
        return all(map(Tensor.is_set_to, parameters, places))


def moved(pairs: Iterable[tuple[nn.Parameter, Tensor]]) -> list[bool]:
    """Returns whether each parameter lies elsewhere than the tensor beside it."""
    with without_torch_functions():
        return [not parameter.is_set_to(place) for parameter, place in pairs]


def kind_difference(name: str, parameter: nn.Parameter, before: Tensor) -> UserError | None:
    """Returns the error for a parameter whose shape or dtype has changed, or whose device has, if
    it is trained; None: it may be taken."""
    kinds = [(tuple(t.shape), str(t.dtype), str(t.device)) for t in (parameter, before)]
    kept = 3 if parameter.requires_grad else 2
    for now, old in list(zip(*kinds, strict=True))[:kept]:
        if now != old:
            return UserError(
                f"parameter {name!r} is now of {now}, and was of {old} at session.prepare: {BEFORE}"
            )
    return None


def overlap(parameters: Mapping[str, nn.Parameter]) -> UserError | None:
    """Returns the error for two parameters that share elements, which would be stepped as two;
    None: no two do."""
    spans = []
    for name, parameter in parameters.items():
        tensor = parameter.detach()
        extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        has_no_gaps = tensor.numel() == extent and not tensor.is_meta
        if has_no_gaps and type(parameter) is nn.Parameter:
            first = tensor.data_ptr()
            spans.append((str(tensor.device), first, first + extent * tensor.element_size(), name))
    spans.sort()
    for (device, _, stop, name), (other_device, start, _, other) in pairwise(spans):
        if device == other_device and start < stop:
            return UserError(
                f"parameters {name!r} and {other!r} share memory and are two objects, which only "
                "ddp steps as one: tie them as one parameter (`a.weight = b.weight`)"
            )
    return None


def shared_outside(tensors: Iterable[Tensor]) -> set[int]:
    """Returns the addresses of memory that other tensors than these share with some of them."""
    unique = {id(tensor): tensor for tensor in tensors if type(tensor) in (Tensor, nn.Parameter)}
    by_memory: dict[int, list[Tensor]] = {}
    for tensor in unique.values():
        by_memory.setdefault(memory_of(tensor), []).append(tensor)
    return {at for at, of in by_memory.items() if sharing_tensors(of[0]) > len(of)}


def memory_of(tensor: Tensor) -> int:
    """Returns the address of the whole memory that a tensor has a part of."""
    return tensor.untyped_storage().data_ptr()


class ForwardChanges:
    """Finds what a script changes in whole parameters while a step is computed, which must be the
    same on all ranks, for each of them steps its own part.

    It reads the parameters in the first step, and in the one after each verification.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], ranks: int, options: Callable[[], int] = int
    ) -> None:
        """Reads nothing yet.

        Args:
            parameters: All parameters by name, whole on this rank.
            ranks: Number of ranks.
            options: Returns a number for the options by which the ranks step.
        """
        self._ranks = ranks
        self._options = options
        self._due = ranks > 1
        """The step that begins next is looked at."""
        self._first = True
        """No step was looked at so far; later verifications compare the options."""
        self._parameters = parameters
        self._before: dict[str, int] | None = None
        """Digests from the beginning of the step; None: it is not looked at."""
        self._names: list[str] = []

    def enter_world(self, ranks: int, *, anew: bool) -> None:
        """Takes the number of ranks of another world.

        Args:
            ranks: The number.
            anew: Whether some of them begin there, and look at their first step.
        """
        self._ranks = ranks
        if anew:
            self._due, self._first = ranks > 1, True

    def request(self) -> None:
        """Has the next step looked at; all ranks call this after the same step."""
        self._due = self._ranks > 1

    def begin(self) -> None:
        """Begins a step, or another micro-batch of it; the parameters are up to date."""
        if self._due:
            self._due = False
            self._before = digests(self._parameters)

    def end(self) -> int | None:
        """Returns a number, below `same_number.MODULUS`, for what has changed since `begin`; None:
        the step is not looked at."""
        before, self._before, self._names = self._before, None, []
        if before is None:
            return None
        table = digests(self._parameters)
        changed = {name: digest for name, digest in table.items() if digest != before[name]}
        self._names = list(changed)
        number = combined(changed) if changed else 0
        options = self._options() if self._first else 0
        self._first = False
        return (number + options) % same_number.MODULUS

    @property
    def names(self) -> Collection[str]:
        """Returns what has changed since `begin`, or before the newest `end`; none where the step
        is not looked at."""
        if self._before is None:
            return self._names
        table = digests(self._parameters)
        return [name for name, digest in table.items() if digest != self._before[name]]

    def sentence(self) -> str:
        """Returns what to do where the ranks have changed different things."""
        if not self._names:
            return OPTIONS_DIFFER
        what = f"parameter {self._names[0]!r}"
        return (
            f"a forward has changed {what}, and not in the same way on all ranks, as "
            "torch.nn.functional.embedding does with max_norm=: change it after session.step(), "
            f"where it has the same values on all ranks. If it does not: {OPTIONS_DIFFER}"
        )
