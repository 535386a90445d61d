"""Transcripts: a few scripted events in, what every agent decides and why out.

A file of `tests/scenarios/` is a title, settings, events, a line `--`, and the transcript. Nothing
is drawn: every delay is the middle of its range, so a transcript changes only when the code does.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from random import Random
from typing import Any

from elasticzero.launcher.protocol.policy import JobPolicy
from tests.simulation.agents import Agent
from tests.simulation.cluster import Cluster
from tests.simulation.schedule import Plan

APART_S = 0.1
END = "--"


class Even(Random):
    """Draws nothing: always the middle."""

    def __init__(self) -> None:
        super().__init__(0)
        self._numbers = 0

    def random(self) -> float:
        return 0.5

    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2

    def choice(self, seq: Any) -> Any:
        return seq[0]

    def randint(self, a: int, b: int) -> int:
        return (a + b) // 2

    def getrandbits(self, k: int) -> int:
        self._numbers += 1
        return self._numbers


def play(text: str) -> str:
    """The file with the transcript as it is now."""
    head = text.split(f"\n{END}\n")[0].rstrip("\n")
    script = [line.split("#")[0].strip() for line in head.splitlines()[1:]]
    settings = dict(pair.split("=") for line in script if "=" in line for pair in line.split())
    events = [line.split() for line in script if line and "=" not in line]
    lines: list[str] = []
    cluster = _cluster(settings, lines)
    for event in events:
        cluster.timeline.after(float(event[0]), _happen, cluster, event[1:])
    last_s = max((float(event[0]) for event in events), default=0.0)
    cluster.begin(last_s + 0.01, mends=settings.get("mends", "yes") == "yes")
    return f"{head}\n{END}\n" + "\n".join(_joined(lines)) + "\n"


def _cluster(settings: dict[str, str], lines: list[str]) -> Cluster:
    plan = Plan(
        seed=0,
        nodes=int(settings.get("nodes", "3")),
        policy=JobPolicy(
            min_nodes=int(settings.get("min", "1")),
            max_nodes=int(settings.get("max", "3")),
            strategy=settings.get("strategy", "zero1"),
            settle_s=0.5,
            grow_settle_s=0.2,
            stop_s=2.5,
            save_s=3.0,
            lease_ttl_s=2.0,
            handover_s=4.0,
            max_restarts=int(settings.get("max_restarts", "3")),
        ),
        trouble=0.0,
        poll_s=0.25,
        pause_growth=2.0,
        apart_s=0.0,
    )
    numbers = {f.name for f in fields(Plan) if f.type in ("int", "float")}
    plan_options: dict[str, Any] = {
        k: float(v) for k, v in settings.items() if k in numbers - {"nodes"}
    }
    plan_options = {k: int(v) if v == int(v) else v for k, v in plan_options.items()}
    plan = replace(plan, strategy=settings.get("strategy", "zero1"), **plan_options)
    plan = replace(plan, storage=settings.get("storage", "yes") == "yes")
    return Cluster(plan, lines.append, Even())


def _happen(cluster: Cluster, event: list[str]) -> None:
    """One event: what happens, the node where it is about one, and for how long."""
    kind, *rest = event
    agent: Agent | None = None
    if rest and rest[0] in cluster.hosts:
        agent = cluster.hosts[rest.pop(0)].agent
    cluster.strike(kind, agent, float(rest[0]) if rest else 0.0)


def _joined(lines: list[str]) -> list[str]:
    """What several nodes say alike, one after another, on one line; what a node has said before in
    the same generation is left out."""
    rows: list[tuple[str, list[str], str]] = []
    shown_states: set[tuple[str, str]] = set()
    for line in lines:
        time, rest = line[:9], line[9:].strip()
        name, colon, text = rest.partition(": ")
        if not colon or not name.startswith("node-"):
            if "etcd: generation" in rest:
                shown_states.clear()
            rows.append((time, [], rest))
        elif (name, text) in shown_states:
            continue
        elif rows and rows[-1][1] and rows[-1][2] == text:
            rows[-1][1].append(name)
        else:
            rows.append((time, [name], text))
        shown_states.add((name, text))
    return [
        f"{float(time):7.2f}  {', '.join(sorted(names))}{': ' * bool(names)}{text}"
        for time, names, text in rows
    ]


def paths(root: Path) -> list[Path]:
    return sorted((root / "tests" / "scenarios").glob("*.txt"))
