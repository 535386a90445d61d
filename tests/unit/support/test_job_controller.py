"""The Job controller that plays for tests decides as the documentation of Kubernetes says."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.kubernetes.controller import (
    Backoff,
    CreatePod,
    Decision,
    DeletePod,
    JobStatus,
    Outcome,
    decide,
)
from tests.support.kubernetes.job import (
    ExitCodes,
    FailureAction,
    FailureRule,
    Invalid,
    JobSpec,
    SuccessRule,
    intervals,
    job_spec,
    patched,
)
from tests.support.kubernetes.policies import DISRUPTED, Phase, PodState

IGNORE_DISRUPTIONS = FailureRule(action="Ignore", conditions=frozenset({DISRUPTED}))
AT_ONCE = Backoff(first_s=0.0)


def on_codes(action: FailureAction, *codes: int, **fields: Any) -> FailureRule:
    chosen = ExitCodes(**{"operator": "In", "values": frozenset(codes), **fields})
    return FailureRule(action=action, exit_codes=chosen)


def spec(parallelism: int = 3, completions: int | None = None, **fields: Any) -> JobSpec:
    """An Indexed Job as ours: a pod is replaced once it has failed."""
    defaults = {"replaces_terminating": False, "backoff_limit_per_index": 1000}
    return JobSpec(
        name="train",
        parallelism=parallelism,
        completions=parallelism if completions is None else completions,
        **{**defaults, **fields},
    )


def pod(
    uid: str, index: int, phase: Phase = "Running", code: int | None = None, **fields: Any
) -> PodState:
    codes = () if code is None else (("agent", code),)
    return PodState(uid=uid, index=index, phase=phase, exit_codes=codes, **fields)


def running(*indexes: int) -> list[PodState]:
    return [pod(f"uid-{index}", index, ready=True) for index in indexes]


def after(job: JobSpec, pods: Sequence[PodState], **fields: Any) -> Decision:
    """What the controller decides of pods that it has not seen before, with no delay."""
    return decide(job, JobStatus(**fields), pods, 0.0, AT_ONCE)


def created(decision: Decision) -> list[int]:
    return [action.index for action in decision.actions if isinstance(action, CreatePod)]


def deleted(decision: Decision) -> list[str]:
    return [action.uid for action in decision.actions if isinstance(action, DeletePod)]


def condition(decision: Decision) -> tuple[str, str]:
    outcome = decision.status.outcome
    return ("", "") if outcome is None else (outcome.condition, outcome.reason)


def test_a_pod_is_created_for_each_index_up_to_parallelism() -> None:
    assert created(after(spec(3), [])) == [0, 1, 2]
    assert created(after(spec(2, completions=5), [])) == [0, 1]
    assert created(after(spec(2, completions=5), running(0))) == [1]
    assert created(after(spec(0), [])) == []


def test_no_more_pods_run_than_indexes_are_left() -> None:
    done = frozenset({0, 1, 2})
    assert created(after(spec(3, completions=4), [], completed=done)) == [3]


def test_a_failed_pod_is_replaced_in_its_index() -> None:
    decision = after(spec(3), [*running(0, 2), pod("a", 1, "Failed", 75)])
    assert created(decision) == [1]
    assert decision.status.failed == 1
    assert decision.status.failures[1].counted == 1


def test_a_failure_counts_once() -> None:
    pods = [*running(0, 2), pod("a", 1, "Failed", 75)]
    first = after(spec(3), pods)
    again = decide(spec(3), first.status, pods, 0.0, AT_ONCE)
    assert again.status == first.status


def test_a_terminating_pod_is_replaced_once_it_has_failed() -> None:
    """The section "Delayed creation of replacement pods": with `Failed`."""
    leaving = pod("a", 1, deleting=True)
    assert created(after(spec(3), [*running(0, 2), leaving])) == []
    gone = replace(leaving, phase="Failed", exit_codes=(("agent", 75),))
    assert created(after(spec(3), [*running(0, 2), gone])) == [1]


def test_a_terminating_pod_is_replaced_at_once_by_default() -> None:
    leaving = pod("a", 1, deleting=True)
    job = spec(3, replaces_terminating=True)
    assert created(after(job, [*running(0, 2), leaving])) == [1]


def test_rules_of_pod_failures_are_tried_in_order() -> None:
    rules = (on_codes("FailJob", 64, 70), IGNORE_DISRUPTIONS)
    job = spec(3, failure_rules=rules)
    disrupted = {"conditions": frozenset({DISRUPTED})}
    first = after(job, [*running(0, 2), pod("a", 1, "Failed", 70, **disrupted)])
    assert condition(first) == ("FailureTarget", "PodFailurePolicy")
    assert sorted(deleted(first)) == ["uid-0", "uid-2"]
    assert created(first) == []
    second = after(job, [*running(0, 2), pod("a", 1, "Failed", 75, **disrupted)])
    assert created(second) == [1]
    assert second.status.failed == 0
    assert second.status.failures[1].ignored == 1
    other = after(replace(job, failure_rules=rules[::-1]), [pod("a", 1, "Failed", 70, **disrupted)])
    assert condition(other) == ("", "")


def test_an_exit_code_that_no_rule_names_is_counted() -> None:
    job = spec(1, failure_rules=(on_codes("FailJob", 64, 70), IGNORE_DISRUPTIONS))
    assert after(job, [pod("a", 0, "Failed", 75)]).status.failures[0].counted == 1


@pytest.mark.parametrize(
    ("rule", "code", "fails"),
    [
        (on_codes("FailJob", 64, container="agent"), 64, True),
        (on_codes("FailJob", 64, container="sidecar"), 64, False),
        (on_codes("FailJob", 75, operator="NotIn"), 64, True),
        (on_codes("FailJob", 75, operator="NotIn"), 75, False),
    ],
    ids=["its container", "another container", "not in", "in"],
)
def test_exit_codes(rule: FailureRule, code: int, fails: bool) -> None:
    decision = after(spec(1, failure_rules=(rule,)), [pod("a", 0, "Failed", code)])
    assert (condition(decision)[1] == "PodFailurePolicy") == fails


def test_a_pod_without_exit_codes_matches_by_its_condition() -> None:
    """Its node is gone, and no kubelet has told how its container ended."""
    rules = (on_codes("FailJob", 75, operator="NotIn"), IGNORE_DISRUPTIONS)
    lost = pod("a", 0, "Failed", conditions=frozenset({DISRUPTED}))
    decision = after(spec(1, failure_rules=rules), [lost])
    assert created(decision) == [0]
    assert decision.status.failed == 0


def test_a_condition_that_is_false_does_not_match() -> None:
    other = frozenset({("DisruptionTarget", "False")})
    decision = after(
        spec(1, failure_rules=(IGNORE_DISRUPTIONS,)), [pod("a", 0, "Failed", 75, conditions=other)]
    )
    assert decision.status.failed == 1


def test_an_index_fails_past_its_limit_and_the_job_at_its_end() -> None:
    """The section "Backoff limit per index": the other indexes go on until all have ended."""
    job = spec(2, backoff_limit_per_index=1)
    failures = [pod("a", 0, "Failed", 1), pod("b", 0, "Failed", 1)]
    once = after(job, [failures[0], *running(1)])
    assert created(once) == [0]
    twice = decide(job, once.status, [*failures, *running(1)], 0.0, AT_ONCE)
    assert twice.status.failed_indexes == {0}
    assert (created(twice), condition(twice)) == ([], ("", ""))
    end = decide(job, twice.status, [*failures, pod("uid-1", 1, "Succeeded", 0)], 0.0, AT_ONCE)
    assert condition(end) == ("Failed", "FailedIndexes")


def test_too_many_failed_indexes_end_the_job() -> None:
    job = spec(3, backoff_limit_per_index=0, max_failed_indexes=0)
    decision = after(job, [pod("a", 0, "Failed", 1), *running(1, 2)])
    assert condition(decision) == ("FailureTarget", "MaxFailedIndexesExceeded")
    assert deleted(decision) == ["uid-1", "uid-2"]


def test_fail_index_fails_an_index_without_another_try() -> None:
    decision = after(
        spec(2, failure_rules=(on_codes("FailIndex", 42),)),
        [pod("a", 0, "Failed", 42), *running(1)],
    )
    assert decision.status.failed_indexes == {0}
    assert created(decision) == []


def test_without_a_limit_per_index_failures_of_all_count_together() -> None:
    job = spec(2, backoff_limit_per_index=None, backoff_limit=1)
    first = after(job, [pod("a", 0, "Failed", 1), *running(1)])
    assert created(first) == [0]
    second = decide(job, first.status, [pod("b", 1, "Failed", 1), *running(0)], 0.0, AT_ONCE)
    assert condition(second) == ("FailureTarget", "BackoffLimitExceeded")


def test_a_success_policy_ends_the_job_and_its_other_pods() -> None:
    """The section "Success policy": first the criteria are met, then no pod is left."""
    job = spec(3, success_rules=(SuccessRule(count=1),))
    met = after(job, [pod("a", 0, "Succeeded", 0), *running(1, 2)])
    assert condition(met) == ("SuccessCriteriaMet", "SuccessPolicy")
    assert deleted(met) == ["uid-1", "uid-2"]
    leaving = [replace(pod_state, deleting=True) for pod_state in running(1, 2)]
    waits = decide(job, met.status, leaving, 0.0, AT_ONCE)
    assert (waits.actions, condition(waits)[0]) == ((), "SuccessCriteriaMet")
    ended = [
        replace(pod_state, phase="Failed", exit_codes=(("agent", 70),)) for pod_state in leaving
    ]
    assert condition(decide(job, waits.status, ended, 0.0, AT_ONCE))[0] == "Complete"


def test_a_failure_seen_with_a_success_comes_first() -> None:
    """ "Once the Job meets either policy, the job controller respects the terminating policy"."""
    job = spec(2, success_rules=(SuccessRule(count=1),), failure_rules=(on_codes("FailJob", 64),))
    decision = after(job, [pod("a", 0, "Succeeded", 0), pod("b", 1, "Failed", 64)])
    assert condition(decision) == ("Failed", "PodFailurePolicy")


@pytest.mark.parametrize(
    ("rule", "completed", "met"),
    [
        (SuccessRule(count=2), {0}, False),
        (SuccessRule(count=2), {0, 4}, True),
        (SuccessRule(indexes=intervals("0,2-3")), {0, 2}, False),
        (SuccessRule(indexes=intervals("0,2-3")), {0, 2, 3}, True),
        (SuccessRule(indexes=intervals("0,2-3"), count=1), {1}, False),
        (SuccessRule(indexes=intervals("0,2-3"), count=1), {3}, True),
    ],
)
def test_success_rules(rule: SuccessRule, completed: set[int], met: bool) -> None:
    decision = after(spec(5, success_rules=(rule,)), [], completed=frozenset(completed))
    assert (condition(decision)[1] == "SuccessPolicy") == met


def test_without_a_success_policy_each_index_must_succeed() -> None:
    ended = [pod(f"uid-{index}", index, "Succeeded", 0) for index in range(3)]
    assert condition(after(spec(3), ended[:2])) == ("", "")
    assert condition(after(spec(3), ended)) == ("Complete", "CompletionsReached")


def test_a_finished_job_does_nothing_more() -> None:
    done = Outcome(condition="Complete")
    decision = after(spec(3), [pod("a", 0, "Failed", 64)], outcome=done)
    assert (decision.actions, decision.status.outcome) == ((), done)


def test_a_smaller_job_loses_its_highest_indexes() -> None:
    """The section "Elastic Indexed Jobs"; such an end is no failure."""
    small = patched(spec(3), parallelism=2, completions=2)
    decision = after(small, running(0, 1, 2))
    assert deleted(decision) == ["uid-2"]
    gone = pod("uid-2", 2, "Failed", 75, deleting=True)
    later = decide(small, decision.status, [*running(0, 1), gone], 0.0, AT_ONCE)
    assert (later.actions, later.status.failed) == ((), 0)
    assert created(decide(spec(3), later.status, [*running(0, 1), gone], 0.0, AT_ONCE)) == [2]


def test_fewer_at_a_time_lose_the_least_advanced() -> None:
    job = patched(spec(3), parallelism=1)
    pods = [
        pod("old", 0, ready=True, created_s=1.0),
        pod("new", 1, ready=True, created_s=2.0),
        pod("pending", 2, "Pending"),
    ]
    assert deleted(after(job, pods)) == ["pending", "new"]


def test_completions_change_with_parallelism_only() -> None:
    with pytest.raises(Invalid, match="together with parallelism"):
        patched(spec(3), completions=2)
    assert patched(spec(3), parallelism=2).completions == 3


def test_a_suspended_job_has_no_pods_and_their_ends_do_not_count() -> None:
    """The section "Suspending a Job"."""
    job = patched(spec(2), suspend=True)
    decision = after(job, running(0, 1))
    assert deleted(decision) == ["uid-0", "uid-1"]
    assert decision.status.suspended
    ended = [pod("uid-0", 0, "Succeeded", 0), pod("uid-1", 1, "Failed", 75)]
    later = decide(job, decision.status, ended, 0.0, AT_ONCE)
    assert (later.actions, later.status.completed, later.status.failed) == ((), frozenset(), 0)
    assert created(decide(spec(2), later.status, ended, 0.0, AT_ONCE)) == [0, 1]


def test_a_deadline_counts_from_the_start_or_the_resumption() -> None:
    job = spec(1, active_deadline_s=10.0)
    fresh = decide(job, JobStatus(), [], 100.0).status
    assert condition(decide(job, fresh, running(0), 109.0)) == ("", "")
    assert condition(decide(job, fresh, running(0), 110.0)) == ("FailureTarget", "DeadlineExceeded")
    paused = decide(patched(job, suspend=True), fresh, [], 105.0).status
    resumed = decide(job, paused, [], 200.0).status
    assert condition(decide(job, resumed, running(0), 209.0)) == ("", "")


def test_replacements_wait_twice_as_long_after_each_failure() -> None:
    """10 s, 20 s, 40 s and so on; failures that are ignored wait as well."""
    delays = [Backoff().delay_s(failures) for failures in range(9)]
    assert delays == [0, 10, 20, 40, 80, 160, 320, 600, 600]
    job = spec(2, failure_rules=(IGNORE_DISRUPTIONS,))
    ends = [
        pod("a", 0, "Failed", 75, finished_s=100.0, conditions=frozenset({DISRUPTED})),
        pod("b", 0, "Failed", 75, finished_s=200.0),
    ]
    first = decide(job, JobStatus(), [ends[0], *running(1)], 105.0)
    assert (created(first), first.again_s) == ([], 5.0)
    assert created(decide(job, first.status, [ends[0], *running(1)], 110.0)) == [0]
    second = decide(job, first.status, [*ends, *running(1)], 205.0)
    assert (created(second), second.again_s) == ([], 15.0)


def manifest(**spec_fields: Any) -> dict[str, Any]:
    container = {"name": "agent", "image": "elasticzero"}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "train"},
        "spec": {
            "completionMode": "Indexed",
            "completions": 3,
            "template": {"spec": {"restartPolicy": "Never", "containers": [container]}},
            **spec_fields,
        },
    }


def policy(**rule: Any) -> dict[str, Any]:
    return {"podFailurePolicy": {"rules": [rule]}}


REFUSED: list[tuple[str, dict[str, Any]]] = [
    (
        "no container",
        policy(
            action="FailJob", onExitCodes={"operator": "In", "values": [1], "containerName": "x"}
        ),
    ),
    ("must not be empty", policy(action="FailJob", onExitCodes={"operator": "In", "values": [0]})),
    ("either onExitCodes or", policy(action="FailJob")),
    ("FailIndex needs", policy(action="FailIndex", onExitCodes={"operator": "In", "values": [1]})),
    ("action Retry", policy(action="Retry", onPodConditions=[{"type": "DisruptionTarget"}])),
    (
        "needs podReplacementPolicy: Failed",
        {
            **policy(action="Ignore", onPodConditions=[{"type": "DisruptionTarget"}]),
            "podReplacementPolicy": "TerminatingOrFailed",
        },
    ),
    ("maxFailedIndexes needs", {"maxFailedIndexes": 1}),
    ("succeededCount 4", {"successPolicy": {"rules": [{"succeededCount": 4}]}}),
    ("exceed the completions", {"successPolicy": {"rules": [{"succeededIndexes": "0-3"}]}}),
    ("only Indexed Jobs", {"completionMode": "NonIndexed"}),
]


@pytest.mark.parametrize(("text", "fields"), REFUSED, ids=[text for text, _ in REFUSED])
def test_refused_jobs(text: str, fields: dict[str, Any]) -> None:
    with pytest.raises(Invalid, match=text):
        job_spec(manifest(**copy.deepcopy(fields)))


def test_defaults_of_a_job() -> None:
    plain = job_spec(manifest())
    assert (plain.parallelism, plain.backoff_limit, plain.replaces_terminating) == (1, 6, True)
    per_index = job_spec(manifest(backoffLimitPerIndex=3))
    assert per_index.backoff_limit > 2**30
    ruled = job_spec(
        manifest(**policy(action="Ignore", onPodConditions=[{"type": "DisruptionTarget"}]))
    )
    assert not ruled.replaces_terminating
    assert ruled.failure_rules == (IGNORE_DISRUPTIONS,)


@dataclass
class World:
    """A cluster without processes: pods do what a source of random numbers says."""

    job: JobSpec
    draw: random.Random
    status: JobStatus = field(default_factory=JobStatus)
    pods: list[PodState] = field(default_factory=list)
    now_s: float = 0.0

    def turn(self) -> Decision:
        """One turn of the controller, and its actions."""
        before = list(self.pods)
        decision = decide(self.job, self.status, before, self.now_s)
        assert decide(self.job, self.status, before, self.now_s) == decision
        self.check(decision)
        self.status = decision.status
        for action in decision.actions:
            match action:
                case CreatePod(index):
                    uid = f"uid-{len(self.pods)}"
                    self.pods.append(pod(uid, index, "Pending", created_s=self.now_s))
                case DeletePod(uid):
                    at = next(n for n, pod_state in enumerate(self.pods) if pod_state.uid == uid)
                    self.pods[at] = replace(self.pods[at], deleting=True)
        return decision

    def check(self, decision: Decision) -> None:
        """What holds of every decision."""
        live = [pod_state for pod_state in self.pods if pod_state.is_live]
        active = [pod_state for pod_state in live if not pod_state.deleting]
        fresh = created(decision)
        assert len(set(fresh)) == len(fresh)
        assert all(0 <= index < self.job.completions for index in fresh)
        assert not set(fresh) & (decision.status.completed | decision.status.failed_indexes)
        counted = active if self.job.replaces_terminating else live
        assert not set(fresh) & {pod_state.index for pod_state in counted}
        assert not fresh or len(counted) + len(fresh) <= self.job.parallelism
        assert not (fresh and deleted(decision))
        assert not fresh or (decision.status.outcome is None and not self.job.suspend)
        assert set(deleted(decision)) <= {pod_state.uid for pod_state in active}
        assert self.status.outcome is None or condition(decision)[1] == self.status.outcome.reason
        if decision.status.is_finished:
            assert not live
        assert decision.status.settled >= self.status.settled
        limit = self.job.backoff_limit_per_index
        for index, failures in decision.status.failures.items():
            if limit is not None and index < self.job.completions and failures.counted > limit:
                assert index in decision.status.failed_indexes

    def disturb(self) -> None:
        """Something happens to a pod, or to the Job."""
        self.now_s += self.draw.choice([0.0, 1.0, 30.0, 700.0])
        if self.draw.random() < 0.1:
            size = self.draw.randint(1, 5)
            self.job = patched(self.job, parallelism=size, completions=size)
        if self.draw.random() < 0.05:
            self.job = patched(self.job, suspend=not self.job.suspend)
        for at, pod_state in enumerate(self.pods):
            if pod_state.is_live and self.draw.random() < 0.4:
                self.pods[at] = self.changed(pod_state)

    def changed(self, pod_state: PodState) -> PodState:
        end = {"finished_s": self.now_s, "ready": False}
        match self.draw.randrange(6):
            case 0:
                return replace(pod_state, phase="Running", ready=True)
            case 1:
                return replace(pod_state, deleting=True, conditions=frozenset({DISRUPTED}))
            case 2:
                return replace(pod_state, phase="Succeeded", exit_codes=(("agent", 0),), **end)  # type: ignore[arg-type]
            case 3:
                return replace(pod_state, phase="Failed", **end)  # type: ignore[arg-type]
            case 4:
                code = self.draw.choice([64, 75, 75, 75, 137])
                return replace(pod_state, phase="Failed", exit_codes=(("agent", code),), **end)  # type: ignore[arg-type]
            case _:
                return replace(pod_state, deleting=True)


RULES = (on_codes("FailJob", 64), on_codes("FailIndex", 137), IGNORE_DISRUPTIONS)


@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 5),
    spare=st.integers(0, 2),
    limit=st.sampled_from([None, 0, 2, 1000]),
    rules=st.sampled_from([(), RULES[:1], RULES[2:], (RULES[0], RULES[2]), RULES]),
    successes=st.sampled_from([None, 1]),
    replaces_terminating=st.booleans(),
)
def test_random_ends_of_pods_break_no_rule(
    seed: int,
    size: int,
    spare: int,
    limit: int | None,
    rules: tuple[FailureRule, ...],
    successes: int | None,
    replaces_terminating: bool,
) -> None:
    job = spec(
        size,
        completions=size + spare,
        backoff_limit_per_index=limit,
        failure_rules=rules,
        success_rules=() if successes is None else (SuccessRule(count=successes),),
        replaces_terminating=replaces_terminating and not rules,
    )
    world = World(job, random.Random(seed))
    for _ in range(40):
        world.turn()
        world.disturb()


@given(seed=st.integers(0, 2**32), size=st.integers(1, 5))
def test_a_job_whose_pods_all_succeed_in_the_end_completes(seed: int, size: int) -> None:
    """Disruptions before that delay it, and change nothing."""
    draw = random.Random(seed)
    world = World(spec(size, failure_rules=(IGNORE_DISRUPTIONS,)), draw)
    for turn in range(60):
        world.turn()
        world.now_s += 700.0
        for at, pod_state in enumerate(world.pods):
            if pod_state.is_live:
                lucky = turn > 20 or draw.random() < 0.2
                code = 0 if lucky else 75
                world.pods[at] = replace(
                    pod_state,
                    phase="Succeeded" if lucky else "Failed",
                    exit_codes=(("agent", code),),
                    conditions=frozenset() if lucky else frozenset({DISRUPTED}),
                    finished_s=world.now_s,
                )
    assert world.status.outcome == Outcome(condition="Complete", reason="CompletionsReached")
    assert world.status.completed == frozenset(range(size))
    assert world.status.failed == 0
