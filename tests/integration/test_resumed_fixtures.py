"""Resumes training from the checkpoints that an earlier version wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from elasticzero.ipc.assignment import Resume
from tests.fixtures import CHECKPOINTS, FOLDER, STEPS, TRAINING
from tests.integration.test_strategies import HERE, assert_close, plain
from tests.integration.training_harness import Pool

MORE_STEPS = 20
WORLDS = (1, 3, 2, 3, 1)


@pytest.mark.parametrize(("name", "world_size"), list(zip(CHECKPOINTS, WORLDS, strict=True)))
def test_training_resumes_from_an_earlier_checkpoint(
    pool: Pool, tmp_path: Path, name: str, world_size: int
) -> None:
    """The weights are those of plain PyTorch that was never interrupted."""
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(FOLDER / "checkpoints" / name, checkpoints)
    told = TRAINING | CHECKPOINTS[name] | {"steps": MORE_STEPS, "out": str(tmp_path / "out")}
    running = pool.start(
        HERE / "training_exact.py",
        [json.dumps(told)],
        world_size,
        generation=2 + list(CHECKPOINTS).index(name),  # the worlds share their snapshots' folder
        strategy=CHECKPOINTS[name]["strategy"],
        resume=Resume(tier="storage", step=STEPS),
        checkpoint_dir=str(checkpoints),
    )
    assert running.finish() == MORE_STEPS
    assert json.loads((tmp_path / "out").read_text())["step"] == MORE_STEPS
    if "dtype" not in CHECKPOINTS[name]:
        assert_close(checkpoints, plain(MORE_STEPS, weighted=False))
