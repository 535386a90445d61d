"""Compares what a small GPT has learnt on islands that average with what it has with ddp.

    python benchmarks/island_loss.py [--islands 2,4] [--every 20] [--seeds 3] [--steps 2000]
        [--outer-lr 0.7] [--outer-momentum 0.9] [--record]

Each run trains `examples/gpt.py` on this machine, on equal samples: one process by ddp, and islands
of one node by `--strategy diloco`. The loss is that of validation samples after the last step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date

from performance_page import about_in_words, machine, present_commit, publish, record
from wire_loss import run_example

from elasticzero.text import table_text

HEAD = ["strategy", "islands", "loss by seed", "mean", "against ddp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """Holds the losses of one number of islands, by seed."""

    islands: int
    """0: ddp, in one process."""
    losses: tuple[float, ...]


def train(islands: int, seed: int, options: argparse.Namespace) -> float:
    """Returns the validation loss of one run; raises `SystemExit` where it failed.

    Args:
        islands: Number of islands; 0: ddp, in one process.
        seed: That of weights and of the order of samples.
        options: The options of this command.
    """
    cluster = ["--nodes", str(max(islands, 1))]
    if islands:
        diloco = f"every={options.every},outer-lr={options.outer_lr}"
        diloco += f",outer-momentum={options.outer_momentum}"
        cluster += ["--strategy", "diloco", "--diloco", diloco]
    return run_example(cluster, seed, options.steps, limit_s=options.limit)


def rows(learnt: Sequence[Learnt]) -> list[list[str]]:
    """Returns a row for each number of islands, with its difference from the first one's mean."""
    plain = statistics.mean(learnt[0].losses)
    return [
        [
            "diloco" if one.islands else "ddp",
            str(one.islands or "-"),
            ", ".join(f"{loss:.3f}" for loss in one.losses),
            f"{statistics.mean(one.losses):.3f}",
            f"{statistics.mean(one.losses) / plain - 1:+.1%}",
        ]
        for one in learnt
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--islands", default="2,4", help="numbers of them, by commas")
    parser.add_argument("--every", type=int, default=20, help="inner steps of a round")
    parser.add_argument("--outer-lr", type=float, default=0.7)
    parser.add_argument("--outer-momentum", type=float, default=0.9)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each")
    parser.add_argument("--steps", type=int, default=2000, help="of one run")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds of one run")
    parser.add_argument("--record", action="store_true", help="write the table and the figures")
    options = parser.parse_args()
    learnt = []
    for islands in [0, *map(int, options.islands.split(","))]:
        losses = [train(islands, seed, options) for seed in range(options.seeds)]
        learnt.append(Learnt(islands=islands, losses=tuple(losses)))
        print(*rows(learnt)[-1], sep="  ", flush=True)
    print(table_text(HEAD, rows(learnt)), end="")
    if options.record:
        about = machine("torch")
        command = f"python benchmarks/island_loss.py {' '.join(sys.argv[1:])}"
        lines = [f"| {' | '.join(row)} |" for row in (HEAD, ["---"] * len(HEAD), *rows(learnt))]
        text = f"{about_in_words(about, present_commit())}, torch {about['torch']}."
        publish("islands loss", "\n".join([f"```\n{command}\n```", "", text, "", *lines]))
        document = {"machine": about, "command": command, "runs": [asdict(one) for one in learnt]}
        print(record(f"island-loss-{date.today()}", document))


if __name__ == "__main__":
    main()
