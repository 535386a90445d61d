"""Makes an agent's answer to `/status`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elasticzero.launcher.goodput import goodput
from elasticzero.launcher.observability.step_rate import StepRate
from elasticzero.launcher.protocol.documents import Control
from elasticzero.launcher.protocol.failure_policy import quarantined
from elasticzero.launcher.protocol.policy import with_operator_overrides
from elasticzero.launcher.protocol.view import View, WorkerGroupState

if TYPE_CHECKING:
    from elasticzero.launcher.agent.config import AgentOptions


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
    seconds: Mapping[str, float] | None = None
    """Where the job's time has gone, by class; None: this agent has not seen all of it."""
    step: int = 0
    total_steps: int | None = None
    loss: float | None = None
    checkpoint_step: int | None = None
    snapshot_step: int | None = None


def agent_status(
    options: AgentOptions, view: View | None, latest: Latest, *, leaving: bool
) -> dict[str, Any]:
    """Returns plain values for `/status`."""
    world = view.world if view is not None else None
    workers = view.workers if view is not None else WorkerGroupState()
    policy = with_operator_overrides(options.policy, latest.control)
    now_s = time.monotonic()
    aside = (
        quarantined(world.strikes, world.strikes, view.struck_s, now_s)
        if world is not None and view is not None
        else {}
    )
    return {
        "job": options.job,
        "node": options.node,
        "reason": latest.reason,
        "generation": world.generation if world is not None else 0,
        "world_size": world.world_size if world is not None else 0,
        "members": [member.node for member in world.members] if world is not None else [],
        "nnodes": [policy.min_nodes, policy.max_nodes],
        "set_aside_s": aside,
        "up_s": now_s - latest.began_s,
        "generation_age_s": latest.rate.generation_age_s(now_s),
        "step_age_s": latest.rate.step_age_s(now_s),
        "steps_per_s": latest.rate.steps_per_s(),
        "goodput": goodput(latest.seconds) if latest.seconds is not None else None,
        "seconds": latest.seconds,
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
    }
