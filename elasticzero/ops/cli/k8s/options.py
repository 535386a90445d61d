"""Defines the tables of options of the commands `elasticzero k8s …`.

None of them has an environment variable: `ELASTICZERO_…` is for what runs in the pods.
"""

from __future__ import annotations

from typing import Any

from elasticzero.launcher.tls.credentials import TLS_MODES
from elasticzero.memory_estimate import AUTO
from elasticzero.ops.kubernetes.clouds import CLOUDS
from elasticzero.ops.kubernetes.options import ETCD_IMAGE, KINDS, ZONES
from elasticzero.options.option import Option
from elasticzero.spans import STRATEGIES


def _option(group: str, flag: str, text: str, default: Any = "", **fields: Any) -> Option:
    """Returns an option without an environment variable. Further keywords are fields of `Option`.

    Args:
        group: the heading under which the help lists it.
        flag: its only flag, with dashes.
        text: its help.
        default: its value where the flag is absent; an empty one is None, which no help shows.
    """
    return Option((flag,), text, default or None, has_variable=False, group=group, **fields)


def _switch(group: str, flag: str, text: str) -> Option:
    return Option((flag,), text, False, is_switch=True, has_variable=False, group=group)


NODES, PODS, ETCD, TRAINING = "nodes", "pods", "etcd", "training"
_MEMBERS = _option(ETCD, "--etcd-members", "etcd has N members.", 3, type=int, metavar="N")

RENDER_OPTIONS = (
    _option(
        "",
        "--name",
        "The job has this name; etcd and the checkpoints are shared by all runs of the name.",
        metavar="NAME",
    ),
    _option("", "--image", "The pods run this image, made from k8s/Dockerfile.", metavar="IMAGE"),
    _option(
        "",
        "--nnodes",
        "The job runs on MIN to MAX nodes, one in each pod; N means exactly N.",
        metavar="MIN:MAX",
    ),
    _option(
        "",
        "--checkpoints",
        "Checkpoints are stored below this URL, or on a volume of this storage class, which many "
        "nodes must be able to write at once; with none, no checkpoint is stored.",
        metavar="URL|CLASS|none",
    ),
    _option(
        "",
        "--run",
        "This run has the job id NAME-ID, and checkpoints of its own. (default: the job id is "
        "NAME)",
        metavar="ID",
    ),
    _switch("", "--restart", "A job id that has ended runs again, from its newest checkpoint."),
    _option("", "--kind", "The pods belong to this kind of object.", "job", choices=KINDS),
    _option(
        "",
        "--patch",
        "The strategic merge patches of this YAML file are applied to the manifests, as kustomize "
        "does; several files follow each other.",
        metavar="FILE",
        is_list=True,
    ),
    _option(
        "",
        "--output",
        "The manifests are printed in this format; kubectl takes both, and json needs no PyYAML.",
        "yaml",
        choices=("yaml", "json"),
    ),
    _option(NODES, "--cloud", "The cluster is of this cloud.", "none", choices=tuple(CLOUDS)),
    _switch(NODES, "--spot", "The agents run on spot nodes only, and etcd on none."),
    _option(
        NODES,
        "--grace-period",
        "A pod has S seconds from SIGTERM to SIGKILL. (default: as the cloud's nodes give)",
        type=int,
        metavar="S",
    ),
    _option(
        NODES,
        "--zones",
        "The agents lie evenly in the zones of the cluster, or all in one, where their network is "
        "fastest: pods that find no room there wait.",
        "spread",
        choices=ZONES,
    ),
    _option(NODES, "--queue", "Kueue admits the job by this LocalQueue.", metavar="NAME"),
    _switch(
        NODES,
        "--make-queue",
        "The LocalQueue is rendered too, with a ClusterQueue that has room for MAX nodes.",
    ),
    _option(
        PODS,
        "--gpus",
        "A pod has N GPUs and a worker for each. (default: 0)",
        type=int,
        metavar="N",
    ),
    _option(PODS, "--cpus", "A pod has N CPUs. (default: 4 for a GPU, or 2)", metavar="N"),
    _option(
        PODS,
        "--memory",
        "A pod has SIZE of memory, such as 64Gi. (default: 32Gi for a GPU, or 8Gi)",
        metavar="SIZE",
    ),
    _option(
        PODS,
        "--resource",
        "A pod has N of this resource too, such as amd.com/gpu=8, nvidia.com/mig-3g.40gb=1 or "
        "hugepages-2Mi=5120Mi.",
        metavar="NAME=N",
        is_list=True,
    ),
    _option(
        PODS,
        "--volume",
        "A pod has this volume at PATH: of a claim that exists (pvc/NAME), a secret/NAME, a "
        "configmap/NAME, or a /DIRECTORY of the machine; with :ro after it, only to read.",
        metavar="SOURCE:PATH",
        is_list=True,
    ),
    _option(
        PODS,
        "--tmp-size",
        "/tmp has at most SIZE, of the machine's disk.",
        "20Gi",
        metavar="SIZE",
    ),
    _switch(
        PODS,
        "--no-fixed-uid",
        "No pod names its user and group, so that the cluster chooses them, as OpenShift's "
        "restricted-v2 demands.",
    ),
    _option(
        PODS,
        "--shared-memory",
        "SIZE of it is for snapshots, in /dev/shm. (default: half)",
        metavar="SIZE",
    ),
    _option(
        PODS,
        "--env",
        "The agent has this environment variable, such as ELASTICZERO_SNAPSHOT_EVERY=10.",
        metavar="KEY=VALUE",
        is_list=True,
    ),
    _option(
        PODS,
        "--env-from",
        "The keys of this Secret are environment variables, such as credentials of s3://.",
        metavar="SECRET",
        is_list=True,
    ),
    _option(
        PODS,
        "--token-secret",
        "The key `token` of this Secret is the job's token. (default: the first node makes a "
        "token and stores it in etcd)",
        metavar="SECRET",
    ),
    _option(
        PODS,
        "--monitoring",
        "The pods of this namespace may scrape the metrics of the agents and of etcd, which no "
        "other namespace reaches; with none no other one does.",
        "monitoring",
        metavar="NAMESPACE",
    ),
    _option(
        PODS,
        "--tls",
        "The agents use TLS with certificates that they make of the token, or with those of the "
        "Secret NAME-agents-tls, or none; probes and scrapes do so too. A job that has begun goes "
        "on as it was. (default: job with --token-secret, else off)",
        choices=TLS_MODES,
    ),
    _option(PODS, "--service-account", "Pods run as this ServiceAccount.", metavar="NAME"),
    _option(PODS, "--pull-secret", "This Secret opens the registry.", metavar="SECRET"),
    _option(
        ETCD,
        "--etcd",
        "An etcd that runs already is used, at these endpoints, separated by commas. (default: "
        "the job's name has an etcd of its own)",
        metavar="HOST:PORT",
    ),
    _MEMBERS,
    _option(
        ETCD,
        "--etcd-storage",
        "etcd's volumes have this storage class; with emptyDir etcd has none. (default: the "
        "cluster's default class)",
        metavar="CLASS",
    ),
    _option(
        ETCD,
        "--etcd-image",
        "etcd's pods run this image, such as a copy in a registry of your own.",
        ETCD_IMAGE,
        metavar="IMAGE",
    ),
    _switch(
        ETCD,
        "--etcd-tls",
        "etcd and its clients show each other certificates, from the Secrets NAME-etcd-tls and "
        "NAME-etcd-client-tls.",
    ),
    _switch(
        ETCD,
        "--etcd-backup",
        "A snapshot of etcd is written to a volume of its own every hour.",
    ),
    _option(
        TRAINING,
        "--strategy",
        "The state is divided like this, as in `elasticzero run`.",
        "ddp",
        choices=(*STRATEGIES, AUTO),
    ),
    _option(
        TRAINING,
        "--checkpoint-every",
        "A checkpoint is saved every N steps; 0 saves one at the end only.",
        500,
        type=int,
        metavar="N",
    ),
    _option(
        TRAINING,
        "--checkpoint-size",
        "The volume for checkpoints has this size.",
        "100Gi",
        metavar="SIZE",
    ),
)
RENDER_REQUIRED = ("name", "image", "nnodes", "checkpoints")

CHANGE_OPTIONS = (
    _option(
        "",
        "--namespace",
        "kubectl uses this namespace. (default: that of its context)",
        metavar="NAME",
    ),
    _switch("", "--apply", "The commands are run, not only printed."),
)
REPLACE_OPTIONS = (
    _MEMBERS,
    _switch(ETCD, "--etcd-tls", "etcd demands certificates."),
    *CHANGE_OPTIONS,
)
