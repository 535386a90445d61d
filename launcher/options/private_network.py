"""Decides where a node may listen under `--require-private-network`, and what it tells gloo and
NCCL.

Pure. Gloo and NCCL take interfaces by name, and listen at the first address of each: the first one
of IPv4, or else one of IPv6.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elasticzero.errors import UserError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Range = ipaddress.IPv4Network | ipaddress.IPv6Network
Place = tuple[str, Address]
"""An interface of this machine, and one of its addresses."""

FLAG = "--require-private-network"
GLOO_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
NCCL_INTERFACE_VARIABLE = "NCCL_SOCKET_IFNAME"
NCCL_FAMILY_VARIABLE = "NCCL_SOCKET_FAMILY"
NCCL_TRANSPORT_VARIABLE = "NCCL_NET"
SOCKETS = "Socket"
"""Value of NCCL_NET by which NCCL sends over sockets alone, and not over InfiniBand or a plugin."""
_FAMILIES = {"AF_INET": 4, "AF_INET6": 6}
_INTERFACE = re.compile(r"[^\s/:,]{1,15}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateNetwork:
    """Names the networks and the interfaces outside of which nothing of a node may listen."""

    text: str
    """The option's value, for messages."""
    ranges: tuple[Range, ...] = ()
    interfaces: tuple[str, ...] = ()

    def has(self, interface: str, address: Address) -> bool:
        """Returns whether an address that an interface of this machine has is in the network."""
        return interface in self.interfaces or any(address in network for network in self.ranges)

    def refusal(self, what: str, next_step: str) -> UserError:
        """Returns the error that something is not in the network.

        Args:
            what: What is not in it, with its address.
            next_step: What the user can do.
        """
        return UserError(f"{FLAG} {self.text}: {what}, which is not in it; {next_step}")


def private_network(flag: str, value: Any) -> PrivateNetwork | None:
    """Returns the networks and interfaces that the option names, separated by commas; None: it was
    not given.

    Args:
        flag: The option, for the error.
        value: Its value.

    Raises:
        UserError: A part is neither a network nor the name of an interface, or every address is in
            it.
    """
    if not value:
        return None
    ranges, interfaces = [], []
    for part in (text.strip() for text in str(value).split(",")):
        if "/" in part:
            ranges.append(_range(flag, part))
        elif _INTERFACE.fullmatch(part) and not _is_address(part):
            interfaces.append(part)
        else:
            raise UserError(
                f"{flag} {part}: a network such as 10.8.0.0/24 or fd00::/64, or an interface such "
                "as wg0, is expected"
            )
    return PrivateNetwork(text=str(value), ranges=tuple(ranges), interfaces=tuple(interfaces))


def _range(flag: str, text: str) -> Range:
    try:
        network = ipaddress.ip_network(text, strict=False)
    except ValueError as error:
        raise UserError(f"{flag} {text}: {error}; 10.8.0.0/24 or fd00::/64 is expected") from None
    if network.prefixlen == 0:
        raise UserError(f"{flag} {text}: every address is in it; name the private network")
    return network


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def place_in(
    network: PrivateNetwork,
    host: str,
    addresses: Collection[Address],
    places: Sequence[Place],
) -> Place:
    """Returns the interface and the address at which other nodes reach this one.

    Each address that the host's name means must be in the network, for others may take any of them.

    Args:
        network: The network.
        host: Name or address of this node.
        addresses: Addresses that it means.
        places: Interfaces and addresses of this machine, in the kernel's order.

    Raises:
        UserError: An address is not in the network, or not this machine's.
    """
    inside = {address: name for name, address in places if network.has(name, address)}
    outside = [address for address in addresses if address not in inside]
    if addresses and not outside:
        address = next(iter(addresses))
        return inside[address], address
    named = str(outside[0]) if outside else host
    via = f" ({host})" if named != host else ""
    usable = [address for address in inside if not address.is_link_local]
    if usable:
        step = f"give --host {usable[0]}, this machine's address in it"
    else:
        step = (
            "bring up this machine's interface there, or name the network that it has: no address "
            "of this machine is in it"
        )
    raise network.refusal(f"other nodes would reach this one at {named}{via}", step)


def interface_variables(
    network: PrivateNetwork,
    interface: str,
    places: Sequence[Place],
    environment: Mapping[str, str],
) -> dict[str, str]:
    """Returns the variables by which gloo and NCCL listen in the network alone.

    What the environment has stays as it is, if it leads into the network.

    Args:
        network: The network.
        interface: Interface that has this node's address.
        places: Interfaces and addresses of this machine, in the kernel's order.
        environment: Variables of the workers.

    Raises:
        UserError: Gloo or NCCL would listen elsewhere, or send by another way than sockets.
    """
    added = {}
    names = list(dict.fromkeys(name for name, _ in places))
    gloo = environment.get(GLOO_INTERFACE_VARIABLE)
    nccl = environment.get(NCCL_INTERFACE_VARIABLE)
    family = _FAMILIES.get(environment.get(NCCL_FAMILY_VARIABLE, ""))
    if gloo:
        _check(network, f"{GLOO_INTERFACE_VARIABLE}={gloo}", gloo.split(","), places)
    else:
        _check(network, "gloo", [interface], places)
        added[GLOO_INTERFACE_VARIABLE] = interface
    if nccl:
        chosen = selected_by_nccl(nccl, names)
        _check(network, f"{NCCL_INTERFACE_VARIABLE}={nccl}", chosen, places, family)
    else:
        _check(network, "NCCL", [interface], places, family)
        added[NCCL_INTERFACE_VARIABLE] = f"={interface}"
    transport = environment.get(NCCL_TRANSPORT_VARIABLE)
    if transport and transport.lower() != SOCKETS.lower():
        raise network.refusal(
            f"{NCCL_TRANSPORT_VARIABLE}={transport} has NCCL send by another way than sockets",
            f"unset {NCCL_TRANSPORT_VARIABLE}, or leave {FLAG} out",
        )
    if not transport:
        added[NCCL_TRANSPORT_VARIABLE] = SOCKETS
    return added


def selected_by_nccl(value: str, names: Iterable[str]) -> list[str]:
    """Returns the interfaces that a value of NCCL_SOCKET_IFNAME selects.

    `^` before the list excludes, and `=` compares whole names; otherwise they are prefixes.

    Args:
        value: The value.
        names: Interfaces of this machine.
    """
    excludes, rest = value.startswith("^"), value.removeprefix("^")
    exact, rest = rest.startswith("="), rest.removeprefix("=")
    parts = [part.partition(":")[0] for part in rest.split(",") if part]

    def is_listed(name: str) -> bool:
        return name in parts if exact else any(name.startswith(part) for part in parts)

    return [name for name in names if is_listed(name) is not excludes]


def listening_addresses(
    interface: str, places: Iterable[Place], family: int | None = None
) -> Sequence[Address]:
    """Returns the addresses at one of which gloo or NCCL listens on an interface.

    Args:
        interface: Name of the interface.
        places: Interfaces and addresses of this machine, in the kernel's order.
        family: 4 or 6, the version of IP that NCCL was told to take; None: any.
    """
    addresses = [address for name, address in places if name == interface]
    of_ipv4 = [address for address in addresses if address.version == 4]
    of_ipv6 = [a for a in addresses if a.version == 6 and not a.is_link_local]
    if family != 6 and of_ipv4:
        return of_ipv4[:1]
    return [] if family == 4 else of_ipv6


def _check(
    network: PrivateNetwork,
    listener: str,
    interfaces: Iterable[str],
    places: Sequence[Place],
    family: int | None = None,
) -> None:
    """Raises `UserError` where a listener would take an address that is not in the network.

    Args:
        network: The network.
        listener: `gloo` or `NCCL`, or the variable that leads it elsewhere.
        interfaces: Interfaces that it takes.
        places: Interfaces and addresses of this machine, in the kernel's order.
        family: Version of IP that it takes; None: any.
    """
    for interface in interfaces:
        for address in listening_addresses(interface, places, family):
            if network.has(interface, address):
                continue
            variable, is_set, _ = listener.partition("=")
            if is_set:
                what, step = f"{listener} means {address} of {interface}", f"unset {variable}"
            else:
                what = f"{listener} takes {address}, the first address of {interface}"
                step = "name that network too, or take another interface by --host"
            raise network.refusal(what, step)
