"""Scripts written for torchrun run unchanged; they start anew at each generation."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticzero.launcher.embedded import EmbeddedEtcd
from tests.integration.clusters import story

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "torchrun_ddp.py"


@pytest.mark.timeout(150)
def test_a_torchrun_script_survives_a_killed_worker_and_a_killed_node(
    tmp_path: Path, job: str, etcd: EmbeddedEtcd
) -> None:
    checkpoint = tmp_path / "model.pt"
    words = ["--nnodes", "1:2", str(SCRIPT), "--checkpoint", str(checkpoint)]
    words += ["--epochs", "20", "--samples", "8192"]
    with story(tmp_path, etcd.endpoint, job, words, nodes=2) as told:

        def output() -> str:
            return "".join(p.read_text() for p in told.directory().glob("*/0.log"))

        told.wait("a first checkpoint", checkpoint.exists)
        told.cluster.kill_worker(told.node(1))
        told.wait("training goes on", lambda: "world 2 restarts 1" in output())
        told.cluster.kill_node(told.node(0))
        codes = told.wait_for_end()
        said = output()
    assert codes == {"node-0": -9, "node-1": 0}, told.logs()
    assert told.generation == 3
    assert "start epoch 0 world 2 restarts 0" in said
    assert "world 1 restarts 2" in said
    assert "epoch 19 world 1" in said


@pytest.mark.timeout(150)
def test_a_torchrun_script_runs_from_a_module_and_takes_torchruns_spellings(
    tmp_path: Path, job: str, etcd: EmbeddedEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(SCRIPT.parent)
    words = ["--rdzv_endpoint", etcd.endpoint, "--nproc_per_node", "2", "-m", "torchrun_ddp"]
    words += ["--checkpoint", str(tmp_path / "model.pt"), "--epochs", "2", "--samples", "256"]
    with story(tmp_path, etcd.endpoint, job, words, nodes=1) as told:
        assert told.wait_for_end() == {"node-0": 0}
        assert "epoch 1 world 2" in (told.directory() / "node-0" / "0.log").read_text()
