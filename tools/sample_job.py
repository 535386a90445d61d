"""A made-up job for pictures and tests of screens: 40 minutes of training with faults.

Its events go through the same code as those of a real job. Nothing in it was measured.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from elasticzero.ipc.assignment import Resume
from elasticzero.launcher.http.server import AgentServer, listen
from elasticzero.launcher.observability.job_status import Job, collect_status
from elasticzero.launcher.protocol.documents import Control, Member, World
from elasticzero.launcher.secrets import Secret
from elasticzero.ops.dashboard.history import JobHistory
from elasticzero.ops.dashboard.service import job_document, job_routes, page_routes

TOKEN = "a-token-of-no-job"
BEGAN_S = 1_790_000_000.0
"""Unix time at which the job begins."""
STEP_S = 0.4
TOTAL = 12_000
FAULTS = (
    # seconds into the job, kind of the round, steps lost, reason
    (0.0, "", 0, "4 nodes came together"),
    (540.0, "lapse", 6, "node-3 is lost: its host refuses connections"),
    (760.0, "grow", 0, "node-4 joins"),
    (1290.0, "failure", 4, "rank 5 on node-2 failed after step 3169: RuntimeError: CUDA error"),
    (1810.0, "leave", 0, "node-1 leaves: AWS spot interruption in 118 s"),
    (2105.0, "grow", 0, "node-5 joins"),
)
NODES = (
    ("node-0", "node-1", "node-2", "node-3"),
    ("node-0", "node-1", "node-2"),
    ("node-0", "node-1", "node-2", "node-4"),
    ("node-0", "node-1", "node-2", "node-4"),
    ("node-0", "node-2", "node-4"),
    ("node-0", "node-2", "node-4", "node-5"),
)
ENDS_S = 2400.0
PAUSES_S = (14.0, 2.6, 1.4, 3.1, 1.2, 1.3)
"""Seconds from the begin of each generation to the end of its first step."""
SECONDS = {
    "productive": 2318.6,
    "data_wait": 21.4,
    "checkpoint": 15.2,
    "startup": 15.1,
    "snapshot": 9.3,
    "regroup": 7.9,
    "wasted": 4.0,
    "detect": 3.4,
    "connect": 3.0,
    "restore": 2.1,
}


def loss_at(step: int) -> float:
    """A loss that falls as a language model's does, with noise."""
    noise = math.sin(12.9898 * step) * 43758.5453
    return 2.1 + 6.6 * math.pow(1 + step / 55, -0.62) + 0.05 * (noise - math.floor(noise) - 0.5)


def events() -> Iterator[dict[str, Any]]:
    """The events of node-0, as its log has them."""
    step = 0
    for index, (start_s, kind, lost, reason) in enumerate(FAULTS):
        at, members, generation = BEGAN_S + start_s, NODES[index], index + 1
        if index:
            yield {"event": "round", "time": at - 0.3, "kind": kind, "reason": reason}
            step -= lost
        yield {
            "event": "world", "time": at, "generation": generation, "members": list(members),
            "world_size": 2 * len(members), "resume_step": step, "reason": reason,
            "tier": "ram" if index else "fresh",
        }  # fmt: skip
        yield {"event": "start", "time": at, "ranks": [0, 1]}
        first = at + PAUSES_S[index]
        if index:
            seconds = PAUSES_S[index] + 0.3
            yield {"event": "recovery", "time": first, "seconds": seconds, "steps_lost": lost}
        end = BEGAN_S + (FAULTS[index + 1][0] - 0.4 if index + 1 < len(FAULTS) else ENDS_S)
        for count in range(int((end - first) / STEP_S)):
            step, now = step + 1, first + count * STEP_S
            yield {"event": "step", "time": now, "generation": generation, "step": step}
            yield {"event": "log", "time": now, "rank": 0, "step": step, "loss": loss_at(step)}
            if step % 4 == 0:
                yield {"event": "kept", "time": now, "step": step, "error": None}
            if step % 1000 == 0:
                saved = {"step": step, "seconds": 2.31, "error": None}
                yield {"event": "saved", "time": now + 2.31, **saved}


def member(name: str, index: int) -> Member:
    return Member(name, f"i-{name}", f"10.0.0.{11 + index}", 9400, 29500, 2)


@cache
def _past() -> tuple[dict[str, Any], int, int]:
    """The history at the last moment, the last step, and that from which the last generation goes
    on."""
    history = JobHistory("node-0")
    step = resume = 0
    due_s = BEGAN_S + PAUSES_S[0]
    for event in sorted(events(), key=lambda event: float(event["time"])):
        history.take(event)
        step = event["step"] if event["event"] == "step" else step
        resume = event["resume_step"] if event["event"] == "world" else resume
        while event["time"] >= due_s:
            starts = [f[0] for f in FAULTS]
            lost_s = sum(p for s, p in zip(starts, PAUSES_S, strict=True) if BEGAN_S + s < due_s)
            passed_s = due_s - BEGAN_S
            history.goodput(due_s, 0.985 * max(0.0, passed_s - lost_s) / passed_s)
            due_s += 1.0
    return history.values(), step, resume


def document(nodes: Sequence[str] = NODES[-1], *, waiting: Sequence[str] = ()) -> dict[str, Any]:
    """What `/job` serves of this job at its last moment.

    nodes: members of the last generation. waiting: nodes that are registered besides.
    """
    history, step, resume = _past()
    members = tuple(member(name, i) for i, name in enumerate(nodes))
    spares = {name: member(name, 40 + i) for i, name in enumerate(waiting)}
    world = World(
        generation=len(FAULTS),
        token="g",
        members=members,
        strategy="zero2",
        resume=Resume(tier="ram", step=resume, generation=len(FAULTS) - 1),
        reason=FAULTS[-1][3],
    )
    job = Job(
        name="gpt-1b",
        members={m.node: m for m in members} | spares,
        world=world,
        done=None,
        control=Control(),
        control_revision=0,
    )
    trains = {
        "step": step,
        "total_steps": TOTAL,
        "steps_per_s": 1 / STEP_S,
        "generation": len(FAULTS),
        "generation_age_s": ENDS_S - FAULTS[-1][0],
        "nnodes": [2, 4],
        "goodput": SECONDS["productive"] / sum(SECONDS.values()),
        "seconds": SECONDS,
        "loss": loss_at(step),
        "checkpoint_step": 5000,
        "reason": "training",
    }
    joined = {"node-4": 752.0, "node-5": 2096.0} | dict.fromkeys(waiting, 2251.0)
    ages = {name: ENDS_S + 9.0 - joined.get(name, 0.0) for name in (*nodes, *waiting)}
    statuses = {
        name: {
            **trains,
            "step_age_s": 0.11 + 0.04 * (i % 7),
            "up_s": ages[name],
            "compute_s": {"0": 0.219, "1": (0.221, 0.224, 0.317, 0.222)[i % 4]},
        }
        for i, name in enumerate(nodes)
    } | {name: {"up_s": ages[name]} for name in waiting}
    phases = dict.fromkeys(nodes, "restored")
    status = collect_status(job, phases, statuses)
    return job_document(
        status,
        copy.deepcopy(history),
        at=BEGAN_S + ENDS_S,
        node=nodes[0],
        leads=True,
        doing="training",
    )


@contextmanager
def served_page(job: dict[str, Any]) -> Iterator[str]:
    """The address of a status page that shows this job, with its token."""
    with AgentServer(
        listen("127.0.0.1", 0),
        routes={**page_routes(), **job_routes(lambda *, pass_on: job)},
        snapshots=None,  # type: ignore[arg-type]
        events=None,  # type: ignore[arg-type]
        token=lambda: Secret(TOKEN),
    ) as server:
        yield f"http://127.0.0.1:{server.port}/#token={TOKEN}"
