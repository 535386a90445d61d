"""A job that finds its newest checkpoint damaged: it goes on from the one before, and says so; with
--strict-checkpoint it ends."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from elasticzero.checkpoint.format.names import step_directory, step_of
from elasticzero.checkpoint.steps.catalog import read_manifest
from elasticzero.checkpoint.storage.disk import DiskStorage
from elasticzero.errors import ExitCode
from tests.integration.clusters import REGRESSION, elasticzero, events_in

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
STEPS = 21
"""The last step of the script given below."""


def run_local(tmp_path: Path, run: str, *arguments: str, epochs: int) -> tuple[int, str]:
    """Exit code and output of two nodes, from nothing to the end."""
    finished = subprocess.run(
        elasticzero(
            *("local", "--nodes", "2", "--nnodes", "2:2", "--log-dir", str(tmp_path / run)),
            *("--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "7"),
            *("--job", run, *arguments, str(REGRESSION)),
            *("--epochs", str(epochs), "--global-batch", "48", "--pause", "0.03"),
        ),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    return finished.returncode, finished.stdout


def damage(step: Path, how: str) -> str:
    """Harm rank 1's file; its name."""
    file = read_manifest(DiskStorage(step)).files[1]
    data = bytearray((step / file.name).read_bytes())
    if how == "a flipped bit":
        data[-3] ^= 1
    else:
        del data[-9:]
    (step / file.name).write_bytes(data)
    return file.name


def saved_steps(checkpoints: Path) -> list[int]:
    return sorted(step for path in checkpoints.iterdir() if (step := step_of(path.name)))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a job that ended well."""
    root = tmp_path_factory.mktemp("first")
    code, output = run_local(root, "first", epochs=3)
    assert code == 0, output
    assert len(saved_steps(root / "checkpoints")) > 1
    assert saved_steps(root / "checkpoints")[-1] == STEPS
    return root / "checkpoints"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["a flipped bit", "a file cut off"])
def test_a_damaged_checkpoint_is_passed_over_or_ends_the_job(
    trained: Path, tmp_path: Path, how: str
) -> None:
    shutil.copytree(trained, tmp_path / "checkpoints")
    before = saved_steps(trained)[-2]
    name = damage(tmp_path / "checkpoints" / step_directory(STEPS), how)
    text = "bytes 0 to " if how == "a flipped bit" else "has "

    code, output = run_local(tmp_path, "strict", "--strict-checkpoint", epochs=4)
    assert code == ExitCode.FAILED, output
    (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: the checkpoint of step {STEPS} is damaged: "), output
    assert name in line and text in line and f"going on from step {before}; mend it" in line
    assert "without --strict-checkpoint" in line
    assert not list((tmp_path / "checkpoints").glob(f"step-*{STEPS + 7}"))

    code, output = run_local(tmp_path, "usual", epochs=4)
    assert code == 0, output
    (line,) = [line for line in output.splitlines() if name in line]
    assert f"the checkpoint of step {STEPS} is damaged: " in line and text in line, output
    assert line.endswith(f"; going on from step {before}"), output
    assert f"step {before} from storage" in output and "use another step" not in output
    worlds = [
        event for event in events_in(tmp_path / "usual" / "usual") if event["event"] == "world"
    ]
    assert any(name in event["reason"] for event in worlds)
