"""`examples/slurm/elasticzero.sbatch` with real agents, under programs that play Slurm."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from elasticzero.launcher.observability.event_log import EventReader
from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.clusters import REGRESSION, SETTLE_S, JobStory
from tests.integration.test_elastic_training import check_samples, check_weights
from tests.support.deadlines import patience
from tests.support.slurm import Slurm, Task

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "slurm" / "elasticzero.sbatch"
GRACE_S = 40.0
WAITING_S = 3.0
"""Pause of each step while a task is to come back, however long it takes to start."""


@dataclass
class ArrayStory(JobStory):
    """An array job, and all that its agents have told."""

    slurm: Slurm
    job: str
    log_dir: Path
    _readers: dict[str, EventReader] = field(default_factory=dict)

    def directory(self) -> Path:
        return self.log_dir / self.job

    def news(self) -> Iterable[tuple[str, dict[str, Any]]]:
        self.slurm.turn()
        for path in sorted(self.directory().glob("*/events.jsonl")):
            node = path.parent.name
            reader = self._readers.setdefault(node, EventReader(path.parent))
            yield from ((node, event) for event in reader.read())

    def pids(self) -> Iterable[int]:
        return self.slurm.pids()

    def state(self) -> str:
        outputs = [f"== {t}\n{t.output.read_text()}" for t in self.tasks if t.output.exists()]
        return "\n".join(outputs)

    @property
    def tasks(self) -> list[Task]:
        return list(self.slurm.tasks.values())

    def wait_for_states(self, *states: str) -> None:
        self.wait(f"states {states}", lambda: [task.state for task in self.tasks] == [*states])

    def wait_for_ranks(self, count: int) -> None:
        """Waits until so many nodes train together."""

        def world_size() -> int:
            worlds = self.of("world")
            newest = max(worlds, key=lambda world: world["generation"], default=None)
            return 0 if newest is None else len(newest["members"])

        self.wait(f"a world of {count}", lambda: world_size() == count)
        self.wait_for_first_step(self.generation)


@contextmanager
def array(
    tmp_path: Path, etcd: EtcdServer, job: str, size: int, options: Sequence[str] = ()
) -> Iterator[ArrayStory]:
    """An array of so many tasks that trains the regression, submitted by `sbatch`."""
    log_dir, checkpoints = tmp_path / "logs", tmp_path / "checkpoints"
    (log_dir / job).mkdir(parents=True)
    slurm = Slurm(tmp_path / "slurm")
    told = ArrayStory(slurm, job, log_dir)
    arguments = ["--checkpoint-dir", str(checkpoints), *options, str(REGRESSION), "--pause", "0.1"]
    environment = {
        **os.environ,
        "PATH": slurm.path,
        "OMP_NUM_THREADS": "1",
        "TESTER_PAUSE_FILE": str(told.pause_file),
        "ELASTICZERO_ETCD": etcd.endpoint,
        "ELASTICZERO_JOB": job,
        "ELASTICZERO_LOG_DIR": str(log_dir),
        "ELASTICZERO_PREEMPTION": "none",
        "ELASTICZERO_SETTLE": f"{SETTLE_S:g}",
        "ELASTICZERO_HTTP_PORT": "0",
        "ELASTICZERO_HOST": "127.0.0.1",
    }
    try:
        message = submit(environment, f"--array=0-{size - 1}", str(SCRIPT), *arguments)
        assert message.startswith("Submitted batch job "), message
        yield told
        told.look()
    finally:
        slurm.close()
    told.check_no_process_is_left()


def submit(environment: Mapping[str, str], *arguments: str) -> str:
    """What `sbatch` prints."""
    return subprocess.run(
        ["sbatch", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout


@pytest.mark.slow
def test_a_preempted_task_is_requeued_and_costs_no_step(
    tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    """Its agent leaves within the GraceTime, and the script asks for its place in the queue."""
    with array(tmp_path, etcd, job, 3) as told:
        told.wait_for_ranks(3)
        told.pause(WAITING_S)
        victim = told.tasks[1]
        told.slurm.preempt(victim, GRACE_S)
        told.wait("its return", lambda: victim.restarts == 1 and victim.state == "RUNNING")
        told.wait("two nodes, then three", lambda: told.generation >= 3)
        told.wait_for_ranks(3)
        told.pause(0.0)
        told.wait_for_states("COMPLETED", "COMPLETED", "COMPLETED")
    assert told.lineage.recomputed == 0
    check_samples(told.lineage, told.directory())
    check_weights(tmp_path / "checkpoints", reference)


@pytest.mark.slow
def test_a_time_limit_and_a_failed_node(
    tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    """A task that nears its time limit comes back with a new one; that of a failed node too."""
    with array(tmp_path, etcd, job, 2) as told:
        told.wait_for_ranks(2)
        told.pause(WAITING_S)
        first, second = told.tasks
        told.slurm.reach_time_limit(first, GRACE_S)
        told.wait("its return", lambda: first.restarts == 1)
        told.wait("one node, then two", lambda: told.generation >= 3)
        told.wait_for_ranks(2)
        told.slurm.lose_node(second)
        told.wait("its return", lambda: second.restarts == 1)
        told.wait("one node, then two", lambda: told.generation >= 5)
        told.wait_for_ranks(2)
        told.pause(0.0)
        told.wait_for_states("COMPLETED", "COMPLETED")
    assert told.lineage.recomputed <= 1
    check_samples(told.lineage, told.directory())
    check_weights(tmp_path / "checkpoints", reference)


@pytest.mark.slow
def test_a_cancelled_task_leaves_and_stays_away(
    tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    with array(tmp_path, etcd, job, 2) as told:
        told.wait_for_ranks(2)
        told.slurm.cancel(told.tasks[1], GRACE_S)
        told.wait_for_states("RUNNING", "CANCELLED")
        told.pause(0.0)
        told.wait_for_states("COMPLETED", "CANCELLED")
    assert told.lineage.recomputed == 0
    check_weights(tmp_path / "checkpoints", reference)


def test_bad_input_is_not_requeued(tmp_path: Path, job: str, etcd: EtcdServer) -> None:
    with array(tmp_path, etcd, job, 1, ["--strategy", "zero9"]) as told:
        told.wait_for_states("FAILED")
    (task,) = told.tasks
    assert (task.code, task.restarts) == (64, 0)
    assert "zero9" in task.output.read_text()


AGENT = """#!/bin/bash
echo "elasticzero $*"
[ "${SLURM_RESTART_COUNT:-0}" = 0 ] || exit 0
exit {code}
"""


@pytest.mark.parametrize(
    ("code", "state", "restarts"),
    [
        (0, "COMPLETED", 0),
        (64, "FAILED", 0),
        (69, "COMPLETED", 1),
        (70, "FAILED", 0),
        (71, "COMPLETED", 1),
        (75, "COMPLETED", 1),
    ],
)
def test_the_script_asks_for_another_try_by_exit_code(
    code: int, state: str, restarts: int, tmp_path: Path
) -> None:
    """The agent is a program that ends with this code, and with 0 when it is tried again."""
    agent = tmp_path / "bin" / "elasticzero"
    agent.parent.mkdir()
    agent.write_text(AGENT.replace("{code}", str(code)))
    agent.chmod(0o755)
    slurm = Slurm(tmp_path / "slurm")
    path = os.pathsep.join([str(agent.parent), slurm.path])
    submit({**os.environ, "PATH": path, "ELASTICZERO_ETCD": "x:1"}, "--array=0", str(SCRIPT), "a b")
    try:
        deadline_s = time.monotonic() + patience(60.0)
        while not slurm.tasks or slurm.tasks[0].state != state:
            slurm.turn()
            assert time.monotonic() < deadline_s, slurm.tasks
            time.sleep(0.02)
    finally:
        slurm.close()
    (task,) = slurm.tasks.values()
    assert (task.restarts, task.output.read_text()) == (
        restarts,
        "elasticzero run a b\n" * (restarts + 1),
    )


@pytest.mark.parametrize(
    ("variables", "workers"),
    [
        ({}, ""),
        ({"SLURM_GPUS_ON_NODE": "8"}, "gpu"),
        ({"SLURM_GPUS_ON_NODE": "8", "ELASTICZERO_NPROC_PER_NODE": "4"}, "4"),
    ],
)
def test_a_task_with_gpus_has_a_worker_for_each(
    variables: dict[str, str], workers: str, tmp_path: Path
) -> None:
    for name, text in {
        "srun": 'shift; exec "$@"',
        "elasticzero": 'echo "workers ${ELASTICZERO_NPROC_PER_NODE:-}"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "ELASTICZERO_ETCD": "x:1"}
    done = subprocess.run(
        ["bash", str(SCRIPT)],
        env=environment | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == f"workers {workers}\n"


def test_the_script_asks_for_whole_nodes() -> None:
    lines = re.findall(r"^#SBATCH (\S+)$", SCRIPT.read_text(), re.MULTILINE)
    assert {"--exclusive", "--mem=0"} <= set(lines)
    assert not [line for line in lines if line.startswith("--gres")], "not each cluster has GPUs"


def test_without_an_etcd_the_script_says_what_is_missing(tmp_path: Path) -> None:
    environment = {name: text for name, text in os.environ.items() if name != "ELASTICZERO_ETCD"}
    done = subprocess.run(
        ["bash", str(SCRIPT)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "ELASTICZERO_ETCD: must be the address of an etcd" in done.stderr
