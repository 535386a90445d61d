"""What tests of manifests share: pods, variables and names, of whatever kind of object."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

Manifest = dict[str, Any]
POD_FIELDS = {
    "metadata.annotations['batch.kubernetes.io/job-completion-index']": "3",
    "metadata.labels['batch.kubernetes.io/controller-uid']": "0d9e8f7a-aaaa-4bbb-8ccc-99887766554",
    "metadata.labels['topology.kubernetes.io/zone']": "zone-a",
    "metadata.uid": "d9d8c7b6-0a1b-4c2d-8e3f-001122334455",
    "metadata.name": "pod-3",
    "status.podIP": "10.1.2.3",
}
"""What a cluster fills in."""


def only(manifests: list[Manifest], kind: str, end: str = "") -> Manifest:
    """The manifest of this kind whose name ends like this."""
    (matching,) = (
        m for m in manifests if m["kind"] == kind and m["metadata"]["name"].endswith(end)
    )
    return matching


def job_template(manifest: Manifest) -> Manifest | None:
    """The Job that an object makes, as a Job; None: it makes none."""
    match manifest["kind"]:
        case "Job":
            return manifest
        case "JobSet":
            spec = manifest["spec"]
        case "TrainingRuntime":
            spec = manifest["spec"]["template"]["spec"]
        case "CronJob":
            return {"apiVersion": "batch/v1", "kind": "Job", "metadata": manifest["metadata"]} | {
                "spec": manifest["spec"]["jobTemplate"]["spec"]
            }
        case _:
            return None
    (replicated,) = spec["replicatedJobs"]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": f"{manifest['metadata']['name']}-{replicated['name']}-0"},
        "spec": replicated["template"]["spec"],
    }


def agents_of(manifests: list[Manifest]) -> Manifest:
    """The Job of the agents, with what a TrainJob adds to its runtime."""
    makers = [m for m in manifests if m["kind"] in ("Job", "JobSet", "TrainingRuntime")]
    (maker,) = makers
    job = job_template(maker)
    assert job is not None
    trainer = next((m["spec"]["trainer"] for m in manifests if m["kind"] == "TrainJob"), None)
    if trainer is not None:
        container = agent_of(job)
        container |= {"args": trainer["args"], "image": trainer["image"]}
        container["env"] = [*container["env"], *trainer["env"]]
        assert job["spec"]["parallelism"] == trainer["numNodes"]
    return job


def agent_of(job: Manifest) -> Manifest:
    """The container of the agent."""
    (container,) = pod_of(job)["containers"]
    assert isinstance(container, dict)
    return container


def pod_of(manifest: Manifest) -> Manifest:
    spec: Manifest = manifest["spec"]["template"]["spec"]
    return spec


def labels_of(manifest: Manifest) -> dict[str, str]:
    labels: dict[str, str] = manifest["spec"]["template"]["metadata"]["labels"]
    return labels


def workloads(manifests: list[Manifest]) -> Iterator[Manifest]:
    """Every object with a pod template at spec.template."""
    for manifest in manifests:
        if manifest["kind"] == "StatefulSet":
            yield manifest
        elif (job := job_template(manifest)) is not None:
            yield job


def environment(container: Manifest) -> dict[str, str]:
    """What the container sees, with the pod's own fields filled in as a cluster would."""
    variables: dict[str, str] = {}
    for entry in container["env"]:
        if "value" in entry:
            variables[entry["name"]] = expanded(entry["value"], variables)
            continue
        source = entry["valueFrom"]
        if "fieldRef" in source:
            variables[entry["name"]] = POD_FIELDS[source["fieldRef"]["fieldPath"]]
        elif "configMapKeyRef" in source:
            variables[entry["name"]] = "new"
        else:
            variables[entry["name"]] = "a secret of 16 characters"
    return variables


def expanded(text: str, variables: dict[str, str]) -> str:
    """Kubernetes fills in $(NAME) only where NAME stands above; here it must."""
    return re.sub(r"\$\((\w+)\)", lambda m: variables[m[1]], text)


def flags_of(container: Manifest) -> dict[str, str]:
    """The flags of etcd or etcdctl, with variables filled in; words that are no flags count as
    such without a value."""
    variables = environment(container)
    arguments = [expanded(word, variables) for word in container["args"]]
    return {
        name.removeprefix("--"): value for name, _, value in (w.partition("=") for w in arguments)
    }
