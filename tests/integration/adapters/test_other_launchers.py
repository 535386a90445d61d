"""Under another launcher each process would train alone: the adapters say so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.adapters.stories import IMPORTS
from tests.integration.clusters import SCRIPTS

LAUNCHED = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    "script",
    [
        "accelerate_loop",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("lightning_trainer", "transformers_trainer")
        ),
    ],
)
def test_another_launcher_is_refused(script: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / f"{script}.py"), str(tmp_path / "out")],
        env=os.environ | IMPORTS | LAUNCHED,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 64
    assert "error: this is one of 2 processes that torchrun" in done.stderr
    assert "Traceback" not in done.stderr
