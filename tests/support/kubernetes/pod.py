"""Prepares and holds one pod: what the API server knows of it, its volumes, its container.

Follows https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/ and
https://kubernetes.io/docs/concepts/storage/volumes/.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.kubernetes.container import Container, Start
from tests.support.kubernetes.environment import (
    Mounts,
    PodFields,
    command,
    environment,
    service_variables,
    volume,
)
from tests.support.kubernetes.image import Image
from tests.support.kubernetes.job import Invalid, Manifest
from tests.support.kubernetes.policies import Phase, PodState
from tests.support.kubernetes.probes import Health, probes_of

SHARED_MEMORY = Path("/dev/shm")
Objects = Mapping[tuple[str, str], Mapping[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Substitutes:
    """What this machine has in the place of a cluster's images, volumes, names and namespaces."""

    image: Image
    files: Mapping[str, Path]
    """Directory or file for each path in the image."""
    claims: Mapping[str, Path] = field(default_factory=dict)
    """Directory of each PersistentVolumeClaim."""
    addresses: Mapping[str, str] = field(default_factory=dict)
    """Address for each HOST:PORT of a Service, as a regular expression."""
    folder_variables: Mapping[str, str] = field(default_factory=dict)
    """Variable that names the directory of a mount, by its path in the container."""
    address_variables: tuple[str, ...] = ()
    """Variables for the address where a process listens, since all pods share one network."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Other variables of every container, with paths of this machine."""


@dataclass(slots=True, kw_only=True)
class Pod:
    """One pod, as the API server and its node know it."""

    job: str
    index: int
    fields: PodFields
    spec: Manifest
    directory: Path
    log: Path
    created_s: float
    phase: Phase = "Pending"
    ready: bool = False
    deleting: bool = False
    exit_codes: tuple[tuple[str, int], ...] = ()
    conditions: dict[str, str] = field(default_factory=dict)
    """Reason of each condition that is true."""
    finished_s: float = 0.0
    container: Container | None = None
    stop_at_s: float | None = None
    """Time of SIGKILL; None: nothing has asked it to stop."""
    fails_anyway: bool = False
    """True: its phase becomes Failed, whatever it exits with."""
    lost_at_s: float | None = None
    """Time at which its node was lost; None: the node is there."""
    silent: bool = False
    """True: its node cannot reach the API server, which learns nothing new of it."""

    @property
    def name(self) -> str:
        return self.fields.name

    @property
    def uid(self) -> str:
        return self.fields.uid

    @property
    def exit_code(self) -> int | None:
        """Returns the exit code that was reported of its only container."""
        return self.exit_codes[0][1] if self.exit_codes else None

    @property
    def grace_s(self) -> float:
        return float(self.spec.get("terminationGracePeriodSeconds", 30))

    @property
    def state(self) -> PodState:
        """Returns what the Job controller sees of it."""
        return PodState(
            uid=self.uid,
            index=self.index,
            phase=self.phase,
            ready=self.ready,
            deleting=self.deleting,
            exit_codes=self.exit_codes,
            conditions=frozenset((kind, "True") for kind in self.conditions),
            created_s=self.created_s,
            finished_s=self.finished_s,
        )

    @property
    def memory(self) -> Path:
        """Returns the directory of its volumes in memory."""
        return SHARED_MEMORY / f"pod-{self.uid}"

    def start(
        self, substitutes: Substitutes, objects: Objects, services: Mapping[str, Mapping[str, int]]
    ) -> None:
        """Mounts the volumes and starts the container; raises `Invalid` for what is not played."""
        (container,) = self.spec["containers"]
        if self.spec.get("initContainers"):
            raise Invalid("init containers are not played")
        mounted = {
            mount["mountPath"]: self._mount(mount, substitutes, objects)
            for mount in container.get("volumeMounts", ())
        }
        places = {**substitutes.files, **mounted}
        inside = container.get("workingDir", substitutes.image.directory)
        place = places.setdefault(inside, self.directory / "work")
        place.mkdir(parents=True, exist_ok=True)
        mounts = Mounts({path: str(outside) for path, outside in places.items()})
        declared = environment(container, self.fields, objects)
        links = self.spec.get("enableServiceLinks", True)
        variables = {**(service_variables(services) if links else {}), **declared}
        image = substitutes.image
        arguments = command(container, image.entrypoint, image.arguments, variables)
        variables = {**image.environment, **variables}
        for path, variable in substitutes.folder_variables.items():
            if path in mounted:
                variables.setdefault(variable, path)
        variables |= dict.fromkeys(substitutes.address_variables, self.fields.ip)

        def as_mounted(text: str) -> str:
            text = mounts.on_host(text)
            for pattern, address in substitutes.addresses.items():
                text = re.sub(pattern, address, text)
            return text

        start = Start(
            command=[as_mounted(argument) for argument in arguments],
            environment={
                **{name: as_mounted(value) for name, value in variables.items()},
                **substitutes.variables,
            },
            directory=place,
            log=self.log,
        )
        self.container = Container(start, Health(probes_of(container)), self.fields.ip)
        self.phase = "Running"

    def _mount(self, mount: Manifest, substitutes: Substitutes, objects: Objects) -> Path:
        name: str = mount["name"]
        source = volume(self.spec, name)
        if "emptyDir" in source:
            in_memory = source["emptyDir"].get("medium") == "Memory"
            place = (self.memory if in_memory else self.directory) / name
        elif "persistentVolumeClaim" in source:
            place = substitutes.claims[source["persistentVolumeClaim"]["claimName"]]
        elif "configMap" in source or "secret" in source:
            key = (
                ("ConfigMap", source["configMap"]["name"])
                if "configMap" in source
                else ("Secret", source["secret"]["secretName"])
            )
            place = self.directory / name
            place.mkdir(parents=True, exist_ok=True)
            for file, text in objects[key].items():
                (place / file).write_text(text)
        else:
            raise Invalid(f"volume {mount['name']}: {', '.join(source)} is not played")
        place.mkdir(parents=True, exist_ok=True)
        return place / str(mount.get("subPath", ""))

    def stop(self, now_s: float, grace_s: float) -> None:
        """Sends SIGTERM, and later SIGKILL; a second request can only shorten the time."""
        if self.container is not None and self.stop_at_s is None:
            self.container.terminate()
        self.stop_at_s = min(self.stop_at_s or float("inf"), now_s + grace_s)

    def end(self, phase: Phase, now_s: float) -> None:
        """Notes its end, and frees what it had on its node."""
        self.phase, self.finished_s, self.ready = phase, now_s, False
        shutil.rmtree(self.memory, ignore_errors=True)
        shutil.rmtree(self.directory, ignore_errors=True)
