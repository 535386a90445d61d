"""Logs that find no room, grow without end, or are deleted: training needs none of them."""

from __future__ import annotations

import json
import shutil
import stat
from http.client import HTTPConnection
from pathlib import Path

import pytest

from elasticzero.launcher.local.cluster import Placement
from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.clusters import REGRESSION, Story, story
from tests.mounts import fill, small_disk

pytestmark = pytest.mark.timeout(240)
FILE_BYTES = 256 << 10
LOG_BYTES = 64 << 10
NOISY = """
import sys, time
for number in range(20_000):
    print(number, "x" * 100)
    if number % 2_000 == 0:
        time.sleep(float(sys.argv[1]))
print("the end", file=sys.stderr)
"""


def step_of(told: Story) -> int:
    """The step that the agent's status tells, without the event log."""
    [port, *_] = [event["port"] for event in told.of("serving")]
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/status")
        return int(json.loads(connection.getresponse().read())["step"])
    finally:
        connection.close()


def test_a_full_log_directory_does_not_end_a_job(
    tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    """`print` raised ENOSPC, which counted as the script's error: the job ended with 70."""
    arguments = ["--open-status", "--tee", str(REGRESSION), "--pause", "0.05"]
    with (
        small_disk(tmp_path / "logs", 8) as disk,
        story(tmp_path, etcd.endpoint, job, arguments, nodes=1) as told,
    ):
        told.wait_for_step(3)
        filler = fill(disk)
        full = step_of(told)
        told.wait("pages of steps without a log", lambda: step_of(told) > full + 50)
        filler.unlink()
        assert told.wait_for_end() == {"node-0": 0}, told.logs()
        log = (told.directory() / "node-0" / "0.log").read_text()
        assert told.generation == 1
        assert sum(event["count"] for event in told.of("events_lost")) >= 50
    assert "bytes of output are missing here: No space left on device" in log


@pytest.mark.slow
def test_a_file_that_may_not_grow_does_not_end_a_job(
    tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    """The agent says what is missing in the log."""
    script = tmp_path / "noisy.py"
    script.write_text(NOISY)
    place = Placement(command_prefix=("prlimit", f"--fsize={FILE_BYTES}", "--"))
    arguments = [str(script), "0"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=1, place=lambda node: place) as told:
        assert told.wait_for_end() == {"node-0": 0}, told.logs()
        printed = told.node(0).log.read_text()
        size = (told.directory() / "node-0" / "0.log").stat().st_size
    assert size <= FILE_BYTES
    assert "rank 0: 1.8 MiB of its output could not be written into" in printed, printed
    assert "File too large" in printed


@pytest.mark.slow
def test_a_long_log_is_cut_off_while_its_worker_writes(
    tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    script = tmp_path / "noisy.py"
    script.write_text(NOISY)
    arguments = ["--log-max-size", "64KiB", "--log-keep", "2", "--tee", str(script), "1"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=1) as told:
        assert told.wait_for_end() == {"node-0": 0}, told.logs()
        directory = told.directory() / "node-0"
        logs = [directory / name for name in ("0.log.2", "0.log.1", "0.log")]
        lines = "".join(log.read_text() for log in logs).splitlines()
        assert {path.name for path in directory.glob("0.log*")} == {log.name for log in logs}
        repeated = told.node(0).log.read_text()
    assert lines[-1] == "the end"
    numbers = [int(line.split()[0]) for line in lines[:-1] if line.endswith("x" * 100)]
    assert numbers == sorted(set(numbers)) and numbers[-1] == 19_999 and numbers[0] > 0
    assert "[0] 0 xxx" in repeated and "[0] 19999 xxx" in repeated
    assert repeated.count("x" * 100) >= 19_000, "the terminal shows what is cut off, too"


def test_a_deleted_log_directory_comes_back(tmp_path: Path, job: str, etcd: EtcdServer) -> None:
    """Everything went on into files that nobody could open any more."""
    arguments = ["--tee", str(REGRESSION), "--pause", "0.05"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=1) as told:
        directory = told.directory() / "node-0"
        directory.chmod(0o2750)
        told.wait_for_step(3)
        before = told.step
        shutil.rmtree(told.directory())
        told.wait("the logs", lambda: (directory / "0.log").exists() and told.step > before + 5)
        assert stat.S_IMODE(directory.stat().st_mode) == 0o2750
        assert '"trace"' in told.wait("a trace", (directory / "0.log").read_text)
        assert told.wait_for_end() == {"node-0": 0}, told.logs()
        assert told.generation == 1
