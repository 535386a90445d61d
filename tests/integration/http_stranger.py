"""A client without the token: `python -m tests.integration.http_stranger PORT ATTACK`.

It prints a line once its connections are there, and goes on until it is killed.
"""

from __future__ import annotations

import itertools
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

CONNECTIONS = 200
LINE = b"X: " + b"a" * 65_000 + b"\r\n"


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def large_head(port: int) -> None:
    """98 header lines of 65 KB, and no end of the head."""
    with connect(port) as s:
        s.sendall(b"GET /status HTTP/1.1\r\n")
        for _ in range(98):
            s.sendall(LINE)
        time.sleep(60)


def slow_head(port: int) -> None:
    with connect(port) as s:
        s.sendall(b"GET /healthz HTTP/1.1\r\nX: ")
        while True:
            s.sendall(b"a")
            time.sleep(0.05)


def slow_body(port: int) -> None:
    """A body of 1 GB, of which 64 KB come at a time."""
    with connect(port) as s:
        s.sendall(b"POST /status HTTP/1.1\r\nContent-Length: 1000000000\r\n\r\n")
        while True:
            s.sendall(b"a" * 65_536)
            time.sleep(0.05)


def idle(port: int) -> None:
    with connect(port) as s:
        s.recv(1)


def unread_answer(port: int) -> None:
    """Asks for more than the kernel keeps for it, and reads nothing."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        s.connect(("127.0.0.1", port))
        s.sendall(b"GET /page HTTP/1.1\r\n\r\n")
        time.sleep(60)


def flood(port: int) -> None:
    with connect(port) as s:
        s.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")


ATTACKS: dict[str, Callable[[int], None]] = {
    attack.__name__: attack
    for attack in (large_head, slow_head, slow_body, idle, unread_answer, flood)
}


def main() -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    port, attack = int(sys.argv[1]), ATTACKS[sys.argv[2]]
    rounds = itertools.count()

    def repeat() -> None:
        while True:
            with suppress(OSError):
                attack(port)
            next(rounds)

    for _ in range(CONNECTIONS):
        threading.Thread(target=repeat, daemon=True).start()
    time.sleep(1.0)
    print("attacks", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
