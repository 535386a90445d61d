"""The one-minute story: three nodes train a GPT, one is killed, one comes; then the books are
checked, and a report is written.

make demo
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elasticzero.launcher.observability.lineage import Lineage, committed

REPOSITORY = Path(__file__).resolve().parent.parent
GPT = REPOSITORY / "examples" / "gpt.py"
REPORT = REPOSITORY / "build" / "demo-report.html"
JOB = "demo"


def elasticzero(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "elasticzero.cli", *arguments]


def say(text: str) -> None:
    print(text, flush=True)


def train(runs: Path, options: argparse.Namespace) -> None:
    """Three nodes, one SIGKILL, one newcomer."""
    arguments = ["local", "--nodes", "3", "--job", JOB, "--log-dir", str(runs / "logs")]
    arguments += ["--strategy", "zero2", "--checkpoint-dir", str(runs / "checkpoints")]
    arguments += ["--checkpoint-every", str(options.checkpoint_every)]
    arguments += ["--fault", f"kill-node@{options.kill_at}", "--fault", f"join@{options.join_at}"]
    arguments += [str(GPT), "--steps", str(options.steps), "--trace"]
    subprocess.run(elasticzero(*arguments), check=True)


def events(runs: Path) -> Iterator[dict[str, Any]]:
    for path in sorted((runs / "logs" / JOB).glob("*/events.jsonl")):
        for line in path.read_text().splitlines():
            yield json.loads(line)


def traces(runs: Path) -> Iterator[tuple[int, int, list[int]]]:
    """What the workers wrote about the samples of each global batch."""
    for path in sorted((runs / "logs" / JOB).glob("*/[0-9]*.log")):
        for line in path.read_text(errors="replace").splitlines():
            if line.startswith('{"trace"'):
                trace = json.loads(line)["trace"]
                yield trace["generation"], trace["step"], trace["samples"]


def check_samples(runs: Path, options: argparse.Namespace) -> None:
    """Every committed step there once, every sample in one of them."""
    lineage = Lineage()
    for event in events(runs):
        lineage.take(event)
    steps = committed(lineage, traces(runs))
    if sorted(steps) != list(range(1, options.steps + 1)):
        missing = sorted(set(range(1, options.steps + 1)) - set(steps))
        raise SystemExit(f"error: steps {missing[:5]} are in no generation's lineage")
    used = [sample for step in steps.values() for sample in step]
    if len(set(used)) != len(used):
        raise SystemExit("error: a sample was used twice within the epoch")
    say(
        f"samples: {len(used)} in {len(steps)} committed steps, each used exactly once; "
        f"{lineage.recomputed} steps recomputed"
    )


def report(runs: Path, path: Path) -> None:
    """The page that says what happened, made from the logs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arguments = ["report", str(runs / "logs" / JOB), "--output", str(path)]
    subprocess.run(elasticzero(*arguments), check=True)


def validation_loss(text: str) -> float:
    losses = re.findall(r"validation loss ([0-9.]+)", text)
    if not losses:
        raise SystemExit("error: the training printed no validation loss")
    return float(losses[-1])


def reshard_and_evaluate(runs: Path, options: argparse.Namespace) -> None:
    """The last checkpoint from three ranks to one, and what the model on it says."""
    logs = "".join(p.read_text() for p in (runs / "logs" / JOB).glob("*/0.log"))
    before = validation_loss(logs)
    say(f"validation loss on 3 ranks: {before:.6f}")
    source, target = runs / "checkpoints", runs / "resharded"
    arguments = ["checkpoint", "reshard", str(source), str(target), "--world-size", "1"]
    subprocess.run(elasticzero(*arguments), check=True)
    say("evaluating the resharded checkpoint on 1 rank")
    arguments = ["run", "--checkpoint-dir", str(target), "--log-dir", str(runs / "logs"), "--tee"]
    arguments += ["--http-port", "0", "--job", f"{JOB}-evaluate", "--strategy", "zero2"]
    arguments += [str(GPT), "--steps", str(options.steps)]
    completed = subprocess.run(elasticzero(*arguments), check=True, capture_output=True, text=True)
    after = validation_loss(completed.stdout)
    say(f"validation loss on 1 rank, from the resharded checkpoint: {after:.6f}")
    if abs(before - after) > 1e-5:
        raise SystemExit(f"error: the two validation losses differ by {abs(before - after):.2e}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train, lose a node, gain one, check the books.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kill-at", type=int, default=60)
    parser.add_argument("--join-at", type=int, default=110)
    parser.add_argument("--checkpoint-every", type=int, default=25)
    parser.add_argument("--keep", type=Path, help="keep logs and checkpoints in this directory")
    parser.add_argument("--report", type=Path, default=REPORT, help="where the report is written")
    options = parser.parse_args()
    runs = options.keep or Path(tempfile.mkdtemp(prefix="elasticzero-demo-"))
    began_s = time.monotonic()
    try:
        train(runs, options)
        check_samples(runs, options)
        reshard_and_evaluate(runs, options)
        report(runs, options.report)
    except subprocess.CalledProcessError as error:
        raise SystemExit(
            f"error: {' '.join(error.cmd[2:5])} … ended with {error.returncode}"
        ) from None
    finally:
        if options.keep is None:
            shutil.rmtree(runs, ignore_errors=True)
    say(f"the whole demo took {time.monotonic() - began_s:.0f} s")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
