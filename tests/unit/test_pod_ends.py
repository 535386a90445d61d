"""How a pod of the rendered Job ends, and what becomes of the Job by it.

The Job controller is the one that plays for tests: see `tests/support/kubernetes/controller.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from elasticzero.errors import ExitCode
from tests.support.kubernetes.controller import Backoff, CreatePod, Decision, JobStatus, decide
from tests.support.kubernetes.job import JobSpec, job_spec
from tests.support.kubernetes.policies import PodState
from tests.unit.manifests import agents_of

ENDS_THE_JOB = {ExitCode.USAGE, ExitCode.FAILED}
TRACEBACK, KILLED = 1, 137
"""Exit codes of an agent that Python or SIGKILL has ended."""


@pytest.fixture(scope="module")
def job(root: Path) -> JobSpec:
    manifests = yaml.safe_load_all((root / "k8s" / "base" / "agents.yaml").read_text())
    return job_spec(agents_of(list(manifests)))


def after(job: JobSpec, code: int) -> Decision:
    """What the controller decides once the pod of index 0 has failed; all others run."""
    ended = PodState(uid="a", index=0, phase="Failed", exit_codes=(("agent", code),))
    others = [
        PodState(uid=f"uid-{index}", index=index, phase="Running", ready=True)
        for index in range(1, job.completions)
    ]
    return decide(job, JobStatus(), [ended, *others], 0.0, Backoff(first_s=0.0))


@pytest.mark.parametrize("code", [*(c for c in ExitCode if c), TRACEBACK, KILLED])
def test_one_pod_ends_the_job_only_where_the_job_has_failed(job: JobSpec, code: int) -> None:
    """An agent whose own loop failed exited with the code of a failed job, and all pods ended."""
    assert job.parallelism > 1
    decision = after(job, code)
    if code in ENDS_THE_JOB:
        assert decision.status.outcome is not None
        assert decision.status.outcome.condition == "FailureTarget"
        return
    assert decision.status.outcome is None
    assert decision.actions == (CreatePod(0),)
    assert decision.status.failures[0].counted == 1


def test_an_agent_that_fails_for_ever_ends_the_tries_of_its_index(job: JobSpec) -> None:
    """As one does that is killed for ever; the other indexes go on."""
    status, pods = (
        JobStatus(),
        [
            PodState(uid=f"uid-{index}", index=index, phase="Running", ready=True)
            for index in range(1, job.completions)
        ],
    )
    assert job.backoff_limit_per_index == 1000
    for number in range(1001):
        codes = (("agent", int(ExitCode.DEFECT)),)
        ended = PodState(uid=f"end-{number}", index=0, phase="Failed", exit_codes=codes)
        decision = decide(job, status, [*pods, ended], 0.0, Backoff(first_s=0.0))
        status = decision.status
        assert status.outcome is None
        assert (decision.actions == (CreatePod(0),)) == (number < 1000)
    assert status.failed_indexes == {0}
