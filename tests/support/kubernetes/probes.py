"""Judges the probes of a container: whether it has started, is ready, and is to be killed.

Pure. Follows https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#container-probes and
https://kubernetes.io/docs/tasks/configure-pod-container/configure-liveness-readiness-startup-probes/.
Rules:
 Y1  Until the startup probe has succeeded, no other probe runs, and the container is not ready.
 Y2  A probe fails after failureThreshold failures in a row, and succeeds after successThreshold
     successes in a row.
 Y3  Where the startup or the liveness probe fails, the kubelet kills the container.
 Y4  Without a readiness probe a container is ready once it has started. With one it is ready while
     that one succeeds.
 Y5  Of a pod that is being deleted only the readiness probe runs on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tests.support.kubernetes.job import Invalid, Manifest

Kind = Literal["startup", "readiness", "liveness"]
KINDS: tuple[Kind, ...] = ("startup", "readiness", "liveness")


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """An `httpGet` probe, with its defaults filled in."""

    path: str
    port: int
    encrypted: bool = False
    initial_delay_s: float = 0.0
    period_s: float = 10.0
    timeout_s: float = 1.0
    success_threshold: int = 1
    failure_threshold: int = 3
    grace_s: float | None = None
    """Grace of a container that is killed by this probe; None: that of its pod."""


def probes_of(container: Manifest) -> dict[Kind, Probe]:
    """Returns the probes of a container; raises `Invalid` for one that is not played."""
    ports = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
    return {
        kind: _probe(container[f"{kind}Probe"], ports)
        for kind in KINDS
        if f"{kind}Probe" in container
    }


def _probe(probe: Manifest, ports: Mapping[str, int]) -> Probe:
    if "httpGet" not in probe:
        raise Invalid("only httpGet probes are played")
    get: Manifest = probe["httpGet"]
    return Probe(
        path=get.get("path", "/"),
        port=ports[get["port"]] if isinstance(get["port"], str) else get["port"],
        encrypted=get.get("scheme", "HTTP") == "HTTPS",
        initial_delay_s=probe.get("initialDelaySeconds", 0),
        period_s=probe.get("periodSeconds", 10),
        timeout_s=probe.get("timeoutSeconds", 1),
        success_threshold=probe.get("successThreshold", 1),
        failure_threshold=probe.get("failureThreshold", 3),
        grace_s=probe.get("terminationGracePeriodSeconds"),
    )


class Health:
    """What the probes of one container have said so far."""

    def __init__(self, probes: Mapping[Kind, Probe]) -> None:
        self.probes = probes
        self.started = "startup" not in probes
        self.killed_by: Kind | None = None
        """The probe for which the container is to be killed."""
        self._readiness = "readiness" not in probes
        self._runs: dict[Kind, tuple[bool, int]] = {}
        """By probe: its last result, and how often in a row."""

    @property
    def ready(self) -> bool:
        return self.started and self._readiness

    def runs(self, kind: Kind, *, deleting: bool) -> bool:
        """Returns whether a probe is made now."""
        if kind not in self.probes or (deleting and kind != "readiness"):
            return False
        return self.started != (kind == "startup")

    def observe(self, kind: Kind, *, success: bool) -> None:
        """Takes in the result of a probe."""
        probe, (last, count) = self.probes[kind], self._runs.get(kind, (success, 0))
        count = count + 1 if last == success else 1
        self._runs[kind] = (success, count)
        if success and count >= probe.success_threshold:
            self.started = self.started or kind == "startup"
            self._readiness = self._readiness or kind == "readiness"
        elif not success and count >= probe.failure_threshold:
            if kind == "readiness":
                self._readiness = False
            else:
                self.killed_by = self.killed_by or kind
