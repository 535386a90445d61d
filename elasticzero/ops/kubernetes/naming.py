"""Names the objects of a job, and gives them their labels.

A name is shared by all its runs: etcd and the checkpoints belong to the name, and the agents to one
run. `part-of` is the name, and `instance` is the run's job id, which is also the name of the
Kubernetes Job.
"""

from __future__ import annotations

from typing import Any

from elasticzero.ops.kubernetes.options import RenderOptions

Manifest = dict[str, Any]
AGENT, ETCD, UPKEEP = "agent", "etcd", "etcd-upkeep"
"""Components: the agents' pods, etcd's members, and the pods that defragment and back up etcd."""


def labels_for(options: RenderOptions, component: str) -> dict[str, str]:
    """Returns the labels by which the pods of one component of this job are selected.

    Args:
        options: the options of the job.
        component: name of the component; agents belong to a run, all others to the name.
    """
    return {
        "app.kubernetes.io/name": "elasticzero",
        "app.kubernetes.io/part-of": options.name,
        "app.kubernetes.io/instance": options.job if component == AGENT else options.name,
        "app.kubernetes.io/component": component,
    }


def metadata_for(options: RenderOptions, component: str, name: str) -> Manifest:
    """Returns the metadata of an object that belongs to one component.

    Args:
        options: the options of the job.
        component: name of the component, from which the labels follow.
        name: name of the object.
    """
    return {"name": name, "labels": labels_for(options, component)}


def agents_of_every_run(options: RenderOptions) -> dict[str, str]:
    """Returns the labels that the agents of all runs of the name have."""
    labels = labels_for(options, AGENT)
    del labels["app.kubernetes.io/instance"]
    return labels


def agents_service(options: RenderOptions) -> str:
    return f"{options.job}-agents"


def etcd_name(options: RenderOptions) -> str:
    """Returns the name of etcd's StatefulSet, of its Service and of its ConfigMap."""
    return f"{options.name}-etcd"


def server_secret(options: RenderOptions) -> str:
    """Returns the name of the Secret that holds the certificate of etcd's members."""
    return f"{etcd_name(options)}-tls"


def client_secret(options: RenderOptions) -> str:
    """Returns the name of the Secret that holds the certificate of etcd's clients."""
    return f"{etcd_name(options)}-client-tls"


def agents_secret(options: RenderOptions) -> str:
    """Returns the name of the Secret that holds the certificate of the agents (`--tls files`)."""
    return f"{agents_service(options)}-tls"


def checkpoint_claim(options: RenderOptions) -> str:
    return f"{options.name}-checkpoints"
