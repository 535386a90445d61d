"""Makes records of any kind from the types of their fields, and writes bytes as readable lines."""

from __future__ import annotations

import dataclasses
import types
import typing
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, Union

T = TypeVar("T")
NEWLINE = "\N{RETURN SYMBOL}"
"""Stands for a newline within a line of a golden file."""


def full(kind: type[T], mark: str = "", **chosen: Any) -> T:
    """Returns a record whose fields all differ from their defaults.

    Args:
        kind: Class of the record.
        mark: Tells the values of one record from those of another of its kind.
        chosen: Values of fields that the types alone do not tell.
    """
    made = {f.name: _value(hint, mark, f) for f, hint in _fields(kind) if f.name not in chosen}
    return kind(**made | chosen)


def least(kind: type[T], mark: str = "", **chosen: Any) -> T:
    """Returns a record of which only the fields without a default are given, and the same of the
    records in it."""
    required = {
        f.name: _value(hint, mark, f, make=least)
        for f, hint in _fields(kind)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    return kind(**required | chosen)


def full_and_least(
    name: str, kind: type[Any], data_of: Callable[[Any], bytes], **chosen: Any
) -> dict[str, str]:
    """Returns the bytes of a record with all fields, and with those it must have where that makes a
    difference, each as a line by its name.

    Args:
        name: Begins the names of the lines.
        kind: Class of the record.
        data_of: Returns the bytes of a record.
        chosen: Values of fields that the types alone do not tell.
    """
    lines = {
        f"{name} full": line(data_of(full(kind, **chosen))),
        f"{name} least": line(data_of(least(kind, **chosen))),
    }
    return lines if len(set(lines.values())) > 1 else {name: lines[f"{name} full"]}


def _fields(kind: type[Any]) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    hints = typing.get_type_hints(kind)
    return ((f, hints[f.name]) for f in dataclasses.fields(kind) if f.init)


def _value(hint: Any, mark: str, f: dataclasses.Field[Any], make: Any = full) -> Any:
    """Returns a value of a field's type, or of a part of that type; it follows from the field's
    name and the mark."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return _value(next(a for a in arguments if a is not type(None)), mark, f, make)
    if origin is Literal:
        return next(value for value in reversed(arguments) if value != f.default)
    if origin in (tuple, Sequence):
        kinds = (
            arguments if origin is tuple and arguments[-1] is not Ellipsis else arguments[:1] * 2
        )
        return tuple(_value(a, f"{mark}-{i}", f, make) for i, a in enumerate(kinds))
    if origin is not None and issubclass(origin, Mapping):
        return {key: _value(arguments[1], f"{mark}-{key}", f, make) for key in "ba"}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return make(hint, mark)
    name = f.name + mark
    number = 100 + zlib.crc32(name.encode()) % 900
    if hint is Any:
        return {"x": [1, None, name]}
    if hint is bool:
        return f.default is not True
    return {str: f"{name} é", int: number, float: number + 0.125}[hint]


def reachable(kinds: Iterable[Any]) -> set[type]:
    """Returns the dataclasses that these types are made of."""
    seen: set[type] = set()
    for kind in kinds:
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            if kind not in seen:
                parts = reachable(hint for _, hint in _fields(kind))
                seen |= {kind} | parts
        else:
            seen |= reachable(typing.get_args(kind))
    return seen


def records_of(module: types.ModuleType) -> set[type]:
    """Returns the dataclasses that a module defines."""
    return {
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and dataclasses.is_dataclass(value)
        and value.__module__ == module.__name__
    }


def line(data: bytes) -> str:
    """Returns bytes as one line of text: in hexadecimal unless they are text."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return f"hex {data.hex()}"
    if all(c.isprintable() or c == "\n" for c in text):
        return text.replace("\n", NEWLINE)
    return f"hex {data.hex()}"


def data_in(text: str) -> bytes:
    """Returns the bytes that `line` made a line of."""
    if text.startswith("hex "):
        return bytes.fromhex(text.removeprefix("hex "))
    return text.replace(NEWLINE, "\n").encode()
