"""Numbers, durations and shares as text."""

from __future__ import annotations

import ast
import logging

import pytest

from elasticzero.log_output import MessageHandler
from elasticzero.text import (
    colored,
    many_text,
    number_text,
    print_foreign,
    printable,
    share_text,
    shortened,
    span_text,
    with_short_lines,
)
from tests.conftest import ROOT

ATTACKS = (
    "\x1b]0;a title\x07",
    "\x1b[2J\x1b[1;1Hcleared",
    "\x1b]52;c;Y3VybA==\x07",
    "back\x08\x08\x7f",
    "over\rwritten",
    "\x9b31mof one byte",
    "\u202eright to left",
    "\x1bPdevice\x1b\\",
)


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


@pytest.mark.parametrize("text", ATTACKS)
def test_a_terminal_gets_nothing_that_it_would_obey(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    print_foreign(f"error: {text}", start="\r\x1b[K")
    shown = capsys.readouterr().err
    assert shown.startswith("\r\x1b[Kerror: ") and shown.endswith("\n")
    assert shown[len("\r\x1b[K") : -1].isprintable()
    assert colored(text).replace("\x1b[31m", "").isprintable()


def test_output_of_a_script_keeps_its_colors_and_tabs() -> None:
    """A color that it leaves on ends with the line."""
    assert colored("a plain line\twith a tab") == "a plain line\twith a tab"
    assert colored("\x1b[1;32mgreen\x1b[0m") == "\x1b[1;32mgreen\x1b[0m\x1b[0m"
    assert colored("\x1b[31mred \x1b[2J") == "\x1b[31mred \\x1b[2J\x1b[0m"


def test_lines_of_the_log_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    """One script's exception reached the terminals of all nodes as it was."""
    handler = MessageHandler()
    record = logging.LogRecord("x", logging.ERROR, "x.py", 1, "rank 1: %s", ("\x1b[2J\n",), None)
    handler.emit(record)
    assert capsys.readouterr().err == "rank 1: \\x1b[2J\n\n"


PRINTERS = {
    "elasticzero/text.py": "the one function, and what it is made of",
    "elasticzero/ops/cli/completion.py": "words for a shell, which are checked names",
    "launcher/workers/forking/server.py": "a script's own errors, into its own log",
    "launcher/workers/forking/script_exit.py": "a worker's own words, into its own log",
    "launcher/observability/console.py": "a bar of numbers",
    "elasticzero/cli/main.py": "a constant",
    "elasticzero/ops/doctor/machine_probes.py": "a program's JSON, for its parent",
}
"""Files that may call `print`, and what they print."""


def test_one_function_prints_the_words_of_others() -> None:
    paths = [
        path
        for package in ("elasticzero", "launcher", "checkpoint")
        for path in sorted((ROOT / package).rglob("*.py"))
        if not any(part.is_symlink() for part in (path, *path.parents))
    ]
    assert len(paths) > 200
    printing = {
        str(path.relative_to(ROOT))
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id == "print"
    }
    assert printing <= set(PRINTERS), "print the words of others by print_foreign"
    assert printable("x\x1b") == "x\\x1b"


def test_a_long_text_is_shortened_and_says_so() -> None:
    assert shortened("four", 4) == "four"
    assert shortened("abcdefg", 4) == "abcd... (3 characters more)"


def test_long_lines_are_shortened_and_the_others_are_kept() -> None:
    assert with_short_lines("a\nabcdefg\nb\n", 4) == "a\nabcd... (3 characters more)\nb\n"
    assert with_short_lines("a\nb\nc\nd\n", 4) == "a\nb\nc\nd\n"
