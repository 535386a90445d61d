"""Holds what the user allows, the protocol's times, and how operators override them.

Pure values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from elasticzero.launcher.protocol.documents import (
    Control,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPolicy:
    """What the user allows, and the protocol's times in seconds."""

    min_nodes: int
    max_nodes: int
    spares: int | None = None
    """Nodes beyond `max_nodes` that may wait; None: all that come."""
    strategy: str = "ddp"
    max_restarts: int = 3
    """Failures in a row without progress after which the job is given up."""
    join_timeout_s: float = 600.0
    """MIN nodes that have not come together by then are given up."""
    settle_s: float = 3.0
    """The first world waits so long after the last node that came, if there is room for more."""
    grow_settle_s: float = 0.5
    alive_s: float = 0.5
    """Who has not answered an alarm by then is presumed gone."""
    stop_s: float = 15.0
    """A worker that has not left its loop by then is killed."""
    save_s: float = 120.0
    """A worker that has not written its snapshot by then is killed."""
    save_timeout_s: float = 600.0
    """Before a job ends, saves of the newest state are tried again for so long."""
    lease_ttl_s: float = 5.0
    leave_margin_s: float = 5.0
    """So long before its deadline a leaving node waits for no boundary any more."""
    strict_checkpoint: bool = False
    """A damaged checkpoint ends the job; else the newest good one is used."""
    hang_timeout_s: float | None = None
    """A worker that makes no step for so long counts as hung; 0: never; None: as long as follows
    from the steps before."""
    handover_s: float = 60.0
    """A leaving node serves its snapshots at most so long."""


def with_operator_overrides(policy: JobPolicy, control: Control) -> JobPolicy:
    """The policy as operators have changed it."""
    if control.nnodes is None:
        return policy
    least, most = control.nnodes
    return replace(policy, min_nodes=least, max_nodes=most)
