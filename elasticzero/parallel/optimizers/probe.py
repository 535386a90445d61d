"""Finds out, on dummies, whether an optimizer can work on parts of parameters, and what it keeps.

Rules:
 X1  A group works on elements if two cut pieces of a parameter, each stepped alone, come out as the
     whole parameter does, and if all that is kept has the parameter's shape or one number. It does
     not if its optimizer packs what it keeps.
 X2  Else it works on parameters if two of them, stepped together, come out as each does alone, and
     if the shapes of all that is kept follow from the parameter's.
 X3  Else it works on the whole model only.
 X4  What a packing optimizer keeps may depend on the very shape of a parameter. So it is found for
     each shape, by steps on the meta device, where a dummy has no memory.
Dummies are stepped without `torch.compile`, which would compile for each of their shapes.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from elasticzero.errors import UserError
from elasticzero.parallel.optimizers.packed import PackedEntry, inner_entries, is_packed
from elasticzero.parallel.optimizers.state import NUMBERS, Schema, StateKey, working_dtype
from elasticzero.state.model import Spec, spec_of
from elasticzero.torch_internals import drop_step_hooks

CUT_SHAPE = (2, 3)
CUT_AT = 4
SHAPES = (2, 3, 5, 7, 11, 13)
"""Sizes of the dimensions of a dummy: from such a size in its state follows the dimension."""
STEPS = 2
FAILURES = (RuntimeError, ValueError, TypeError, AssertionError, AttributeError, LookupError)
"""An optimizer raises one of these in a step that it cannot take."""
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
    like = next((p for p in group["params"] if p.requires_grad), None)
    if like is None:
        return GroupNature(works_on="elements", schemas={}, makes_state_at_once=False)
    dimensions = sorted({max(1, p.dim()) for p in group["params"] if p.requires_grad})
    options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
    settings = repr(sorted((k, v) for k, v in options.items() if "lr" not in k))
    key = (id(optimizer), like.dtype, like.device, settings, tuple(dimensions))
    trial = _Trial(optimizer, options, like, whole_model=whole_model, device=device or like.device)
    if key not in natures:
        natures[key] = trial.schemas_only(dimensions) if whole_model else trial.nature(dimensions)
    nature = natures[key]
    return replace(nature, packed=trial.packed(group["params"])) if nature.packs else nature


class _Trial:
    """Steps copies of one optimizer on dummies of one group."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        options: Mapping[str, Any],
        like: nn.Parameter,
        *,
        whole_model: bool,
        device: torch.device,
    ) -> None:
        self._optimizer = optimizer
        self._options = dict(options)
        lr = options.get("lr")
        if isinstance(lr, (float, Tensor)) and lr == 0:  # a warm-up begins there
            self._options["lr"] = torch.full_like(lr, 1e-2) if isinstance(lr, Tensor) else 1e-2
        self._like = like
        self._whole_model, self._device = whole_model, device
        self._dtype = self._dtype_of(like)
        self._state: Mapping[str, Any] = optimizer.state.get(like, {})
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
                [dummy], [state] = self._step([values], [[values] * STEPS])
            except FAILURES as error:
                kind = type(self._optimizer).__name__
                raise UserError(
                    f"{kind} packs what it keeps, and cannot step a parameter of shape "
                    f"{list(of.shape)} on the meta device, by which its state is found out "
                    f"({error}): use torch.optim.AdamW, or an optimizer of torchao"
                ) from error
            schema_of[of] = self._entries(state, dummy)
        return schema_of

    def nature(self, dimensions: Sequence[int]) -> GroupNature:
        why_not_cut = ""
        try:
            if not self._packs and self._treats_elements_alone():
                schema = self._schema(CUT_SHAPE)
                if all(
                    entry.kind in ("elementwise", "scalar", "number") for entry in schema.values()
                ):
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
                if entry.kind == "other":
                    reason = f"keeps {key!r}, whose size does not follow from the parameter's"
                    return self._nature("model", {}, reason)
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
        )

    def _treats_elements_alone(self) -> bool:
        """Returns whether two cut pieces, each stepped alone, come out as the whole does (X1)."""
        [whole], _ = self._step([self._values(CUT_SHAPE)], [self._gradients(CUT_SHAPE, 0)])
        pieces = []
        for part in (slice(CUT_AT), slice(CUT_AT, None)):
            values = self._values(CUT_SHAPE).flatten()[part]
            gradients = [g.flatten()[part] for g in self._gradients(CUT_SHAPE, 0)]
            pieces += self._step([values], [gradients])[0]
        return _close(whole.flatten(), torch.cat(pieces))

    def _treats_parameters_alone(self, shape: tuple[int, ...]) -> bool:
        """Returns whether two parameters, stepped together, come out as each does alone (X2)."""
        both = [self._values(shape), self._values(shape) * 0.5]
        gradients = [self._gradients(shape, 0), [3 * g for g in self._gradients(shape, 7)]]
        together, _ = self._step(both, gradients)
        alone = [
            self._step([value], [gradient])[0][0]
            for value, gradient in zip(both, gradients, strict=True)
        ]
        return all(_close(a, b) for a, b in zip(together, alone, strict=True))

    def _schema(self, shape: tuple[int, ...]) -> Schema:
        [dummy], [state] = self._step([self._values(shape)], [self._gradients(shape, 0)])
        self._packs = self._packs or any(map(is_packed, state.values()))
        return self._entries(state, dummy)

    def _entries(self, state: Mapping[str, Any], dummy: Tensor) -> Schema:
        entry_of = {}
        for key, value in state.items():
            for full, inner in inner_entries(key, value):
                if inner is not None:
                    entry = _entry(inner, dummy) if inner is value else _inner_entry(inner)
                    on_meta = entry.device.type == "meta"
                    entry_of[full] = replace(
                        entry,
                        device=self._device if on_meta else entry.device,
                        packed=None if inner is value else PackedEntry(key, value),
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
    ) -> tuple[list[Tensor], list[dict[str, Any]]]:
        """Steps dummies of these values by these gradients of each step, all together.

        Returns the new values, and what is kept for each.
        """
        clone = copy_without_state(self._optimizer)
        dummies = [nn.Parameter(value.clone()) for value in values]
        clone.param_groups = [{"params": dummies, **copy.deepcopy(self._options)}]
        for dummy in dummies:
            if self._state:
                clone.state[dummy] = {k: self._first(v, dummy) for k, v in self._state.items()}
        with torch.compiler.set_stance("force_eager"):
            for step in range(STEPS):
                for dummy, gradients_of_one in zip(dummies, gradients, strict=True):
                    dummy.grad = gradients_of_one[step].clone()
                clone.step()
        return [dummy.detach() for dummy in dummies], [dict(clone.state[d]) for d in dummies]

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
        return torch.full_like(dummy.detach(), float(value.flatten()[0]))


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


def _entry(value: Any, dummy: Tensor) -> StateKey:
    if isinstance(value, Tensor):
        if value.shape == dummy.shape:
            return StateKey("elementwise", value.dtype, value.device)
        if value.dim() == 0:
            return StateKey("scalar", value.dtype, value.device)
        sizes = [*dummy.shape]
        if all(size == 1 or size in sizes for size in value.shape):
            dimensions = tuple(sizes.index(s) if s in sizes else None for s in value.shape)
            return StateKey("shaped", value.dtype, value.device, dimensions=dimensions)
    elif type(value) in NUMBERS:
        return StateKey("number", NUMBERS[type(value)], torch.device("cpu"), type(value))
    return StateKey("other", dummy.dtype, dummy.device)


def _inner_entry(inner: Tensor) -> StateKey:
    return StateKey("inner", inner.dtype, inner.device, size=tuple(inner.shape))
