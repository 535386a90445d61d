"""Records to JSON and back, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticzero.serialization import (
    OMIT_DEFAULT,
    RecordError,
    Rows,
    column,
    decode,
    decode_rows,
    encode,
    encode_rows,
    field_values,
    parse_json,
)


@dataclass(frozen=True)
class Inner:
    name: str
    size: int = 0

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"size {self.size} is negative")


@dataclass(frozen=True)
class Outer:
    kind: Literal["a", "b"]
    parts: tuple[Inner, ...]
    pair: tuple[int, str]
    ratio: float
    chosen: Inner | None
    table: Mapping[str, int]
    free: Any
    derived: int = field(init=False, default=0)


@dataclass(frozen=True)
class Grown(Inner):
    stream: Any = field(default=None, metadata=OMIT_DEFAULT)


@dataclass(frozen=True, kw_only=True)
class Base:
    name: str
    size: int = field(default=0, metadata=OMIT_DEFAULT)


@dataclass(frozen=True, kw_only=True)
class Ordered(Base):
    FIELDS_FIRST = ("rank", "part", "size")
    rank: int
    part: Grown | None = None


GOOD = {
    "kind": "a",
    "parts": [{"name": "x", "size": 1}],
    "pair": [1, "one"],
    "ratio": 1.5,
    "chosen": None,
    "table": {"k": 2},
    "free": [1, {"x": None}],
}

inners = st.builds(Inner, st.text(), st.integers(0))
outers = st.builds(
    Outer,
    st.sampled_from(["a", "b"]),
    st.lists(inners).map(tuple),
    st.tuples(st.integers(), st.text()),
    st.floats(allow_nan=False),
    st.none() | inners,
    st.dictionaries(st.text(), st.integers()),
    st.recursive(st.none() | st.booleans() | st.text(), st.lists, max_leaves=4),
)


@given(outers)
def test_a_record_survives_json(record: Outer) -> None:
    assert decode(Outer, json.loads(json.dumps(encode(record)))) == record


def test_fields_of_a_newer_writer_are_ignored() -> None:
    assert decode(Inner, {"name": "x", "colour": "red"}) == Inner("x", 0)


@dataclass(frozen=True)
class Worded:
    kind: Literal["other", "a", "b"]
    size: int | None = None
    ratio: float = 0.0


@pytest.mark.parametrize(("word", "read"), [("a", "a"), ("other", "other"), ("new", "other")])
def test_an_unknown_word_is_other_where_it_may_be(word: str, read: str) -> None:
    """A later release may have more words: a rolling upgrade ends nothing."""
    assert decode(Worded, {"kind": word}).kind == read


@pytest.mark.parametrize("word", [None, 1, ["a"], {"a": 1}])
def test_what_is_no_word_is_not_other(word: Any) -> None:
    with pytest.raises(RecordError, match="is not one of 'other', 'a', 'b'"):
        decode(Worded, {"kind": word})


@pytest.mark.parametrize("field", ["size", "ratio"])
@pytest.mark.parametrize("number", [1 << 256, -(1 << 256), 10**4000])
def test_an_integer_without_a_float_is_refused(field: str, number: int) -> None:
    """It ended in an OverflowError wherever it was first divided."""
    with pytest.raises(RecordError, match=f"Worded.{field}"):
        decode(Worded, {"kind": "a", field: number})
    with pytest.raises(RecordError, match="smaller integer"):
        decode_rows(Row, [["a", 1, 0.5], ["a", number, 0.5]], "rows")
    assert decode(Worded, {"kind": "a", field: number // 2 // abs(number) or 1})


@pytest.mark.parametrize("deep", ["[" * 900 + "]" * 900, '{"a":' * 900 + "1" + "}" * 900])
def test_a_deep_value_is_named_in_brief(deep: str) -> None:
    with pytest.raises(RecordError, match=r"Worded\.size: int was expected, not") as caught:
        decode(Worded, {"kind": "a", "size": json.loads(deep)})
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not json",
        b"\xff",
        b"{",
        b"[" * 100_000,
        b"1" * 5000,
        b"\xef\xbb\xbf1",
        "1".encode("utf-16"),
    ],
    ids=range(8),
)
def test_bytes_that_are_no_json_are_refused_by_name(data: bytes) -> None:
    with pytest.raises(RecordError, match="here: no JSON: ") as caught:
        parse_json(data, "here")
    assert len(str(caught.value)) < 200


def test_a_derived_field_is_neither_written_nor_read() -> None:
    assert "derived" not in encode(decode(Outer, GOOD | {"derived": 5}))


def test_a_record_that_extends_another_has_its_own_order() -> None:
    whole = Ordered(rank=1, name="x", size=2)
    assert json.dumps(encode(whole)) == '{"rank": 1, "part": null, "size": 2, "name": "x"}'
    assert decode(Ordered, encode(whole)) == whole
    assert Ordered(rank=1, **field_values(Base(name="x", size=2))) == whole


def test_a_complete_record_has_its_defaults_at_every_depth() -> None:
    short = Ordered(rank=1, name="x", part=Grown("y"))
    assert encode(short) == {"rank": 1, "part": {"name": "y", "size": 0}, "name": "x"}
    complete = encode(short, complete=True)
    assert complete == encode(short) | {"size": 0, "part": {"name": "y", "size": 0, "stream": None}}


def test_a_field_is_left_out_of_the_record_itself_alone() -> None:
    short = Ordered(rank=1, name="x", part=Grown("y"))
    assert encode(short, without=("name",)) == {"rank": 1, "part": {"name": "y", "size": 0}}


def test_an_integer_will_do_for_a_float() -> None:
    ratio = decode(Outer, GOOD | {"ratio": 2}).ratio
    assert isinstance(ratio, float)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"kind": "c"}, "Outer.kind: 'c' is not one of 'a', 'b'"),
        ({"parts": [{}]}, "Outer.parts[0].name is missing"),
        ({"parts": [{"name": 3}]}, "Outer.parts[0].name: str was expected, not int 3"),
        ({"parts": [{"name": "x", "size": True}]}, "size: int was expected, not bool"),
        ({"parts": [{"name": "x", "size": -1}]}, "Outer.parts[0]: size -1 is negative"),
        ({"parts": {}}, "Outer.parts: an array was expected"),
        ({"pair": [1]}, "Outer.pair: 2 items were expected, not 1"),
        ({"ratio": None}, "Outer.ratio: float was expected, not null"),
        ({"chosen": 4}, "Outer.chosen: an object was expected"),
        ({"table": {"k": "v"}}, "Outer.table.k: int was expected"),
        ({"table": []}, "Outer.table: an object was expected"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RecordError) as caught:
        decode(Outer, GOOD | change)
    assert complaint in str(caught.value)


def test_the_place_is_named_as_the_caller_says() -> None:
    with pytest.raises(RecordError, match="world: an object was expected, not null"):
        decode(Inner, None, "world")


@dataclass(frozen=True)
class Row:
    name: str
    size: int
    ratio: float


@dataclass(frozen=True)
class Tabled:
    rows: Sequence[Row]


@dataclass(frozen=True)
class Counted:
    name: str
    made: ClassVar[list[str]] = []

    def __post_init__(self) -> None:
        self.made.append(self.name)


def test_rows_are_the_records_they_stand_for() -> None:
    assert decode_rows(Row, [["a", 1, 0.5], ["b", 2, 3]], "here") == (
        Row("a", 1, 0.5),
        Row("b", 2, 3.0),
    )
    assert decode_rows(Row, [], "here") == ()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (None, "here: an array was expected"),
        ([["a", 1]], r"here\[0\]: 3 values"),
        ([["a", 1, 0.5], {"name": "b"}], r"here\[1\]: 3 values"),
        ([["a", True, 0.5]], r"here\[0\].size: int was expected"),
        ([["a", 1, 0.5], [None, 1, 0.5]], r"here\[1\].name: str was expected"),
    ],
)
def test_rows_that_are_not_are_refused(rows: Any, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        decode_rows(Row, rows, "here")


VALUES = st.lists(st.tuples(st.text(), st.integers(-5, 5), st.floats(allow_nan=False)))


@given(VALUES, st.integers(0, 2))
def test_rows_are_like_the_tuple_of_their_records(
    values: list[tuple[str, int, float]], absent: int
) -> None:
    """Some of the last fields may be in columns of their own."""
    records = tuple(Row(*row) for row in values)
    left = 3 - absent
    rest = [[row[index] for row in values] for index in range(left, 3)]
    rows = decode_rows(Row, [list(row[:left]) for row in values], "here", rest)
    assert rows == records
    assert records == rows
    assert (len(rows), bool(rows), repr(rows)) == (len(records), bool(records), repr(records))
    assert hash(rows) == hash(records)
    for index in range(-len(records), len(records)):
        assert decode_rows(Row, list(map(list, values)), "here")[index] == records[index]
        assert rows[index] == records[index] and rows[index:] == records[index:]
    assert list(column(rows, "size")) == list(column(records, "size"))
    without = ("size", "ratio")[2 - absent :]
    assert encode_rows(Row, rows, without) == [list(row[:left]) for row in values]
    assert encode(Tabled(rows)) == encode(Tabled(records))
    assert decode(Tabled, encode(Tabled(rows))) == Tabled(records)


def test_rows_differ_from_what_has_other_records() -> None:
    rows = decode_rows(Row, [["a", 1, 0.5]], "here")
    assert isinstance(rows, Rows)
    for other in ((), (Row("b", 1, 0.5),), (Row("a", 1, 0.5),) * 2, "a", None):
        assert rows != other
    with pytest.raises(IndexError):
        rows[1]


def test_a_record_of_rows_is_made_when_it_is_asked_for() -> None:
    rows = decode_rows(Counted, [["a"], ["b"], ["c"]], "here")
    assert list(column(rows, "name")) == ["a", "b", "c"]
    assert Counted.made == []
    assert rows[1].name == "b"
    assert Counted.made == ["b"]
    assert [row.name for row in rows] == [row.name for row in rows] == ["a", "b", "c"]
    assert Counted.made == ["b", "a", "b", "c"], "each record is made once, then kept"
    assert rows[0] is rows[0]


def test_a_new_field_is_written_only_where_it_says_something() -> None:
    """So the records of two releases, and their digests, are equal where both can make them."""
    assert encode(Grown("a")) == encode(Inner("a"))
    assert encode(Grown("a", stream=[0])) == {**encode(Inner("a")), "stream": [0]}
    for grown in (Grown("a"), Grown("a", stream=[0])):
        assert decode(Grown, encode(grown)) == grown
