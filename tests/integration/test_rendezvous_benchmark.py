"""The benchmark of forming worlds works: its figures are not looked at here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_ten_agents_form_rest_and_regroup(root: Path) -> None:
    words = ["--agents", "10", "--rounds", "1", "--rest", "1"]
    found = subprocess.run(
        [sys.executable, str(root / "benchmarks" / "rendezvous.py"), *words],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "trouble" not in found.stderr
    rows = [line for line in found.stdout.splitlines() if line.startswith("| 10 |")]
    assert len(rows) == 6, found.stdout
