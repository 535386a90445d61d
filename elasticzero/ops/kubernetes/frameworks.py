"""Writes what other schedulers of jobs need: Kueue's queue, a JobSet, a Kubeflow TrainJob.

Sources, looked up in November 2026: kueue.sigs.k8s.io/docs/concepts/elastic_workload,
kubernetes-sigs/jobset `jobset.x-k8s.io/v1alpha2`, kubeflow/trainer `trainer.kubeflow.org/v1alpha1`.
"""

from __future__ import annotations

from typing import Any

from elasticzero.ops.kubernetes.agents import (
    agent_arguments_in_pod,
    job_spec,
    run_variables,
)
from elasticzero.ops.kubernetes.extras import times
from elasticzero.ops.kubernetes.naming import AGENT, Manifest, labels_for, metadata_for
from elasticzero.ops.kubernetes.options import RenderOptions, bytes_of_quantity

KUEUE = "kueue.x-k8s.io/v1beta2"
JOBSET = "jobset.x-k8s.io/v1alpha2"
TRAINER = "trainer.kubeflow.org/v1alpha1"
ROLE = "node"
"""Name of the replicated job, and of the container where Kubeflow Trainer looks for it."""


def kueue_queue(options: RenderOptions) -> list[Manifest]:
    """Returns a queue with room for the most nodes, open to the namespaces that have a LocalQueue
    of it."""
    most = options.nnodes[1]
    cpus = options.cpus
    quota: dict[str, Any] = {
        "cpu": f"{most * int(cpus[:-1])}m" if cpus.endswith("m") else str(most * int(cpus)),
        "memory": f"{most * bytes_of_quantity(options.memory) >> 20}Mi",
    }
    quota |= {name: times(most, amount) for name, amount in options.pod.devices.items()}
    resources = [{"name": name, "nominalQuota": amount} for name, amount in quota.items()]
    flavor = {"name": options.queue, "resources": resources}
    return [
        {
            "apiVersion": KUEUE,
            "kind": "ResourceFlavor",
            "metadata": metadata_for(options, AGENT, options.queue),
            "spec": {},
        },
        {
            "apiVersion": KUEUE,
            "kind": "ClusterQueue",
            "metadata": metadata_for(options, AGENT, options.queue),
            "spec": {
                "namespaceSelector": {},
                "resourceGroups": [{"coveredResources": list(quota), "flavors": [flavor]}],
            },
        },
        {
            "apiVersion": KUEUE,
            "kind": "LocalQueue",
            "metadata": metadata_for(options, AGENT, options.queue),
            "spec": {"clusterQueue": options.queue},
        },
    ]


def _queue_label(options: RenderOptions) -> dict[str, str]:
    return {"kueue.x-k8s.io/queue-name": options.queue} if options.queue else {}


def job_set(options: RenderOptions) -> Manifest:
    """Returns the agents as a JobSet of one Job. Agents repair what fails, so that the set never
    restarts it."""
    metadata = metadata_for(options, AGENT, options.job)
    metadata["labels"] = {**metadata["labels"], **_queue_label(options)}
    return {
        "apiVersion": JOBSET,
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {**({"suspend": True} if options.queue else {}), **_job_set_spec(options, "agent")},
    }


def _job_set_spec(options: RenderOptions, container_name: str) -> Manifest:
    steps = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    labels = {**labels_for(options, AGENT), **(steps if options.kind == "trainjob" else {})}
    template = {"metadata": {"labels": labels}, "spec": job_spec(options, container_name)}
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": [ROLE]},
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [{"name": ROLE, "replicas": 1, "template": template}],
    }


def train_job(options: RenderOptions) -> list[Manifest]:
    """Returns a TrainingRuntime, and a TrainJob that runs it.

    The TrainJob has the script and the variables of the run. They are not in the runtime, for the
    trainer puts a TrainJob's variables last, and a variable can only refer to those before it.
    """
    spec = _job_set_spec(options, ROLE)
    (replicated,) = spec["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    run_names = {entry["name"] for entry in run_variables(options)}
    container["env"] = [entry for entry in container["env"] if entry["name"] not in run_names]
    del container["args"]
    metadata = metadata_for(options, AGENT, options.job)
    return [
        {
            "apiVersion": TRAINER,
            "kind": "TrainingRuntime",
            "metadata": metadata_for(options, AGENT, f"{options.job}-runtime"),
            "spec": {"mlPolicy": {"numNodes": options.nnodes[1]}, "template": {"spec": spec}},
        },
        {
            "apiVersion": TRAINER,
            "kind": "TrainJob",
            "metadata": {**metadata, "labels": {**metadata["labels"], **_queue_label(options)}},
            "spec": {
                **({"suspend": True} if options.queue else {}),
                "runtimeRef": {
                    "apiGroup": TRAINER.partition("/")[0],
                    "kind": "TrainingRuntime",
                    "name": f"{options.job}-runtime",
                },
                "trainer": {
                    "image": options.image,
                    "numNodes": options.nnodes[1],
                    "args": agent_arguments_in_pod(options),
                    "env": run_variables(options),
                },
            },
        },
    ]
