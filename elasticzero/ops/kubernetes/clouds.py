"""Lists what differs between clouds: the labels and taints of their spot and GPU nodes, and how
long a pod has before its machine goes.

Sources, looked up in November 2026:
 GKE  cloud.google.com/kubernetes-engine/docs/concepts/spot-vms: label and taint
      `cloud.google.com/gke-spot=true`; a pod gets 15 of the 30 s.
 EKS  docs.aws.amazon.com/eks, managed node groups: label `eks.amazonaws.com/capacityType=SPOT`;
      karpenter.sh/docs/concepts/scheduling: label `karpenter.sh/capacity-type=spot`; no taint. An
      interruption is announced 2 min ahead.
 AKS  learn.microsoft.com/azure/aks/spot-node-pool: label and taint
      `kubernetes.azure.com/scalesetpriority=spot`; an eviction is announced 30 s ahead or more.
 GPU  nodes have the taint `nvidia.com/gpu` on GKE and by NVIDIA's operator; learn.microsoft.com/
      azure/aks/gpu-cluster gives them `sku=gpu`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ZONE, HOST = "topology.kubernetes.io/zone", "kubernetes.io/hostname"
GPU = "nvidia.com/gpu"
END_S = 5
"""Seconds between the end of an agent's grace and SIGKILL, in which the agent ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grace:
    """Says how long a pod may run on after SIGTERM."""

    period_s: int
    """Seconds until SIGKILL: `terminationGracePeriodSeconds`."""
    agent_s: int
    """Seconds within which the agent has left: `ELASTICZERO_GRACE`."""


ON_DEMAND = Grace(period_s=30, agent_s=25)


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudNodes:
    """Describes the nodes of one cloud."""

    spot_labels: tuple[tuple[str, str], ...] = ()
    """Labels of a spot node; a node has one of them."""
    spot_taint: tuple[str, str] | None = None
    """Key and value of the taint that spot nodes have."""
    gpu_taints: tuple[tuple[str, str | None], ...] = ((GPU, None),)
    """Keys and values of taints that GPU nodes have; None: any value."""
    spot: Grace = ON_DEMAND
    shared_class: str = ""
    """Storage class that many nodes can write at once, for messages and the overlays."""


CLOUDS: Mapping[str, CloudNodes] = {
    "none": CloudNodes(),
    "gke": CloudNodes(
        spot_labels=(("cloud.google.com/gke-spot", "true"),),
        spot_taint=("cloud.google.com/gke-spot", "true"),
        spot=Grace(period_s=15, agent_s=12),
        shared_class="standard-rwx",
    ),
    "eks": CloudNodes(
        spot_labels=(
            ("eks.amazonaws.com/capacityType", "SPOT"),
            ("karpenter.sh/capacity-type", "spot"),
        ),
        spot=Grace(period_s=110, agent_s=100),
        shared_class="efs-sc",
    ),
    "aks": CloudNodes(
        spot_labels=(("kubernetes.azure.com/scalesetpriority", "spot"),),
        spot_taint=("kubernetes.azure.com/scalesetpriority", "spot"),
        gpu_taints=((GPU, None), ("sku", "gpu")),
        shared_class="azurefile-csi",
    ),
}


def grace_of(cloud: CloudNodes, *, spot: bool, period_s: int | None) -> Grace:
    """Returns the grace of a pod.

    Args:
        cloud: the kind of nodes, which sets the default.
        spot: whether the cloud may take a node back at any time.
        period_s: the period that the operator chose, in seconds; None: none was chosen.
    """
    if period_s is not None:
        return Grace(period_s=period_s, agent_s=period_s - max(1, min(END_S, period_s // 3)))
    return cloud.spot if spot else ON_DEMAND
