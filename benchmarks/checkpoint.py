"""Checkpoints beside torch DCP, safetensors and plain system calls, all in one run.

    python benchmarks/checkpoint.py [--sizes 1GiB,4GiB] [--places runs,/dev/shm] [--rounds 3]
                                    [--cases stall,write,load,reshard,offline,memory,plan,profile]
                                    [--cold] [--record [--add]]

The state is a model in single precision with Adam's two moments, dealt by rows to 2 ranks, which
are processes of this machine. Reads come from the page cache; with --cold, files on a disk are
dropped from it before each load.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from checkpoint_cache import forget, warm_memory
from checkpoint_plan import growth
from checkpoint_profile import Profile
from checkpoint_report import OURS, UNITS, Memory, Report, Row, in_words

HERE = Path(__file__).resolve().parent
RANKS, MORE_RANKS = 2, 3
CASES = ("stall", "write", "load", "reshard", "offline", "memory", "plan", "profile")
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
        self.path = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=Path(where).resolve()))
        self.shared = Path(tempfile.mkdtemp(prefix="checkpoint-slots-", dir="/dev/shm"))
        self._options = options

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self.path)
        shutil.rmtree(self.shared)

    def rows(self, cases: Iterable[str]) -> Iterator[Row]:
        """Run the cases; first those at the world that writes, then those that change it."""
        chosen = [case for case in cases if case in CASES]
        if set(chosen) & {"load", "reshard", "offline"}:
            chosen.insert(sum(case in ("stall", "write") for case in chosen), "files")
        for case in chosen:
            if case in ("stall", "write", "files", "load"):
                yield from self._ranks(RANKS, case)
        if "reshard" in chosen:
            yield from self._ranks(MORE_RANKS, "reshard")
        if "offline" in chosen:
            yield from self._offline()

    def memory(self, what: str) -> Memory:
        """How far a fresh process of one rank grows."""
        (measured,) = self._launch(RANKS, [what], script="checkpoint_memory.py")
        return Memory(**measured)

    def profiles(self) -> list[Profile]:
        """Where the time goes, at the world that writes and at another."""
        rows_by_world = [
            self._launch(world, ["profile"], script="checkpoint_profile.py")
            for world in (RANKS, MORE_RANKS)
        ]
        about: dict[str, Any] = {"place": self.where, "state_bytes": self.size}
        return [Profile(**about | row) for rows in rows_by_world for row in rows]

    def _ranks(self, world: int, case: str) -> Iterator[Row]:
        """One case, in processes of its own: what a peer keeps in memory harms no other."""
        seconds: dict[tuple[str, str], list[float]] = {}
        for measured in self._launch(world, [case]):
            key = (measured["case"], measured["variant"])
            seconds.setdefault(key, []).append(measured["seconds"])
            label = f"{self.where} {in_words(self.size)}: {key[0]}: {key[1]}"
            print(f"{label}: {measured['seconds']:.3f} s", file=sys.stderr, flush=True)
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
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": str(world)}
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
        tool = [sys.executable, "-m", "elasticzero.cli", "checkpoint", "reshard"]
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
                if self._options.cold:
                    forget(source)
                warm_memory()
                started_s = time.monotonic()
                subprocess.run(command, shell=True, check=True, stdout=subprocess.DEVNULL)
                times[name].append(time.monotonic() - started_s)
        shutil.rmtree(target)
        for name, taken in times.items():
            yield self._row("offline", name, taken)


def fits(where: str, size: int) -> bool:
    """Whether a state of `size` bytes can be measured there: the peers keep up to four copies of it
    in memory, and in a place that is memory its files take as much again."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return size * (8 if where.startswith("/dev/shm") else 5) < free


def size_of(text: str) -> int:
    unit = next((u for u in UNITS if text.endswith(u)), None)
    if unit is None:
        raise argparse.ArgumentTypeError(f"{text!r}: write a size as 64MiB or 1GiB")
    return int(float(text.removesuffix(unit)) * UNITS[unit])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", default="1GiB,4GiB", help="bytes of state over both ranks")
    parser.add_argument("--places", default="runs,/dev/shm", help="directories to write in")
    parser.add_argument("--rounds", type=int, default=3, help="how often each figure is taken")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--cold", action="store_true", help="drop files from the page cache")
    parser.add_argument(
        "--record", action="store_true", help="write a result and its page in benchmarks/results"
    )
    parser.add_argument(
        "--add", action="store_true", help="with --record: keep today's record of other cases"
    )
    options = parser.parse_args()
    options.cases = options.cases.split(",")
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(unknown)}; there are {', '.join(CASES)}")
    return options


def main() -> None:
    options = arguments()
    rows: list[Row] = []
    memory: list[Memory] = []
    profiles: list[Profile] = []
    for where in options.places.split(","):
        Path(where).mkdir(parents=True, exist_ok=True)
        for size in map(size_of, options.sizes.split(",")):
            if not fits(where, size):
                print(f"left out: {in_words(size)} in {where}: too little memory", file=sys.stderr)
                continue
            with Place(where, size, options) as place:
                rows += place.rows(options.cases)
                if "memory" in options.cases and not memory:
                    memory = [place.memory(what) for what in MEMORY]
                if "profile" in options.cases:
                    profiles += place.profiles()
    report = Report(
        command=" ".join(["python", "benchmarks/checkpoint.py", *sys.argv[1:]]),
        rounds=options.rounds,
        cold=options.cold,
        rows=rows,
        memory=memory,
        plans=growth() if "plan" in options.cases else [],
        profiles=profiles,
    )
    print(report)
    if options.record:
        report.record(add=options.add)


if __name__ == "__main__":
    main()
