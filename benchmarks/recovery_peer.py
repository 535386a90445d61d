"""torchrun struck in the same way: two agents of its c10d rendezvous, with its defaults."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from recovery_trial import GIVE_UP_S, HERE, STEADY_STEPS, wait_for

from elasticzero.launcher.local.cluster import cluster_environment
from elasticzero.processes import children_of, descendants


def torchrun(case: str, runs: Path, give_up_s: float = GIVE_UP_S, *, begin_s: float = 0.0) -> float:
    """Seconds from SIGKILL of a worker, or of a whole node, to the next step, on rank 0's notes.

    Args:
        case: "worker" or "node".
        runs: directory of the notes.
        give_up_s: seconds within which steps must come.
        begin_s: seconds of a core that the script takes as it begins.

    Raises `NotDone` if the ranks do not come to train together, or to another step, within
    `give_up_s`.
    """
    notes = runs / f"notes-{time.time_ns()}"
    notes.touch()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--rdzv-backend"]
    command += ["c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "b", "--max-restarts"]
    command += ["100", "--nproc-per-node", "1", str(HERE / "recovery_torchrun.py"), str(notes)]
    command += ["--begin", str(begin_s)]
    environment = {**os.environ, **cluster_environment(2)}
    agents: list[subprocess.Popen[bytes]] = []

    def lines() -> list[list[str]]:
        return [line.split() for line in notes.read_text().splitlines()]

    def steady() -> bool | None:
        return len([line for line in lines() if line[1] == "2"]) >= STEADY_STEPS or None

    def recovered() -> float | None:
        later = [line for line in lines() if line[2] not in before]
        return float(later[0][0]) if later else None

    try:
        for _ in range(2):
            quiet = subprocess.DEVNULL
            agents.append(subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet))
            time.sleep(1.0)
        wait_for("torchrun's steady training", steady, give_up_s)
        before = {line[2] for line in lines()}
        victim = next(a for a in agents if int(list(before)[-1]) not in children_of(a.pid))
        worker = children_of(victim.pid)[-1]
        killed_s = time.time()
        for pid in [victim.pid, *descendants(victim.pid)] if case == "node" else [worker]:
            os.kill(pid, signal.SIGKILL)
        return wait_for("torchrun's next step", recovered, give_up_s) - killed_s
    finally:
        for agent in agents:
            for pid in [agent.pid, *descendants(agent.pid)]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            agent.wait()
