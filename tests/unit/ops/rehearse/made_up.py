"""Makes up the records of rehearsals: a job that is undisturbed, and the same with a fault."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from elasticzero.ops.rehearse.comparison import compare
from elasticzero.ops.rehearse.results import Verdict
from elasticzero.rehearsal.records import LiveValue, Moment, RunResult, StepRecord

Value = int | str | float | tuple[float, ...]
Key = tuple[str, str]
State = Mapping[Key, Value]
KINDS = (
    "tracked",
    "buffer",
    "extra state",
    "optimizer attribute",
    "optimizer",
    "parameter",
)
"""The kinds of the whole job's values, causes before what follows."""
NOUNS = {
    "tracked": "tracked value",
    "buffer": "buffer",
    "extra state": "extra state",
    "optimizer attribute": "optimizer attribute",
    "optimizer": "optimizer",
    "parameter": "parameter",
}


def digest_of(value: Value) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()


@cache
def live(kind: str, name: str, value: Value, dtype: str = "float64") -> LiveValue:
    """A value as a probe records it: tuples are tensors, of one axis."""
    if isinstance(value, str):
        return LiveValue(kind, name, digest_of(value), repr(value))
    text = f"{dtype}[{len(value)}]" if isinstance(value, tuple) else repr(value)
    elements = value if isinstance(value, tuple) else (float(value),)
    signs = random.Random(name)
    projections = [sum(elements)]
    for _ in range(7):
        projections.append(sum(x if signs.random() < 0.5 else -x for x in elements))
    return LiveValue(kind, name, digest_of(value), text, tuple(projections))


@dataclass(frozen=True)
class Job:
    """What an undisturbed job has at each boundary, from before its first step on."""

    states: Sequence[State]
    global_batch: int = 4
    draws: bool = False
    dtype: str = "float64"

    @property
    def steps(self) -> int:
        return len(self.states) - 1

    def samples(self, step: int) -> range:
        return range((step - 1) * self.global_batch, step * self.global_batch)

    def record(self, generation: int, world: int, rank: int, step: int) -> StepRecord:
        """A boundary's record; its loss is the rank's."""
        samples = tuple(self.samples(step))[rank::world]
        values = [live(*key, value, self.dtype) for key, value in self.states[step].items()]
        generator = live("generator", "torch", f"{rank} after {step}")
        return StepRecord(
            generation=generation,
            rank=rank,
            world_size=world,
            step=step,
            moment=Moment.BOUNDARY,
            loss=(1 / (2 + step) + rank).hex(),
            gradient_norm=(1 / (1 + step)).hex(),
            samples=samples,
            live=(*(values if rank == 0 else ()), generator),
            draws=self.draws,
        )

    def generation(self, number: int, world: int, start: int, last: int) -> list[StepRecord]:
        """All records of a generation that goes on from `start` and makes steps up to `last`."""
        ranks = range(world)
        first = [self.record(number, world, rank, start) for rank in ranks]
        bare = {"moment": Moment.START, "loss": "", "gradient_norm": "", "samples": ()}
        starts = [replace(record, **bare) for record in first]  # type: ignore[arg-type]
        steps = range(start + 1, last + 1)
        return starts + [self.record(number, world, rank, s) for s in steps for rank in ranks]

    def undisturbed(self, world: int) -> list[StepRecord]:
        return self.generation(1, world, 0, self.steps)


def run(fault: str, records: Sequence[StepRecord], **change: Any) -> RunResult:
    fields: dict[str, Any] = {
        "strategy": "ddp",
        "fault": fault,
        "world": 2,
        "fault_step": 6,
        "records": tuple(records),
        "exit_code": 0,
        "refusal": "",
        "failure": "",
        "virtual_batch": False,
        "batch_norm": False,
        "half_parameters": False,
    }
    return RunResult(**(fields | change))


def controls(job: Job, nudged: Job | None = None, world: int = 2, **change: Any) -> list[RunResult]:
    """Two undisturbed runs, and one with a nudged gradient."""
    records = job.undisturbed(world)
    moved = (nudged or job).undisturbed(world)
    return [
        run("none", records, world=world, **change),
        run("none again", records, world=world, **change),
        run("nudged", moved, world=world, **change),
    ]


def plain_job(steps: int = 12) -> Job:
    """A job with a value of each kind, each of which each step changes."""
    states: list[State] = [
        {
            ("tracked", "schedule.last_epoch"): step,
            ("buffer", "head.calls"): step,
            ("extra state", "head"): f"state {step}",
            ("optimizer attribute", "rounds"): step,
            ("optimizer", "state['w']['exp_avg']"): (0.1 * step + 1, 0.5),
            ("parameter", "w"): (1.0 + 0.25 * step, 2.0),
        }
        for step in range(steps + 1)
    ]
    return Job(states)


def moved(job: Job, from_step: int, share: float) -> Job:
    """The job with all tensors scaled by `1 + share` from a step on."""
    states = [
        {
            key: tuple(x * (1 + share) for x in value) if isinstance(value, tuple) else value
            for key, value in state.items()
        }
        if step >= from_step
        else state
        for step, state in enumerate(job.states)
    ]
    return replace(job, states=states)


def with_value(record: StepRecord, key: Key, value: Value | None, dtype: str) -> StepRecord:
    """The record with another value, or without it."""
    values = [
        live(*key, value, dtype) if (v.kind, v.name) == key and value is not None else v
        for v in record.live
        if (v.kind, v.name) != key or value is not None
    ]
    return replace(record, live=tuple(values))


def verdict_on(runs: Sequence[RunResult], fault: str, strategy: str = "ddp") -> Verdict:
    verdicts = compare(runs)
    (verdict,) = [v for (s, f, _), v in verdicts.items() if (s, f) == (strategy, fault)]
    return verdict


def same_world(job: Job, records: Sequence[StepRecord], **change: Any) -> Verdict:
    return verdict_on([*controls(job), run("kill-worker", records, **change)], "kill-worker")


def other_value(value: Value) -> Value:
    if isinstance(value, tuple):
        return (value[0] + 1, *value[1:])
    return f"{value}!" if isinstance(value, str) else value + 1
