"""Writes the parts that pods of all kinds share: security, probes, variables, placement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elasticzero.ops.kubernetes.clouds import HOST, ZONE
from elasticzero.ops.kubernetes.naming import Manifest

CONTAINER_SECURITY: Manifest = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def secured_pod(user: int | None, **spec: Any) -> Manifest:
    """Returns the spec of a pod without a token of the cluster.

    Args:
        user: the pod runs as this user; None: the cluster chooses the user and the group, as
            OpenShift does, which refuses a pod that names others.
    """
    fixed = {"runAsUser": user, "runAsGroup": user, "fsGroup": user} if user else {}
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            **fixed,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **spec,
    }


def secured_container(name: str, image: str, **spec: Any) -> Manifest:
    """Returns a container that cannot gain rights, and whose root file system is read-only."""
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        **spec,
        "securityContext": CONTAINER_SECURITY,
    }


def variable(name: str, value: str) -> Manifest:
    return {"name": name, "value": value}


def field_variable(name: str, path: str) -> Manifest:
    """Returns a variable that has the value of a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def http_probe(path: str, port: str, *, encrypted: bool = False, **times: int) -> Manifest:
    """Returns a probe by HTTP, or by HTTPS: the kubelet shows no certificate, and checks none."""
    scheme = {"scheme": "HTTPS"} if encrypted else {}
    return {"httpGet": {"path": path, "port": port, **scheme}, **times}


def spread_over_zones(labels: Mapping[str, str]) -> list[Manifest]:
    """Returns the preference that pods with these labels lie evenly in the zones."""
    return [
        {
            "maxSkew": 1,
            "topologyKey": ZONE,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": dict(labels)},
        }
    ]


def apart(labels: Mapping[str, str]) -> Manifest:
    """Returns the preference that pods with these labels run on different machines.

    It is no requirement: a cluster of one machine runs them all.
    """
    term = {"topologyKey": HOST, "labelSelector": {"matchLabels": dict(labels)}}
    wish = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": wish}}


def in_one_zone(labels: Mapping[str, str]) -> Manifest:
    """Returns the requirement that pods with these labels lie in one zone, which the first of them
    chooses."""
    term = {"topologyKey": ZONE, "labelSelector": {"matchLabels": dict(labels)}}
    return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def on_nodes(terms: Sequence[Sequence[Manifest]]) -> Manifest:
    """Returns the requirement that a node matches all expressions of one of the terms."""
    selector = {"nodeSelectorTerms": [{"matchExpressions": list(term)} for term in terms]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": selector}}


def tolerated(key: str, value: str | None) -> Manifest:
    """Returns the toleration of a taint that keeps pods off. value: of the taint; None: any."""
    if value is None:
        return {"key": key, "operator": "Exists", "effect": "NoSchedule"}
    return {"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"}


def secret_volume(name: str, secret: str) -> Manifest:
    """Returns a volume that the pod's group may read, and nobody else."""
    return {"name": name, "secret": {"secretName": secret, "defaultMode": 0o440}}


def mount(name: str, path: str, *, read_only: bool = False) -> Manifest:
    return {"name": name, "mountPath": path, **({"readOnly": True} if read_only else {})}
