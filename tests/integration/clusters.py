"""Real clusters for tests: agents, workers and an etcd on this machine, taken down without a
trace."""

from __future__ import annotations

import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elasticzero.errors import ExitCode
from elasticzero.launcher.local.cluster import (
    Cluster,
    Node,
    Placement,
    cluster_environment,
    on_loopback,
)
from elasticzero.launcher.observability.lineage import Lineage, committed
from elasticzero.launcher.snapshots.shared_memory import snapshot_directory
from elasticzero.processes import descendants, is_alive
from tests.support.deadlines import patience

SCRIPTS = Path(__file__).resolve().parent / "scripts"
REGRESSION = SCRIPTS / "regression.py"
PATIENCE_S = 90.0
"""A generous deadline: what has not happened by then is taken not to happen."""
SETTLE_S = 6.0
"""Nodes that are started at once may come so long after one another."""
PROCESSES_EVERY_S = 0.25
"""So often a story looks which processes there are; it reads hundreds of files for that."""


def elasticzero(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "elasticzero.cli", *arguments]


@dataclass(kw_only=True)
class JobStory(ABC):
    """All that the agents of a job have told so far, on a cluster of some kind."""

    told: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    processes: set[tuple[int, str]] = field(default_factory=set)
    """Number and time of birth: a long job outlives the numbers of its dead."""
    _pids_s: float = 0.0

    @abstractmethod
    def directory(self) -> Path:
        """Where the logs of the job's nodes are, and of no other job."""

    @abstractmethod
    def news(self) -> Iterable[tuple[str, dict[str, Any]]]:
        """(node, event) for each event since the last call."""

    @abstractmethod
    def pids(self) -> Iterable[int]:
        """Every process of the cluster."""

    @abstractmethod
    def state(self) -> str:
        """What became of the cluster's nodes, for an error."""

    def look(self) -> None:
        self.told += self.news()
        if time.monotonic() - self._pids_s < PROCESSES_EVERY_S:
            return
        self._pids_s = time.monotonic()
        self.processes |= {(pid, born(pid)) for pid in self.pids()}

    def of(self, event: str) -> list[dict[str, Any]]:
        return [told for _, told in self.told if told["event"] == event]

    def wait(self, what: str, so: Callable[[], Any], patience_s: float = PATIENCE_S) -> Any:
        """What `so` returns once that is true."""
        patience_s = patience(patience_s)
        deadline_s = time.monotonic() + patience_s
        while True:
            self.look()
            value = so()
            if value:
                return value
            if time.monotonic() > deadline_s:
                raise AssertionError(f"{what}: not within {patience_s:g} s\n{self.logs()}")
            time.sleep(0.02)

    def pause(self, pause_s: float) -> None:
        """Slow every step of the regression script by so much from now on, the one it is in too,
        whatever its `--pause` says: a node that is to come may take long to start."""
        written = self.pause_file.with_suffix(".new")
        written.write_text(str(pause_s))
        written.rename(self.pause_file)

    @contextmanager
    def slowed(self, pause_s: float) -> Iterator[None]:
        """Slow every step so meanwhile, and then by the script's own `--pause` again."""
        self.pause(pause_s)
        yield
        self.pause_file.unlink()

    def wait_for_step(self, step: int) -> None:
        self.wait(f"step {step}", lambda: self.step >= step)

    def wait_for_first_step(self, generation: int) -> None:
        self.wait(f"a step of generation {generation}", lambda: generation in self.lineage.reached)

    def wait_for_generation(self, generation: int) -> None:
        self.wait(f"generation {generation}", lambda: self.generation >= generation)

    @property
    def pause_file(self) -> Path:
        return self.directory().parent / "pause"

    @property
    def step(self) -> int:
        return max((event["step"] for event in self.of("step")), default=0)

    @property
    def generation(self) -> int:
        return max((event["generation"] for event in self.of("world")), default=0)

    @property
    def lineage(self) -> Lineage:
        lineage = Lineage()
        for _, event in self.told:
            lineage.take(event)
        return lineage

    def committed(self) -> dict[int, list[int]]:
        """The samples of each committed step."""
        return committed(self.lineage, traces_in(self.directory()))

    def logs(self) -> str:
        paths = sorted(self.directory().glob("*/*.log"))
        tails = [f"== {path}\n" + "\n".join(path.read_text().splitlines()[-15:]) for path in paths]
        last = [f"{node}: {event}" for node, event in self.told[-25:]]
        return "\n".join([self.state(), *tails, "== events", *last])

    def check_no_process_is_left(self) -> None:
        deadline_s = time.monotonic() + patience(30.0)
        while (
            left := [pid for pid, at in self.processes if is_alive(pid) and born(pid) == at]
        ) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert not left, f"processes left behind: {left}"


@dataclass
class Story(JobStory):
    """The agents of a cluster on this machine."""

    cluster: Cluster

    def directory(self) -> Path:
        return self.cluster.log_dir / self.cluster.job

    def news(self) -> Iterable[tuple[str, dict[str, Any]]]:
        return self.cluster.events()

    def pids(self) -> Iterable[int]:
        for node in self.cluster.running():
            yield from (node.process.pid, *descendants(node.process.pid))

    def state(self) -> str:
        codes = {name: node.process.returncode for name, node in self.cluster.nodes.items()}
        return f"== exit codes {codes}"

    def wait_for_end(self, patience_s: float = PATIENCE_S) -> dict[str, int]:
        """Exit codes by node, after steps that nothing slows down."""
        self.pause(0.0)
        self.wait("the end", lambda: not self.cluster.running(), patience_s)
        codes = {name: node.process.returncode for name, node in self.cluster.nodes.items()}
        exit_codes = [int(code) for code in ExitCode]
        assert all(code < 0 or code in exit_codes for code in codes.values()), self.logs()
        return codes

    def node(self, index: int) -> Node:
        return self.cluster.nodes[f"node-{index}"]

    def check_nothing_is_left(self) -> None:
        """No process, no shared memory."""
        self.check_no_process_is_left()
        memory = [snapshot_directory(self.cluster.job, name) for name in self.cluster.nodes]
        assert not [path for path in memory if path.exists() and list(path.rglob("*"))]


def born(pid: int) -> str:
    """When a process began, in ticks of the machine's clock; empty: it is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def traces_in(directory: Path) -> Iterator[tuple[int, int, list[int]]]:
    """What the workers of a job wrote of their global batches: generation, step, samples."""
    for path in sorted(directory.glob("*/[0-9]*.log")):
        for line in path.read_text(errors="replace").splitlines():
            if line.startswith('{"trace"') and line.endswith("}}"):
                trace = json.loads(line)["trace"]
                yield trace["generation"], trace["step"], trace["samples"]


def events_in(directory: Path) -> Iterator[dict[str, Any]]:
    """Every event of a job's agents."""
    for path in sorted(directory.glob("*/events.jsonl")):
        for line in path.read_text().splitlines():
            yield json.loads(line)


@contextmanager
def story(
    tmp_path: Path,
    endpoint: str,
    job: str,
    options: Sequence[str],
    *,
    nodes: int,
    environments: Sequence[Mapping[str, str]] = (),
    place: Callable[[str], Placement] = on_loopback,
) -> Iterator[Story]:
    """A cluster of `nodes` agents with these words after `elasticzero run`.

    environments: what stands in the environment of each node besides. place: where each runs.
    """
    common = ["--etcd", endpoint, "--http-port", "0", "--preemption", "none"]
    common += ["--settle", str(SETTLE_S), *options]
    log_dir = tmp_path / "logs"
    log_dir.mkdir(exist_ok=True)
    shared = {**cluster_environment(nodes), "TESTER_PAUSE_FILE": str(log_dir / "pause")}
    cluster = Cluster(common, job, log_dir, shared, place=place)
    told = Story(cluster)
    try:
        for i in range(nodes):
            cluster.environment = {**shared, **environments[i]} if environments else shared
            cluster.start_node()
        yield told
        told.look()
    finally:
        cluster.stop()
    told.check_nothing_is_left()
