"""Reads the pickles that torch writes, and runs nothing that they name.

A pickle is a program for a stack machine. This machine has the instructions that torch's files
need and refuses all others. Names become stand-ins from a table. Time and memory stay within a
multiple of the file's size: the reader believes no length, index or nesting in the file. It counts
a tuple with all that the tuple holds, because hashing or comparing one visits every part again.

Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_MAX_PARTS = 64
"""Maximum number of arguments of a record; torch writes few."""
_MAX_OBJECTS = 20_000_000
"""Maximum number of containers and records in one file."""
_MAX_INT_BYTES = 64
_VISITS_PER_BYTE = 16
"""Maximum number of parts of tuples that may be hashed for each byte of the file."""

(
    _PROTO, _FRAME, _STOP, _MARK, _POP, _POP_MARK, _EMPTY_DICT, _EMPTY_LIST, _EMPTY_TUPLE,
    _APPEND, _APPENDS, _SETITEM, _SETITEMS, _TUPLE, _TUPLE1, _TUPLE2, _TUPLE3, _NONE, _NEWTRUE,
    _NEWFALSE, _BININT, _BININT1, _BININT2, _LONG1, _BINFLOAT, _SHORT_BINUNICODE, _BINUNICODE,
    _BINUNICODE8, _SHORT_BINBYTES, _BINBYTES, _MEMOIZE, _BINPUT, _LONG_BINPUT, _BINGET,
    _LONG_BINGET, _GLOBAL, _STACK_GLOBAL, _REDUCE, _NEWOBJ, _BUILD, _BINPERSID, _EMPTY_SET,
    _ADDITEMS, _FROZENSET, _NEWOBJ_EX, _BINBYTES8, _BYTEARRAY8,
) = (
    b"\x80\x95.(01}])aesut\x85\x86\x87N\x88\x89JKM\x8aG\x8cX\x8dCB\x94qrhjc\x93R\x81bQ\x8f\x90\x91\x92\x8e\x96"
)  # fmt: skip
_TEXTS = {_SHORT_BINUNICODE: 1, _BINUNICODE: 4, _BINUNICODE8: 8}
_BYTES = {_SHORT_BINBYTES: 1, _BINBYTES: 4, _BINBYTES8: 8, _BYTEARRAY8: 8}
_CONSTANTS = {_NONE: None, _NEWTRUE: True, _NEWFALSE: False}
_TUPLES = {_EMPTY_TUPLE: 0, _TUPLE1: 1, _TUPLE2: 2, _TUPLE3: 3}
_INTS = {_BININT1: 1, _BININT2: 2}
_PUTS = {_BINPUT: 1, _LONG_BINPUT: 4}
_GETS = {_BINGET: 1, _LONG_BINGET: 4}


class InertRecord:
    """Stands for an object: it keeps the arguments and state of the object and does nothing."""

    parts: tuple[Any, ...] = ()

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__ = state
        else:
            self.parts = state if isinstance(state, tuple) else (state,)


class Size:
    """Stands for `torch.Size`; the value becomes its tuple of sizes."""


class Mapped:
    """Stands for a class of dicts; the value becomes a dict, without the attributes of its own."""


@dataclass(frozen=True, slots=True)
class Constructor:
    """Stands for a function or a class; `make` is a function of ours that makes an inert value."""

    make: Callable[..., Any]


@dataclass(frozen=True, slots=True, eq=False)
class Opaque:
    """Stands for a name, and for all objects of that name: it has the name and holds nothing."""

    name: str
    refused: bool = False
    """True: the name is in no table."""


StandIn = type[InertRecord] | type[Size] | type[Mapped] | Constructor | Opaque | str
"""The stand-in for a name in the pickle."""

_SET, _FROZEN_SET = Opaque("builtins.set"), Opaque("builtins.frozenset")


def read_pickle(
    data: bytes,
    find: Callable[[str, str], StandIn],
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Returns the value in a pickle.

    Args:
        data: The pickle.
        find: Returns the stand-in for a module and a name, or raises.
        persistent: Returns the value that an identifier of something outside of the pickle stands
            for; None: there are no such identifiers.

    Raises:
        ValueError: The pickle cannot be torch's metadata; instead of this error there may be
            `IndexError`, `KeyError`, `TypeError` or `struct.error`.
    """
    return _Machine(data, find, persistent).run()


class _Machine:
    """Runs a pickle with a stack, a memo and a position."""

    def __init__(
        self,
        data: bytes,
        find: Callable[[str, str], StandIn],
        persistent: Callable[[Any], Any] | None,
    ) -> None:
        self._data = data
        self._find = find
        self._persistent = persistent
        self._position = 0
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []
        """The stacks below each mark."""
        self._memo: dict[int, Any] = {}
        self._tuples: dict[int, tuple[int, Any]] = {}
        """The number of parts of each tuple with all that is in it, by identity. The tuple is kept
        so that its identity stays its own."""
        self._made = 0
        self._visits_left = _VISITS_PER_BYTE * len(data) + 1000
        self._instructions: Mapping[int, Callable[[], None]] = {
            _PROTO: lambda: self._skip(1),
            _FRAME: lambda: self._skip(8),
            _MARK: self._mark,
            _POP: self._pop,
            _POP_MARK: lambda: self._discard(self._marked()),
            _EMPTY_DICT: lambda: self._make({}),
            _EMPTY_LIST: lambda: self._make([]),
            _APPEND: lambda: self._append([self._stack.pop()]),
            _APPENDS: lambda: self._append(self._marked()),
            _SETITEM: lambda: self._set([self._stack.pop(-2), self._stack.pop()]),
            _SETITEMS: lambda: self._set(self._marked()),
            _TUPLE: lambda: self._make_tuple(self._marked()),
            _BININT: lambda: self._push(self._int(4, signed=True)),
            _LONG1: self._long,
            _BINFLOAT: lambda: self._push(struct.unpack(">d", self._take(8))[0]),
            _MEMOIZE: lambda: self._put(len(self._memo)),
            _GLOBAL: lambda: self._name(self._line(), self._line()),
            _STACK_GLOBAL: lambda: self._name(self._stack.pop(-2), self._stack.pop()),
            _REDUCE: lambda: self._call(self._stack.pop(-2), self._stack.pop()),
            _NEWOBJ: lambda: self._call(self._stack.pop(-2), self._stack.pop()),
            _NEWOBJ_EX: self._new_with_keywords,
            _BUILD: self._build,
            _BINPERSID: lambda: self._refer(self._stack.pop()),
            _EMPTY_SET: lambda: self._push(_SET),
            _FROZENSET: lambda: self._replace(self._marked(), _FROZEN_SET),
            _ADDITEMS: lambda: self._append(self._marked()),
        }

    def run(self) -> Any:
        data, push = self._data, self._push
        while True:
            code = data[self._position]
            self._position += 1
            if code == _STOP:
                return self._stack.pop()
            if code in self._instructions:
                self._instructions[code]()
            elif code in _GETS:
                push(self._memo[self._int(_GETS[code])])
            elif code in _PUTS:
                self._put(self._int(_PUTS[code]))
            elif code in _TEXTS:
                push(self._take(self._int(_TEXTS[code])).decode("utf-8", "surrogatepass"))
            elif code in _INTS:
                push(self._int(_INTS[code]))
            elif code in _TUPLES:
                self._make_tuple([self._stack.pop() for _ in range(_TUPLES[code])][::-1])
            elif code in _CONSTANTS:
                push(_CONSTANTS[code])
            elif code in _BYTES:
                push(self._take(self._int(_BYTES[code])))
            else:
                raise ValueError(
                    f"byte {self._position - 1} is {code:#04x}, which torch does not write"
                )

    def _skip(self, count: int) -> None:
        self._take(count)

    def _take(self, count: int) -> bytes:
        stop = self._position + count
        if stop > len(self._data):
            raise ValueError(f"it ends before byte {stop}")
        data = self._data[self._position : stop]
        self._position = stop
        return data

    def _line(self) -> str:
        stop = self._data.index(b"\n", self._position)
        text = self._take(stop - self._position).decode()
        self._position += 1
        return text

    def _int(self, count: int, *, signed: bool = False) -> int:
        return int.from_bytes(self._take(count), "little", signed=signed)

    def _long(self) -> None:
        count = self._int(1)
        if count > _MAX_INT_BYTES:
            raise ValueError(f"an integer of {count} bytes")
        self._push(self._int(count, signed=True))

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop(self) -> None:
        self._stack.pop()

    def _discard(self, _: list[Any]) -> None:
        """Drops the values above the last mark."""

    def _replace(self, _: list[Any], value: Any) -> None:
        """Pushes a value in the place of the values above the last mark."""
        self._push(value)

    def _mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _marked(self) -> list[Any]:
        """Returns the values above the last mark."""
        values, self._stack = self._stack, self._below.pop()
        return values

    def _make(self, value: Any) -> None:
        self._made += 1
        if self._made > _MAX_OBJECTS:
            raise ValueError(f"it has more than {_MAX_OBJECTS} objects")
        self._stack.append(value)

    def _make_tuple(self, items: list[Any]) -> None:
        made = tuple(items)
        size = 1 + sum(self._parts_of(item) for item in made)
        if size > len(self._data):
            raise ValueError("a tuple that holds others has more parts than the file has bytes")
        self._tuples[id(made)] = (size, made)
        self._make(made)

    def _parts_of(self, value: Any) -> int:
        return self._tuples[id(value)][0] if type(value) is tuple else 1

    def _append(self, items: list[Any]) -> None:
        into = self._stack[-1]
        if isinstance(into, Opaque):
            return
        if type(into) is not list:
            raise TypeError("a list is expected")
        into.extend(items)

    def _set(self, items: list[Any]) -> None:
        into = self._stack[-1]
        if isinstance(into, Opaque):
            return
        if type(into) is not dict:
            raise TypeError("a dict is expected")
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._visits_left -= self._parts_of(key)
            if self._visits_left < 0:
                raise ValueError("its keys have more parts than the file has bytes for")
            into[key] = value

    def _put(self, number: int) -> None:
        self._memo[number] = self._stack[-1]

    def _name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError("a name is expected")
        self._push(self._find(module, name))

    def _refer(self, identifier: Any) -> None:
        if self._persistent is None:
            raise ValueError("it refers to something outside of itself")
        self._make(self._persistent(identifier))

    def _new_with_keywords(self) -> None:
        keywords, arguments, stand_in = self._stack.pop(), self._stack.pop(), self._stack.pop()
        if keywords and not isinstance(stand_in, Opaque):
            raise ValueError("a record that is made with keywords")
        self._call(stand_in, arguments)

    def _call(self, stand_in: Any, arguments: Any) -> None:
        """Makes the value that a stand-in becomes; nothing that the file names is called."""
        if isinstance(stand_in, Opaque):
            self._make(stand_in)
            return
        if type(arguments) is not tuple or len(arguments) > _MAX_PARTS:
            raise ValueError(f"a record of {len(arguments)} parts")
        if stand_in is Size:
            (sizes,) = arguments or ((),)
            if type(sizes) is not tuple:
                raise TypeError("a size is not a tuple")
            self._push(sizes)
        elif stand_in is Mapped:
            made = [argument for argument in arguments if not isinstance(argument, Opaque)]
            if made not in ([], [{}]):
                raise ValueError("a dict that is made of something")
            self._make({})
        elif isinstance(stand_in, type) and issubclass(stand_in, InertRecord):
            record = stand_in()
            record.parts = arguments
            self._make(record)
        elif isinstance(stand_in, Constructor):
            self._make(stand_in.make(*arguments))
        else:
            raise TypeError("only records can be made")

    def _build(self) -> None:
        state, record = self._stack.pop(), self._stack[-1]
        if isinstance(record, Opaque) or type(record) is dict:
            return
        if not isinstance(record, InertRecord):
            raise TypeError("only records have a state")
        record.__setstate__(state)
