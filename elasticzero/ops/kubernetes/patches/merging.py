"""Merges a strategic merge patch into an object, as kustomize does. Pure.

A map is merged field by field, and null removes a field. A list whose entries have a key is merged
entry by entry: entries that the patch names go first, in its order. Every other list is replaced.
`$patch: delete` removes the object or entry that has it, and `$patch: replace` has nothing merged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elasticzero.ops.kubernetes.patches.fields import ANY, FieldType, field_type, is_structure

DIRECTIVE = "$patch"
DELETE, REPLACE, MERGE = "delete", "replace", "merge"
DIRECTIVES = (DELETE, REPLACE, MERGE)
DEFAULTS = {"protocol": "TCP"}
"""Keys of entries that have a value where none is written."""
ANYTHING = FieldType("one", ANY)


def merged(before: Mapping[str, Any], patch: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Returns an object with a patch merged into it; None: the patch deletes it.

    Args:
        before: the object; empty: there is none yet.
        patch: what the patch says of it.
        name: name of the object's type; `any`: only maps are merged.
    """
    directive = patch.get(DIRECTIVE)
    if directive == DELETE:
        return None
    result = {} if directive == REPLACE else dict(before)
    for key, value in patch.items():
        if key == DIRECTIVE:
            continue
        after = _value(result.get(key), value, _type(name, key))
        if after is None:
            result.pop(key, None)
        else:
            result[key] = after
    return result


def _type(owner: str, field: str) -> FieldType:
    return (field_type(owner, field) if is_structure(owner) else None) or ANYTHING


def _value(before: Any, patch: Any, kind: FieldType) -> Any:
    """Returns a field's value; None: the field goes."""
    if isinstance(patch, Mapping):
        # The values of a map of texts are nothing that is merged.
        name = kind.name if kind.shape == "one" else ANY
        return merged(before if isinstance(before, Mapping) else {}, patch, name)
    if isinstance(patch, list):
        return _list(before if isinstance(before, list) else [], patch, kind)
    return patch


def _list(before: list[Any], patch: list[Any], kind: FieldType) -> list[Any]:
    whole = [entry for entry in patch if entry != {DIRECTIVE: REPLACE}]
    if len(whole) < len(patch) or not kind.keys:
        return [_entry({}, entry, kind.name) for entry in whole]
    old = {identity(entry, kind.keys): entry for entry in before}
    new = {identity(entry, kind.keys): entry for entry in patch}
    entries = [_entry(old.get(key, {}), entry, kind.name) for key, entry in new.items()]
    return [
        *(entry for entry in entries if entry is not None),
        *(entry for key, entry in old.items() if key not in new),
    ]


def _entry(before: Mapping[str, Any], patch: Any, name: str) -> Any:
    return merged(before, patch, name) if isinstance(patch, Mapping) else patch


def identity(entry: Mapping[str, Any], keys: Sequence[str]) -> tuple[Any, ...]:
    """Returns what finds an entry of a list."""
    return tuple(entry.get(key, DEFAULTS.get(key)) for key in keys)
