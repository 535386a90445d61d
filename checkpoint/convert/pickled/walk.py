"""Copies what another program has saved without what no checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from elasticzero.checkpoint.convert.import_plan import ImportOptions, LeftOut
from elasticzero.checkpoint.convert.pickle_reader import Opaque
from elasticzero.checkpoint.convert.pickled.leaves import HeldTensor
from elasticzero.checkpoint.convert.pickled.values import is_tensor, plain
from elasticzero.errors import CheckpointDamaged, UserError
from elasticzero.nested import MAX_DEPTH

KeyPath = tuple[Any, ...]
"""Keys from the root of what was saved to a value."""
_VALUES_PER_BYTE = 16
"""Maximum number of values for each byte of the pickles: more are values that are repeated."""
_OMITTED = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Presents what another program has saved, before it has names."""

    where: str
    tree: Any
    """Dicts, lists, tuples, numbers, texts, arrays of numpy and leaves."""
    model: KeyPath | None
    """Path of the model's tensors; None: there is no model."""
    pickle_bytes: int
    """Size of all pickles that were read."""
    step: int | None = None
    """The step after which it was saved; None: it does not say."""
    aliases: Mapping[str, str] | None = None
    """Other names of the model's tensors, by which they are stored under another."""
    left_out: tuple[LeftOut, ...] = ()
    """Lists what in its files was not read, and why."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Has a tensor or an array, and its path before its keys were joined."""

    path: KeyPath
    value: Any


class Walk:
    """Copies a tree without what no checkpoint holds, and lists its tensors by their paths."""

    def __init__(self, saved: Saved, options: ImportOptions) -> None:
        self._saved, self._options = saved, options
        self.leaves: dict[str, Entry] = {}
        self.left_out: list[LeftOut] = []
        self.without: set[str] = set()
        """The paths of `ImportOptions.without` that exist."""
        self._optimizers: set[KeyPath] = set()
        self._visits_left = _VALUES_PER_BYTE * saved.pickle_bytes + 1000

    def kept(self, value: Any, path: KeyPath, depth: int) -> Any:
        """Returns the value without what is left out, or `_OMITTED`."""
        self._visits_left -= 1
        if depth > MAX_DEPTH or self._visits_left < 0:
            raise UserError(
                f"{self._saved.where}: {joined(path)[:80]!r}... is nested too deep, contains "
                "itself, or repeats its values too often"
            )
        try:
            value = plain(value)
        except ValueError as error:
            raise CheckpointDamaged(f"{self._saved.where}: {joined(path)}: {error}") from None
        if joined(path) in self._options.without:
            self.without.add(joined(path))
            return self._omit(path, "by --without")
        if not self._is_selected(path):
            return self._omit(path, "by --model-only")
        if isinstance(value, dict):
            return self._kept_dict(value, path, depth)
        if isinstance(value, list | tuple):
            items = [self.kept(item, (*path, i), depth + 1) for i, item in enumerate(value)]
            items = [None if item is _OMITTED else item for item in items]
            return items if isinstance(value, list) else tuple(items)
        return self._kept_leaf(value, path)

    def _kept_dict(self, value: Mapping[Any, Any], path: KeyPath, depth: int) -> Any:
        if is_optimizer(value):
            self._optimizers.add(path)
        made = {}
        for key, item in value.items():
            if not _is_key(key):
                self._omit((*path, "?"), f"its key is {_kind(key)}")
            elif (kept := self.kept(item, (*path, key), depth + 1)) is not _OMITTED:
                made[key] = kept
        return made

    def _kept_leaf(self, value: Any, path: KeyPath) -> Any:
        if isinstance(value, Opaque):
            if value.refused and (self._options.refuse_unknown or self._is_needed(path)):
                raise UserError(
                    f"{self._saved.where}: {joined(path) or 'what was saved'!r} is a "
                    f"{value.name!a}, which only its own program can make: leave it out with "
                    f"`--without {joined(path)}`, or import the model alone with `--model-only`"
                )
            return self._omit(path, f"it is {_kind(value)}")
        if self._is_step(path) and type(value) in (int, float):
            value = HeldTensor(torch.tensor(float(value)))  # as torch's optimizers keep it
        if isinstance(value, np.ndarray) or is_tensor(value):
            return self._kept_tensor(value, path)
        if isinstance(value, str) and not _is_unicode(value):
            return self._omit(path, "it is no text of Unicode")
        if value is None or type(value) in (bool, int, float, str):
            return value
        return self._omit(path, f"it is {_kind(value)}")

    def _kept_tensor(self, value: Any, path: KeyPath) -> Any:
        if joined(path) in self.leaves:
            raise UserError(f"{self._saved.where}: two values come to the path {joined(path)!r}")
        leaf = HeldTensor(torch.from_numpy(value)) if isinstance(value, np.ndarray) else value
        self.leaves[joined(path)] = Entry(path, leaf)
        return value

    def _omit(self, path: KeyPath, reason: str) -> Any:
        self.left_out.append(LeftOut(joined(path) or ".", reason))
        return _OMITTED

    def _is_selected(self, path: KeyPath) -> bool:
        model = self._saved.model
        if not self._options.model_only or model is None or not path:
            return not self._options.model_only or not path
        return path[: len(model)] == model or model[: len(path)] == path

    def _is_needed(self, path: KeyPath) -> bool:
        """Returns whether a value is of the model or of an optimizer."""
        model = self._saved.model
        tops = self._optimizers if model is None else {model, *self._optimizers}
        return any(path[: len(top)] == top for top in tops)

    def _is_step(self, path: KeyPath) -> bool:
        return (
            len(path) > 2
            and path[-1] == "step"
            and path[-3] == "state"
            and (path[:-3] in self._optimizers)
        )


def joined(path: KeyPath) -> str:
    """Returns a path as text."""
    return "/".join(map(str, path))


def is_optimizer(value: Any) -> bool:
    """Returns whether a value is a state dict of an optimizer of torch."""
    if not isinstance(value, dict):
        return False
    groups = value.get("param_groups")
    return (
        isinstance(value.get("state"), dict)
        and isinstance(groups, list)
        and all(
            isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
        )
    )


def _is_key(key: Any) -> bool:
    if type(key) is tuple:
        return all(map(_is_key, key))
    return key is None or type(key) in (bool, int, float) or (type(key) is str and _is_unicode(key))


def _is_unicode(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


def _kind(value: Any) -> str:
    return f"a {value.name if isinstance(value, Opaque) else type(value).__name__}"
