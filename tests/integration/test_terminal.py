"""What a person sees of a job on a terminal: a script's own lines, whole, and one that moves."""

from __future__ import annotations

import os
import pty
import re
from pathlib import Path

import pytest

from tests.integration.clusters import SCRIPTS, elasticzero

pytestmark = pytest.mark.slow
PRINTS = SCRIPTS / "prints.py"
STEPS = 40


def on_a_terminal(tmp_path: Path, *arguments: str) -> tuple[int, str]:
    """Runs a command that has a terminal; returns its exit code, and what it wrote there."""
    process, terminal = pty.fork()
    if process == 0:
        environment = {key: value for key, value in os.environ.items() if key != "CI"}
        command = elasticzero(*arguments)
        os.execvpe(command[0], command, {**environment, "TERM": "xterm", "TMPDIR": str(tmp_path)})
    data = b""
    while True:
        try:
            piece = os.read(terminal, 1 << 16)
        except OSError:  # the process has ended
            break
        data += piece
    _, status = os.waitpid(process, 0)
    os.close(terminal)
    return os.waitstatus_to_exitcode(status), data.decode()


def seen(text: str) -> list[str]:
    """The lines that stay: what a carriage return goes back over is written over, or erased."""
    rows = []
    for row in text.split("\n"):
        shown = ""
        for part in row.split("\r"):
            erased = part.split("\x1b[K")
            shown = "".join(erased) + ("" if len(erased) > 1 else shown[len(part) :])
        rows.append(shown)
    return rows


@pytest.mark.parametrize(
    "arguments",
    [["run", "--http-port", "0"], ["local", "--nodes", "2"]],
    ids=["run", "local"],
)
def test_a_scripts_lines_are_whole_beside_the_line_that_moves(
    arguments: list[str], tmp_path: Path
) -> None:
    """The workers' output came into the row of the line that moved."""
    code, text = on_a_terminal(tmp_path, *arguments, str(PRINTS), str(STEPS))
    assert code == 0, text
    lines = seen(text)
    printed = [line for line in lines if line.startswith("[0] ")]
    assert printed == [f"[0] line {step} of rank 0" for step in range(1, STEPS + 1)]
    assert re.search(r"\r(loading torch|waiting for node-0, node-1 to load torch)", text)
    assert re.search(rf"\r\[#*\.*\] step \d+/{STEPS}  ", text)
    assert not [line for line in lines if re.match(r"\[#*\.*\] step", line)]
    assert lines[-1] == ""


def test_one_failure_is_printed_once(tmp_path: Path) -> None:
    """It was printed five to seven times."""
    options = ["--nodes", "2", "--max-restarts", "0"]
    code, text = on_a_terminal(tmp_path, "local", *options, str(PRINTS), str(STEPS), "1")
    assert code == 70, text
    lines = seen(text)
    assert "\n".join(lines).count("ValueError: bad sample") == 1, text
    assert sum("rank 1 on node-" in line and "prints.py:" in line for line in lines) == 1
    assert sum(line.startswith("error: rank 1 on node-") for line in lines) == 1
    assert sum("Traceback" in line for line in lines) == 1


def test_quiet_shows_errors_and_the_workers_output_alone(tmp_path: Path) -> None:
    code, text = on_a_terminal(
        tmp_path, "run", "--quiet", "--http-port", "0", str(PRINTS), str(STEPS)
    )
    assert code == 0, text
    assert seen(text) == [*(f"[0] line {n} of rank 0" for n in range(1, STEPS + 1)), ""]
