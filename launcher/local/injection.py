"""Injects the faults of `elasticzero local` into its cluster, when `faults` says that they are
due."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from elasticzero.launcher.local.cluster import Cluster, Node
from elasticzero.launcher.local.faults import Fault, FaultPlan, Progress
from elasticzero.launcher.observability.console import ClusterConsole


def inject(cluster: Cluster, fault: Fault, training: Sequence[str]) -> tuple[str, float] | None:
    """Injects a fault.

    Args:
        cluster: The nodes.
        fault: The kind of fault, and the node if it names one.
        training: Nodes that train now.

    Returns:
        The name of the node that it hit, and the wall-clock time. None: no such node trains at this
        moment.
    """
    if fault.kind == "join":
        return cluster.start_node().name, time.time()
    ours = [cluster.nodes[name] for name in training if name in cluster.nodes]
    living = [node for node in ours if cluster.workers_of(node)]
    chosen = [node for node in living if fault.node in (None, node.name)]
    if not chosen:
        return None
    node = chosen[-1]
    struck_s = time.time()
    if fault.kind == "kill-node":
        cluster.kill_node(node)
    elif fault.kind == "kill-worker":
        cluster.kill_worker(node)
    else:
        cluster.drain(node)
    return node.name, struck_s


class FaultInjector:
    """Injects the faults of one cluster when they are due, and lets the workers that wait for them
    go on."""

    def __init__(self, cluster: Cluster, faults: Iterable[Fault], lines: ClusterConsole) -> None:
        """Begins before any agent has said anything.

        Args:
            cluster: The nodes.
            faults: The faults.
            lines: Prints what happens, and knows how far the job has come.
        """
        self._cluster = cluster
        self._plan = FaultPlan(faults)
        self._lines = lines
        self._trained_from_s: float | None = None
        """Time at which the first workers were started, by the monotonic clock; None: they were
        not."""

    @property
    def left(self) -> list[Fault]:
        """Returns the faults that were not injected."""
        return self._plan.left

    def take(self, node: Node, message: Mapping[str, Any]) -> None:
        """Takes note of a rank that waits, or lets it go on where no fault is to come.

        Args:
            node: The node of the rank.
            message: What its agent has sent.
        """
        if "waits" in message and not self._plan.must_wait(
            (message["generation"], node.name), message
        ):
            self._cluster.send([node], struck=message["waits"])

    def turn(self, now_s: float) -> None:
        """Injects what is due, and lets the workers go on that have waited for it.

        Args:
            now_s: The time, by the monotonic clock.
        """
        plan, lines = self._plan, self._lines
        if self._trained_from_s is None and lines.training:
            self._trained_from_s = now_s
        began_s = self._trained_from_s
        ours = [name for name in lines.training if name in self._cluster.nodes]
        waits_at = plan.waits_at(lines.generation, ours)
        if waits_at is not None:
            lines.reached(waits_at)
        if plan.next_at_step is not None and lines.plain:
            lines.report_waiting_fault(plan.next_at_step.text)
        trained_s = None if began_s is None else now_s - began_s
        plan.strike(Progress(step=lines.step, waits_at=waits_at, trained_s=trained_s), self._inject)
        if waits_at is not None:
            plan.release(waits_at)
            self._cluster.send(self._cluster.running(), struck=waits_at)

    def _inject(self, fault: Fault) -> bool:
        struck = inject(self._cluster, fault, self._lines.training)
        if struck is not None:
            self._lines.report_fault(fault.kind, *struck)
        return struck is not None
