"""torchrun itself with our rendezvous: an unmodified script survives a killed worker and node."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from elasticzero.launcher.local.cluster import cluster_environment
from elasticzero.launcher.store.etcd.server import EtcdServer
from elasticzero.processes import children_of, descendants, is_alive
from tests.support.deadlines import patience

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "torchrun_ddp.py"
PATIENCE_S = 90.0


class Torchruns:
    """Nodes of one run, each a torchrun process whose output goes to a file."""

    def __init__(self, endpoint: str, folder: Path) -> None:
        self._options = ["--rdzv-backend", "elasticzero", "--rdzv-endpoint", endpoint]
        self._folder = folder
        self.checkpoint = folder / "model.pt"
        self.nodes: list[subprocess.Popen[bytes]] = []
        self._pids: set[int] = set()

    def start(self, *options: str, epochs: int, samples: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "torch.distributed.run", *self._options, *options]
        command += [str(SCRIPT), "--checkpoint", str(self.checkpoint)]
        command += ["--epochs", str(epochs), "--samples", str(samples)]
        with (self._folder / f"{len(self.nodes)}.log").open("wb") as log:
            environment = {**os.environ, **cluster_environment(2)}
            node = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        self.nodes.append(node)
        return node

    def output(self, index: int) -> str:
        return (self._folder / f"{index}.log").read_text(errors="replace")

    def starts(self, index: int) -> list[tuple[int, int]]:
        """Epoch and world at each start of the workers that this node's rank 0 told of."""
        starts = re.findall(r"start epoch (\d+) world (\d+)", self.output(index))
        return [(int(epoch), int(size)) for epoch, size in starts]

    def wait(self, what: str, so: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + patience(PATIENCE_S)
        while not so():
            for node in self.nodes:
                self._pids |= {node.pid, *descendants(node.pid)}
            if time.monotonic() > deadline_s:
                tails = [self.output(index)[-4000:] for index in range(len(self.nodes))]
                raise AssertionError("\n== ".join([f"{what}: not in {PATIENCE_S:g} s", *tails]))
            time.sleep(0.02)

    def wait_for_end(self, index: int) -> int:
        node = self.nodes[index]
        self.wait(f"the end of node {index}", lambda: node.poll() is not None)
        return int(node.returncode)

    def kill_worker(self, index: int) -> None:
        os.kill(children_of(self.nodes[index].pid)[-1], signal.SIGKILL)

    def kill_node(self, index: int) -> None:
        """SIGKILL to every process of a node, as if its machine had gone."""
        node = self.nodes[index]
        self._kill([node.pid, *descendants(node.pid)])
        node.wait()

    def close(self) -> None:
        for index, node in enumerate(self.nodes):
            if node.poll() is None:
                self.kill_node(index)
        self._kill([pid for pid in self._pids if is_alive(pid)])

    def check_nothing_is_left(self) -> None:
        self.wait("no process is left", lambda: not any(map(is_alive, self._pids)))

    @staticmethod
    def _kill(pids: list[int]) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def runs(etcd: EtcdServer, tmp_path: Path) -> Iterator[Torchruns]:
    torchruns = Torchruns(etcd.endpoint, tmp_path)
    yield torchruns
    torchruns.close()


@pytest.mark.timeout(240)
def test_a_script_survives_a_killed_worker_and_a_killed_node(runs: Torchruns, job: str) -> None:
    options = ["--nnodes", "1:2", "--rdzv-id", job, "--max-restarts", "3", "--rdzv-conf"]
    options.append(f"lease_ttl=2,last_call_timeout={PATIENCE_S:g},join_timeout=600")
    for _ in range(2):
        runs.start(*options, epochs=16, samples=6144)
    runs.wait("both train", lambda: any("epoch 1 world 2" in runs.output(i) for i in (0, 1)))
    first = 0 if runs.starts(0) else 1
    other = 1 - first
    assert runs.starts(first) == [(0, 2)]

    runs.kill_worker(other)
    runs.wait("both train again", lambda: len(runs.starts(first)) == 2)
    assert runs.starts(first)[1][0] >= 2 and runs.starts(first)[1][1] == 2

    runs.kill_node(first)  # with rank 0, and with the store where all had met
    runs.wait("the other goes on alone", lambda: runs.starts(other))
    assert runs.starts(other)[0][0] >= 2 and runs.starts(other)[0][1] == 1
    assert runs.wait_for_end(other) == 0, runs.output(other)
    output = runs.output(0) + runs.output(1)
    finished = {int(epoch) for epoch in re.findall(r"^epoch (\d+) world", output, re.MULTILINE)}
    assert finished == set(range(16))
    assert "epoch 15 world 1" in runs.output(other)
    runs.check_nothing_is_left()


@pytest.mark.timeout(240)
def test_one_node_needs_no_id(runs: Torchruns) -> None:
    runs.start("--nproc-per-node", "2", epochs=1, samples=256)
    assert runs.wait_for_end(0) == 0, runs.output(0)
    assert "start epoch 0 world 2" in runs.output(0)
    runs.check_nothing_is_left()
