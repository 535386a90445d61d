"""The manifests are valid, and say what the code says: ports, flags, names, exit codes."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from elasticzero.errors import ExitCode
from elasticzero.launcher.cli import main as cli
from elasticzero.launcher.options import table as options
from elasticzero.launcher.options import validation as option_values

VERSIONS = ("1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37")
FOLDERS = ("base", "overlays/example")
PREFIX = "ELASTICZERO_"
Manifest = dict[str, Any]


def kubectl_minor(path: str) -> int:
    command = [path, "version", "--client", "--output=yaml"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    return int(re.sub(r"\D.*", "", yaml.safe_load(out)["clientVersion"]["minor"]))


@pytest.fixture(scope="module", params=FOLDERS)
def manifests(
    request: pytest.FixtureRequest, root: Path, program: Callable[[str], str]
) -> list[Manifest]:
    kubectl = program("kubectl")
    if request.param != "base" and kubectl_minor(kubectl) < 22:
        pytest.skip("overlays need kubectl 1.22 or newer; the base needs nothing newer than 1.20")
    command = [kubectl, "kustomize", str(root / "k8s" / request.param)]
    rendered = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert rendered.returncode == 0, rendered.stderr
    assert "deprecated" not in rendered.stderr
    return list(yaml.safe_load_all(rendered.stdout))


def only(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = (m for m in manifests if m["kind"] == kind and m["metadata"]["name"] == name)
    return found


def pod_of(manifest: Manifest) -> Manifest:
    spec: Manifest = manifest["spec"]["template"]["spec"]
    return spec


def labels_of(manifest: Manifest) -> dict[str, str]:
    labels: dict[str, str] = manifest["spec"]["template"]["metadata"]["labels"]
    return labels


@pytest.fixture
def job(manifests: list[Manifest]) -> Manifest:
    return only(manifests, "Job", "elasticzero")


@pytest.fixture
def etcd(manifests: list[Manifest]) -> Manifest:
    return only(manifests, "StatefulSet", "elasticzero-etcd")


@pytest.fixture
def agent(job: Manifest) -> Manifest:
    (container,) = pod_of(job)["containers"]
    return dict(container)


def environment(agent: Manifest) -> dict[str, str]:
    """What the container sees, with the pod's own fields filled in as a cluster would."""
    fields = {
        "metadata.annotations['batch.kubernetes.io/job-completion-index']": "3",
        "metadata.uid": "d9d8c7b6-0a1b-4c2d-8e3f-001122334455",
        "status.podIP": "10.1.2.3",
    }
    known: dict[str, str] = {}
    for entry in agent["env"]:
        if "value" in entry:
            # Kubernetes fills in $(NAME) only where NAME stands above.
            known[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda m: known[m[1]], entry["value"])
        else:
            known[entry["name"]] = fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
    return known


@pytest.mark.parametrize("version", VERSIONS)
def test_strictly_valid(manifests: list[Manifest], version: str) -> None:
    for manifest in manifests:
        kubernetes_validate.validate(manifest, version, strict=True)


def test_the_newest_schema_is_tested() -> None:
    newest = ".".join(kubernetes_validate.latest_version().split(".")[:2])
    assert newest in VERSIONS


def test_the_agent_understands_its_command_line(
    agent: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(agent).items():
        monkeypatch.setenv(name, value)
    args = cli.build_parser().parse_args(agent["args"])
    assert args.command == "run"
    assert args.host == "10.1.2.3"
    assert args.checkpoint_dir == f"/checkpoints/{args.job}"
    assert args.http_port == options.DEFAULT_HTTP_PORT
    least, most = option_values.parse_nnodes(args.nnodes)
    assert least < most
    assert option_values.check_name(args.node_name, "--node-name").endswith("001122334455")


def test_the_image_is_this_version(agent: Manifest, root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert agent["image"] == f"elasticzero:{project['version']}"


def test_every_variable_is_one_of_the_launchers(agent: Manifest) -> None:
    ours = {name for name in environment(agent) if name.startswith(PREFIX)}
    assert {f"{PREFIX}ETCD", f"{PREFIX}JOB", f"{PREFIX}NODE_NAME"} <= ours
    assert ours <= {option.variable for option in options.RUN_OPTIONS}


def test_nodes_and_pods_are_as_many(job: Manifest, agent: Manifest) -> None:
    _, most = option_values.parse_nnodes(environment(agent)[f"{PREFIX}NNODES"])
    assert job["spec"]["parallelism"] == job["spec"]["completions"] == most
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["successPolicy"] == {"rules": [{"succeededCount": 1}]}


def test_exit_codes_that_end_the_job(job: Manifest, agent: Manifest) -> None:
    fail, ignore = job["spec"]["podFailurePolicy"]["rules"]
    assert fail["action"] == "FailJob"
    assert fail["onExitCodes"]["operator"] == "In"
    assert fail["onExitCodes"]["containerName"] == agent["name"]
    assert set(fail["onExitCodes"]["values"]) == {ExitCode.USAGE, ExitCode.FAILED}
    assert ignore["action"] == "Ignore"
    assert ignore["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert pod_of(job)["restartPolicy"] == "Never"


def test_every_port_is_the_agents(
    manifests: list[Manifest], job: Manifest, agent: Manifest, root: Path
) -> None:
    port = options.DEFAULT_HTTP_PORT
    assert agent["ports"] == [{"name": "http", "containerPort": port}]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert agent[probe]["httpGet"] == {"path": "/healthz", "port": "http"}
    annotations = job["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(port)
    service = only(manifests, "Service", "elasticzero-agents")
    assert service["spec"]["ports"] == [{"name": "http", "port": port, "targetPort": "http"}]
    policy = only(manifests, "NetworkPolicy", "elasticzero-agents")
    assert {"ports": [{"port": port}]} in policy["spec"]["ingress"]
    assert f"\nEXPOSE {port}\n" in (root / "k8s" / "Dockerfile").read_text()


def test_nobody_kills_an_agent_that_waits_for_etcd(agent: Manifest) -> None:
    probe = agent["startupProbe"]
    allowed_s = probe["periodSeconds"] * probe["failureThreshold"]
    assert allowed_s > float(environment(agent)[f"{PREFIX}JOIN_TIMEOUT"])


def test_the_agent_has_left_before_its_pod_is_killed(job: Manifest, agent: Manifest) -> None:
    grace_s = float(environment(agent)[f"{PREFIX}GRACE"])
    assert 0 < grace_s <= pod_of(job)["terminationGracePeriodSeconds"] - 3


def test_every_etcd_endpoint_is_a_member(etcd: Manifest, agent: Manifest) -> None:
    name, service = etcd["metadata"]["name"], etcd["spec"]["serviceName"]
    hosts = [f"{name}-{index}.{service}" for index in range(etcd["spec"]["replicas"])]
    (container,) = pod_of(etcd)["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    endpoints = environment(agent)[f"{PREFIX}ETCD"].split(",")
    assert endpoints == [f"{host}:{ports['client']}" for host in hosts]
    flags = dict(argument.removeprefix("--").split("=", 1) for argument in container["args"])
    assert flags["initial-cluster"].split(",") == [
        f"{host.split('.')[0]}=http://{host}:{ports['peer']}" for host in hosts
    ]
    assert flags["listen-metrics-urls"].endswith(f":{ports['metrics']}")
    assert flags["advertise-client-urls"] == f"http://$(POD_NAME).{service}:{ports['client']}"


def selectors(manifests: list[Manifest]) -> Iterator[tuple[str, dict[str, str]]]:
    for manifest in manifests:
        spec = manifest.get("spec", {})
        match manifest["kind"]:
            case "Service":
                yield manifest["metadata"]["name"], spec["selector"]
            case "PodDisruptionBudget" | "StatefulSet":
                yield manifest["metadata"]["name"], spec["selector"]["matchLabels"]
            case "NetworkPolicy":
                yield manifest["metadata"]["name"], spec["podSelector"]["matchLabels"]


def test_selectors_find_their_pods(
    manifests: list[Manifest], job: Manifest, etcd: Manifest
) -> None:
    pods = {"elasticzero-agents": labels_of(job), "elasticzero-etcd": labels_of(etcd)}
    found = list(selectors(manifests))
    assert len(found) == 6
    for name, selector in found:
        assert selector == pods[name]


def test_snapshots_fit_in_the_pods_memory(job: Manifest, agent: Manifest) -> None:
    volumes = {volume["name"]: volume for volume in pod_of(job)["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in agent["volumeMounts"]}
    shared = volumes[mounts["/dev/shm"]]["emptyDir"]
    assert shared["medium"] == "Memory"
    limit = agent["resources"]["limits"]["memory"]
    assert int(shared["sizeLimit"].removesuffix("Gi")) < int(limit.removesuffix("Gi"))
    assert mounts["/checkpoints"] in volumes


def test_nothing_runs_as_root(job: Manifest, etcd: Manifest, root: Path) -> None:
    for manifest in (job, etcd):
        pod = pod_of(manifest)
        assert pod["securityContext"]["runAsNonRoot"]
        for container in pod["containers"]:
            assert not container["securityContext"]["allowPrivilegeEscalation"]
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    user = pod_of(job)["securityContext"]["runAsUser"]
    assert f"\nUSER {user}:{user}\n" in (root / "k8s" / "Dockerfile").read_text()
