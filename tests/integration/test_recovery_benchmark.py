"""The benchmark of recoveries keeps its own figures where its peer makes no step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def measured(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the benchmark, which must end well."""
    completed = subprocess.run(
        [sys.executable, str(root / "benchmarks" / "recovery.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed


@pytest.mark.slow
def test_rounds_in_which_torchrun_hangs_are_left_out(root: Path) -> None:
    """Here it has no time to begin with: two real torchruns are started, and given up."""
    completed = measured(
        root, "--rounds=0", "--slow=0", "--rest=0", "--pairs=0", "--peer-timeout=0.01"
    )
    assert completed.stderr.count("going on without it") == 2, completed.stderr
    assert completed.stdout.splitlines() == [
        f"SIGKILL to a {case}: next step after: torchrun came to none in time in 1 round "
        "(--peer-timeout), which its figures leave out."
        for case in ("worker", "node")
    ]


@pytest.mark.slow
def test_steps_with_and_without_a_session_take_turns(root: Path) -> None:
    """The strategy alone steps an optimizer that the session beside it must not refuse."""
    options = ["--rounds=0", "--slow=0", "--peer=0", "--rest=0", "--pairs=1"]
    options += ["--strategies=zero1"]
    assert "its strategy alone" in measured(root, *options).stdout
