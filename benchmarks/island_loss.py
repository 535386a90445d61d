"""Compares what a small GPT has learnt on islands that average with what it has with ddp.

    python benchmarks/island_loss.py [--cases "ddp;2;4;2:zero2:2"] [--every 20] [--seeds 3]
        [--steps 3000] [--global-batch 64] [--width 64] [--outer-lr 0.7] [--outer-momentum 0.9]
        [--wait 0] [--wire fp32] [--record]

A case is `ddp`, in one process, or a number of islands, and what each trains with and its number of
workers. Each run trains `examples/gpt.py` on this machine, on equal samples. The loss is that of
validation samples after the last step. Steps of a few milliseconds are made while a round is under
way: with `--wait 60` islands take each round before their next step, as they nearly do where a step
takes longer than the exchange.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from curves import Curve, curves_picture
from example_run import ExampleRun, run_example
from performance_page import publish_table

from elasticzero.text import table_text

HEAD = ["strategy", "loss by seed", "mean", "against ddp"]
PICTURE = Path(__file__).resolve().parent / "results" / "islands-loss.svg"
POINTS = 40
"""Number of points of a curve, each the mean of the losses around it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Says on what the example trains."""

    islands: int
    """0: one process, with ddp."""
    inner: str = "ddp"
    workers: int = 1

    @property
    def name(self) -> str:
        if not self.islands:
            return "ddp, one process"
        workers = f" on {self.workers} workers" if self.workers > 1 else ""
        return f"{self.islands} islands of {self.inner}{workers}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """Holds what the runs of one case have learnt, by seed."""

    case: Case
    runs: tuple[ExampleRun, ...]

    @property
    def losses(self) -> list[float]:
        return [run.loss for run in self.runs]


def case_of(text: str) -> Case:
    """Returns the case that a text names: `ddp`, or ISLANDS[:INNER[:WORKERS]]."""
    if text == "ddp":
        return Case(islands=0)
    islands, _, rest = text.partition(":")
    inner, _, workers = rest.partition(":")
    return Case(islands=int(islands), inner=inner or "ddp", workers=int(workers or 1))


def train(case: Case, seed: int, options: argparse.Namespace) -> ExampleRun:
    """Returns what one run has learnt; raises `SystemExit` where it failed.

    Args:
        case: On what it trains.
        seed: That of weights and of the order of samples.
        options: The options of this command.
    """
    cluster = ["--nodes", str(max(case.islands, 1)), "--nproc-per-node", str(case.workers)]
    if case.islands:
        settings = f"every={options.every},inner={case.inner},outer-lr={options.outer_lr}"
        settings += f",outer-momentum={options.outer_momentum},wait={options.wait}"
        settings += f",wire={options.wire}"
        cluster += ["--strategy", "diloco", "--diloco", settings]
    size = ("--global-batch", str(options.global_batch), "--width", str(options.width))
    return run_example(cluster, seed, options.steps, *size, limit_s=options.limit)


def rows(learnt: Sequence[Learnt]) -> list[list[str]]:
    """Returns a row for each case, with its difference from the first one's mean."""
    plain = statistics.mean(learnt[0].losses)
    return [
        [
            one.case.name,
            ", ".join(f"{loss:.3f}" for loss in one.losses),
            f"{statistics.mean(one.losses):.3f}",
            f"{statistics.mean(one.losses) / plain - 1:+.1%}",
        ]
        for one in learnt
    ]


def curve_of(learnt: Learnt, batch: int) -> Curve:
    """Returns the loss over the samples of all islands, as the mean over seeds and near steps.

    Args:
        learnt: The runs of a case.
        batch: Samples of a step of all islands together.
    """
    points = [point for run in learnt.runs for point in run.curve]
    width = max(step for step, _ in points) / POINTS
    near: dict[int, list[tuple[int, float]]] = {}
    for step, loss in points:
        near.setdefault(int(step / width), []).append((step, loss))
    return Curve(
        name=learnt.case.name,
        points=[
            (batch * statistics.mean(s for s, _ in part), statistics.mean(x for _, x in part))
            for _, part in sorted(near.items())
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--cases", default="ddp;2;4;2:zero2:2", help="ISLANDS[:INNER[:WORKERS]];…")
    parser.add_argument("--every", type=int, default=20, help="inner steps of a round")
    parser.add_argument("--outer-lr", type=float, default=0.7)
    parser.add_argument("--outer-momentum", type=float, default=0.9)
    parser.add_argument("--wire", default="fp32", help="format of what islands send")
    parser.add_argument("--wait", type=float, default=0.0, help="seconds, for a round")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each")
    parser.add_argument("--steps", type=int, default=3000, help="of one run")
    parser.add_argument("--width", type=int, default=64, help="size of a token's vector")
    parser.add_argument("--global-batch", type=int, default=64, help="samples of a step")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds of one run")
    parser.add_argument("--record", action="store_true", help="write the table and the figures")
    options = parser.parse_args()
    learnt = []
    for case in map(case_of, options.cases.split(";")):
        runs = tuple(train(case, seed, options) for seed in range(options.seeds))
        learnt.append(Learnt(case=case, runs=runs))
        print(*rows(learnt)[-1], sep="  ", flush=True)
    print(table_text(HEAD, rows(learnt)), end="")
    if options.record:
        publish_table("island-loss", "islands loss", HEAD, rows(learnt), learnt)
        curves = [curve_of(one, options.global_batch) for one in learnt]
        PICTURE.write_text(curves_picture(curves, across="samples", up="training loss"))


if __name__ == "__main__":
    main()
