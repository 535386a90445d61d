"""Runs the process of one container, and makes its probes by HTTP.

Follows https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/.
"""

from __future__ import annotations

import http.client
import os
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from elasticzero.processes import bound_to_this_process, descendants
from tests.support.kubernetes import init_process
from tests.support.kubernetes.probes import Health, Kind, Probe

SIGNALLED = 128
"""An exit status above it tells the number of a signal."""
JOIN_S = 15.0
"""Seconds within which a probe that is under way ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a container's process starts with."""

    command: Sequence[str]
    environment: Mapping[str, str]
    directory: Path
    log: Path


class Container:
    """One process with all below it, and its probes; the thread that starts it must outlive it."""

    def __init__(self, start: Start, health: Health, address: str) -> None:
        """address: where its probes find it."""
        self.health = health
        self.deleting = False
        """True: its pod is being deleted, and most probes end."""
        self._address = address
        self._ended = threading.Event()
        command = [sys.executable, "-P", init_process.__file__, *start.command]
        with start.log.open("ab") as file:
            self._process = subprocess.Popen(
                bound_to_this_process(command),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=dict(start.environment),
                cwd=start.directory,
                start_new_session=True,
            )
        self._threads = [
            threading.Thread(target=self._probe, args=probe, name=f"{probe[0]} probe", daemon=True)
            for probe in health.probes.items()
        ]
        for thread in self._threads:
            thread.start()

    def poll(self) -> int | None:
        """Returns the exit code as a container runtime tells it; None: it runs."""
        code = self._process.poll()
        if code is None:
            return None
        self._ended.set()
        return code if code >= 0 else SIGNALLED - code

    def terminate(self) -> None:
        """Sends SIGTERM to the container's first process."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL to all of its processes."""
        _kill(descendants(self._process.pid))

    def vanish(self) -> None:
        """Ends it as a power cut does: nothing of it is left, and nothing is reported."""
        _kill(self.pids)
        self._process.wait()
        self._ended.set()

    def close(self) -> None:
        """Waits for its probes to end."""
        for thread in self._threads:
            thread.join(JOIN_S)

    @property
    def pids(self) -> list[int]:
        """Process ids of the runtime's process and of all below it."""
        if self._process.poll() is not None:
            return []
        return [self._process.pid, *descendants(self._process.pid)]

    def _probe(self, kind: Kind, probe: Probe) -> None:
        wait_s = probe.initial_delay_s
        while not self._ended.wait(wait_s):
            wait_s = probe.period_s
            if self.health.runs(kind, deleting=self.deleting):
                success = answers(self._address, probe)
                if not self._ended.is_set():
                    self.health.observe(kind, success=success)


def answers(address: str, probe: Probe) -> bool:
    """Makes one `httpGet`; a status from 200 to 399 is a success. As the kubelet it checks no
    certificate."""
    connection = http.client.HTTPConnection(address, probe.port, timeout=probe.timeout_s)
    if probe.encrypted:
        connection = http.client.HTTPSConnection(
            address, probe.port, timeout=probe.timeout_s, context=unchecked_context()
        )
    with closing(connection), suppress(OSError, http.client.HTTPException):
        connection.request("GET", probe.path, headers={"Connection": "close"})
        return 200 <= connection.getresponse().status < 400
    return False


def unchecked_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
