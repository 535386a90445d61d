"""The screen of `elasticzero top`: the whole of it as text, and what must not break it."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from elasticzero.launcher.observability.job_status import collect_status, job_in_view
from elasticzero.ops.dashboard.screen import BLOCKS, bar_cells, job_screen, sparkline
from tools.sample_job import document

SCREENS = Path(__file__).parent / "screens"


def clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(at))


def drawn(status: dict[str, Any], width: int = 80, height: int | None = 24, **options: Any) -> str:
    screen = job_screen(status, width=width, height=height, clock=clock, **options)
    file = io.StringIO()
    console = Console(file=file, width=width, color_system=None, highlight=False, _environ={})
    console.print(screen)
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 48)])
def test_the_whole_screen(width: int, height: int, request: pytest.FixtureRequest) -> None:
    text = drawn(document(waiting=["node-6"]), width, height)
    path = SCREENS / f"{width}x{height}.txt"
    if request.config.getoption("--update"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()
    fits(text, width, height)


def fits(text: str, width: int, height: int) -> None:
    lines = text.splitlines()
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 20), (200, 60)])
def test_many_nodes_fit_and_those_in_trouble_come_first(width: int, height: int) -> None:
    names = [f"node-{i}" for i in range(100)]
    status = document(names)
    status["nodes"][77]["state"] = "gone"
    text = drawn(status, width, height)
    fits(text, width, height)
    assert len(text.splitlines()) >= height - 1
    lines = text.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("NODE"))
    rows = [line for line in lines[head:] if line.startswith("node-")]
    assert rows[0].startswith("node-77")
    assert f"and {100 - len(rows)} more nodes" in text
    assert "generation 6: 8 ranks on 4 nodes" in text, "events keep their place"


@pytest.mark.parametrize("width", [40, 80, 100, 160])
@pytest.mark.parametrize("height", [10, 24, 60])
def test_no_size_breaks_the_screen(width: int, height: int) -> None:
    lines = drawn(document(), width, height).splitlines()
    assert all(len(line) <= width for line in lines)
    assert len(lines) <= max(height, 14)


def test_names_and_messages_are_escaped() -> None:
    """A node's name may come from another's machine, a message from a script."""
    status = document()
    status["nodes"][0]["node"] = "\x1b[2Jnode[red]"
    status["job"] = "job\x07[bold]"
    status["reason"] = "rank 1 failed:\n\x1b]0;title\x07 [link=http://x]y[/link]"
    status["history"]["events"] = [[status["at"], "error", "\x1b[31mred\x1b[0m [blink]no[/blink]"]]
    text = drawn(status, 120)
    assert not any(ord(c) < 32 for c in text.replace("\n", ""))
    for shown in (
        "\\x1b[2Jnode[red]",
        "job\\x07[bold]",
        "[link=http://x]y[/link]",
        "\\x1b[31mred\\x1b[0m [blink]no[/blink]",
    ):
        assert shown in text


def test_a_job_of_which_only_etcd_is_known() -> None:
    status = {**collect_status(job_in_view("j", None), {}, {}), "at": 0.0}
    text = drawn(status, notes=["etcd at a:1 does not answer; trying again"])
    assert "j  ● waiting" in text
    assert "etcd at a:1 does not answer; trying again" in text
    assert "nothing yet" in text


def test_what_a_reader_must_know_is_said() -> None:
    status = document()
    status["leads"] = False
    status["control"] = {"drain": [{"node": "node-2"}], "nnodes": [1, 2], "stop": True}
    text = drawn(status)
    assert "no agent that leads the job answers node-0; this is what node-0 has seen" in text
    assert "operators asked for: drain node-2, scale 1:2, stop" in text
    status["done"] = {"outcome": "failed", "reason": "rank 1 failed"}
    assert "failed: rank 1 failed" in drawn(status)


def test_a_nodes_own_compute_time_is_shown_where_it_is_known() -> None:
    status = document()
    for node in status["nodes"]:
        node["compute_s"] = node["compute_ratio"] = None
    assert "COMPUTE" not in drawn(status)
    status["nodes"][1]["compute_s"] = 0.251
    lines = drawn(status).splitlines()
    column = next(line for line in lines if line.startswith("NODE")).index("COMPUTE")
    row = next(line for line in lines if line.startswith("node-2"))
    assert row[column:].split()[:2] == ["251", "ms"]
    status["nodes"][1]["compute_ratio"] = 1.42
    row = next(line for line in drawn(status).splitlines() if line.startswith("node-2"))
    assert row[column:].split()[:3] == ["251", "ms", "1.4x"]


def test_a_plain_script_has_no_steps() -> None:
    assert "has not called elasticzero.run" in drawn(document() | {"plain": True})


@pytest.mark.parametrize("width", [1, 7, 10, 80])
@pytest.mark.parametrize("shares", [[1.0], [0.5, 0.5], [0.9, 0.06, 0.03, 0.01], [1 / 7] * 7])
def test_a_bar_is_as_long_as_it_should_be(shares: list[float], width: int) -> None:
    cells = bar_cells(shares, width)
    assert sum(cells) == width
    assert all(abs(count - share * width) < 1 for count, share in zip(cells, shares, strict=True))


def test_a_curve_of_characters() -> None:
    assert sparkline([], 10) == sparkline([1.0], 10) == ""
    assert sparkline([3.0, 3.0], 10) == BLOCKS[0] * 2
    assert sparkline([float(i) for i in range(8)], 10) == BLOCKS
    assert len(sparkline([float(i) for i in range(1000)], 30)) == 30


ROUNDS = {
    "round": 12,
    "samples": 48,
    "total": 100,
    "given_back": 0,
    "is_over": False,
    "islands": [
        {"island": "node-0", "round": 12, "samples": 1600, "staleness": 0, "waiting": None},
        {"island": "node-1", "round": 11, "samples": 800, "staleness": 2, "waiting": 400},
        {"island": "\x1b[2J", "round": None, "samples": None, "staleness": None, "waiting": None},
    ],
}


def test_an_island_s_screen_has_the_rounds() -> None:
    status = document() | {"rounds": ROUNDS}
    (line,) = (line for line in drawn(status).splitlines() if line.startswith("rounds"))
    rest = "12  48% of the samples  node-0 1,600  node-1 800, 2 late  \\x1b[2J -"
    assert line == f"rounds   {rest}"
    fits(drawn(status, 40), 40, 24)
    assert "rounds" not in drawn(document())
