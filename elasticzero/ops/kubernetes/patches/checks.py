"""Checks a patch before it is merged.

A misspelled field would be applied in silence, and Kubernetes would refuse or drop it later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elasticzero.ops.kubernetes.naming import Manifest
from elasticzero.ops.kubernetes.patches.document import Patch, Path, nearest
from elasticzero.ops.kubernetes.patches.fields import (
    ANY,
    FieldType,
    entry_title,
    field_type,
    fields_of,
    is_structure,
)
from elasticzero.ops.kubernetes.patches.merging import (
    DELETE,
    DIRECTIVE,
    DIRECTIVES,
    REPLACE,
    identity,
)

SCALARS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "string": ((str,), "a text, in quotes"),
    "integer": ((int,), "a whole number"),
    "number": ((int, float), "a number"),
    "boolean": ((bool,), "true or false"),
    "quantity": ((str, int, float), "an amount such as 2, 500m or 8Gi"),
    "integer or text": ((str, int), "a number or a text"),
}
"""What a value of each simple type is in Python, and in words."""


def check_patch(patch: Patch, before: Manifest, kind: str) -> dict[str, str]:
    """Checks a patch, and returns the file and line of each of its values by the value's name.

    Args:
        patch: the patch.
        before: the object that it changes.
        kind: type of that object.

    Raises:
        UserError: a field is unknown, a value is of another type, or an entry that the patch
            deletes is not there.
    """
    places: dict[str, str] = {}
    _check_value(patch, (), FieldType("one", kind), "", places)
    _check_deletions(patch, (), before, FieldType("one", kind), "")
    return places


def _check_value(
    patch: Patch, path: Path, kind: FieldType, name: str, places: dict[str, str]
) -> None:
    """Checks a value of a patch and all below it.

    Args:
        patch: the patch.
        path: keys and indices that lead to the value.
        kind: type of the value.
        name: how messages name the value, such as `spec.containers[agent]`.
        places: takes the file and line of each value by that name.

    Raises:
        UserError: a field is unknown, or a value is of another type.
    """
    places[name] = patch.place(path)
    value = patch.at(path)
    if value is None or kind.name == ANY:
        return
    if kind.shape == "list":
        _check_list(patch, path, kind, name, places)
    elif kind.shape == "map":
        _check_map(patch, path, kind, name, places)
    elif is_structure(kind.name):
        _check_structure(patch, path, kind.name, name, places)
    else:
        types, expected = SCALARS[kind.name]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            patch.refuse(path, f"{name} must be {expected}, and is {_in_words(value)}")


def _check_structure(
    patch: Patch, path: Path, owner: str, name: str, places: dict[str, str]
) -> None:
    value = patch.at(path)
    if not isinstance(value, Mapping):
        fields = ", ".join(fields_of(owner)[:3])
        patch.refuse(path, f"{name} must have fields ({fields}, …), and is {_in_words(value)}")
    _check_directive(patch, path, name)
    for key in value:
        if key == DIRECTIVE:
            continue
        kind = field_type(owner, key)
        if kind is None:
            what = f"{name or 'the patch'} has the field {key}, which {owner} does not have"
            patch.refuse((*path, key), what + nearest(key, fields_of(owner)))
        _check_value(patch, (*path, key), kind, f"{name}.{key}".lstrip("."), places)


def _check_map(
    patch: Patch, path: Path, kind: FieldType, name: str, places: dict[str, str]
) -> None:
    value = patch.at(path)
    if not isinstance(value, Mapping):
        patch.refuse(path, f"{name} must have names and values, and is {_in_words(value)}")
    _check_directive(patch, path, name)
    for key in value:
        if key != DIRECTIVE:
            entry = FieldType("one", kind.name)
            _check_value(patch, (*path, key), entry, f"{name}[{key}]", places)


def _check_list(
    patch: Patch, path: Path, kind: FieldType, name: str, places: dict[str, str]
) -> None:
    value = patch.at(path)
    if not isinstance(value, list):
        patch.refuse(path, f"{name} must be a list, and is {_in_words(value)}")
    seen: set[tuple[Any, ...]] = set()
    for index, entry in enumerate(value):
        place = (*path, index)
        if entry == {DIRECTIVE: REPLACE}:
            continue
        if entry is None:
            patch.refuse(place, f"{name}[{index}] has no value")
        title = f"{name}[{index}]"
        if kind.keys and isinstance(entry, Mapping):
            _check_entry(patch, place, kind, title)
            title = entry_title(name, entry, kind)
            if identity(entry, kind.keys) in seen:
                patch.refuse(place, f"{title} is there twice")
            seen.add(identity(entry, kind.keys))
        _check_value(patch, place, FieldType("one", kind.name), title, places)


def _check_entry(patch: Patch, path: Path, kind: FieldType, name: str) -> None:
    """Checks what finds an entry of a list that is merged by keys."""
    entry, key = patch.at(path), kind.keys[0]
    if not isinstance(entry.get(key), str | int):
        patch.refuse(path, f"{name} has no {key}, by which the entry that it changes is found")
    if entry.get(DIRECTIVE) == REPLACE:
        text = "replace is for a list as a whole, as an entry of its own: - $patch: replace"
        patch.refuse((*path, DIRECTIVE), f"{name}: {text}")


def _check_directive(patch: Patch, path: Path, name: str) -> None:
    """Checks the words with `$` of one value."""
    value = patch.at(path)
    for key in value:
        if not isinstance(key, str):
            patch.refuse(path, f"{name} has the key {key}: a text is expected, in quotes")
        if key.startswith("$") and key != DIRECTIVE:
            patch.refuse((*path, key), f"{name}: {key} is not taken; $patch is")
    if value.get(DIRECTIVE, DELETE) not in DIRECTIVES:
        text = f"$patch: {value[DIRECTIVE]}: one of {', '.join(DIRECTIVES)} is expected"
        patch.refuse((*path, DIRECTIVE), text)
    if not path and value.get(DIRECTIVE) == REPLACE:
        patch.refuse((DIRECTIVE,), "$patch: replace is for what an object has, not for a whole one")


def _check_deletions(patch: Patch, path: Path, before: Any, kind: FieldType, name: str) -> None:
    """Checks that each entry of a list that the patch deletes is there.

    Args:
        patch: the patch.
        path: keys and indices that lead to a value of it.
        before: the value of the object there.
        kind: type of the value.
        name: how messages name the value.
    """
    value = patch.at(path)
    if kind.shape == "list" and isinstance(value, list) and kind.keys:
        _check_entries(patch, path, before, kind, name)
    elif kind.shape == "one" and is_structure(kind.name) and isinstance(value, Mapping):
        for key in value:
            inner = field_type(kind.name, key)
            if inner is not None:
                below = before.get(key) if isinstance(before, Mapping) else None
                _check_deletions(patch, (*path, key), below, inner, f"{name}.{key}".lstrip("."))


def _check_entries(patch: Patch, path: Path, before: Any, kind: FieldType, name: str) -> None:
    entries = before if isinstance(before, list) else []
    by_key = {identity(entry, kind.keys): entry for entry in entries}
    for index, entry in enumerate(patch.at(path)):
        key, title = identity(entry, kind.keys), entry_title(name, entry, kind)
        if entry.get(DIRECTIVE) == DELETE and key not in by_key:
            names = ", ".join(str(one[kind.keys[0]]) for one in entries) or "none"
            text = f"{title} is to be deleted, and is not there; there are {names}"
            patch.refuse((*path, index), text)
        _check_deletions(patch, (*path, index), by_key.get(key), FieldType("one", kind.name), title)


def _in_words(value: Any) -> str:
    match value:
        case bool():
            return f"{str(value).lower()} without quotes"
        case int() | float():
            return f"the number {value}"
        case str():
            return f"the text {value!r}"
        case list():
            return "a list"
        case dict():
            return "an object with fields"
        case _:
            return f"{value}, neither text nor number"
