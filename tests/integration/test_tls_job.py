"""A sniffer between the nodes of a real job, and between them and etcd: what it finds without TLS,
and that it finds neither the token nor weights with it."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from elasticzero.launcher.local.cluster import Placement
from elasticzero.launcher.options.private_network import GLOO_INTERFACE_VARIABLE
from elasticzero.launcher.secrets import TOKEN
from elasticzero.launcher.snapshots.shared_memory import snapshot_directory
from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.clusters import REGRESSION, Story, story
from tests.support.certificates import Authority

JOB_TOKEN = "the-token-of-this-very-job"
WINDOW = 48
"""Bytes of weights that are looked for; no others are the same by chance."""
LISTEN_ELSEWHERE = """
import os, sys
address, *words = sys.argv[1:]
words[words.index("--http-host") + 1] = address
os.execvp(words[0], words)
"""


class Sniffer:
    """Relays connections, and keeps all that passes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self.streams: list[bytearray] = []
        """Holds what each side of each connection has sent."""

    def relay(self, address: tuple[str, int], target: tuple[str, int]) -> int:
        """Listens at an address, and passes on to another one; returns the port."""
        listener = socket.create_server(address)
        self._sockets.append(listener)
        threading.Thread(target=self._accept, args=(listener, target), daemon=True).start()
        return int(listener.getsockname()[1])

    def close(self) -> None:
        with self._lock:
            for end in self._sockets:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()

    def saw(self, secret: bytes) -> bool:
        with self._lock:
            return any(secret in stream for stream in self.streams)

    def _accept(self, listener: socket.socket, target: tuple[str, int]) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                try:
                    server = socket.create_connection(target)
                except OSError:
                    client.close()  # as if nobody listened
                    continue
                with self._lock:
                    self._sockets += [client, server]
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        stream = bytearray()
        with self._lock:
            self.streams.append(stream)
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                with self._lock:
                    stream += data
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Between:
    """Places agents so that others reach the HTTP server of each through the sniffer alone."""

    def __init__(self, sniffer: Sniffer, environment: Mapping[str, str]) -> None:
        self._sniffer, self._environment = sniffer, environment
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])

    def place(self, node: str) -> Placement:
        number = 1 + int(node.partition("-")[2])
        address, listens_at = f"127.0.41.{number}", f"127.0.42.{number}"
        with contextlib.suppress(OSError):  # a node that comes again has its relay
            self._sniffer.relay((address, self.port), (listens_at, self.port))
        return Placement(
            command_prefix=[sys.executable, "-c", LISTEN_ELSEWHERE, listens_at],
            address=address,
            environment=self._environment,
        )


def weights_of(told: Story) -> Iterator[bytes]:
    """Bytes in the middle of each shard that the nodes hold in memory, their own and replicas;
    others may go meanwhile."""
    for node in told.cluster.nodes:
        directories = os.walk(snapshot_directory(told.cluster.job, node))
        for path in (
            Path(directory, name) for directory, _, names in directories for name in names
        ):
            with contextlib.suppress(OSError):
                data = path.read_bytes()
                for at in (len(data) // 2, len(data) * 3 // 4):
                    window = data[at : at + WINDOW]
                    if len(set(window)) > WINDOW // 2:
                        yield window


def options_for(mode: str, folder: Path) -> list[str]:
    if mode != "files":
        return ["--tls", mode]
    authority = Authority(folder, "ours")
    pair = authority.sign("nodes")
    files = ("--tls-cert", pair.cert), ("--tls-key", pair.key), ("--tls-ca", authority.cert)
    return ["--tls", mode, *(word for flag, path in files for word in (flag, str(path)))]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["job", "files", "off"])
@pytest.mark.timeout(150)
def test_a_sniffer_finds_neither_token_nor_weights(
    mode: str, tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    """A node is killed and comes again, so that its worker reads from the other node."""
    sniffer = Sniffer()
    host, _, port = etcd.endpoint.rpartition(":")
    endpoint = f"127.0.0.1:{sniffer.relay(('127.0.0.1', 0), (host, int(port)))}"
    between = Between(sniffer, {TOKEN: JOB_TOKEN, GLOO_INTERFACE_VARIABLE: "lo"})
    arguments = [*options_for(mode, tmp_path / "pems"), "--http-port", str(between.port)]
    arguments += ["--nnodes", "1:2", "--strategy", "zero2", "--snapshot-every", "1"]
    arguments += [str(REGRESSION), "--hidden", "64", "--pause", "0.05"]
    windows: set[bytes] = set()
    with (
        contextlib.closing(sniffer),
        story(tmp_path, endpoint, job, arguments, nodes=2, place=between.place) as told,
    ):
        for step in (3, 6, 9):
            told.wait_for_step(step)
            windows |= set(weights_of(told))
        told.cluster.kill_node(told.node(1))
        told.wait_for_first_step(2)
        with told.slowed(0.2):
            told.cluster.start_node("node-1")
            told.wait_for_first_step(3)
        windows |= set(weights_of(told))
        assert told.of("world")[-1]["tier"] in ("live", "ram")  # from the other node's memory
        codes = told.wait_for_end()
        assert set(codes.values()) == {0}, told.logs()
        assert told.generation == 3
        assert {event["scheme"] for event in told.of("serving")} == {
            "http" if mode == "off" else "https"
        }
        held = [event for event in told.of("kept") if event["generation"] == 3]
        assert any(event["error"] is None for event in held), "replicas were pulled over TLS too"
    assert len(windows) > 4
    assert sniffer.saw(job.encode()), "the keys of the job in etcd"
    encrypted = [stream for stream in sniffer.streams if stream.startswith(b"\x16\x03")]
    assert (len(encrypted) > 2) == (mode != "off")
    assert any(map(sniffer.saw, windows)) == (mode == "off")
    assert mode == "off" or not sniffer.saw(JOB_TOKEN.encode())
    assert os.environ.get(TOKEN) is None
