"""Two jobs in one checkpoint directory: the second is refused while the first one lives."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from elasticzero.checkpoint.steps.catalog import newest_good
from elasticzero.checkpoint.storage.disk import DiskDirectory
from tests.integration.clusters import REGRESSION, elasticzero
from tests.support.deadlines import patience

pytestmark = [pytest.mark.slow, pytest.mark.cold]


def command(place: Path, job: str, epochs: int) -> list[str]:
    return elasticzero(
        *("local", "--nodes", "1", "--nnodes", "1", "--job", job, "--keep", "2"),
        *("--log-dir", str(place / job), "--checkpoint-dir", str(place / "run")),
        *("--checkpoint-every", "3", "--lease-ttl", "2", str(REGRESSION)),
        *("--epochs", str(epochs), "--global-batch", "48", "--pause", "0.03"),
    )


def run(place: Path, job: str, epochs: int) -> tuple[int, str]:
    """Exit code and output of a job that has an etcd of its own."""
    done = subprocess.run(
        command(place, job, epochs),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=patience(60.0),
    )
    return done.returncode, done.stdout


def test_a_second_job_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command(tmp_path, "first", 1000),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    ) as first:
        try:
            assert first.stdout is not None
            next(line for line in first.stdout if "  step " in line)
            code, output = run(tmp_path, "second", 1)
            assert code != 0
            assert "belongs to job 'first', which wrote there" in output, output
            assert first.poll() is None
        finally:
            first.send_signal(signal.SIGKILL)
    before = newest_good(DiskDirectory(tmp_path / "run"))
    code, output = run(tmp_path, "second", 4)
    assert code == 0, output
    after = newest_good(DiskDirectory(tmp_path / "run"))
    assert after is not None and (before is None or after >= before)
    code, output = run(tmp_path, "third", 4)
    assert code == 0, output
