"""The user's optimizer: the parameters of its groups, the state it keeps, and whether it can work
on pieces of parameters.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from elasticzero.errors import CheckpointMismatch, UserError
from elasticzero.parallel.base import OptimizerFactory
from elasticzero.state.model import OPTIMIZER, NamedModel, Spec
from elasticzero.torch_internals import drop_step_hooks

PROBE_SHAPE = (2, 3)
PROBE_CUT = 4
PROBE_STEPS = 2
MASTER = "master"
"""The key under which a 32-bit copy of a 16-bit parameter is kept beside its optimizer state."""

NUMBERS: dict[type[Any], torch.dtype] = {
    int: torch.int64,
    float: torch.float64,
    bool: torch.bool,
}
"""How Python's own numbers in an optimizer's state are stored."""

Kind = Literal["elementwise", "scalar", "number", "other"]


@dataclass(frozen=True, slots=True)
class StateKey:
    """Describes one entry that an optimizer keeps for a parameter."""

    kind: Kind
    """elementwise: shaped like the parameter; scalar: a 0-dim tensor; number: of Python's own."""
    dtype: torch.dtype
    device: torch.device
    python: type[Any] | None = None


Schema = Mapping[str, StateKey]


@dataclass(frozen=True, slots=True)
class UserOptimizer:
    """Holds an optimizer just built, its groups' parameters by name, and what each group keeps."""

    optimizer: torch.optim.Optimizer
    group_names: list[list[str]]
    schemas: list[Schema]

    def schema_of(self) -> dict[str, Schema]:
        """Returns what is kept for each parameter, by its name."""
        return {
            name: schema
            for names, schema in zip(self.group_names, self.schemas, strict=True)
            for name in names
        }


ELEMENTWISE = "an optimizer that treats each by itself, as SGD, Adam, AdamW and RMSprop do"
"""What can be partitioned."""


def open_optimizer(factory: OptimizerFactory, named: NamedModel, *, pieces: bool) -> UserOptimizer:
    """Builds the user's optimizer over the whole parameters.

    pieces: it is to work on flat pieces, 32-bit ones for 16-bit parameters; raises `UserError` for
    one that cannot.
    """
    optimizer = factory(list(named.parameters.values()))
    name_of = named.name_of()
    names: list[list[str]] = []
    for group in optimizer.param_groups:
        unknown = [p for p in group["params"] if id(p) not in name_of]
        if unknown:
            raise UserError(
                f"the optimizer has a parameter of shape {tuple(unknown[0].shape)} that is not the "
                "model's; build it from the parameters that the factory is given"
            )
        names.append([name_of[id(p)] for p in group["params"]])
    kind = type(optimizer).__name__
    if pieces and any(optimizer.state.values()):
        raise UserError(
            f"{kind} makes its state when it is built, before the parameters are partitioned; use "
            "strategy ddp, or an optimizer that makes its state in the first step"
        )
    schemas = _probe(optimizer, pieces=pieces)
    for schema in schemas if pieces else []:
        for key, entry in schema.items():
            if entry.kind == "other":
                raise UserError(
                    f"{kind} keeps {key!r}, which is neither shaped like the parameter nor a "
                    "single number, so it cannot be partitioned; use strategy ddp, "
                    f"or {ELEMENTWISE}"
                )
    return UserOptimizer(optimizer, names, schemas)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which pieces of a parameter are optimized."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def copy_without_state(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns an optimizer of the same kind, options and groups, without state, hooks and
    parameters."""
    clone = object.__new__(type(optimizer))
    clone.__dict__ = dict(optimizer.__dict__)
    clone.state = defaultdict(dict)
    clone.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
    drop_step_hooks(clone)
    return clone


def _probe(optimizer: torch.optim.Optimizer, *, pieces: bool) -> list[Schema]:
    """Finds what the optimizer keeps for a parameter of each group, by stepping dummies: one whole
    and the same cut in two, which must come out equal if pieces are to be allowed."""
    clone = copy_without_state(optimizer)
    clone.param_groups = []
    dummies: list[list[nn.Parameter]] = []
    for group in optimizer.param_groups:
        options = {k: copy.deepcopy(v) for k, v in group.items() if k != "params"}
        dummies.append(_dummies(group["params"], pieces=pieces))
        clone.param_groups.append({"params": dummies[-1], **options})
    try:
        for seed in range(PROBE_STEPS):
            for group_dummies in dummies:
                _give_gradients(group_dummies, seed)
            clone.step()
    except (
        RuntimeError,
        ValueError,
        TypeError,
        AssertionError,
        AttributeError,
        IndexError,
    ) as error:
        if not pieces:
            return [{} for _ in dummies]
        raise UserError(
            f"{type(optimizer).__name__} cannot work on flat pieces of parameters ({error}); use "
            "strategy ddp"
        ) from error
    if pieces:
        for group_dummies in dummies:
            _check_pieces(type(optimizer).__name__, group_dummies)
    return [_schema(clone, group[0]) if group else {} for group in dummies]


def _dummies(parameters: list[nn.Parameter], *, pieces: bool) -> list[nn.Parameter]:
    like = next((p for p in parameters if p.requires_grad), None)
    if like is None:
        return []
    dtype = working_dtype(like.dtype) if pieces else like.dtype
    values = torch.linspace(-1.0, 1.0, 6, dtype=torch.float64).to(like.device, dtype)
    whole = nn.Parameter(values.clone().view(PROBE_SHAPE))
    if not pieces:
        return [whole]
    cut = [nn.Parameter(part.clone()) for part in values.split([PROBE_CUT, 6 - PROBE_CUT])]
    return [whole, *cut]


def _give_gradients(dummies: list[nn.Parameter], seed: int) -> None:
    if not dummies:
        return
    generator = torch.Generator().manual_seed(seed)
    gradient = torch.randn(6, generator=generator, dtype=torch.float64).to(dummies[0])
    dummies[0].grad = gradient.view(PROBE_SHAPE).clone()
    if len(dummies) > 1:
        dummies[1].grad = gradient[:PROBE_CUT].clone()
        dummies[2].grad = gradient[PROBE_CUT:].clone()


def _check_pieces(kind: str, dummies: list[nn.Parameter]) -> None:
    if not dummies:
        return
    whole = dummies[0].detach().flatten()
    cut = torch.cat([dummies[1].detach(), dummies[2].detach()])
    if not torch.allclose(whole, cut, rtol=1e-5, atol=1e-7):
        raise UserError(
            f"{kind} does not treat each element by itself (it gives another result when a "
            f"parameter is cut in two), so it cannot be partitioned; use strategy ddp, "
            f"or {ELEMENTWISE}"
        )


def _schema(optimizer: torch.optim.Optimizer, dummy: nn.Parameter) -> Schema:
    schema: dict[str, StateKey] = {}
    for key, value in optimizer.state[dummy].items():
        if isinstance(value, Tensor):
            kind: Kind = "other"
            if value.shape == dummy.shape:
                kind = "elementwise"
            elif value.dim() == 0:
                kind = "scalar"
            schema[key] = StateKey(kind, value.dtype, value.device)
        elif type(value) in NUMBERS:
            schema[key] = StateKey("number", NUMBERS[type(value)], torch.device("cpu"), type(value))
        elif value is not None:
            schema[key] = StateKey("other", dummy.dtype, dummy.device)
    return schema


def as_tensor(value: Any) -> Tensor | None:
    """Returns a state entry as it is stored: a number as a 0-dim tensor; None: nothing to store."""
    if isinstance(value, Tensor):
        return value.detach()
    return torch.tensor(value, dtype=NUMBERS[type(value)]) if type(value) in NUMBERS else None


def put_state(
    optimizer: torch.optim.Optimizer,
    parameter: nn.Parameter,
    stored: Mapping[str, Tensor],
    schema: Schema,
) -> None:
    """Replaces the optimizer's entries for a parameter with the stored ones.

    Entries that are all zero are those of a parameter that was never stepped: strategies that
    partition state write zeros for it, and the optimizer makes its first state by itself.
    """
    optimizer.state.pop(parameter, None)
    if any(bool(entry.any()) for entry in stored.values()):
        optimizer.state[parameter] = {
            key: _as_state(tensor, schema.get(key), parameter) for key, tensor in stored.items()
        }


def _as_state(stored: Tensor, entry: StateKey | None, like: Tensor) -> Any:
    """Returns a stored entry in the form in which the optimizer keeps it for parameter `like`."""
    if entry is None:
        return stored if stored.dim() == 0 else stored.to(like.device)
    if entry.python is not None:
        return entry.python(stored.item())
    if entry.kind == "scalar":
        return stored.to(entry.device, entry.dtype)
    dtype = like.dtype if stored.is_floating_point() else stored.dtype
    return stored.to(like.device, dtype)


def by_parameter(stored: Mapping[str, Spec]) -> dict[str, dict[str, Spec]]:
    """Returns the optimizer's stored tensors, by parameter and key."""
    found: dict[str, dict[str, Spec]] = {}
    for full, spec in stored.items():
        if full.startswith(OPTIMIZER):
            name, _, key = full[len(OPTIMIZER) :].rpartition("/")
            found.setdefault(name, {})[key] = spec
    return found


def check_keys(name: str, keys: Mapping[str, Spec], schema: Schema) -> None:
    """Raises `CheckpointMismatch` when these are not the keys that this optimizer keeps."""
    stored = set(keys) - {MASTER}
    if stored and stored != set(schema):
        raise CheckpointMismatch(
            f"the checkpoint was written with another optimizer: it holds "
            f"{', '.join(sorted(stored))} for parameter {name!r}, and this optimizer keeps "
            f"{', '.join(sorted(schema)) or 'nothing'}. An optimizer can only go on from state "
            "that holds what it keeps itself: use the optimizer that wrote it, or one that keeps "
            "the same, or start in another checkpoint directory"
        )
