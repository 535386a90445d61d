"""A signal that comes while an agent ends does not change what its exit code says."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from elasticzero.launcher.observability.event_log import EventReader
from tests.integration.clusters import REGRESSION, elasticzero
from tests.support.deadlines import patience

PATIENCE_S = 90.0


@pytest.mark.timeout(120)
def test_sigterm_after_the_end_of_a_job_leaves_its_exit_code(tmp_path: Path, job: str) -> None:
    """A Job controller deletes the other pods once the first is done, in the same moment."""
    arguments = ["run", "--job", job, "--node-name", "a", "--log-dir", str(tmp_path)]
    arguments += ["--http-port", "0", "--preemption", "none", str(REGRESSION), "--epochs", "1"]
    events = EventReader(tmp_path / job / "a")
    with subprocess.Popen(elasticzero(*arguments), stderr=subprocess.PIPE, text=True) as agent:
        deadline_s = time.monotonic() + patience(PATIENCE_S)
        while agent.poll() is None and time.monotonic() < deadline_s:
            if any(event["event"] == "exit" for event in events.read()):
                break
            time.sleep(0.001)
        while agent.poll() is None and time.monotonic() < deadline_s:
            agent.send_signal(signal.SIGTERM)
            time.sleep(0.001)
        assert agent.wait(PATIENCE_S) == 0, agent.communicate()[1]
