"""What agents decide in a dozen situations, as transcripts that a reader can follow.

`pytest tests/unit/test_scenarios.py --update` writes them anew: then read the difference.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.simulation.scenario import paths, play


@pytest.mark.parametrize("path", paths(ROOT), ids=lambda path: path.stem)
def test_scenario(path: Path, pytestconfig: pytest.Config) -> None:
    text = path.read_text()
    played = play(text)
    if pytestconfig.getoption("--update"):
        path.write_text(played)
    else:
        assert played.splitlines() == text.splitlines()
