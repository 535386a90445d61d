"""Holds what the user allows, the protocol's times, and how operators override them.

Pure values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from elasticzero.launcher.protocol.documents import (
    Control,
)
from elasticzero.spans import ShardOver


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPolicy:
    """Holds what the user allows, and the protocol's times in seconds."""

    min_nodes: int
    max_nodes: int
    spares: int | None = None
    """Maximum number of nodes that may wait beyond `max_nodes`; None: no limit."""
    strategy: str = "ddp"
    shard: ShardOver = "world"
    redundancy: str = "snapshot"
    """Source of a lost node's part of the state: a name of `REDUNDANCIES`."""
    max_restarts: int = 3
    """Number of failures in a row without progress after which the job has failed."""
    join_timeout_s: float = 600.0
    """Maximum seconds that MIN nodes may take to come together."""
    settle_s: float = 3.0
    """Seconds that the first world waits after the last node that came, if there is room for
    more."""
    grow_settle_s: float = 0.5
    alive_s: float = 0.5
    """Seconds after an alarm after which a node that has not answered is presumed gone."""
    stop_s: float = 15.0
    """Seconds after which a worker that has not left its loop is killed."""
    save_s: float = 120.0
    """Seconds after which a worker that has not written its snapshot is killed."""
    save_timeout_s: float = 600.0
    """Seconds for which saves of the newest state are retried before a job ends."""
    lease_ttl_s: float = 5.0
    leave_margin_s: float = 5.0
    """Seconds before its deadline from which a leaving node waits for no boundary."""
    strict_checkpoint: bool = False
    """True: a damaged checkpoint ends the job. False: the newest good one is used."""
    hang_timeout_s: float | None = None
    """Seconds without a step after which a worker counts as hung; 0: never; None: the time follows
    from the last steps, and is `SUSPENDED_S` for a suspended one."""
    handover_s: float = 60.0
    """Maximum seconds for which a leaving node serves its snapshots."""
    changes_inside: Literal["auto", "on", "off"] = "auto"
    """auto: a planned change may happen inside the loops of workers that use gloo; on: also of
    those that use NCCL; off: it stops all loops."""


def with_operator_overrides(policy: JobPolicy, control: Control) -> JobPolicy:
    """Returns the policy as operators have changed it."""
    if control.nnodes is None:
        return policy
    least, most = control.nnodes
    return replace(policy, min_nodes=least, max_nodes=most)
