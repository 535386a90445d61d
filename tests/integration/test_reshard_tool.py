"""The resharding tool as a process: interrupted, killed, run again, and its memory."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticzero.checkpoint.format.layout import Group, Layout, TensorSpec
from elasticzero.checkpoint.format.manifest import Manifest
from elasticzero.checkpoint.format.shards import shard_specs, write_shard
from elasticzero.checkpoint.steps import catalog, commit, verify
from elasticzero.checkpoint.storage.disk import DiskDirectory, DiskStorage
from tests.support.deadlines import patience

MIB = 1 << 20
TENSORS = 12
WORLD = 16


@pytest.fixture
def space() -> Iterator[Path]:
    """Room for some hundred megabytes, in memory where there is such a place."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="test-of-elasticzero-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def large_step(directory: Path, mib: int) -> DiskStorage:
    """A step of `mib` MiB on three ranks, whose bytes are not all alike."""
    size = mib * MIB // TENSORS // 4
    tensors = {f"model/{i}": TensorSpec("F32", (size // 1024, 1024)) for i in range(TENSORS)}
    layout = Layout(world_size=3, tensors=tensors, groups=(Group("fsdp_rows", tuple(tensors)),))
    draft = Manifest(
        step=7, generation=1, token="large", strategy="zero3", layout=layout, state={"step": 7}
    )
    storage = DiskDirectory(directory).make("step-000000000007")
    pattern = memoryview(os.urandom(3 * MIB + 5) * 2)
    for rank in range(3):
        total = sum(spec.nbytes for spec in shard_specs(draft, rank).values())
        starts = range(0, total, 3 * MIB)
        chunks = (pattern[s % 977 : s % 977 + min(3 * MIB, total - s)] for s in starts)
        write_shard(storage, draft, rank, chunks)
    assert commit.commit(storage, draft, wait_s=0.0)
    return storage


def started(*order: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "elasticzero.checkpoint.cli", *order],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def signalled(space: Path, number: signal.Signals) -> tuple[int, str]:
    """Start to reshard, send a signal once the first rank's file stands; (exit code, stderr)."""
    tool = started(
        *("reshard", str(space / "old"), str(space / "new")),
        *("--world-size", str(WORLD), "--workers", "1"),
    )
    deadline = time.monotonic() + patience(60)
    while not finished(space) and tool.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    tool.send_signal(number)
    _, told = tool.communicate(timeout=60)
    return tool.returncode, told


def finished(space: Path) -> list[Path]:
    return list((space / "new").glob("step-*/*.sums"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_stopped_on_the_way_and_run_again(space: Path, number: signal.Signals) -> None:
    old = large_step(space / "old", 384)
    code, told = signalled(space, number)
    if number == signal.SIGINT:
        assert (code, told.count("\n")) == (130, 1)
        assert told.startswith("interrupted: finished rank files stay in ")
    else:
        assert code == -signal.SIGKILL
    done = len(finished(space))
    assert 1 <= done < WORLD
    directory = DiskDirectory(space / "new")
    assert catalog.steps(directory) == []
    again = started("reshard", old.where, str(space / "new"), "--world-size", str(WORLD))
    out, told = again.communicate(timeout=60)
    assert (again.returncode, told) == (0, "")
    assert f"({done} rank" in out and "written before)" in out
    (step,) = catalog.steps(directory)
    assert list(verify.find_corruption(step.storage)) == []
    assert len(step.storage.names()) == 2 * WORLD + 1
    compared = started("diff", str(space / "old"), str(space / "new"))
    assert compared.communicate(timeout=60)[1] == ""
    assert compared.returncode == 0


MEASURED = """
import resource, sys
from elasticzero.checkpoint.cli.main import main
main(["list", sys.argv[2]])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert main(sys.argv[1:]) == 0
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, file=sys.stderr)
"""


@pytest.mark.cold
@pytest.mark.parametrize("world_size", [1, 4])
def test_memory_is_bounded_by_the_buffer(space: Path, world_size: int) -> None:
    large_step(space / "old", 384)
    for order in (
        ["reshard", str(space / "old"), str(space / "new"), "--world-size", str(world_size)],
        ["export", str(space / "old"), str(space / "hf"), "--max-shard-size", "100MB"],
        ["import", str(space / "hf"), str(space / "back"), "--format", "hf"],
        ["diff", str(space / "old"), str(space / "new")],
    ):
        if order[0] in ("export", "import") and world_size > 1:
            continue
        measured = subprocess.run(
            [sys.executable, "-c", MEASURED, *order, "-q", "--buffer-size", "16MiB"],
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        )
        assert int(measured.stderr.split()[-1]) < 16 + 24, (order[0], measured.stderr)
        for left in ("back",):
            shutil.rmtree(space / left, ignore_errors=True)
