"""Where the time of a warm load and reshard goes; a part of benchmarks/checkpoint.py.

One lane, that is one thread, a rank: a profile that follows several says nothing of either.
"""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from checkpoint_ranks import Rank, finish, start

from elasticzero.checkpoint import reader

KINDS = {"preadv": "read_s", "update": "checksum_s", "open": "open_s", "close": "open_s"}
"""Of built-in functions, what their time counts as."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Seconds of one rank in one load."""

    case: str
    variant: str
    ranks: int
    bytes: int
    total_s: float
    read_s: float = 0.0
    """In `preadv`."""
    checksum_s: float = 0.0
    """In xxhash."""
    open_s: float = 0.0
    """In `open` and `close`."""

    @property
    def rest_s(self) -> float:
        """Python: the manifest, the plan, cutting it into parts."""
        return self.total_s - self.read_s - self.checksum_s - self.open_s


def profiled(work: Callable[[], object]) -> dict[str, float]:
    """Seconds by kind, and `total_s`, of one call."""
    profile = cProfile.Profile()
    profile.enable()
    work()
    profile.disable()
    stats = pstats.Stats(profile)
    found = {"total_s": 0.0, **dict.fromkeys(KINDS.values(), 0.0)}
    for (_, _, name), (_, _, own_s, _, _) in stats.stats.items():  # type: ignore[attr-defined]
        found["total_s"] += own_s
        for part, kind in KINDS.items():
            if f".{part}" in name or f"'{part}'" in name:
                found[kind] += own_s
    return found


def table(found: list[Profile]) -> str:
    lines = [
        "| profile, a rank | of ranks | MiB | total ms | preadv | xxh3 | open, close | Python |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        parts = (row.total_s, row.read_s, row.checksum_s, row.open_s, row.rest_s)
        cells = " | ".join(f"{1000 * seconds:.1f}" for seconds in parts)
        name = f"{row.case}: {row.variant}"
        lines.append(f"| {name} | {row.ranks} | {row.bytes >> 20} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    order = start()
    rank = Rank(order)
    reader.LANES = 1
    if order.world == 2:
        rank.files()
    case = "load" if order.world == 2 else "reshard"
    variants = rank.reshard()
    for name in ("plain read", "elasticzero"):
        best: Mapping[str, float] = {}
        for _ in range(order.rounds):
            with variants[name]() as work:
                found = profiled(work)
            if not best or found["total_s"] < best["total_s"]:
                best = found
        about = {"case": case, "variant": name, "ranks": order.world, "bytes": rank.bytes}
        rank.tell(about | best)
    finish()


if __name__ == "__main__":
    main()
