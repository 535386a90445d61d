"""What ElasticZero costs while nothing happens: its agents, and the time of a training step."""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recovery_trial import GIVE_UP_S, trial, wait_for

from elasticzero.processes import children_of

REST_STEP_S = 0.2
"""Steps of this length while the agents' cost is measured."""
PAIR_S = 20.0
"""Two blocks of steps take no longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AtRest:
    """One agent's processes over a time of training."""

    seconds: float
    agent_cores: float
    agent_bytes: int
    """Resident."""
    server_cores: float
    """The fork server, which has torch imported and forks the workers."""
    server_bytes: int
    """Its proportional share of what is resident."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Seconds a step, by turns in the same processes: blocks with ElasticZero, and without."""

    strategy: str
    bare: str
    """What the steps without ElasticZero are."""
    own_s: tuple[float, ...]
    bare_s: tuple[float, ...]

    @property
    def shares(self) -> list[float]:
        """Of a step, by pairs of neighbouring blocks."""
        return [ours / bare - 1.0 for ours, bare in zip(self.own_s, self.bare_s, strict=True)]

    @property
    def share(self) -> float:
        return middle_mean(self.shares)

    @property
    def likely(self) -> tuple[float, float]:
        """Where the share lies with 95 %, for all that this machine's noise lets one say."""
        drawn, shares = random.Random(0), self.shares
        means = sorted(middle_mean(drawn.choices(shares, k=len(shares))) for _ in range(2000))
        return means[49], means[-50]


def middle_mean(values: Sequence[float]) -> float:
    """The mean without the least and the greatest tenth: a host's pauses lie there, and what comes
    only in some blocks, as snapshots do, still counts."""
    cut = len(values) // 10
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def cpu_s(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _kib(path: str, key: str) -> int:
    for line in Path(path).read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) << 10
    return 0


def at_rest(endpoint: str, runs: Path, seconds: float) -> list[AtRest]:
    """Both agents of a job that trains for `seconds`."""
    script = ["recovery_ours.py", "--pause", str(REST_STEP_S)]
    with trial(endpoint, runs, [], script) as t:
        t.steady()
        agents = [n.process.pid for n in t.cluster.running()]
        keepers = [children_of(agent)[0] for agent in agents]
        trios = [(a, k, children_of(k)[0]) for a, k in zip(agents, keepers, strict=True)]
        before = [(cpu_s(agent), cpu_s(server)) for agent, _, server in trios]
        began_s = time.monotonic()
        time.sleep(seconds)
        took_s = time.monotonic() - began_s
        return [
            AtRest(
                seconds=took_s,
                agent_cores=(cpu_s(agent) - agent_s) / took_s,
                agent_bytes=_kib(f"/proc/{agent}/status", "VmRSS"),
                server_cores=(cpu_s(server) - server_s) / took_s,
                server_bytes=sum(
                    _kib(f"/proc/{pid}/smaps_rollup", "Pss") for pid in (keeper, server)
                ),
            )
            for (agent, keeper, server), (agent_s, server_s) in zip(trios, before, strict=True)
        ]


def overhead(strategy: str, endpoint: str, runs: Path, pairs: int) -> Overhead:
    """Blocks of steps with and without ElasticZero, by turns."""
    out = runs / f"overhead-{time.time_ns()}.json"
    script = ["recovery_overhead.py", str(out), "--pairs", str(pairs)]
    with trial(endpoint, runs, ["--strategy", strategy], script) as t:

        def ended() -> bool | None:
            t.look()
            return not t.cluster.running() or None

        wait_for("the end of the training", ended, GIVE_UP_S + pairs * PAIR_S)
    try:
        blocks = json.loads(out.read_text())
    except FileNotFoundError:
        raise SystemExit(f"error: {t.cluster.log_dir / t.cluster.job} says why it failed") from None
    return Overhead(
        strategy=strategy,
        bare=blocks["bare"],
        own_s=tuple(blocks["own_s"]),
        bare_s=tuple(blocks["bare_s"]),
    )
