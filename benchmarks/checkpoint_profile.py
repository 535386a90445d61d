"""Where the time of the cases goes, ours beside a plain one's; a part of benchmarks/checkpoint.py.

One lane, that is one thread, a rank: a profile that follows several says nothing of either.
"""

from __future__ import annotations

import cProfile
import pstats
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from checkpoint_ranks import Rank, Variant, finish, start
from checkpoint_state import STEP

from elasticzero.checkpoint.format.names import step_directory
from elasticzero.checkpoint.io import reader
from elasticzero.checkpoint.rewrite.reshard import TargetShape, reshard
from elasticzero.checkpoint.rewrite.step_copy import CopyOptions
from elasticzero.checkpoint.storage.urls import open_directory

KINDS = {
    "copy_": "copy_s",
    "preadv": "read_s",
    "write": "write_s",
    "fsync": "write_s",
    "update": "checksum_s",
    "open": "open_s",
    "close": "open_s",
}
"""Of built-in functions, what their time counts as."""
PLAIN = {"stall": "memcpy", "write": "plain write", "load": "plain read", "reshard": "plain read"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Seconds of one rank in one run of a case."""

    place: str
    state_bytes: int
    case: str
    variant: str
    bytes: int
    """Of this rank."""
    total_s: float
    copy_s: float = 0.0
    """In torch's `copy_`."""
    read_s: float = 0.0
    """In `preadv`."""
    write_s: float = 0.0
    """In `write` and `fsync`."""
    checksum_s: float = 0.0
    """In xxhash."""
    open_s: float = 0.0
    """In `open` and `close`."""

    @property
    def rest_s(self) -> float:
        """Python: the manifest, the plan, cutting it into parts; and waiting for another thread."""
        parts = (self.copy_s, self.read_s, self.write_s, self.checksum_s, self.open_s)
        return self.total_s - sum(parts)


def profiled(work: Callable[[], object]) -> dict[str, float]:
    """Seconds by kind, and `total_s`, of one call."""
    profile = cProfile.Profile()
    profile.enable()
    work()
    profile.disable()
    stats = pstats.Stats(profile)
    seconds = {"total_s": 0.0, **dict.fromkeys(KINDS.values(), 0.0)}
    for (file, _, name), (_, _, own_s, _, _) in stats.stats.items():  # type: ignore[attr-defined]
        seconds["total_s"] += own_s
        for part, kind in KINDS.items():
            if file == "~" and (f".{part}>" in name or f"'{part}'" in name):
                seconds[kind] += own_s
    return seconds


def table(profiles: list[Profile], in_words: Callable[[int], str]) -> str:
    lines = [
        "| profile, a rank | where | state | its MiB | total ms | copy_ | preadv | write, fsync "
        "| xxh3 | open, close | Python |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in profiles:
        parts = (row.total_s, row.copy_s, row.read_s, row.write_s, row.checksum_s, row.open_s)
        cells = " | ".join(f"{1000 * seconds:.1f}" for seconds in (*parts, row.rest_s))
        about = f"{row.case}: {row.variant} | {row.place} | {in_words(row.state_bytes)}"
        lines.append(f"| {about} | {row.bytes >> 20} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    order = start()
    rank = Rank(order)
    reader.MAX_THREADS = 1  # type: ignore[attr-defined]
    if order.world == 2:
        _profile(rank, "stall", rank.stall(), "elasticzero")
        _profile(rank, "write", rank.write(), "elasticzero, from shared memory")
        rank.files()
        _profile(rank, "load", rank.load(), "elasticzero")
        if order.rank == 0:
            _offline(rank)
    else:
        _profile(rank, "reshard", rank.reshard(), "elasticzero")
    finish()


def _profile(rank: Rank, case: str, variants: Mapping[str, Variant], ours: str) -> None:
    """Of the fastest round of the plain variant and of ours."""
    for name in (PLAIN[case], ours):
        rounds = [_round(rank, case, variants[name]) for _ in range(rank.order.rounds)]
        best = min(rounds, key=lambda seconds: seconds["total_s"])
        rank.tell({"case": case, "variant": name, "bytes": rank.state.bytes, **best})


def _round(rank: Rank, case: str, variant: Variant) -> dict[str, float]:
    seconds: dict[str, float] = {}
    with variant() as work:
        rank.time(lambda: seconds.update(profiled(work)), allocates=case in ("stall", "write"))
    return seconds


def _offline(rank: Rank) -> None:
    """The tool's work by one worker, and how long the program takes to begin it."""
    source, target = rank.place / "ours", rank.place / "profiled"
    step = open_directory(source).step(step_directory(STEP))
    seconds = profiled(
        lambda: reshard(
            step, open_directory(target), TargetShape(world_size=3), CopyOptions(workers=1)
        )
    )
    shutil.rmtree(target)
    name = "elasticzero checkpoint reshard, one worker"
    rank.tell({"case": "offline", "variant": name, "bytes": 2 * rank.state.bytes, **seconds})
    command = [sys.executable, "-m", "elasticzero.cli", "checkpoint", "reshard", "--help"]
    began_s = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    took_s = time.perf_counter() - began_s
    name = "start of the command"
    rank.tell({"case": "offline", "variant": name, "bytes": 0, "total_s": took_s})


if __name__ == "__main__":
    main()
