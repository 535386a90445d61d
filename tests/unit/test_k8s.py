"""The manifests in k8s/, and other renders, are valid and say what the code says; what kustomize
makes of k8s/ is what the command renders."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import jsonschema
import kubernetes_validate
import pytest
import yaml

from elasticzero.cli import main as cli
from elasticzero.errors import ExitCode
from elasticzero.launcher.options import table as options
from elasticzero.launcher.options import validation as option_values
from elasticzero.ops.kubernetes.clouds import CLOUDS, GPU, HOST, ZONE
from tests.unit.manifests import (
    Manifest,
    agent_of,
    agents_of,
    environment,
    flags_of,
    job_template,
    labels_of,
    only,
    pod_of,
    workloads,
)
from tests.unit.renders import (
    CASES,
    FOLDERS,
    OTHER_RENDERS,
    PLACES,
    Render,
    arguments_of,
    kustomized,
    prefixed,
    printed,
    validate,
)
from tools import manifests as tool

VERSIONS = ("1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37")
VALIDATIONS = [
    (place, version)
    for place in PLACES
    for version in (VERSIONS if place not in OTHER_RENDERS else (VERSIONS[0], VERSIONS[-1]))
]
PREFIX = "ELASTICZERO_"
SCHEMAS = {
    "jobset.x-k8s.io": "jobset",
    "kueue.x-k8s.io": "kueue",
    "trainer.kubeflow.org": "trainer",
}
MADE_BY_HAND = {
    ("Secret", "elasticzero-token"),
    ("Secret", "elasticzero-etcd-tls"),
    ("Secret", "elasticzero-etcd-client-tls"),
    ("ServiceAccount", "trainer"),
}
"""What the manifests refer to and do not hold; docs/kubernetes.md says how each is made."""


@pytest.fixture(scope="module")
def render(
    root: Path, program: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Render:
    """Reads a place of k8s/ as kubectl does, or renders it; each once."""

    @cache
    def made(place: str) -> list[Manifest]:
        if place in FOLDERS:
            return kustomized(root / "k8s" / place, program)
        path = root / "k8s" / place
        if place in OTHER_RENDERS:
            path = tmp_path_factory.mktemp("render") / "manifests.yaml"
            path.write_text(printed(arguments_of(place)))
        return list(yaml.safe_load_all(path.read_text()))

    return made


@pytest.fixture(scope="module", params=CASES, ids=" ".join)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    place, how = request.param
    return place, how


@pytest.fixture(scope="module")
def manifests(
    case: tuple[str, str],
    render: Render,
    root: Path,
    program: Callable[[str], str],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[Manifest]:
    """A place as it is, or in an overlay with a prefix."""
    place, how = case
    if how == "plain":
        return render(place)
    return prefixed(place, root, tmp_path_factory.mktemp("overlay"), program)


@pytest.fixture
def job(manifests: list[Manifest]) -> Manifest:
    return agents_of(json.loads(json.dumps(manifests)))


@pytest.fixture
def agent(job: Manifest) -> Manifest:
    return agent_of(job)


@pytest.fixture
def etcd(manifests: list[Manifest]) -> Manifest:
    return only(manifests, "StatefulSet", "-etcd")


def test_every_file_is_what_the_command_renders() -> None:
    """`make manifests` writes them."""
    assert tool.stale_files(write=False) == []


def test_a_changed_file_is_stale(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tool, "FOLDER", tmp_path)
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    assert len(tool.stale_files(write=True)) == 29
    assert tool.stale_files(write=False) == []
    (tmp_path / "base" / "agents.yaml").write_text("kind: Job\n")
    for folder in ("tls", "gone"):
        (tmp_path / "overlays" / folder).mkdir(exist_ok=True)
        (tmp_path / "overlays" / folder / "old.yaml").write_text("")
    stale = ["base/agents.yaml", "overlays/gone/old.yaml", "overlays/tls/old.yaml"]
    assert tool.stale_files(write=False) == stale
    tool.stale_files(write=True)
    assert tool.stale_files(write=False) == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_kustomize_makes_what_the_command_prints(folder: str, render: Render) -> None:
    made, rendered = (
        {(m["apiVersion"], m["kind"], m["metadata"]["name"]): m for m in manifests}
        for manifests in (
            render(folder),
            yaml.safe_load_all(printed(tool.command_of(folder))),
        )
    )
    assert len(rendered) >= 9
    assert made == rendered


def test_overlays_are_small(root: Path) -> None:
    """A person is to read what differs from the base."""
    for folder in tool.OVERLAYS:
        patches = (root / "k8s" / folder / "patches.yaml").read_text()
        assert 20 < len(patches.splitlines()) < 150, folder


@pytest.mark.parametrize(("place", "version"), VALIDATIONS)
def test_strictly_valid(place: str, version: str, render: Render) -> None:
    for manifest in render(place):
        if manifest["apiVersion"].partition("/")[0] not in SCHEMAS:
            validate(manifest, version)
        if (embedded := job_template(manifest)) is not None:
            validate(embedded, version)
        if manifest["kind"] == "TrainJob":
            container = {"name": "node", "env": manifest["spec"]["trainer"]["env"]}
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "node"}}
            pod["spec"] = {"containers": [container]}
            validate(pod, version)


@pytest.mark.parametrize("place", PLACES)
def test_custom_resources_fit_their_schemas(place: str, render: Render, root: Path) -> None:
    for manifest in render(place):
        group = manifest["apiVersion"].partition("/")[0]
        if group in SCHEMAS:
            jsonschema.validate(manifest, schema(root, SCHEMAS[group]))
        if manifest["kind"] == "TrainingRuntime":
            inner = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {}}
            inner["spec"] = manifest["spec"]["template"]["spec"]
            jsonschema.validate(inner, schema(root, "jobset"))


def schema(root: Path, name: str) -> Manifest:
    path = root / "tests" / "fixtures" / "kubernetes" / f"{name}.json"
    document: Manifest = json.loads(path.read_text())
    assert "Apache-2.0" in document["$comment"]
    return document


@pytest.mark.parametrize("name", SCHEMAS.values())
def test_the_schemas_refuse_what_they_do_not_name(root: Path, name: str) -> None:
    document = schema(root, name)
    jsonschema.Draft202012Validator.check_schema(document)
    wrong = {"apiVersion": "v1", "kind": "Queue", "metadata": {}, "spec": {"surplus": 1}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, document)


def test_the_newest_schema_is_tested() -> None:
    newest = ".".join(kubernetes_validate.latest_version().split(".")[:2])
    assert newest in VERSIONS


def test_the_agent_understands_its_command_line(
    agent: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(agent).items():
        monkeypatch.setenv(name, value)
    args = cli.parse(agent["args"])
    assert args.command == "run"
    assert args.host == "10.1.2.3"
    assert args.http_port == options.DEFAULT_HTTP_PORT
    assert args.launch_id.startswith("0d9e8f7a")
    assert args.zone == "zone-a"
    assert args.checkpoint_dir is None or args.checkpoint_dir.endswith(f"/{args.job}")
    least, most = option_values.parse_nnodes(args.nnodes)
    assert least < most
    assert option_values.check_name(args.node_name, "--node-name").endswith("001122334455")
    assert option_values.check_name(args.job, "--job")
    option_values.parse_common_options(args)


def test_the_image_is_this_version(agent: Manifest, root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert agent["image"].rpartition("/")[2] == f"elasticzero:{project['version']}"


def test_every_variable_is_one_of_the_launchers(agent: Manifest) -> None:
    ours = {name for name in environment(agent) if name.startswith(PREFIX)}
    assert {f"{PREFIX}ETCD", f"{PREFIX}JOB", f"{PREFIX}NODE_NAME"} <= ours
    secret = {"ELASTICZERO_TOKEN"}
    assert ours - secret <= {option.variable for option in options.RUN_OPTIONS}


def test_nodes_and_pods_are_as_many(job: Manifest, agent: Manifest) -> None:
    """Kueue admits as many pods as there is room for, from MIN on."""
    least, most = option_values.parse_nnodes(environment(agent)[f"{PREFIX}NNODES"])
    queued = "kueue.x-k8s.io/queue-name" in job["metadata"].get("labels", {})
    assert job["spec"]["parallelism"] == (least if queued else most)
    assert job["spec"]["completions"] == most
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
    assert job["spec"]["podReplacementPolicy"] == "Failed"
    assert pod_of(job)["restartPolicy"] == "Never"


def test_every_port_is_the_agents(
    manifests: list[Manifest], job: Manifest, agent: Manifest, root: Path
) -> None:
    port = options.DEFAULT_HTTP_PORT
    assert agent["ports"] == [{"name": "http", "containerPort": port}]
    is_plain = environment(agent)[f"{PREFIX}TLS"] == "off"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        scheme = {} if is_plain else {"scheme": "HTTPS"}
        assert agent[probe]["httpGet"] == {"path": "/healthz", "port": "http", **scheme}
    annotations = job["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(port)
    assert annotations["prometheus.io/scheme"] == ("http" if is_plain else "https")
    service = only(manifests, "Service", "-agents")
    of_job = {**annotations, "prometheus.io/path": "/metrics/job"}
    assert annotations["prometheus.io/path"] == "/metrics"
    assert service["metadata"]["annotations"] == of_job, "each has one path"
    assert service["spec"]["ports"] == [{"name": "http", "port": port, "targetPort": "http"}]
    policy = only(manifests, "NetworkPolicy", "-agents")
    of_run, of_monitoring = policy["spec"]["ingress"]
    assert "ports" not in of_run, "the kernel chooses most of them"
    assert of_monitoring["ports"] == [{"protocol": "TCP", "port": port}]
    assert f"\nEXPOSE {port}\n" in (root / "k8s" / "Dockerfile").read_text()


def test_nobody_kills_an_agent_that_waits_for_etcd(agent: Manifest) -> None:
    probe = agent["startupProbe"]
    allowed_s = probe["periodSeconds"] * probe["failureThreshold"]
    assert allowed_s > float(environment(agent)[f"{PREFIX}JOIN_TIMEOUT"])


def test_the_agent_has_left_before_its_pod_is_killed(job: Manifest, agent: Manifest) -> None:
    grace_s = float(environment(agent)[f"{PREFIX}GRACE"])
    assert 0 < grace_s <= pod_of(job)["terminationGracePeriodSeconds"] - 3


@pytest.mark.parametrize(
    ("folder", "period_s"), [("gke-spot", 15), ("eks-spot", 110), ("aks-spot", 30), ("on-prem", 60)]
)
def test_the_grace_is_what_the_machines_give(
    root: Path, render: Render, folder: str, period_s: int
) -> None:
    """docs/preemption.md has the same numbers."""
    job = agents_of(render(f"overlays/{folder}"))
    assert pod_of(job)["terminationGracePeriodSeconds"] == period_s
    grace = environment(agent_of(job))[f"{PREFIX}GRACE"]
    if folder != "on-prem":
        row = rf"\| .*{folder.partition('-')[0].upper()} spot.* \| {period_s} \| {grace} \|"
        assert re.search(row, (root / "docs" / "preemption.md").read_text())


def test_every_etcd_endpoint_is_a_member(
    manifests: list[Manifest], etcd: Manifest, agent: Manifest
) -> None:
    name, service = etcd["metadata"]["name"], etcd["spec"]["serviceName"]
    assert only(manifests, "Service", "-etcd")["metadata"]["name"] == service
    hosts = [f"{name}-{index}.{service}" for index in range(etcd["spec"]["replicas"])]
    (container,) = pod_of(etcd)["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    flags = flags_of(container)
    scheme = flags["listen-client-urls"].partition("://")[0]
    agents_scheme = "https://" if scheme == "https" else ""
    endpoints = environment(agent)[f"{PREFIX}ETCD"].split(",")
    assert endpoints == [f"{agents_scheme}{host}:{ports['client']}" for host in hosts]
    assert flags["initial-cluster"].split(",") == [
        f"{host.split('.')[0]}={scheme}://{host}:{ports['peer']}" for host in hosts
    ]
    assert flags["name"] == "pod-3"
    assert flags["listen-metrics-urls"].endswith(f":{ports['metrics']}")
    for kind in ("client", "peer", "metrics"):
        listening = urlsplit(flags[f"listen-{kind}-urls"])
        assert (listening.hostname, listening.port) == ("::", ports[kind]), "also IPv6 alone"
    assert flags["advertise-client-urls"] == f"{scheme}://pod-3.{service}:{ports['client']}"
    assert not [n for n in environment(container) if n.startswith("ETCD_")], "options of etcd"
    for cron_job in (m for m in manifests if m["kind"] == "CronJob"):
        asked = flags_of(agent_of(job_template(cron_job) or {}))["endpoints"].split(",")
        any_member = f"{agents_scheme}{service}:{ports['client']}"
        backup = cron_job["metadata"]["name"].endswith("-backup")
        assert asked == ([any_member] if backup else endpoints)


def test_no_page_in_a_browser_can_write_to_etcd(etcd: Manifest) -> None:
    assert flags_of(agent_of(etcd))["enable-grpc-gateway"] == "false"


def test_etcd_is_kept_small(manifests: list[Manifest], etcd: Manifest) -> None:
    flags = flags_of(agent_of(etcd))
    assert flags["auto-compaction-mode"] == "periodic"
    assert flags["auto-compaction-retention"] == "10m"
    assert int(flags["quota-backend-bytes"]) == 2 << 30
    defrag = job_template(only(manifests, "CronJob", "-defrag"))
    assert defrag is not None
    assert agent_of(defrag)["args"][-1] == "defrag"


def test_etcd_runs_on_as_many_machines_as_there_are(etcd: Manifest) -> None:
    """One machine is enough, and several are used."""
    affinity = pod_of(etcd)["affinity"]["podAntiAffinity"]
    assert list(affinity) == ["preferredDuringSchedulingIgnoredDuringExecution"]
    (wish,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    assert wish["podAffinityTerm"]["topologyKey"] == HOST
    (zones,) = pod_of(etcd)["topologySpreadConstraints"]
    assert zones["whenUnsatisfiable"] == "ScheduleAnyway"


def test_agents_lie_evenly_in_the_zones(job: Manifest) -> None:
    (zones,) = pod_of(job)["topologySpreadConstraints"]
    assert zones["topologyKey"] == ZONE
    assert zones["maxSkew"] == 1
    assert zones["whenUnsatisfiable"] == "ScheduleAnyway"
    assert zones["labelSelector"]["matchLabels"].items() <= labels_of(job).items()


def test_evictions_leave_enough(manifests: list[Manifest], agent: Manifest) -> None:
    least, _ = option_values.parse_nnodes(environment(agent)[f"{PREFIX}NNODES"])
    budgets = [m for m in manifests if m["kind"] == "PodDisruptionBudget"]
    of_etcd = [b for b in budgets if b["metadata"]["name"].endswith("-etcd")]
    (of_agents,) = [b for b in budgets if b not in of_etcd]
    assert of_agents["spec"]["minAvailable"] == least
    members = only(manifests, "StatefulSet")["spec"]["replicas"]
    assert [b["spec"]["maxUnavailable"] for b in of_etcd] == ([1] if members > 1 else [])


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
    selected = list(selectors(manifests))
    assert len(selected) >= 6
    for name, selector in selected:
        target, other = (etcd, job) if name.endswith("-etcd") else (job, etcd)
        assert selector.items() <= labels_of(target).items()
        assert not selector.items() <= labels_of(other).items()


def test_etcd_is_open_to_its_clients_only(
    manifests: list[Manifest], job: Manifest, etcd: Manifest
) -> None:
    clients, peers, metrics = only(manifests, "NetworkPolicy", "-etcd")["spec"]["ingress"]
    allowed = [rule["podSelector"]["matchLabels"] for rule in clients["from"]]
    pods = [labels_of(job)]
    pods += [labels_of(job_template(m) or {}) for m in manifests if m["kind"] == "CronJob"]
    for labels in pods:
        assert any(selector.items() <= labels.items() for selector in allowed)
        assert {"protocol": "TCP", "port": 2379} in clients["ports"]
    (client_labels,) = (rule["podSelector"]["matchLabels"] for rule in peers["from"])
    assert client_labels.items() <= labels_of(etcd).items()
    assert {port["port"] for port in peers["ports"]} == {2379, 2380}
    assert metrics["ports"] == [{"protocol": "TCP", "port": 2381}]
    (watching,) = metrics["from"]
    assert watching["namespaceSelector"]["matchLabels"] == {
        "kubernetes.io/metadata.name": "monitoring"
    }


def references(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """The kind and name of each object that a pod needs."""
    pod = pod_of(manifest)
    if "serviceAccountName" in pod:
        yield "ServiceAccount", pod["serviceAccountName"]
    for volume in pod.get("volumes", []):
        if "configMap" in volume:
            yield "ConfigMap", volume["configMap"]["name"]
        if "secret" in volume:
            yield "Secret", volume["secret"]["secretName"]
        if "persistentVolumeClaim" in volume:
            yield "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]
    for container in pod["containers"]:
        for entry in container.get("env", []):
            source = entry.get("valueFrom", {})
            if "configMapKeyRef" in source:
                yield "ConfigMap", source["configMapKeyRef"]["name"]
            if "secretKeyRef" in source:
                yield "Secret", source["secretKeyRef"]["name"]


def test_what_pods_need_is_there(manifests: list[Manifest], root: Path) -> None:
    have = {(m["kind"], m["metadata"]["name"]) for m in manifests}
    assert len(have) == len(manifests), "two objects of one name"
    page = (root / "docs" / "kubernetes.md").read_text()
    for workload in workloads(manifests):
        for needed in references(workload):
            if needed not in have:
                assert needed in MADE_BY_HAND
                assert f"`{needed[1]}`" in page
    for manifest in manifests:
        if manifest["kind"] == "TrainJob":
            ref = manifest["spec"]["runtimeRef"]
            assert (ref["kind"], ref["name"]) in have
        if manifest["kind"] == "LocalQueue":
            assert ("ClusterQueue", manifest["spec"]["clusterQueue"]) in have
            label = only(manifests, "Job")["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
            assert label == manifest["metadata"]["name"]
        if manifest["kind"] == "ClusterQueue":
            (group,) = manifest["spec"]["resourceGroups"]
            assert ("ResourceFlavor", group["flavors"][0]["name"]) in have


def test_volumes_and_mounts_belong_together(manifests: list[Manifest]) -> None:
    for workload in workloads(manifests):
        pod = pod_of(workload)
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        claims = workload["spec"].get("volumeClaimTemplates", [])
        volumes |= {claim["metadata"]["name"] for claim in claims}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container.get("volumeMounts", [])} == volumes


def test_snapshots_fit_in_the_pods_memory(job: Manifest, agent: Manifest) -> None:
    volumes = {volume["name"]: volume for volume in pod_of(job)["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in agent["volumeMounts"]}
    shared = volumes[mounts["/dev/shm"]]["emptyDir"]
    assert shared["medium"] == "Memory"
    limit = bytes_of(agent["resources"]["limits"]["memory"])
    assert bytes_of(shared["sizeLimit"]) < limit
    for path in ("/tmp", "/var/log/elasticzero"):
        assert bytes_of(volumes[mounts[path]]["emptyDir"]["sizeLimit"]) > 0
    directory = environment(agent).get(f"{PREFIX}CHECKPOINT_DIR", "")
    assert ("/checkpoints" in mounts) == directory.startswith("/checkpoints/")


def bytes_of(quantity: str) -> int:
    return int(quantity[:-2]) << 10 * " KMGT".index(quantity[-2])


def test_output_goes_to_stdout_and_to_a_bounded_volume(agent: Manifest) -> None:
    variables = environment(agent)
    assert variables[f"{PREFIX}TEE"] == "true"
    assert variables[f"{PREFIX}LOG_DIR"] in {m["mountPath"] for m in agent["volumeMounts"]}


def test_every_pod_is_secured(manifests: list[Manifest], root: Path) -> None:
    users = {}
    for workload in workloads(manifests):
        pod = pod_of(workload)
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] == security["runAsGroup"] == security["fsGroup"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not [volume for volume in pod.get("volumes", []) if "hostPath" in volume]
        for volume in pod.get("volumes", []):
            assert volume.get("secret", {}).get("defaultMode", 0o440) == 0o440
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
            assert "memory" in container["resources"]["limits"]
            users[container["name"]] = security["runAsUser"]
    user = users.get("agent", users.get("node"))
    assert f"\nUSER {user}:{user}\n" in (root / "k8s" / "Dockerfile").read_text()
    kinds = {manifest["kind"] for manifest in manifests}
    assert not kinds & {"Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"}


@pytest.mark.parametrize("cloud", ["gke", "eks", "aks"])
def test_spot_nodes_run_agents_and_no_etcd(render: Render, cloud: str) -> None:
    manifests = render(f"overlays/{cloud}-spot")
    job, etcd = agents_of(manifests), only(manifests, "StatefulSet")
    agents, members = (required_terms(pod_of(m)) for m in (job, etcd))
    labels = CLOUDS[cloud].spot_labels
    assert agents == [[(key, "In", (value,))] for key, value in labels]
    assert members == [[(key, "NotIn", (value,)) for key, value in labels]]
    assert not pod_of(etcd).get("tolerations")
    keys = {t["key"] for t in pod_of(job)["tolerations"] if t["effect"] == "NoSchedule"}
    taint = CLOUDS[cloud].spot_taint
    assert keys == {GPU, *({taint[0]} if taint else ()), *({"sku"} if cloud == "aks" else ())}


def required_terms(pod: Manifest) -> list[list[tuple[str, str, tuple[str, ...]]]]:
    affinity = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    return [
        [(e["key"], e["operator"], tuple(e["values"])) for e in term["matchExpressions"]]
        for term in affinity["nodeSelectorTerms"]
    ]


def test_gpus_are_asked_for_and_used(case: tuple[str, str], job: Manifest, agent: Manifest) -> None:
    arguments = arguments_of(case[0])
    gpus = int(arguments[arguments.index("--gpus") + 1]) if "--gpus" in arguments else 0
    resources = agent["resources"]
    assert resources["limits"].get(GPU) == resources["requests"].get(GPU)
    assert resources["limits"].get(GPU, "0") == str(gpus)
    workers = environment(agent)[f"{PREFIX}NPROC_PER_NODE"]
    assert workers == ("gpu" if gpus else "auto")
    tolerated = [t["key"] for t in pod_of(job)["tolerations"]]
    assert (GPU in tolerated) == bool(gpus)


def test_tls_on_both_sides(render: Render) -> None:
    manifests = render("overlays/tls")
    job, etcd = agents_of(manifests), only(manifests, "StatefulSet")
    flags = flags_of(agent_of(etcd))
    for side in ("", "peer-"):
        assert flags[f"{side}client-cert-auth"] == "true"
        for name in ("cert-file", "key-file", "trusted-ca-file"):
            assert flags[f"{side}{name}"].startswith("/etc/etcd/tls/")
    assert all(
        flags[name].startswith("https://")
        for name in ("listen-client-urls", "listen-peer-urls", "advertise-client-urls")
    )
    variables, mounts = environment(agent_of(job)), agent_of(job)["volumeMounts"]
    for name in ("CACERT", "CERT", "KEY"):
        path = variables[f"{PREFIX}ETCD_{name}"]
        assert [m for m in mounts if path.startswith(m["mountPath"]) and m["readOnly"]]
    assert {"secretKeyRef": {"name": "elasticzero-token", "key": "token"}} in [
        entry.get("valueFrom") for entry in agent_of(job)["env"]
    ]


def test_the_page_names_every_folder(root: Path) -> None:
    page = (root / "docs" / "kubernetes.md").read_text()
    for place in (*FOLDERS, *tool.EXAMPLES):
        name = place.rpartition("/")[2]
        assert f"`{name}`" in page
    for command in ("render", "scale", "drain", "replace-etcd-member"):
        assert f"elasticzero k8s {command}" in page
