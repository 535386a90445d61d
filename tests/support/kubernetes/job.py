"""Reads what the Job controller needs of a Job's manifest, and checks it as the API server does.

Follows https://kubernetes.io/docs/concepts/workloads/controllers/job/ and
https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/job-v1/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

Manifest = Mapping[str, Any]
FailureAction = Literal["FailJob", "FailIndex", "Ignore", "Count"]
DEFAULT_BACKOFF_LIMIT = 6
"""Failures of a Job's pods that are retried where nothing else is said."""
UNLIMITED = 2**31 - 1
"""The default of `backoffLimit` where `backoffLimitPerIndex` is set."""


class Invalid(ValueError):
    """The API server refuses the manifest or the patch, or this player does not know a field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitCodes:
    """Selects failed containers by their exit codes; 0 never matches."""

    operator: Literal["In", "NotIn"]
    values: frozenset[int]
    container: str | None = None
    """Name of the one container that is looked at; None: any of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRule:
    """One rule of `podFailurePolicy`: exit codes or conditions, and what then happens."""

    action: FailureAction
    exit_codes: ExitCodes | None = None
    conditions: frozenset[tuple[str, str]] = frozenset()
    """(type, status) of conditions, of which the pod has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuccessRule:
    """One rule of `successPolicy`; at least one of the two is given."""

    indexes: frozenset[int] | None = None
    """Indexes that are looked at; None: all."""
    count: int | None = None
    """Number of them that must have succeeded; None: all of `indexes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """An Indexed Job, with the API server's defaults filled in."""

    name: str
    parallelism: int = 1
    completions: int = 1
    suspend: bool = False
    backoff_limit: int = DEFAULT_BACKOFF_LIMIT
    backoff_limit_per_index: int | None = None
    max_failed_indexes: int | None = None
    active_deadline_s: float | None = None
    replaces_terminating: bool = True
    """True: `podReplacementPolicy: TerminatingOrFailed`; False: `Failed`, that is, a pod is
    replaced once it has ended, and not before."""
    failure_rules: tuple[FailureRule, ...] = ()
    success_rules: tuple[SuccessRule, ...] = ()


def job_spec(manifest: Manifest) -> JobSpec:
    """Returns the Job of a manifest; raises `Invalid`."""
    if manifest["kind"] != "Job" or manifest["apiVersion"] != "batch/v1":
        raise Invalid(f"{manifest['apiVersion']} {manifest['kind']}: a batch/v1 Job is expected")
    spec: Manifest = manifest["spec"]
    pod: Manifest = spec["template"]["spec"]
    if spec.get("completionMode") != "Indexed" or "completions" not in spec:
        raise Invalid("only Indexed Jobs with completions are played")
    per_index = spec.get("backoffLimitPerIndex")
    if per_index is not None and pod.get("restartPolicy") != "Never":
        raise Invalid("backoffLimitPerIndex needs restartPolicy: Never")
    if pod.get("restartPolicy") != "Never":
        raise Invalid("only restartPolicy: Never is played")
    names = frozenset(container["name"] for container in pod["containers"])
    rules = tuple(
        _failure_rule(rule, names, has_limit=per_index is not None)
        for rule in spec.get("podFailurePolicy", {}).get("rules", ())
    )
    replacement = spec.get("podReplacementPolicy", "Failed" if rules else "TerminatingOrFailed")
    if rules and replacement != "Failed":
        raise Invalid("podFailurePolicy needs podReplacementPolicy: Failed")
    if replacement not in ("Failed", "TerminatingOrFailed"):
        raise Invalid(f"podReplacementPolicy: {replacement}")
    most_failed = spec.get("maxFailedIndexes")
    if most_failed is not None and per_index is None:
        raise Invalid("maxFailedIndexes needs backoffLimitPerIndex")
    limit = DEFAULT_BACKOFF_LIMIT if per_index is None else UNLIMITED
    completions: int = spec["completions"]
    return JobSpec(
        name=manifest["metadata"]["name"],
        parallelism=spec.get("parallelism", 1),
        completions=completions,
        suspend=spec.get("suspend", False),
        backoff_limit=spec.get("backoffLimit", limit),
        backoff_limit_per_index=per_index,
        max_failed_indexes=most_failed,
        active_deadline_s=spec.get("activeDeadlineSeconds"),
        replaces_terminating=replacement == "TerminatingOrFailed",
        failure_rules=rules,
        success_rules=tuple(
            _success_rule(rule, completions)
            for rule in spec.get("successPolicy", {}).get("rules", ())
        ),
    )


def _failure_rule(rule: Manifest, containers: frozenset[str], *, has_limit: bool) -> FailureRule:
    """The section "Pod failure policy": a rule has either of two requirements."""
    if rule["action"] not in get_args(FailureAction):
        raise Invalid(f"podFailurePolicy: action {rule['action']}")
    if rule["action"] == "FailIndex" and not has_limit:
        raise Invalid("podFailurePolicy: FailIndex needs backoffLimitPerIndex")
    if ("onExitCodes" in rule) == ("onPodConditions" in rule):
        raise Invalid("podFailurePolicy: a rule has either onExitCodes or onPodConditions")
    if "onPodConditions" in rule:
        patterns = rule["onPodConditions"]
        conditions = frozenset(
            (pattern["type"], pattern.get("status", "True")) for pattern in patterns
        )
        return FailureRule(action=rule["action"], conditions=conditions)
    codes = rule["onExitCodes"]
    values, name = frozenset(codes["values"]), codes.get("containerName")
    if not values or (codes["operator"] == "In" and 0 in values):
        raise Invalid("podFailurePolicy: values must not be empty, nor hold 0 with the operator In")
    if codes["operator"] not in ("In", "NotIn"):
        raise Invalid(f"podFailurePolicy: operator {codes['operator']}")
    if name is not None and name not in containers:
        raise Invalid(f"podFailurePolicy: the pod has no container {name}")
    exit_codes = ExitCodes(operator=codes["operator"], values=values, container=name)
    return FailureRule(action=rule["action"], exit_codes=exit_codes)


def _success_rule(rule: Manifest, completions: int) -> SuccessRule:
    """The section "Success policy"."""
    indexes, count = rule.get("succeededIndexes"), rule.get("succeededCount")
    if indexes is None and count is None:
        raise Invalid("successPolicy: a rule has succeededIndexes, succeededCount or both")
    chosen = None if indexes is None else intervals(indexes)
    if chosen is not None and max(chosen) >= completions:
        raise Invalid(f"successPolicy: succeededIndexes {indexes} exceed the completions")
    most = completions if chosen is None else len(chosen)
    if count is not None and not 0 < count <= most:
        raise Invalid(f"successPolicy: succeededCount {count} must be from 1 to {most}")
    return SuccessRule(indexes=chosen, count=count)


def intervals(text: str) -> frozenset[int]:
    """Returns the indexes of a text such as `0,2-3`, as in `succeededIndexes`."""
    indexes: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        indexes |= set(range(int(first), int(last or first) + 1))
    return frozenset(indexes)


def patched(
    spec: JobSpec,
    *,
    parallelism: int | None = None,
    completions: int | None = None,
    suspend: bool | None = None,
) -> JobSpec:
    """Returns the Job after a patch; raises `Invalid`.

    The section "Elastic Indexed Jobs": completions change together with parallelism, so that both
    are equal.
    """
    new = replace(
        spec,
        parallelism=spec.parallelism if parallelism is None else parallelism,
        completions=spec.completions if completions is None else completions,
        suspend=spec.suspend if suspend is None else suspend,
    )
    if new.completions != spec.completions and new.completions != new.parallelism:
        raise Invalid(
            "completions can be changed only together with parallelism, to the same number"
        )
    return new
