"""Finds out, on dummies, whether an optimizer can work on parts of parameters, and what it keeps.

Rules:
 X1  A group works on elements if two cut pieces of a parameter, each stepped alone, come out as the
     whole parameter does, and if all that is kept has the parameter's shape or one number. It does
     not if its optimizer packs what it keeps.
 X2  Else it works on parameters if two of them, stepped together, come out as each does alone, and
     if the shapes of all that is kept follow from the parameter's. In X1 and X2 numbers that are
     kept and the options of the group must come out alike too: else they follow from all that was
     stepped together, and may change the steps later.
 X3  Else it works on the whole model only.
 X4  What a packing optimizer keeps may depend on the very shape of a parameter. So it is found for
     each shape, by steps on the meta device, where a dummy has no memory.
 X5  What changes in the optimizer's own attributes while it steps is state, and so are entries of
     its `state` whose key is no parameter. Where parts are dealt, neither can be kept.
Dummies are stepped without `torch.compile`, which would compile for each of their shapes.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from elasticzero.errors import UserError
from elasticzero.parallel.optimizers.attributes import (
    changed_names,
    copy_for_trial,
    is_same,
    own_attributes,
    tensors_in,
)
from elasticzero.parallel.optimizers.packed import PackedEntry, inner_entries, is_packed
from elasticzero.parallel.optimizers.state import (
    Schema,
    StateKey,
    number_dtype,
    stored_key,
    working_dtype,
)
from elasticzero.state.model import Spec, spec_of
from elasticzero.torch_internals.hooks import drop_step_hooks

CUT_SHAPE = (2, 3)
CUT_AT = 4
SHAPES = (2, 3, 5, 7, 11, 13)
"""Sizes of the dimensions of a dummy: from such a size in its state follows the dimension."""
STEPS = 2
FAILURES = (Exception,)
"""An optimizer raises one of these in a step that it cannot take: some raise a plain one."""
SMALL_ELEMENTS = 1 << 16
"""Elements of the largest tensor in an attribute that is copied for each trial."""
PACKING = "torchao"
"""Package whose optimizers pack what they keep for large parameters, and so not for dummies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNature:
    """Describes what an optimizer works on in one group."""

    works_on: Literal["elements", "parameters", "model"]
    schemas: Mapping[int, Schema]
    """Says what is kept for a parameter, by its number of dimensions."""
    makes_state_at_once: bool
    """The optimizer has made state when it was built, before its first step."""
    reason: str = ""
    """Why it works on the whole model only: the rest of a sentence that begins with its name."""
    packs: bool = False
    """The optimizer packs what it keeps, at least for some parameters."""
    attributes: tuple[str, ...] = ()
    """Names of the optimizer's own attributes that change while it steps."""
    entries: tuple[str, ...] = ()
    """Keys of its state that are no parameters."""
    packed: Mapping[Spec, Schema] = field(default_factory=dict)
    """Says what a packing optimizer keeps for a parameter of this shape and dtype."""

    def schema(self, of: Spec) -> Schema:
        """Returns what is kept for a parameter like this one."""
        return self.packed.get(of) or self.schemas.get(max(1, len(of.shape)), {})


def probe(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    natures: dict[Any, GroupNature],
    *,
    whole_model: bool,
    device: torch.device | None = None,
) -> GroupNature:
    """Finds out what the optimizer works on in a group, by stepping dummies.

    Args:
        optimizer: The optimizer, which is not changed.
        group: One of its parameter groups.
        natures: What like groups work on, to which this one's is added.
        whole_model: The strategy leaves all to each rank, so that it matters only what is kept.
        device: The device of the dummies; None: that of the parameters.

    Returns:
        What the optimizer works on, and what it keeps.
    """
    trained = [p for p in group["params"] if p.requires_grad]
    if not trained:
        return GroupNature(works_on="elements", schemas={}, makes_state_at_once=False)
    like = next((p for p in trained if p.numel()), trained[0])
    dimensions = sorted({max(1, p.dim()) for p in trained})
    options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
    settings = repr(sorted((k, v) for k, v in options.items() if "lr" not in k))
    key = (id(optimizer), like.dtype, like.device, settings, tuple(dimensions))
    trial = _Trial(optimizer, group, like, whole_model=whole_model, device=device or like.device)
    with unchanged_generator():
        if key not in natures:
            trying = trial.schemas_only if whole_model else trial.nature
            natures[key] = trying(dimensions)
        nature = natures[key]
        return replace(nature, packed=trial.packed(group["params"])) if nature.packs else nature


@contextmanager
def unchanged_generator() -> Iterator[None]:
    """Leaves torch's random generators as they are, whatever a trial draws from them."""
    state = torch.get_rng_state()
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        torch.set_rng_state(state)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu)


def with_moving_rate(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options with a learning rate that moves dummies: a warm-up begins with zero."""
    lr = options.get("lr")
    if not isinstance(lr, (float, Tensor)) or lr != 0:
        return dict(options)
    return {**options, "lr": torch.full_like(lr, 1e-2) if isinstance(lr, Tensor) else 1e-2}


class _Trial:
    """Steps copies of one optimizer on dummies of one group."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        group: Mapping[str, Any],
        like: nn.Parameter,
        *,
        whole_model: bool,
        device: torch.device,
    ) -> None:
        self._optimizer = optimizer
        self._group = group
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        self._options = with_moving_rate(options)
        self._like = like
        self._attributes: set[str] = set()
        self._entries: set[str] = set()
        self._late: set[Any] = set()
        self._stand_ins = _stand_ins(optimizer)
        self._whole_model, self._device = whole_model, device
        self._dtype = self._dtype_of(like)
        state = optimizer.state.get(like, {})
        self._has_dict = isinstance(state, Mapping)
        self._state: Mapping[str, Any] = state if self._has_dict else {}
        self._packs = PACKING in packages_of(optimizer) or any(map(is_packed, self._state.values()))

    def schemas_only(self, dimensions: Sequence[int]) -> GroupNature:
        schema_of: dict[int, Schema] = {}
        for count in dimensions:
            try:
                schema_of[count] = self._schema(SHAPES[:count])
            except FAILURES:
                schema_of[count] = {}
        return self._nature("model", schema_of)

    def packed(self, parameters: Sequence[nn.Parameter]) -> dict[Spec, Schema]:
        """Returns what the optimizer keeps for each shape and dtype of these parameters (X4).

        Raises:
            UserError: The optimizer cannot step such a dummy.
        """
        schema_of: dict[Spec, Schema] = {}
        for parameter in parameters:
            if (of := spec_of(parameter)) in schema_of:
                continue
            values = torch.empty(of.shape, dtype=self._dtype_of(parameter), device="meta")
            try:
                [dummy], [state], _ = self._step([values], [[values] * STEPS])
            except FAILURES as error:
                kind = type(self._optimizer).__name__
                raise UserError(
                    f"{kind} packs what it keeps, and cannot step a parameter of shape "
                    f"{list(of.shape)} on the meta device, by which its state is found out "
                    f"({error}): use torch.optim.AdamW, or an optimizer of torchao"
                ) from error
            schema_of[of] = self._entries_of(state, dummy)
        return schema_of

    def nature(self, dimensions: Sequence[int]) -> GroupNature:
        why_not_cut = ""
        if not self._has_dict:
            return self._nature("model", {}, "keeps something other than a dict for a parameter")
        try:
            if not self._packs and self._treats_elements_alone():
                schema = self._schema(CUT_SHAPE)
                kinds = {"late" if entry.late else entry.kind for entry in schema.values()}
                if kinds <= {"elementwise", "scalar", "number", "constant"}:
                    return self._nature("elements", dict.fromkeys(dimensions, schema))
        except FAILURES as error:
            why_not_cut = f" ({error})"
        try:
            if not all(self._treats_parameters_alone(SHAPES[:count]) for count in dimensions):
                reason = "treats its parameters together, so they cannot be dealt to ranks"
                return self._nature("model", {}, reason)
            schemas = {count: self._schema(SHAPES[:count]) for count in dimensions}
        except FAILURES as error:
            return self._nature(
                "model", {}, f"cannot work on parts of a model{why_not_cut or f' ({error})'}"
            )
        for schema in schemas.values():
            for key, entry in schema.items():
                if (why := _why_not_dealt(entry)) is not None:
                    return self._nature("model", {}, f"keeps {key!r}, {why}")
        return self._nature("parameters", schemas)

    def _nature(
        self,
        works_on: Literal["elements", "parameters", "model"],
        schemas: Mapping[int, Schema],
        reason: str = "",
    ) -> GroupNature:
        return GroupNature(
            works_on=works_on,
            schemas=schemas,
            makes_state_at_once=bool(self._state),
            reason=reason,
            packs=self._packs,
            attributes=tuple(sorted(self._attributes)),
            entries=tuple(sorted(self._entries)),
        )

    def _treats_elements_alone(self) -> bool:
        """Returns whether two cut pieces, each stepped alone, come out as the whole does (X1)."""
        gradients = self._gradients(CUT_SHAPE, 0)
        [whole], [state], options = self._step([self._values(CUT_SHAPE)], [gradients])
        pieces: list[Tensor] = []
        for part in (slice(CUT_AT), slice(CUT_AT, None)):
            values = self._values(CUT_SHAPE).flatten()[part]
            of_part = [g.flatten()[part] for g in gradients]
            piece, [state_of_piece], options_of_piece = self._step([values], [of_part])
            pieces += piece
            same_numbers = _have_same_numbers(state, state_of_piece)
            if not same_numbers or not is_same(options, options_of_piece, set()):
                return False
        return _close(whole.flatten(), torch.cat(pieces))

    def _treats_parameters_alone(self, shape: tuple[int, ...]) -> bool:
        """Returns whether two parameters, stepped together, come out as each does alone (X2)."""
        both = [self._values(shape), self._values(shape) * 0.5]
        gradients = [self._gradients(shape, 0), [3 * g for g in self._gradients(shape, 7)]]
        together, states, options = self._step(both, gradients)
        for value, gradient, result, state in zip(both, gradients, together, states, strict=True):
            [alone], [state_of_one], options_of_one = self._step([value], [gradient])
            same_numbers = _have_same_numbers(state, state_of_one)
            if not _close(result, alone) or not same_numbers:
                return False
            if not is_same(options, options_of_one, set()):
                return False
        return True

    def _schema(self, shape: tuple[int, ...]) -> Schema:
        [dummy], [state], _ = self._step([self._values(shape)], [self._gradients(shape, 0)])
        self._packs = self._packs or any(map(is_packed, state.values()))
        return self._entries_of(state, dummy)

    def _entries_of(self, state: Mapping[Any, Any], dummy: Tensor) -> Schema:
        entry_of = {}
        for key, value in state.items():
            if (name := stored_key(key)) is None:
                entry_of[repr(key)] = StateKey("tree", dummy.dtype, dummy.device)
                continue
            for full, inner in inner_entries(name, value):
                entry = _entry(inner, dummy) if inner is value else _inner_entry(inner)
                on_meta = entry.device.type == "meta"
                entry_of[full] = replace(
                    entry,
                    device=self._device if on_meta else entry.device,
                    packed=None if inner is value else PackedEntry(name, value),
                    late=key in self._late,
                )
        return entry_of

    def _dtype_of(self, parameter: nn.Parameter) -> torch.dtype:
        """Returns the dtype of what the optimizer gets of a parameter."""
        return parameter.dtype if self._whole_model else working_dtype(parameter.dtype)

    def _values(self, shape: tuple[int, ...]) -> Tensor:
        count = torch.Size(shape).numel()
        values = torch.linspace(-1.0, 1.0, count, dtype=torch.float64)
        return values.to(self._device, self._dtype).view(shape)

    def _gradients(self, shape: tuple[int, ...], seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn((STEPS, *shape), generator=generator, dtype=torch.float64)
        return list(drawn.to(self._device, self._dtype).unbind())

    def _step(
        self, values: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]
    ) -> tuple[list[Tensor], list[dict[Any, Any]], dict[str, Any]]:
        """Steps dummies of these values by these gradients of each step, all together.

        Returns the new values, what is kept for each, and the options of the group.
        """
        dummies = [nn.Parameter(value.clone()) for value in values]
        before, clone = self._copy(dummies), self._copy(dummies)
        for dummy in dummies:
            if self._state:
                clone.state[dummy] = {k: self._first(v, dummy) for k, v in self._state.items()}
        first: set[Any] = set()
        begin_training(clone)
        with torch.compiler.set_stance("force_eager"):
            for step in range(STEPS):
                for dummy, gradients_of_one in zip(dummies, gradients, strict=True):
                    dummy.grad = gradients_of_one[step].clone()
                clone.step()
                if step == 0:
                    first = {key for dummy in dummies for key in clone.state.get(dummy, ())}
        states = [dict(clone.state.get(dummy, {})) for dummy in dummies]
        self._late = {key for state in states for key in state} - first
        self._attributes |= set(changed_attributes(before, clone))
        dummy_ids = {id(dummy) for dummy in dummies}
        self._entries |= {
            "a tensor" if isinstance(key, Tensor) else str(key)
            for key in clone.state
            if id(key) not in dummy_ids
        }
        options = {k: v for k, v in clone.param_groups[0].items() if k != "params"}
        return [dummy.detach() for dummy in dummies], states, options

    def _copy(self, dummies: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """Returns a copy that has these dummies in the place of the group's parameters."""
        group = {"params": list(dummies), **copy.deepcopy(self._options)}
        state = self._optimizer.state
        entries = {key: copy.deepcopy(v) for key, v in state.items() if not isinstance(key, Tensor)}
        copies = {
            **self._stand_ins,
            id(self._group): group,
            id(self._optimizer.param_groups): [group],
            id(state): defaultdict(dict, entries),
        }
        return copy_for_trial(self._optimizer, copies)

    def _first(self, value: Any, dummy: Tensor) -> Any:
        """Returns an entry of the state made at once, as it is for a dummy."""
        if is_packed(value):
            raise TypeError("it packs state when it is built")
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        if value.dim() == 0:
            follows = value.device == self._like.device
            return value.to(dummy.device if follows else value.device, copy=True)
        if value.shape != self._like.shape:
            raise TypeError("it makes state of another shape than the parameter's when it is built")
        return torch.full_like(dummy.detach(), float(value.flatten()[0]) if value.numel() else 0.0)


def _stand_ins(optimizer: torch.optim.Optimizer) -> dict[int, Any]:
    """Returns what takes the place of an optimizer's parameters, of its groups and of large tensors
    in its attributes, by their `id`, where none of these is to be stepped."""
    stand_ins: dict[int, Any] = {}
    nothing = nn.Parameter(torch.empty(0, device="meta"))
    for group in optimizer.param_groups:
        stand_ins[id(group)] = {**group, "params": []}
        stand_ins |= {id(parameter): nothing for parameter in group["params"]}
    for tensor in tensors_in(own_attributes(optimizer), {id(optimizer), *stand_ins}):
        if tensor.numel() > SMALL_ELEMENTS:
            stand_ins[id(tensor)] = torch.empty_like(tensor, device="meta")
    return stand_ins


def changed_attributes(before: torch.optim.Optimizer, after: torch.optim.Optimizer) -> list[str]:
    """Returns the names of attributes that differ between two copies of an optimizer.

    The groups and the state by parameter are compared elsewhere, even where an optimizer inside of
    the copy shares them.
    """
    compared = {(id(before), id(after)), (id(before.state), id(after.state))}
    compared.add((id(before.param_groups), id(after.param_groups)))
    pairs = zip(before.param_groups, after.param_groups, strict=True)
    compared |= {(id(a), id(b)) for a, b in pairs}
    return changed_names(own_attributes(before), own_attributes(after), compared)


def begin_training(optimizer: torch.optim.Optimizer) -> None:
    """Calls the optimizer's `train`, where it has modes, as a schedule-free one has."""
    if has_modes(optimizer):
        optimizer.train()  # type: ignore[attr-defined]


def has_modes(optimizer: torch.optim.Optimizer) -> bool:
    """Tells whether the optimizer changes parameters in `train()` and in `eval()`."""
    return callable(getattr(optimizer, "train", None)) and callable(
        getattr(optimizer, "eval", None)
    )


def packages_of(optimizer: torch.optim.Optimizer) -> set[str]:
    """Returns the packages of the optimizer's class and of those that it is derived from."""
    return {base.__module__.partition(".")[0] for base in type(optimizer).__mro__}


def copy_without_state(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns an optimizer of the same kind, without state, hooks and groups.

    A scheduler that was built on the optimizer has wrapped its `step`, which stays behind: it would
    step the optimizer itself.
    """
    clone = object.__new__(type(optimizer))
    clone.__dict__ = {key: value for key, value in optimizer.__dict__.items() if key != "step"}
    clone.state = defaultdict(dict)
    clone.param_groups = []
    drop_step_hooks(clone)
    return clone


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-5, atol=1e-7)


def _have_same_numbers(state: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
    """Tells whether two dummies have the same numbers in what is kept for them."""
    for key, value in state.items():
        if is_number(value):
            counterpart: Any = other.get(key)
            if not is_number(counterpart) or not _close_numbers(value, counterpart):
                return False
    return True


def _close_numbers(a: Any, b: Any) -> bool:
    return math.isclose(float(a), float(b), rel_tol=1e-5)


def is_number(value: Any) -> bool:
    """Tells whether an entry is a number of Python's own, or a tensor of one."""
    if isinstance(value, Tensor):
        return value.dim() == 0 and value.device.type != "meta" and not value.is_complex()
    return number_dtype(value) is not None


def _entry(value: Any, dummy: Tensor) -> StateKey:
    if isinstance(value, Tensor):
        follows = value.dtype == dummy.dtype
        if value.shape == dummy.shape:
            return StateKey("elementwise", value.dtype, value.device, follows=follows)
        if value.dim() == 0:
            return StateKey("scalar", value.dtype, value.device)
        sizes = [*dummy.shape]
        if all(size == 1 or size in sizes for size in value.shape):
            dimensions = tuple(sizes.index(s) if s in sizes else None for s in value.shape)
            return StateKey(
                "shaped", value.dtype, value.device, dimensions=dimensions, follows=follows
            )
        return StateKey("other", value.dtype, value.device, follows=follows)
    cpu = torch.device("cpu")
    if (dtype := number_dtype(value)) is not None:
        return StateKey("number", dtype, cpu, type(value))
    if value is None or type(value) is str:
        return StateKey("constant", dummy.dtype, cpu, constant=value)
    return StateKey("tree", dummy.dtype, cpu)


def _why_not_dealt(entry: StateKey) -> str | None:
    """Returns why an entry cannot be kept where whole parameters are dealt; None: it can be."""
    if entry.kind == "other":
        return "whose size does not follow from the parameter's"
    if entry.kind == "tree":
        return "which is neither a tensor nor a number"
    if entry.late:
        return "which it makes later than in its first step"
    return None


def _inner_entry(inner: Tensor) -> StateKey:
    return StateKey("inner", inner.dtype, inner.device, size=tuple(inner.shape))
