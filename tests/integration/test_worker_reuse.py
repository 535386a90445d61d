"""Workers' processes that outlive a generation (--keep-workers), and those that may not."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.clusters import REGRESSION, SCRIPTS, Story, story
from tests.integration.test_elastic_training import check_samples, check_weights

pytestmark = pytest.mark.slow

rare = partial(pytest.param, marks=pytest.mark.chaos)
KEEP = ["--keep-workers"]


def starts(told: Story, node: str) -> list[dict[str, Any]]:
    """What a node's agent said of its workers at the start of each generation."""
    return [e for name, e in told.told if name == node and e["event"] == "started"]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("strategy", ["zero2", *(rare(name) for name in ("ddp", "zero1", "zero3"))])
def test_a_process_trains_on_when_a_node_leaves_and_another_comes(
    strategy: str, tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    checkpoints = tmp_path / "checkpoints"
    arguments = ["--nnodes", "1:3", "--strategy", strategy, "--checkpoint-dir", str(checkpoints)]
    arguments += [*KEEP, str(REGRESSION), "--pause", "0.2"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=2) as told:
        told.wait_for_step(5)
        told.cluster.drain(told.node(0))
        told.wait("the leaver's end", lambda: not told.node(0).running)
        told.wait_for_step(10)
        told.pause(0.8)
        told.cluster.start_node()
        told.wait("the newcomer's world", lambda: starts(told, "node-2"))
        codes = told.wait_for_end()
    assert codes == {"node-0": 75, "node-1": 0, "node-2": 0}
    assert told.lineage.recomputed == 0
    first_starts = starts(told, "node-1")
    assert len({tuple(start["pids"]) for start in first_starts}) == 1, told.logs()
    assert [start["kept"] for start in first_starts] == [0] + [1] * (len(first_starts) - 1)
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("strategy", ["ddp", *(rare(name) for name in ("zero1", "zero2", "zero3"))])
def test_what_a_killed_worker_leaves_behind_goes_on(
    strategy: str, tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    """Its peers are kept, or forked anew where the shock has left a doubt."""
    checkpoints = tmp_path / "checkpoints"
    arguments = ["--nnodes", "1:3", "--strategy", strategy, "--checkpoint-dir", str(checkpoints)]
    arguments += ["--nproc-per-node", "2", "--snapshot-every", "2", *KEEP]
    arguments += [str(REGRESSION), "--pause", "0.1"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=2) as told:
        told.wait_for_step(10)
        told.cluster.kill_worker(told.node(0))
        told.wait("a second world", lambda: told.generation >= 2)
        told.wait_for_step(told.step + 5)
        codes = told.wait_for_end()
    assert codes == {"node-0": 0, "node-1": 0}
    first, second = starts(told, "node-0")[-2:]
    assert len(set(first["pids"]) & set(second["pids"])) == second["kept"] <= 1
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)


@pytest.mark.timeout(120)
def test_a_process_in_doubt_is_forked_anew(tmp_path: Path, job: str, etcd: EtcdServer) -> None:
    """And what the script has started ends with it."""
    options = ["--nnodes", "1:2", "--changes-inside", "off", *KEEP]
    arguments = [*options, str(SCRIPTS / "leaves_behind.py"), "child"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=2) as told:
        told.wait_for_step(3)
        told.cluster.drain(told.node(0))
        codes = told.wait_for_end()
    assert codes == {"node-0": 75, "node-1": 0}
    assert {start["kept"] for start in starts(told, "node-1")} == {0}, told.logs()
    log = (told.directory() / "node-1" / "0.log").read_text()
    assert "this worker's process is not kept: child processes are left: " in log
