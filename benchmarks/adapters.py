"""Measures a step by a framework's adapter beside the framework's own with DDP, by turns.

    python benchmarks/adapters.py [--pairs 9] [--steps 60] [--record]

Each turn is a run of two ranks over gloo: torchrun's of the framework by itself, and elasticzero
run's of its adapter, with the strategy ddp and snapshots as they are unless told.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from performance_page import about_in_words, machine, present_commit, publish, record
from ratio import Ratio

RANK = Path(__file__).resolve().parent / "adapters_rank.py"
FRAMEWORKS = ("transformers", "lightning", "accelerate")
MOST = 1.03
LIMIT_S = 600


def run(framework: str, whose: str, steps: int) -> float:
    """Returns the median of a step's seconds, as the first rank saw it."""
    with tempfile.TemporaryDirectory() as logs:
        launchers = {
            "theirs": ["torch.distributed.run", "--standalone", "--nproc-per-node=2"],
            "ours": ["elasticzero.cli", "run", "--nproc-per-node=2"],
        }
        options = {
            "theirs": ["--redirects=3", "--log-dir", logs],
            "ours": ["--preemption=none", "--http-port=0", "--log-dir", logs],
        }
        arguments = [*launchers[whose], *options[whose], str(RANK), framework, whose, str(steps)]
        done = subprocess.run(
            [sys.executable, "-m", *arguments],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        logged = [path.read_text() for path in sorted(Path(logs).rglob("*")) if path.is_file()]
        lines = [line for text in [done.stdout, *logged] for line in text.splitlines()]
    told = [line for line in lines if line.startswith('{"seconds"')]
    timings: list[list[float]] = [json.loads(line)["seconds"] for line in told]
    if done.returncode or not timings:
        last = "\n".join(text[-2000:] for text in [done.stderr, *logged])
        raise SystemExit(f"error: {arguments} ended with {done.returncode}\n{last}")
    return statistics.median(timings[0])


def measure(framework: str, pairs: int, steps: int) -> dict[str, Any]:
    """Returns the seconds of a step in each turn of both contenders."""
    seconds: dict[str, list[float]] = {"theirs": [], "ours": []}
    for turn in range(pairs):
        for whose in sorted(seconds, reverse=turn % 2 == 0):
            seconds[whose].append(run(framework, whose, steps))
    return {"framework": framework, "seconds": seconds}


def table(comparisons: list[dict[str, Any]]) -> str:
    lines = ["| | with DDP, ms | adapter, ms | ratio | 95 % range | wanted | |", "|" + "---|" * 7]
    for comparison in comparisons:
        theirs, ours = comparison["seconds"]["theirs"], comparison["seconds"]["ours"]
        ratio = Ratio.of(ours, theirs)
        met = "met" if ratio.low <= MOST else "NOT met"
        medians = [f"{statistics.median(seconds) * 1e3:.1f}" for seconds in (theirs, ours)]
        lines.append(
            f"| {comparison['framework']} | {medians[0]} | {medians[1]} | {ratio.median:.3f} | "
            f"{ratio.low:.3f} to {ratio.high:.3f} | ≤ {MOST} | {met} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=9, help="turns of each contender")
    parser.add_argument("--steps", type=int, default=60, help="steps that are counted in a turn")
    parser.add_argument("--record", action="store_true", help="write the table and the figures")
    options = parser.parse_args()
    comparisons = [measure(framework, options.pairs, options.steps) for framework in FRAMEWORKS]
    text = table(comparisons)
    print(text)
    if options.record:
        about = machine("torch")
        command = f"python benchmarks/adapters.py {' '.join(sys.argv[1:])}".strip()
        setting = f"{about_in_words(about, present_commit())}, torch {about['torch']}."
        publish("adapters", f"```\n{command}\n```\n\n{setting}\n\n{text}")
        figures = {"machine": about, "command": command, "found": comparisons}
        print(record(f"adapters-{date.today()}", figures))


if __name__ == "__main__":
    main()
