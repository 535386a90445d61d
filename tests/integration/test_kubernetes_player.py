"""The cluster that plays Kubernetes treats real processes as kubelets and their runtimes do."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from elasticzero.processes import is_alive
from tests.support.deadlines import patience
from tests.support.kubernetes.cluster import Cluster
from tests.support.kubernetes.controller import Backoff
from tests.support.kubernetes.image import Image
from tests.support.kubernetes.job import Invalid
from tests.support.kubernetes.pod import Pod, Substitutes

pytestmark = pytest.mark.timeout(60)

PATIENCE_S = 30.0
SLEEP = "import time; time.sleep(600)"
LEAVES = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
pathlib.Path("/data/ready").touch()
while True:
    time.sleep(0.01)
"""
FORKS = """
import os, pathlib, subprocess, sys
words = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(words, start_new_session=True)
pathlib.Path("/data/child").write_text(str(child.pid))
"""
SERVES = """
import http.server, os, pathlib
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if pathlib.Path("/data/well").exists() else 503)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.HTTPServer((os.environ["POD_IP"], 9400), Handler).serve_forever()
"""
RULES = {
    "rules": [
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [64]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
}


def job(code: str, *, size: int = 1, grace_s: int = 20, **container: Any) -> dict[str, Any]:
    """A Job whose pods run Python code; /data is a volume that outlives them."""
    command = [sys.executable, "-c", code]
    ip = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    main = {
        "name": "main",
        "command": command,
        "env": [ip],
        "volumeMounts": [
            {"name": "data", "mountPath": "/data"},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
        **container,
    }
    volumes = [
        {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
    ]
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace_s,
        "containers": [main],
        "volumes": volumes,
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "toy"},
        "spec": {
            "completionMode": "Indexed",
            "completions": size,
            "parallelism": size,
            "backoffLimitPerIndex": 10,
            "podFailurePolicy": RULES,
            "successPolicy": {"rules": [{"succeededCount": 1}]},
            "template": {"spec": pod},
        },
    }


@contextmanager
def cluster_of(tmp_path: Path, manifest: Mapping[str, Any], **options: Any) -> Iterator[Cluster]:
    data = tmp_path / "data"
    stand_ins = Substitutes(image=Image(), files={}, claims={"data": data})
    options = {"backoff": Backoff(first_s=0.1, most_s=0.1), "unreachable_s": 1.0, **options}
    with Cluster(tmp_path / "cluster", stand_ins, **options) as cluster:
        cluster.apply([manifest])
        yield cluster


def wait(cluster: Cluster, what: str, so: Callable[[], Any]) -> Any:
    deadline_s = time.monotonic() + patience(PATIENCE_S)
    while not (value := so()):
        cluster.check()
        assert time.monotonic() < deadline_s, "\n".join([what, *cluster.events])
        time.sleep(0.02)
    return value


def first_pod(cluster: Cluster) -> Pod:
    pod: Pod = wait(
        cluster,
        "a pod",
        lambda: next((p for p in cluster.pods() if p.phase == "Running"), None),
    )
    return pod


def running(cluster: Cluster) -> int:
    """How many pods run."""
    return sum(pod.phase == "Running" for pod in cluster.pods())


def ended(cluster: Cluster, pod: Pod) -> int | None:
    wait(cluster, "its end", lambda: not pod.state.is_live)
    return pod.exit_code


def condition(cluster: Cluster) -> str:
    """How the Job ended."""
    wait(cluster, "the end of the Job", lambda: cluster.status("toy").is_finished)
    outcome = cluster.status("toy").outcome
    assert outcome is not None
    return outcome.condition


def ready(tmp_path: Path) -> Path:
    return tmp_path / "data" / "ready"


def test_exit_codes_decide_the_job(tmp_path: Path) -> None:
    for code, condition_type in ((0, "Complete"), (64, "Failed")):
        with cluster_of(tmp_path, job(f"import sys; sys.exit({code})")) as cluster:
            assert condition(cluster) == condition_type
            assert [pod.exit_code for pod in cluster.pods()] == [code]


def test_a_pod_of_a_job_that_is_done_gets_sigterm_and_time(tmp_path: Path) -> None:
    code = f"""
import os, pathlib, sys, time
if os.environ["JOB_COMPLETION_INDEX"] == "0":
    while not pathlib.Path("/data/ready").exists():
        time.sleep(0.05)
    sys.exit(0)
{LEAVES}
"""
    with cluster_of(tmp_path, job(code, size=2)) as cluster:
        assert condition(cluster) == "Complete"
        assert [pod.exit_code for pod in cluster.pods()] == [0, 75]


def test_a_preempted_pod_leaves_and_is_replaced_uncounted(tmp_path: Path) -> None:
    with cluster_of(tmp_path, job(LEAVES)) as cluster:
        pod = first_pod(cluster)
        wait(cluster, "its handler", ready(tmp_path).exists)
        cluster.preempt(pod)
        assert ended(cluster, pod) == 75
        wait(cluster, "a replacement", lambda: len(cluster.pods()) == 2)
        old, new = cluster.pods()
        assert (new.index, new.uid != old.uid, new.fields.ip != old.fields.ip) == (0, True, True)
        assert new.created_s >= old.finished_s
        assert cluster.status("toy").failed == 0
        cluster.delete_pod(new)
        wait(cluster, "another", lambda: len(cluster.pods()) == 3)
        assert cluster.status("toy").failed == 1


def test_a_first_process_without_a_handler_outlives_sigterm(tmp_path: Path) -> None:
    """The kernel sends the first process of a container no signal that it does not handle."""
    with cluster_of(tmp_path, job(SLEEP, grace_s=1)) as cluster:
        pod = first_pod(cluster)
        assert pod.container is not None
        wait(cluster, "the command", lambda: pod.container and len(pod.container.pids) > 1)
        time.sleep(0.5)
        cluster.evict(pod)
        deleted_s = time.monotonic()
        assert ended(cluster, pod) == 137
        assert time.monotonic() - deleted_s >= 0.9


def test_what_a_container_leaves_behind_is_killed(tmp_path: Path) -> None:
    with cluster_of(tmp_path, job(FORKS)) as cluster:
        assert condition(cluster) == "Complete"
    assert not is_alive(int((tmp_path / "data" / "child").read_text()))


def test_volumes_in_memory_go_with_their_pod(tmp_path: Path) -> None:
    code = 'import pathlib; pathlib.Path("/data/ready").write_text("$(MEMORY)")'
    env = [{"name": "MEMORY", "value": "/dev/shm/x"}]
    with cluster_of(tmp_path, job(code, env=env)) as cluster:
        assert condition(cluster) == "Complete"
        (pod,) = cluster.pods()
    assert ready(tmp_path).read_text() == str(pod.memory / "memory" / "x")
    assert not pod.memory.exists()


def test_probes_make_ready_and_kill(tmp_path: Path) -> None:
    probe = {"httpGet": {"path": "/healthz", "port": 9400}, "periodSeconds": 1}
    probes: dict[str, Any] = {
        "startupProbe": {**probe, "failureThreshold": 20},
        "readinessProbe": {**probe, "failureThreshold": 1},
        "livenessProbe": {**probe, "failureThreshold": 2},
    }
    with cluster_of(tmp_path, job(SERVES, grace_s=1, **probes)) as cluster:
        pod = first_pod(cluster)
        assert not pod.ready
        well = tmp_path / "data" / "well"
        well.touch()
        wait(cluster, "readiness", lambda: pod.ready)
        well.unlink()
        wait(cluster, "no readiness", lambda: not pod.ready)
        assert ended(cluster, pod) == 137
        assert any("its liveness probe failed" in event for event in cluster.events)
        wait(cluster, "a replacement", lambda: len(cluster.pods()) == 2)


def test_a_lost_node_says_nothing_and_its_pod_comes_back_late(tmp_path: Path) -> None:
    with cluster_of(tmp_path, job(LEAVES), unreachable_s=1.5) as cluster:
        pod = first_pod(cluster)
        pids = pod.container.pids if pod.container is not None else []
        lost_s = time.monotonic()
        cluster.lose_node(pod)
        wait(cluster, "its processes' ends", lambda: not any(map(is_alive, pids)))
        assert (pod.phase, len(cluster.pods())) == ("Running", 1)
        wait(cluster, "a replacement", lambda: len(cluster.pods()) == 2)
        assert time.monotonic() - lost_s >= 1.5
        assert (pod.phase, pod.exit_code) == ("Failed", None)
        assert cluster.status("toy").failed == 0


def test_a_node_that_shuts_down_fails_its_pod_whatever_it_exits_with(tmp_path: Path) -> None:
    """And its grace is what the kubelet grants, where that is less than the pod's own."""
    code = LEAVES.replace("sys.exit(75)", "sys.exit(0)")
    with cluster_of(tmp_path, job(code)) as cluster:
        pod = first_pod(cluster)
        wait(cluster, "its handler", ready(tmp_path).exists)
        cluster.shut_down_node(pod, grace_s=5.0)
        assert ended(cluster, pod) == 0
        assert pod.phase == "Failed"
        wait(cluster, "a replacement", lambda: len(cluster.pods()) == 2)
        assert cluster.status("toy").outcome is None


def test_pods_wait_where_there_is_no_node(tmp_path: Path) -> None:
    with cluster_of(tmp_path, job(LEAVES, size=2), capacity=1) as cluster:
        first_pod(cluster)
        time.sleep(0.3)
        assert sorted(pod.phase for pod in cluster.pods()) == ["Pending", "Running"]
        cluster.capacity = 2
        wait(cluster, "both", lambda: running(cluster) == 2)


def test_suspended_and_scaled_jobs(tmp_path: Path) -> None:
    """A pod may get its SIGTERM before it handles any, and is killed after its grace then."""
    with cluster_of(tmp_path, job(LEAVES, size=2, grace_s=1)) as cluster:
        wait(cluster, "both", lambda: running(cluster) == 2)
        with pytest.raises(Invalid, match="together"):
            cluster.patch("toy", completions=3)
        cluster.patch("toy", parallelism=3, completions=3)
        wait(cluster, "three pods", lambda: len(cluster.live("toy")) == 3)
        cluster.patch("toy", suspend=True)
        wait(cluster, "no pod", lambda: not cluster.live("toy"))
        assert cluster.status("toy").suspended
        cluster.patch("toy", suspend=False, parallelism=1, completions=1)
        wait(cluster, "one pod", lambda: [pod.index for pod in cluster.live("toy")] == [0])
        assert cluster.status("toy").failed == 0


def test_a_deleted_job_takes_its_pods_along_and_may_come_again(tmp_path: Path) -> None:
    manifest = job(LEAVES)
    label = "batch.kubernetes.io/controller-uid"
    with cluster_of(tmp_path, manifest) as cluster:
        first = first_pod(cluster)
        with pytest.raises(Invalid, match="there is a Job toy"):
            cluster.apply([manifest])
        cluster.delete_pod(first)
        wait(cluster, "a replacement", lambda: len(cluster.pods()) == 2)
        assert cluster.pods()[1].fields.labels[label] == first.fields.labels[label]
        cluster.delete("toy")
        wait(cluster, "its end", lambda: not cluster.has("toy"))
        assert not cluster.pods()
        cluster.apply([manifest])
        assert first_pod(cluster).fields.labels[label] != first.fields.labels[label]


def test_files_of_config_maps(tmp_path: Path) -> None:
    manifest = job('exec(open("/scripts/run.py").read())')
    spec = manifest["spec"]["template"]["spec"]
    spec["volumes"].append({"name": "scripts", "configMap": {"name": "scripts"}})
    (container,) = spec["containers"]
    container["volumeMounts"].append({"name": "scripts", "mountPath": "/scripts"})
    scripts = {"run.py": "import sys; sys.exit(0)"}
    config = {"kind": "ConfigMap", "metadata": {"name": "scripts"}, "data": scripts}
    stand_ins = Substitutes(image=Image(), files={}, claims={"data": tmp_path / "data"})
    with Cluster(tmp_path / "cluster", stand_ins) as cluster:
        cluster.apply([config, manifest])
        assert condition(cluster) == "Complete"


def test_what_the_player_does_not_know_ends_it_with_an_error(tmp_path: Path) -> None:
    manifest = job(SLEEP)
    manifest["spec"]["template"]["spec"]["volumes"][0] = {"name": "data", "hostPath": {"path": "/"}}
    with cluster_of(tmp_path, manifest) as cluster, pytest.raises(Invalid, match="hostPath"):
        wait(cluster, "an error", lambda: False)


def test_nothing_is_left_when_the_cluster_ends(tmp_path: Path) -> None:
    with cluster_of(tmp_path, job(LEAVES, size=2)) as cluster:
        wait(cluster, "both", lambda: running(cluster) == 2)
        pods = cluster.pods()
        pids = [pid for pod in pods if pod.container is not None for pid in pod.container.pids]
    assert pids and not any(map(is_alive, pids))
    assert not any(pod.memory.exists() or pod.directory.exists() for pod in pods)
