"""Has workers' gloo groups listen where other nodes reach this one.

The interface is the one of this machine (Linux) that has the address of its host.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from elasticzero.launcher.workers.fork_server import Launch

GLOO_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
SIOCGIFCONF = 0x8912
IFREQ_BYTES = 40
MAX_ADDRESSES = 1024


def with_gloo_host(launch: Launch, host: str) -> Launch:
    """Returns the launch of workers whose gloo groups listen where other nodes reach this one.

    Gloo would take the address that the machine's own name resolves to, often 127.0.0.1.
    """
    interface = interface_of(host)
    if interface is None or GLOO_INTERFACE_VARIABLE in launch.environment:
        return launch
    environment = {**launch.environment, GLOO_INTERFACE_VARIABLE: interface}
    return replace(launch, environment=environment)


def interface_of(host: str) -> str | None:
    """Returns the interface that has the address of `host`, a name or an address; None: no
    interface has it.

    No interface has a public address that a router translates, or that of a name that does not
    resolve.
    """
    addresses = set()
    with suppress(OSError):
        addresses = {str(info[4][0]).partition("%")[0] for info in socket.getaddrinfo(host, None)}
    named = {ipaddress.ip_address(address) for address in addresses}
    return next((name for name, address in _addresses() if address in named), None)


def _addresses() -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """Yields (interface, address), those of IPv4 first."""
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
