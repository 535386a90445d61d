"""Writes the table of fields by which `elasticzero k8s render --patch` checks and merges patches:
`python -m tools.kubernetes_fields [--check]`.

It has each type that is below an object of a render, in any release of Kubernetes that the tests
know. A field is written as `T`, as a list `[T]`, or as a map `{T}`; after a list stand the keys by
which a strategic merge finds its entries, such as `[Container]name`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any

from tools.source import ROOT

PATH = ROOT / "elasticzero" / "ops" / "kubernetes" / "patches" / "fields.json"
OLDEST_MINOR = 31
COMMENT = (
    "`make manifests` writes this file; do not edit it. Names, kinds and merge keys of the fields "
    "of Kubernetes' API (Apache-2.0), of the releases that the tests know, without descriptions."
)
API = "io.k8s.api."
OBJECTS: Mapping[str, str] = {
    "v1 ConfigMap": f"{API}core.v1.ConfigMap",
    "v1 PersistentVolumeClaim": f"{API}core.v1.PersistentVolumeClaim",
    "v1 Service": f"{API}core.v1.Service",
    "apps/v1 StatefulSet": f"{API}apps.v1.StatefulSet",
    "batch/v1 CronJob": f"{API}batch.v1.CronJob",
    "batch/v1 Job": f"{API}batch.v1.Job",
    "networking.k8s.io/v1 NetworkPolicy": f"{API}networking.v1.NetworkPolicy",
    "policy/v1 PodDisruptionBudget": f"{API}policy.v1.PodDisruptionBudget",
}
"""Kinds of a render that are Kubernetes' own, each with its definition."""
OTHER = {"...": "any"}
"""Fields of a custom resource that only its own controller knows."""
CUSTOM: Mapping[str, Mapping[str, str]] = {
    "jobset.x-k8s.io/v1alpha2 JobSet": {"spec": "JobSetSpec"},
    "trainer.kubeflow.org/v1alpha1 TrainingRuntime": {"spec": "TrainingRuntimeSpec"},
    "trainer.kubeflow.org/v1alpha1 TrainJob": {"spec": "TrainJobSpec"},
    "kueue.x-k8s.io/v1beta2 ResourceFlavor": {"spec": "any"},
    "kueue.x-k8s.io/v1beta2 ClusterQueue": {"spec": "any"},
    "kueue.x-k8s.io/v1beta2 LocalQueue": {"spec": "any"},
}
"""Custom resources of a render."""
AROUND_JOBS: Mapping[str, Mapping[str, str]] = {
    "JobSetSpec": {"replicatedJobs": "[ReplicatedJob]name", **OTHER},
    "ReplicatedJob": {"name": "string", "template": "JobTemplateSpec", **OTHER},
    "TrainingRuntimeSpec": {"template": "JobSetTemplate", **OTHER},
    "JobSetTemplate": {"metadata": "ObjectMeta", "spec": "JobSetSpec"},
    "TrainJobSpec": {"trainer": "Trainer", **OTHER},
    "Trainer": {
        "image": "string",
        "command": "[string]",
        "args": "[string]",
        "env": "[EnvVar]name",
        "resourcesPerNode": "ResourceRequirements",
        **OTHER,
    },
}
"""What stands around a Job's own fields in them; the lists are those that their definitions merge
by a key (`x-kubernetes-list-map-keys`)."""
SCALARS = {"Quantity": "quantity", "IntOrString": "integer or text", "Time": "string"}
UNKNOWN = ("FieldsV1",)


def definitions() -> Iterator[Mapping[str, Any]]:
    """The definitions of each release, the oldest first."""
    folder = files("kubernetes_validate").joinpath("kubernetes-json-schema")
    names = (one.name for one in folder.iterdir() if one.name.endswith("-local-strict"))
    for minor in sorted(minor for name in names if (minor := int(name.split(".")[1]))):
        if minor >= OLDEST_MINOR:
            path = folder.joinpath(f"v1.{minor}.0-local-strict", "_definitions.json")
            yield json.loads(path.read_text())["$defs"]


def field_text(schema: Mapping[str, Any]) -> str:
    """How the table writes a field."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition(".")[2]
        return "any" if name in UNKNOWN else SCALARS.get(name, name)
    kinds = schema.get("type", [])
    names = [kinds] if isinstance(kinds, str) else [kind for kind in kinds if kind != "null"]
    if "array" in names:
        is_merged = "x-kubernetes-patch-merge-key" in schema
        first = [schema["x-kubernetes-patch-merge-key"]] if is_merged else []
        keys = schema.get("x-kubernetes-list-map-keys", first) if is_merged else []
        return f"[{field_text(schema['items'])}]{','.join(keys)}"
    if "object" in names:
        inner = schema.get("additionalProperties")
        return f"{{{field_text(inner)}}}" if isinstance(inner, Mapping) else "any"
    return names[0] if names else "any"


def table() -> dict[str, Any]:
    """The table: fields by type, and the fields that a type must have."""
    types: dict[str, dict[str, str]] = {}
    required: dict[str, list[str]] = {}
    places: dict[str, str] = {}
    for release in definitions():
        waiting, seen = list(OBJECTS.values()), set[str]()
        while waiting:
            name = waiting.pop()
            short = name.rpartition(".")[2]
            if name in seen or short in SCALARS or short in UNKNOWN or short.endswith("Status"):
                continue
            assert places.setdefault(short, name) == name, f"two types are named {short}"
            seen.add(name)
            schema = release[name]
            fields = schema.get("properties", {})
            types.setdefault(short, {}).update({k: field_text(v) for k, v in fields.items()})
            if name in OBJECTS.values():
                types[short].pop("status", None)  # a ConfigMap has none
            required[short] = schema.get("required", [])
            waiting += references(fields)
    heads = {"apiVersion": "string", "kind": "string", "metadata": "ObjectMeta"}
    for kind, fields in CUSTOM.items():
        types[kind.partition(" ")[2]] = {**heads, **fields}
    objects = {kind: kind.partition(" ")[2] for kind in (*OBJECTS, *CUSTOM)}
    return {
        "comment": COMMENT,
        "objects": objects,
        "types": types | {name: dict(fields) for name, fields in AROUND_JOBS.items()},
        "required": {name: fields for name, fields in required.items() if fields},
    }


def references(value: Any) -> list[str]:
    """The names of definitions that a schema refers to."""
    if isinstance(value, Mapping):
        direct = [value["$ref"].rpartition("/")[2]] if isinstance(value.get("$ref"), str) else []
        return direct + [name for inner in value.values() for name in references(inner)]
    return []


def text() -> str:
    return json.dumps(table(), indent=1, sort_keys=True) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the table of Kubernetes' fields.")
    parser.add_argument("--check", action="store_true", help="report a stale file, write none")
    if not parser.parse_args().check:
        PATH.write_text(text())
    elif PATH.read_text() != text():
        print(
            "fields.json is not what Kubernetes' definitions say; run make manifests",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
