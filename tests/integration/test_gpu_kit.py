"""The GPU kit's programs run on the CPU: what a GPU would add is left out, and no figure counts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import kit
from tests.support.deadlines import patience

CONTENDERS = "plain,DDP,DDP+ZRO,FSDP2,ddp,zero1,zero2,zero3,zero1+capture"
HOSTILE = """
def pytest_configure(config):
    raise RuntimeError("a plug-in of the machine was loaded")
"""


def test_the_essential_tests_exist_and_no_plugin_of_the_machine_is_loaded(
    root: Path, tmp_path: Path
) -> None:
    """`pytest-benchmark` ended `make gpu` before a test ran: its warning is an error here."""
    (tmp_path / "hostile.py").write_text(HOSTILE)
    info = tmp_path / "hostile-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hostile\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pytest11]\nhostile = hostile\n")
    tests = list(kit.essential(kit.PAGE.read_text()))
    arguments = kit.command(tests, 1, 100.0, tmp_path / "notes")
    variables = kit.environment(on_gpu=False)
    variables["PYTHONPATH"] = f"{tmp_path}:{variables['PYTHONPATH']}"
    done = subprocess.run(
        [*arguments, "--collect-only", "-n", "0"],
        env=variables,
        cwd=root,
        capture_output=True,
        text=True,
        timeout=patience(60),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [line] = (tmp_path / "notes").read_text().splitlines()
    assert sorted(json.loads(line)["tests"]) == sorted(tests)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_benchmark_of_the_gpu_is_rehearsed_on_the_cpu(root: Path, tmp_path: Path) -> None:
    """Every contender trains by turns, and ddp loses a worker and a node, drains and grows."""
    seconds = patience(120)
    program = [sys.executable, str(root / "benchmarks" / "gpu.py"), "--device", "cpu"]
    options = ["--rounds", "2", "--strategies", "ddp", "--out", str(tmp_path / "out.json")]
    done = subprocess.run(
        [*program, *options, "--seconds", str(seconds), "--contenders", CONTENDERS],
        capture_output=True,
        text=True,
        timeout=seconds + 60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "out.json").read_text())
    assert not document["missing"], document["missing"]
    assert list(document["turns"]) == CONTENDERS.split(",")
    assert {len(turns) for turns in document["turns"].values()} == {2}
    assert document["recovery"]["ddp"].keys() == {"worker", "join", "drain", "node"}
    assert document["seconds"] < seconds + 10
    assert "| zero3 |" in done.stdout and "SIGKILL to a node" in done.stdout
