"""Decides what the Job controller does next with an Indexed Job and its pods.

Pure. Follows https://kubernetes.io/docs/concepts/workloads/controllers/job/, where that page is
silent the controller of Kubernetes 1.34 itself. Rules:
 J1  Each pod's end counts once. A pod that succeeds completes its index. A pod that fails counts by
     the first rule of podFailurePolicy that it matches: FailJob, FailIndex, Ignore, or Count, which
     is the default too.
 J2  An index fails with more counted failures than backoffLimitPerIndex, or by FailIndex. It gets
     no further pod.
 J3  The Job is to fail: by FailJob; by more counted failures than backoffLimit; past
     activeDeadlineSeconds; by more failed indexes than maxFailedIndexes; or once every index has
     completed or failed, and one has failed.
 J4  The Job is to succeed once it meets a rule of successPolicy, or every index is completed. Of
     J3 and successPolicy, J3 comes first.
 J5  A Job that is to end has its active pods deleted, gets no pod, and no longer changes its mind.
     It is Complete or Failed once no pod is left that may run.
 J6  While the Job is suspended, its active pods are deleted, and their ends do not count.
 J7  Pods of indexes beyond completions, and more than one pod of an index, are deleted, and their
     ends do not count; then those least advanced, until no more than parallelism are active, nor
     more than indexes that are not completed. A turn that deletes creates nothing.
 J8  Otherwise pods are created for the lowest indexes without one. With podReplacementPolicy Failed
     a terminating pod keeps its index and its part of parallelism.
 J9  A pod's replacement waits 10 s after a failure of its index, twice as long after each further
     one, 10 min at most. Failures that are ignored count here too. Without backoffLimitPerIndex the
     failures of all indexes since the last success count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from tests.support.kubernetes.job import JobSpec
from tests.support.kubernetes.policies import PodState, is_failed, matching_rule, meets_success


@dataclass(frozen=True, slots=True)
class CreatePod:
    """Creates a pod with this index."""

    index: int


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Deletes a pod, with its grace period."""

    uid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """The delays of J9, in seconds."""

    first_s: float = 10.0
    most_s: float = 600.0

    def delay_s(self, failures: int) -> float:
        """Returns how long a replacement waits after so many failures in a row."""
        return min(self.first_s * 2.0 ** min(failures - 1, 32), self.most_s) if failures else 0.0


DEFAULT_BACKOFF = Backoff()


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Failures of the pods of one index."""

    counted: int = 0
    ignored: int = 0
    last_s: float = 0.0

    @property
    def absolute(self) -> int:
        return self.counted + self.ignored


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A condition of the Job that decides its end; the first two announce the other two."""

    condition: Literal["FailureTarget", "SuccessCriteriaMet", "Failed", "Complete"]
    reason: str = ""
    message: str = ""

    @property
    def is_final(self) -> bool:
        return self.condition in ("Failed", "Complete")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """What the Job controller has written down of a Job."""

    start_s: float | None = None
    completed: frozenset[int] = frozenset()
    failed_indexes: frozenset[int] = frozenset()
    failed: int = 0
    """Number of pods whose failure counted."""
    failures: Mapping[int, Failures] = field(default_factory=dict)
    """By index, since its last success."""
    streak: Failures = Failures()
    """Failures of all indexes since the last success."""
    settled: frozenset[str] = frozenset()
    """Pods whose end has been counted, or never is: those without the tracking finalizer."""
    suspended: bool = False
    outcome: Outcome | None = None

    @property
    def is_finished(self) -> bool:
        return self.outcome is not None and self.outcome.is_final


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The new status, the actions, and when a pod that has to wait may be created (J9)."""

    status: JobStatus
    actions: tuple[CreatePod | DeletePod, ...] = ()
    again_s: float | None = None


def decide(
    spec: JobSpec,
    status: JobStatus,
    pods: Sequence[PodState],
    now_s: float,
    backoff: Backoff = DEFAULT_BACKOFF,
) -> Decision:
    """Maps a Job, its status, its pods and the time to the controller's next actions."""
    if status.is_finished:
        return Decision(status=status)
    if spec.suspend:
        status = replace(status, start_s=None)
    elif status.start_s is None:
        status = replace(status, start_s=now_s)
    status = _count(spec, status, pods)
    outcome = status.outcome or _outcome(spec, status, pods, now_s)
    if outcome is not None:
        return _end(replace(status, outcome=outcome), pods)
    return _manage(replace(status, suspended=spec.suspend), spec, pods, now_s, backoff)


def _count(spec: JobSpec, status: JobStatus, pods: Sequence[PodState]) -> JobStatus:
    """Applies J1 and J2 to the pods whose end is not settled yet."""
    valid = range(spec.completions)
    completed = {index for index in status.completed if index in valid}
    failed_indexes = {index for index in status.failed_indexes if index in valid}
    failures = {index: count for index, count in status.failures.items() if index in valid}
    settled = set(status.settled)
    failed, streak = status.failed, status.streak
    limit = spec.backoff_limit_per_index
    for pod in sorted(pods, key=lambda pod: pod.finished_s):
        if pod.uid in settled or not (pod.phase == "Succeeded" or is_failed(spec, pod)):
            continue
        settled.add(pod.uid)
        if pod.index not in valid:
            continue
        if pod.phase == "Succeeded":
            completed.add(pod.index)
            failures.pop(pod.index, None)
            streak = Failures()
            continue
        rule = matching_rule(spec.failure_rules, pod)
        ignored = rule is not None and rule.action == "Ignore"
        before = failures.get(pod.index, Failures())
        failures[pod.index], streak = (
            Failures(
                counted=count.counted + (not ignored),
                ignored=count.ignored + ignored,
                last_s=pod.finished_s,
            )
            for count in (before, streak)
        )
        failed += not ignored
        fails_index = rule is not None and rule.action == "FailIndex"
        if fails_index or (limit is not None and failures[pod.index].counted > limit):
            failed_indexes.add(pod.index)
    return replace(
        status,
        completed=frozenset(completed),
        failed_indexes=frozenset(failed_indexes),
        failed=failed,
        failures=failures,
        streak=streak,
        settled=frozenset(settled),
    )


def _outcome(
    spec: JobSpec, status: JobStatus, pods: Sequence[PodState], now_s: float
) -> Outcome | None:
    """Applies J3 and J4; None: the Job goes on."""
    for pod in pods:
        rule = matching_rule(spec.failure_rules, pod) if is_failed(spec, pod) else None
        if rule is not None and rule.action == "FailJob":
            position = spec.failure_rules.index(rule)
            codes = ", ".join(f"{name}: exit code {code}" for name, code in pod.exit_codes)
            text = f"pod {pod.uid} of index {pod.index} ({codes}) matches FailJob, rule {position}"
            return Outcome(condition="FailureTarget", reason="PodFailurePolicy", message=text)
    reason = ""
    ended = len(status.failed_indexes) + len(status.completed)
    if status.failed > spec.backoff_limit:
        reason = "BackoffLimitExceeded"
    elif _is_late(spec, status, now_s):
        reason = "DeadlineExceeded"
    elif (most := spec.max_failed_indexes) is not None and len(status.failed_indexes) > most:
        reason = "MaxFailedIndexesExceeded"
    elif status.failed_indexes and ended >= spec.completions:
        reason = "FailedIndexes"
    if reason:
        return Outcome(condition="FailureTarget", reason=reason)
    if (met := meets_success(spec.success_rules, status.completed)) is not None:
        text = f"matches rule {met}"
        return Outcome(condition="SuccessCriteriaMet", reason="SuccessPolicy", message=text)
    if len(status.completed) >= spec.completions:
        return Outcome(condition="SuccessCriteriaMet", reason="CompletionsReached")
    return None


def _is_late(spec: JobSpec, status: JobStatus, now_s: float) -> bool:
    if spec.active_deadline_s is None or status.start_s is None:
        return False
    return now_s - status.start_s >= spec.active_deadline_s


def _end(status: JobStatus, pods: Sequence[PodState]) -> Decision:
    """Applies J5."""
    assert status.outcome is not None
    if not any(pod.is_live for pod in pods):
        final: Literal["Failed", "Complete"] = (
            "Failed" if status.outcome.condition == "FailureTarget" else "Complete"
        )
        return Decision(status=replace(status, outcome=replace(status.outcome, condition=final)))
    doomed = tuple(DeletePod(pod.uid) for pod in pods if pod.is_active)
    return Decision(status=status, actions=doomed)


def _manage(
    status: JobStatus, spec: JobSpec, pods: Sequence[PodState], now_s: float, backoff: Backoff
) -> Decision:
    """Applies J6 to J9."""
    active = [pod for pod in pods if pod.is_active]
    if spec.suspend:
        return _without(status, active)
    target = max(0, min(spec.completions - len(status.completed), spec.parallelism))
    if surplus := _surplus(spec, active, len(active) - target):
        return _without(status, surplus)
    held = [] if spec.replaces_terminating else [pod for pod in pods if pod.is_terminating]
    taken = {pod.index for pod in (*active, *held)} | status.completed | status.failed_indexes
    free = [index for index in range(spec.completions) if index not in taken]
    chosen = free[: max(0, target - len(active) - len(held))]
    waits = {index: _wait_s(status, spec, index, now_s, backoff) for index in chosen}
    actions = tuple(CreatePod(index) for index, wait_s in waits.items() if wait_s <= 0)
    later = [wait_s for wait_s in waits.values() if wait_s > 0]
    return Decision(status=status, actions=actions, again_s=min(later) if later else None)


def _without(status: JobStatus, doomed: Sequence[PodState]) -> Decision:
    """Returns the deletion of pods whose ends do not count."""
    settled = status.settled | {pod.uid for pod in doomed}
    actions = tuple(DeletePod(pod.uid) for pod in doomed)
    return Decision(status=replace(status, settled=settled), actions=actions)


def _surplus(spec: JobSpec, active: Sequence[PodState], at_least: int) -> list[PodState]:
    """Applies J7: a pod is less advanced if it is pending, not ready, or newer."""
    advanced = sorted(active, key=lambda pod: (pod.phase != "Pending", pod.ready, -pod.created_s))
    most_advanced = {pod.index: pod.uid for pod in advanced}
    wrong = [
        pod
        for pod in advanced
        if pod.index >= spec.completions or most_advanced[pod.index] != pod.uid
    ]
    others = [pod for pod in advanced if pod not in wrong]
    return [*wrong, *others[: max(0, at_least - len(wrong))]]


def _wait_s(status: JobStatus, spec: JobSpec, index: int, now_s: float, backoff: Backoff) -> float:
    """Returns how long the next pod of an index has to wait (J9)."""
    one = status.failures.get(index, Failures())
    which = status.streak if spec.backoff_limit_per_index is None else one
    if not which.absolute:
        return 0.0
    return which.last_s + backoff.delay_s(which.absolute) - now_s
