"""Measures for how long islands make no step when another one is struck.

    python benchmarks/island_gaps.py [--faults kill,join] [--phases "it trains"] [--record]

Three islands train on this machine, with a rest in each step, so that they do not compete for its
cores. One is killed, frozen, drained or loses a worker, or another one comes, in each phase of a
round. The gap is the longest time between two steps of the other islands in the seconds after that,
beside the longest one in as many seconds before, and their median step.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

from performance_page import publish_table
from recovery_trial import wait_for

from elasticzero.launcher.local.cluster import Cluster, cluster_environment
from elasticzero.launcher.store.etcd.server import EtcdServer
from elasticzero.text import table_text
from tests.integration.island_phases import (
    FAULTS,
    PHASES,
    RoundsWatch,
    cells,
    send_all,
    strike,
)

SCRIPT = Path(__file__).resolve().parent.parent / "tests" / "integration" / "scripts" / "islands.py"
LIMIT_S = 120.0
STEPS_BEFORE = 35
"""Steps that each island has made before one is struck."""
HEAD = ["fault", "cells", "median step", "gap before", "gap after", "largest gap after"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Holds what one strike did to the other islands."""

    fault: str
    phase: str
    role: str
    step_s: float
    """Median time between their steps before it."""
    before_s: float
    """Longest time between two of their steps in the seconds before it."""
    gap_s: float
    """Longest time between two of their steps in the seconds after it."""


def steps_of(log: Path) -> list[float]:
    """Returns the ends of an island's steps, in seconds of one clock."""
    ends = []
    for line in log.read_text().splitlines() if log.exists() else ():
        with suppress(ValueError, KeyError, TypeError):
            ends.append(float(json.loads(line)["at_s"]))
    return ends


def measure(endpoint: str, number: int, cell: Sequence[str], options: argparse.Namespace) -> Gap:
    """Returns what one strike does.

    Args:
        endpoint: The address of etcd.
        number: That of the job.
        cell: The fault, the phase, and the role of the island that is struck.
        options: The options of this command.
    """
    fault, phase, role = cell
    job = f"gaps-{number}"
    with tempfile.TemporaryDirectory(prefix="elasticzero-gaps-") as runs:
        hold = Path(runs) / "hold"
        diloco = f"every={options.every},outer-lr=1,outer-momentum=0"
        command = ["--etcd", endpoint, "--http-port", "0", "--preemption", "none"]
        command += ["--nnodes", "3:4", "--strategy", "diloco", "--diloco", diloco]
        command += ["--lease-ttl", "2", str(SCRIPT), "--samples", "100000"]
        command += ["--pause", str(options.pause), "--ballast", str(options.ballast)]
        cluster = Cluster(command, job, Path(runs), cluster_environment(4))
        logs = Path(runs) / job
        try:
            for _ in range(3):
                cluster.start_node()
            nodes = [*cluster.nodes]
            if fault == "join":
                hold.touch()
                cluster.environment = {**cluster.environment, "TESTER_HOLD": str(hold)}
                cluster.start_node()
                wait_for("a newcomer", lambda: _holds(logs / "node-3" / "0.log") or None, LIMIT_S)
            wait_for("steps", lambda: _have_begun(logs, nodes) or None, LIMIT_S)
            watch = RoundsWatch(endpoint, job)
            try:
                victim = watch.wait_for_victim(phase, role, 1, "node-3")
            finally:
                watch.close()
            struck_s = time.time()
            strike(cluster, victim, fault, hold)
            time.sleep(options.seconds)
            if fault == "freeze":
                send_all(cluster.nodes[victim], signal.SIGKILL)
            others = [n for n in nodes if fault == "join" or n != victim]
            ends = [steps_of(logs / n / "0.log") for n in others]
        finally:
            cluster.stop()
    pairs = [pair for steps in ends for pair in pairwise(steps)]
    began_s = struck_s - options.seconds
    before = [end - start for start, end in pairs if start > began_s and end <= struck_s]
    after = [end - start for start, end in pairs if end > struck_s]
    return Gap(
        fault=fault,
        phase=phase,
        role=role,
        step_s=statistics.median(before),
        before_s=max(before),
        gap_s=max(after),
    )


def _holds(log: Path) -> bool:
    return log.exists() and "holds" in log.read_text()


def _have_begun(logs: Path, nodes: Sequence[str]) -> bool:
    return all(len(steps_of(logs / node / "0.log")) > STEPS_BEFORE for node in nodes)


def rows(gaps: Sequence[Gap]) -> Iterator[list[str]]:
    """Yields a row for each fault."""
    for fault, group in groupby(gaps, key=lambda gap: gap.fault):
        of_fault = list(group)
        step_s = statistics.median(gap.step_s for gap in of_fault)
        largest = max(of_fault, key=lambda gap: gap.gap_s / gap.step_s)
        yield [
            fault,
            str(len(of_fault)),
            f"{step_s * 1e3:.0f} ms",
            f"{statistics.median(gap.before_s for gap in of_fault) * 1e3:.0f} ms",
            f"{statistics.median(gap.gap_s for gap in of_fault) * 1e3:.0f} ms",
            f"{largest.gap_s * 1e3:.0f} ms ({largest.phase}, {largest.role})",
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--phases", default=",".join(PHASES))
    parser.add_argument("--every", type=int, default=5, help="inner steps of a round")
    parser.add_argument("--pause", type=float, default=0.2, help="seconds of rest in a step")
    parser.add_argument("--ballast", type=int, default=1 << 18, help="parameters")
    parser.add_argument("--seconds", type=float, default=6.0, help="after a strike")
    parser.add_argument("--record", action="store_true", help="write the table and the figures")
    options = parser.parse_args()
    chosen = [
        cell
        for cell in cells()
        if cell[0] in options.faults.split(",") and cell[1] in options.phases.split(",")
    ]
    gaps = []
    with EtcdServer() as etcd:
        for number, cell in enumerate(chosen):
            gaps.append(measure(etcd.endpoint, number, cell, options))
            gap = gaps[-1]
            print(*cell, f"{gap.step_s:.3f}  {gap.before_s:.3f}  {gap.gap_s:.3f} s", flush=True)
    print(table_text(HEAD, [*rows(gaps)]), end="")
    if options.record:
        publish_table("island-gaps", "islands gaps", HEAD, [*rows(gaps)], gaps)


if __name__ == "__main__":
    main()
