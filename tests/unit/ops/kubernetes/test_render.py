"""What a job's manifests are made of: names, runs, the script, storage, what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticzero.errors import UserError
from elasticzero.launcher.tls.credentials import TlsMode
from elasticzero.ops.kubernetes.clouds import CLOUDS, grace_of
from elasticzero.ops.kubernetes.extras import parse_volume
from elasticzero.ops.kubernetes.options import (
    SET_BY,
    EtcdOptions,
    LocalScript,
    PodOptions,
    RenderOptions,
    bytes_of_quantity,
    half_of,
)
from elasticzero.ops.kubernetes.render import render_manifests
from tests.unit.manifests import (
    Manifest,
    agent_of,
    agents_of,
    environment,
    labels_of,
    only,
    pod_of,
    workloads,
)

OPTIONS = RenderOptions(
    name="train", image="registry/image:1", nnodes=(2, 4), script="/app/train.py"
)


def rendered(**changes: Any) -> list[Manifest]:
    files = render_manifests(replace(OPTIONS, **changes))
    return [manifest for part in files.values() for manifest in part]


def names(manifests: list[Manifest]) -> set[tuple[str, str]]:
    return {(m["kind"], m["metadata"]["name"]) for m in manifests}


def variables(manifests: list[Manifest]) -> dict[str, str]:
    return environment(agent_of(agents_of(manifests)))


def test_two_runs_share_etcd_and_checkpoints_and_nothing_else() -> None:
    first = rendered(checkpoints="shared", run="1")
    second = rendered(checkpoints="shared", run="2")
    shared = [m for m in first if m in second]
    assert names(shared) == {
        ("ConfigMap", "train-etcd"),
        ("Service", "train-etcd"),
        ("PodDisruptionBudget", "train-etcd"),
        ("StatefulSet", "train-etcd"),
        ("CronJob", "train-etcd-defrag"),
        ("NetworkPolicy", "train-etcd"),
        ("PersistentVolumeClaim", "train-checkpoints"),
    }
    unshared = names([m for m in first if m not in shared])
    assert unshared == {
        ("Job", "train-1"),
        ("Service", "train-1-agents"),
        ("PodDisruptionBudget", "train-1"),
        ("NetworkPolicy", "train-1-agents"),
    }
    assert not unshared & names(second)
    assert variables(second)["ELASTICZERO_JOB"] == "train-2"
    assert variables(second)["ELASTICZERO_CHECKPOINT_DIR"] == "/checkpoints/train-2"


def test_two_names_share_nothing() -> None:
    one, other = rendered(checkpoints="shared"), rendered(checkpoints="shared", name="tune")
    assert not names(one) & names(other)
    selectors = [only(m, "Service", "-etcd")["spec"]["selector"] for m in (one, other)]
    assert selectors[0] != selectors[1]


def test_restart_keeps_the_job_id_and_its_checkpoints() -> None:
    again = agents_of(rendered(restart=True))
    assert again["metadata"]["name"] == "train"
    assert agent_of(again)["args"] == ["run", "--restart", "/app/train.py"]


def test_pods_of_one_launch_share_its_uid() -> None:
    (entry,) = (
        e for e in agent_of(agents_of(rendered()))["env"] if e["name"] == "ELASTICZERO_LAUNCH_ID"
    )
    path = "metadata.labels['batch.kubernetes.io/controller-uid']"
    assert entry["valueFrom"] == {"fieldRef": {"fieldPath": path}}


def test_a_local_script_travels_in_a_config_map() -> None:
    script = LocalScript(file_name="train.py", text="print('hello')\n")
    manifests = rendered(script=script, arguments=("--lr", "1e-3"))
    held = only(manifests, "ConfigMap", manifests_script_name(manifests))
    assert held["data"] == {"train.py": "print('hello')\n"}
    assert held["immutable"] is True
    job = agents_of(manifests)
    assert agent_of(job)["args"] == ["run", "/scripts/train.py", "--lr", "1e-3"]
    mounted = {m["mountPath"]: m for m in agent_of(job)["volumeMounts"]}["/scripts"]
    assert mounted["readOnly"] is True
    other = rendered(script=replace(script, text="print('bye')\n"))
    assert manifests_script_name(other) != manifests_script_name(manifests)


def manifests_script_name(manifests: list[Manifest]) -> str:
    (volume,) = (v for v in pod_of(agents_of(manifests))["volumes"] if v["name"] == "script")
    name: str = volume["configMap"]["name"]
    return name


def test_checkpoints_on_a_url_need_no_volume() -> None:
    manifests = rendered(checkpoints="s3://bucket/runs/", pod=PodOptions(secrets=("aws",)))
    assert "PersistentVolumeClaim" not in {m["kind"] for m in manifests}
    assert variables(manifests)["ELASTICZERO_CHECKPOINT_DIR"] == "s3://bucket/runs/train"
    assert agent_of(agents_of(manifests))["envFrom"] == [{"secretRef": {"name": "aws"}}]


def test_a_claim_names_its_class() -> None:
    claim = only(rendered(checkpoints="standard-rwx"), "PersistentVolumeClaim", "-checkpoints")
    assert claim["spec"]["storageClassName"] == "standard-rwx"
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_without_checkpoints_none_are_asked_for() -> None:
    set_variables = variables(rendered(checkpoints="none"))
    assert not [name for name in set_variables if name.startswith("ELASTICZERO_CHECKPOINT")]


def test_a_shared_etcd_is_used_and_not_rendered() -> None:
    manifests = rendered(etcd=EtcdOptions(endpoints="etcd-0.etcd:2379,etcd-1.etcd:2379"))
    assert not [name for _, name in names(manifests) if "etcd" in name]
    assert variables(manifests)["ELASTICZERO_ETCD"] == "etcd-0.etcd:2379,etcd-1.etcd:2379"
    kinds = {"Service", "PodDisruptionBudget", "NetworkPolicy", "Job"}
    assert {m["kind"] for m in manifests} == kinds


def test_one_member_without_a_volume() -> None:
    manifests = rendered(etcd=EtcdOptions(members=1, storage="emptyDir"))
    etcd = only(manifests, "StatefulSet")
    assert "volumeClaimTemplates" not in etcd["spec"]
    assert [v["name"] for v in pod_of(etcd)["volumes"]] == ["data"]
    assert variables(manifests)["ELASTICZERO_ETCD"] == "train-etcd-0.train-etcd:2379"


def test_a_backup_has_a_volume_and_replaces_one_file() -> None:
    manifests = rendered(etcd=EtcdOptions(backup=True, storage="fast"))
    claim = only(manifests, "PersistentVolumeClaim", "-backup")
    assert claim["spec"]["storageClassName"] == "fast"
    job = only(manifests, "CronJob", "-backup")["spec"]
    assert job["concurrencyPolicy"] == "Forbid"
    (container,) = job["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    assert container["args"][-3:] == ["snapshot", "save", "/backups/snapshot.db"]


@pytest.mark.parametrize(
    ("nnodes", "available"), [((2, 4), 2), ((4, 4), 3), ((1, 4), 1), ((2, 2), 1)]
)
def test_the_budget_leaves_min_or_all_but_one(nnodes: tuple[int, int], available: int) -> None:
    budget = only(rendered(nnodes=nnodes), "PodDisruptionBudget", "train")
    assert budget["spec"]["minAvailable"] == available


def test_one_node_has_no_budget() -> None:
    budgets = [n for kind, n in names(rendered(nnodes=(1, 1))) if kind == "PodDisruptionBudget"]
    assert budgets == ["train-etcd"]


def test_own_variables_win() -> None:
    pod = PodOptions(environment={"ELASTICZERO_STRATEGY": "zero3", "NCCL_DEBUG": "INFO"})
    set_variables = variables(rendered(pod=pod))
    assert (set_variables["ELASTICZERO_STRATEGY"], set_variables["NCCL_DEBUG"]) == ("zero3", "INFO")
    listed = [entry["name"] for entry in agent_of(agents_of(rendered(pod=pod)))["env"]]
    assert len(set(listed)) == len(listed)


@pytest.mark.parametrize("name", sorted(CLOUDS))
@pytest.mark.parametrize("spot", [True, False])
@pytest.mark.parametrize("period_s", [None, 2, 10, 3600])
def test_an_agent_ends_before_its_pod(name: str, spot: bool, period_s: int | None) -> None:
    grace = grace_of(CLOUDS[name], spot=spot, period_s=period_s)
    assert 0 < grace.agent_s < grace.period_s


@pytest.mark.parametrize(
    ("size", "half"), [((8, "Gi"), "4Gi"), ((3, "Gi"), "1536Mi"), ((1, "Ki"), "0Ki")]
)
def test_half_of_a_quantity(size: tuple[int, str], half: str) -> None:
    assert half_of(*size) == half


def test_bytes_of_a_quantity() -> None:
    assert bytes_of_quantity("3Gi") == 3 << 30
    assert bytes_of_quantity("5Ki") == 5 << 10
    with pytest.raises(UserError, match="3GB"):
        bytes_of_quantity("3GB")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "Train"}, "--name Train"),
        ({"name": "a" * 41}, "at most 40"),
        ({"name": "a" * 38, "run": "two"}, "longer than 40"),
        ({"run": "-1"}, "--run -1"),
        ({"nnodes": (3, 2)}, "--nnodes 3:2"),
        ({"spot": True}, "--spot needs --cloud"),
        ({"cloud_name": "ibm"}, "--cloud ibm"),
        ({"kind": "pod"}, "--kind pod"),
        ({"checkpoints": "s3://"}, "--checkpoints s3://"),
        ({"checkpoints": "/mnt/nfs"}, "--checkpoints /mnt/nfs"),
        ({"checkpoint_size": "100GB"}, "--checkpoint-size 100GB"),
        ({"grace_period_s": 1}, "--grace-period 1"),
        ({"make_queue": True}, "--make-queue needs --queue"),
        ({"monitoring": "Monitoring"}, "--monitoring Monitoring: the name of a namespace"),
        ({"monitoring": ""}, "--monitoring : the name of a namespace"),
        ({"script": "train.py"}, "must be absolute"),
        ({"script": LocalScript(file_name="my train.py", text="")}, "my train.py"),
        ({"script": LocalScript(file_name="a.py", text="#" * 900_001)}, "put it into the image"),
        ({"pod": PodOptions(memory="8GB")}, "--memory 8GB"),
        ({"pod": PodOptions(memory="1Gi", shared_memory="1Gi")}, "--shared-memory 1Gi"),
        ({"pod": PodOptions(cpus="some")}, "--cpus some"),
        ({"pod": PodOptions(gpus=-1)}, "0 or more"),
        ({"pod": PodOptions(environment={"A B": "1"})}, "--env A B"),
        (
            {"pod": PodOptions(environment={"ELASTICZERO_CHECKPONT_EVERY": "5"})},
            "did you mean ELASTICZERO_CHECKPOINT_EVERY",
        ),
        ({"pod": PodOptions(environment={"ELASTICZERO_HTTP_PORT": "1"})}, "the same port"),
        ({"zones": "two"}, "--zones two: one of spread, one"),
        ({"pod": PodOptions(tmp_size="20GB")}, "--tmp-size 20GB"),
        ({"pod": PodOptions(resources={"cpu": "2"})}, "--cpus sets it"),
        ({"pod": PodOptions(resources={"nvidia.com/gpu": "2"})}, "--gpus sets it"),
        ({"pod": PodOptions(resources={"amdgpu": "2"})}, "a name such as amd.com/gpu"),
        ({"pod": PodOptions(resources={"amd.com/": "2"})}, "a name such as amd.com/gpu"),
        ({"pod": PodOptions(resources={"amd.com/gpu": "0"})}, "a number from 1 is expected"),
        ({"pod": PodOptions(resources={"amd.com/gpu": "8Gi"})}, "a number from 1 is expected"),
        ({"pod": PodOptions(resources={"hugepages-2Mi": "5GB"})}, "a size such as 512Mi"),
        ({"pod": PodOptions(resources={"nvidia.com/mig-1g.5gb": "2"})}, "one part of a GPU"),
        ({"etcd": EtcdOptions(endpoints="e:2379", image="x")}, "--etcd-image is for an etcd"),
        ({"etcd": EtcdOptions(members=2)}, "--etcd-members 2"),
        ({"tls": "job"}, "--tls job .* give --token-secret"),
        ({"etcd": EtcdOptions(endpoints="e:2379", tls=True)}, "without https://"),
        ({"etcd": EtcdOptions(endpoints="e:2379", backup=True)}, "--etcd-backup is for an etcd"),
    ],
)
def test_what_is_refused_names_the_option(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(OPTIONS, **changes)


@pytest.mark.parametrize(
    ("secret", "tls", "mode"),
    [
        ("", None, "off"),
        ("token", None, "job"),
        ("token", "off", "off"),
        ("", "files", "files"),
        ("token", "files", "files"),
    ],
)
def test_agents_probes_and_scrapes_have_one_scheme(
    secret: str, tls: TlsMode | None, mode: str
) -> None:
    manifests = rendered(pod=PodOptions(token_secret=secret), tls=tls)
    agent = agent_of(agents_of(manifests))
    assert variables(manifests)["ELASTICZERO_TLS"] == mode
    schemes = {
        agent[probe]["httpGet"].get("scheme", "HTTP")
        for probe in ("startupProbe", "readinessProbe", "livenessProbe")
    }
    annotations = agents_of(manifests)["spec"]["template"]["metadata"]["annotations"]
    schemes.add(annotations["prometheus.io/scheme"].upper())
    assert schemes == {"HTTP" if mode == "off" else "HTTPS"}
    files = {n: v for n, v in variables(manifests).items() if n.startswith("ELASTICZERO_TLS_")}
    mounts = {one["name"]: one["mountPath"] for one in agent["volumeMounts"]}
    assert ("agent-certificates" in mounts) == bool(files) == (mode == "files")
    if files:
        secrets = {v["name"]: v.get("secret") for v in pod_of(agents_of(manifests))["volumes"]}
        assert secrets["agent-certificates"]["secretName"] == "train-agents-tls"
        place = mounts["agent-certificates"]
        assert set(files.values()) == {f"{place}/{n}" for n in ("ca.crt", "tls.crt", "tls.key")}


@pytest.mark.parametrize("changes", [{"checkpoints": "s3://b"}, {"etcd": EtcdOptions(tls=True)}])
def test_the_environment_leaves_what_the_manifests_depend_on(changes: dict[str, Any]) -> None:
    pod = PodOptions(token_secret="token")
    variables = agent_of(agents_of(rendered(pod=pod, **changes)))["env"]
    set_names = {one["name"] for one in variables if one["name"].startswith("ELASTICZERO_")}
    free = {"NPROC_PER_NODE", "JOIN_TIMEOUT", "TEE", "LOG_DIR", "STRATEGY", "CHECKPOINT_EVERY"}
    assert set_names - {f"ELASTICZERO_{name}" for name in free} <= SET_BY.keys()


def test_a_queued_job_waits_and_begins_with_min() -> None:
    job = agents_of(rendered(queue="gold"))
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gold"
    assert job["metadata"]["annotations"] == {"kueue.x-k8s.io/elastic-job": "true"}
    assert job["spec"]["suspend"] is True
    assert (job["spec"]["parallelism"], job["spec"]["completions"]) == (2, 4)


def test_a_queue_has_room_for_max() -> None:
    pod = PodOptions(gpus=8, cpus="500m", memory="3Gi")
    manifests = rendered(queue="gold", make_queue=True, pod=pod)
    (group,) = only(manifests, "ClusterQueue")["spec"]["resourceGroups"]
    (flavor,) = group["flavors"]
    quota = {r["name"]: r["nominalQuota"] for r in flavor["resources"]}
    assert quota == {"cpu": "2000m", "memory": "12288Mi", "nvidia.com/gpu": "32"}
    assert group["coveredResources"] == list(quota)


def test_a_train_job_has_the_run_and_its_runtime_the_rest() -> None:
    manifests = rendered(kind="trainjob", checkpoints="shared")
    runtime, run = only(manifests, "TrainingRuntime"), only(manifests, "TrainJob")
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    assert container["name"] == replicated["name"] == "node"
    assert "args" not in container
    fixed = {entry["name"] for entry in container["env"]}
    of_run = [entry["name"] for entry in run["spec"]["trainer"]["env"]]
    assert not fixed & set(of_run)
    assert of_run.index("ELASTICZERO_JOB") < of_run.index("ELASTICZERO_CHECKPOINT_DIR")
    step = replicated["template"]["metadata"]["labels"]
    assert step["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"


def test_agents_in_one_zone_wait_for_room_there() -> None:
    manifests = rendered(zones="one")
    pod, labels = pod_of(agents_of(manifests)), labels_of(agents_of(manifests))
    (term,) = pod["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "topology.kubernetes.io/zone"
    assert term["labelSelector"]["matchLabels"].items() <= labels.items()
    assert "topologySpreadConstraints" not in pod
    assert pod["affinity"]["podAntiAffinity"], "on different machines of the zone"
    etcd = pod_of(only(manifests, "StatefulSet"))
    assert etcd["topologySpreadConstraints"] and "podAffinity" not in etcd["affinity"]


def test_one_zone_and_spot_nodes_are_both_demanded() -> None:
    pod = pod_of(agents_of(rendered(zones="one", spot=True, cloud_name="gke")))
    assert pod["affinity"].keys() == {"nodeAffinity", "podAffinity", "podAntiAffinity"}


@pytest.mark.parametrize(
    ("pod", "workers", "cpus"),
    [
        (PodOptions(), "auto", "2"),
        (PodOptions(gpus=8), "gpu", "32"),
        (PodOptions(resources={"nvidia.com/mig-3g.40gb": "1"}), "gpu", "4"),
        (PodOptions(resources={"nvidia.com/gpu.shared": "1"}), "gpu", "4"),
        (PodOptions(resources={"amd.com/gpu": "8"}), "8", "32"),
        (PodOptions(gpus=8, resources={"vpc.amazonaws.com/efa": "32"}), "gpu", "32"),
    ],
)
def test_workers_are_as_many_as_devices(pod: PodOptions, workers: str, cpus: str) -> None:
    manifests = rendered(pod=pod)
    assert variables(manifests)["ELASTICZERO_NPROC_PER_NODE"] == workers
    resources = agent_of(agents_of(manifests))["resources"]
    assert resources["requests"]["cpu"] == cpus
    for name, amount in pod.resources.items():
        assert resources["limits"][name] == resources["requests"][name] == amount


def test_nodes_with_devices_are_tolerated() -> None:
    """Many clusters taint them with the name of the resource."""
    resources = {"amd.com/gpu": "8", "hugepages-2Mi": "5Gi", "nvidia.com/mig-1g.5gb": "1"}
    tolerations = pod_of(agents_of(rendered(pod=PodOptions(resources=resources))))["tolerations"]
    keys = [t["key"] for t in tolerations if t["effect"] == "NoSchedule"]
    assert keys == ["nvidia.com/gpu", "amd.com/gpu"]


def test_a_queue_has_room_for_further_resources() -> None:
    pod = PodOptions(resources={"amd.com/gpu": "8", "hugepages-2Mi": "5Gi"})
    manifests = rendered(queue="gold", make_queue=True, pod=pod)
    (group,) = only(manifests, "ClusterQueue")["spec"]["resourceGroups"]
    quota = {r["name"]: r["nominalQuota"] for r in group["flavors"][0]["resources"]}
    assert (quota["amd.com/gpu"], quota["hugepages-2Mi"]) == ("32", "20Gi")


def test_volumes_that_exist_are_mounted() -> None:
    texts = ("pvc/data:/data:ro", "secret/keys:/keys", "configmap/settings:/etc/it", "/mnt/x:/x:ro")
    pod = pod_of(agents_of(rendered(pod=PodOptions(volumes=tuple(map(parse_volume, texts))))))
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    (container,) = pod["containers"]
    mounts = {m["mountPath"]: volumes[m["name"]] for m in container["volumeMounts"]}
    assert mounts["/data"]["persistentVolumeClaim"] == {"claimName": "data"}
    assert mounts["/keys"]["secret"]["secretName"] == "keys"
    assert mounts["/etc/it"]["configMap"] == {"name": "settings"}
    assert mounts["/x"]["hostPath"] == {"path": "/mnt/x", "type": "Directory"}
    read_only = {m["mountPath"] for m in container["volumeMounts"] if m.get("readOnly")}
    assert read_only == {"/data", "/x"}


def test_the_cluster_may_choose_the_users() -> None:
    """Of every pod: OpenShift's restricted-v2 refuses one that names a user of its own."""
    manifests = rendered(pod=PodOptions(has_fixed_user=False), etcd=EtcdOptions(backup=True))
    pods = [pod_of(workload) for workload in workloads(manifests)]
    assert len(pods) == 4
    for pod in pods:
        assert not {"runAsUser", "runAsGroup", "fsGroup"} & pod["securityContext"].keys()
        assert pod["securityContext"]["runAsNonRoot"] is True
    assert variables(manifests)["USER"], "for getpass, which torch.compile calls"


def test_etcd_runs_the_image_that_is_given() -> None:
    manifests = rendered(etcd=EtcdOptions(image="mirror/etcd:1", backup=True))
    containers = [agent_of(workload) for workload in workloads(manifests)]
    images = {one["name"]: one["image"] for one in containers}
    assert {images[name] for name in ("etcd", "defrag", "backup")} == {"mirror/etcd:1"}


def test_tmp_has_the_size_that_is_given() -> None:
    volumes = pod_of(agents_of(rendered(pod=PodOptions(tmp_size="1Ti"))))["volumes"]
    assert {"name": "temporary", "emptyDir": {"sizeLimit": "1Ti"}} in volumes


@pytest.mark.parametrize(
    "text",
    [
        "data",
        "pvc/data",
        "pvc/data:data",
        "pvc/Data:/x",
        "nfs/x:/x",
        "pvc/x:/x:rw",
        "/a:/b:ro:ro",
        "",
    ],
)
def test_a_volume_that_is_none(text: str) -> None:
    with pytest.raises(UserError, match=r"--volume .*PATH is expected"):
        parse_volume(text)


@pytest.mark.parametrize("path", ["/tmp", "/dev/shm", "/scripts/", "/data"])
def test_two_volumes_at_one_path(path: str) -> None:
    volumes = (parse_volume("pvc/data:/data"), parse_volume(f"pvc/other:{path}"))
    script = LocalScript(file_name="train.py", text="")
    with pytest.raises(UserError, match=r"--volume .*is there already"):
        rendered(pod=PodOptions(volumes=volumes), script=script)
