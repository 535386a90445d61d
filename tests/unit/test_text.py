"""Numbers, durations and shares as text."""

from __future__ import annotations

import pytest

from elasticzero.text import many_text, number_text, share_text, span_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (0.00042, "0.42 ms"),
        (0.0312, "31.2 ms"),
        (0.35, "0.35 s"),
        (41.23, "41.2 s"),
        (59.97, "1 min"),
        (125.0, "2 min 5 s"),
        (11520.0, "3 h 12 min"),
        (90000.0, "1 d 1 h"),
        (-2.0, "-2 s"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert span_text(seconds) == text


def test_shares() -> None:
    assert [share_text(s) for s in (0.0, 0.0004, 0.714, 1.0)] == [
        "0.0%",
        "<0.1%",
        "71.4%",
        "100.0%",
    ]


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (2.45291, 4, "2.453"),
        (2.45291, 3, "2.45"),
        (12000.0, 3, "12,000"),
        (0.0000123456, 4, "1.235e-05"),
        (-1.5, 4, "-1.5"),
    ],
)
def test_numbers(value: float, digits: int, text: str) -> None:
    assert number_text(value, digits) == text


def test_counts() -> None:
    assert [many_text(count, "step") for count in (0, 1, 2000)] == [
        "0 steps",
        "1 step",
        "2,000 steps",
    ]
