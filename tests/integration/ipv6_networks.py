"""Two networks of their own without IPv4, and what listens in them."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

CLONE_NEWNET = 0x40000000
ETH_P_ALL = 0x0003
SO_RCVBUFFORCE = 33
PACKETS_BYTES = 1 << 26
"""Memory for packets that pass on a cable and are not read yet."""
PREFIX = "fd00:e1a5:71c2::"
LISTENING = "0A"
"""State of a socket that listens, in /proc/net/tcp."""
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
T = TypeVar("T")


class Ipv6Networks:
    """Network namespaces `a` and `b` without IPv4, each with a cable to a switch."""

    def __init__(self) -> None:
        self._tag = f"ez6{os.getpid() & 0xFFFFFF:06x}"
        self.names = {node: f"{self._tag}{node}" for node in "ab"}
        self.addresses = {"a": f"{PREFIX}a", "b": f"{PREFIX}b"}
        self._switch = f"{self._tag}s"
        try:
            self._lay_out()
        except BaseException:
            self.close()
            raise

    def _lay_out(self) -> None:
        ip("netns", "add", self._switch)
        ip("-n", self._switch, "link", "add", "br0", "type", "bridge", "forward_delay", "0")
        ip("-n", self._switch, "link", "set", "br0", "up")
        for node, name in self.names.items():
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "del", "127.0.0.1/8", "dev", "lo")
            end = ("type", "veth", "peer", "name", "eth0", "netns", name)
            ip("-n", self._switch, "link", "add", f"port{node}", *end)
            ip("-n", self._switch, "link", "set", f"port{node}", "master", "br0", "up")
            ip("-n", name, "addr", "add", f"{self.addresses[node]}/64", "dev", "eth0", "nodad")
            ip("-n", name, "link", "set", "eth0", "up")

    def cut(self, node: str) -> None:
        """From now on no packet of the node comes or goes; its addresses stay."""
        ip("-n", self._switch, "link", "set", f"port{node}", "down")

    def mend(self, node: str) -> None:
        ip("-n", self._switch, "link", "set", f"port{node}", "up")

    def lay(self, interface: str, prefix: str) -> dict[str, str]:
        """Lays another cable; returns the addresses that the nodes have at its ends."""
        end = ("type", "veth", "peer", "name", interface, "netns", self.names["b"])
        ip("-n", self.names["a"], "link", "add", interface, *end)
        addresses = {node: f"{prefix}{node}" for node in "ab"}
        for node, name in self.names.items():
            ip("-n", name, "addr", "add", f"{addresses[node]}/64", "dev", interface, "nodad")
            ip("-n", name, "link", "set", interface, "up")
        return addresses

    def listening(self, node: str) -> set[tuple[Address, int]]:
        """Addresses and ports at which something listens over TCP in the network of a node."""
        command = [*self.prefix(node), "cat", "/proc/net/tcp6", "/proc/net/tcp"]
        table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        rows = [line.split() for line in table.splitlines()]
        return {_socket_name(row[1]) for row in rows if row[3] == LISTENING}

    def prefix(self, node: str) -> tuple[str, ...]:
        """The command that executes the words after it in the network of a node."""
        return ("ip", "netns", "exec", self.names[node])

    def inside(self, node: str, body: Callable[[], T]) -> T:
        """What `body` returns, in a thread whose sockets and processes are in a node's network."""
        return _inside(self.names[node], body)

    def packets(self, node: str) -> socket.socket:
        """Returns a socket that receives each packet that passes on a node's cable, both ways."""

        def listen() -> socket.socket:
            raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
            raw.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, PACKETS_BYTES)
            raw.bind((f"port{node}", ETH_P_ALL))
            return raw

        return _inside(self._switch, listen)

    def close(self) -> None:
        for name in (*self.names.values(), self._switch):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _inside(name: str, body: Callable[[], T]) -> T:
    """What `body` returns, in a thread whose sockets and processes are in the namespace `name`."""

    def enter() -> T:
        with open(f"/run/netns/{name}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        return body()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(enter).result()


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr.strip()}"


def _socket_name(text: str) -> tuple[Address, int]:
    """The address and the port that the kernel prints as 32-bit words in hexadecimal."""
    host, port = text.split(":")
    data = bytes.fromhex(host)
    groups = [data[start : start + 4][::-1] for start in range(0, len(data), 4)]
    return ipaddress.ip_address(b"".join(groups)), int(port, 16)


def ipv6_networks() -> Iterator[Ipv6Networks]:
    """Yields the networks; skips the test where the machine allows none."""
    trial = [["unshare", "-n", "ip", "link", "set", "lo", "up"], ["ip", "-6", "addr"]]
    may = shutil.which("ip") is not None and not any(
        subprocess.run(command, check=False, capture_output=True).returncode for command in trial
    )
    if not may and os.environ.get("CI") != "true":
        pytest.skip("this machine allows no network namespaces")
    made = Ipv6Networks()
    try:
        yield made
    finally:
        made.close()
