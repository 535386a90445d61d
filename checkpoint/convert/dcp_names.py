"""Finds the model, the optimizer and the extra state in the paths of a state dict of torch. Pure.

Programs save the same things under other keys: `optim` for `optimizer`, all of it below one root,
an optimizer's state under flattened keys such as `state.0.weight.exp_avg`, or several optimizers.
A path with the usual keys says what a value is; the nesting of the state dict stays as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from elasticzero.checkpoint.convert.dcp_metadata import KeyPath
from elasticzero.checkpoint.convert.exported_state import (
    GROUPS_KEY,
    MODEL_KEY,
    OPTIMIZER_KEY,
    OWN_KEY,
)
from elasticzero.checkpoint.rewrite.sources import MODEL_PREFIX
from elasticzero.errors import UserError
from elasticzero.text import list_text

STATE_KEY, PARAMS_KEY = "state", "params"
EXTRA_STATE = "_extra_state"
"""Last part of the key under which torch has the extra state of a module."""
_OPTIMIZER_KEYS = (OPTIMIZER_KEY, "optim", "optimizers")
_EXTRA_PREFIX = "module/"

PrefixMap = tuple[str, str]
"""A prefix of paths, keys joined by "/", and what takes its place."""


def usual_paths(
    paths: Collection[KeyPath], maps: Sequence[PrefixMap] = ()
) -> dict[KeyPath, KeyPath]:
    """Returns each path with the usual keys: `model`, and `optimizer` with `state` and
    `param_groups`.

    Args:
        paths: The paths of all tensors and values.
        maps: Prefixes that the user replaces.

    Raises:
        UserError: Nothing has one of the prefixes.
    """
    mapped = _mapped(paths, maps)
    roots = _single_root(mapped.values())
    lifted = {old: path[1:] if path[0] in roots else path for old, path in mapped.items()}
    parameters = {
        path[-1] if path[0] == MODEL_KEY else path[0]
        for path in lifted.values()
        if len(path) == 2 or len(path) == 1
    }
    optimizers = _Optimizers({key for key in parameters if isinstance(key, str)})
    return {old: optimizers.usual(path) for old, path in lifted.items()}


def _mapped(paths: Collection[KeyPath], maps: Sequence[PrefixMap]) -> dict[KeyPath, KeyPath]:
    """Returns each path with its prefix replaced; the longest prefix counts."""
    result: dict[KeyPath, KeyPath] = {path: path for path in paths}
    unused = dict(maps)
    for path in paths:
        text = "/".join(map(str, path))
        fitting = [(old, new) for old, new in maps if _is_prefix(old, text)]
        if not fitting:
            continue
        old, new = max(fitting, key=lambda pair: len(pair[0]))
        unused.pop(old, None)
        rest = text[len(old) :] if new else text[len(old) :].lstrip("/")
        keys = (new + rest).split("/")
        result[path] = tuple(int(key) if key.isdecimal() else key for key in keys)
    if unused:
        pairs = (f"--map {old}={new}" for old, new in unused.items())
        tops = dict.fromkeys(str(path[0]) for path in paths)
        raise UserError(
            f"{list_text(pairs, 3)}: nothing here has this prefix; the first keys are "
            f"{list_text(tops, 8)}"
        )
    return result


def _is_prefix(prefix: str, text: str) -> bool:
    """Returns whether a text begins with a prefix that ends where a key, or a part of one, does."""
    if not text.startswith(prefix):
        return False
    return text == prefix or prefix[-1:] in ("/", ".") or text[len(prefix)] in "/."


def _single_root(paths: Iterable[KeyPath]) -> set[str | int]:
    """Returns the one key that has a model below it; none if the first level has a model, or if
    several keys have one."""
    tops: dict[str | int, set[str | int]] = {}
    for path in paths:
        tops.setdefault(path[0], set()).update(path[1:2])
    if MODEL_KEY in tops:
        return set()
    roots = [top for top, below in tops.items() if MODEL_KEY in below]
    if len(roots) != 1 or tops[roots[0]] & (tops.keys() - {roots[0]}):
        return set()
    return set(roots)


@dataclass(slots=True)
class _Optimizers:
    """Gives the state of one or several optimizers the usual paths."""

    parameters: set[str]
    """Names that parameters may have."""
    groups: dict[KeyPath, int] = field(default_factory=dict)
    """The number of each group, by the path or the parameter that had it."""

    def usual(self, path: KeyPath) -> KeyPath:
        """Returns a path with the usual keys, if it is that of an optimizer."""
        if path[0] not in _OPTIMIZER_KEYS or len(path) < 2:
            return path
        parts = path[1:]
        if not _is_part(parts[0]) and len(parts) > 1 and _is_part(parts[1]):
            parts = parts[1:]  # one of several optimizers
        head = parts[0]
        if head == STATE_KEY:
            return path if _is_number(parts[1:2]) else (OPTIMIZER_KEY, *parts)
        if head == GROUPS_KEY and len(parts) > 1:
            group = (*path[: len(path) - len(parts)], parts[1])
            return (OPTIMIZER_KEY, GROUPS_KEY, self._number(group), *parts[2:])
        if isinstance(head, str) and len(parts) == 1:
            kind, _, rest = head.partition(".")
            name, key = self._split(rest)
            if kind == STATE_KEY and name:
                return (OPTIMIZER_KEY, STATE_KEY, name, key)
            if kind == GROUPS_KEY and name:
                return (OPTIMIZER_KEY, GROUPS_KEY, self._number((GROUPS_KEY, name)), key)
        return path

    def _number(self, group: KeyPath) -> int:
        return self.groups.setdefault(group, len(self.groups))

    def _split(self, text: str) -> tuple[str, str]:
        """Returns the parameter and the key of a flattened one; keys may have dots too."""
        at = len(text)
        while (at := text.rfind(".", 0, at)) > 0:
            if text[:at] in self.parameters:
                return text[:at], text[at + 1 :]
        name, _, key = text.rpartition(".")
        return name, key


def _is_part(key: str | int) -> bool:
    """Returns whether a key is that of a part of an optimizer's state dict, flattened or not."""
    heads = (STATE_KEY, GROUPS_KEY)
    return isinstance(key, str) and (key in heads or key.startswith(tuple(f"{h}." for h in heads)))


def _is_number(keys: Sequence[str | int]) -> bool:
    return bool(keys) and str(keys[0]).isdecimal()


def flat_parameter(path: KeyPath, usual: KeyPath) -> str | None:
    """Returns the parameter of a flattened option of a group; None: the path is another one.

    Args:
        path: The path in the state dict.
        usual: The same path with the usual keys.
    """
    head = path[-1]
    if usual[:2] != (OPTIMIZER_KEY, GROUPS_KEY) or len(usual) < 4 or not isinstance(head, str):
        return None
    start, end = f"{GROUPS_KEY}.", f".{usual[-1]}"
    return head[len(start) : -len(end)] if head.startswith(start) and head.endswith(end) else None


def name_of(usual: KeyPath, *, rooted: bool) -> str:
    """Returns the name of a tensor in this format.

    Args:
        usual: Its path with the usual keys.
        rooted: Whether the model is at the root.
    """
    if (extra := extra_state_of(usual, rooted=rooted)) is not None:
        return _EXTRA_PREFIX + "/".join(map(str, extra))
    match usual:
        case (str(key),) if rooted:
            return MODEL_PREFIX + key
        case (str(top), "state", str(parameter), str(key)) if (
            top == OPTIMIZER_KEY and not parameter.isdecimal()
        ):
            return f"{top}/{parameter}/{key}"
        case (str(top), "tensors", str(name)) if top == OWN_KEY:
            return name
    return "/".join(map(str, usual))


def extra_state_of(usual: KeyPath, *, rooted: bool) -> KeyPath | None:
    """Returns (key of a module's extra state in the model's state dict, keys below it); None: the
    path is another one.

    Args:
        usual: The path with the usual keys.
        rooted: Whether the model is at the root.
    """
    below = usual if rooted else usual[1:] if usual[0] == MODEL_KEY else ()
    if below and isinstance(below[0], str) and below[0].rpartition(".")[2] == EXTRA_STATE:
        return below
    return None


def is_rooted(usual: Iterable[KeyPath]) -> bool:
    """Returns whether the model is at the root: no path begins with `model`."""
    return not any(path[0] == MODEL_KEY for path in usual)


def unread_note(names: Mapping[KeyPath, str], usual: Mapping[KeyPath, KeyPath]) -> str | None:
    """Returns a line about tensors under names that no session reads; None: there are none.

    Args:
        names: The name of each tensor, by its path.
        usual: Each path with the usual keys.
    """
    readable = (MODEL_PREFIX, _EXTRA_PREFIX, "optimizers/", "rng/", "not-saved/", "tracked/")
    others = []
    for path, name in names.items():
        parts = usual[path]
        of_optimizer = parts[0] == OPTIMIZER_KEY and not _is_number(parts[2:3])
        if not name.startswith(readable) and not of_optimizer and parts[0] != OWN_KEY:
            others.append(name)
    if not others:
        return None
    return (
        f"imported under names that no session reads: {list_text(others, 3)}; --map FROM=TO gives "
        "them the place of the model or the optimizer (a session's names are model/... and "
        "optimizer/state/...)"
    )
