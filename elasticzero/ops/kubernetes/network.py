"""Writes the NetworkPolicies: which pods may open a connection to agents and to etcd.

No port is open to all. What watches jobs from another namespace reaches the ports with metrics. The
kubelet of a pod's machine reaches the pod whatever the policies say: probes, `kubectl port-forward`
and `kubectl exec` need no rule.
"""

from __future__ import annotations

from elasticzero.launcher.options.table import DEFAULT_HTTP_PORT
from elasticzero.ops.kubernetes.etcd import CLIENT, METRICS, PEER
from elasticzero.ops.kubernetes.naming import (
    AGENT,
    ETCD,
    UPKEEP,
    Manifest,
    agents_of_every_run,
    agents_service,
    etcd_name,
    labels_for,
    metadata_for,
)
from elasticzero.ops.kubernetes.options import NO_MONITORING, RenderOptions

NAMESPACE_NAME = "kubernetes.io/metadata.name"
"""Label that Kubernetes gives each namespace, with its name; nobody else can set it."""


def _policy(name: str, options: RenderOptions, component: str, rules: list[Manifest]) -> Manifest:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata_for(options, component, name),
        "spec": {
            "podSelector": {"matchLabels": labels_for(options, component)},
            "policyTypes": ["Ingress"],
            "ingress": rules,
        },
    }


def _from(labels: dict[str, str]) -> list[Manifest]:
    return [{"podSelector": {"matchLabels": labels}}]


def _ports(*ports: int) -> list[Manifest]:
    return [{"protocol": "TCP", "port": port} for port in ports]


def _monitoring(options: RenderOptions, port: int) -> list[Manifest]:
    """Returns the rule by which the namespace of the monitoring reaches a port; none without it."""
    if options.monitoring == NO_MONITORING:
        return []
    labels = {NAMESPACE_NAME: options.monitoring}
    return [{"from": [{"namespaceSelector": {"matchLabels": labels}}], "ports": _ports(port)}]


def agents_policy(options: RenderOptions) -> Manifest:
    """Returns the policy of the agents.

    The run's own agents and workers reach each other on every port: the kernel chooses those of
    rank 0's store, of gloo, NCCL and the control connections.
    """
    rules = [
        {"from": _from(labels_for(options, AGENT))},
        *_monitoring(options, DEFAULT_HTTP_PORT),
    ]
    return _policy(agents_service(options), options, AGENT, rules)


def etcd_policy(options: RenderOptions) -> Manifest:
    """Returns the policy of etcd: clients are the agents of the name and the upkeep, and peers are
    the members."""
    clients = _from(agents_of_every_run(options)) + _from(labels_for(options, UPKEEP))
    rules = [
        {"from": clients, "ports": _ports(CLIENT)},
        {"from": _from(labels_for(options, ETCD)), "ports": _ports(CLIENT, PEER)},
        *_monitoring(options, METRICS),
    ]
    return _policy(etcd_name(options), options, ETCD, rules)
