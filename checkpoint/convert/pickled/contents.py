"""Names what another program has saved as a job names its state.

A saved value is a tree of dicts and lists. The tensors of its model become `model/<name>`, and
those of a state dict of an optimizer `optimizer/<parameter>/<key>`, if the parameters have names.
All other tensors are named by their paths. `checkpoint.load` returns the tree as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from elasticzero.checkpoint.convert.exported_state import (
    OPTIMIZER_KEY,
    OWN_KEY,
    is_copy,
    parse_exported,
)
from elasticzero.checkpoint.convert.import_plan import Import, ImportOptions
from elasticzero.checkpoint.convert.pickled.leaves import (
    ArchivedTensor,
    Leaf,
    LeafReader,
)
from elasticzero.checkpoint.convert.pickled.values import is_tensor
from elasticzero.checkpoint.convert.pickled.walk import (
    Entry,
    KeyPath,
    Saved,
    Walk,
    is_optimizer,
    joined,
)
from elasticzero.checkpoint.format.layout import check_tensor_names
from elasticzero.checkpoint.format.manifest import TREE
from elasticzero.checkpoint.rewrite.reshard import ForeignCheckpoint
from elasticzero.checkpoint.rewrite.sources import MODEL_PREFIX
from elasticzero.errors import UserError
from elasticzero.nested import flatten, renamed

OPTIMIZER = "optimizer/"
_RESERVED = (
    *(MODEL_PREFIX, OPTIMIZER, "optimizers/", "rng/", "not-saved/", "module/", "tracked/"),
    "residual/",
    "right-factor/",
)
"""Beginnings of names that mean something to a job."""
_OTHER = "other/"
_WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that DistributedDataParallel and torch.compile put before all names of a model."""
_LIKE_PARAMETER = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg")
"""Entries of optimizers of torch that have the shape of their parameter."""


def name_contents(saved: Saved, options: ImportOptions) -> Import:
    """Gives the tensors of what was saved their names.

    Args:
        saved: What was saved.
        options: What is imported, and the names of parameters.

    Raises:
        UserError: A value is of a class that is in no table, or the names do not fit.
        CheckpointDamaged: The values are nested as no program writes them.
    """
    prefix = ""
    if options.model is not None:
        model, prefix = _model_at(saved, options.model)
        saved = replace(saved, model=model)
    walk = Walk(saved, options)
    tree = walk.kept(saved.tree, (), 0)
    if missing := [path for path in options.without if path not in walk.without]:
        raise UserError(f"{saved.where}: --without {missing[0]}: nothing was saved under this path")
    if not walk.leaves:
        what = " of a model" if options.model_only else ""
        raise UserError(f"{saved.where} holds no tensors{what}")
    if not options.model_only and (text := _exported_text(tree)) is not None:
        return _of_export(saved, walk, text)
    naming = _Naming(saved, options, walk.leaves, tree, prefix)
    leaves = {naming.names[path]: entry.value for path, entry in walk.leaves.items()}
    state = {TREE: naming.encoded(tree, ""), "aliases": naming.aliases}
    if groups := naming.groups():
        state["groups"] = groups
    if options.tracked:
        state["tracked"] = _tracked(tree, options.tracked, naming)
    foreign = replace(_foreign(saved.where, leaves, state), notes=tuple(naming.notes))
    left_out = (*saved.left_out, *walk.left_out)
    return Import(foreign=foreign, left_out=left_out, step=saved.step)


def _foreign(where: str, leaves: Mapping[str, Leaf], state: Mapping[str, Any]) -> ForeignCheckpoint:
    """Returns the checkpoint of named leaves.

    Args:
        where: What was saved, for messages.
        leaves: The tensors by name.
        state: The values that are no tensors.

    Raises:
        UserError: A checkpoint cannot hold a name.
    """
    try:
        check_tensor_names(leaves)
    except ValueError as error:
        raise UserError(f"{where} cannot be imported: {error}") from None
    return ForeignCheckpoint(
        specs={name: leaf.spec for name, leaf in leaves.items()},
        state=state,
        open_source=lambda buffer_bytes: LeafReader(leaves, buffer_bytes),
    )


def _exported_text(tree: Any) -> Any:
    """Returns the state that an export of all state wrote; None: this is no such export."""
    ours = tree.get(OWN_KEY)
    return ours.get("state") if isinstance(ours, dict) else None


def _of_export(saved: Saved, walk: Walk, text: Any) -> Import:
    """Returns what an export of all state came from.

    Args:
        saved: The export.
        walk: Its tensors by path.
        text: The state that it wrote.

    Raises:
        CheckpointDamaged: The state makes no sense.
        UserError: Two tensors would get the same name.
    """
    state, nested = parse_exported(text, saved.where)
    named = {joined(path): name for path, name in nested.items()}
    leaves: dict[str, Leaf] = {}
    for path, entry in walk.leaves.items():
        if is_copy(entry.path, state):
            continue
        name = named.get(path) or _exported_name(entry.path)
        if name in leaves:
            raise UserError(f"{saved.where}: two tensors would get the same name {name!r:.80}")
        leaves[name] = entry.value
    foreign = _foreign(saved.where, leaves, state)
    return Import(foreign=foreign, left_out=tuple(walk.left_out), step=saved.step)


def _exported_name(path: KeyPath) -> str:
    """Returns the name that a tensor of an export had."""
    match path:
        case (str(top), "tensors", str(name)) if top == OWN_KEY:
            return name
        case (str(top), "state", str(parameter), str(key)) if top == OPTIMIZER_KEY:
            return f"{top}/{parameter}/{key}"
    return joined(path)


def _without_leaves(tree: Any) -> Any:
    """Returns a tree with an empty tensor for each leaf, as `flatten` takes it."""
    if isinstance(tree, dict):
        return {key: _without_leaves(item) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_without_leaves(item) for item in tree)
    return _STAND_IN if is_tensor(tree) else tree


_STAND_IN = torch.empty(0)


class _Naming:
    """Finds the names of tensors, and of the parameters of optimizers."""

    def __init__(
        self,
        saved: Saved,
        options: ImportOptions,
        entries: Mapping[str, Entry],
        tree: Any,
        prefix: str,
    ) -> None:
        """Finds the names.

        Args:
            saved: What was saved.
            options: The names of parameters that the user has given.
            entries: The tensors by path.
            tree: What is kept of the tree.
            prefix: What the names of the model's tensors begin with, which is taken off.

        Raises:
            UserError: The names that the user has given do not fit.
        """
        self._where, self._tree, self._options = saved.where, tree, options
        self.notes: list[str] = []
        self._entries = entries
        self._prefix = prefix
        self._in_model = {
            path: _name_in_model(entry.path, saved.model, prefix) for path, entry in entries.items()
        }
        self._wrapper = _common_wrapper([n for n in self._in_model.values() if n is not None])
        if self._wrapper:
            self.notes.append(f"the names of the model's tensors had {self._wrapper!r} in front")
        self.aliases: dict[str, str] = {}
        self.names = self._model_names()
        tied = len(self.aliases)  # these have paths of their own
        self._add_aliases(saved.aliases or {})
        self._specs = {name: entries[path].value.spec for path, name in self.names.items()}
        self._optimizers = list(_optimizers(tree, ()))
        self._parameters = self._parameter_names()
        for path, entry in entries.items():
            if path not in self.names:
                self.names[path] = self._optimizer_name(entry) or _free_name(path)
        if len(set(self.names.values())) + tied != len(self.names):
            raise UserError(f"{saved.where}: two tensors would get the same name")

    def _model_names(self) -> dict[str, str]:
        """Returns the name of each tensor of the model; tensors that are one have one name."""
        names: dict[str, str] = {}
        kept: dict[Leaf, str] = {}
        for path, name in self._in_model.items():
            if name is None:
                continue
            name = name.removeprefix(self._wrapper)
            leaf = self._entries[path].value
            if isinstance(leaf, ArchivedTensor) and leaf.spec.numel:
                first = kept.setdefault(leaf, name)
                if first != name:
                    self.aliases[name] = first
                name = first
            names[path] = MODEL_PREFIX + name
        return names

    def _add_aliases(self, aliases: Mapping[str, str]) -> None:
        """Adds names that only what was saved knows, of tensors that have none of them."""
        model = set(self.names.values())
        for alias, name in aliases.items():
            if MODEL_PREFIX + alias not in model and MODEL_PREFIX + name in model:
                self.aliases.setdefault(alias, name)

    def _parameter_names(self) -> dict[tuple[KeyPath, str], str]:
        """Returns the name of each parameter that an optimizer has state for, by its key there."""
        parameters: dict[tuple[KeyPath, str], str] = {}
        left = None if self._options.names is None else list(self._options.names)
        groups = None if self._options.groups is None else list(self._options.groups)
        for path, state in self._optimizers:
            keys = [key for group in state["param_groups"] for key in group["params"]]
            names = self._names_of(state, keys)
            if groups is not None and (names is None or not self._are_known(names)):
                names = self._names_by_groups(path, state, groups)
            if names is None and left is not None:
                names, left = left[: len(keys)], left[len(keys) :]
            if names is None:
                self.notes.append(
                    f"the optimizer at {joined(path)!r} numbers its parameters, so that no job "
                    "takes its state: give their names with --names FILE"
                )
            elif len(names) != len(keys):
                raise UserError(f"--names has too few names for the optimizer at {joined(path)!r}")
            else:
                named = zip(keys, names, strict=True)
                parameters |= {(path, str(key)): self._checked(name) for key, name in named}
            for key in state["state"]:  # of no group
                if isinstance(key, str) and not key.isdecimal():
                    parameters.setdefault((path, key), self._checked(key))
        if left:
            raise UserError(f"--names has {len(left)} more names than optimizers have parameters")
        return parameters

    def _are_known(self, names: Iterable[str]) -> bool:
        """Returns whether the model has tensors of these names."""
        bare = (name.removeprefix(self._prefix).removeprefix(self._wrapper) for name in names)
        return all(MODEL_PREFIX + self.aliases.get(name, name) in self._specs for name in bare)

    def _names_by_groups(
        self, path: KeyPath, state: Mapping[str, Any], groups: list[tuple[str, ...]]
    ) -> list[str]:
        """Returns the names of the parameters of an optimizer, by the groups of a job's.

        Args:
            path: The optimizer's path.
            state: Its state dict.
            groups: The job's groups that are left; those of this optimizer are taken off.

        Raises:
            UserError: The job's groups have other numbers of parameters.
        """
        sizes = [len(group["params"]) for group in state["param_groups"]]
        taken, job_sizes = groups[: len(sizes)], [len(group) for group in groups]
        del groups[: len(sizes)]
        if [len(group) for group in taken] != sizes:
            raise UserError(
                f"{self._where}: the optimizer at {joined(path)!r} has groups of {sizes} "
                f"parameters, and the script's of {job_sizes}: its parameters have numbers, so "
                "build the optimizer with the groups that it was saved with, in the same order"
            )
        return [name for group in taken for name in group]

    def _names_of(self, state: Mapping[str, Any], keys: list[Any]) -> list[str] | None:
        """Returns the names that a state dict of an optimizer has itself."""
        if keys and not any(str(key).isdecimal() for key in keys):
            return [str(key) for key in keys]
        lists = [group.get("param_names") for group in state["param_groups"]]
        names = [name for names in lists if isinstance(names, list) for name in names]
        return names if len(names) == len(keys) and None not in lists else None

    def _checked(self, name: str) -> str:
        """Returns the name under which the model has a parameter; raises `UserError` if none."""
        name = str(name).removeprefix(self._prefix).removeprefix(self._wrapper)
        name = self.aliases.get(name, name)
        if self._specs and MODEL_PREFIX + name not in self._specs:
            raise UserError(f"{self._where}: the model has no tensor {name!r} for a parameter")
        return name

    def _optimizer_name(self, entry: Entry) -> str | None:
        """Returns the name of a tensor in an optimizer's state; None: it has another path."""
        *top, state, key, kind = ("", "", "", *entry.path)
        parameter = self._parameters.get((tuple(top[3:]), str(key)))
        if state != "state" or parameter is None:
            return None
        spec = self._specs.get(MODEL_PREFIX + parameter)
        if kind in _LIKE_PARAMETER and spec is not None and spec.shape != entry.value.spec.shape:
            raise UserError(
                f"{joined(entry.path)} has shape {list(entry.value.spec.shape)}, and parameter "
                f"{parameter!r} has {list(spec.shape)}: the names are in another order"
            )
        return f"{OPTIMIZER}{parameter}/{kind}"

    def groups(self) -> list[dict[str, Any]]:
        """Returns the groups of the optimizers whose parameters have names, as a job stores
        them."""
        groups = []
        for path, state in self._optimizers:
            for index, group in enumerate(state["param_groups"]):
                names = [self._parameters.get((path, str(key))) for key in group["params"]]
                if None not in names:
                    at = joined((*path, "param_groups", index))
                    options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
                    groups.append({"names": names, "options": self.encoded(options, at)})
        return groups

    def encoded(self, value: Any, path: str) -> Any:
        """Returns a part of the tree as JSON, with the tensors' names."""
        return renamed(flatten(_without_leaves(value), path, {}), self.names)


def _model_at(saved: Saved, text: str) -> tuple[KeyPath, str]:
    """Returns (path of the model, what the names of its tensors begin with).

    Raises `UserError` if nothing was saved there.
    """
    value, path = saved.tree, text.rstrip("/").split("/")
    for depth, key in enumerate(path):
        below = value.get(key) if isinstance(value, dict) else None
        if isinstance(below, dict):
            value = below
            continue
        names = [name for name in value if isinstance(name, str)] if below is None else []
        if depth == len(path) - 1 and any(name.startswith(key) for name in names):
            return tuple(path[:-1]), key
        raise UserError(f"--map {text}=model: nothing was saved under this path")
    return tuple(path), ""


def _name_in_model(path: KeyPath, model: KeyPath | None, prefix: str) -> str | None:
    """Returns a tensor's name in the model; None: it is of something else.

    Args:
        path: The tensor's path.
        model: Path of the model; None: there is none.
        prefix: What the names begin with, which is taken off.
    """
    if model is None or path[: len(model)] != model:
        return None
    rest = path[len(model) :]
    if not model and not (len(rest) == 1 and isinstance(rest[0], str)):
        return None
    name = joined(rest)
    return name.removeprefix(prefix) if name.startswith(prefix) else None


def _common_wrapper(names: Iterable[str]) -> str:
    """Returns the prefix that wrappers have put before all names."""
    prefix, rest = "", list(names)
    while rest and (added := next((w for w in _WRAPPERS if rest[0].startswith(w)), None)):
        if not all(name.startswith(added) and len(name) > len(added) for name in rest):
            break
        prefix, rest = prefix + added, [name.removeprefix(added) for name in rest]
    return prefix


def _optimizers(tree: Any, path: KeyPath) -> Iterator[tuple[KeyPath, dict[str, Any]]]:
    """Yields (path, value) for each state dict of an optimizer in a tree."""
    if is_optimizer(tree):
        yield path, tree
    elif isinstance(tree, dict):
        for key, item in tree.items():
            yield from _optimizers(item, (*path, key))
    elif isinstance(tree, list | tuple):
        for index, item in enumerate(tree):
            yield from _optimizers(item, (*path, index))


def _free_name(path: str) -> str:
    """Returns the name of a tensor that has no meaning to a job."""
    return _OTHER + path if path.startswith(_RESERVED) else path


def _tracked(tree: Any, objects: Mapping[str, str], naming: _Naming) -> dict[str, Any]:
    """Returns the states of objects that a script tracks, as a job stores them."""
    values = dict(_paths(tree, ()))
    if missing := [path for path in objects.values() if path not in values]:
        raise UserError(f"--track: nothing was saved under {missing[0]!r}")
    return {name: naming.encoded(values[path], path) for name, path in objects.items()}


def _paths(tree: Any, path: KeyPath) -> Iterator[tuple[str, Any]]:
    """Yields (path, value) for each value in a tree."""
    yield joined(path), tree
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(tree, dict):
        items = tree.items()
    elif isinstance(tree, list | tuple):
        items = enumerate(tree)
    for key, item in items:
        yield from _paths(item, (*path, key))
