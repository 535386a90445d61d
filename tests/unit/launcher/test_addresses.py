"""How addresses of both families are written, bound and found."""

from __future__ import annotations

import socket

import pytest

from elasticzero.launcher import addresses
from elasticzero.launcher.protocol.documents import Member


@pytest.mark.parametrize(
    ("host", "port", "expected"),
    [
        ("10.0.0.7", 2379, "10.0.0.7:2379"),
        ("node-a", 80, "node-a:80"),
        ("fd00::7", 2379, "[fd00::7]:2379"),
        ("::", 0, "[::]:0"),
    ],
)
def test_a_host_and_its_port(host: str, port: int, expected: str) -> None:
    assert addresses.host_and_port(host, port) == expected
    bare = addresses.without_brackets(expected.rpartition(":")[0])
    assert bare == host == addresses.without_brackets(host)
    assert Member("n", "i", host, port, 1, 1).address == expected


def test_a_socket_for_every_address_takes_both_families() -> None:
    with addresses.bound_socket() as listening:
        listening.listen()
        port = listening.getsockname()[1]
        for address in filter(addresses.is_local, addresses.LOOPBACKS):
            socket.create_connection((address, port), timeout=30).close()
        with pytest.raises(OSError, match="in use"):
            addresses.bound_socket(addresses.loopback(), port).close()


def test_a_socket_for_one_address_takes_no_other() -> None:
    with addresses.bound_socket("127.0.0.1") as sock:
        assert sock.getsockname()[0] == "127.0.0.1"
    with pytest.raises(OSError):
        addresses.bound_socket("192.0.2.77")
    assert not addresses.is_local("192.0.2.77")


@pytest.mark.parametrize(
    ("host", "resolved", "expected"),
    [
        ("10.0.0.7", [], "10.0.0.7"),
        ("[fd00::7]", [], "fd00::7"),
        ("node-a", ["10.0.0.7"], "10.0.0.7"),
        ("node-a", ["10.0.0.7", "10.0.0.7"], "10.0.0.7"),
        ("node-a", ["10.0.0.7", "fd00::7"], addresses.EVERYWHERE),
        ("node-a", ["127.0.1.1"], addresses.EVERYWHERE),
        ("node-a", [], addresses.EVERYWHERE),
        ("localhost", ["127.0.0.1"], "127.0.0.1"),
        ("localhost", ["::1", "127.0.0.1"], addresses.EVERYWHERE),
        ("", [], addresses.EVERYWHERE),
        (addresses.EVERYWHERE, [], addresses.EVERYWHERE),
    ],
)
def test_a_host_is_one_address_where_that_is_plain(
    monkeypatch: pytest.MonkeyPatch, host: str, resolved: list[str], expected: str
) -> None:
    """A name may be a loopback address on its own machine alone."""

    def getaddrinfo(name: str, port: object, **options: object) -> list[tuple[object, ...]]:
        if not resolved:
            raise socket.gaierror("no such name")
        return [(0, 0, 0, "", (address, 0)) for address in resolved]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert addresses.only_address(host) == expected


def test_a_machine_without_ipv6_binds_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with addresses.bound_socket() as sock:
        assert sock.family == socket.AF_INET


def test_the_loopback_is_what_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "is_local", lambda address: address == "::1")
    assert addresses.loopback() == "::1"
    monkeypatch.setattr(addresses, "is_local", lambda address: False)
    assert addresses.loopback() == "127.0.0.1", "an error that names it is understood"


def test_the_route_to_a_host_begins_at_an_own_address() -> None:
    loopback = addresses.loopback()
    assert addresses.source_address(loopback) == loopback
    assert addresses.source_address("no.such.host.invalid") is None
    assert addresses.is_loopback("127.0.0.9") and addresses.is_loopback("::1")
    assert not addresses.is_loopback("localhost") and not addresses.is_loopback("fd00::7")


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "fd00::7", "localhost"])
def test_an_address_needs_no_resolver(host: str) -> None:
    assert addresses.is_resolved(host)


@pytest.mark.parametrize("host", ["no-host.invalid", "a..b", "node a"])
def test_a_name_without_an_address_is_not_resolved(host: str) -> None:
    """RFC 6761: no name below `invalid` has an address."""
    assert not addresses.is_resolved(host)
