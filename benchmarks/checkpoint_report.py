"""Reports what benchmarks/checkpoint.py found: as tables, and as a record in benchmarks/results."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path

from checkpoint_plan import Growth
from checkpoint_plan import table as growth_table
from checkpoint_profile import Profile
from checkpoint_profile import table as profile_table
from performance_page import (
    RESULTS,
    about_in_words,
    machine,
    present_commit,
    publish,
    record,
)

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


def in_words(size: int) -> str:
    unit = next(u for u in reversed(UNITS) if size >= UNITS[u])
    return f"{size / UNITS[unit]:g} {unit}"


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


def memory_table(memory: list[Memory]) -> str:
    lines = ["| peak extra memory of a rank | MiB | of its shard |", "|---|---|---|"]
    for row in memory:
        share = row.bytes / row.shard_bytes
        lines.append(f"| {row.what} | {row.bytes >> 20} | {share:.2f} |")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that one run found."""

    command: str
    rounds: int
    cold: bool
    rows: list[Row]
    memory: list[Memory]
    plans: list[Growth]
    profiles: list[Profile]

    def __str__(self) -> str:
        tables = [
            self.rows and targets_table(self.rows),
            self.rows and table(self.rows),
            self.memory and memory_table(self.memory),
            self.plans and growth_table(self.plans),
            self.profiles and profile_table(self.profiles, in_words),
        ]
        return "\n\n".join(text for text in tables if text)

    def after(self, path: Path) -> Report:
        """This report together with what an earlier run of the day recorded and this one left."""
        if not path.exists():
            return self
        before = json.loads(path.read_text())
        old = [Row(**row | {"seconds": tuple(row["seconds"])}) for row in before["rows"]]
        measured = {(row.place, row.bytes, row.case) for row in self.rows}
        rows = [row for row in old if (row.place, row.bytes, row.case) not in measured] + self.rows
        place = list(dict.fromkeys((row.place, row.bytes) for row in old + self.rows))
        cases = list(dict.fromkeys(row.case for row in old + self.rows))
        return replace(
            self,
            command=f"{before['command']}\n{self.command}",
            rows=sorted(rows, key=lambda r: (place.index((r.place, r.bytes)), cases.index(r.case))),
            memory=self.memory or [Memory(**row) for row in before["memory"]],
            plans=self.plans or [Growth(**row) for row in before["plans"]],
            profiles=self.profiles or [Profile(**row) for row in before["profiles"]],
        )

    def record(self, *, add: bool) -> None:
        """Write the dated result, and put the tables in their page in benchmarks/results.

        `add`: keep what an earlier run of the day recorded of other cases, with its command.
        """
        commit, about = present_commit(), machine("torch", "safetensors", "xxhash")
        kind = "cold" if self.cold else "warm"
        name = f"checkpoint-{date.today()}{'-cold' if self.cold else ''}"
        whole = self.after(RESULTS / f"{name}.json") if add else self
        path = record(name, {"commit": commit, "machine": about, **asdict(whole)})
        setting = (
            f"{about_in_words(about, commit)}, torch {about['torch']}, "
            f"safetensors {about['safetensors']}; medians and fastest of {self.rounds} rounds."
        )
        page = publish(f"checkpoint {kind}", f"```\n{whole.command}\n```\n\n{setting}\n\n{whole}")
        print(f"recorded in {path} and {page}")
