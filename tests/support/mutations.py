"""Mutations of bytes that somebody might find where ours were written, for fuzz tests."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

TOKENS = (
    *(b'"', b"{", b"}", b"[", b"]", b",", b":", b"-", b"1e999", b"NaN", b"Infinity", b"\0"),
    *(b"9" * 5000, b"null", b"true", b'"dtype"', b'"shape"', b"\\ud800", b"\xff", b"[" * 2000),
)
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 65536, 1 << 31, 1 << 64, -(1 << 64), 10**300, 10**4000),
    *(0.0, -0.5, 1e308, float("inf"), float("nan"), "", "a", "\0", "\ud800", "\n", "\x1b[2J", "é"),
    *("a" * 300, "..", "::1", "other", [], {}, [[]], [None] * 3, {"": 0}, [[0, 0]]),
)
"""Values of JSON that are seldom right."""


@st.composite
def mutated(draw: st.DrawFn, whole: bytes, texts: Sequence[bytes]) -> bytes:
    """`whole` with a few bytes changed, cut out, put in, or taken from one of `texts`."""
    data = whole
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        stop = draw(st.integers(start, min(len(data), start + 40)))
        match draw(st.sampled_from(["flip", "cut", "end", "splice", "token", "bytes"])):
            case "flip" if start < len(data):
                bit = 1 << draw(st.integers(0, 7))
                data = data[:start] + bytes([data[start] ^ bit]) + data[start + 1 :]
            case "cut":
                data = data[:start] + data[stop:]
            case "end":
                data = data[:start]
            case "splice":
                other = draw(st.sampled_from(texts))
                at = draw(st.integers(0, len(other)))
                data = data[:start] + other[at : at + draw(st.integers(0, 200))] + data[stop:]
            case "token":
                data = data[:start] + draw(st.sampled_from(TOKENS)) + data[stop:]
            case _:
                data = data[:start] + draw(st.binary(max_size=12)) + data[stop:]
    return data


@st.composite
def with_odd_values(draw: st.DrawFn, whole: bytes) -> bytes:
    """The JSON `whole` with a few of its values left out, or replaced by odd ones."""
    value = json.loads(whole)
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(value))
        if not places:
            break
        container, key = draw(st.sampled_from(places))
        if draw(st.integers(0, 4)):
            container[key] = copy.deepcopy(draw(st.sampled_from(ODD)))
        else:
            del container[key]
    return json.dumps(value).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields each container within a value, with each of its keys or indices."""
    keys: Any = ()
    if isinstance(value, dict):
        keys = value.keys()
    elif isinstance(value, list):
        keys = range(len(value))
    for key in keys:
        yield value, key
        yield from _places(value[key])
