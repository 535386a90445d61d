"""Writes the agents: an Indexed Job with one agent in each pod.

One pod that exits with 0 ends the Job, for an agent does so only when the job is over. Exit codes
64 and 70 fail the Job at once. A pod that exits with 71 or 75, or is preempted, is replaced by
another node: the name of a node is its pod's index and uid. `backoffLimitPerIndex` counts all but
preemptions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial

from elasticzero.errors import ExitCode, UserError
from elasticzero.launcher.options.table import DEFAULT_HTTP_PORT
from elasticzero.ops.kubernetes.clouds import ZONE
from elasticzero.ops.kubernetes.etcd import etcd_endpoints
from elasticzero.ops.kubernetes.extras import NVIDIA, Volume
from elasticzero.ops.kubernetes.naming import (
    AGENT,
    Manifest,
    agents_secret,
    agents_service,
    checkpoint_claim,
    client_secret,
    etcd_name,
    labels_for,
    metadata_for,
)
from elasticzero.ops.kubernetes.options import LocalScript, RenderOptions
from elasticzero.ops.kubernetes.pods import (
    apart,
    field_variable,
    http_probe,
    in_one_zone,
    mount,
    on_nodes,
    secret_volume,
    secured_container,
    secured_pod,
    spread_over_zones,
    tolerated,
    variable,
)

AGENT_USER = 10001
"""The user of the image, see k8s/Dockerfile."""
JOIN_TIMEOUT_S, PROBE_S = 600, 5
STARTUP_PROBES = JOIN_TIMEOUT_S // PROBE_S + 12
"""Probes that may fail before the HTTP port opens, which it does once etcd answers."""
LOST_NODE_S = 60
"""Seconds after which a pod is given up whose machine does not answer; Kubernetes waits 300."""
SCRIPTS, CHECKPOINTS, LOGS = "/scripts", "/checkpoints", "/var/log/elasticzero"
CERTIFICATES, AGENT_CERTIFICATES = "/etc/elasticzero/etcd", "/etc/elasticzero/tls"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
LAUNCH = "metadata.labels['batch.kubernetes.io/controller-uid']"
"""The uid of the Kubernetes Job, which its pods have as a label."""
ZONE_OF_POD = f"metadata.labels['{ZONE}']"
"""The zone of the pod's machine, a label of pods since Kubernetes 1.35; without it the variable is
empty, which counts as unset."""


def script_config_map(options: RenderOptions) -> Manifest | None:
    """Returns the ConfigMap with the script; None: the image has the script.

    Its name has a digest of the script, so that a pod that comes later runs the same one.
    """
    script = options.script
    if not isinstance(script, LocalScript):
        return None
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata_for(options, AGENT, _script_name(options, script)),
        "immutable": True,
        "data": {script.file_name: script.text},
    }


def _script_name(options: RenderOptions, script: LocalScript) -> str:
    digest = hashlib.sha256(f"{script.file_name}\n{script.text}".encode()).hexdigest()[:8]
    return f"{options.job}-script-{digest}"


def agents_service_manifest(options: RenderOptions) -> Manifest:
    """Returns the headless Service by which metrics are found.

    An annotation has one path. Pods have that of their own metrics, and the Service that of the
    job's, so that a Prometheus that follows annotations scrapes both.
    """
    metadata = metadata_for(options, AGENT, agents_service(options))
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {**metadata, "annotations": _scraped(options, "/metrics/job")},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": labels_for(options, AGENT),
            "ports": [{"name": "http", "port": DEFAULT_HTTP_PORT, "targetPort": "http"}],
        },
    }


def _scraped(options: RenderOptions, path: str) -> dict[str, str]:
    """Returns the annotations by which Prometheus' usual configuration scrapes a path."""
    return {
        "prometheus.io/scrape": "true",
        "prometheus.io/scheme": "http" if options.tls_mode == "off" else "https",
        "prometheus.io/port": str(DEFAULT_HTTP_PORT),
        "prometheus.io/path": path,
    }


def agents_budget(options: RenderOptions) -> Manifest | None:
    """Returns the PodDisruptionBudget of the agents; None: a job of one node cannot spare it.

    Evictions leave MIN nodes, or all but one where MIN is MAX.
    """
    least, most = options.nnodes
    available = min(least, most - 1)
    if available < 1:
        return None
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata_for(options, AGENT, options.job),
        "spec": {
            "minAvailable": available,
            "selector": {"matchLabels": labels_for(options, AGENT)},
        },
    }


def agents_job(options: RenderOptions) -> Manifest:
    """Returns the Job of the agents."""
    metadata = metadata_for(options, AGENT, options.job)
    spec = job_spec(options)
    if options.queue:
        metadata["labels"] = {**metadata["labels"], "kueue.x-k8s.io/queue-name": options.queue}
        metadata["annotations"] = {"kueue.x-k8s.io/elastic-job": "true"}
        # MAX is `completions`. As many nodes take part as the queue admits pods.
        spec = {"suspend": True, **spec, "parallelism": options.nnodes[0]}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def job_spec(options: RenderOptions, container_name: str = "agent") -> Manifest:
    """Returns the spec of the Job of the agents."""
    _, most = options.nnodes
    return {
        "completionMode": "Indexed",
        "parallelism": most,
        "completions": most,
        "backoffLimitPerIndex": 1000,
        "podReplacementPolicy": "Failed",
        "successPolicy": {"rules": [{"succeededCount": 1}]},
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": container_name,
                        "operator": "In",
                        "values": [int(ExitCode.USAGE), int(ExitCode.FAILED)],
                    },
                },
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
            ]
        },
        "template": {
            "metadata": {
                "labels": labels_for(options, AGENT),
                "annotations": _scraped(options, "/metrics"),
            },
            "spec": _pod(options, container_name),
        },
    }


def _pod(options: RenderOptions, container_name: str) -> Manifest:
    pod = options.pod
    accounts: Manifest = {}
    if pod.service_account:
        accounts["serviceAccountName"] = pod.service_account
    if pod.pull_secret:
        accounts["imagePullSecrets"] = [{"name": pod.pull_secret}]
    return secured_pod(
        AGENT_USER if pod.has_fixed_user else None,
        restartPolicy="Never",
        terminationGracePeriodSeconds=options.grace.period_s,
        **accounts,
        **_placement(options),
        containers=[_container(options, container_name)],
        volumes=_volumes(options),
    )


def _placement(options: RenderOptions) -> Manifest:
    """Returns the fields by which the scheduler finds machines for the agents."""
    labels = labels_for(options, AGENT)
    affinity = apart(labels)
    if options.zones == "one":
        affinity = {**in_one_zone(labels), **affinity}
    if options.spot:
        terms = [
            [{"key": key, "operator": "In", "values": [value]}]
            for key, value in options.cloud.spot_labels
        ]
        affinity = {**on_nodes(terms), **affinity}
    is_spread = options.zones == "spread"
    spread = {"topologySpreadConstraints": spread_over_zones(labels)} if is_spread else {}
    return {"tolerations": _tolerations(options), **spread, "affinity": affinity}


def _tolerations(options: RenderOptions) -> list[Manifest]:
    taints = list(options.cloud.gpu_taints) if options.pod.has_nvidia else []
    # Nodes with devices are often tainted with the name of the resource.
    names = [name for name in options.pod.resources if "/" in name and not NVIDIA.fullmatch(name)]
    taints += [(name, None) for name in names]
    if options.spot and options.cloud.spot_taint is not None:
        taints.append(options.cloud.spot_taint)
    lost = [
        {
            "key": f"node.kubernetes.io/{state}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": LOST_NODE_S,
        }
        for state in ("not-ready", "unreachable")
    ]
    return [tolerated(key, value) for key, value in taints] + lost


def _container(options: RenderOptions, name: str) -> Manifest:
    pod = options.pod
    devices = pod.devices
    health = partial(http_probe, "/healthz", "http", encrypted=options.tls_mode != "off")
    source = {"envFrom": [{"secretRef": {"name": secret}} for secret in pod.secrets]}
    return secured_container(
        name,
        options.image,
        args=agent_arguments_in_pod(options),
        **(source if pod.secrets else {}),
        env=_variables(options),
        ports=[{"name": "http", "containerPort": DEFAULT_HTTP_PORT}],
        startupProbe=health(
            periodSeconds=PROBE_S, timeoutSeconds=5, failureThreshold=STARTUP_PROBES
        ),
        readinessProbe=health(periodSeconds=PROBE_S, timeoutSeconds=5),
        livenessProbe=health(periodSeconds=20, timeoutSeconds=10, failureThreshold=6),
        resources={
            "requests": {"cpu": options.cpus, "memory": options.memory, **devices},
            "limits": {"memory": options.memory, **devices},
        },
        volumeMounts=_mounts(options),
    )


def agent_arguments_in_pod(options: RenderOptions) -> list[str]:
    """Returns the words after `elasticzero`, the image's entry point."""
    script = options.script
    path = f"{SCRIPTS}/{script.file_name}" if isinstance(script, LocalScript) else script
    restart = ["--restart"] if options.restart else []
    return ["run", *restart, path, *options.arguments]


def _variables(options: RenderOptions) -> list[Manifest]:
    """Returns all variables; those of `--env` take the place of others of the same name."""
    variables = {name: variable(name, value) for name, value in options.pod.environment.items()}
    entries = [*pod_variables(), *run_variables(options), *fixed_variables(options)]
    replaced = [variables.pop(entry["name"], entry) for entry in entries]
    return [*replaced, *variables.values()]


def pod_variables() -> list[Manifest]:
    """Returns the variables that differ from pod to pod."""
    return [
        field_variable("POD_INDEX", INDEX),
        field_variable("POD_UID", "metadata.uid"),
        # A pod that takes another's place is another node.
        variable("ELASTICZERO_NODE_NAME", "$(POD_INDEX)-$(POD_UID)"),
        field_variable("ELASTICZERO_HOST", "status.podIP"),
        field_variable("ELASTICZERO_LAUNCH_ID", LAUNCH),
        field_variable("ELASTICZERO_ZONE", ZONE_OF_POD),
    ]


def run_variables(options: RenderOptions) -> list[Manifest]:
    """Returns the variables that differ from run to run."""
    least, most = options.nnodes
    checkpoints = []
    if options.checkpoints != "none":
        root = CHECKPOINTS if options.has_claim else options.checkpoints.rstrip("/")
        checkpoints = [
            variable("ELASTICZERO_CHECKPOINT_DIR", f"{root}/$(ELASTICZERO_JOB)"),
            variable("ELASTICZERO_CHECKPOINT_EVERY", str(options.checkpoint_every)),
        ]
    return [
        variable("ELASTICZERO_JOB", options.job),
        variable("ELASTICZERO_NNODES", f"{least}:{most}"),
        *checkpoints,
    ]


def fixed_variables(options: RenderOptions) -> list[Manifest]:
    """Returns the variables that are the same in all pods and runs of the name."""
    etcd, pod = options.etcd, options.pod
    service = [] if etcd.endpoints else [variable("ETCD_SERVICE", etcd_name(options))]
    endpoints = etcd.endpoints or etcd_endpoints(etcd, "ETCD_SERVICE")
    variables = {"ELASTICZERO_ETCD": endpoints, **_tls_variables(options)}
    token = []
    if pod.token_secret:
        key = {"secretKeyRef": {"name": pod.token_secret, "key": "token"}}
        token = [{"name": "ELASTICZERO_TOKEN", "valueFrom": key}]
    others = {
        "ELASTICZERO_NPROC_PER_NODE": pod.workers,
        "ELASTICZERO_STRATEGY": options.strategy,
        "ELASTICZERO_GRACE": str(options.grace.agent_s),
        "ELASTICZERO_JOIN_TIMEOUT": str(JOIN_TIMEOUT_S),
        "ELASTICZERO_HTTP_PORT": str(DEFAULT_HTTP_PORT),
        # To stdout, where the cluster collects it, and to a volume of bounded size.
        "ELASTICZERO_LOG_DIR": LOGS,
        "ELASTICZERO_TEE": "true",
    }
    if not pod.has_fixed_user:
        # The image knows no name of such a user, for which torch.compile asks.
        others["USER"] = "elasticzero"
    # Those that differ from overlay to overlay go first, so that the patches of k8s/ stay small.
    first = [variable(name, value) for name, value in variables.items()]
    return [*service, *first, *token, *(variable(name, value) for name, value in others.items())]


def _tls_variables(options: RenderOptions) -> dict[str, str]:
    # Probes and scrapes name the scheme, so that no node follows another mode of the job.
    variables: dict[str, str] = {"ELASTICZERO_TLS": options.tls_mode}
    if options.tls_mode == "files":
        variables |= {
            "ELASTICZERO_TLS_CA": f"{AGENT_CERTIFICATES}/ca.crt",
            "ELASTICZERO_TLS_CERT": f"{AGENT_CERTIFICATES}/tls.crt",
            "ELASTICZERO_TLS_KEY": f"{AGENT_CERTIFICATES}/tls.key",
        }
    if options.etcd.tls:
        variables |= {
            "ELASTICZERO_ETCD_CACERT": f"{CERTIFICATES}/ca.crt",
            "ELASTICZERO_ETCD_CERT": f"{CERTIFICATES}/tls.crt",
            "ELASTICZERO_ETCD_KEY": f"{CERTIFICATES}/tls.key",
        }
    return variables


def _mounts(options: RenderOptions) -> list[Manifest]:
    mounts = [
        mount("shared-memory", "/dev/shm"),
        mount("temporary", "/tmp"),
        mount("logs", LOGS),
    ]
    if options.has_claim:
        mounts.append(mount("checkpoints", CHECKPOINTS))
    if isinstance(options.script, LocalScript):
        mounts.append(mount("script", SCRIPTS, read_only=True))
    if options.etcd.tls:
        mounts.append(mount("etcd-certificates", CERTIFICATES, read_only=True))
    if options.tls_mode == "files":
        mounts.append(mount("agent-certificates", AGENT_CERTIFICATES, read_only=True))
    return [*mounts, *_existing_mounts(options, [one["mountPath"] for one in mounts])]


def _existing_mounts(options: RenderOptions, taken: Sequence[str]) -> list[Manifest]:
    """Returns the mounts of --volume.

    Args:
        options: the options of the job.
        taken: paths at which the container has other volumes.

    Raises:
        UserError: two volumes have one path.
    """
    mounts, paths = [], set(taken)
    for name, volume in _volumes_by_name(options).items():
        path = volume.path.rstrip("/") or "/"
        if path in paths:
            raise UserError(f"--volume …:{volume.path}: a volume is there already")
        paths.add(path)
        mounts.append(mount(name, path, read_only=volume.read_only))
    return mounts


def _volumes(options: RenderOptions) -> list[Manifest]:
    volumes: list[Manifest] = [
        # Snapshots lie here; they count against the memory limit.
        {
            "name": "shared-memory",
            "emptyDir": {"medium": "Memory", "sizeLimit": options.shared_memory},
        },
        {"name": "temporary", "emptyDir": {"sizeLimit": options.pod.tmp_size}},
        {"name": "logs", "emptyDir": {"sizeLimit": "5Gi"}},
    ]
    if options.has_claim:
        claim = {"claimName": checkpoint_claim(options)}
        volumes.append({"name": "checkpoints", "persistentVolumeClaim": claim})
    volumes += [_existing_volume(*entry) for entry in _volumes_by_name(options).items()]
    script = options.script
    if isinstance(script, LocalScript):
        volumes.append({"name": "script", "configMap": {"name": _script_name(options, script)}})
    if options.etcd.tls:
        volumes.append(secret_volume("etcd-certificates", client_secret(options)))
    if options.tls_mode == "files":
        volumes.append(secret_volume("agent-certificates", agents_secret(options)))
    return volumes


def _volumes_by_name(options: RenderOptions) -> dict[str, Volume]:
    """Returns the volumes of --volume by the names that the pod gives them."""
    return {f"volume-{n}": volume for n, volume in enumerate(options.pod.volumes)}


def _existing_volume(name: str, volume: Volume) -> Manifest:
    """Returns a volume of --volume; what it is of must exist, for a pod waits for it otherwise."""
    match volume.source:
        case "pvc":
            return {"name": name, "persistentVolumeClaim": {"claimName": volume.name}}
        case "secret":
            return secret_volume(name, volume.name)
        case "configmap":
            return {"name": name, "configMap": {"name": volume.name}}
        case _:
            return {"name": name, "hostPath": {"path": volume.name, "type": "Directory"}}
