"""Writes the NetworkPolicies: which pods may open a connection to agents and to etcd."""

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
from elasticzero.ops.kubernetes.options import RenderOptions


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


def agents_policy(options: RenderOptions) -> Manifest:
    """Returns the policy of the agents.

    Workers talk to each other on ports that the kernel chooses. Everyone else reaches the HTTP port
    only, where all but metrics and health needs the job's token.
    """
    rules = [
        {"from": _from(labels_for(options, AGENT))},
        {"ports": _ports(DEFAULT_HTTP_PORT)},
    ]
    return _policy(agents_service(options), options, AGENT, rules)


def etcd_policy(options: RenderOptions) -> Manifest:
    """Returns the policy of etcd: clients are the agents of the name and the upkeep, and peers are
    the members."""
    clients = _from(agents_of_every_run(options)) + _from(labels_for(options, UPKEEP))
    rules = [
        {"from": clients, "ports": _ports(CLIENT)},
        {"from": _from(labels_for(options, ETCD)), "ports": _ports(CLIENT, PEER)},
        {"ports": _ports(METRICS)},
    ]
    return _policy(etcd_name(options), options, ETCD, rules)
