"""Event logs of agents that never were, for tests of the report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elasticzero.launcher.goodput import TimeAccount, followed
from elasticzero.ops.report.digest import digest
from elasticzero.ops.report.model import NodeLog, RunSummary
from elasticzero.ops.report.runs import last_run
from elasticzero.ops.report.summarize import summarize_run
from elasticzero.serialization import encode

BEGIN_S = 1_800_000_000.0
Event = dict[str, Any]


@dataclass
class MadeUpJob:
    """Agents with one true time, and clocks that may differ from it."""

    clocks_s: Mapping[str, float] = field(default_factory=dict)
    logs: dict[str, list[Event]] = field(default_factory=dict)
    now_s: float = BEGIN_S
    generation: int = 0
    step: int = 0
    total: int = 100
    members: tuple[str, ...] = ()
    account: TimeAccount | None = None
    stepped_s: float = BEGIN_S

    def note(self, nodes: Sequence[str], event: str, **fields: Any) -> None:
        """An event in the logs of nodes; the first member accounts for the time."""
        for node in nodes:
            at_s = self.now_s + self.clocks_s.get(node, 0.0)
            self.logs.setdefault(node, []).append({"time": at_s, "event": event, **fields})
        if (self.members or tuple(self.logs))[0] in nodes:
            followed_event = {"time": self.now_s, "event": event, **fields}
            self.account = followed(self.account, followed_event)

    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    def register(self, *nodes: str) -> None:
        for node in nodes:
            self.note([node], "serving", port=1, host=node)
            self.note([node], "registered", incarnation=f"i-{node}")

    def world(self, *members: str, resume: int = 0, reason: str = "nodes came together") -> None:
        """The next world, whose workers start and restore in 0.3 s."""
        assert self.account is not None
        self.generation, self.step, self.members = self.generation + 1, resume, members
        spent = self.account.spent(self.now_s, self.now_s, resume)
        self.note(
            members,
            "world",
            generation=self.generation,
            members=list(members),
            world_size=len(members),
            resume_step=resume,
            tier="ram" if resume else "fresh",
            reason=reason,
            bad_steps=[],
            skipped=None,
            time_spent=encode(spent),
        )
        self.wait(0.1)
        for rank, node in enumerate(members):
            self.note([node], "start", generation=self.generation, index=rank, ranks=[rank])
        self.wait(0.2)
        phases = {"connect_s": 0.05, "build_s": 0.05, "restore_s": 0.1}
        self.note(
            members, "restored", generation=self.generation, step=resume, tier="ram", **phases
        )

    def train(
        self,
        count: int,
        step_s: float = 0.1,
        waits_s: Mapping[str, float] | None = None,
        compute_s: Mapping[str, float | None] | None = None,
    ) -> None:
        for _ in range(count):
            self.wait(step_s)
            self.step += 1
            for node in self.members:
                self.note(
                    [node],
                    "step",
                    step=self.step,
                    generation=self.generation,
                    at_s=0.0,
                    step_s=step_s,
                    data_wait_s=(waits_s or {}).get(node, 0.01),
                    samples=8,
                    total=self.total,
                    compute_s=(compute_s or {}).get(node, 0.05),
                )
            self.note(self.members[:1], "log", rank=0, step=self.step, loss=5.0 - 0.01 * self.step)
        self.stepped_s = self.now_s

    def round(self, kind: str, reason: str, seen_by: Sequence[str], after_s: float = 0.4) -> None:
        self.wait(after_s)
        self.note(seen_by, "round", generation=self.generation, kind=kind, reason=reason)
        self.wait(0.5)

    def recovered(self, kind: str, lost: int, detect_s: float = 0.4) -> None:
        """What the agents write at the first step after a round."""
        phases = {"detect_s": detect_s, "regroup_s": 0.6, "start_s": 0.1, "connect_s": 0.05}
        phases |= {"build_s": 0.05, "restore_s": 0.1, "first_step_s": 0.1}
        whole = {"steps_lost": lost, "seconds": sum(phases.values())}
        fields = {
            "generation": self.generation,
            "kind": kind,
            "reason": "a peer",
            **whole,
            **phases,
        }
        self.note(self.members, "recovery", **fields)

    def end(self, outcome: str | None = "finished", reason: str = "", code: int = 0) -> None:
        assert self.account is not None
        self.wait(0.2)
        if outcome == "finished":
            self.account.ended(self.now_s)
        seconds = self.account.seconds(self.now_s)
        reason = reason or f"{outcome} after step {self.step}"
        fields = {"code": code, "outcome": outcome, "reason": reason, "end_reason": ""}
        self.note(self.members, "exit", **fields, seconds=seconds)

    def summary(self, *nodes: str, every: int = 1, running: bool = False) -> RunSummary:
        """What the report makes of the logs of these nodes; of none: of all."""
        chosen = nodes or tuple(self.logs)
        lives = [life for node in chosen for life in digest(node, self.logs[node], every)]
        run = last_run(lives)
        assert run is not None
        logs = [NodeLog(node=node, bytes=1000, every=every) for node in chosen]
        return summarize_run("j", run, logs, running=running)

    def write(self, directory: Path) -> None:
        """The logs, as agents write them."""
        for node, events in self.logs.items():
            folder = directory / node
            folder.mkdir(parents=True, exist_ok=True)
            lines = "".join(json.dumps(event) + "\n" for event in events)
            (folder / "events.jsonl").write_text(lines)


def eventful() -> MadeUpJob:
    """Three nodes, one of which is lost after step 34, back to 30; then one joins at step 50."""
    job = MadeUpJob()
    job.register("a", "b", "c")
    job.wait(2.0)
    job.world("a", "b", "c", reason="3 nodes came together")
    job.train(34)
    job.round("failure", "rank 0 lost a peer", seen_by=("a", "b"))
    job.world("a", "b", resume=30, reason="c is lost")
    job.train(1)
    job.recovered("failure", lost=4)
    job.train(19)
    job.register("d")
    job.round("boundary", "all stopped at a boundary", seen_by=("a", "b"), after_s=0.0)
    job.world("a", "b", "d", resume=50, reason="d joined")
    job.train(1)
    job.recovered("boundary", lost=0, detect_s=0.0)
    job.train(49)
    job.end()
    return job
