"""Reports what benchmarks/rendezvous.py found: as tables, and as a record in benchmarks/results."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date

from performance_page import about_in_words, machine, present_commit, publish, record

TARGETS_S = {300: (2.5, 3.0), 1000: (8.0, 5.0)}
"""Holds the seconds to form a world, and to regroup, by number of agents, on two cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """What was asked of etcd, and used, over some time."""

    agents: int
    seconds: float
    requests: dict[str, int]
    """By etcd's own counters. Watch: watches opened and closed. LeaseKeepAlive: pulses."""
    watch_messages: int
    sent_bytes: int
    agents_cpu_s: float
    etcd_cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Times are seconds from the first agent's first request, or from the kill."""

    registered_s: float
    """Until the last has registered."""
    formed_s: float
    """Until the last knows generation 1."""
    regrouped_s: float
    """Until the last that lives knows a world after the first."""
    world_bytes: int
    next_world_bytes: int
    """It is of the last generation, and names the sources of its state too."""
    worlds: int
    """Number of worlds after the first that this took: 1, or more where some answered late."""
    rss_bytes: int
    """Of all the clients' processes, at their peak."""
    forming: Phase
    resting: Phase
    regrouping: Phase


Event = Callable[[Round], Phase]
EVENTS: tuple[tuple[str, Event], ...] = (
    ("form", lambda r: r.forming),
    ("regroup", lambda r: r.regrouping),
)
KINDS = ("Range", "Txn", "LeaseGrant", "LeaseKeepAlive", "Watch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    agents: int
    rounds: tuple[Round, ...]

    def median(self, value: Callable[[Round], float]) -> float:
        return statistics.median(map(value, self.rounds))

    def median_of(self, event: Event, value: Callable[[Phase], float]) -> float:
        return self.median(lambda r: value(event(r)))

    def of_each(self, event: Event, value: Callable[[Phase], float]) -> float:
        """Of one agent in an event."""
        return self.median(lambda r: value(event(r)) / event(r).agents)

    def a_second(self, event: Event, value: Callable[[Phase], float]) -> float:
        return self.median(lambda r: value(event(r)) / event(r).seconds)


def times_table(sizes: list[Size]) -> str:
    lines = [
        "| agents | all are registered s | all know the world s | slowest | regrouped s | slowest "
        "| in worlds | world, KiB | next world, KiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for size in sizes:
        lines.append(
            f"| {size.agents} | {size.median(lambda r: r.registered_s):.2f} "
            f"| {size.median(lambda r: r.formed_s):.2f} "
            f"| {max(r.formed_s for r in size.rounds):.2f} "
            f"| {size.median(lambda r: r.regrouped_s):.2f} "
            f"| {max(r.regrouped_s for r in size.rounds):.2f} "
            f"| {max(r.worlds for r in size.rounds)} "
            f"| {size.median(lambda r: r.world_bytes) / 1024:.1f} "
            f"| {size.median(lambda r: r.next_world_bytes) / 1024:.1f} |"
        )
    return "\n".join(lines)


def requests_of(kind: str) -> Callable[[Phase], float]:
    return lambda phase: phase.requests.get(kind, 0)


def requests_table(sizes: list[Size]) -> str:
    """Requests of one agent in one event."""
    lines = [
        f"| agents | event | requests an agent | {' | '.join(KINDS)} | told by watches | KiB sent "
        "to each |",
        "|---|---|---|" + "---|" * (len(KINDS) + 2),
    ]
    for size in sizes:
        for name, event in EVENTS:
            kinds = [size.of_each(event, requests_of(kind)) for kind in KINDS]
            lines.append(
                f"| {size.agents} | {name} "
                f"| {size.of_each(event, lambda p: sum(p.requests.values())):.1f} "
                f"| {' | '.join(f'{count:.1f}' for count in kinds)} "
                f"| {size.of_each(event, lambda p: p.watch_messages):.1f} "
                f"| {size.of_each(event, lambda p: p.sent_bytes) / 1024:.0f} |"
            )
    return "\n".join(lines)


def rest_table(sizes: list[Size]) -> str:
    lines = [
        "| agents | requests/s at rest | of one agent | etcd, share of a core "
        "| one agent, share of a core | one agent, MiB |",
        "|---|---|---|---|---|---|",
    ]

    def rest(r: Round) -> Phase:
        return r.resting

    for size in sizes:
        asked = size.a_second(rest, lambda p: sum(p.requests.values()))
        lines.append(
            f"| {size.agents} | {asked:.1f} | {asked / size.agents:.2f} "
            f"| {size.a_second(rest, lambda p: p.etcd_cpu_s):.1%} "
            f"| {size.a_second(rest, lambda p: p.agents_cpu_s) / size.agents:.2%} "
            f"| {size.median(lambda r: r.rss_bytes) / size.agents / (1 << 20):.1f} |"
        )
    return "\n".join(lines)


def cores_table(sizes: list[Size]) -> str:
    """Whose work the time is."""
    lines = [
        "| agents | event | agents' CPU s | of one agent, ms | etcd's CPU s | over s |",
        "|---|---|---|---|---|---|",
    ]
    for size in sizes:
        for name, event in EVENTS:
            agents_s = size.median_of(event, lambda p: p.agents_cpu_s)
            lines.append(
                f"| {size.agents} | {name} | {agents_s:.2f} | {agents_s / size.agents * 1000:.1f} "
                f"| {size.median_of(event, lambda p: p.etcd_cpu_s):.2f} "
                f"| {size.median_of(event, lambda p: p.seconds):.2f} |"
            )
    return "\n".join(lines)


def verdict(sizes: list[Size]) -> str:
    """The target beside what was measured; empty where its size was not run."""
    lines = []
    for size in sizes:
        measured = (size.median(lambda r: r.formed_s), size.median(lambda r: r.regrouped_s))
        targets = TARGETS_S.get(size.agents, ())
        for event, seconds, most_s in zip(("form", "regroup"), measured, targets, strict=False):
            met = "met" if seconds <= most_s else "NOT met"
            lines.append(
                f"- {size.agents} agents {event}: ≤ {most_s:g} s wanted, {seconds:.2f} s measured, "
                f"{met}."
            )
    return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that one run found."""

    command: str
    sizes: list[Size]

    def __str__(self) -> str:
        tables = (times_table, requests_table, rest_table, cores_table, verdict)
        return "\n\n".join(text for text in (table(self.sizes) for table in tables) if text)

    def record(self) -> None:
        """Write the dated result, and put the tables in their page in benchmarks/results."""
        commit, about = present_commit(), machine("grpcio", "protobuf")
        document = {"commit": commit, "machine": about, **asdict(self)}
        path = record(f"rendezvous-{date.today()}", document)
        rounds = len(self.sizes[0].rounds)
        setting = (
            f"{about_in_words(about, commit)}, Python {about['python']}, "
            f"grpcio {about['grpcio']}; medians of {rounds} rounds."
        )
        page = publish("rendezvous", f"```\n{self.command}\n```\n\n{setting}\n\n{self}")
        print(f"recorded in {path} and {page}")
