"""Writes an etcd for the jobs of one name: its members, their Service and their upkeep.

Each member is a pod of a StatefulSet. Members and agents find each other by names that they put
together from the Service's name, which one variable holds: a kustomize `namePrefix` changes that
variable too (`k8s/base/names.yaml`).
"""

from __future__ import annotations

from elasticzero.ops.kubernetes.naming import (
    ETCD,
    UPKEEP,
    Manifest,
    client_secret,
    etcd_name,
    labels_for,
    metadata_for,
    server_secret,
)
from elasticzero.ops.kubernetes.options import IN_MEMORY, EtcdOptions, RenderOptions
from elasticzero.ops.kubernetes.pods import (
    apart,
    field_variable,
    http_probe,
    mount,
    on_nodes,
    secret_volume,
    secured_container,
    secured_pod,
    spread_over_zones,
    variable,
)

ETCD_USER = 65532
CLIENT, PEER, METRICS = 2379, 2380, 2381
DATA, CERTIFICATES, BACKUPS = "/var/lib/etcd", "/etc/etcd/tls", "/backups"
QUOTA_BYTES = 2 << 30
STATE_KEY = "initial-cluster-state"
"""Key of the ConfigMap that says how a member without data begins: `new` forms a cluster, and
`existing` joins one, in the place of a member that lost its volume."""
SERVICE = "SERVICE"
"""Variable of etcd's own pods with the Service's name; it must not begin with ETCD_, for etcd reads
such variables as its options."""


def _scheme(etcd: EtcdOptions) -> str:
    return "https" if etcd.tls else "http"


def etcd_endpoints(etcd: EtcdOptions, service: str) -> str:
    """Returns the endpoints of all members as `--etcd` takes them.

    Args:
        etcd: the options of etcd.
        service: the variable of the pod that holds the Service's name.
    """
    scheme = "https://" if etcd.tls else ""
    return ",".join(f"{scheme}$({service})-{n}.$({service}):{CLIENT}" for n in range(etcd.members))


def etcd_state(options: RenderOptions) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata_for(options, ETCD, etcd_name(options)),
        "data": {STATE_KEY: "new"},
    }


def etcd_service(options: RenderOptions) -> Manifest:
    ports = {"client": CLIENT, "peer": PEER, "metrics": METRICS}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata_for(options, ETCD, etcd_name(options)),
        "spec": {
            "clusterIP": "None",
            # Members find each other before any of them is ready.
            "publishNotReadyAddresses": True,
            "selector": labels_for(options, ETCD),
            "ports": [{"name": name, "port": port} for name, port in ports.items()],
        },
    }


def etcd_budget(options: RenderOptions) -> Manifest:
    """Returns the PodDisruptionBudget of etcd: one member may be away at a time."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata_for(options, ETCD, etcd_name(options)),
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": labels_for(options, ETCD)},
        },
    }


def etcd_members(options: RenderOptions) -> Manifest:
    """Returns the StatefulSet of etcd's members."""
    labels = labels_for(options, ETCD)
    placement: Manifest = {
        "topologySpreadConstraints": spread_over_zones(labels),
        "affinity": apart(labels),
    }
    if options.cloud.spot_labels:
        off_spot: list[Manifest] = [
            {"key": key, "operator": "NotIn", "values": [value]}
            for key, value in options.cloud.spot_labels
        ]
        placement["affinity"] = {**on_nodes([off_spot]), **placement["affinity"]}
    volumes: list[Manifest] = []
    claims: Manifest = {"volumeClaimTemplates": [_claim(options.etcd.storage)]}
    if options.etcd.storage == IN_MEMORY:
        volumes, claims = [{"name": "data", "emptyDir": {"sizeLimit": "4Gi"}}], {}
    if options.etcd.tls:
        volumes.append(secret_volume("certificates", server_secret(options)))
    spec = secured_pod(
        ETCD_USER if options.pod.has_fixed_user else None,
        terminationGracePeriodSeconds=30,
        **placement,
        containers=[_member(options)],
        **({"volumes": volumes} if volumes else {}),
    )
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata_for(options, ETCD, etcd_name(options)),
        "spec": {
            "serviceName": etcd_name(options),
            "replicas": options.etcd.members,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
            **claims,
        },
    }


def _claim(storage: str) -> Manifest:
    return {
        "metadata": {"name": "data"},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            **({"storageClassName": storage} if storage else {}),
            "resources": {"requests": {"storage": "4Gi"}},
        },
    }


def _member(options: RenderOptions) -> Manifest:
    state = {"configMapKeyRef": {"name": etcd_name(options), "key": STATE_KEY}}
    mounts = [mount("data", DATA)]
    if options.etcd.tls:
        mounts.append(mount("certificates", CERTIFICATES, read_only=True))
    return secured_container(
        "etcd",
        options.etcd.image,
        command=["/usr/local/bin/etcd"],
        args=etcd_arguments(options.etcd),
        env=[
            variable(SERVICE, etcd_name(options)),
            field_variable("POD_NAME", "metadata.name"),
            {"name": "INITIAL_STATE", "valueFrom": state},
        ],
        ports=[
            {"name": "client", "containerPort": CLIENT},
            {"name": "peer", "containerPort": PEER},
            {"name": "metrics", "containerPort": METRICS},
        ],
        # On the metrics port, so that they work where clients must show a certificate.
        startupProbe=http_probe("/livez", "metrics", periodSeconds=5, failureThreshold=24),
        readinessProbe=http_probe("/readyz", "metrics", periodSeconds=5, timeoutSeconds=10),
        livenessProbe=http_probe(
            "/livez", "metrics", periodSeconds=10, timeoutSeconds=10, failureThreshold=6
        ),
        resources={
            "requests": {"cpu": "250m", "memory": "256Mi"},
            "limits": {"memory": "1Gi"},
        },
        volumeMounts=mounts,
    )


def etcd_arguments(etcd: EtcdOptions) -> list[str]:
    """Returns the options of a member."""
    scheme, service = _scheme(etcd), f"$({SERVICE})"
    cluster = ",".join(
        f"{service}-{n}={scheme}://{service}-{n}.{service}:{PEER}" for n in range(etcd.members)
    )
    arguments = {
        "name": "$(POD_NAME)",
        "data-dir": f"{DATA}/data",
        # [::] is every address of both families: a cluster may have IPv6 alone.
        "listen-client-urls": f"{scheme}://[::]:{CLIENT}",
        "advertise-client-urls": f"{scheme}://$(POD_NAME).{service}:{CLIENT}",
        "listen-peer-urls": f"{scheme}://[::]:{PEER}",
        "initial-advertise-peer-urls": f"{scheme}://$(POD_NAME).{service}:{PEER}",
        "initial-cluster": cluster,
        "initial-cluster-state": "$(INITIAL_STATE)",
        "initial-cluster-token": service,
        "listen-metrics-urls": f"http://[::]:{METRICS}",
        # By a forwarded port, a browser's page of any site could send requests of JSON to it.
        "enable-grpc-gateway": "false",
        "auto-compaction-mode": "periodic",
        "auto-compaction-retention": "10m",
        "quota-backend-bytes": str(QUOTA_BYTES),
    }
    if etcd.tls:
        for side in ("", "peer-"):
            arguments |= {
                f"{side}cert-file": f"{CERTIFICATES}/tls.crt",
                f"{side}key-file": f"{CERTIFICATES}/tls.key",
                f"{side}trusted-ca-file": f"{CERTIFICATES}/ca.crt",
                f"{side}client-cert-auth": "true",
            }
    return [f"--{name}={value}" for name, value in arguments.items()]


def etcd_upkeep(options: RenderOptions) -> list[Manifest]:
    """Returns the daily defragmentation, and the hourly backup where it was asked for."""
    jobs = [_cron_job(options, "defrag", "17 3 * * *", ["defrag"])]
    if not options.etcd.backup:
        return jobs
    name = f"{etcd_name(options)}-backup"
    claim: Manifest = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata_for(options, UPKEEP, name),
        "spec": _claim(options.etcd.storage.replace(IN_MEMORY, ""))["spec"],
    }
    # etcdctl writes beside the file and renames, so that the last whole snapshot stays.
    save = ["snapshot", "save", f"{BACKUPS}/snapshot.db"]
    return [*jobs, claim, _cron_job(options, "backup", "41 * * * *", save)]


def _cron_job(options: RenderOptions, what: str, schedule: str, arguments: list[str]) -> Manifest:
    """Returns a CronJob that runs etcdctl.

    Args:
        options: the options of the job.
        what: end of the CronJob's name; `backup` has the volume of backups, and reads one member.
        schedule: times at which it runs, as cron has them.
        arguments: words after etcdctl's flags.
    """
    etcd = options.etcd
    name = f"{etcd_name(options)}-{what}"
    endpoints = etcd_endpoints(etcd, SERVICE)
    mounts, volumes = [], []
    flags = []
    if what == "backup":
        endpoints = f"{'https://' if etcd.tls else ''}$({SERVICE}):{CLIENT}"  # of one member
        mounts.append(mount("backups", BACKUPS))
        volumes.append({"name": "backups", "persistentVolumeClaim": {"claimName": name}})
    if etcd.tls:
        files = {"cacert": "ca.crt", "cert": "tls.crt", "key": "tls.key"}
        flags = [f"--{flag}={CERTIFICATES}/{file}" for flag, file in files.items()]
        mounts.append(mount("certificates", CERTIFICATES, read_only=True))
        volumes.append(secret_volume("certificates", client_secret(options)))
    container = secured_container(
        what,
        options.etcd.image,
        command=["/usr/local/bin/etcdctl"],
        args=[f"--endpoints={endpoints}", *flags, "--command-timeout=60s", *arguments],
        env=[variable(SERVICE, etcd_name(options))],
        resources={"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
        **({"volumeMounts": mounts} if mounts else {}),
    )
    pod = secured_pod(
        ETCD_USER if options.pod.has_fixed_user else None,
        restartPolicy="Never",
        containers=[container],
        **({"volumes": volumes} if volumes else {}),
    )
    template = {"metadata": {"labels": labels_for(options, UPKEEP)}, "spec": pod}
    return {
        "apiVersion": "batch/v1",
        "kind": "CronJob",
        "metadata": metadata_for(options, UPKEEP, name),
        "spec": {
            "schedule": schedule,
            "concurrencyPolicy": "Forbid",
            "startingDeadlineSeconds": 600,
            "successfulJobsHistoryLimit": 1,
            "failedJobsHistoryLimit": 2,
            "jobTemplate": {
                "spec": {
                    "backoffLimit": 2,
                    "activeDeadlineSeconds": 600,
                    "template": template,
                }
            },
        },
    }
