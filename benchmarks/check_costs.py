"""Measures what the checks at boundaries and the round trip after a restore take of a step.

`training.py --checks` calls this. For each strategy and size one job trains a few steps and leaves
a checkpoint, and a second one goes on from it, on two nodes of one worker each.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from recovery_trial import trial, wait_for

from elasticzero.launcher.store.etcd.server import EtcdServer

SIZES = {"2000": "2,000 parameters and 1,500 buffers", "105M": "105 million elements"}
"""Descriptions of the models, by size."""
STEPS = {"2000": (10, 60), "105M": (2, 4)}
"""Steps that are not timed, and steps that are, by size."""
FIRST_STEPS = 2
"""Steps of the first job."""
LIMIT_S = 600.0
ROUND_TRIP = "round trip"
OF_OTHERS = ("waits for other ranks", "verification", "captures", "all else at a boundary")
"""Kinds that are no checks of what the script does."""
MOST_SHARE = 0.01
"""Greatest share of a step that a check may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Holds the seconds of rank 0."""

    strategy: str
    size: str
    step_s: float
    of_step_s: Mapping[str, float]
    """Seconds of each step, by kind."""
    restore_s: float
    of_restore_s: Mapping[str, float]
    """Seconds of the one restore, by kind."""

    @property
    def checks_s(self) -> float:
        """Returns the seconds of each step for checks of every kind."""
        return sum(s for kind, s in self.of_step_s.items() if kind not in OF_OTHERS)


def _run(endpoint: str, runs: Path, options: Sequence[str], script: Sequence[str]) -> None:
    """Runs a job of this folder's script to its end."""
    with trial(endpoint, runs, list(options), list(script)) as t:

        def ended() -> bool | None:
            t.look()
            return not t.cluster.running() or None

        wait_for("the end of the training", ended, LIMIT_S)


def costs_of(strategy: str, size: str, endpoint: str, runs: Path) -> Costs:
    """Returns what the checks cost with a strategy and a model of this size."""
    saved, out = runs / f"saved-{strategy}-{size}", runs / f"{strategy}-{size}.json"
    options = ["--strategy", strategy, "--checkpoint-dir", str(saved), "--nnodes", "2"]
    script = ["training_checks.py", str(out), "--size", size]
    warm_up, steps = STEPS[size]
    _run(endpoint, runs, options, [*script, "--warm-up", "0", "--steps", str(FIRST_STEPS)])
    script += ["--warm-up", str(warm_up), "--steps", str(steps)]
    _run(endpoint, runs, options, script)
    shutil.rmtree(saved)
    document = json.loads(out.read_text())
    if not document.pop("resumed"):
        raise SystemExit(f"error: the second job of {strategy} did not go on; see {runs}")
    return Costs(strategy=strategy, size=size, **document)


def measure_checks(sizes: Iterable[str], strategies: Sequence[str]) -> list[Costs]:
    """Returns the costs of each strategy with each size."""
    runs = Path(tempfile.mkdtemp(prefix="elasticzero-checks-"))
    with EtcdServer() as etcd:
        costs = [
            costs_of(strategy, size, etcd.endpoint, runs)
            for size in sizes
            for strategy in strategies
        ]
    shutil.rmtree(runs)
    return costs


def _cell(seconds: float, step_s: float) -> str:
    if not seconds:
        return ""
    marked = "**" if seconds > MOST_SHARE * step_s else ""
    return f"{seconds * 1e3:.2f} ms, {marked}{seconds / step_s:.2%}{marked}"


def checks_table(costs: Sequence[Costs], size: str) -> str:
    """Returns the table of one size, with a column for each strategy."""
    columns = [cost for cost in costs if cost.size == size]
    kinds = dict.fromkeys(kind for cost in columns for kind in cost.of_step_s)
    checks = [kind for kind in kinds if kind not in OF_OTHERS]
    rows = [["a step", *(f"{cost.step_s * 1e3:.1f} ms" for cost in columns)]]
    rows += [
        [kind, *(_cell(cost.of_step_s.get(kind, 0.0), cost.step_s) for cost in columns)]
        for kind in [*checks, *(kind for kind in OF_OTHERS if kind in kinds)]
    ]
    totals = [_cell(cost.checks_s, cost.step_s) for cost in columns]
    rows.insert(1 + len(checks), ["all checks", *totals])
    restores = [
        f"{cost.of_restore_s.get(ROUND_TRIP, 0.0) * 1e3:.1f} ms of {cost.restore_s * 1e3:.0f} ms"
        for cost in columns
    ]
    rows.append(["the round trip of a restore, once in a generation", *restores])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    heading = f"| | {' | '.join(cost.strategy for cost in columns)} |"
    rule = "|" + "---|" * (len(columns) + 1)
    return "\n".join([f"{SIZES[size]}, 2 ranks:", "", heading, rule, *lines])
