"""The faults of `elasticzero local` come when they are told to."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from elasticzero.launcher.observability.lineage import Lineage
from elasticzero.launcher.snapshots.shared_memory import is_owned, snapshot_directory
from tests.integration.clusters import REGRESSION, elasticzero, events_in
from tests.integration.test_elastic_training import check_samples
from tests.support.deadlines import wait_until

PLAIN = """
import sys, time
from pathlib import Path
at = Path(sys.argv[1])
at.with_name(f"{at.name}-{time.monotonic_ns()}").touch()
while not at.exists():
    time.sleep(0.02)
"""


def local(job: str, logs: Path, *arguments: str) -> str:
    """Returns what the command prints, once it has ended well."""
    completed = subprocess.run(
        elasticzero("local", "--job", job, "--log-dir", str(logs), *arguments),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_fault_comes_at_its_step(tmp_path: Path, job: str) -> None:
    """The command saw steps some milliseconds late, and struck at step 67 for step 60."""
    arguments = ["--nodes", "3", "--nproc-per-node", "2", "--strategy", "zero2"]
    faults = ["kill-worker:node-1@10", "drain:node-0@20", "join@30", "kill-node@40", "join@40"]
    arguments += [word for fault in faults for word in ("--fault", fault)]
    output = local(job, tmp_path / "logs", *arguments, str(REGRESSION), "--pause", "0.02")
    struck = re.findall(r"step (\d+): (\S+)", output)
    expected = [("10", "SIGKILL"), ("20", "SIGTERM"), ("30", "node-3"), ("40", "SIGKILL")]
    assert struck == [*expected, ("40", "node-4")], output
    assert "was not injected" not in output
    lineage = Lineage()
    for event in events_in(tmp_path / "logs" / job):
        lineage.take(event)
    check_samples(lineage, tmp_path / "logs" / job)


@pytest.mark.timeout(200)
def test_a_second_cluster_of_a_job_leaves_the_first_its_memory(tmp_path: Path, job: str) -> None:
    """The second was refused, and removed on its way out the shared memory of the first."""
    script, over = tmp_path / "plain.py", tmp_path / "over"
    script.write_text(PLAIN)
    command = elasticzero("local", "--job", job, "--nodes", "2", "--log-dir", str(tmp_path))
    command += [str(script), str(over)]
    memory = [snapshot_directory(job, f"node-{i}") for i in range(2)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as first:
        try:
            wait_until(lambda: len(list(tmp_path.glob("over-*"))) == 2, "both nodes run the script")
            second = subprocess.run(command, capture_output=True, text=True, check=False)
            assert second.returncode == 64
            assert f"job {job} runs on this machine already" in second.stderr
            assert all(is_owned(root) for root in memory)
        finally:
            over.touch()
        assert first.wait(60) == 0
    assert not any(root.exists() for root in memory)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_fault_at_a_time_strikes_a_script_without_a_session(tmp_path: Path, job: str) -> None:
    """`--fault` waited for a step that such a script never makes."""
    script, over = tmp_path / "plain.py", tmp_path / "over"
    script.write_text(PLAIN)
    arguments = ["--nodes", "2", "--fault", "kill-worker:node-0@0.5s"]
    arguments += ["--fault", "kill-node:node-1@3s"]
    command = elasticzero("local", "--job", job, "--log-dir", str(tmp_path / "logs"), *arguments)
    lines = []
    with subprocess.Popen(
        [*command, str(script), str(over)], stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout or ():
            lines.append(line)
            if "generation 3" in line:
                over.touch()
    assert process.returncode == 0, "".join(lines)
    output = "".join(lines)
    assert re.search(r" s  SIGKILL to a worker of node-0$", output, re.M), output
    assert re.search(r" s  SIGKILL to every process of node-1$", output, re.M), output
    assert "generation 3: 1 rank on node-0" in output
    assert not re.search(r"--fault \S+ waits", output), output
