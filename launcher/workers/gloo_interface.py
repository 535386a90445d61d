"""Has workers' groups listen where other nodes reach this one, or in a private network alone.

The interface is the one of this machine (Linux) that has the address of its host. Gloo would take
the address that the machine's own name resolves to, often 127.0.0.1.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from elasticzero.launcher.addresses import source_address
from elasticzero.launcher.options.private_network import (
    FLAG,
    GLOO_INTERFACE_VARIABLE,
    Address,
    Place,
    PrivateNetwork,
    interface_variables,
    place_in,
)
from elasticzero.launcher.protocol.documents import Member
from elasticzero.launcher.workers.forking.requests import Launch

SIOCGIFCONF = 0x8912
IFREQ_BYTES = 40
MAX_ADDRESSES = 1024


def with_gloo_host(launch: Launch, host: str) -> Launch:
    """Returns the launch of workers whose gloo groups listen where other nodes reach this one."""
    interface = interface_of(host)
    if interface is None or GLOO_INTERFACE_VARIABLE in launch.environment:
        return launch
    return _with_variables(launch, {GLOO_INTERFACE_VARIABLE: interface})


def confined(launch: Launch, host: str, network: PrivateNetwork) -> tuple[Launch, str]:
    """Returns the launch of workers whose groups listen in a private network alone, and the address
    of this node in it.

    Others are to take that address and not the name, which may lead them elsewhere.

    Args:
        launch: Launch of the workers.
        host: Name or address at which other nodes would reach this one.
        network: The private network.

    Raises:
        UserError: This node, gloo or NCCL would listen outside of the network.
    """
    variables, address = listening_place(host, network, launch.environment)
    return _with_variables(launch, variables), address


def listening_place(
    host: str, network: PrivateNetwork, environment: Mapping[str, str]
) -> tuple[dict[str, str], str]:
    """Returns the variables that confine gloo and NCCL to a private network, and the address of
    this node in it.

    Args:
        host: Name or address at which other nodes would reach this one.
        network: The private network.
        environment: Variables of the workers.

    Raises:
        UserError: This node, gloo or NCCL would listen outside of the network.
    """
    places = list(_addresses())
    interface, address = place_in(network, host, _addresses_of(host), places)
    return interface_variables(network, interface, places, environment), str(address)


def has_address(network: PrivateNetwork, host: str) -> bool:
    """Returns whether a host is an address of this machine that is in the private network."""
    return any(str(at) == host and network.has(name, at) for name, at in _addresses())


def check_members(network: PrivateNetwork, members: Iterable[Member]) -> None:
    """Raises `UserError` if a node of a world is not in the private network.

    A node is in an interface's network if the route to it begins at an address of the interface.
    """
    places = list(_addresses())
    for member in members:
        if not _leads_inside(network, member.host, places):
            raise network.refusal(
                f"node {member.node} of this job is at {member.host}",
                f"start it again with {FLAG}, which has it refused or listen there",
            )


def _leads_inside(network: PrivateNetwork, host: str, places: Iterable[Place]) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False  # a name may mean another address to each process
    if network.has("", address):
        return True
    source = source_address(host) if network.interfaces else None
    local = ipaddress.ip_address(source) if source is not None else None
    return any(name in network.interfaces for name, at in places if at == local)


def interface_of(host: str) -> str | None:
    """Returns the interface that has the address of `host`, a name or an address; None: no
    interface has it.

    No interface has a public address that a router translates, or that of a name that does not
    resolve.
    """
    named = _addresses_of(host)
    return next((name for name, address in _addresses() if address in named), None)


def _addresses_of(host: str) -> list[Address]:
    """Returns the addresses that a name or an address means; empty if it does not resolve."""
    with suppress(OSError):
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        addresses = dict.fromkeys(str(info[4][0]).partition("%")[0] for info in infos)
        return [ipaddress.ip_address(address) for address in addresses]
    return []


def _with_variables(launch: Launch, variables: dict[str, str]) -> Launch:
    return replace(launch, environment={**launch.environment, **variables})


def _addresses() -> Iterator[Place]:
    """Yields each interface of this machine with each of its addresses, those of IPv4 first."""
    buffer = array.array("B", bytes(IFREQ_BYTES * MAX_ADDRESSES))
    where, size = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        answer = fcntl.ioctl(sock.fileno(), SIOCGIFCONF, struct.pack("iL", size, where))
    used = struct.unpack("iL", answer)[0]
    for start in range(0, used, IFREQ_BYTES):
        entry = buffer[start : start + IFREQ_BYTES].tobytes()
        yield entry[:16].rstrip(b"\0").decode(), ipaddress.IPv4Address(entry[20:24])
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            yield name, ipaddress.IPv6Address(bytes.fromhex(digits))
