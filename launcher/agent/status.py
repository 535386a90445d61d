"""Makes an agent's answers to `/healthz`, `/status` and, where it leads the job, `/metrics/job`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from elasticzero.ipc.messages import Logged, Message, NetworkTaken, Stepped
from elasticzero.launcher.agent.config import AgentOptions
from elasticzero.launcher.goodput import goodput
from elasticzero.launcher.http.agent_client import STATUS
from elasticzero.launcher.http.routes import HEALTH, Answer, Route, json_answer
from elasticzero.launcher.observability.compute_time import (
    ComputeTimes,
    WorkerTimes,
    compute_ratios,
)
from elasticzero.launcher.observability.console import network_text
from elasticzero.launcher.observability.job_counts import JobCounts
from elasticzero.launcher.observability.job_metrics import JobState, model_flops_utilization
from elasticzero.launcher.observability.metrics import CONTENT_TYPE, Metrics
from elasticzero.launcher.observability.progress.display import ProgressDisplay
from elasticzero.launcher.observability.progress.states import PLAIN, Trains
from elasticzero.launcher.observability.step_rate import StepRate
from elasticzero.launcher.protocol.documents import Control, World
from elasticzero.launcher.protocol.failure_policy import quarantined
from elasticzero.launcher.protocol.leader import is_leader
from elasticzero.launcher.protocol.placement import build_of, fits
from elasticzero.launcher.protocol.policy import with_operator_overrides
from elasticzero.launcher.protocol.view import View, WorkerGroupState
from elasticzero.launcher.workers.group import WorkerGroup
from elasticzero.text import named_text

NAMED = 8
"""Maximum number of ranks that a line names."""


@dataclass(slots=True, kw_only=True)
class Latest:
    """Holds the newest state of the job that an agent has seen; only `AgentReporter` changes it."""

    began_s: float
    reason: str = ""
    """Reason for what the agent does."""
    control: Control = field(default_factory=Control)
    plain: bool = False
    """True if the script makes no visible steps."""
    rate: StepRate = field(default_factory=StepRate)
    compute: ComputeTimes = field(default_factory=ComputeTimes)
    counts: JobCounts = field(default_factory=JobCounts)
    seconds: Mapping[str, float] | None = None
    """Seconds of the job's time, by class; None: this agent has not seen all of it."""
    world_time: float | None = None
    """Unix time when the present world was seen."""
    step: int = 0
    stepped_s: float | None = None
    """Time of the last step; None: there was none."""
    total_steps: int | None = None
    loss: float | None = None
    gradient_norm: float | None = None
    checkpoint_step: int | None = None
    checkpoint_time: float | None = None
    """Unix time when that checkpoint was committed, as this agent saw it."""
    network: str | None = None
    """Network that NCCL takes between nodes; None: not known."""
    snapshot_step: int | None = None
    snapshot_time: float | None = None
    """Unix time since which this node holds that snapshot."""

    def starting(self, now_s: float) -> None:
        """Notes that the workers of a generation start."""
        self.rate.begin(now_s)
        self.compute.begin()

    def received(self, local_rank: int, message: Message) -> None:
        """Notes a message of a worker; the job's numbers are those of the node's first one."""
        match message:
            case Stepped():
                if message.compute_s is not None:
                    self.compute.add(local_rank, message.compute_s)
                if local_rank == 0:
                    self.step, self.stepped_s = message.step, message.at_s
                    self.total_steps = message.total or None
                    self.gradient_norm = message.gradient_norm
                    self.rate.stepped(message.at_s, message.samples)
            case NetworkTaken(network=name, version=version, gpu_direct=gpu_direct):
                self.network = network_text(name, version, gpu_direct)
            case Logged():
                self.loss = message.scalars.get("loss", self.loss)
            case _:
                pass

    def snapshot_held(self, step: int) -> None:
        """Notes that this node holds its part of a snapshot."""
        self.snapshot_step, self.snapshot_time = step, time.time()

    def saved(self, step: int) -> None:
        """Notes that a checkpoint is committed."""
        self.checkpoint_step, self.checkpoint_time = step, time.time()


class LoopPulse:
    """Tells whether the agent's loop turns, for the agent's health and for its lease.

    Other threads answer requests and renew the lease. Without this they would go on to do so for a
    loop that stands still, and the other nodes would wait for it.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Creates the pulse of a loop that has not begun.

        Args:
            limit_s: Age of the last turn, in seconds, beyond which the loop stands still.
            clock: Returns the present time in seconds; it never goes back.
        """
        self._limit_s = limit_s
        self._clock = clock
        self._turned_s: float | None = None

    def turned(self, at_s: float) -> None:
        """Notes the time of a turn, on the clock."""
        self._turned_s = at_s

    def ended(self) -> None:
        """Notes that the loop has ended: what follows may take as long as it needs."""
        self._turned_s = None

    @property
    def age_s(self) -> float:
        """Returns the age of the last turn; 0 before the loop has begun, and once it has ended."""
        turned_s = self._turned_s
        return 0.0 if turned_s is None else self._clock() - turned_s

    def turns(self) -> bool:
        """Returns whether the loop turns, or has no need to; callable from any thread."""
        return self.age_s <= self._limit_s

    def answer(self) -> Answer:
        """Returns what `/healthz` answers."""
        if self.turns():
            return Answer(content=b"ok\n")
        text = f"the agent's loop has stood still for {self.age_s:.1f} s\n"
        return Answer(content=text.encode(), status=HTTPStatus.SERVICE_UNAVAILABLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruments:
    """Groups what shows from outside how an agent does."""

    metrics: Metrics
    pulse: LoopPulse
    progress: ProgressDisplay


def agent_routes(
    metrics: Metrics,
    pulse: LoopPulse,
    status: Callable[[], Mapping[str, Any]],
    job_metrics: Callable[[], bytes],
) -> dict[str, Route]:
    """Returns what every agent serves, by path.

    Args:
        metrics: metrics of the node.
        pulse: tells whether the agent's loop turns.
        status: returns what is served at `/status`.
        job_metrics: returns the metrics of the whole job.
    """
    return {
        "/metrics": Route(
            answer=lambda query: Answer(content=metrics.text(), kind=CONTENT_TYPE),
            served_to="everyone",
        ),
        "/metrics/job": Route(
            answer=lambda query: Answer(content=job_metrics(), kind=CONTENT_TYPE),
            served_to="everyone",
        ),
        HEALTH: Route(answer=lambda query: pulse.answer(), served_to="everyone"),
        STATUS: Route(
            answer=lambda query: json_answer(status(), indent=2), served_to="status readers"
        ),
    }


def agent_status(
    options: AgentOptions, view: View | None, latest: Latest, *, leaving: bool
) -> dict[str, Any]:
    """Returns plain values for `/status`.

    Args:
        options: Options of the node.
        view: What the agent saw last; None: nothing yet.
        latest: Newest numbers of the node's workers, and of what the agent has decided.
        leaving: Whether this node is to leave.
    """
    world = view.world if view is not None else None
    workers = view.workers if view is not None else WorkerGroupState()
    policy = with_operator_overrides(options.policy, latest.control)
    now_s = time.monotonic()
    return {
        "job": options.job,
        "node": options.node,
        "reason": latest.reason,
        "generation": world.generation if world is not None else 0,
        "world_size": world.world_size if world is not None else 0,
        "members": list(world.nodes) if world is not None else [],
        "nnodes": [policy.min_nodes, policy.max_nodes],
        "set_aside_s": _set_aside_s(view, world, now_s),
        "up_s": now_s - latest.began_s,
        "generation_age_s": latest.rate.generation_age_s(now_s),
        "step_age_s": latest.rate.step_age_s(now_s),
        "steps_per_s": latest.rate.steps_per_s(),
        "goodput": goodput(latest.seconds) if latest.seconds is not None else None,
        "seconds": latest.seconds,
        "compute_s": {str(rank): own_s for rank, own_s in latest.compute.medians().items()},
        "leaving": leaving,
        "workers": {
            "running": workers.running,
            "restored": workers.restored,
            "plain": latest.plain,
            "step": workers.step,
        },
        "step": latest.step,
        "total_steps": latest.total_steps,
        "loss": latest.loss,
        "checkpoint_step": latest.checkpoint_step,
        "snapshot_step": latest.snapshot_step,
        "network": latest.network,
    }


def progress_of(view: View, group: WorkerGroup | None, latest: Latest) -> Trains | str | None:
    """Returns how far training has come, or what this node waits for; None: for nothing.

    Args:
        view: What the agent saw last.
        group: The node's workers; None: there are none.
        latest: Newest numbers of the node's workers, and of what the agent has decided.
    """
    if view.done is not None:
        return None
    if view.world is None or group is None or view.round_s is not None:
        return latest.reason or None
    if latest.plain:
        return PLAIN
    workers = [worker for worker in group.workers if worker.running]
    if starting := [worker.rank for worker in workers if not worker.state.attached]:
        return f"waiting for {named_text('rank', starting, NAMED)} to call elasticzero.run"
    if loading := [worker.rank for worker in workers if not worker.state.restored]:
        return f"waiting for {named_text('rank', loading, NAMED)} to meet the others and load state"
    if latest.stepped_s is None or latest.rate.steps == 0:
        return "waiting for the first step"
    return Trains(
        step=latest.step,
        stepped_s=latest.stepped_s,
        total=latest.total_steps,
        loss=latest.loss,
        steps_per_s=latest.rate.steps_per_s(),
        leads=view.world.nodes[0] == view.me.node,
    )


def _set_aside_s(view: View | None, world: World | None, now_s: float) -> dict[str, float]:
    """Returns the nodes that are set aside, and for how many more seconds.

    Args:
        view: What the agent saw last; None: nothing yet.
        world: World of that view; None: there is none.
        now_s: Present time, on the monotonic clock.
    """
    if view is None or world is None:
        return {}
    return quarantined(world.strikes, world.strikes, view.struck_s, now_s)


def job_state(
    options: AgentOptions, view: View | None, latest: Latest, times: WorkerTimes
) -> JobState | None:
    """Returns what this agent knows of the whole job; None: it does not lead, or the job is over.

    Args:
        options: Options of the node.
        view: What the agent saw last; None: nothing yet.
        latest: Newest numbers of the node's workers, and of what the agent has decided.
        times: Own time of each worker in a step, in seconds, by node and local rank.
    """
    if view is None or view.done is not None or not is_leader(view):
        return None
    world, now_s, now = view.world, time.monotonic(), time.time()
    training, policy = options.training, with_operator_overrides(options.policy, latest.control)
    aside = {*_set_aside_s(view, world, now_s), *_odd_builds(view, world)}
    trained = latest.stepped_s is not None
    progress_s = now_s - (latest.began_s if latest.stepped_s is None else latest.stepped_s)
    steps_per_s, samples_per_s = latest.rate.steps_per_s(), latest.rate.samples_per_s()
    world_size = world.world_size if world is not None else 0
    return JobState(
        job=options.job,
        counts=latest.counts,
        generation=world.generation if world is not None else 0,
        generation_start=latest.world_time,
        world_size=world_size,
        members=len(world.members) if world is not None else 0,
        nodes_min=policy.min_nodes,
        nodes_max=policy.max_nodes,
        waiting=_waiting(view, world, aside),
        set_aside=len(aside),
        seconds=latest.seconds,
        step=latest.step if trained else None,
        progress_time=None if latest.plain else now - progress_s,
        steps_total=latest.total_steps,
        step_s=1 / steps_per_s if steps_per_s else None,
        samples_per_s=samples_per_s,
        mfu=model_flops_utilization(
            options.flops_per_sample, options.peak_flops, samples_per_s, world_size
        ),
        loss=latest.loss,
        gradient_norm=latest.gradient_norm,
        snapshot_step=latest.snapshot_step,
        snapshot_time=latest.snapshot_time,
        checkpoint_step=latest.checkpoint_step,
        checkpoint_time=latest.checkpoint_time,
        checkpoint_every=training.checkpoint_every if training.checkpoint_dir else 0,
        compute_ratios=compute_ratios(times),
    )


def _odd_builds(view: View, world: World | None) -> set[str]:
    """Returns the nodes that are set aside because the world has another build (L14)."""
    if world is None:
        return set()
    build, members = build_of(world.members[0]), (view.members or {}).values()
    return {m.node for m in members if not world.names(m) and not fits(m, build)}


def _waiting(view: View, world: World | None, aside: Collection[str]) -> int | None:
    """Returns the number of nodes that are registered and in no world, without those set aside;
    None: the registrations are not watched.

    Args:
        view: What the agent saw last.
        world: World of that view; None: there is none.
        aside: Nodes that are set aside.
    """
    if view.members is None:
        return None
    outside = [m for m in view.members.values() if world is None or not world.names(m)]
    return sum(member.node not in aside for member in outside)
