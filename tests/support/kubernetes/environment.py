"""Says what a container of a pod gets: its environment, its command, and where its volumes lie.

Pure. Follows https://kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables/,
https://kubernetes.io/docs/tasks/inject-data-application/define-command-argument-container/ and
https://kubernetes.io/docs/concepts/workloads/pods/downward-api/.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.kubernetes.job import Invalid, Manifest

INDEX_ANNOTATION = "batch.kubernetes.io/job-completion-index"
INDEX_VARIABLE = "JOB_COMPLETION_INDEX"
SERVICE_ADDRESS = "10.96.0.1"
"""The cluster IP of every Service: nothing listens there."""
_REFERENCE = re.compile(r"\$(?:\$|\(([^()]*)\))")
_FIELD_OF_MAP = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFields:
    """The fields of one pod that its containers may ask for."""

    name: str
    uid: str
    ip: str
    node: str
    namespace: str = "default"
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)

    def value(self, path: str) -> str:
        """Returns the value of a `fieldPath`; raises `Invalid` for one that is not played."""
        if match := _FIELD_OF_MAP.fullmatch(path):
            values = self.labels if match[1] == "labels" else self.annotations
            return values.get(match[2], "")
        fields = {
            "metadata.name": self.name,
            "metadata.namespace": self.namespace,
            "metadata.uid": self.uid,
            "spec.nodeName": self.node,
            "status.podIP": self.ip,
            "status.hostIP": self.ip,
        }
        if path not in fields:
            raise Invalid(f"fieldPath {path} is not played")
        return fields[path]


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replaces $(NAME) by the value of NAME; $$ is a dollar, and unknown names stay as they are."""

    def replacement(match: re.Match[str]) -> str:
        name = match[1]
        if name is None:
            return "$"
        return variables.get(name, match[0])

    return _REFERENCE.sub(replacement, text)


def environment(
    container: Manifest, pod: PodFields, objects: Mapping[tuple[str, str], Mapping[str, str]]
) -> dict[str, str]:
    """Returns the variables of a container's `env`, in order; raises `Invalid`.

    A reference to a variable counts if that one stands above. objects: data of ConfigMaps and
    Secrets by (kind, name).
    """
    if "envFrom" in container:
        raise Invalid("envFrom is not played")
    variables: dict[str, str] = {}
    for entry in container.get("env", ()):
        name = entry["name"]
        if "valueFrom" in entry:
            value = _value_from(name, entry["valueFrom"], pod, objects)
        else:
            value = expand(entry.get("value", ""), variables)
        if value is not None:
            variables[name] = value
    variables.setdefault(INDEX_VARIABLE, pod.annotations[INDEX_ANNOTATION])
    return variables


def _value_from(
    name: str,
    source: Manifest,
    pod: PodFields,
    objects: Mapping[tuple[str, str], Mapping[str, str]],
) -> str | None:
    if "fieldRef" in source:
        return pod.value(source["fieldRef"]["fieldPath"])
    kinds = {"configMapKeyRef": "ConfigMap", "secretKeyRef": "Secret"}
    for key, kind in kinds.items():
        if key in source:
            reference: Manifest = source[key]
            data = objects.get((kind, reference["name"]), {})
            if reference["key"] not in data and not reference.get("optional", False):
                raise Invalid(
                    f"{name}: there is no {reference['key']} in {kind} {reference['name']}"
                )
            return data.get(reference["key"])
    raise Invalid(f"{name}: valueFrom {', '.join(source)} is not played")


def command(
    container: Manifest,
    entrypoint: Sequence[str],
    default_arguments: Sequence[str],
    variables: Mapping[str, str],
) -> list[str]:
    """Returns the words that a container runs: `command` replaces the image's ENTRYPOINT and CMD,
    `args` its CMD alone."""
    if "command" in container:
        arguments = [*container["command"], *container.get("args", ())]
    else:
        arguments = [*entrypoint, *container.get("args", default_arguments)]
    return [expand(str(word), variables) for word in arguments]


@dataclass(frozen=True, slots=True)
class Mounts:
    """Places in a container's file system, with the directory that stands for each here."""

    places: Mapping[str, str]

    def on_host(self, text: str) -> str:
        """Returns the text with each path of a mount replaced by that on this machine."""
        if not self.places:
            return text
        longest_first = sorted(map(re.escape, self.places), key=len, reverse=True)
        pattern = rf"(?<![\w./-])(?:{'|'.join(longest_first)})(?=$|[/:,;\s\"'])"
        return re.sub(pattern, lambda match: self.places[match[0]], text)


def volume(pod_spec: Manifest, name: str) -> Mapping[str, Any]:
    """Returns a volume of a pod by its name; raises `Invalid`."""
    for candidate in pod_spec.get("volumes", ()):
        if candidate["name"] == name:
            named: Mapping[str, Any] = candidate
            return named
    raise Invalid(f"the pod has no volume {name}")


def service_variables(services: Mapping[str, Mapping[str, int]]) -> dict[str, str]:
    """Returns the variables that the kubelet sets for the Services of a namespace.

    services: ports by name of each Service that has a cluster IP; headless ones set nothing
    (https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables).
    """
    variables: dict[str, str] = {}
    for name, ports in services.items():
        prefix = name.upper().replace("-", "_")
        first = next(iter(ports.values()))
        variables[f"{prefix}_SERVICE_HOST"] = SERVICE_ADDRESS
        variables[f"{prefix}_SERVICE_PORT"] = str(first)
        variables[f"{prefix}_PORT"] = f"tcp://{SERVICE_ADDRESS}:{first}"
        for port_name, port in ports.items():
            variables[f"{prefix}_SERVICE_PORT_{port_name.upper().replace('-', '_')}"] = str(port)
    return variables
