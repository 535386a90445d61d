"""Real agents in rendered pods: a cluster takes pods away, and the result stays the same.

The cluster is `tests/support/kubernetes`, which plays the Job controller and the kubelets.
"""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from torch import Tensor

from elasticzero.errors import ExitCode
from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.clusters import REGRESSION, SCRIPTS, elasticzero
from tests.integration.pods import PodStory, node_of, pods
from tests.integration.test_elastic_training import check_samples, check_weights
from tests.support.kubernetes.pod import Pod
from tests.unit.manifests import Manifest

pytestmark = pytest.mark.timeout(120)

SLOWLY = ("--pause", "0.1")
WAITING_S = 1.5
"""Pause of each step while a pod is to come, however long it takes to start."""


def check_result(told: PodStory, reference: dict[str, Tensor]) -> None:
    """Each step counts once, and the weights are those of a run that nothing disturbed."""
    check_samples(told.lineage, told.directory())
    check_weights(told.checkpoints, reference)


def check_complete(told: PodStory, *codes: None) -> None:
    """The Job is complete, and each pod has ended by itself, or with one of these exit codes."""
    outcome = told.wait_for_end()
    assert (outcome.condition, outcome.reason) == ("Complete", "SuccessPolicy"), told.logs()
    last = [of_pods[-1] for of_pods in told.codes.values()]
    assert ExitCode.DONE in last
    assert set(last) <= {ExitCode.DONE, ExitCode.LEFT, *codes}, told.logs()


def operator(told: PodStory, etcd: EtcdServer, *arguments: str) -> str:
    """What a command on the job prints."""
    asked = elasticzero(*arguments, "--job", told.job, "--etcd", etcd.endpoint)
    done = subprocess.run(asked, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def wait_for_all(told: PodStory, count: int = 3) -> None:
    """Waits until so many pods train together."""
    told.wait(f"a world of {count}", lambda: len(told.members) == count)
    told.wait_for_first_step(told.generation)


def environment_of(pod: Pod) -> dict[str, str]:
    """What the agent of a pod was started with, the child of the container's first process."""
    assert pod.container is not None
    text = Path(f"/proc/{pod.container.pids[1]}/environ").read_text()
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


PATCH = """
kind: Job
metadata: {name: JOB}
spec:
  template:
    metadata: {labels: {team: vision}}
    spec:
      nodeSelector: {pool: big}
      tolerations: [{key: team, operator: Exists, effect: NoSchedule}]
      volumes: [{name: scratch, emptyDir: {sizeLimit: 1Gi}}]
      containers:
        - name: agent
          env:
            - {name: ELASTICZERO_STRATEGY, value: zero1}
            - {name: ELASTICZERO_JOB}
            - {name: RUN, value: of-$(ELASTICZERO_JOB)}
          volumeMounts: [{name: scratch, mountPath: /scratch}]
"""


@pytest.mark.slow  # the story of a preempted pod ends as well
def test_a_patched_job_completes(
    tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    patch = tmp_path / "patch.yaml"
    patch.write_text(PATCH.replace("JOB}", f"{job}}}", 1))
    with pods(tmp_path, etcd.endpoint, job, SLOWLY, flags=("--patch", str(patch))) as told:
        wait_for_all(told)
        told.pause(0.3)
        told.wait("all to be ready", lambda: all(pod.ready for pod in told.cluster.live()))
        for pod in told.cluster.live():
            variables = environment_of(pod)
            assert variables["ELASTICZERO_STRATEGY"] == "zero1"
            assert variables["RUN"] == f"of-{job}"
        check_complete(told)
    assert {index: len(codes) for index, codes in told.codes.items()} == {0: 1, 1: 1, 2: 1}
    assert told.generation == 1
    for pod in told.cluster.pods(told.job):
        assert pod.fields.labels["team"] == "vision"
    check_result(told, reference)


def test_a_preempted_pod_is_replaced_and_costs_no_step(
    tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    with pods(tmp_path, etcd.endpoint, job, SLOWLY, flags=("--strategy", "zero1")) as told:
        wait_for_all(told)
        victim = told.pod(1)
        told.pause(WAITING_S)
        told.cluster.preempt(victim)
        told.wait_for_pods_end(victim)
        assert victim.exit_code == ExitCode.LEFT
        newcomer = told.replacement(victim)
        assert newcomer.uid != victim.uid
        told.wait_for_member(newcomer)
        check_complete(told)
    assert told.cluster.status(told.job).failed == 0, "an ignored failure counts nowhere"
    assert told.lineage.recomputed == 0
    reasons = "\n".join(world["reason"] for world in told.of("world"))
    assert f"{node_of(victim)} leaves: SIGTERM (25 s of grace)" in reasons
    check_result(told, reference)


@pytest.mark.slow
def test_the_job_goes_on_while_a_lost_node_counts_as_alive(
    tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    """Nobody sends SIGTERM, and the pod's replacement waits until its node is given up."""
    with pods(tmp_path, etcd.endpoint, job, SLOWLY) as told:
        wait_for_all(told)
        victim = told.pod(2)
        told.cluster.lose_node(victim)
        told.wait_for_first_step(2)
        told.pause(WAITING_S)
        assert victim.phase == "Running"
        assert node_of(victim) not in told.members
        newcomer = told.replacement(victim)
        told.wait_for_member(newcomer)
        check_complete(told)
    assert told.codes[2][0] is None
    assert told.lineage.recomputed <= 1
    check_result(told, reference)


def strike(told: PodStory, draw: random.Random, most: int) -> list[Pod]:
    """Disturbs one to `most` pods that train, and waits until the job goes on."""
    before = told.generation
    struck: list[Pod] = []
    for _ in range(draw.randint(1, most)):
        left = [p for p in told.cluster.live() if node_of(p) in told.members and p not in struck]
        struck.append(told.cluster.disrupt_at_random(draw, left)[0])
    told.wait("the next generation", lambda: told.generation > before or told.is_finished)
    return struck


def disturb(
    place: Path, etcd: EtcdServer, job: str, seed: int, strategy: str, *, strikes: int, most: int
) -> PodStory:
    """A job of which random pods, up to `most` at once, are disturbed at random steps.

    On a busy machine training may end before all strikes were made, and before all train again.
    """
    draw = random.Random(seed)
    flags = ("--strategy", strategy, "--checkpoint-every", "25")
    with pods(place, etcd.endpoint, job, SLOWLY, flags=flags) as told:

        def wait(what: str, condition: Callable[[], bool]) -> None:
            told.wait(f"{what}, or the end", lambda: condition() or told.is_finished)

        for number in range(strikes):
            wait("a world of 3", lambda: len(told.members) == 3)
            told.pause(0.1)
            step = told.step + draw.randint(1, 8)
            wait(f"step {step}", partial(lambda step: told.step >= step, step))
            if told.is_finished:
                assert number > 0
                break
            told.pause(WAITING_S)
            for pod in strike(told, draw, most):
                told.wait_for_pods_end(pod)
        wait("a world of 3", lambda: len(told.members) == 3)
        # Where training ends before, the pod of a lost node may have no exit code.
        check_complete(told, *[] if len(told.members) == 3 else [None])
    return told


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3])
def test_two_random_disruptions(
    seed: int, tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    told = disturb(tmp_path, etcd, job, seed, "zero2", strikes=2, most=1)
    check_result(told, reference)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("strategy", "seed"),
    [
        pytest.param("zero3", 11, marks=pytest.mark.slow),
        pytest.param("ddp", 12, marks=pytest.mark.slow),
        pytest.param("ddp", 11, marks=pytest.mark.chaos),
        pytest.param("zero3", 12, marks=pytest.mark.chaos),
    ],
)
def test_many_random_disruptions(
    seed: int,
    strategy: str,
    tmp_path: Path,
    job: str,
    etcd: EtcdServer,
    reference: dict[str, Tensor],
) -> None:
    told = disturb(tmp_path, etcd, job, seed, strategy, strikes=6, most=2)
    check_result(told, reference)


BAD_INPUT: list[tuple[str, dict[str, str], Path]] = [
    ("a strategy that there is not", {"ELASTICZERO_STRATEGY": "zero9"}, REGRESSION),
    ("a script with a mistake", {}, SCRIPTS / "fails_on_import.py"),
]


@pytest.mark.slow  # the played cluster has a test of exit codes, and bad input has its own
@pytest.mark.parametrize(
    ("variables", "script"),
    [entry[1:] for entry in BAD_INPUT],
    ids=[entry[0] for entry in BAD_INPUT],
)
def test_bad_input_fails_the_job_at_once(
    variables: dict[str, str], script: Path, tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    with pods(tmp_path, etcd.endpoint, job, variables=variables, script=script) as told:
        outcome = told.wait_for_end()
    assert (outcome.condition, outcome.reason) == ("Failed", "PodFailurePolicy")
    assert "exit code 64" in outcome.message
    assert all(len(codes) == 1 for codes in told.codes.values()), "no pod is tried again"


@pytest.mark.slow
def test_a_drained_node_comes_back_as_another(
    tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    """`elasticzero drain` ends the pod's agent; the Job controller counts it, and replaces it."""
    with pods(tmp_path, etcd.endpoint, job, SLOWLY) as told:
        wait_for_all(told)
        told.pause(WAITING_S)
        victim = told.pod(1)
        output = operator(told, etcd, "drain", node_of(victim), "--wait")
        assert f"{node_of(victim)} has left" in output
        told.wait_for_pods_end(victim)
        assert victim.exit_code == ExitCode.LEFT
        assert "DisruptionTarget" not in victim.conditions
        told.wait_for_member(told.replacement(victim))
        assert told.cluster.status(told.job).failures[1].counted == 1
        check_complete(told)
    assert told.lineage.recomputed == 0
    check_result(told, reference)


@pytest.mark.slow
def test_a_job_is_scaled_down_and_up(
    tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    """The patch takes the pod of the highest index away; `elasticzero scale` says so to agents."""
    with pods(tmp_path, etcd.endpoint, job, SLOWLY) as told:
        wait_for_all(told)
        told.pause(WAITING_S)
        victim = told.pod(2)
        told.cluster.patch(told.job, parallelism=2, completions=2)
        told.wait_for_pods_end(victim)
        assert victim.exit_code == ExitCode.LEFT
        assert "1:2 nodes" in operator(told, etcd, "scale", "1:2", "--wait")
        wait_for_all(told, 2)
        assert [pod.index for pod in told.cluster.live()] == [0, 1]
        operator(told, etcd, "scale", "1:3")
        told.cluster.patch(told.job, parallelism=3, completions=3)
        newcomer = told.replacement(victim)
        told.wait_for_member(newcomer)
        assert told.cluster.status(told.job).failed == 0
        check_complete(told)
    assert told.lineage.recomputed == 0
    check_result(told, reference)


@pytest.mark.slow
def test_a_suspended_job_goes_on_where_it_was(
    tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    """As Kueue takes a whole job away: every pod gets SIGTERM at once."""
    with pods(tmp_path, etcd.endpoint, job, SLOWLY) as told:
        wait_for_all(told)
        told.wait_for_step(10)
        told.cluster.patch(told.job, suspend=True)
        told.wait("no pod", lambda: not told.cluster.live())
        assert all(codes == [ExitCode.LEFT] for codes in told.codes.values()), told.logs()
        reached = told.step
        told.cluster.patch(told.job, suspend=False)
        told.wait("a newer generation", lambda: told.generation > 1)
        check_complete(told)
    newest = max(told.of("world"), key=lambda world: world["generation"])
    assert newest["resume_step"] >= reached - 1, "the state was saved before all had left"
    check_result(told, reference)


def check_already_done(told: PodStory) -> None:
    """The Job has failed at once, and its pods tell why."""
    outcome = told.wait_for_end()
    assert (outcome.condition, outcome.reason) == ("Failed", "PodFailurePolicy"), told.logs()
    assert "exit code 64" in outcome.message
    logs = "\n".join(pod.log.read_text() for pod in told.cluster.pods(told.job))
    assert f"job '{told.job}' is already done" in logs


def apply_anew(told: PodStory, manifests: Sequence[Manifest]) -> None:
    """`kubectl delete job --cascade=foreground`, then `kubectl apply`."""
    told.cluster.delete(told.job)
    told.wait("the deletion", lambda: not told.cluster.has(told.job))
    told.cluster.apply(manifests)


@pytest.mark.slow
def test_a_second_run_of_a_job_that_is_done_needs_restart(
    tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    """The same manifests fail at once; with --restart they go on from the newest checkpoint."""
    with pods(tmp_path, etcd.endpoint, job) as told:
        check_complete(told)
        worlds = len(told.of("world"))
        apply_anew(told, told.manifests)
        check_already_done(told)
        assert len(told.of("world")) == worlds, "nothing has run again"
        apply_anew(told, told.training.manifests("--restart"))
        check_complete(told)
        resumed = {world["resume_step"] for world in told.of("world")[worlds:]}
        assert resumed == {told.step}, "no step is left to train"
    check_weights(told.checkpoints, reference)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--restart",)], ids=["", "with --restart"])
def test_a_pod_replaced_after_the_end_ends_as_its_job_did(
    flags: tuple[str, ...], tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    """The replacement of a preempted pod starts when the others are done, and before the API server
    knows that: their nodes cannot reach it for a moment."""
    with pods(tmp_path, etcd.endpoint, job, SLOWLY, flags=flags) as told:
        wait_for_all(told)
        told.cluster.capacity = 2
        victim, others = told.pod(2), [told.pod(0), told.pod(1)]
        told.cluster.preempt(victim)
        told.wait_for_pods_end(victim)
        late = told.replacement(victim)
        assert late.phase == "Pending"
        for pod in others:
            told.cluster.cut_off(pod)
        told.pause(0.0)
        told.wait(
            "its agents' end", lambda: not any(p.container.pids for p in others if p.container)
        )
        last = told.generation
        told.cluster.capacity = 3
        told.wait_for_pods_end(late)
        assert late.exit_code == ExitCode.DONE, told.logs()
        assert "this node came after the end of the job" in late.log.read_text()
        for pod in others:
            told.cluster.reconnect(pod)
        check_complete(told)
    assert told.generation == last, "nothing has begun anew"
