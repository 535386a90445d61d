"""Finds and shuts the TCP connections of process groups among all descriptors of this process.

gloo's abort does not wake a collective that waits, and shutting its connections does. The
descriptors are gloo's own, and scripts have others: nothing of a descriptor changes unless it is of
the group. So the names of its ends are read by the C library, since an object of Python's `socket`
may change the mode of a socket that it is made for.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

_libc = ctypes.CDLL(None)
STORAGE_BYTES = 128
"""Size in bytes of C's `sockaddr_storage`, which has room for an address of any kind."""
Address = tuple[str, int]
"""An IP address and a port."""


@dataclass(frozen=True, slots=True, eq=False)
class Connections:
    """Describes the TCP connections of one process group among all of this process's."""

    addresses: set[Address] = field(default_factory=set)
    """The addresses at which the devices of the group listen, this rank's among them: one end of
    each connection has one of these. They are complete once the ranks are connected."""
    inodes: set[int] = field(default_factory=set)
    """The sockets of connections whose addresses are not known."""


def address_of(sockaddr: bytes) -> Address | None:
    """Returns the address that C's `sockaddr` has; None: it is none of IPv4 or IPv6."""
    family, port = struct.unpack_from("=H", sockaddr)[0], struct.unpack_from("!H", sockaddr, 2)[0]
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, sockaddr[4:8]), port
    if family == socket.AF_INET6:
        return socket.inet_ntop(socket.AF_INET6, sockaddr[8:24]), port
    return None


def shut_connections(groups: Iterable[Connections]) -> None:
    """Breaks all connections of these groups, in any state, and no other."""
    listed = list(groups)
    addresses = {address for group in listed for address in tuple(group.addresses)}
    inodes = {inode for group in listed for inode in tuple(group.inodes)}
    for inode, descriptor in _sockets():
        if inode in inodes or addresses.intersection(_ends(descriptor)):
            _libc.shutdown(descriptor, socket.SHUT_RDWR)


@contextmanager
def new_connections(store_port: int) -> Iterator[Connections]:
    """Yields the connections that this process makes meanwhile, but those of rank 0's store.

    For groups whose ports are not known. Whatever else the process opens meanwhile counts too.

    Args:
        store_port: The port at which the store of rank 0 listens.
    """
    before = {inode for inode, _ in _sockets()}
    connections = Connections()
    yield connections
    for inode, descriptor in _sockets():
        ends = _ends(descriptor)
        if inode not in before and ends and store_port not in {port for _, port in ends}:
            connections.inodes.add(inode)


def _sockets() -> Iterator[tuple[int, int]]:
    """Yields the inode of each socket of this process, with a descriptor of it that nothing else
    uses or closes, until the next one."""
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            copy = os.dup(int(entry))
            try:
                status = os.fstat(copy)
                if stat.S_ISSOCK(status.st_mode):
                    yield status.st_ino, copy
            finally:
                os.close(copy)


def _ends(descriptor: int) -> tuple[Address, ...]:
    """Returns the addresses of both ends of a connection; nothing of any other socket."""
    ends = [_name(call, descriptor) for call in (_libc.getsockname, _libc.getpeername)]
    return tuple(end for end in ends if end is not None) if None not in ends else ()


def _name(call: Any, descriptor: int) -> Address | None:
    """Returns the address of an end, by the function of the C library that has its name."""
    room, size = ctypes.create_string_buffer(STORAGE_BYTES), ctypes.c_uint32(STORAGE_BYTES)
    if call(descriptor, room, ctypes.byref(size)) != 0 or size.value < 8:
        return None
    return address_of(room.raw)
