"""Seconds from SIGKILL to the next finished step: ElasticZero beside torchrun, in one run.

    python benchmarks/recovery.py [--repeat 5] [--strategies ddp,zero2] [--no-torchrun]

Two nodes of one worker each on this machine. "worker": one worker is killed. "node": every process
of one node is killed at once. torchrun gets its defaults.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from elasticzero.launcher.embedded import EmbeddedEtcd
from elasticzero.launcher.local import Cluster, children_of, cluster_environment, descendants

HERE = Path(__file__).resolve().parent
GIVE_UP_S = 180.0
STEADY_STEPS = 30


@dataclass(frozen=True, slots=True)
class Row:
    """One case under one launcher."""

    launcher: str
    case: str
    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


def wait_for(what: str, found: Callable[[], float | None]) -> float:
    deadline_s = time.monotonic() + GIVE_UP_S
    while time.monotonic() < deadline_s:
        value = found()
        if value is not None:
            return value
        time.sleep(0.01)
    raise SystemExit(f"error: {what} did not happen within {GIVE_UP_S:g} s")


def ours(case: str, strategy: str, endpoint: str, runs: Path) -> float:
    """Seconds from the kill to the first step of the next generation, as its rank 0's agent
    heard."""
    job = f"bench-{case}-{strategy}-{time.time_ns()}"
    words = ["--etcd", endpoint, "--nnodes", "1:2", "--http-port", "0", "--strategy", strategy]
    words += ["--checkpoint-dir", str(runs / f"{job}-saved"), "--checkpoint-every", "10"]
    cluster = Cluster([*words, str(HERE / "recovery_ours.py")], job, runs, cluster_environment(2))
    state = {"generation": 0, "step": 0, "time": 0.0}

    def look() -> None:
        for _, event in cluster.events():
            if event["event"] == "step" and event["generation"] >= state["generation"]:
                first = event["generation"] > state["generation"]
                moment = event["time"] if first else state["time"]
                state.update(generation=event["generation"], step=event["step"], time=moment)

    def steady() -> float | None:
        look()
        if not cluster.running():
            raise SystemExit(f"error: the agents ended; see {cluster.log_dir / job}")
        return 0.0 if state["step"] >= STEADY_STEPS else None

    def recovered() -> float | None:
        look()
        return state["time"] if state["generation"] > before else None

    try:
        for _ in range(2):
            cluster.start_node()
        wait_for("steady training", steady)
        before = state["generation"]
        node = cluster.nodes["node-1"]
        killed_s = time.time()
        cluster.kill_node(node) if case == "node" else cluster.kill_worker(node)
        return wait_for("the next step", recovered) - killed_s
    finally:
        cluster.stop()


def torchrun(case: str, runs: Path) -> float:
    """The same for torchrun's c10d rendezvous, on rank 0's own notes."""
    notes = runs / f"notes-{time.time_ns()}"
    notes.touch()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--rdzv-backend"]
    words += ["c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "b", "--max-restarts"]
    words += ["100", "--nproc-per-node", "1", str(HERE / "recovery_torchrun.py"), str(notes)]
    environment = {**os.environ, **cluster_environment(2)}
    agents = []

    def lines() -> list[list[str]]:
        return [line.split() for line in notes.read_text().splitlines()]

    def steady() -> float | None:
        both = [line for line in lines() if line[1] == "2"]
        return 0.0 if len(both) >= STEADY_STEPS else None

    def recovered() -> float | None:
        later = [line for line in lines() if line[2] not in before]
        return float(later[0][0]) if later else None

    try:
        for _ in range(2):
            quiet = subprocess.DEVNULL
            agents.append(subprocess.Popen(words, env=environment, stdout=quiet, stderr=quiet))
            time.sleep(1.0)
        wait_for("torchrun's steady training", steady)
        before = {line[2] for line in lines()}
        victim = next(a for a in agents if int(list(before)[-1]) not in children_of(a.pid))
        worker = children_of(victim.pid)[-1]
        killed_s = time.time()
        for pid in [victim.pid, *descendants(victim.pid)] if case == "node" else [worker]:
            os.kill(pid, signal.SIGKILL)
        return wait_for("torchrun's next step", recovered) - killed_s
    finally:
        for agent in agents:
            for pid in [agent.pid, *descendants(agent.pid)]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            agent.wait()


def table(rows: list[Row]) -> str:
    peers = {row.case: row.median_s for row in rows if row.launcher == "torchrun"}
    lines = [
        "| launcher | killed | median s | fastest | slowest | torchrun / this |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = f"{peers[row.case] / row.median_s:.1f}" if row.case in peers else "-"
        lines.append(
            f"| {row.launcher} | {row.case} | {row.median_s:.2f} | {min(row.seconds):.2f} "
            f"| {max(row.seconds):.2f} | {ratio} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--torchrun-repeat", type=int, default=1)
    parser.add_argument("--strategies", default="ddp,zero1,zero2,zero3")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/")
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, EmbeddedEtcd() as etcd:
        runs = Path(folder)
        for case in ("worker", "node"):
            for strategy in options.strategies.split(","):
                seconds = [ours(case, strategy, etcd.endpoint, runs) for _ in range(options.repeat)]
                rows.append(Row(f"elasticzero {strategy}", case, tuple(seconds)))
                print(rows[-1], flush=True)
            if options.torchrun_repeat:
                seconds = [torchrun(case, runs) for _ in range(options.torchrun_repeat)]
                rows.append(Row("torchrun", case, tuple(seconds)))
                print(rows[-1], flush=True)
    print(table(rows))
    if options.record:
        record(rows)


def record(rows: list[Row]) -> None:
    """A dated result with the machine it was taken on."""
    import torch

    path = HERE / "results" / f"recovery-{date.today()}.json"
    machine = {
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    found = [{"launcher": r.launcher, "killed": r.case, "seconds": r.seconds} for r in rows]
    path.write_text(
        json.dumps({"date": str(date.today()), "machine": machine, "rows": found}, indent=2) + "\n"
    )
    print(f"recorded in {path}")


if __name__ == "__main__":
    main()
