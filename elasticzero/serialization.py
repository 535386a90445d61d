"""Converts frozen dataclasses to JSON values and back, and checks every field.

Everything the project stores or sends is such a record: documents in etcd, messages between agent
and worker, manifests. A field may be a str, int, float, bool, None, a JSON value (`Any`), another
dataclass, a tuple or mapping of these, a `Literal`, or a union of them.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Collection, Mapping
from functools import cache, partial
from itertools import starmap
from typing import Any, Literal, TypeVar, Union

T = TypeVar("T")
PLAIN = frozenset({str, int, float, bool, type(None)})
"""The types whose values JSON holds unchanged."""
OMIT_DEFAULT = {"omit_default": True}
"""Metadata of a field that is stored only where it differs from its default.

An earlier release does not have the field. So records that both releases can make have equal bytes:
ranks of both compare digests of them."""


class RecordError(ValueError):
    """A JSON value is not the expected record; the message names the field."""


def encode(record: Any, *, complete: bool = False, without: Collection[str] = ()) -> Any:
    """Returns the JSON value of a record: dataclasses become objects, tuples arrays.

    An object's keys are in the order of the fields. A class that extends another record may name
    those that come before all others as its `FIELDS_FIRST`.

    Args:
        record: a dataclass, or a value that a field may have.
        complete: True: fields are there that `OMIT_DEFAULT` leaves out of what is stored.
        without: fields of the record itself, not of those in it, that are left out.
    """
    kind = type(record)
    if kind in PLAIN:
        return record
    if dataclasses.is_dataclass(kind):
        defaults = {} if complete else _omitted_defaults(kind)
        return {
            name: encode(getattr(record, name), complete=complete)
            for name in _names(kind)
            if name not in without
            if name not in defaults or getattr(record, name) != defaults[name]
        }
    if isinstance(record, Mapping):
        return {str(key): encode(value, complete=complete) for key, value in record.items()}
    if isinstance(record, (tuple, list)):
        return [encode(value, complete=complete) for value in record]
    return record


def field_values(record: Any) -> dict[str, Any]:
    """Returns the values of a record's fields by name, as they are."""
    kind: type = type(record)
    return {name: getattr(record, name) for name in _names(kind)}


def decode(kind: type[T], value: Any, where: str = "") -> T:
    """Returns the record of type `kind` that the JSON `value` describes.

    Unknown fields are ignored, so that documents of a newer version can be read; a missing field
    takes its default.

    Args:
        kind: The record's class, a dataclass.
        value: The JSON.
        where: What the place that an error names begins with.

    Raises:
        RecordError: The JSON describes no such record; the error names the place.
    """
    result: T = _decode(kind, value, where or kind.__name__)
    return result


def decode_rows(kind: type[T], rows: Any, where: str) -> tuple[T, ...]:
    """Returns records from arrays of their fields' values, in order: for documents of thousands of
    them.

    Args:
        kind: The records' class, of which every field is a str, int, float, bool or None.
        rows: The arrays, as JSON.
        where: What the place that an error names begins with.

    Raises:
        RecordError: The JSON describes no such records; the error names the place.
    """
    record: type = kind
    names, plain = _plain_fields(record)
    if not isinstance(rows, list):
        raise RecordError(f"{where}: an array was expected, not {_name(rows)}")
    if _are_plain(rows, plain):
        make = partial(_by_name, kind, names) if _by_name_only(record) else kind
        return tuple(starmap(make, rows))
    records = []
    for index, row in enumerate(rows):
        if type(row) is list and len(row) == len(names):
            records.append(decode(kind, dict(zip(names, row, strict=True)), f"{where}[{index}]"))
        else:
            raise RecordError(f"{where}[{index}]: {len(names)} values were expected")
    return tuple(records)


def _are_plain(rows: list[Any], plain: tuple[type, ...]) -> bool:
    """Returns whether each value has exactly the type of its field."""
    if set(map(type, rows)) != {list} or set(map(len, rows)) != {len(plain)}:
        return False
    columns = zip(zip(*rows, strict=True), plain, strict=True)
    return all(set(map(type, column)) == {hint} for column, hint in columns)


def _by_name(kind: type[T], names: tuple[str, ...], *row: Any) -> T:
    return kind(**dict(zip(names, row, strict=True)))


@cache
def _by_name_only(kind: type) -> bool:
    return any(f.kw_only for f in dataclasses.fields(kind))


@cache
def _names(kind: type) -> tuple[str, ...]:
    first: tuple[str, ...] = getattr(kind, "FIELDS_FIRST", ())
    names = (f.name for f in dataclasses.fields(kind) if f.init)
    return tuple(dict.fromkeys([*first, *names]))


@cache
def _omitted_defaults(kind: type) -> Mapping[str, Any]:
    return {f.name: f.default for f in dataclasses.fields(kind) if "omit_default" in f.metadata}


@cache
def _plain_fields(kind: type) -> tuple[tuple[str, ...], tuple[type, ...]]:
    """Returns the names and types of the fields, in order."""
    return tuple(name for name, _, _ in _fields(kind)), tuple(hint for _, hint, _ in _fields(kind))


@cache
def _fields(kind: type) -> tuple[tuple[str, Any, bool], ...]:
    hints = typing.get_type_hints(kind)
    return tuple(
        (
            f.name,
            hints[f.name],
            f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING,
        )
        for f in dataclasses.fields(kind)
        if f.init
    )


def _decode(kind: Any, value: Any, where: str) -> Any:
    if kind is Any or (type(value) is kind and kind in PLAIN):
        return value
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _decode_dataclass(kind, value, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        if value not in arguments:
            raise RecordError(f"{where}: {value!r} is not one of {', '.join(map(repr, arguments))}")
        return value
    if origin in (Union, types.UnionType):
        return _decode_union(arguments, value, where)
    if origin is tuple:
        return _decode_tuple(arguments, value, where)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise RecordError(f"{where}: an object was expected, not {_name(value)}")
        return {key: _decode(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is None or kind is type(None):
        if value is not None:
            raise RecordError(f"{where}: null was expected, not {_name(value)}")
        return None
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise RecordError(f"{where}: {kind.__name__} was expected, not {_name(value)}")
    return value


def _decode_dataclass(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise RecordError(f"{where}: an object was expected, not {_name(value)}")
    fields: dict[str, Any] = {}
    for name, hint, required in _fields(kind):
        if name in value:
            fields[name] = _decode(hint, value[name], f"{where}.{name}")
        elif required:
            raise RecordError(f"{where}.{name} is missing")
    try:
        return kind(**fields)
    except RecordError:
        raise
    except ValueError as error:
        raise RecordError(f"{where}: {error}") from None


def _decode_union(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    complaints = []
    for kind in kinds:
        try:
            return _decode(kind, value, where)
        except RecordError as error:
            complaints.append(str(error))
    raise RecordError(complaints[0])


def _decode_tuple(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    if not isinstance(value, (list, tuple)):
        raise RecordError(f"{where}: an array was expected, not {_name(value)}")
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(_decode(kinds[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if len(value) != len(kinds):
        raise RecordError(f"{where}: {len(kinds)} items were expected, not {len(value)}")
    return tuple(
        _decode(kind, item, f"{where}[{i}]")
        for i, (kind, item) in enumerate(zip(kinds, value, strict=True))
    )


def _name(value: Any) -> str:
    return "null" if value is None else f"{type(value).__name__} {value!r:.60}"
