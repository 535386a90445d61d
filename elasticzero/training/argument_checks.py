"""Checks the arguments that a script gives the session; each error says what to write instead."""

from __future__ import annotations

import copy
import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from elasticzero.checkpoint.format.names import MAX_TAG_CHARACTERS, is_tag
from elasticzero.errors import UserError
from elasticzero.ipc.assignment import Assignment
from elasticzero.parallel import OptimizerFactory
from elasticzero.parallel.optimizers.groups import MadeOptimizers, Optimizers
from elasticzero.parallel.optimizers.whole_trial import closure_sentence
from elasticzero.state.model import called_parts
from elasticzero.torch_internals.hooks import order_hooks

Kind = TypeVar("Kind")
Taken = ParamSpec("Taken")
Result = TypeVar("Result")

BATCH_ARGUMENTS = {
    "batch_sampler": "the session makes the batches; give global_batch=, micro_batch= for smaller "
    "ones on each rank, and sampler= for their order",
    "batch_size": "give global_batch=, the samples of a step over all ranks, and, for smaller "
    "batches on each rank, micro_batch=",
    "generator": "the order follows from seed=",
    "pin_memory": "batches arrive on session.device, from pinned memory where that is a GPU",
    "worker_init_fn": "data workers are the session's; seed what is random by the sample's index",
}


def check_factory(factory: Any) -> OptimizerFactory:
    """Returns the factory, with a check of the optimizer that it makes."""
    if isinstance(factory, torch.optim.Optimizer):
        kind = type(factory).__name__
        raise UserError(
            f"session.prepare was given an optimizer, an object of {kind}: give a function that "
            "makes it of the parameters it gets, session.prepare(model, lambda params: "
            f"torch.optim.{kind}(params, …)), and use the optimizer that is returned"
        )
    if not callable(factory):
        raise UserError(
            "session.prepare takes a model and a function that makes the optimizer, such as lambda "
            f"params: torch.optim.AdamW(params, lr=3e-4), not a {type(factory).__name__}"
        )

    def make(parameters: Any) -> MadeOptimizers:
        made: MadeOptimizers = factory(parameters)
        if isinstance(made, torch.optim.Optimizer):
            _check_step(made)
        elif isinstance(made, Mapping) and made:
            for name, optimizer in made.items():
                _check_named(name, optimizer)
        else:
            raise UserError(
                f"the function that session.prepare was given made a {type(made).__name__}, not a "
                "torch.optim.Optimizer: let it return the optimizer, or a dict of several"
            )
        return made

    return make


def _check_named(name: Any, optimizer: Any) -> None:
    if not isinstance(name, str) or not name or "/" in name:
        raise UserError(f"the optimizer's name {name!r} must be a text without slashes")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"the function that session.prepare was given made a dict with a "
            f"{type(optimizer).__name__} as {name!r}, not a torch.optim.Optimizer"
        )
    _check_step(optimizer)


def _check_step(optimizer: torch.optim.Optimizer) -> None:
    order_hooks(optimizer)
    parameters = inspect.signature(type(optimizer).step).parameters
    closure = parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UserError(closure_sentence(type(optimizer).__name__))


def check_model(model: Any) -> None:
    """Raises `UserError` for an object that is no model to be trained."""
    if isinstance(model, DistributedDataParallel):
        raise UserError(
            "session.prepare was given a DistributedDataParallel: give it the model inside, for "
            "the session lays it over the ranks"
        )
    if not isinstance(model, nn.Module):
        raise UserError(f"session.prepare takes an nn.Module first, not a {type(model).__name__}")
    if isinstance(getattr(model, "_orig_mod", None), nn.Module):
        raise UserError(
            "session.prepare was given what torch.compile has returned, whose parameters have "
            "other names: give it the model itself, and compile=True or a mode"
        )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            what = f"has module {name!r}, which is" if name else "is"
            raise UserError(
                f"the model given to session.prepare {what} of torch.jit: give it the module that "
                "was scripted or traced, and compile=True if it is to be compiled"
            )
    if not any(True for _ in model.parameters()):
        raise UserError("session.prepare was given a model without parameters")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise UserError(
                f"{name!r} of the model has no shape yet, for its module is lazy: run one batch "
                "through the model before session.prepare"
            )
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise UserError(
                f"parameter {name!r} is complex, of {parameter.dtype}, which is neither summed nor "
                "stored: make it a real parameter with a last dimension of 2, and compute with "
                "torch.view_as_complex of it"
            )


def check_offload(strategy: str, device: torch.device, assignment: Assignment) -> None:
    """Checks that `cpu_offload` of `session.prepare` can be had.

    Args:
        strategy: The strategy's name.
        device: The rank's device.
        assignment: This rank's place and settings, of which mirrors count.

    Raises:
        UserError: The strategy is not zero3, or a GPU's state would have mirrors.
    """
    if strategy != "zero3":
        raise UserError(
            f"session.prepare got cpu_offload=True with strategy {strategy}, and zero3 alone keeps "
            "its state in host memory: use strategy zero3, or leave out cpu_offload"
        )
    mirrored = assignment.mirrors or assignment.mirrored_by is not None
    if mirrored and device.type == "cuda":
        raise UserError(
            "session.prepare got cpu_offload=True, whose state in host memory NCCL cannot send to "
            "the mirrors of --redundancy mirror: leave out one of the two"
        )


def redirect_deepcopy(original: nn.Module, distributed: nn.Module, strategy: str) -> None:
    """Redirects a deep copy of the script's model (as `AveragedModel` makes one) to the model it
    gave.

    Without the whole model on a rank, the copy is refused.

    Args:
        original: The model that the script gave.
        distributed: The model as it is laid over the ranks.
        strategy: The strategy's name; under zero3 a copy raises `UserError`.
    """

    def refuse(_: Any) -> NoReturn:
        raise UserError(PARTITIONED_COPY)

    def copy_original(memo: dict[int, Any]) -> nn.Module:
        return copy.deepcopy(original, memo)

    if strategy == "zero3":
        for module in (distributed, *called_parts(distributed)):
            module.__dict__["__deepcopy__"] = refuse
    elif distributed is not original:
        distributed.__dict__["__deepcopy__"] = copy_original


PARTITIONED_COPY = (
    "under zero3 no rank has the whole model, so it can neither be copied nor averaged by an "
    "AveragedModel: use zero1 or zero2, or average what session.state_dict() gives rank 0"
)


def check_tracked(name: str, thing: Any, optimizers: Optimizers, strategy: str) -> None:
    """Checks that an object can be part of the state.

    Args:
        name: The name under which the script tracks it.
        thing: The object.
        optimizers: The optimizers that `session.prepare` has returned.
        strategy: The strategy's name; under zero3 no average of a model can be stored.

    Raises:
        UserError: It is a scheduler of another optimizer, an average that cannot be stored, or is
            in the session's hands already.
    """
    if isinstance(thing, torch.amp.GradScaler):
        raise UserError(
            f"session.track({name!r}, …): a GradScaler steps the optimizer itself, which "
            "session.step() does; leave it out, for session.prepare(…, precision='fp16') scales "
            "losses, and its scale is part of the training state"
        )
    if isinstance(thing, DataLoader):
        raise UserError(
            f"session.track({name!r}, …): the position in the data is part of the training state "
            f"already; leave this {type(thing).__name__} out, and give it to session.batches"
        )
    if isinstance(thing, AveragedModel) and strategy == "zero3":
        raise UserError(f"session.track({name!r}, …): {PARTITIONED_COPY}")
    for part in (thing, *getattr(thing, "_schedulers", ())):
        other = getattr(part, "optimizer", None)
        is_prepared = any(other is optimizer for optimizer in optimizers.by_name.values())
        if isinstance(other, torch.optim.Optimizer) and not is_prepared:
            raise UserError(
                f"session.track({name!r}, …): this {type(part).__name__} was built on another "
                "optimizer than what session.prepare has returned, so it would change "
                "nothing: build it on that, after session.prepare"
            )


def check_arguments(others: Mapping[str, Any], call: Callable[..., Any]) -> None:
    """Checks that `session.batches` is given no argument that it does not take.

    Args:
        others: Arguments that it does not take, by name.
        call: The method, whose own arguments may be meant.

    Raises:
        UserError: There is one; the error says what to write instead, or which name is nearest.
    """
    for name in others:
        if (instead := BATCH_ARGUMENTS.get(name)) is not None:
            raise UserError(f"session.batches takes no {name}=: {instead}")
        raise UserError(_unknown_argument("session.batches", name, _names_of(call)))


def checks_arguments(kind: type[Kind]) -> type[Kind]:
    """Has a call of a public method with arguments that it does not take end in a `UserError`."""
    for name, method in list(vars(kind).items()):
        if inspect.isfunction(method) and not name.startswith("_"):
            setattr(kind, name, checked(f"{kind.__name__.lower()}.{name}", method))
    return kind


def checked(name: str, call: Callable[Taken, Result]) -> Callable[Taken, Result]:
    """Returns a function that makes the call, and raises `UserError` for arguments that do not
    fit.

    Args:
        name: The function's name as a script writes it.
        call: The function.
    """

    @functools.wraps(call)
    def checked_call(*args: Taken.args, **named: Taken.kwargs) -> Result:
        try:
            return call(*args, **named)
        except TypeError:
            _check_fit(name, call, args, named)
            raise

    return checked_call


def _check_fit(
    name: str, call: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]
) -> None:
    """Raises `UserError` unless a function takes these arguments.

    Args:
        name: The function's name as a script writes it.
        call: The function.
        args: Arguments by position.
        named: Arguments by name.
    """
    try:
        inspect.signature(call).bind(*args, **named)
    except TypeError as error:
        names = _names_of(call)
        for argument in named:
            if argument not in names:
                raise UserError(_unknown_argument(name, argument, names)) from None
        raise UserError(f"{name}(…) does not fit its arguments: {error}") from None


def _names_of(call: Callable[..., Any]) -> list[str]:
    """Returns the names of the arguments that a function takes by name."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(call).parameters.values()
    return [p.name for p in parameters if p.kind in kinds and p.name != "self"]


def _unknown_argument(call: str, name: str, names: Collection[str]) -> str:
    """Returns the sentence that refuses an argument.

    Args:
        call: The function's name as a script writes it.
        name: The argument.
        names: The arguments that the function takes.
    """
    nearest = difflib.get_close_matches(name, names, n=1)
    if nearest:
        return f"{call} takes no {name}=: is {nearest[0]}= meant?"
    return f"{call} takes no {name}=, but {', '.join(f'{taken}=' for taken in names)}"


def stop_reason(reason: Any) -> str:
    """Returns the reason for which a script ends training, on one line; raises `UserError` for
    anything but a text."""
    if not isinstance(reason, str) or not reason.strip():
        raise UserError("session.stop takes the reason as a text, which the job ends with")
    return " ".join(reason.split())


def checked_tag(tag: Any) -> str | None:
    """Returns a checkpoint's tag, or None; raises `UserError` for what is no tag."""
    if tag is not None and not (isinstance(tag, str) and is_tag(tag)):
        raise UserError(
            f"session.checkpoint(tag={tag!r}): a tag has 1 to {MAX_TAG_CHARACTERS} letters, "
            "digits, '.', '_' or '-', and does not begin with '.'"
        )
    return tag


def scalar(name: str, value: float | Tensor) -> float:
    """Returns a number that the script logs; raises `UserError` for anything else."""
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"session.log: {name!r} is not one number ({error})") from None
