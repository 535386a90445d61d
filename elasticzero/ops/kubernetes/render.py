"""Puts a job's manifests together."""

from __future__ import annotations

from collections.abc import Mapping

from elasticzero.ops.kubernetes.agents import (
    agents_budget,
    agents_job,
    agents_service_manifest,
    script_config_map,
)
from elasticzero.ops.kubernetes.etcd import (
    etcd_budget,
    etcd_members,
    etcd_service,
    etcd_state,
    etcd_upkeep,
)
from elasticzero.ops.kubernetes.frameworks import job_set, kueue_queue, train_job
from elasticzero.ops.kubernetes.naming import Manifest, checkpoint_claim, metadata_for
from elasticzero.ops.kubernetes.network import agents_policy, etcd_policy
from elasticzero.ops.kubernetes.options import RenderOptions


def render_manifests(options: RenderOptions) -> Mapping[str, list[Manifest]]:
    """Returns the manifests by the file of k8s/ that has them, in the order in which they are
    applied."""
    files: dict[str, list[Manifest]] = {}
    if not options.etcd.endpoints:
        files["etcd.yaml"] = [
            etcd_state(options),
            etcd_service(options),
            *([etcd_budget(options)] if options.etcd.members > 1 else []),
            etcd_members(options),
            *etcd_upkeep(options),
        ]
    if options.has_claim:
        files["checkpoints.yaml"] = [_checkpoints(options)]
    files["network.yaml"] = [agents_policy(options)]
    if not options.etcd.endpoints:
        files["network.yaml"].append(etcd_policy(options))
    if options.make_queue:
        files["queue.yaml"] = kueue_queue(options)
    service, budget = agents_service_manifest(options), agents_budget(options)
    supports = (script_config_map(options), service, budget)
    files["agents.yaml"] = [manifest for manifest in supports if manifest is not None]
    match options.kind:
        case "jobset":
            files["agents.yaml"].append(job_set(options))
        case "trainjob":
            files["agents.yaml"] += train_job(options)
        case _:
            files["agents.yaml"].append(agents_job(options))
    return files


def _checkpoints(options: RenderOptions) -> Manifest:
    """Returns the claim of a volume that all agents write at once."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata_for(options, "checkpoints", checkpoint_claim(options)),
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": options.checkpoints,
            "resources": {"requests": {"storage": options.checkpoint_size}},
        },
    }
