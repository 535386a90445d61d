"""Which connections of this process are a group's, and that no others are touched."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from elasticzero.rank_groups.connections import Connections, new_connections, shut_connections

Pair = tuple[socket.socket, socket.socket]
Connect = Callable[[socket.socket], Pair]


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def listener(opened: ExitStack, host: str = "127.0.0.1") -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return opened.enter_context(socket.create_server((host, 0), family=family))


def pair(opened: ExitStack, server: socket.socket) -> Pair:
    """A connection to a listener, as the one that connects has it and as the listener's end."""
    client = opened.enter_context(socket.create_connection(server.getsockname()[:2]))
    client.settimeout(5)
    return client, opened.enter_context(server.accept()[0])


def is_open(ends: Pair) -> bool:
    """Whether what one end sends arrives at the other."""
    try:
        ends[0].sendall(b"x")
        return ends[1].recv(1) == b"x"
    except ConnectionError:
        return False


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_connections_of_a_group_are_known_by_the_listener_at_one_end(
    opened: ExitStack, host: str
) -> None:
    ours, other = listener(opened, host), listener(opened, host)
    broken, kept = [pair(opened, ours) for _ in range(2)], pair(opened, other)
    unix = socket.socketpair()
    for end in unix:
        opened.enter_context(end)
    shut_connections([Connections(addresses={ours.getsockname()[:2]})])
    assert [is_open(ends) for ends in broken] == [False, False]
    assert is_open(kept) and is_open(unix)
    assert is_open(pair(opened, ours)), "the listener itself is left as it is"


def test_several_groups_are_shut_together(opened: ExitStack) -> None:
    listeners = [listener(opened) for _ in range(3)]
    pairs = [pair(opened, server) for server in listeners]
    shut_connections(Connections(addresses={s.getsockname()}) for s in listeners[:2])
    assert [is_open(ends) for ends in pairs] == [False, False, True]


def test_a_socket_that_does_not_block_goes_on_so(opened: ExitStack) -> None:
    """An object of Python's `socket` would set the mode by its default."""
    ours = listener(opened)
    client, _ = pair(opened, listener(opened))
    client.settimeout(None)
    socket.setdefaulttimeout(1.0)
    try:
        shut_connections([Connections(addresses={ours.getsockname()})])
    finally:
        socket.setdefaulttimeout(None)
    assert os.get_blocking(client.fileno())


def test_new_connections_are_those_of_the_time_but_for_the_store(opened: ExitStack) -> None:
    store, server = listener(opened), listener(opened)
    before = pair(opened, server)
    with new_connections(store.getsockname()[1]) as connections:
        of_store, made = pair(opened, store), pair(opened, server)
        listener(opened)
    after = pair(opened, server)
    assert len(connections.inodes) == 2
    shut_connections([connections])
    assert [is_open(ends) for ends in (before, of_store, made, after)] == [True, True, False, True]
