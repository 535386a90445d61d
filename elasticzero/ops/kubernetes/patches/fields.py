"""Tells the types of the fields of Kubernetes' objects, from the table fields.json.

`python -m tools.kubernetes_fields` writes the table; its docstring says how a field is written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

OTHERS = "..."
"""Stands in a type whose further fields only its own controller knows."""
ANY = "any"


@dataclass(frozen=True, slots=True)
class FieldType:
    """Describes what a field can have."""

    shape: Literal["one", "list", "map"]
    name: str
    """Name of the type, of each entry where there are several; `any`: it is not checked."""
    keys: tuple[str, ...] = ()
    """Fields by which a strategic merge finds an entry of a list; none: it replaces the list."""


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(files(__package__).joinpath("fields.json").read_text())
    return table


def object_type(api_version: str, kind: str) -> str:
    """Returns the name of the type of an object that a render can have."""
    name: str = _table()["objects"][f"{api_version} {kind}"]
    return name


def is_structure(name: str) -> bool:
    """Returns whether a type has fields."""
    return name in _table()["types"]


def fields_of(name: str) -> tuple[str, ...]:
    """Returns the names of a type's fields."""
    return tuple(field for field in _table()["types"][name] if field != OTHERS)


def required_fields(name: str) -> tuple[str, ...]:
    """Returns the fields that an object of a type must have."""
    return tuple(_table()["required"].get(name, ()))


@cache
def field_type(owner: str, field: str) -> FieldType | None:
    """Returns the type of a field; None: there is no such field.

    Args:
        owner: name of the type that has the field.
        field: name of the field.
    """
    fields = _table()["types"][owner]
    text = fields.get(field, fields.get(OTHERS))
    if text is None:
        return None
    if text.startswith("{"):
        return FieldType("map", text[1:-1])
    if text.startswith("["):
        name, _, keys = text[1:].rpartition("]")
        return FieldType("list", name, tuple(keys.split(",")) if keys else ())
    return FieldType("one", text)


def entry_title(name: str, entry: Mapping[str, Any], kind: FieldType) -> str:
    """Returns how messages name an entry of a list that is merged by keys.

    Args:
        name: how they name the list.
        entry: the entry.
        kind: type of the list.
    """
    return f"{name}[{entry.get(kind.keys[0], '')}]"
