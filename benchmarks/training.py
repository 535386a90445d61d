"""What a training step and its memory cost with each strategy, beside torch's own.

    python benchmarks/training.py [--sizes 17M,105M] [--ranks 2] [--pairs 15] [--record]
    python benchmarks/training.py --memory [--sizes 105M] [--ranks 2] [--record]
    python benchmarks/training.py --checks [--sizes 2000,105M] [--strategies ddp,zero1] [--record]

The judged rows are of whole jobs: agents, sessions and default options, with and without clipping,
by turns with torch's own steps in the same processes (`training_session.py`). The other rows are of
strategies alone, without a session: contenders take their steps by turns, one thread a rank, fused
AdamW, gloo; each turn gives one ratio against the contender's reference. Memory is the growth of a
process that runs one contender alone, beside what `elasticzero plan` computes. DeepSpeed takes part
where it is installed (DS_BUILD_OPS=0 python -m pip install deepspeed). With --checks the checks of
sessions for what a script changes are timed from outside (`training_checks.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from check_costs import SIZES, checks_table, measure_checks
from performance_page import about_in_words, machine, present_commit, publish, record
from ratio import Ratio
from session_steps import SessionSteps, measure_session, session_rows

from elasticzero.memory_estimate import STATE_SIZES, LineUp, ModelSize, rank_memory
from elasticzero.spans import STRATEGIES

HERE = Path(__file__).resolve().parent
RANK = HERE / "training_ranks.py"
WIDTHS = {"17M": 1024, "105M": 2560}
"""Width of the blocks, by the model's number of parameters."""
DEEPSPEED = ("DeepSpeed 1", "DeepSpeed 2") if find_spec("deepspeed") else ()
"""DeepSpeed takes part with these stages, where it is installed."""
GROUPS: tuple[tuple[str, ...], ...] = (
    ("DDP", "ddp", "zero1", "zero2", "DDP + ZRO"),
    ("FSDP2", "zero3"),
    *((name, f"{name} + mirror") for name in ("zero1", "zero3")),
    *((("DDP", *DEEPSPEED),) if DEEPSPEED else ()),
)
"""Contenders that take turns with each other, as many as fit into memory."""
REFERENCES = {
    **dict.fromkeys(("ddp", "zero1", "DDP + ZRO", "DeepSpeed 1", "DeepSpeed 2"), "DDP"),
    "zero2": "zero1",
    "zero3": "FSDP2",
    "zero1 + mirror": "zero1",
    "zero3 + mirror": "zero3",
}
"""Each contender is compared with the one named here."""
JUDGED_RANKS = 2
MOST_MEMORY = 1.1
"""Times of the planned memory."""
STEPS = {"17M": 8, "105M": 3}
"""In one turn."""
LIMIT_S = 1800


def run_ranks(ranks: int, order: dict[str, Any]) -> dict[str, Any]:
    """Returns what rank 0 of so many ranks prints."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    common |= {"DS_ACCELERATOR": "cpu"}
    common |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(RANK), json.dumps(order)],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE if rank == 0 else None,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        output, _ = processes[0].communicate(timeout=LIMIT_S)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if processes[0].returncode:
        raise SystemExit(f"error: rank 0 of {order} exited with {processes[0].returncode}")
    result: dict[str, Any] = json.loads(output.splitlines()[-1])  # DeepSpeed prints more lines
    return result


def measure(size: str, ranks: int, pairs: int, strategies: Sequence[str]) -> dict[str, Any]:
    """Measures a step of each strategy in a session, and of each contender alone.

    Args:
        size: Size of the model, of `WIDTHS`.
        ranks: Number of ranks of the contenders; jobs with a session have two.
        pairs: Turns of each.
        strategies: Names of those that are measured in a session.
    """
    sessions = [
        measure_session(strategy, WIDTHS[size], STEPS[size], pairs, clipped)
        for strategy in (strategies if ranks == JUDGED_RANKS else ())
        for clipped in (False, True)
    ]
    order = {"width": WIDTHS[size], "pairs": pairs, "steps": STEPS[size]}
    seconds = [run_ranks(ranks, order | {"contenders": group})["seconds"] for group in GROUPS]
    return {
        "size": size,
        "ranks": ranks,
        "sessions": [asdict(session) for session in sessions],
        "seconds": seconds,
    }


def measure_memory(size: str, ranks: int) -> dict[str, Any]:
    """Returns the greatest anonymous memory of each contender alone, in bytes."""
    order = {"width": WIDTHS[size], "pairs": 2, "steps": 3}
    names = dict.fromkeys(name for group in GROUPS for name in group)
    memory = {
        name: run_ranks(ranks, order | {"contenders": [name], "memory": True})["anonymous_bytes"]
        for name in names
    }
    return {"size": size, "ranks": ranks, "anonymous_bytes": memory}


def planned_bytes(strategy: str, size: str, ranks: int) -> int:
    """Returns what `elasticzero plan` computes for the benchmark's model."""
    width = WIDTHS[size]
    block = 4 * width * width + 5 * width
    model = ModelSize(elements=4 * block, element_bytes=4, largest=2 * width * width, layer=block)
    line_up = LineUp(nodes=1, ranks_per_node=ranks, direct=True)
    return rank_memory(strategy, model, STATE_SIZES["adamw"], line_up).total


def lines_of(result: dict[str, Any], headings: str, rows: Iterable[Sequence[str]]) -> str:
    """Returns a table under a line that says what was measured."""
    about = f"{result['size']} parameters, {result['ranks']} ranks:"
    rule = "|" + "---|" * (headings.count("|") - 1)
    return "\n".join([about, "", headings, rule, *(f"| {' | '.join(row)} |" for row in rows)])


def memory_table(result: dict[str, Any]) -> str:
    rows = []
    for name, grown in result["anonymous_bytes"].items():
        row = [name, f"{grown / 1e6:.0f}"]
        if name in STRATEGIES:
            planned = planned_bytes(name, result["size"], result["ranks"])
            ratio = grown / planned
            met = "met" if ratio <= MOST_MEMORY else "NOT met"
            row += [f"{planned / 1e6:.0f}", f"{ratio:.2f}", f"≤ {MOST_MEMORY}", met]
        else:
            row += [""] * 4
        rows.append(row)
    return lines_of(result, "| | anonymous memory, MB | planned, MB | ratio | wanted | |", rows)


def compared(name: str, group: dict[str, list[float]]) -> list[str]:
    """Returns a contender's reference and ratio; empty cells where it has none."""
    reference = REFERENCES.get(name, "")
    if reference not in group:
        return [""] * 3
    ratio = Ratio.of(group[name], group[reference])
    return [reference, f"{ratio.median:.3f}", f"{ratio.low:.3f} to {ratio.high:.3f}"]


def table(result: dict[str, Any]) -> str:
    """Returns the judged rows of whole jobs, and the rows of strategies alone."""
    rows = [
        [name, f"{statistics.median(seconds) * 1e3:.0f}", *compared(name, group)]
        for group in result["seconds"]
        for name, seconds in group.items()
    ]
    alone = lines_of(result, "| alone | step, ms | against | ratio | 95 % range |", rows)
    if not result["sessions"]:
        return alone
    sessions = [SessionSteps(**session) for session in result["sessions"]]
    headings = "| in a session | step, ms | against | step, ms | ratio | 95 % range | wanted | |"
    return f"{lines_of(result, headings, session_rows(sessions))}\n\n{alone}"


def tables_of(options: argparse.Namespace, sizes: Sequence[str]) -> tuple[str, str, list[Any]]:
    """Returns the part of the page that the options ask for, its tables, and the figures."""
    if options.checks:
        costs = measure_checks(sizes, options.strategies.split(","))
        tables = "\n\n".join(checks_table(costs, size) for size in sizes)
        return "training checks", tables, [asdict(cost) for cost in costs]
    if options.memory:
        results = [measure_memory(size, options.ranks) for size in sizes]
        return "training memory", "\n\n".join(memory_table(result) for result in results), results
    strategies = options.strategies.split(",")
    results = [measure(size, options.ranks, options.pairs, strategies) for size in sizes]
    return "training", "\n\n".join(table(result) for result in results), results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--sizes", help="by commas; 17M and 105M, or 2000 and 105M with --checks")
    parser.add_argument("--ranks", type=int, default=2, help="processes on this machine")
    parser.add_argument("--pairs", type=int, default=15, help="turns of each contender")
    parser.add_argument("--memory", action="store_true", help="measure memory in place of time")
    parser.add_argument("--checks", action="store_true", help="measure checks at boundaries")
    parser.add_argument(
        "--strategies", default=",".join(STRATEGIES), help="in a session, by commas"
    )
    parser.add_argument("--record", action="store_true", help="write the tables and the figures")
    options = parser.parse_args()
    choices = SIZES if options.checks else WIDTHS
    sizes = (options.sizes or ",".join(choices)).split(",")
    if unknown := [size for size in sizes if size not in choices]:
        parser.error(f"--sizes: {unknown[0]!r} is not one of {', '.join(choices)}")
    name, tables, results = tables_of(options, sizes)
    print(tables)
    if options.record:
        about = machine("torch")
        command = f"python benchmarks/training.py {' '.join(sys.argv[1:])}"
        text = f"{about_in_words(about, present_commit())}, torch {about['torch']}."
        part = name if options.ranks == JUDGED_RANKS else f"{name} {options.ranks} ranks"
        publish(part, f"```\n{command}\n```\n\n{text}\n\n{tables}")
        name = f"{part.replace(' ', '-')}-{date.today()}"
        print(record(name, {"machine": about, "command": command, "sizes": results}))


if __name__ == "__main__":
    main()
