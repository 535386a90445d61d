"""Converts frozen dataclasses to JSON values and back, and checks every field.

Everything the project stores or sends is such a record: documents in etcd, messages between agent
and worker, manifests. A field may be a str, int, float, bool, None, a JSON value (`Any`), another
dataclass, a tuple, sequence or mapping of these, a `Literal`, or a union of them.

What comes from outside is a record or a `RecordError`, whatever its bytes are.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import starmap
from reprlib import repr as short_repr
from typing import Any, Literal, TypeVar, Union, overload

T = TypeVar("T")
Decoder = Callable[[Any, str], Any]
"""Makes a value from its JSON, at a place that an error names."""
PLAIN = frozenset({str, int, float, bool, type(None)})
"""The types whose values JSON holds unchanged."""
OMIT_DEFAULT = {"omit_default": True}
"""Metadata of a field that is stored only where it differs from its default.

An earlier release does not have the field. So records that both releases can make have equal bytes:
ranks of both compare digests of them."""
OTHER = "other"
"""The word of a `Literal` that stands for all that this release does not know: a later release may
have another word there, and its record is read nevertheless."""
MAX_INTEGER = 1 << 256
"""Integers in a record are smaller, and larger than its negative, so that each has a float."""


class RecordError(ValueError):
    """A JSON value is not the expected record; the message names the field."""


class Rows(Sequence[T]):
    """Holds records of one class by column, and makes a record when it is asked for.

    A document of thousands of records is read by thousands of processes, and most of them look at a
    few records. It equals the tuple of its records.
    """

    __slots__ = ("_columns", "_make", "_records")

    def __init__(self, kind: type[T], columns: Sequence[Sequence[Any]]) -> None:
        """Holds values that were checked before.

        Args:
            kind: Class of the records, which takes all of these values.
            columns: Values of each field, in the order of the fields; all are of one length.
        """
        record: type = kind
        names = _names(record)
        self._columns: Mapping[str, Sequence[Any]] = dict(zip(names, columns, strict=True))
        by_name = partial(_by_name, kind, names)
        self._make: Callable[..., T] = by_name if _by_name_only(record) else kind
        self._records: tuple[T, ...] | None = None
        """All records, once they were asked for."""

    def column(self, name: str) -> Sequence[Any]:
        """Returns the values of a field, in the order of the records."""
        return self._columns[name]

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...

    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        if self._records is not None:
            return self._records[index]
        values = (column[index] for column in self._columns.values())
        if isinstance(index, slice):
            return tuple(starmap(self._make, zip(*values, strict=True)))
        return self._make(*values)

    def __iter__(self) -> Iterator[T]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (Rows, tuple)):
            return NotImplemented
        return self is other or self._all() == tuple(other)

    def __hash__(self) -> int:
        return hash(self._all())

    def __repr__(self) -> str:
        return repr(self._all())

    def _all(self) -> tuple[T, ...]:
        if self._records is None:
            self._records = tuple(starmap(self._make, zip(*self._columns.values(), strict=True)))
        return self._records


def column(records: Sequence[Any], name: str) -> Sequence[Any]:
    """Returns the values of a field of some records; of `Rows` no record is made for it.

    Args:
        records: The records.
        name: Name of the field.
    """
    if isinstance(records, Rows):
        return records.column(name)
    return [getattr(record, name) for record in records]


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
    if isinstance(record, (tuple, list, Rows)):
        return [encode(value, complete=complete) for value in record]
    return record


def encode_rows(
    kind: type, records: Sequence[Any], without: Collection[str] = ()
) -> list[list[Any]]:
    """Returns the arrays from which `decode_rows` makes records.

    Args:
        kind: The records' class, of which every field is a str, int, float, bool or None.
        records: The records.
        without: Names of fields that the arrays lack.
    """
    names = [name for name in _names(kind) if name not in without]
    return list(map(list, zip(*(column(records, name) for name in names), strict=True)))


def field_values(record: Any) -> dict[str, Any]:
    """Returns the values of a record's fields by name, as they are."""
    kind: type = type(record)
    return {name: getattr(record, name) for name in _names(kind)}


def parse_json(data: bytes, where: str) -> Any:
    """Returns the value of a JSON text in UTF-8.

    Args:
        data: The text, which may be anything.
        where: What an error begins with.

    Raises:
        RecordError: The bytes are no such text.
    """
    try:
        return json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{where}: no JSON: {error!s:.100}") from None


def decode(kind: type[T], value: Any, where: str = "") -> T:
    """Returns the record of type `kind` that the JSON `value` describes.

    Unknown fields are ignored, so that documents of a newer version can be read; a missing field
    takes its default. An unknown word is `OTHER` where the field may be that.

    Args:
        kind: The record's class, a dataclass.
        value: The JSON.
        where: What the place that an error names begins with.

    Raises:
        RecordError: The JSON describes no such record; the error names the place.
    """
    record: Any = kind
    result: T = _decoder(record)(value, where or record.__name__)
    return result


def decode_rows(
    kind: type[T], rows: Any, where: str, rest: Sequence[Sequence[Any]] = ()
) -> Sequence[T]:
    """Returns records from arrays of their fields' values, in order: for documents of thousands of
    them.

    Every value is checked now. The records are made when they are asked for (`Rows`).

    Args:
        kind: The records' class, of which every field is a str, int, float, bool or None.
        rows: The arrays, as JSON.
        where: What the place that an error names begins with.
        rest: Values of the last fields, which the arrays lack: a column for each field, as long as
            `rows`, of values that were checked before.

    Raises:
        RecordError: The JSON describes no such records; the error names the place.
    """
    record: type = kind
    names, plain = _plain_fields(record)
    if not isinstance(rows, list):
        raise RecordError(f"{where}: an array was expected, not {_name(rows)}")
    length = len(names) - len(rest)
    if set(map(type, rows)) == {list} and set(map(len, rows)) == {length}:
        columns = tuple(zip(*rows, strict=True))
        if _are_plain(columns, plain[:length]):
            return Rows(kind, (*columns, *rest))
    records = []
    for index, row in enumerate(rows):
        if type(row) is not list or len(row) != length:
            raise RecordError(f"{where}[{index}]: {length} values were expected")
        values = (*row, *(column[index] for column in rest))
        records.append(decode(kind, dict(zip(names, values, strict=True)), f"{where}[{index}]"))
    return tuple(records)


def _are_plain(columns: Sequence[Sequence[Any]], plain: tuple[type, ...]) -> bool:
    """Returns whether each value has exactly the type of its field."""
    return all(
        set(map(type, column)) == {hint}
        and (hint is not int or (_fits(max(column)) and _fits(min(column))))
        for column, hint in zip(columns, plain, strict=True)
    )


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


@cache
def _decoder(kind: Any) -> Decoder:
    """Returns the function that makes a value of this type from its JSON."""
    if kind is Any:
        return _decode_any
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return partial(_decode_dataclass, kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return partial(_decode_word, arguments)
    if origin in (Union, types.UnionType):
        return partial(_decode_union, arguments)
    if origin is tuple and not (len(arguments) == 2 and arguments[1] is Ellipsis):
        return partial(_decode_tuple, tuple(map(_decoder, arguments)))
    if origin in (tuple, Sequence):
        return partial(_decode_array, arguments[0])
    if origin is not None and issubclass(origin, Mapping):
        return partial(_decode_mapping, arguments[1])
    if kind is None or kind is type(None):
        return _decode_null
    return partial(_decode_plain, kind)


def _decode_any(value: Any, where: str) -> Any:
    return value


def _decode_null(value: Any, where: str) -> None:
    if value is not None:
        raise RecordError(f"{where}: null was expected, not {_name(value)}")


def _decode_word(choices: tuple[Any, ...], value: Any, where: str) -> Any:
    if value in choices:
        return value
    if OTHER in choices and isinstance(value, str):
        return OTHER
    raise RecordError(f"{where}: {value!r} is not one of {', '.join(map(repr, choices))}")


def _decode_plain(kind: Any, value: Any, where: str) -> Any:
    """Returns a str, int, float or bool; an integer will do for a float."""
    chosen = (int, float) if kind is float else kind
    if not isinstance(value, chosen) or (isinstance(value, bool) and kind is not bool):
        raise RecordError(f"{where}: {kind.__name__} was expected, not {_name(value)}")
    if type(value) is int and not _fits(value):
        raise RecordError(f"{where}: a smaller integer was expected, not {_name(value)}")
    return float(value) if kind is float else value


def _decode_dataclass(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise RecordError(f"{where}: an object was expected, not {_name(value)}")
    fields: dict[str, Any] = {}
    for name, hint, required in _fields(kind):
        if name in value:
            item = value[name]
            if type(item) is hint and hint is not int:  # most are: no place is named for it
                fields[name] = item
            else:
                fields[name] = _decoder(hint)(item, f"{where}.{name}")
        elif required:
            raise RecordError(f"{where}.{name} is missing")
    try:
        return kind(**fields)
    except RecordError:
        raise
    except ValueError as error:
        raise RecordError(f"{where}: {error}") from None


def _decode_union(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    complaints = []
    for kind in kinds:
        try:
            return _decoder(kind)(value, where)
        except RecordError as error:
            complaints.append(str(error))
    raise RecordError(complaints[0])


def _decode_mapping(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise RecordError(f"{where}: an object was expected, not {_name(value)}")
    make = _decoder(kind)
    return {
        key: item if type(item) is kind and kind not in PLAIN else make(item, f"{where}.{key}")
        for key, item in value.items()
    }


def _decode_array(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, (list, tuple)):
        raise RecordError(f"{where}: an array was expected, not {_name(value)}")
    if kind is str and set(map(type, value)) == {str}:
        return tuple(value)
    make = _decoder(kind)
    return tuple(make(item, f"{where}[{i}]") for i, item in enumerate(value))


def _decode_tuple(decoders: tuple[Decoder, ...], value: Any, where: str) -> Any:
    if not isinstance(value, (list, tuple)):
        raise RecordError(f"{where}: an array was expected, not {_name(value)}")
    if len(value) != len(decoders):
        raise RecordError(f"{where}: {len(decoders)} items were expected, not {len(value)}")
    pairs = zip(decoders, value, strict=True)
    return tuple(make(item, f"{where}[{i}]") for i, (make, item) in enumerate(pairs))


def _fits(value: int) -> bool:
    return -MAX_INTEGER < value < MAX_INTEGER


def _name(value: Any) -> str:
    """Returns the type of a value, and its beginning."""
    if value is None:
        return "null"
    return f"{type(value).__name__} {short_repr(value):.60}"
