"""Reports what benchmarks/recovery.py found: as tables, and as a record in benchmarks/results."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import date

from performance_page import about_in_words, gpu, machine, present_commit, publish, record
from recovery_costs import REST_STEP_S, AtRest, Overhead
from recovery_gaps import Smoothness
from recovery_trial import BEGIN_S, Struck

from elasticzero.text import count_text

CASES = {
    "worker": "SIGKILL to a worker: next step after",
    "node": "SIGKILL to a node: next step after",
    "slow worker": f"SIGKILL to a worker, {BEGIN_S:g} s before elasticzero.run",
    "slow node": f"SIGKILL to a node, {BEGIN_S:g} s before elasticzero.run",
    "silent": "a node falls silent: next step after",
    "drain": "drain: training pauses",
    "join": "a node joins: training pauses",
    "fewer": "MAX is lowered: training pauses",
    "more": "MAX is raised, and a spare takes a place: training pauses",
}
PLANNED = {
    "drain": "drain",
    "join": "a node joins",
    "fewer": "MAX is lowered",
    "more": "a spare takes a place",
}
MOST_ABOVE_S, MOST_ABOVE_ZERO3_S, MOST_ABOVE_GPU_S = 0.06, 0.15, 0.1
"""Most seconds by which the largest gap near a planned change is longer than a usual step."""
MOST_SLOWED_S = 0.15
"""Most seconds by which the steps near a planned change are slower than usual, in sum."""
NO_STANDBY = ", no standby"
"""End of the name of a strategy for which no process stands by: its rows are to compare with."""
MOST_CORES = 0.01
MOST_BYTES = 80 << 20
MOST_SHARE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case with one strategy, or of the peer."""

    case: str
    launcher: str
    found: tuple[Struck, ...]
    """One a round."""

    @property
    def seconds(self) -> list[float]:
        return [struck.seconds for struck in self.found]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def smooth(self) -> list[Smoothness]:
        """Returns how smooth training was around each planned change."""
        return [s.smoothness for s in self.found if s.smoothness is not None]

    @property
    def most_above_s(self) -> float:
        """The target of the largest gap, beyond a usual step."""
        if gpu():
            return MOST_ABOVE_GPU_S
        return MOST_ABOVE_ZERO3_S if self.launcher.startswith("zero3") else MOST_ABOVE_S


def verdict(met: bool) -> str:
    return "met" if met else "NOT met"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that one run found."""

    command: str
    rounds: int
    lease_ttl_s: int
    rows: list[Row]
    rest: list[AtRest]
    overheads: list[Overhead]
    peer_hung: dict[str, int] = field(default_factory=dict)
    """Maps a case to the number of rounds in which torchrun made no further step."""

    def most_s(self, case: str) -> float:
        """The target of a case."""
        limits = {
            "worker": 0.5,
            "slow worker": 0.5,
            "node": 1.0,
            "slow node": 1.0,
            "silent": self.lease_ttl_s + 1.0,
        }
        return limits.get(case, 0.5)

    def times_table(self) -> str:
        """Every case and strategy beside its target."""
        lines = [
            "| case | with | wanted s | median s | fastest | slowest | steps redone "
            "| torchrun / this | |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        peers = {row.case: row.median_s for row in self.rows if row.launcher == "torchrun"}
        for row in self.rows:
            theirs = row.launcher == "torchrun" or row.launcher.endswith(NO_STANDBY)
            most_s = self.most_s(row.case)
            ratio = f"{peers[row.case] / row.median_s:.1f}" if row.case in peers else "-"
            redone = "-" if theirs else str(max(struck.recomputed for struck in row.found))
            met = row.median_s <= most_s and (row.case not in PLANNED or redone == "0")
            lines.append(
                f"| {CASES[row.case]} | {row.launcher} | {'-' if theirs else f'≤ {most_s:g}'} "
                f"| {row.median_s:.2f} | {min(row.seconds):.2f} | {max(row.seconds):.2f} "
                f"| {redone} | {ratio} | {'' if theirs else verdict(met)} |"
            )
        return "\n".join(lines)

    def hung_peers(self) -> str:
        """The rounds in which torchrun made no step after a blow, or never trained steadily."""
        return "\n".join(
            f"{CASES[case]}: torchrun came to none in time in "
            f"{count_text(rounds, 'round')} (--peer-timeout), which its figures leave out."
            for case, rounds in self.peer_hung.items()
        )

    def gaps_table(self) -> str:
        """The largest gap between two steps near each planned change, and the slow-down."""
        rows = [row for row in self.rows if row.case in PLANNED and row.smooth]
        if not rows:
            return ""
        lines = [
            "| planned change | with | a usual step, ms | largest gap, ms: median | worst | wanted "
            "| | slowed, ms: median (before, in and after the pause; anyway) "
            "| worst | wanted | |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        for row in rows:
            usual_s = statistics.median(one.usual_s for one in row.smooth)
            above_s = statistics.median(one.above_s for one in row.smooth)
            gaps_ms = [one.largest_gap_s * 1000 for one in row.smooth]
            slowed_ms = [one.slowed_s * 1000 for one in row.smooth]
            gap_ms, slow_ms = statistics.median(gaps_ms), statistics.median(slowed_ms)
            parts_s = zip(*(one.slowed_parts_s for one in row.smooth), strict=True)
            parts = ", ".join(f"{statistics.median(part_s) * 1000:.0f}" for part_s in parts_s)
            anyway_ms = statistics.median(one.anyway_s for one in row.smooth) * 1000
            most_ms = (usual_s + row.most_above_s) * 1000
            lines.append(
                f"| {PLANNED[row.case]} | {row.launcher} | {usual_s * 1000:.0f} | {gap_ms:.0f} "
                f"| {max(gaps_ms):.0f} | ≤ {most_ms:.0f} | {verdict(above_s <= row.most_above_s)} "
                f"| {slow_ms:.0f} ({parts}; {anyway_ms:.0f}) | {max(slowed_ms):.0f} "
                f"| ≤ {MOST_SLOWED_S * 1000:.0f} "
                f"| {verdict(slow_ms <= MOST_SLOWED_S * 1000)} |"
            )
        return "\n".join(lines)

    def noticed(self) -> str:
        """How soon an agent knows of its worker's death."""
        delays = [s.noticed_s for row in self.rows for s in row.found if s.noticed_s is not None]
        if not delays:
            return ""
        middle, worst = statistics.median(delays) * 1000, max(delays) * 1000
        return (
            f"From SIGKILL of a worker until its own agent knows: {middle:.0f} ms (median of "
            f"{len(delays)}), {worst:.0f} ms at most."
        )

    def rest_table(self) -> str:
        if not self.rest:
            return ""
        lines = [
            f"| over {self.rest[0].seconds:.0f} s of training, steps of {REST_STEP_S:g} s | wanted "
            "| agent | | its fork server |",
            "|---|---|---|---|---|",
        ]
        cores = max(resting.agent_cores for resting in self.rest)
        size = max(resting.agent_bytes for resting in self.rest)
        server_cores = max(resting.server_cores for resting in self.rest)
        server_bytes = max(resting.server_bytes for resting in self.rest)
        lines.append(
            f"| share of a core, % | ≤ {MOST_CORES * 100:g} | {cores * 100:.2f} "
            f"| {verdict(cores <= MOST_CORES)} | {server_cores * 100:.2f} |"
        )
        lines.append(
            f"| memory, MiB | ≤ {MOST_BYTES >> 20} | {size >> 20} | {verdict(size <= MOST_BYTES)} "
            f"| {server_bytes >> 20} |"
        )
        return "\n".join(lines)

    def overhead_table(self) -> str:
        if not self.overheads:
            return ""
        lines = [
            "| a training step | without | without, ms | with, ms | wanted | overhead | 95 % | |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for overhead in self.overheads:
            low, high = overhead.likely
            bare_ms = statistics.median(overhead.bare_s) * 1000
            own_ms = statistics.median(overhead.own_s) * 1000
            lines.append(
                f"| {overhead.strategy} | {overhead.bare} | {bare_ms:.1f} | {own_ms:.1f} "
                f"| ≤ {MOST_SHARE * 100:g} % | {overhead.share * 100:+.1f} % "
                f"| {low * 100:+.1f} to {high * 100:+.1f} % "
                f"| {verdict(overhead.share <= MOST_SHARE)} |"
            )
        return "\n".join(lines)

    def __str__(self) -> str:
        rows = self.times_table() if self.rows else ""
        figures = (
            self.hung_peers(),
            self.gaps_table(),
            self.noticed(),
            self.rest_table(),
            self.overhead_table(),
        )
        parts: Iterable[str] = (rows, *figures)
        return "\n\n".join(text for text in parts if text)

    def record(self) -> None:
        """Write the dated result, and put the tables in their page in benchmarks/results."""
        commit, about = present_commit(), machine("torch")
        document = {"commit": commit, "machine": about, **asdict(self)}
        where = "recovery gpu" if about["gpu"] else "recovery"
        path = record(f"{where.replace(' ', '-')}-{date.today()}", document)
        setting = (
            f"{about_in_words(about, commit)}, torch {about['torch']}; medians of {self.rounds} "
            f"rounds, lease TTL {self.lease_ttl_s} s."
        )
        page = publish(where, f"```\n{self.command}\n```\n\n{setting}\n\n{self}")
        print(f"recorded in {path} and {page}")
