"""Measures what TLS costs a snapshot on its way from an agent: MB/s beside plain HTTP.

    python benchmarks/transport.py [--size 512MiB] [--rounds 5]

An agent's server in a process of its own serves a file in shared memory. This process reads it by
ranges into memory, as a replica is pulled, over one connection: plain, with TLS, plain, … The
median of each and their ratio are printed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

from elasticzero.checkpoint.storage.http import HttpStorage
from elasticzero.launcher.http.server import AgentServer, listen
from elasticzero.launcher.observability.event_log import LogPart
from elasticzero.launcher.secrets import Secret
from elasticzero.launcher.tls.credentials import NodeName
from elasticzero.launcher.tls.setup import node_contexts
from elasticzero.text import bytes_of

TOKEN = Secret("the-token-of-the-benchmark")
RANGE_BYTES = 16 << 20
FILE = "shard"


class Folder:
    def __init__(self, root: Path) -> None:
        self.root = root

    def open_file(self, generation: int, step: int, name: str) -> BinaryIO:
        return (self.root / name).open("rb")


def no_events(most_bytes: int) -> LogPart:
    raise FileNotFoundError("no log")


def serve(root: Path) -> None:
    """Serves the file without TLS and with it, and prints both ports."""
    name = NodeName(job="benchmark", run=1, node="server")
    servers = [
        AgentServer(
            listen("127.0.0.1", 0),
            routes={},
            snapshots=Folder(root),
            events=no_events,
            token=lambda: TOKEN,
            tls=node_contexts(mode, name, TOKEN, ["127.0.0.1"], None),
        )
        for mode in ("off", "job")
    ]
    print(*(server.port for server in servers), flush=True)
    sys.stdin.read()


def read(storage: HttpStorage, buffer: memoryview) -> float:
    """Returns the seconds that it takes to read the file."""
    began_s = time.perf_counter()
    for start in range(0, len(buffer), RANGE_BYTES):
        part = buffer[start : start + RANGE_BYTES]
        assert storage.read_into(FILE, start, part) == len(part)
    return time.perf_counter() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="512MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(Path(args.serve))
        return
    size = bytes_of(args.size)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        (Path(root) / FILE).write_bytes(os.urandom(1 << 20) * (size >> 20))
        command = [sys.executable, __file__, "--serve", root]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None and server.stdin is not None
            plain_port, tls_port = map(int, server.stdout.readline().split())
            measure(plain_port, tls_port, size, args.rounds)
            server.stdin.close()


def measure(plain_port: int, tls_port: int, size: int, rounds: int) -> None:
    """Reads by both ways in turns, and prints what each did."""
    name = NodeName(job="benchmark", run=1, node="client")
    contexts = node_contexts("job", name, TOKEN, [], None)
    assert contexts is not None
    path = "snapshots/1/1"
    plain = HttpStorage(f"http://127.0.0.1:{plain_port}/{path}", TOKEN.reveal)
    encrypted = HttpStorage(
        f"https://127.0.0.1:{tls_port}/{path}", TOKEN.reveal, tls=contexts.client()
    )
    buffer = memoryview(bytearray(size))
    taken_s: dict[str, list[float]] = {"plain": [], "TLS": []}
    for number in range(rounds + 1):
        for kind, storage in (("plain", plain), ("TLS", encrypted)):
            seconds = read(storage, buffer)
            if number:  # the first round touches the memory
                taken_s[kind].append(seconds)
    rates = {k: size / 1e6 / statistics.median(seconds) for k, seconds in taken_s.items()}
    for kind, rate in rates.items():
        print(f"{kind:6} {rate:8.0f} MB/s")
    print(f"ratio  {rates['TLS'] / rates['plain']:8.2f}")
    for storage in (plain, encrypted):
        storage.close()


if __name__ == "__main__":
    main()
