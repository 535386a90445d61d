"""The Job that `elasticzero k8s render` prints, with real agents, on a cluster that plays
Kubernetes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elasticzero.launcher.observability.event_log import EventReader
from elasticzero.ops.kubernetes.agents import CHECKPOINTS
from tests.integration.clusters import PATIENCE_S, REGRESSION, SETTLE_S, JobStory, elasticzero
from tests.support.kubernetes.cluster import Cluster
from tests.support.kubernetes.controller import Backoff, Outcome
from tests.support.kubernetes.image import parse_dockerfile
from tests.support.kubernetes.pod import Pod, Substitutes
from tests.unit.manifests import Manifest, agent_of, agents_of, pod_of

ROOT = Path(__file__).resolve().parents[2]
ETCD_SERVICE = r"[\w.-]*etcd[\w.-]*:2379"
HTTP_PORT = 10_000 + os.getpid() % 20_000
"""Pods listen there, each at an address of its own: agents of other tests may have 9400 of all."""
BACKOFF = Backoff(first_s=0.5, most_s=2.0)
"""Shorter than in Kubernetes, where a pod is replaced after 10 s and more."""
UNREACHABLE_S = 8.0
"""Shorter too: it is 40 s there, and then the 60 s for which a rendered pod tolerates that."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a user renders a Job for."""

    job: str
    script: Path = REGRESSION
    arguments: Sequence[str] = ()
    nodes: str = "1:3"
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables of the agent's environment, each an `--env`."""

    def manifests(self, *flags: str) -> list[Manifest]:
        """What `elasticzero k8s render` prints for it, with agents that listen at `HTTP_PORT`."""
        command = elasticzero(
            *("k8s", "render", "--name", self.job, "--image", "registry.example.com/train:1"),
            *("--nnodes", self.nodes, "--checkpoints", "shared-files", "--output", "json"),
            *(f"--env={name}={value}" for name, value in self.variables.items()),
            *flags,
            *(self.script.name, *self.arguments),
        )
        done = subprocess.run(
            command, cwd=self.script.parent, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        manifests: list[Manifest] = json.loads(done.stdout)["items"]
        agent = agent_of(agents_of(manifests))
        (port,) = agent["ports"]
        port["containerPort"] = HTTP_PORT
        (variable,) = (one for one in agent["env"] if one["name"] == "ELASTICZERO_HTTP_PORT")
        variable["value"] = str(HTTP_PORT)
        return manifests


def substitutes(
    endpoint: str, claim: Path, job: Manifest, variables: Mapping[str, str]
) -> Substitutes:
    """What this machine has in the place of the image, volumes, names and networks."""
    image = parse_dockerfile(
        (ROOT / "k8s" / "Dockerfile").read_text(), {"PATH": os.environ["PATH"]}
    )
    volumes = pod_of(job)["volumes"]
    claims = [
        volume["persistentVolumeClaim"] for volume in volumes if "persistentVolumeClaim" in volume
    ]
    return Substitutes(
        image=image,
        files={
            **{target: ROOT / source for target, source in image.copied.items()},
            "/opt/elasticzero": Path(sys.prefix),
        },
        claims={volume["claimName"]: claim for volume in claims},
        addresses={ETCD_SERVICE: endpoint},
        folder_variables={"/dev/shm": "ELASTICZERO_SNAPSHOT_DIR", "/tmp": "TMPDIR"},
        address_variables=("ELASTICZERO_HTTP_HOST",),
        variables={"GLOO_SOCKET_IFNAME": "lo", **variables},
    )


@dataclass
class PodStory(JobStory):
    """A Job with its pods, and all that their agents have told."""

    cluster: Cluster
    training: Training
    manifests: Sequence[Manifest]
    """What was applied at first."""
    log_dir: Path
    claim: Path
    """Where checkpoints lie, of all jobs."""
    _readers: dict[str, EventReader] = field(default_factory=dict)

    @property
    def job(self) -> str:
        """What the agents and the API server call it."""
        return self.training.job

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
        pod: Pod = self.wait(
            f"a pod of index {index}",
            lambda: next((p for p in self.cluster.live(self.job) if p.index == index), None),
        )
        return pod

    def replacement(self, old: Pod) -> Pod:
        """The pod that takes the place of one that has ended; waits for it."""

        def newer() -> Pod | None:
            pods = self.cluster.pods(self.job)
            later = pods[pods.index(old) + 1 :]
            return next((pod for pod in later if pod.index == old.index), None)

        successor: Pod = self.wait(f"a pod in the place of {old.name}", newer)
        return successor

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
        exit_codes: dict[int, list[int | None]] = {}
        for pod in self.cluster.pods(self.job):
            exit_codes.setdefault(pod.index, []).append(pod.exit_code)
        return exit_codes

    @property
    def is_finished(self) -> bool:
        return self.cluster.status(self.job).is_finished

    def wait_for_end(self, patience_s: float = PATIENCE_S) -> Outcome:
        """How the Job ends, after steps that nothing slows down."""
        self.pause(0.0)

        def outcome() -> Outcome | None:
            status = self.cluster.status(self.job)
            return status.outcome if status.is_finished else None

        ending: Outcome = self.wait("the end of the Job", outcome, patience_s)
        return ending


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
    variables: Mapping[str, str] | None = None,
    script: Path = REGRESSION,
    flags: Sequence[str] = (),
) -> Iterator[PodStory]:
    """A rendered Job of 1 to 3 nodes, which trains `script` with these arguments.

    variables, flags: what its user adds to `elasticzero k8s render`.
    """
    claim = tmp_path / "claim"
    log_dir = claim / "logs"
    (log_dir / job).mkdir(parents=True)
    options = {
        "ELASTICZERO_LOG_DIR": f"{CHECKPOINTS}/logs",
        "ELASTICZERO_PREEMPTION": "none",
        "ELASTICZERO_SETTLE": f"{SETTLE_S:g}",
        **(variables or {}),
    }
    training = Training(job=job, script=script, arguments=arguments, variables=options)
    manifests = training.manifests(*flags)
    tester = {"OMP_NUM_THREADS": "1", "TESTER_PAUSE_FILE": str(log_dir / "pause")}
    stand_ins = substitutes(endpoint, claim, agents_of(manifests), tester)
    cluster = Cluster(tmp_path / "cluster", stand_ins, backoff=BACKOFF, unreachable_s=UNREACHABLE_S)
    told = PodStory(cluster, training, manifests, log_dir, claim)
    with cluster:
        cluster.apply(manifests)
        yield told
        told.look()
    told.check_no_process_is_left()
    left = [pod.memory for pod in cluster.pods() if pod.memory.exists()]
    assert not left, f"volumes left behind: {left}"
