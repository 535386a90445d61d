"""Runs Jobs on this machine as a Kubernetes cluster does: API server, controllers, kubelets.

Follows https://kubernetes.io/docs/concepts/workloads/controllers/job/,
https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/,
https://kubernetes.io/docs/concepts/workloads/pods/disruptions/ and
https://kubernetes.io/docs/concepts/architecture/nodes/. Each pod has a node of its own.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from tests.support.kubernetes.controller import (
    DEFAULT_BACKOFF,
    Backoff,
    CreatePod,
    DeletePod,
    JobStatus,
    decide,
)
from tests.support.kubernetes.environment import INDEX_ANNOTATION, PodFields
from tests.support.kubernetes.job import Invalid, JobSpec, Manifest, job_spec, patched
from tests.support.kubernetes.pod import Pod, Substitutes

TURN_S = 0.05
"""Seconds between two turns of the control loop."""
UNREACHABLE_S = 340.0
"""Seconds after which a pod of a lost node is given up: 40 until the node counts as unreachable,
and 300 for which every pod tolerates that by default."""
DISRUPTION = "DisruptionTarget"
_numbers = itertools.count()


@dataclass(slots=True, kw_only=True)
class Job:
    """A Job of the API server: what was applied, and what the controller made of it."""

    spec: JobSpec
    manifest: Manifest
    uid: str = field(default_factory=lambda: str(uuid.uuid4()))
    status: JobStatus = field(default_factory=JobStatus)
    deleting: bool = False


class Cluster:
    """A control loop in a thread of its own, and the processes of all pods; a context manager."""

    def __init__(
        self,
        root: Path,
        substitutes: Substitutes,
        *,
        backoff: Backoff = DEFAULT_BACKOFF,
        unreachable_s: float = UNREACHABLE_S,
        capacity: int | None = None,
    ) -> None:
        """Makes an empty cluster.

        root: directory of pods' volumes and logs. capacity: number of pods for which there are
        nodes; others wait; None: all.
        """
        self.capacity = capacity
        self.events: list[str] = []
        self._root = root
        self._substitutes = substitutes
        self._backoff = backoff
        self._unreachable_s = unreachable_s
        self._jobs: dict[str, Job] = {}
        self._pods: list[Pod] = []
        self._objects: dict[tuple[str, str], Mapping[str, str]] = {}
        self._services: dict[str, dict[str, int]] = {"kubernetes": {"https": 443}}
        self._addresses = _own_addresses()
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kubernetes", daemon=True)

    def __enter__(self) -> Cluster:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    # What users and operators ask of the API server.

    def apply(self, manifests: Iterable[Manifest]) -> None:
        """Creates Jobs, ConfigMaps, Secrets and Services; other kinds change nothing here.

        Raises `Invalid` for a Job that is refused, or exists.
        """
        with self._lock:
            for manifest in manifests:
                name = manifest["metadata"]["name"]
                match manifest["kind"]:
                    case "Job":
                        if name in self._jobs:
                            raise Invalid(f"there is a Job {name}: its template cannot be changed")
                        self._jobs[name] = Job(spec=job_spec(manifest), manifest=manifest)
                    case "ConfigMap" | "Secret":
                        data = manifest.get("data", {}) | manifest.get("stringData", {})
                        self._objects[manifest["kind"], name] = data
                    case "Service" if manifest["spec"].get("clusterIP") != "None":
                        ports = manifest["spec"]["ports"]
                        self._services[name] = {p.get("name", ""): p["port"] for p in ports}

    def patch(
        self,
        job: str,
        *,
        parallelism: int | None = None,
        completions: int | None = None,
        suspend: bool | None = None,
    ) -> None:
        """Patches a Job; raises `Invalid` as the API server does."""
        with self._lock:
            old = self._jobs[job].spec
            self._jobs[job].spec = patched(
                old, parallelism=parallelism, completions=completions, suspend=suspend
            )
            self._note(f"job {job} is patched: {parallelism=} {completions=} {suspend=}")

    def delete(self, job: str) -> None:
        """Deletes a Job with its pods; it is gone once they have ended."""
        with self._lock:
            self._jobs[job].deleting = True
            for pod in self.pods(job):
                self._delete(pod)

    def has(self, job: str) -> bool:
        with self._lock:
            return job in self._jobs

    def status(self, job: str) -> JobStatus:
        self.check()
        with self._lock:
            return self._jobs[job].status

    def pods(self, job: str | None = None) -> list[Pod]:
        """Returns the pods of a Job, or all, in the order of their creation, ended ones too."""
        with self._lock:
            return [pod for pod in self._pods if job in (None, pod.job)]

    def live(self, job: str | None = None) -> list[Pod]:
        """Returns the pods that have not ended."""
        return [pod for pod in self.pods(job) if pod.state.is_live]

    def check(self) -> None:
        """Raises the error that ended the control loop, if one did."""
        if self._error is not None:
            raise self._error

    # What disturbs pods.

    def preempt(self, pod: Pod) -> None:
        """The scheduler takes the pod's place for another of higher priority."""
        self._disrupt(pod, "PreemptionByScheduler")

    def evict(self, pod: Pod) -> None:
        """The pod is evicted by the API, as by `kubectl drain` and the cluster autoscaler."""
        self._disrupt(pod, "EvictionByEvictionAPI")

    def shut_down_node(self, pod: Pod, grace_s: float | None = None) -> None:
        """The pod's node shuts down gracefully, as a spot machine does.

        grace_s: what the kubelet grants at most; the pod's own period where that is less. The
        kubelet notes the phase Failed whatever the pod exits with.
        """
        with self._lock:
            if pod.phase != "Running":
                return
            self._note(f"{pod.name}: its node shuts down")
            pod.conditions[DISRUPTION] = "TerminationByKubelet"
            pod.fails_anyway = True
            granted_s = pod.grace_s if grace_s is None else min(grace_s, pod.grace_s)
            pod.stop(time.monotonic(), granted_s)

    def delete_pod(self, pod: Pod) -> None:
        """As `kubectl delete pod`: no condition tells why."""
        with self._lock:
            self._delete(pod)

    def lose_node(self, pod: Pod) -> None:
        """The pod's machine is gone from one moment to the next.

        The API server shows the pod as Running until the node is given up. Its replacement comes
        after that.
        """
        with self._lock:
            if pod.container is None or not pod.state.is_live:
                return
            self._note(f"{pod.name}: its node is lost")
            pod.container.vanish()
            pod.lost_at_s = time.monotonic()

    def cut_off(self, pod: Pod) -> None:
        """The pod's node no longer reaches the API server; its container runs on."""
        pod.silent = True

    def reconnect(self, pod: Pod) -> None:
        pod.silent = False

    def disrupt_at_random(self, draw: random.Random, pods: Iterable[Pod]) -> tuple[Pod, str]:
        """Disturbs one of the pods in one of these ways; returns both."""
        ways: dict[str, Callable[[Pod], None]] = {
            "preempted": self.preempt,
            "evicted": self.evict,
            "shut down": self.shut_down_node,
            "deleted": self.delete_pod,
            "lost": self.lose_node,
        }
        pod, way = draw.choice(list(pods)), draw.choice(list(ways))
        ways[way](pod)
        return pod, way

    # The control loop.

    def _run(self) -> None:
        try:
            while not self._stop.wait(TURN_S):
                with self._lock:
                    self._turn(time.monotonic())
        except BaseException as error:  # noqa: BLE001 - the tester's thread raises it
            self._error = error
        finally:
            for pod in self.pods():
                if pod.container is not None:
                    pod.container.vanish()
                    pod.container.close()
                if pod.state.is_live:
                    pod.end("Failed", time.monotonic())

    def _turn(self, now_s: float) -> None:
        for pod in self._pods:
            if pod.lost_at_s is not None:
                self._give_up(pod, now_s)
            else:
                self._kubelet(pod, now_s)
        for name, job in list(self._jobs.items()):
            if job.deleting:
                if not self.live(name):
                    del self._jobs[name]
                    self._pods = [pod for pod in self._pods if pod.job != name]
            else:
                self._control(job, now_s)

    def _kubelet(self, pod: Pod, now_s: float) -> None:
        if pod.phase == "Pending":
            if pod.deleting:
                pod.end("Failed", now_s)
            elif self.capacity is None or self._running() < self.capacity:
                pod.start(self._substitutes, self._objects, self._services)
                self._note(f"{pod.name}: started at {pod.fields.ip}")
        elif pod.phase == "Running" and pod.container is not None and not pod.silent:
            container = pod.container
            code = container.poll()
            if code is not None:
                self._ended(pod, code, now_s)
                return
            pod.ready = container.health.ready
            if (probe := container.health.killed_by) is not None and pod.stop_at_s is None:
                self._note(f"{pod.name}: killed, its {probe} probe failed")
                grace_s = container.health.probes[probe].grace_s
                pod.stop(now_s, pod.grace_s if grace_s is None else grace_s)
            if pod.stop_at_s is not None and now_s >= pod.stop_at_s:
                container.kill()

    def _ended(self, pod: Pod, code: int, now_s: float) -> None:
        (container,) = pod.spec["containers"]
        pod.exit_codes = ((container["name"], code),)
        pod.end("Failed" if code or pod.fails_anyway else "Succeeded", now_s)
        self._note(f"{pod.name}: exit code {code}, {pod.phase}")

    def _give_up(self, pod: Pod, now_s: float) -> None:
        """The garbage collector of pods marks one as failed whose node is gone."""
        assert pod.lost_at_s is not None
        if pod.state.is_live and now_s - pod.lost_at_s >= self._unreachable_s:
            pod.conditions[DISRUPTION] = "DeletionByPodGC"
            pod.end("Failed", now_s)
            self._note(f"{pod.name}: given up with its node")

    def _control(self, job: Job, now_s: float) -> None:
        pods = {pod.uid: pod for pod in self.pods(job.spec.name)}
        states = [pod.state for pod in pods.values()]
        before = job.status
        decision = decide(job.spec, before, states, now_s, self._backoff)
        job.status = decision.status
        if job.status.outcome != before.outcome and job.status.outcome is not None:
            self._note(f"job {job.spec.name}: {job.status.outcome}")
        for action in decision.actions:
            match action:
                case CreatePod(index):
                    self._pods.append(self._new_pod(job, index, now_s))
                case DeletePod(uid):
                    self._delete(pods[uid])

    def _new_pod(self, job: Job, index: int, now_s: float) -> Pod:
        uid = str(uuid.uuid4())
        name = f"{job.spec.name}-{index}-{uid[:5]}"
        template = job.manifest["spec"]["template"]
        metadata = template.get("metadata", {})
        mark = {INDEX_ANNOTATION: str(index)}
        owner = {"controller-uid": job.uid, "job-name": job.spec.name}
        fields = PodFields(
            name=name,
            uid=uid,
            ip=next(self._addresses),
            node=f"node-of-{name}",
            labels={
                **metadata.get("labels", {}),
                **mark,
                **owner,
                **{f"batch.kubernetes.io/{name}": value for name, value in owner.items()},
            },
            annotations={**metadata.get("annotations", {}), **mark},
        )
        logs = self._root / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        return Pod(
            job=job.spec.name,
            index=index,
            fields=fields,
            spec=template["spec"],
            directory=self._root / uid,
            log=logs / f"{name}.log",
            created_s=now_s,
        )

    def _disrupt(self, pod: Pod, reason: str) -> None:
        with self._lock:
            if pod.state.is_live:
                pod.conditions[DISRUPTION] = reason
                self._delete(pod)

    def _delete(self, pod: Pod) -> None:
        if not pod.state.is_live or pod.deleting:
            return
        self._note(f"{pod.name}: deleted {pod.conditions.get(DISRUPTION, '')}")
        pod.deleting = True
        if pod.container is not None:
            pod.container.deleting = True
            if pod.lost_at_s is None:
                pod.stop(time.monotonic(), pod.grace_s)

    def _running(self) -> int:
        return sum(pod.phase == "Running" for pod in self._pods)

    def _note(self, text: str) -> None:
        self.events.append(f"{time.strftime('%H:%M:%S')} {text}")


def _own_addresses() -> Iterator[str]:
    """Yields loopback addresses that no other process of this kind takes, nor an earlier pod."""
    pid = os.getpid()
    block = f"127.{64 + pid % 128}.{pid // 128 % 256}"
    for number in _numbers:
        yield f"{block}.{1 + number % 254}"
