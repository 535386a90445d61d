"""Decides what the end of one pod means for its Job, and whether enough indexes have succeeded.

Pure. Follows the sections "Pod failure policy", "Backoff limit per index" and "Success policy" of
https://kubernetes.io/docs/concepts/workloads/controllers/job/, and for the order of the rules
https://kubernetes.io/docs/tasks/job/pod-failure-policy/.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Literal

from tests.support.kubernetes.job import ExitCodes, FailureRule, JobSpec, SuccessRule

Phase = Literal["Pending", "Running", "Succeeded", "Failed"]
DISRUPTED = ("DisruptionTarget", "True")
"""The condition of a pod that is terminated by a disruption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodState:
    """What the API server holds of a pod."""

    uid: str
    index: int
    phase: Phase = "Pending"
    ready: bool = False
    deleting: bool = False
    """True: it has a `deletionTimestamp`."""
    exit_codes: tuple[tuple[str, int], ...] = ()
    """(container, exit code) of the containers that have ended, as the kubelet reported them."""
    conditions: frozenset[tuple[str, str]] = frozenset()
    created_s: float = 0.0
    finished_s: float = 0.0

    @property
    def is_live(self) -> bool:
        """Returns whether its containers may run."""
        return self.phase in ("Pending", "Running")

    @property
    def is_active(self) -> bool:
        return self.is_live and not self.deleting

    @property
    def is_terminating(self) -> bool:
        return self.is_live and self.deleting


def is_failed(spec: JobSpec, pod: PodState) -> bool:
    """Returns whether the Job controller counts a pod as failed.

    With `podReplacementPolicy: Failed` it waits for the phase; otherwise a deletion is enough.
    """
    if pod.phase == "Failed":
        return True
    return spec.replaces_terminating and pod.is_terminating


def matching_rule(rules: Iterable[FailureRule], pod: PodState) -> FailureRule | None:
    """Returns the first rule that a failed pod matches; the rules after it do not count."""
    for rule in rules:
        if rule.exit_codes is not None:
            if any(_selects(rule.exit_codes, name, code) for name, code in pod.exit_codes):
                return rule
        elif rule.conditions & pod.conditions:
            return rule
    return None


def _selects(codes: ExitCodes, container: str, code: int) -> bool:
    if code == 0 or codes.container not in (None, container):
        return False
    return (code in codes.values) == (codes.operator == "In")


def meets_success(rules: Iterable[SuccessRule], completed: Set[int]) -> int | None:
    """Returns the position of the first rule of `successPolicy` that is met; None: none is."""
    for position, rule in enumerate(rules):
        counted = completed if rule.indexes is None else completed & rule.indexes
        needed = rule.count
        if needed is None:
            assert rule.indexes is not None
            needed = len(rule.indexes)
        if counted and len(counted) >= needed:
            return position
    return None
