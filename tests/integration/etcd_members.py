"""etcd as an operator runs it, on loopback: several members, TLS, users, a small quota; and faults
of real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticzero.launcher.store.etcd.server import find_etcd, free_ports
from tests.support.deadlines import patience

PATIENCE_S = 60.0
"""A generous deadline: only a test that fails waits so long."""


@dataclass(frozen=True, kw_only=True)
class Tls:
    """What members show, and whom they trust (None: clients need no certificate)."""

    cert: Path
    key: Path
    ca: Path
    clients: bool = False
    """Clients must show a certificate."""


class Member:
    """One etcd process, started again with the same ports and data."""

    def __init__(self, name: str, folder: Path, scheme: str, ports: Sequence[int]) -> None:
        self.name = name
        self.client_port, self.peer_port, self.metrics_port = ports
        self.endpoint = f"{scheme}://127.0.0.1:{self.client_port}"
        self.peer_url = f"http://127.0.0.1:{self.peer_port}"
        self.log = folder / f"{name}.log"
        self._data = folder / name
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, cluster: str, options: Mapping[str, str]) -> None:
        binary = find_etcd()
        assert binary is not None
        flags = {
            "name": self.name,
            "data-dir": str(self._data),
            "listen-client-urls": self.endpoint,
            "advertise-client-urls": self.endpoint,
            "listen-peer-urls": self.peer_url,
            "initial-advertise-peer-urls": self.peer_url,
            "initial-cluster": cluster,
            "listen-metrics-urls": f"http://127.0.0.1:{self.metrics_port}",
            "log-level": "warn",
            **options,
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [str(binary), *(f"--{k}={v}" for k, v in flags.items()), "--unsafe-no-fsync"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"PATH": os.environ["PATH"]},
                start_new_session=True,
            )

    @property
    def healthy(self) -> bool:
        with suppress(OSError):
            url = f"http://127.0.0.1:{self.metrics_port}/health"
            with urllib.request.urlopen(url, timeout=1) as answer:
                return b'"true"' in answer.read()
        return False

    def pause(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    @property
    def data(self) -> Path:
        return self._data

    def kill(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()


class Members:
    """A cluster of etcd; a context manager. `control` runs etcdctl as its operator."""

    def __init__(
        self,
        folder: Path,
        count: int = 1,
        *,
        tls: Tls | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        ports = free_ports(3 * count)
        scheme = "http" if tls is None else "https"
        self.members = [
            Member(f"m{i}", folder, scheme, ports[3 * i : 3 * i + 3]) for i in range(count)
        ]
        self._cluster = ",".join(f"{m.name}={m.peer_url}" for m in self.members)
        self._options = dict(options or {})
        self._control: list[str] = []
        if tls is not None:
            self._options |= {"cert-file": str(tls.cert), "key-file": str(tls.key)}
            self._control = [f"--cacert={tls.ca}"]
            if tls.clients:
                self._options |= {"client-cert-auth": "true", "trusted-ca-file": str(tls.ca)}
                self._control += [f"--cert={tls.cert}", f"--key={tls.key}"]

    @property
    def endpoints(self) -> str:
        return ",".join(member.endpoint for member in self.members)

    def __enter__(self) -> Members:
        try:
            self.start(*self.members)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for member in self.members:
            member.kill()

    def start(self, *members: Member) -> None:
        """Start these, and wait until they answer."""
        for member in members:
            member.start(self._cluster, self._options)
        deadline_s = time.monotonic() + patience(PATIENCE_S)
        while not all(member.healthy for member in members):
            late = time.monotonic() > deadline_s
            assert not late, [m.log.read_text(errors="replace")[-600:] for m in members]
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL to all."""
        for member in self.members:
            member.kill()

    def wipe(self) -> None:
        """Start anew with empty directories, on the same ports."""
        self.kill()
        for member in self.members:
            shutil.rmtree(member.data)
        self.start(*self.members)

    def pause(self) -> None:
        """SIGSTOP to all: connections stay open and nothing answers."""
        for member in self.members:
            member.pause()

    def resume(self) -> None:
        for member in self.members:
            member.resume()

    def control(self, *arguments: str, user: str = "") -> str:
        """The output of an etcdctl command, which must succeed."""
        binary = find_etcd()
        assert binary is not None
        command = [str(binary.with_name("etcdctl")), f"--endpoints={self.endpoints}"]
        command += [*self._control, *([f"--user={user}"] if user else []), *arguments]
        environment = {"PATH": os.environ["PATH"], "ETCDCTL_API": "3"}
        completed = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=30, check=False
        )
        assert completed.returncode == 0, f"{arguments}: {completed.stderr}"
        return completed.stdout

    def status(self) -> list[dict[str, Any]]:
        """What each member says of itself."""
        report: list[dict[str, Any]] = json.loads(self.control("endpoint", "status", "-w", "json"))
        return [entry["Status"] for entry in report]

    def leader(self) -> Member:
        first, *_ = states = self.status()
        ids = [state["header"]["member_id"] for state in states]
        return self.members[ids.index(first["leader"])]

    def enable_users(self, name: str, password: str) -> None:
        """Users from now on: root, with the password `root`, and one who may do what agents do."""
        for line in (
            "user add root:root",
            "user grant-role root root",
            "role add trainer",
            "role grant-permission trainer readwrite /elasticzero/ --prefix=true",
            f"user add {name}:{password}",
            f"user grant-role {name} trainer",
            "auth enable",
        ):
            self.control(*line.split())
