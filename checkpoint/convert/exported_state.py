"""Recognizes what an export of all state has written for other programs.

Such an export has the state of the checkpoint as JSON under a key of its own, and repeats some
tensors where torch's state dicts need them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from elasticzero.checkpoint.format.manifest import TREE
from elasticzero.errors import CheckpointDamaged
from elasticzero.nested import unflatten

MODEL_KEY = "model"
OWN_KEY = "elasticzero"
"""Key of the exported values that have no place in a state dict of torch."""
OPTIMIZER_KEY, GROUPS_KEY = "optimizer", "param_groups"

KeyPath = tuple[str | int, ...]


def parse_exported(text: Any, where: str) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    """Returns (the state of the exported checkpoint, the names of the tensors that it nests).

    Args:
        text: The JSON that the export wrote.
        where: The export, for the message.

    Raises:
        CheckpointDamaged: The text is no such JSON.
    """
    try:
        state = json.loads(text)
        if isinstance(state, dict) and isinstance(state.get("aliases", {}), dict):
            return state, dict(_named_paths(state.get(TREE), ()))
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
        pass
    raise CheckpointDamaged(f"{where}: the state that an export wrote makes no sense")


def is_copy(path: KeyPath, state: Mapping[str, Any]) -> bool:
    """Returns whether an export put a tensor here that it also put elsewhere."""
    if TREE in state:
        return False
    return path[:2] == (OPTIMIZER_KEY, GROUPS_KEY) or (
        path[0] == MODEL_KEY and "/".join(map(str, path[1:])) in state.get("aliases", ())
    )


def _named_paths(json: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    """Yields (path in the export, name) for each tensor in an encoded value."""
    if isinstance(json, list):
        for index, item in enumerate(json):
            yield from _named_paths(item, (*path, index))
    match json:
        case {"$tensor": str(name)} | {"$array": str(name)}:
            yield path, name
        case {"$tuple": [*items]}:
            yield from _named_paths(items, path)
        case {"$map": [*pairs]}:
            for [key, item] in pairs:
                yield from _named_paths(item, (*path, str(unflatten(key, _no_tensor))))
        case dict():
            for key, item in json.items():
                yield from _named_paths(item, (*path, key))


def _no_tensor(name: str) -> Any:
    raise ValueError(f"{name!r} is the key of a dict")
