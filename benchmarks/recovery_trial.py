"""A real cluster on this machine that is struck, and the times of what followed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from recovery_gaps import NEAR_S, Smoothness, smoothness

from elasticzero.launcher.local.cluster import Cluster, Node, cluster_environment
from elasticzero.launcher.observability.lineage import Lineage
from elasticzero.processes import descendants

HERE = Path(__file__).resolve().parent
GIVE_UP_S = 180.0
STEADY_STEPS = 30
"""A generation trains steadily after so many steps."""
BEGIN_S = 3.0
"""Seconds of a core that a script which begins slowly takes up to `elasticzero.run`."""
QUIET_S = NEAR_S + 1.0
"""Seconds of steady training before a planned change and after it, which show its usual step."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """What one blow led to."""

    seconds: float
    recomputed: int
    """Steps that were done before and are done again."""
    noticed_s: float | None = None
    """From SIGKILL of a worker until its own agent knew."""
    smoothness: Smoothness | None = None
    """Gap and slow-down around a planned change; None: the blow was none."""


class NotDone(SystemExit):
    """Says what did not happen in time; ends the benchmark where nothing handles it."""


def wait_for(what: str, poll: Callable[[], T | None], give_up_s: float = GIVE_UP_S) -> T:
    """Returns what `poll` returns, once it is not None; raises `NotDone` if it stays None."""
    deadline_s = time.monotonic() + give_up_s
    while time.monotonic() < deadline_s:
        value = poll()
        if value is not None:
            return value
        time.sleep(0.01)
    raise NotDone(f"error: {what} did not happen within {give_up_s:g} s")


@dataclass
class Trial:
    """A cluster, and what its agents have told so far."""

    cluster: Cluster
    lineage: Lineage = field(default_factory=Lineage)
    worlds: dict[int, list[str]] = field(default_factory=dict)
    """By generation: its nodes in rank order."""
    first_s: dict[int, float] = field(default_factory=dict)
    """Maps a generation to the time of its first step, by the first worker's clock."""
    times_s: dict[int, dict[int, float]] = field(default_factory=dict)
    """Maps a generation and a step to the time of that step, by the first worker's clock."""
    ended_s: dict[int, float] = field(default_factory=dict)
    """By process id: when its agent heard of a worker's end."""
    stood_by: Counter[str] = field(default_factory=Counter)
    """Maps a node to the number of its processes that have come to stand by so far."""

    def look(self) -> None:
        for node, event in self.cluster.events():
            self.lineage.take(event)
            self.stood_by[node] += event["event"] == "standing"
            self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        at_s, generation = event["time"], event.get("generation", 0)
        match event["event"]:
            case "world":
                self.worlds[generation] = event["members"]
            case "step":
                self.first_s[generation] = min(at_s, self.first_s.get(generation, at_s))
                times_s = self.times_s.setdefault(generation, {})
                times_s[event["step"]] = min(at_s, times_s.get(event["step"], at_s))
            case "ended":
                self.ended_s.setdefault(event["pid"], at_s)

    @property
    def generation(self) -> int:
        return max(self.first_s, default=0)

    @property
    def last_node(self) -> Node:
        """That of the highest rank, which writes no rank 0's log."""
        return self.cluster.nodes[self.worlds[self.generation][-1]]

    def steady(self, after: int = 0) -> None:
        """Wait until a generation above `after` trains steadily."""

        def so() -> bool | None:
            self.look()
            if not self.cluster.running():
                where = self.cluster.log_dir / self.cluster.job
                raise SystemExit(f"error: the agents ended; see {where}")
            generation = self.generation
            steps = len(self.times_s.get(generation, ()))
            return (generation > after and steps >= STEADY_STEPS) or None

        wait_for("steady training", so)

    def quiet(self, seconds: float) -> None:
        """Wait until the present generation has trained for so long, without another change."""
        generation = self.generation

        def so() -> bool | None:
            self.look()
            first_s, last_s = self.first_s[generation], self.last_s(generation)
            return last_s - first_s >= seconds or None

        if seconds:
            wait_for("quiet training", so)

    def all_stand_by(self, count: int) -> None:
        """Wait until so many processes have come to stand by on each node that runs."""

        def so() -> bool | None:
            self.look()
            nodes = [node.name for node in self.cluster.running()]
            return all(self.stood_by[name] >= count for name in nodes) or None

        wait_for("a process that stands by on each node", so)

    def last_s(self, generation: int) -> float:
        """When the last step of a generation was done, so far."""
        return max(self.times_s[generation].values())

    def next_step_s(self, before: int) -> float:
        """When the first step of a generation above `before` was done."""

        def next_step() -> float | None:
            self.look()
            return min((s for g, s in self.first_s.items() if g > before), default=None)

        return wait_for("the next step", next_step)

    def strike(self, blow: Callable[[], int | None]) -> Struck:
        """From a blow to the next step done. blow: gives the process id of a killed worker."""
        before = self.generation
        struck_s = time.time()
        pid = blow()
        seconds = self.next_step_s(before) - struck_s
        noticed_s = self.ended_s[pid] - struck_s if pid is not None else None
        self.steady(before)
        lost = self.lineage.lost(self.generation)
        return Struck(seconds=seconds, recomputed=lost, noticed_s=noticed_s)

    def change(self, ask: Callable[[], object], quiet_s: float = QUIET_S) -> Struck:
        """How long those that train on stand still for a graceful change of the world.

        Args:
            ask: asks for the change.
            quiet_s: seconds of training before that and after the change.
        """
        self.quiet(quiet_s)
        before = self.generation
        ask()
        first_s = self.next_step_s(before)
        pause_s = first_s - self.last_s(before)
        self.steady(before)
        self.quiet(quiet_s)
        return Struck(
            seconds=pause_s,
            recomputed=self.lineage.lost(self.generation),
            smoothness=smoothness(self.times_s, before),
        )

    def silence(self, node: Node) -> None:
        """Stop every process of a node: it neither works nor speaks, and nobody is told."""
        for pid in [node.process.pid, *descendants(node.process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)


def scale(cluster: Cluster, endpoint: str, most: int, access: Sequence[str]) -> None:
    """Has the job have so many nodes at most, as an operator does.

    Args:
        cluster: its nodes.
        endpoint: etcd's.
        most: number of nodes.
        access: options that show the command the job's token, if it has one.
    """
    command = [sys.executable, "-m", "elasticzero.cli", "scale", f"1:{most}"]
    command += ["--job", cluster.job, "--etcd", endpoint, *access]
    subprocess.run(command, check=True, capture_output=True)


@contextmanager
def trial(
    endpoint: str, runs: Path, options: list[str], script: list[str], *, nodes: int = 2
) -> Iterator[Trial]:
    """A cluster of `nodes` agents that run a script of this folder."""
    job = f"bench-{time.time_ns()}"
    common = ["--etcd", endpoint, "--nnodes", "1:3", "--settle", "1", "--http-port", "0", *options]
    script = [str(HERE / script[0]), *script[1:]]
    cluster = Cluster([*common, *script], job, runs, cluster_environment(nodes))
    try:
        for _ in range(nodes):
            cluster.start_node()
        yield Trial(cluster)
    finally:
        cluster.stop()


def round_of(
    strategy: str, endpoint: str, runs: Path, lease_ttl_s: int, *, brief: bool = False
) -> Generator[tuple[str, Struck]]:
    """Yields each case as it is over, one after another in one job of two nodes, at times three.

    Args:
        strategy: its name; with `+keep` behind it workers' processes are kept, and with `+tls` the
            nodes have a token, and so TLS.
        endpoint: etcd's.
        runs: directory of logs and checkpoints.
        lease_ttl_s: seconds of the nodes' leases.
        brief: whether to leave out a node that falls silent, which takes longer than a lease, an
            operator's other sizes, and the quiet training around planned changes.
    """
    name, *additions = strategy.split("+")
    options = ["--strategy", name, "--lease-ttl", str(lease_ttl_s)]
    options += ["--keep-workers"] if "keep" in additions else []
    access: list[str] = []
    if "tls" in additions:
        token = runs / "token"
        token.write_text("the-secret-of-this-benchmark-alone")
        token.chmod(0o600)
        access = ["--token-file", str(token)]
    options += access
    options += ["--checkpoint-dir", str(runs / f"saved-{time.time_ns()}")]
    quiet_s = 0.0 if brief else QUIET_S
    with trial(endpoint, runs, options, ["recovery_ours.py"]) as t:
        cluster = t.cluster
        t.steady()
        yield "worker", t.strike(lambda: cluster.kill_worker(t.last_node))
        yield "join", t.change(cluster.start_node, quiet_s)
        if not brief:
            yield "fewer", t.change(lambda: scale(cluster, endpoint, 2, access), quiet_s)
            yield "more", t.change(lambda: scale(cluster, endpoint, 3, access), quiet_s)
        yield "drain", t.change(lambda: cluster.drain(t.last_node), quiet_s)
        if not brief:
            victim = t.last_node
            yield "silent", t.strike(lambda: t.silence(victim))
            cluster.kill_node(victim)
            t.change(cluster.start_node, 0.0)
        last = t.last_node
        yield "node", t.strike(lambda: cluster.kill_node(last))


def slow_round(
    strategy: str, standby: str, endpoint: str, runs: Path, lease_ttl_s: int
) -> Generator[tuple[str, Struck]]:
    """Yields the cases of a script that begins slowly, in one job of two nodes.

    Args:
        strategy: its name.
        standby: "auto" or "off"; with the first, blows fall once processes stand by.
        endpoint: etcd's.
        runs: directory of logs.
        lease_ttl_s: seconds of the nodes' leases.
    """
    options = ["--strategy", strategy, "--lease-ttl", str(lease_ttl_s), "--standby", standby]
    with trial(endpoint, runs, options, ["recovery_ours.py", "--begin", str(BEGIN_S)]) as t:
        cluster = t.cluster
        for number, case in enumerate(("slow worker", "slow node"), 1):
            t.steady()
            if standby == "auto":
                t.all_stand_by(number)
            if case == "slow worker":
                yield case, t.strike(lambda: cluster.kill_worker(t.last_node))
            else:
                yield case, t.strike(lambda: cluster.kill_node(t.last_node))
