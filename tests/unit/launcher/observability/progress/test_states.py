"""Which line says what a job does now, and when a log needs one."""

from __future__ import annotations

import pytest

from elasticzero.launcher.observability.progress.states import (
    AGAIN_S,
    CHOICES,
    LastLine,
    Mode,
    Progress,
    Trains,
    Waits,
    is_due,
    line_text,
    mode_of,
    topic_of,
)

LOADS = Waits(what="loading torch", since_s=10.0)
NEW = Trains(step=1, stepped_s=100.0)
STEPS = Trains(step=120, stepped_s=100.0, total=939, loss=0.43214, steps_per_s=35.21)


@pytest.mark.parametrize(
    ("progress", "now_s", "text"),
    [
        (LOADS, 10.9, "loading torch"),
        (LOADS, 14.2, "loading torch (4 s)"),
        (LOADS, 135.0, "loading torch (2 min 5 s)"),
        (NEW, 100.1, "step 1"),
        (NEW, 106.0, "step 1  that was 6 s ago"),
        (STEPS, 100.1, "step 120/939  loss 0.4321  35.2 steps/s  23 s left"),
        (STEPS, 104.9, "step 120/939  loss 0.4321  35.2 steps/s  23 s left"),
        (
            Trains(step=939, stepped_s=1.0, total=939, steps_per_s=2.0),
            1.0,
            "step 939/939  2 steps/s",
        ),
        (Trains(step=3, stepped_s=1.0, steps_per_s=0.25), 9.0, "step 3  4 s a step"),
        (
            Trains(step=3, stepped_s=1.0, steps_per_s=0.25),
            42.0,
            "step 3  4 s a step  that was 41 s ago",
        ),
        (Trains(step=3, stepped_s=1.0, steps_per_s=2345.6), 1.0, "step 3  2346 steps/s"),
        (Trains(step=3, stepped_s=1.0, loss=float("nan")), 1.0, "step 3  loss nan"),
    ],
)
def test_one_line(progress: Progress, now_s: float, text: str) -> None:
    assert line_text(progress, now_s) == text


def test_a_bar_shows_which_part_is_done() -> None:
    assert line_text(STEPS, 100.0, with_bar=True).startswith(f"[{'#' * 3}{'.' * 27}] step 120/939")
    assert line_text(NEW, 100.0, with_bar=True) == "step 1"
    past = Trains(step=20, stepped_s=0.0, total=10)
    assert line_text(past, 0.0, with_bar=True) == f"[{'#' * 30}] step 20/10"


@pytest.mark.parametrize(
    ("progress", "last", "now_s", "due"),
    [
        (None, LastLine(), 0.0, False),
        (LOADS, LastLine(), 10.1, False),
        (LOADS, LastLine(), 10.6, True),
        (LOADS, LastLine("loading torch", 10.6), 40.0, False),
        (LOADS, LastLine("loading torch", 10.6), 10.6 + AGAIN_S, True),
        (LOADS, LastLine("waiting for etcd", 10.6), 10.6, True),
        (NEW, LastLine("loading torch", 99.0), 100.0, True),
        (NEW, LastLine("steps", 99.0), 100.0, False),
        (NEW, LastLine("steps", 70.0), 100.0, True),
        (Trains(step=1, stepped_s=1.0, leads=False), LastLine(), 100.0, False),
        (Trains(step=1, stepped_s=1.0, leads=False), LastLine("a wait", 99.9), 100.0, True),
        (Trains(step=1, stepped_s=1.0, leads=False), LastLine("steps", 1.0), 100.0, False),
    ],
)
def test_a_log_has_a_line_at_once_and_then_every_30_s(
    progress: Progress | None, last: LastLine, now_s: float, due: bool
) -> None:
    assert is_due(progress, last, now_s) is due


def test_each_wait_is_a_topic_of_its_own_and_steps_are_one() -> None:
    assert topic_of(LOADS) == "loading torch"
    assert topic_of(NEW) == topic_of(STEPS) == "steps"


@pytest.mark.parametrize(
    ("choice", "environment", "terminal", "pipe", "as_json", "mode"),
    [
        ("auto", {"TERM": "xterm"}, True, False, False, "line"),
        ("auto", {"TERM": "xterm", "CI": "false"}, True, False, False, "line"),
        ("auto", {"TERM": "xterm", "NO_COLOR": "1"}, True, False, False, "line"),
        ("auto", {"TERM": "xterm", "CI": "true"}, True, False, False, "log"),
        ("auto", {"TERM": "dumb"}, True, False, False, "log"),
        ("auto", {}, True, False, False, "log"),
        ("auto", {"TERM": "xterm"}, False, False, False, "log"),
        ("auto", {"TERM": "xterm"}, True, True, False, "log"),
        ("auto", {"TERM": "xterm"}, True, False, True, "log"),
        ("line", {"CI": "true"}, False, True, True, "line"),
        ("log", {"TERM": "xterm"}, True, False, False, "log"),
        ("off", {"TERM": "xterm"}, True, False, False, "off"),
    ],
)
def test_a_line_moves_where_a_terminal_can_show_it(
    choice: str,
    environment: dict[str, str],
    terminal: bool,
    pipe: bool,
    as_json: bool,
    mode: Mode,
) -> None:
    assert choice in CHOICES
    shown = mode_of(
        choice, environment, error_is_terminal=terminal, output_is_pipe=pipe, as_json=as_json
    )
    assert shown == mode
