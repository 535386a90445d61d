"""Stores everything that optimizers keep where they have whole parameters, and puts it back.

Rules:
 OS1  Tensors and numbers that `prepare` has found on dummies are stored by parameter and key, as
      strategies that deal parts store them too. All else that is kept for a parameter is stored as
      a tree beside them: JSON, with its tensors by name.
 OS2  Entries of `state` whose key is no parameter are stored as such trees.
 OS3  Where a class or a hook changes what `state_dict` returns, that is stored whole, and given to
      `load_state_dict` before OS1 and OS2. Of a tensor that is stored already it has the name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elasticzero.errors import CheckpointMismatch
from elasticzero.nested import encoded_items, flatten, tensor_names, unflatten
from elasticzero.parallel.optimizers.groups import Optimizers
from elasticzero.parallel.optimizers.packed import is_packed
from elasticzero.parallel.optimizers.state import (
    MASTER,
    Schema,
    as_kept,
    by_parameter,
    check_keys,
    name_is_stepped,
    number_dtype,
    original_key,
    stored_key,
    stored_state,
)
from elasticzero.parallel.optimizers.state_dicts import changes_state_dict, load_state_dict
from elasticzero.spans import Span
from elasticzero.state.model import OPTIMIZER, OPTIMIZER_TREE, LoadTarget, Spec


def divided_entries(
    state: Mapping[Any, Any], schema: Schema
) -> tuple[dict[str, Any], dict[Any, Any]]:
    """Returns what is kept for a parameter: what is stored by key, and the rest (OS1).

    Args:
        state: What the optimizer keeps.
        schema: What it has kept for a dummy.
    """
    by_key: dict[str, Any] = {}
    rest: dict[Any, Any] = {}
    for key, value in state.items():
        (by_key if _fits(key, value, schema) else rest)[key] = value
    return by_key, rest


def _fits(key: Any, value: Any, schema: Schema) -> bool:
    """Tells whether a schema has an entry like this one."""
    if (entry := schema.get(stored_key(key) or "")) is None:
        return False
    if entry.kind == "number":
        return type(value) is entry.python and number_dtype(value) is not None
    plain = isinstance(value, Tensor) and value.layout is torch.strided
    return plain and entry.kind not in ("constant", "tree")


@dataclass(frozen=True, slots=True)
class WholeState:
    """Holds everything that the optimizers keep."""

    tensors: dict[str, Tensor]
    """The tensors by full name: those by parameter and key, and those of trees."""
    small: dict[str, Any]
    """The trees, and what a restore needs to know, as JSON."""

    @classmethod
    def of(cls, optimizers: Optimizers) -> WholeState:
        """Returns what the optimizers keep now, not copied.

        Raises:
            UserError: Something cannot be stored.
        """
        tensors: dict[str, Tensor] = {}
        names: dict[int, str] = {}
        trees: dict[str, Any] = {}
        values: dict[str, Any] = {}
        unstepped = []
        by_key: dict[str, Any]
        rest: dict[Any, Any]
        for name, parameter in optimizers.parameters().items():
            group = optimizers.group_of[name]
            if (state := group.optimizer.state.get(parameter)) is None:
                unstepped.append(name)
                continue
            if not isinstance(state, dict):
                values[name] = _tree(state, f"values/{name}", tensors, names)
                continue
            if group.nature.packs or any(map(is_packed, state.values())):
                by_key, rest = state, {}
                stored = optimizers.stored_state(name, parameter)
            else:
                by_key, rest = divided_entries(state, group.schema(name))
                stored = stored_state(by_key)
            tensors |= {f"{OPTIMIZER}{name}/{key}": tensor for key, tensor in stored.items()}
            for key, value in by_key.items():
                names[id(value)] = f"{OPTIMIZER}{name}/{stored_key(key)}"
            if rest or not by_key:
                trees[name] = _tree(rest, f"state/{name}", tensors, names)
        small: dict[str, Any] = {
            "whole": True,
            "kept": _kept(optimizers),
            "unstepped": unstepped,
            "state": trees,
            "values": values,
            "entries": {},
            "state_dicts": {},
        }
        for name, optimizer in optimizers.by_name.items():
            entries = {k: v for k, v in optimizer.state.items() if not isinstance(k, Tensor)}
            if entries:
                small["entries"][name] = _tree(entries, f"entries/{name}", tensors, names)
            if changes_state_dict(optimizer) and not optimizers.packs(name):
                value = optimizer.state_dict()
                tree = _tree(value, f"state_dicts/{name}", tensors, names)
                small["state_dicts"][name] = tree
        small["on_cpu"] = _on_cpu(tensors, optimizers)
        needed = {"whole", "kept", "unstepped"}
        return cls(tensors, {k: v for k, v in small.items() if v or k in needed})


def _tree(value: Any, path: str, tensors: dict[str, Tensor], names: dict[int, str]) -> Any:
    """Returns a value as JSON, and adds those of its tensors that are not stored yet.

    Args:
        value: The value.
        path: Where it is kept, for the tensors' names.
        tensors: Takes the tensors by full name.
        names: The names of tensors that are stored, by their `id`; those added here are added.
    """
    of_tree: dict[str, Tensor] = {}
    json = flatten(value, OPTIMIZER_TREE + path, of_tree)
    stored = {name: names[id(t)] for name, t in of_tree.items() if id(t) in names}
    for name, tensor in of_tree.items():
        if name not in stored:
            tensors[name] = tensor.detach()
            names[id(tensor)] = name
    return _renamed(json, stored) if stored else json


def _renamed(json: Any, names: Mapping[str, str]) -> Any:
    if isinstance(json, list):
        return [_renamed(item, names) for item in json]
    if not isinstance(json, dict):
        return json
    if len(json) == 1 and isinstance(name := json.get("$tensor"), str):
        return {"$tensor": names.get(name, name)}
    return {key: _renamed(item, names) for key, item in json.items()}


def _kept(optimizers: Optimizers) -> list[list[str]]:
    """Returns what `prepare` has found that is kept, by group: it is equal for an equal optimizer.

    Other checkpoints hold only what it has found.
    """
    return [
        sorted({key for schema in group.nature.schemas.values() for key in schema})
        for group in optimizers.groups
    ]


def _device(optimizers: Optimizers) -> torch.device:
    parameters = optimizers.parameters().values()
    return next((p.device for p in parameters), torch.device("cpu"))


def _on_cpu(tensors: Mapping[str, Tensor], optimizers: Optimizers) -> list[str]:
    """Returns the tensors of trees that lie on the CPU while the parameters do not."""
    if _device(optimizers).type == "cpu":
        return []
    trees = (name for name in tensors if name.startswith(OPTIMIZER_TREE))
    return [name for name in trees if tensors[name].device.type == "cpu"]


TREES = ("state", "values", "entries", "state_dicts")
"""Keys of what is stored as trees: by parameter, where it is a dict or not, and by optimizer."""


class WholeRestore:
    """Takes a stored state, and gives it to the optimizers."""

    def __init__(
        self, optimizers: Optimizers, stored: Mapping[str, Spec], small: Mapping[str, Any]
    ) -> None:
        """Checks that the state fits, and makes room for it.

        Args:
            optimizers: The optimizers.
            stored: Shape and dtype of each stored tensor.
            small: What `RankState.optimizers` was; empty in checkpoints of an older release.

        Raises:
            CheckpointMismatch: It is the state of another optimizer.
        """
        self._optimizers = optimizers
        self._small = small
        self._tensors: dict[str, Tensor] = {}
        self._keys: dict[str, list[str]] = {}
        index = by_parameter(stored)
        same = small.get("kept") == _kept(optimizers)
        for name in optimizers.parameters():
            keys = index.get(name, {})
            if not same:
                self._check(name, keys)
            self._keys[name] = [key for key in keys if key != MASTER]
            for key in self._keys[name]:
                self._make_room(f"{OPTIMIZER}{name}/{key}", stored)
        for kind in TREES:
            for name in tensor_names(small.get(kind)):
                if name.startswith(OPTIMIZER_TREE):
                    self._make_room(name, stored)

    def _check(self, name: str, keys: Mapping[str, Spec]) -> None:
        """Checks what an optimizer has stored that is not known to be equal to this one."""
        schema = self._optimizers.schema(name)
        check_keys(name, keys, schema)
        tree = encoded_items(self._small.get("state", {}).get(name, {}))
        unknown = [key for key in tree if (stored_key(key) or repr(key)) not in schema]
        if unknown:
            raise CheckpointMismatch(
                f"the checkpoint was written with another optimizer: it holds {unknown[0]!r} for "
                f"parameter {name!r}, which this optimizer does not keep: use the optimizer that "
                "wrote it, or start in another checkpoint directory"
            )

    def _make_room(self, name: str, stored: Mapping[str, Spec]) -> None:
        self._tensors[name] = torch.empty(stored[name].shape, dtype=stored[name].dtype)

    def targets(self) -> Iterator[LoadTarget]:
        """Yields where the stored tensors go."""
        for name, tensor in self._tensors.items():
            yield LoadTarget(name, Span(0, tensor.numel()), tensor)

    def put(self) -> None:
        """Gives the optimizers the state, once its tensors are loaded.

        Raises:
            CheckpointMismatch: An optimizer's `load_state_dict` has failed.
        """
        device = _device(self._optimizers)
        on_cpu = {n for n in self._small.get("on_cpu", ()) if device.type != "cpu"}
        for name, tensor in self._tensors.items():
            if name.startswith(OPTIMIZER_TREE) and name not in on_cpu:
                self._tensors[name] = tensor.to(device)
        if not self._small.get("whole"):
            for name, parameter in self._optimizers.parameters().items():
                stepped = name_is_stepped(name, self._small)
                tensors = self._by_key(name)
                self._optimizers.put_state(name, parameter, tensors, stepped=stepped)
            return
        states = self._states()
        for name, tree in self._small.get("state_dicts", {}).items():
            if (optimizer := self._optimizers.by_name.get(name)) is not None:
                load_state_dict(optimizer, self._decoded(tree))
        for name, parameter in self._optimizers.parameters().items():
            group = self._optimizers.group_of[name]
            if name in states:
                group.optimizer.state[parameter] = states[name]
            elif not group.nature.makes_state_at_once:
                group.optimizer.state.pop(parameter, None)
        for name, optimizer in self._optimizers.by_name.items():
            self._put_entries(optimizer, self._small.get("entries", {}).get(name, {}))

    def _by_key(self, name: str) -> dict[str, Tensor]:
        return {key: self._tensors[f"{OPTIMIZER}{name}/{key}"] for key in self._keys[name]}

    def _states(self) -> dict[str, Any]:
        """Returns what is kept for each parameter, by its name."""
        values = self._small.get("values", {}).items()
        states: dict[str, Any] = {name: self._decoded(tree) for name, tree in values}
        for name, parameter in self._optimizers.parameters().items():
            schema = self._optimizers.schema(name)
            tree = self._small.get("state", {}).get(name)
            if not self._keys[name] and tree is None:
                continue
            kept: dict[Any, Any] = as_kept(self._by_key(name), schema, parameter, own_dtype=True)
            for key in self._keys[name]:
                if isinstance(value := kept.get(original_key(key)), Tensor):
                    self._tensors[f"{OPTIMIZER}{name}/{key}"] = value
            states[name] = kept | self._decoded(tree or {})
        return states

    def _decoded(self, tree: Any) -> Any:
        return unflatten(tree, lambda name: self._tensors[name])

    def _put_entries(self, optimizer: torch.optim.Optimizer, tree: Any) -> None:
        """Replaces the entries whose key is no parameter, in place where they are dicts."""
        entries: dict[Any, Any] = self._decoded(tree)
        for key in [key for key in optimizer.state if not isinstance(key, Tensor)]:
            if key not in entries:
                del optimizer.state[key]
        for key, value in entries.items():
            present = optimizer.state.get(key)
            if isinstance(present, dict) and isinstance(value, dict):
                present.clear()
                present.update(value)
            else:
                optimizer.state[key] = value
