"""Measures what a step costs on a GPU beside torch's own, and how long a loss or a change takes.

    python benchmarks/gpu.py [--seconds 150] [--device cpu] [--contenders ddp,DDP] [--out FILE]
    python benchmarks/gpu.py --record build/gpu/benchmark.json     (or build/gpu/tests.json)

GPT-2 small (124 M parameters, bf16 autocast, 8 × 1,024 tokens, fused AdamW, clipping) on one rank:
every contender is a process, they train by turns, and each turn gives a ratio. Ours train under an
agent with default options. Then two ranks that share the GPU, with NCCL over sockets, lose a worker
and a node, and a node leaves and joins. Without a GPU the same lines run on the CPU with a small
model; that is a rehearsal, and its figures mean nothing. `tests/gpu/README.md` says what a machine
needs. --record puts the file of a run on a GPU, also of `make gpu`, into benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import date
from pathlib import Path
from types import FrameType
from typing import Any

from gpu_report import CONTENDERS, STRATEGIES, tables
from performance_page import RESULTS, about_in_words, machine, present_commit, publish

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "gpu" / "benchmark.json"
STEPS_SHARE = 0.5
"""Share of the time in which rounds of steps begin; recovery gets the rest."""
LAST_ROUND_S = 15.0
"""Seconds that the last round, and the end of all contenders, may take beyond that share."""
RESERVE_S = 8.0
"""Seconds before the end from which nothing is measured."""
LEASE_TTL_S = 5
LEAST_RECOVERY_S = 10.0
"""Seconds under which no strategy's recovery is begun."""


class TimeUpError(Exception):
    """The time for a measurement is over."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeUpError in the main thread after so many seconds."""

    def end(number: int, frame: FrameType | None) -> None:
        raise TimeUpError(f"its {seconds:.0f} s were over")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, max(0.01, seconds))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure_steps(
    document: dict[str, Any], endpoint: str, runs: Path, options: argparse.Namespace
) -> None:
    """Adds the figures of all contenders' turns to the document."""
    from gpu_steps import Field, measure

    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // 2))}
    contest = Field(options.device, endpoint, runs, {**os.environ, **threads})
    names = options.contenders.split(",")
    try:
        share_s = (options.end_s - RESERVE_S - time.monotonic()) * STEPS_SHARE
        with time_limit(share_s + LAST_ROUND_S):
            measure(contest, names, time.monotonic() + share_s, options.rounds)
    except TimeUpError as error:
        document["missing"]["steps"] = str(error)
    document["missing"] |= contest.missing
    document["turns"], document["peak_bytes"] = contest.turns, contest.peak_bytes
    document["machine"] |= contest.facts


def measure_recovery(
    document: dict[str, Any], endpoint: str, runs: Path, options: argparse.Namespace
) -> None:
    """Adds the seconds of each case and strategy to the document, as far as there is time."""
    from recovery_trial import round_of

    from tests.gpu import wheels

    strategies = options.strategies.split(",") if options.strategies else []
    os.environ["PYTHONPATH"] = wheels.search_path(ROOT / "tests" / "gpu")  # ranks share the GPU
    os.environ |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
    for number, strategy in enumerate(strategies):
        left_s = options.end_s - RESERVE_S - time.monotonic()
        seconds = left_s / (len(strategies) - number)
        if seconds < LEAST_RECOVERY_S:
            document["missing"][f"recovery of {strategy}"] = "no time was left"
            continue
        strikes = document["recovery"].setdefault(strategy, {})
        try:
            cases = round_of(strategy, endpoint, runs, LEASE_TTL_S, brief=True)
            with time_limit(seconds), closing(cases):
                for case, struck in cases:
                    strikes[case] = {"seconds": struck.seconds, "recomputed": struck.recomputed}
                    say(f"{strategy}, {case}: {struck.seconds:.3f} s")
        except (TimeUpError, SystemExit) as error:
            document["missing"][f"recovery of {strategy}"] = str(error)


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the document of a run, which is written as it grows."""
    from elasticzero.launcher.store.etcd.server import EtcdServer

    document: dict[str, Any] = {
        "schema": 1,
        "date": str(date.today()),
        "commit": present_commit(),
        "command": shlex.join(["python", "benchmarks/gpu.py", *sys.argv[1:]]),
        "device": options.device,
        "machine": machine("torch"),
        **{key: {} for key in ("turns", "peak_bytes", "recovery", "missing")},
    }
    runs = Path(tempfile.mkdtemp(prefix="ez-gpu-"))
    with EtcdServer() as etcd:
        for measurement in (measure_steps, measure_recovery):
            measurement(document, etcd.endpoint, runs, options)
            document["seconds"] = round(time.monotonic() - options.began_s, 1)
            write(options.out, document)
    if document["missing"]:
        say(f"logs are in {runs}")
    else:
        shutil.rmtree(runs)
    return document


def write(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def record(path: Path) -> None:
    """Puts a run's file into benchmarks/results, and the tables of a benchmark into its page."""
    document = json.loads(path.read_text())
    if document["device"] == "cpu":
        raise SystemExit(f"error: {path} is of a rehearsal on a CPU, which shows nothing of a GPU")
    name = "gpu-tests" if "tests" in document else "gpu"
    target = RESULTS / f"{name}-{document['date']}.json"
    write(target, document)
    print(f"recorded in {target}")
    if name == "gpu":
        about = document["machine"]
        where = about_in_words(about, document["commit"]).partition(", ")[2]
        setting = f"{document['date']}, {where}, torch {about['torch']}, NCCL {about.get('nccl')}."
        text = f"```\n{document['command']}\n```\n\n{setting}\n\n{tables(document)}"
        print(f"and in {publish('gpu', text, RESULTS)}")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=150.0, help="end within these seconds")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="cuda where there is a GPU")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="by commas")
    parser.add_argument("--rounds", type=int, default=100, help="turns of each, at most")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="for recovery")
    parser.add_argument("--out", type=Path, default=OUT, help="write the figures to this file")
    parser.add_argument("--record", type=Path, metavar="FILE", help="publish a file of results")
    options = parser.parse_args()
    if strange := set(options.contenders.split(",")) - set(CONTENDERS):
        parser.error(f"--contenders: {sorted(strange)[0]!r} is not one of {', '.join(CONTENDERS)}")
    return options


def main() -> None:
    began_s = time.monotonic()
    options = parsed()
    if options.record:
        record(options.record)
        return
    options.began_s, options.end_s = began_s, began_s + options.seconds
    sys.path.insert(0, str(ROOT))  # a script of its own has no way to the rest of the checkout
    from tests.gpu import wheels

    sys.path.insert(0, str(wheels.install()))
    os.environ["PYTHONPATH"] = wheels.search_path()
    import torch

    if options.device is None:
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
        if options.device == "cpu":
            say("torch sees no GPU: this is a rehearsal on the CPU, and its figures mean nothing")
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    document = measured(options)
    print(f"{tables(document)}\n\nin {time.monotonic() - began_s:.0f} s; {options.out}")


if __name__ == "__main__":
    main()
