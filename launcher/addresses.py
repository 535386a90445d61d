"""Writes, binds and finds network addresses of both families, IPv4 and IPv6.

Nothing here needs the one or the other: a machine may have IPv6 alone, also as its loopback.
"""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress
from pathlib import Path

EVERYWHERE = "::"
"""Address that stands for every address of a machine, of IPv6 and of IPv4."""
LOOPBACKS = ("127.0.0.1", "::1")
OUTSIDE = ("192.0.2.1", "2001:db8::1")
"""Addresses of no machine (RFC 5737, RFC 3849): the routes to them start at this machine's own."""
DISCARD_PORT = 9
"""Port for a socket that only asks for a route, and sends nothing."""


def without_brackets(host: str) -> str:
    """Returns a host without the brackets in which an address of IPv6 may stand."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def with_brackets(host: str) -> str:
    """Returns a host as it stands before a port or in a URL: an address of IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def host_and_port(host: str, port: int) -> str:
    """Returns `HOST:PORT`, or `[ADDRESS]:PORT` for an address of IPv6."""
    return f"{with_brackets(host)}:{port}"


def is_loopback(host: str) -> bool:
    """Returns whether a host is an address that leads no further than this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def only_address(host: str) -> str:
    """Returns the one address under which others reach a host of this machine, or `EVERYWHERE`.

    A name may stand for another address on other machines: often this machine's own name is a
    loopback address here alone.
    """
    host = without_brackets(host)
    if _is_address(host):
        return host
    addresses: set[str] = set()
    with suppress(OSError, UnicodeError):
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        addresses = {str(address[0]) for *_, address in infos}
    if len(addresses) != 1:
        return EVERYWHERE
    (address,) = addresses
    return EVERYWHERE if is_loopback(address) and host != "localhost" else address


def is_resolved(host: str) -> bool:
    """Returns whether a host is an address, or a name that this machine can resolve now."""
    host = without_brackets(host)
    try:
        return _is_address(host) or bool(socket.getaddrinfo(host, None))
    except (OSError, UnicodeError):
        return False


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_local(address: str) -> bool:
    """Returns whether a socket of this machine can have the address."""
    try:
        bound_socket(address).close()
        return True
    except OSError:
        return False


def ipv6_addresses() -> list[str]:
    """Returns this machine's addresses of IPv6, but for those that are valid on one link alone."""
    addresses = []
    with suppress(OSError):  # a thread may be in a network of its own
        for line in Path("/proc/thread-self/net/if_inet6").read_text().splitlines():
            addresses.append(ipaddress.IPv6Address(bytes.fromhex(line.split()[0])))
    return [str(address) for address in addresses if not address.is_link_local]


def loopback() -> str:
    """Returns the address by which processes of this machine reach each other."""
    return next(filter(is_local, LOOPBACKS), LOOPBACKS[0])


def bound_socket(host: str = EVERYWHERE, port: int = 0) -> socket.socket:
    """Returns a TCP socket that is bound to an address of this machine, and does not listen.

    Args:
        host: Name or address, perhaps in brackets; empty or `::`: every address, also of IPv4.
        port: Port; 0: any that is free.

    Raises:
        OSError: No socket can be bound to any address of the host.
    """
    host = without_brackets(host)
    if host in ("", EVERYWHERE):
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        return _bound(family, (EVERYWHERE if family == socket.AF_INET6 else "0.0.0.0", port))
    problem: OSError | None = None
    for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            return _bound(family, address)
        except OSError as error:
            problem = problem or error
    raise problem or OSError(f"{host} has no address")


def _bound(family: int, address: tuple[object, ...]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            is_everywhere = address[0] == EVERYWHERE
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(not is_everywhere))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        return sock
    except BaseException:
        sock.close()
        raise


def source_address(host: str, port: int = DISCARD_PORT) -> str | None:
    """Returns this machine's address on the route to a host; None: there is no route to it.

    Args:
        host: Name or address, perhaps in brackets.
        port: Port at which the host would be reached; nothing is sent.
    """
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(
            without_brackets(host), port, type=socket.SOCK_DGRAM
        ):
            with socket.socket(family, kind) as probe, suppress(OSError):
                probe.connect(address)
                return str(probe.getsockname()[0])
    return None
