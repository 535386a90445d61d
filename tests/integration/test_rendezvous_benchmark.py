"""The benchmark of forming worlds works: its figures are not looked at here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_ten_agents_form_rest_and_regroup(root: Path) -> None:
    arguments = ["--agents", "10", "--rounds", "1", "--rest", "1"]
    completed = subprocess.run(
        [sys.executable, str(root / "benchmarks" / "rendezvous.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "trouble" not in completed.stderr
    rows = [line for line in completed.stdout.splitlines() if line.startswith("| 10 |")]
    assert len(rows) == 6, completed.stdout
