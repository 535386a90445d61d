"""A script that goes on with another `global_batch` than training began with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elasticzero.errors import ExitCode
from tests.integration.adapters.stories import IMPORTS, ended
from tests.integration.clusters import SCRIPTS


def trained(script: Path, folder: Path, epochs: int, batch: int) -> Any:
    command = [sys.executable, str(script), str(folder / "out"), "--epochs", str(epochs)]
    return subprocess.run(
        [*command, "--global-batch", str(batch)],
        env=os.environ | IMPORTS | {"ELASTICZERO_CHECKPOINT_DIR": str(folder / "c")},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "name",
    ["transformers_trainer.py", "lightning_trainer.py"],
)
def test_a_trainer_that_counts_steps_refuses_it(name: str, tmp_path: Path) -> None:
    assert trained(SCRIPTS / name, tmp_path, 1, 24).returncode == 0
    refused = trained(SCRIPTS / name, tmp_path, 1, 12)
    assert refused.returncode == ExitCode.USAGE, refused.stderr[-2000:]
    assert "training began with global_batch=24, and the script now gives 12" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_loop_of_accelerate_goes_on_with_it(tmp_path: Path) -> None:
    script = SCRIPTS / "accelerate_loop.py"
    before = ended(trained(script, tmp_path, 1, 24).stdout)
    after = ended(trained(script, tmp_path, 2, 12).stdout)
    assert after["in_epoch"] // 2 > before["in_epoch"] // 2 == before["steps"]
    assert after["steps"] == before["steps"] + after["in_epoch"] // 2
