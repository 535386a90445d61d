"""Compares what a small GPT has learnt with each `--wire`, through faults and without.

    python benchmarks/wire_loss.py [--wires fp32,int8] [--seeds 3] [--steps 200] [--record]

Each run trains `examples/gpt.py` on two nodes of this machine, on equal samples. In every other run
two workers and a node are killed on the way, and a node comes in its place. The loss is that of
validation samples after the last step; its spread is that of the seeds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from example_run import run_example
from performance_page import publish_table

from elasticzero.options.wire import wire_of
from elasticzero.text import table_text

FAULTS = (("kill-worker", 0.3), ("kill-node", 0.5), ("join", 0.55), ("kill-worker", 0.75))
"""Names each fault, with the share of the steps after which it comes."""


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
    return run_example(cluster, seed, steps).loss


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
        publish_table("wire-loss", "wire loss", head, rows(learnt), learnt)


if __name__ == "__main__":
    main()
