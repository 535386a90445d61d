"""Checkpoints beside torch DCP, safetensors and plain system calls, all in one run.

    python benchmarks/checkpoint.py [--sizes 1GiB,4GiB] [--places runs,/dev/shm] [--rounds 3]
                                    [--cases stall,write,load,reshard,offline,memory,plan]
                                    [--cold] [--record]

The state is a model in single precision with Adam's two moments, dealt by rows to 2 ranks, which
are processes of this machine. Reads come from the page cache; with --cold, files on a disk are
dropped from it before each load.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from checkpoint_plan import Growth, growth
from checkpoint_plan import table as growth_table

HERE = Path(__file__).resolve().parent
RANKS, MORE_RANKS = 2, 3
CASES = ("stall", "write", "load", "reshard", "offline", "memory", "plan")
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
OURS = "elasticzero"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One variant of one case."""

    case: str
    place: str
    bytes: int
    """Of the whole state."""
    variant: str
    seconds: tuple[float, ...]
    """One a round."""

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """How far one rank's memory grew while it did something, shared memory included."""

    what: str
    bytes: int
    shard_bytes: int


@dataclass(frozen=True, slots=True)
class Target:
    """How a variant of ours should compare with its peer."""

    case: str
    ours: str
    peer: str
    ratio: float
    at_least: bool = True
    """The peer's seconds over ours: at least `ratio`. Else: ours over the peer's, at most."""

    def measured(self, ours: Row, peer: Row) -> float:
        ratio = peer.median_s / ours.median_s
        return ratio if self.at_least else 1 / ratio

    def met(self, measured: float) -> bool:
        return measured >= self.ratio if self.at_least else measured <= self.ratio

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.ratio:g}"


TARGETS = (
    Target("stall", OURS, "memcpy", 1.1, at_least=False),
    Target("stall", OURS, "dcp.async_save", 0.5, at_least=False),
    Target("write", f"{OURS}, from shared memory", "plain write", 0.9),
    Target("write", f"{OURS}, straight", "plain write", 0.9),
    Target("write", f"{OURS}, straight", "dcp.save", 1.0),
    Target("write", f"{OURS}, straight", "safetensors", 1.0),
    Target("load", OURS, "dcp.load", 1.0),
    Target("load", OURS, "safetensors", 1.0),
    Target("load", OURS, "plain read", 0.9),
    Target("reshard", OURS, "plain read", 0.9),
    Target("reshard", OURS, "dcp.load", 1.0),
    Target("offline", f"{OURS} checkpoint reshard", "cp", 0.8),
)
MEMORY = (
    "save",
    "save in the background",
    "dcp.save",
    "dcp.async_save",
    "safetensors save",
    "load",
    "dcp.load",
    "safetensors load",
)
"""What checkpoint_memory.py does, each in fresh processes."""


class Place:
    """A directory to measure in, for one size of state."""

    def __init__(self, where: str, size: int, options: argparse.Namespace) -> None:
        self.where = where
        self.size = size
        self.path = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=where))
        self.shared = Path(tempfile.mkdtemp(prefix="checkpoint-slots-", dir="/dev/shm"))
        self._options = options

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self.path)
        shutil.rmtree(self.shared)

    def rows(self, cases: Iterable[str]) -> Iterator[Row]:
        """Run the cases; first those at the world that writes, then those that change it."""
        wanted = [case for case in cases if case in CASES]
        first = [case for case in wanted if case in ("stall", "write")]
        if set(wanted) & {"load", "reshard", "offline"}:
            first.append("files")
        yield from self._ranks(RANKS, [*first, *(["load"] if "load" in wanted else [])])
        if "reshard" in wanted:
            yield from self._ranks(MORE_RANKS, ["reshard"])
        if "offline" in wanted:
            yield from self._offline()

    def memory(self, what: str) -> Memory:
        """How far a fresh process of one rank grows."""
        (found,) = self._launch(RANKS, [what], script="checkpoint_memory.py")
        return Memory(**found)

    def _ranks(self, world: int, cases: list[str]) -> Iterator[Row]:
        seconds: dict[tuple[str, str], list[float]] = {}
        for found in self._launch(world, cases) if cases else ():
            key = (found["case"], found["variant"])
            seconds.setdefault(key, []).append(found["seconds"])
            said = f"{self.where} {in_words(self.size)}: {key[0]}: {key[1]}"
            print(f"{said}: {found['seconds']:.3f} s", file=sys.stderr, flush=True)
        for (case, variant), times in seconds.items():
            yield self._row(case, variant, times)

    def _row(self, case: str, variant: str, times: list[float]) -> Row:
        return Row(
            case=case,
            place=self.where,
            bytes=self.size,
            variant=variant,
            seconds=tuple(round(s, 6) for s in times),
        )

    def _launch(
        self, world: int, cases: list[str], script: str = "checkpoint_ranks.py"
    ) -> list[dict[str, Any]]:
        """What rank 0 prints, a document a line; ends the run if a rank fails."""
        order = {
            "world": world,
            "meet": str(self.path / f"meet-{time.time_ns()}"),
            "place": str(self.path),
            "shared": str(self.shared),
            "bytes": self.size,
            "rounds": self._options.rounds,
            "cases": cases,
            "cold": self._options.cold,
        }
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen(
                [sys.executable, HERE / script, json.dumps(order | {"rank": rank})],
                stdout=subprocess.PIPE if rank == 0 else None,
                env=environment,
                text=True,
            )
            for rank in range(world)
        ]
        try:
            output, _ = ranks[0].communicate()
            if any(process.wait() for process in ranks):
                raise SystemExit(f"error: {cases} on {world} ranks failed; see above")
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        return [json.loads(line) for line in output.splitlines()]

    def _offline(self) -> Iterator[Row]:
        """The command line tool and cp, on the same files, until they are durable."""
        source, target = self.path / "ours", self.path / "resharded"
        tool = [sys.executable, "-m", "elasticzero.launcher.cli", "checkpoint", "reshard"]
        commands = {
            "cp": f"cp -r '{source}' '{target}' && find '{target}' -type f -exec sync {{}} +",
            f"{OURS} checkpoint reshard": " ".join(
                [*tool, f"'{source}'", f"'{target}'", "--world-size", str(MORE_RANKS)]
            ),
        }
        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(self._options.rounds):
            for name, command in commands.items():
                shutil.rmtree(target, ignore_errors=True)
                os.sync()
                started_s = time.monotonic()
                subprocess.run(command, shell=True, check=True, stdout=subprocess.DEVNULL)
                times[name].append(time.monotonic() - started_s)
        shutil.rmtree(target)
        for name, taken in times.items():
            yield self._row("offline", name, taken)


def in_words(size: int) -> str:
    unit = next(u for u in reversed(UNITS) if size >= UNITS[u])
    return f"{size / UNITS[unit]:g} {unit}"


def size_of(text: str) -> int:
    unit = next((u for u in UNITS if text.endswith(u)), None)
    if unit is None:
        raise argparse.ArgumentTypeError(f"{text!r}: write a size as 64MiB or 1GiB")
    return int(float(text.removesuffix(unit)) * UNITS[unit])


def table(rows: list[Row]) -> str:
    """Every variant, with its speed."""
    lines = [
        "| case | where | state | variant | median s | fastest | GiB/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        speed = row.bytes / row.median_s / UNITS["GiB"]
        lines.append(
            f"| {row.case} | {row.place} | {in_words(row.bytes)} | {row.variant} "
            f"| {row.median_s:.3f} | {min(row.seconds):.3f} | {speed:.2f} |"
        )
    return "\n".join(lines)


def targets_table(rows: list[Row]) -> str:
    """Every target beside what was measured: ratios of medians, and of the fastest runs."""
    lines = [
        "| case | where | state | ratio | wanted | medians | fastest | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    at = {(row.place, row.bytes, row.case, row.variant): row for row in rows}
    for place, size in dict.fromkeys((row.place, row.bytes) for row in rows):
        for target in TARGETS:
            ours = at.get((place, size, target.case, target.ours))
            peer = at.get((place, size, target.case, target.peer))
            if ours is None or peer is None:
                continue
            measured = target.measured(ours, peer)
            fastest = min(peer.seconds) / min(ours.seconds)
            fastest = fastest if target.at_least else 1 / fastest
            sides = (target.peer, target.ours) if target.at_least else (target.ours, target.peer)
            verdict = "met" if target.met(measured) else "NOT met"
            lines.append(
                f"| {target.case} | {place} | {in_words(size)} | {' s / '.join(sides)} s "
                f"| {target} | {measured:.2f} | {fastest:.2f} | {verdict} |"
            )
    return "\n".join(lines)


def memory_table(found: list[Memory]) -> str:
    lines = ["| peak extra memory of a rank | MiB | of its shard |", "|---|---|---|"]
    for row in found:
        share = row.bytes / row.shard_bytes
        lines.append(f"| {row.what} | {row.bytes >> 20} | {share:.2f} |")
    return "\n".join(lines)


def machine() -> dict[str, object]:
    cpu = Path("/proc/cpuinfo").read_text()
    memory = Path("/proc/meminfo").read_text().split()
    return {
        "cores": os.cpu_count(),
        "processor": next(
            (ln.split(":")[1].strip() for ln in cpu.splitlines() if "model name" in ln),
            platform.machine(),
        ),
        "memory_bytes": int(memory[memory.index("MemTotal:") + 1]) << 10,
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "safetensors", "xxhash")},
    }


def record(
    options: argparse.Namespace, rows: list[Row], memory: list[Memory], plans: list[Growth]
) -> None:
    """A dated result with the machine it was taken on."""
    commit = subprocess.run(
        ["git", "-C", HERE, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    document = {
        "date": str(date.today()),
        "commit": commit.stdout.strip(),
        "machine": machine(),
        "cold": options.cold,
        "rounds": options.rounds,
        "rows": [asdict(row) for row in rows],
        "memory": [asdict(row) for row in memory],
        "plan": [asdict(row) for row in plans],
    }
    path = HERE / "results" / f"checkpoint-{date.today()}{'-cold' if options.cold else ''}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"recorded in {path}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", default="1GiB,4GiB", help="bytes of state over both ranks")
    parser.add_argument("--places", default="runs,/dev/shm", help="directories to write in")
    parser.add_argument("--rounds", type=int, default=3, help="how often each figure is taken")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--cold", action="store_true", help="drop files from the page cache")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/")
    options = parser.parse_args()
    options.cases = options.cases.split(",")
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(unknown)}; there are {', '.join(CASES)}")
    return options


def main() -> None:
    options = arguments()
    rows: list[Row] = []
    memory: list[Memory] = []
    for where in options.places.split(","):
        Path(where).mkdir(parents=True, exist_ok=True)
        for size in map(size_of, options.sizes.split(",")):
            with Place(where, size, options) as place:
                rows += place.rows(options.cases)
                if "memory" in options.cases and not memory:
                    memory = [place.memory(what) for what in MEMORY]
    plans = growth() if "plan" in options.cases else []
    for shown in (rows and table(rows), rows and targets_table(rows)):
        print(shown or "", end="\n\n")
    if memory:
        print(memory_table(memory), end="\n\n")
    if plans:
        print(growth_table(plans))
    if options.record:
        record(options, rows, memory, plans)


if __name__ == "__main__":
    main()
