"""Compares what a small GPT has learnt with each `--wire`, through faults and without.

    python benchmarks/wire_loss.py [--wires fp32,int8] [--seeds 3] [--steps 200] [--record]

Each run trains `examples/gpt.py` on two nodes of this machine, on equal samples. In every other run
two workers and a node are killed on the way, and a node comes in its place. The loss is that of
validation samples after the last step; its spread is that of the seeds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from performance_page import about_in_words, machine, present_commit, publish, record

from elasticzero.options.wire import wire_of
from elasticzero.text import table_text

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "gpt.py"
SIZE = ("--layers", "2", "--context", "64", "--global-batch", "16")
FAULTS = (("kill-worker", 0.3), ("kill-node", 0.5), ("join", 0.55), ("kill-worker", 0.75))
"""Names each fault, with the share of the steps after which it comes."""
RESULT = "validation loss "
LIMIT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """Holds the losses of one wire, by seed."""

    wire: str
    has_faults: bool
    losses: tuple[float, ...]


def train(wire: str, seed: int, steps: int, *, has_faults: bool) -> float:
    """Returns the validation loss of one run.

    Args:
        wire: The format of gradients between ranks.
        seed: That of weights and of the order of samples.
        steps: Number of steps.
        has_faults: Whether workers and nodes are killed.

    Raises:
        SystemExit: The run failed.
    """
    cluster = ["--nodes", "2", "--nnodes", "1:2", "--wire", wire]
    for fault, share in FAULTS if has_faults else ():
        cluster += ["--fault", f"{fault}@{round(share * steps)}"]
    return run_example(cluster, seed, steps)


def run_example(
    cluster: Sequence[str], seed: int, steps: int, *, limit_s: float = LIMIT_S
) -> float:
    """Returns the validation loss of one run of the example.

    Args:
        cluster: Options of `elasticzero local`.
        seed: That of weights and of the order of samples.
        steps: Number of steps.
        limit_s: Most seconds that it may take.

    Raises:
        SystemExit: The run failed.
    """
    with tempfile.TemporaryDirectory(prefix="elasticzero-loss-") as logs:
        command = [sys.executable, "-m", "elasticzero.cli", "local", *cluster, "--log-dir", logs]
        command += [str(SCRIPT), *SIZE, "--steps", str(steps), "--seed", str(seed)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
        lines = [
            line
            for log in Path(logs).rglob("*.log")
            for line in log.read_text(errors="replace").splitlines()
            if line.startswith(RESULT)
        ]
    if done.returncode or not lines:
        raise SystemExit(f"error: {' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return float(lines[-1].removeprefix(RESULT))


def rows(learnt: Sequence[Learnt]) -> list[list[str]]:
    """Returns a row for each wire, with its difference from the first one's mean."""
    plain = statistics.mean(learnt[0].losses)
    return [
        [
            one.wire,
            "killed and replaced" if one.has_faults else "none",
            ", ".join(f"{loss:.3f}" for loss in one.losses),
            f"{statistics.mean(one.losses):.3f}",
            f"{statistics.mean(one.losses) / plain - 1:+.1%}",
        ]
        for one in learnt
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--wires", default="fp32,int8,int4,topk:0.01", help="by commas, fp32 first")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each")
    parser.add_argument("--steps", type=int, default=200, help="of one run")
    parser.add_argument("--record", action="store_true", help="write the table and the figures")
    options = parser.parse_args()
    wires = [str(wire_of("--wires", text)) for text in options.wires.split(",")]
    cases = [(wire, has_faults) for wire in wires for has_faults in (False, True)]
    learnt = []
    for wire, has_faults in cases:
        losses = [
            train(wire, seed, options.steps, has_faults=has_faults) for seed in range(options.seeds)
        ]
        learnt.append(Learnt(wire=wire, has_faults=has_faults, losses=tuple(losses)))
        print(*rows(learnt)[-1], sep="  ", flush=True)
    head = ["wire", "faults", "loss by seed", "mean", "against fp32 without faults"]
    print(table_text(head, rows(learnt)), end="")
    if options.record:
        about = machine("torch")
        command = f"python benchmarks/wire_loss.py {' '.join(sys.argv[1:])}"
        lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows(learnt))]
        text = f"{about_in_words(about, present_commit())}, torch {about['torch']}."
        publish("wire loss", "\n".join([f"```\n{command}\n```", "", text, "", *lines]))
        document = {"machine": about, "command": command, "runs": [asdict(one) for one in learnt]}
        print(record(f"wire-loss-{date.today()}", document))


if __name__ == "__main__":
    main()
