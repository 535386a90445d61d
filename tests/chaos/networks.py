"""A network of its own for each node: namespaces of the kernel, joined by a bridge. A node's cable
can be pulled."""

from __future__ import annotations

import os
import shutil
import subprocess

from elasticzero.launcher.local.cluster import Placement

TRIES = 64
"""Of addresses that another network of this machine may have."""


class NoNetworks(Exception):
    """This machine allows no namespaces; the message says why."""


class Networks:
    """A bridge, where this process listens at `address`, and the nodes' namespaces at it."""

    def __init__(self) -> None:
        if shutil.which("ip") is None:
            raise NoNetworks("there is no `ip` command (Debian's package iproute2)")
        self._tag = f"ez{os.getpid() & 0xFFFFFF:06x}"
        self._nodes: dict[str, str] = {}
        """By node: its cable's end at the bridge, and its namespace's name."""
        _ip("link", "add", self._tag, "type", "bridge", "forward_delay", "0")
        try:
            taken = _ip("-4", "-o", "addr", "show")
            self._block = next(
                block
                for block in (f"10.{128 + (os.getpid() + n) % 64}" for n in range(TRIES))
                if f" {block}." not in taken
            )
            _ip("addr", "add", f"{self.address}/16", "dev", self._tag)
            _ip("link", "set", self._tag, "up")
            self.place("try")
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        return f"{self._block}.0.1"

    def place(self, node: str) -> Placement:
        """Lay a cable to a new namespace, for an agent of that name."""
        number = len(self._nodes)
        name, address = f"{self._tag}n{number}", f"{self._block}.{1 + number // 200}.{number % 200}"
        self._nodes[node] = name
        _ip("netns", "add", name)
        _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("-n", name, "addr", "add", f"{address}/16", "dev", "eth0")
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "link", "set", "eth0", "up")
        _ip("link", "set", name, "master", self._tag, "up")
        return Placement(command_prefix=("ip", "netns", "exec", name), address=address)

    def cut(self, node: str) -> None:
        """From now on no packet comes or goes, and nobody is told."""
        _ip("link", "set", self._nodes[node], "down")

    def mend(self, node: str) -> None:
        _ip("link", "set", self._nodes[node], "up")

    def close(self) -> None:
        """Take everything down; the cables go with their namespaces."""
        for name in self._nodes.values():
            _ip("netns", "del", name, check=False)
            _ip("link", "del", name, check=False)
        _ip("link", "del", self._tag, check=False)


def _ip(*arguments: str, check: bool = True) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30.0)
    if check and done.returncode != 0:
        raise NoNetworks(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
