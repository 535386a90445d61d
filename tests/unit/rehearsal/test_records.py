"""What a worker writes for a rehearsal, and what is read of it."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from elasticzero.rehearsal.records import (
    Header,
    LiveValue,
    Moment,
    StepRecord,
    header_line,
    parse_lines,
    record_line,
)

TEXTS = st.text(max_size=12)
NUMBERS = st.floats(allow_nan=False)
VALUES = st.builds(LiveValue, TEXTS, TEXTS, TEXTS, TEXTS, st.lists(NUMBERS, max_size=8).map(tuple))
RECORDS = st.builds(
    StepRecord,
    st.integers(1, 9),
    st.integers(0, 9),
    st.integers(1, 9),
    st.integers(0, 99),
    st.sampled_from(Moment),
    NUMBERS.map(float.hex),
    st.just(""),
    st.lists(st.integers(0, 2**40), max_size=5).map(tuple),
    st.lists(VALUES, max_size=3).map(tuple),
    st.booleans(),
)


@given(st.lists(RECORDS, max_size=4), st.builds(Header, *[st.booleans()] * 3))
def test_what_is_written_is_read_again(records: list[StepRecord], header: Header) -> None:
    lines = [header_line(header), *map(record_line, records)]
    assert all(line.count("\n") == 1 for line in lines)
    assert parse_lines(lines) == (header, records)


def test_a_line_without_its_end_is_left_out() -> None:
    """A process that is killed as it writes leaves one."""
    record = StepRecord(1, 0, 2, 3, Moment.BOUNDARY)
    whole = record_line(record)
    assert parse_lines([whole, whole[:-1]])[1] == [record]


def test_a_file_without_a_header_says_nothing_of_the_script() -> None:
    assert parse_lines([]) == (Header(), [])


def test_sums_that_are_no_numbers_come_back() -> None:
    value = LiveValue("parameter", "w", "00", "float32[2]", (math.inf, math.nan))
    record = StepRecord(1, 0, 1, 1, Moment.BOUNDARY, live=(value,))
    _, [read] = parse_lines([record_line(record)])
    first, second = read.live[0].projections
    assert first == math.inf
    assert math.isnan(second)
