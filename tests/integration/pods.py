"""The Job of k8s/base on a cluster that plays Kubernetes, with real agents."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from elasticzero.launcher.observability.event_log import EventReader
from tests.integration.clusters import PATIENCE_S, REGRESSION, SETTLE_S, JobStory
from tests.support.kubernetes.cluster import Cluster
from tests.support.kubernetes.controller import Backoff, Outcome
from tests.support.kubernetes.image import parse_dockerfile
from tests.support.kubernetes.pod import Pod, Substitutes

ROOT = Path(__file__).resolve().parents[2]
AGENT = "agent"
"""Name of the container that runs the agent."""
SCRIPT = "/app/train.py"
ETCD_SERVICE = r"[\w.-]*etcd[\w.-]*:2379"
HTTP_PORT = 10_000 + os.getpid() % 20_000
"""Pods listen there, each at an address of its own: agents of other tests may have 9400 of all."""
BACKOFF = Backoff(first_s=0.5, most_s=2.0)
"""Shorter than in Kubernetes, where a pod is replaced after 10 s and more."""
UNREACHABLE_S = 8.0
"""Shorter too: it is more than five minutes there."""


def base_manifests() -> list[dict[str, Any]]:
    """What `kubectl apply -k k8s/base` creates."""
    paths = sorted((ROOT / "k8s" / "base").glob("*.yaml"))
    found = [each for path in paths for each in yaml.safe_load_all(path.read_text())]
    return [each for each in found if each and each["kind"] != "Kustomization"]


def base_job() -> dict[str, Any]:
    """The Job of agents in k8s/base."""
    (found,) = (each for each in base_manifests() if each["kind"] == "Job")
    return found


def edited(
    job: Mapping[str, Any], nodes: str, arguments: Sequence[str], variables: Mapping[str, str]
) -> dict[str, Any]:
    """The Job as an overlay of its user changes it: its size, what it trains, and options.

    nodes: MIN:MAX. arguments: what follows `elasticzero`.
    """
    new = copy.deepcopy(dict(job))
    most = int(nodes.rpartition(":")[2])
    new["spec"] |= {"parallelism": most, "completions": most}
    (container,) = (
        each for each in new["spec"]["template"]["spec"]["containers"] if each["name"] == AGENT
    )
    container["args"] = list(arguments)
    (port,) = container["ports"]
    port["containerPort"] = HTTP_PORT
    wanted = {
        "ELASTICZERO_NNODES": nodes,
        "ELASTICZERO_HTTP_PORT": str(HTTP_PORT),
        **variables,
    }
    for entry in container["env"]:
        if entry["name"] in wanted:
            entry["value"] = wanted.pop(entry["name"])
    container["env"] += [{"name": name, "value": value} for name, value in wanted.items()]
    return new


def claim_mount(job: Mapping[str, Any]) -> str:
    """Where the Job's containers see the claim of checkpoints."""
    pod = job["spec"]["template"]["spec"]
    (name,) = (each["name"] for each in pod["volumes"] if "persistentVolumeClaim" in each)
    (path,) = (
        mount["mountPath"]
        for container in pod["containers"]
        for mount in container["volumeMounts"]
        if mount["name"] == name
    )
    return str(path)


def substitutes(
    endpoint: str, claim: Path, job: Mapping[str, Any], script: Path, variables: Mapping[str, str]
) -> Substitutes:
    """What this machine has in the place of the image, volumes, names and networks."""
    image = parse_dockerfile(
        (ROOT / "k8s" / "Dockerfile").read_text(), {"PATH": os.environ["PATH"]}
    )
    volumes = job["spec"]["template"]["spec"]["volumes"]
    claims = [each["persistentVolumeClaim"] for each in volumes if "persistentVolumeClaim" in each]
    return Substitutes(
        image=image,
        files={
            **{target: ROOT / source for target, source in image.copied.items()},
            "/opt/elasticzero": Path(sys.prefix),
            SCRIPT: script,
        },
        claims={each["claimName"]: claim for each in claims},
        addresses={ETCD_SERVICE: endpoint},
        folder_variables={"/dev/shm": "ELASTICZERO_SNAPSHOT_DIR", "/tmp": "TMPDIR"},
        address_variables=("ELASTICZERO_HTTP_HOST",),
        variables={"GLOO_SOCKET_IFNAME": "lo", **variables},
    )


@dataclass
class PodStory(JobStory):
    """A Job with its pods, and all that their agents have told."""

    cluster: Cluster
    manifest: Mapping[str, Any]
    job: str
    """What the agents call it."""
    log_dir: Path
    claim: Path
    """Where checkpoints lie, of all jobs."""
    _readers: dict[str, EventReader] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What the API server calls the Job."""
        return str(self.manifest["metadata"]["name"])

    @property
    def checkpoints(self) -> Path:
        return self.claim / self.job

    def directory(self) -> Path:
        return self.log_dir / self.job

    def news(self) -> Iterable[tuple[str, dict[str, Any]]]:
        self.cluster.check()
        for path in sorted(self.directory().glob("*/events.jsonl")):
            node = path.parent.name
            reader = self._readers.setdefault(node, EventReader(path.parent))
            yield from ((node, event) for event in reader.read())

    def pids(self) -> Iterable[int]:
        for pod in self.cluster.live():
            if pod.container is not None:
                yield from pod.container.pids

    def state(self) -> str:
        logs = [f"== {pod.log}\n" + tail(pod.log) for pod in self.cluster.pods()]
        return "\n".join(["== cluster", *self.cluster.events, *logs])

    def pod(self, index: int) -> Pod:
        """The live pod of an index; waits for it."""
        found: Pod = self.wait(
            f"a pod of index {index}",
            lambda: next((p for p in self.cluster.live(self.name) if p.index == index), None),
        )
        return found

    def replacement(self, old: Pod) -> Pod:
        """The pod that takes the place of one that has ended; waits for it."""

        def newer() -> Pod | None:
            pods = self.cluster.pods(self.name)
            later = pods[pods.index(old) + 1 :]
            return next((pod for pod in later if pod.index == old.index), None)

        found: Pod = self.wait(f"a pod in the place of {old.name}", newer)
        return found

    def wait_for_pods_end(self, pod: Pod) -> None:
        self.wait(f"the end of {pod.name}", lambda: not pod.state.is_live)

    def wait_for_member(self, pod: Pod) -> None:
        """Waits for a world with this pod's agent."""
        self.wait(f"a world with {pod.name}", lambda: node_of(pod) in self.members)

    @property
    def members(self) -> list[str]:
        """Nodes of the newest world."""
        worlds = self.of("world")
        newest = max(worlds, key=lambda world: int(world["generation"]), default=None)
        return [] if newest is None else list(newest["members"])

    @property
    def codes(self) -> dict[int, list[int | None]]:
        """By index, the exit codes of its pods in the order of their creation."""
        found: dict[int, list[int | None]] = {}
        for pod in self.cluster.pods(self.name):
            found.setdefault(pod.index, []).append(pod.exit_code)
        return found

    def wait_for_end(self, patience_s: float = PATIENCE_S) -> Outcome:
        """How the Job ends, after steps that nothing slows down."""
        self.pause(0.0)

        def outcome() -> Outcome | None:
            status = self.cluster.status(self.name)
            return status.outcome if status.is_finished else None

        found: Outcome = self.wait("the end of the Job", outcome, patience_s)
        return found


def node_of(pod: Pod) -> str:
    """What the agents call a pod's node."""
    return f"{pod.index}-{pod.uid}"


def tail(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return "\n".join(lines[-15:])


@contextmanager
def pods(
    tmp_path: Path,
    endpoint: str,
    job: str,
    arguments: Sequence[str] = (),
    *,
    nodes: str = "1:3",
    variables: Mapping[str, str] | None = None,
    script: Path = REGRESSION,
    capacity: int | None = None,
) -> Iterator[PodStory]:
    """The Job of k8s/base, which trains `script` with these arguments.

    variables: options of its user. capacity: for how many pods there are nodes; None: for all.
    """
    claim = tmp_path / "claim"
    log_dir = claim / "logs"
    (log_dir / job).mkdir(parents=True, exist_ok=True)
    options = {
        "ELASTICZERO_JOB": job,
        "ELASTICZERO_LOG_DIR": f"{claim_mount(base_job())}/logs",
        "ELASTICZERO_PREEMPTION": "none",
        "ELASTICZERO_SETTLE": f"{SETTLE_S:g}",
        **(variables or {}),
    }
    words = ["run", SCRIPT, *arguments]
    manifest = edited(base_job(), nodes, words, options)
    tester = {"OMP_NUM_THREADS": "1", "TESTER_PAUSE_FILE": str(log_dir / "pause")}
    given = substitutes(endpoint, claim, manifest, script, tester)
    cluster = Cluster(
        tmp_path / "cluster", given, backoff=BACKOFF, unreachable_s=UNREACHABLE_S, capacity=capacity
    )
    told = PodStory(cluster, manifest, job, log_dir, claim)
    with cluster:
        cluster.apply([manifest])
        yield told
        told.look()
    told.check_no_process_is_left()
    left = [pod.memory for pod in cluster.pods() if pod.memory.exists()]
    assert not left, f"volumes left behind: {left}"
