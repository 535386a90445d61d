"""Opens the optimizers that a script's factory makes, and names the parameters of their groups."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from elasticzero.errors import UserError
from elasticzero.parallel.optimizers.packed import is_packed
from elasticzero.parallel.optimizers.probe import (
    GroupNature,
    copy_without_state,
    packages_of,
    probe,
)
from elasticzero.parallel.optimizers.state import (
    Schema,
    dealt_keys,
    inner_keys,
    put_state,
    stored_state,
)
from elasticzero.parallel.optimizers.whole_trial import (
    ELEMENTWISE,
    PartsRefused,
    check_before_parts,
    check_parts,
    check_whole,
    checked_step,
    has_unstored_attributes,
    watched_step,
    with_advice,
)
from elasticzero.state.digests import of_value
from elasticzero.state.model import NamedModel, Spec, spec_of
from elasticzero.torch_internals.hooks import step_hooks

MadeOptimizers = torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]
"""A script's factory returns this: an optimizer, or several of them by name."""

Dealt = Literal["nothing", "elements", "rows"]
"""Says what a strategy deals to the ranks: nothing; any elements, or whole parameters where an
optimizer needs these; rows of each parameter."""

UNDEALT = "bitsandbytes"
"""Package whose optimizers keep codes of 8 bits in plain tensors, whose sizes depend on that of the
parameter: they are stored where nothing is dealt."""


OF_GROUP = ("params", "param_names")
"""Entries of a group that are no options."""


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerGroup:
    """Describes a group of parameters of one of the script's optimizers."""

    optimizer_name: str
    """Empty: the script has one optimizer, without a name."""
    optimizer: torch.optim.Optimizer
    options: dict[str, Any]
    """The group as the optimizer has it, its parameters among the options."""
    names: list[str]
    nature: GroupNature
    specs: Mapping[str, Spec]
    """Holds the shape and dtype of each parameter, by its name."""

    def schema(self, name: str) -> Schema:
        """Returns what the optimizer keeps for a parameter."""
        return self.nature.schema(self.specs[name])


class Optimizers:
    """Holds the script's optimizers, just built, and the groups of all of them."""

    def __init__(
        self,
        by_name: Mapping[str, torch.optim.Optimizer],
        groups: list[OptimizerGroup],
        untried: Collection[str] = (),
        watched: Mapping[str, bool] | None = None,
    ) -> None:
        """Takes the optimizers.

        Args:
            by_name: The optimizers.
            groups: The groups of all of them.
            untried: Names of those that could not step dummies; `step` looks at them.
            watched: Names of those whose attributes must stay as they are, and whether each rank
                has parts of their parameters.
        """
        self._untried = set(untried)
        self._watched = dict(watched or {})
        self.by_name = by_name
        """One without a name has the empty one."""
        self.groups = groups
        self.only: tuple[str, ...] | None = None
        """The optimizers that the present global batch has gradients for; None: all."""

    def options_number(self) -> int:
        """Returns a number for the options of all groups, the same where these are."""
        return of_value(
            [
                {key: _plain(value) for key, value in group.options.items() if key not in OF_GROUP}
                for group in self.groups
            ]
        )

    def named(self, only: str | Collection[str] | None) -> tuple[str, ...] | None:
        """Returns the names that a script gives as `only=`, in one order; None: it gives none.

        Raises `UserError` for a name that no optimizer has.
        """
        if only is None:
            return None
        names = tuple(sorted({only} if isinstance(only, str) else set(only)))
        if "" in self.by_name:
            raise UserError(
                f"only={only!r} names optimizers of a dict, and the function that session.prepare "
                "was given made one optimizer, without a name: let it return a dict of them"
            )
        defined = ", ".join(map(repr, self.by_name))
        if not names or (unknown := [name for name in names if name not in self.by_name]):
            which = repr(unknown[0]) if names else "no optimizer"
            raise UserError(f"only= names {which}; the script's optimizers are {defined}")
        return names

    @property
    def stepped(self) -> Mapping[str, torch.optim.Optimizer]:
        """Returns those that the present global batch has gradients for, by name."""
        only = self.only
        return {n: optimizer for n, optimizer in self.by_name.items() if only is None or n in only}

    def step(self) -> None:
        """Steps the optimizers that the present global batch has gradients for.

        Raises:
            UserError: One keeps what is not stored, which this step has shown.
        """
        for name in self.stepped:
            self.step_one(name)

    def step_one(self, name: str) -> None:
        """Steps one optimizer.

        Raises:
            UserError: It keeps what is not stored, which this step has shown.
        """
        optimizer = self.by_name[name]
        if name in self._untried:
            self._untried.discard(name)
            checked_step(optimizer)
        elif name in self._watched:
            watched_step(optimizer, in_parts=self._watched[name])
        else:
            optimizer.step()

    def has_gradients(self, name: str) -> bool:
        """Tells whether the present global batch is for the optimizer of this parameter."""
        return self.only is None or self.group_of[name].optimizer_name in self.only

    def begin_turn(
        self, only: tuple[str, ...] | None, parameters: Mapping[str, nn.Parameter]
    ) -> list[nn.Parameter] | None:
        """Gives the present global batch to some of the optimizers, until the next turn begins.

        Args:
            only: Their names, as `named` returns them; None: all.
            parameters: The model's parameters, by name.

        Returns:
            The parameters whose gradients a backward computes; None: all of them.

        Raises:
            UserError: None of their parameters is trained.
        """
        self.only = only
        if only is None:
            return None
        optimized = [parameters[name] for name in self.group_of if self.has_gradients(name)]
        if not (trained := [parameter for parameter in optimized if parameter.requires_grad]):
            raise UserError(
                f"no parameter of the optimizer {' or '.join(map(repr, only))} needs a "
                "gradient, so session.backward(…, only=…) computes nothing: leave out the call"
            )
        return trained

    def check_used(self, used: Collection[str]) -> None:
        """Raises `UserError` where a rank has gradients that this rank's `only` does not name."""
        if self.only is None:
            return
        for name in used:
            if name in self.group_of and not self.has_gradients(name):
                raise UserError(
                    f"a rank has a gradient of {name!r}, of which no optimizer is named by "
                    f"only={list(self.only)}: compute gradients of parameters by session.backward "
                    "alone"
                )

    @property
    def as_made(self) -> Any:
        """Returns what the factory has made: an optimizer, or a dict of them."""
        return self.by_name[""] if "" in self.by_name else dict(self.by_name)

    @cached_property
    def group_of(self) -> dict[str, OptimizerGroup]:
        """Returns the group of each parameter, by its name."""
        return {name: group for group in self.groups for name in group.names}

    @property
    def name_of(self) -> dict[str, str]:
        """Returns the name of each parameter's optimizer; none where there is one optimizer."""
        groups = self.groups if len(self.by_name) > 1 else ()
        return {name: group.optimizer_name for group in groups for name in group.names}

    def schema(self, name: str) -> Schema:
        """Returns what is kept for a parameter."""
        return self.group_of[name].schema(name)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Returns the parameters that the optimizers have, by name.

        Raises:
            UserError: The script has changed their number.
        """
        self.require_members()
        return {
            name: parameter
            for group in self.groups
            for name, parameter in zip(group.names, group.options["params"], strict=True)
        }

    def require_members(self, names: Collection[str] | None = None) -> None:
        """Checks that the script has left the groups the parameters that they had.

        Args:
            names: The parameters that have a tensor in their group here; None: all.

        Raises:
            UserError: It has taken one out, or has added one.
        """
        for group in self.groups:
            before = len(group.names)
            if names is not None:
                before = sum(name in names for name in group.names)
            if (present := len(group.options["params"])) != before:
                raise UserError(
                    f"a group of {type(group.optimizer).__name__} has {present} parameters, and "
                    f"had {before} at session.prepare: leave its list as it is, and freeze "
                    "parameters by requires_grad_(False)"
                )

    def follow(self, originals: Optimizers) -> None:
        """Takes over what may have changed since the last step in the optimizers that these are
        copies of: their options, and whose turn it is."""
        for group, original in zip(self.groups, originals.groups, strict=True):
            changed = {key: value for key, value in original.options.items() if key != "params"}
            group.options.update(changed)
        self.only = originals.only

    def copies(self) -> Optimizers:
        """Returns optimizers of the same kinds, options and groups, with the state that these have
        made at once and no other; call it before the parameters are dealt."""
        clones = {name: copy_without_state(optimizer) for name, optimizer in self.by_name.items()}
        groups = []
        for group in self.groups:
            clone = clones[group.optimizer_name]
            options = dict(group.options)
            clone.param_groups.append(options)
            for parameter in options["params"]:
                if parameter in group.optimizer.state:
                    clone.state[parameter] = group.optimizer.state[parameter]
            groups.append(replace(group, optimizer=clone, options=options))
        return Optimizers(clones, groups)

    def packs(self, optimizer_name: str) -> bool:
        """Tells whether an optimizer packs what it keeps."""
        return any(g.nature.packs for g in self.groups if g.optimizer_name == optimizer_name)

    def stored_state(self, name: str, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Returns what is kept for a parameter as it is stored, by key.

        Args:
            name: The parameter's name.
            parameter: What the optimizer has of it: the parameter or a piece.

        Raises:
            UserError: The optimizer keeps more than for a dummy, which would not be stored, or
                packs it in another way.
        """
        group = self.group_of[name]
        state = group.optimizer.state.get(parameter, {})
        kept, schema = stored_state(state), group.schema(name)
        packs = group.nature.packs or any(map(is_packed, state.values()))
        rest = {k: v for k, v in state.items() if not inner_keys(k, v) & kept.keys()}
        constants = {k: e.constant for k, e in schema.items() if e.kind == "constant"}
        changed = {str(k): v for k, v in rest.items() if k not in constants or constants[k] != v}
        unknown = kept.keys() - dealt_keys(schema) | changed.keys()
        if unknown or (packs and kept and kept.keys() != dealt_keys(schema)):
            before = ", ".join(sorted(schema)) or "nothing"
            keys = ", ".join(sorted({*kept, *changed}))
            raise UserError(
                f"{type(group.optimizer).__name__} keeps {keys} for parameter "
                f"{name!r}, and kept {before} for the dummy by which "
                "session.prepare found out what it keeps: use strategy ddp, torch.optim.AdamW, or "
                "an optimizer of torchao"
            )
        return kept

    def put_state(
        self,
        name: str,
        parameter: nn.Parameter,
        stored: Mapping[str, Tensor],
        *,
        stepped: bool = False,
    ) -> None:
        """Replaces what is kept for a parameter.

        Args:
            name: The parameter's name.
            parameter: What the optimizer has of it: the parameter or a piece.
            stored: The state as `stored_state` returns it; empty: it was never stepped.
            stepped: True: it is known to be that of a parameter that was stepped, zero or not.
        """
        group = self.group_of[name]
        at_once = group.nature.makes_state_at_once
        schema, optimizer = group.schema(name), group.optimizer
        put_state(optimizer, parameter, stored, schema, made_at_once=at_once, stepped=stepped)


def open_optimizers(
    made: MadeOptimizers, named: NamedModel, divided: Dealt, device: torch.device | None = None
) -> Optimizers:
    """Finds out what the optimizers that were just made work on.

    Args:
        made: One optimizer, or several by their names.
        named: The model's parameters.
        divided: What the strategy deals to the ranks.
        device: The device where they will step; None: where the parameters are.

    Returns:
        The optimizers with their groups.

    Raises:
        UserError: An optimizer cannot work on what the strategy deals to the ranks, a parameter is
            not the model's, or two optimizers have it.
    """
    by_name = {"": made} if isinstance(made, torch.optim.Optimizer) else dict(made)
    name_of, owner_of = named.name_of(), dict[str, str]()
    groups: list[OptimizerGroup] = []
    natures: dict[Any, GroupNature] = {}
    untried: set[str] = set()
    in_parts = divided != "nothing"
    watched = {
        name: in_parts
        for name, optimizer in by_name.items()
        if has_unstored_attributes(optimizer, in_parts=in_parts)
    }
    for optimizer_name, optimizer in by_name.items():
        _check_package(optimizer, divided)
        if in_parts:
            with _advising(optimizer):
                check_before_parts(optimizer)
                _check_step_hooks(optimizer)
        for options in optimizer.param_groups:
            names = [_name(parameter, name_of) for parameter in options["params"]]
            for name in names:
                if (other := owner_of.setdefault(name, optimizer_name)) != optimizer_name:
                    raise UserError(
                        f"parameter {name!r} is in two optimizers, {other!r} and "
                        f"{optimizer_name!r}: give each parameter to one of them"
                    )
            specs = {name: spec_of(named.parameters[name]) for name in names}
            nature = probe(optimizer, options, natures, whole_model=not in_parts, device=device)
            if in_parts:
                with _advising(optimizer):
                    check_parts(optimizer, nature)
                    _check(nature, type(optimizer).__name__, divided)
            groups.append(OptimizerGroup(optimizer_name, optimizer, options, names, nature, specs))
        if not in_parts and not check_whole(optimizer):
            untried.add(optimizer_name)
    return Optimizers(by_name, groups, untried, watched)


@contextmanager
def _advising(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Adds to a refusal of parts what the script can do instead."""
    try:
        yield
    except PartsRefused as refused:
        raise with_advice(refused, optimizer) from None


def _check_step_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Raises `UserError` for a hook on steps that would miss parameters: where parts are dealt, an
    optimizer has none of those that are frozen."""
    frozen = [p for g in optimizer.param_groups for p in g["params"] if not p.requires_grad]
    if frozen and step_hooks(optimizer):
        raise PartsRefused(
            f"{type(optimizer).__name__} has a hook on its step, and frozen parameters, which the "
            "hook would not find where each rank has parts of the others",
            "an optimizer that has only the parameters that it trains",
        )


def _name(parameter: nn.Parameter, name_of: Mapping[int, str]) -> str:
    if id(parameter) not in name_of:
        raise UserError(
            f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the "
            "model's; build it from the parameters that the factory is given"
        )
    return name_of[id(parameter)]


def check_takes_dense(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raises `UserError` for an optimizer that takes sparse gradients only."""
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.SparseAdam):
            raise UserError(
                "SparseAdam takes sparse gradients only, and the sum over the ranks is dense: "
                "build the embedding without sparse=True, and use Adam or AdamW for it"
            )


def _check_package(optimizer: torch.optim.Optimizer, divided: Dealt) -> None:
    if divided != "nothing":
        check_takes_dense([optimizer])
    if divided != "nothing" and UNDEALT in packages_of(optimizer):
        raise UserError(
            f"{type(optimizer).__name__} of {UNDEALT} keeps packed state, with a scale for each "
            "block of it, which cannot be divided or stored by parameter: use torch.optim.AdamW, "
            "whose state zero1, zero2 and zero3 divide among the ranks"
        )


def _check(nature: GroupNature, kind: str, divided: Dealt) -> None:
    """Checks that an optimizer can work on what is dealt.

    Args:
        nature: What the optimizer works on in a group.
        kind: The optimizer's class, for the message.
        divided: What the strategy deals to the ranks: elements or rows.

    Raises:
        UserError: It cannot.
    """
    if nature.works_on == "elements" or (nature.works_on == "parameters" and divided == "elements"):
        return
    if nature.packs and nature.works_on == "parameters":
        raise UserError(
            f"{kind} keeps packed state, with a scale for each block of a parameter's elements, "
            "and zero3 divides each parameter by rows: use zero1 or zero2, which give it whole "
            f"parameters, or {ELEMENTWISE}"
        )
    if nature.works_on == "parameters":
        raise UserError(
            f"{kind} works on whole parameters, and zero3 divides each of them by rows: use zero1 "
            f"or zero2, which give it whole parameters, or {ELEMENTWISE}"
        )
    raise PartsRefused(f"{kind} {nature.reason}", ELEMENTWISE)


def _plain(value: Any) -> Any:
    """Returns an option as JSON can hold it; None for one that may be another on each rank."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str) else None
