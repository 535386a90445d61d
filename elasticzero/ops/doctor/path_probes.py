"""Reads what this machine says of its way to another node: routes, interfaces, IPsec policies.

No key is read: `ip xfrm policy` prints none.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from elasticzero.errors import UserError
from elasticzero.launcher.addresses import source_address, without_brackets
from elasticzero.launcher.options.private_network import FLAG, PrivateNetwork
from elasticzero.launcher.store.membership import reachable_address
from elasticzero.launcher.workers.gloo_interface import interface_of, listening_place
from elasticzero.ops.doctor.facts import PathFacts, PrivateNetworkFacts

INTERFACES = Path("/sys/class/net")
FILES = ("type", "uevent", "iflink", "ifindex", "tun_flags", "device")
"""Files and folders of an interface that tell its kind."""
COMMAND_S = 5.0
"""Seconds within which `ip` must have answered."""
MORE_FOLDERS = "/usr/sbin:/sbin"
"""Folders where `ip` is, which are not on the path of every user."""


def private_network_facts(
    network: PrivateNetwork | None, host: str | None, endpoints: Sequence[str]
) -> PrivateNetworkFacts | None:
    """Returns whether a node would start in its private network; None: it has none.

    Args:
        network: The private network; None: none is required.
        host: Value of --host; None: it was not given.
        endpoints: Endpoints of etcd, to which the route begins at the node's address.
    """
    if network is None:
        return None
    if host is None and not endpoints:
        error = f"{FLAG} {network.text}: this node's address is not known; give --host or --etcd"
        return PrivateNetworkFacts(network=network.text, error=error)
    name = without_brackets(host) if host else reachable_address(endpoints[0])
    try:
        _, address = listening_place(name, network, os.environ)
    except UserError as error:
        return PrivateNetworkFacts(network=network.text, error=str(error))
    return PrivateNetworkFacts(network=network.text, address=address)


def path_facts(host: str) -> PathFacts:
    """Returns what is read of the way to another node, a name or an address."""
    address, source = _ends(without_brackets(host))
    return PathFacts(
        host=host,
        address=address,
        source=source,
        route=_ip("-j", "route", "get", address) if address else None,
        interface=(interface_of(source) or "") if source else "",
        links=_ip("-j", "-d", "link", "show"),
        sysfs=_interface_files(),
        policies=_ip("xfrm", "policy"),
    )


def _ends(host: str) -> tuple[str, str]:
    """Returns the first address of a host to which there is a route, and this machine's address on
    it; both are empty if there is none."""
    with suppress(OSError):
        for *_, place in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            address = str(place[0])
            if (source := source_address(address)) is not None:
                return address, source
    return "", ""


def _ip(*arguments: str) -> str | None:
    """Returns what a command of `ip` prints; None: there is no such command, or it is refused."""
    folders = os.pathsep.join((os.environ.get("PATH", os.defpath), MORE_FOLDERS))
    program = shutil.which("ip", path=folders)
    if program is None:
        return None
    with suppress(OSError, subprocess.SubprocessError, UnicodeDecodeError):
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=COMMAND_S, check=True
        )
        return done.stdout
    return None


def _interface_files() -> Mapping[str, Mapping[str, str]]:
    """Returns the texts of files of each interface; that of a folder is empty."""
    listed: dict[str, dict[str, str]] = {}
    with suppress(OSError):
        for interface in sorted(INTERFACES.iterdir()):
            listed[interface.name] = files = {}
            for name in FILES:
                path = interface / name
                if path.is_dir():
                    files[name] = ""
                with suppress(OSError, UnicodeDecodeError):
                    files[name] = path.read_text()
    return listed
