"""Which addresses are in a private network, what is refused outside of it, and in which words."""

from __future__ import annotations

import ipaddress
import itertools
import socket
from collections.abc import Mapping
from typing import Any

import pytest

from elasticzero.errors import ExitCode, UserError
from elasticzero.launcher.agent.etcd_hosting import hosted
from elasticzero.launcher.options.private_network import (
    FLAG,
    Place,
    PrivateNetwork,
    interface_variables,
    listening_addresses,
    place_in,
    private_network,
    selected_by_nccl,
)
from elasticzero.launcher.options.rendezvous import HostedEtcd
from elasticzero.launcher.protocol.documents import Member
from elasticzero.launcher.store.etcd.server import free_ports
from elasticzero.launcher.workers import gloo_interface
from elasticzero.launcher.workers.forking.requests import Launch


def at(interface: str, address: str) -> Place:
    return interface, ipaddress.ip_address(address)


MACHINE = (
    at("lo", "127.0.0.1"),
    at("eth0", "192.0.2.10"),
    at("eth0", "198.51.100.10"),
    at("wg0", "10.8.0.2"),
    at("lo", "::1"),
    at("eth0", "2001:db8::10"),
    at("eth0", "fe80::10"),
    at("wg0", "fd00:8::2"),
    at("wg6", "fd00:9::2"),
    at("wg6", "fe80::9"),
)
"""A machine with a public interface, and two that lead into private networks."""


def network(text: str) -> PrivateNetwork:
    parsed = private_network(FLAG, text)
    assert parsed is not None
    return parsed


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("10.8.0.0/24", {"10.8.0.2"}),
        ("10.8.0.2/24", {"10.8.0.2"}),
        ("fd00:8::/64", {"fd00:8::2"}),
        ("10.8.0.0/24, fd00:8::/64", {"10.8.0.2", "fd00:8::2"}),
        ("wg0", {"10.8.0.2", "fd00:8::2"}),
        ("wg0,wg6", {"10.8.0.2", "fd00:8::2", "fd00:9::2", "fe80::9"}),
        ("wg", set()),
        ("eth0,127.0.0.0/8", {"127.0.0.1", *(str(a) for n, a in MACHINE if n == "eth0")}),
        ("172.16.0.0/12", set()),
    ],
)
def test_a_network_has_these_addresses_of_the_machine(text: str, inside: set[str]) -> None:
    parsed = network(text)
    assert {str(address) for name, address in MACHINE if parsed.has(name, address)} == inside


@pytest.mark.parametrize(
    "text",
    [
        *("10.8.0.0/33", "fd00::/129", "10.8.0.2", "fd00::2", "0.0.0.0/0", "::/0", "a name"),
        *("/24", ",", "wg0,", "an-interface-of-17", "10.8.0.0/24/7", "wg0:1"),
    ],
)
def test_what_is_no_network_is_refused_by_name(text: str) -> None:
    with pytest.raises(UserError, match=f"^{FLAG} ") as error:
        private_network(FLAG, text)
    assert "\n" not in str(error.value)


def test_without_the_option_there_is_no_network() -> None:
    assert private_network(FLAG, None) is None


@pytest.mark.parametrize(
    ("text", "host", "place"),
    [
        ("10.8.0.0/24", "10.8.0.2", "wg0"),
        ("wg0", "10.8.0.2", "wg0"),
        ("fd00:9::/64", "fd00:9::2", "wg6"),
        ("192.0.2.0/24", "192.0.2.10", "eth0"),
    ],
)
def test_a_node_inside_has_its_interface(text: str, host: str, place: str) -> None:
    address = ipaddress.ip_address(host)
    assert place_in(network(text), host, [address], MACHINE) == (place, address)


@pytest.mark.parametrize(
    ("text", "host", "addresses", "sentence"),
    [
        (
            "10.8.0.0/24",
            "192.0.2.10",
            ["192.0.2.10"],
            "other nodes would reach this one at 192.0.2.10, which is not in it; give --host "
            "10.8.0.2, this machine's address in it",
        ),
        (
            "wg0",
            "node-a",
            ["10.8.0.2", "2001:db8::10"],
            "other nodes would reach this one at 2001:db8::10 (node-a), which is not in it; give "
            "--host 10.8.0.2, this machine's address in it",
        ),
        (
            "wg7",
            "10.8.0.2",
            ["10.8.0.2"],
            "other nodes would reach this one at 10.8.0.2, which is not in it; bring up this "
            "machine's interface there, or name the network that it has: no address of this "
            "machine is in it",
        ),
        (
            "10.8.0.0/24",
            "10.8.0.99",
            ["10.8.0.99"],
            "other nodes would reach this one at 10.8.0.99, which is not in it; give --host "
            "10.8.0.2, this machine's address in it",
        ),
        (
            "wg6",
            "no.such.host",
            [],
            "other nodes would reach this one at no.such.host, which is not in it; give --host "
            "fd00:9::2, this machine's address in it",
        ),
    ],
)
def test_a_node_outside_is_told_the_address_the_network_and_the_step(
    text: str, host: str, addresses: list[str], sentence: str
) -> None:
    listed = [ipaddress.ip_address(address) for address in addresses]
    with pytest.raises(UserError) as error:
        place_in(network(text), host, listed, MACHINE)
    assert str(error.value) == f"{FLAG} {text}: {sentence}"
    assert error.value.exit_code is ExitCode.USAGE


def variables(
    text: str, interface: str, environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    return interface_variables(network(text), interface, MACHINE, environment or {})


def test_gloo_and_nccl_get_the_interface_of_the_node() -> None:
    assert variables("10.8.0.0/24", "wg0") == {
        "GLOO_SOCKET_IFNAME": "wg0",
        "NCCL_SOCKET_IFNAME": "=wg0",
        "NCCL_NET": "Socket",
    }
    chosen = {"GLOO_SOCKET_IFNAME": "wg0", "NCCL_SOCKET_IFNAME": "wg", "NCCL_NET": "socket"}
    assert variables("wg0,wg6", "wg6", chosen) == {}
    assert variables("fd00:8::/64,wg0", "wg0", {"NCCL_SOCKET_FAMILY": "AF_INET6"})


@pytest.mark.parametrize(
    ("text", "interface", "environment", "parts"),
    [
        ("wg0", "wg0", {"GLOO_SOCKET_IFNAME": "eth0"}, ["192.0.2.10 of eth0", "unset GLOO_"]),
        ("wg0", "wg0", {"GLOO_SOCKET_IFNAME": "wg0,eth0"}, ["192.0.2.10 of eth0"]),
        ("wg0", "wg0", {"NCCL_SOCKET_IFNAME": "eth"}, ["192.0.2.10 of eth0", "unset NCCL_"]),
        ("wg0", "wg0", {"NCCL_SOCKET_IFNAME": "^docker,lo"}, ["^docker,lo means 192.0.2.10"]),
        ("wg0", "wg0", {"NCCL_NET": "IB"}, ["NCCL_NET=IB", "unset NCCL_NET"]),
        ("fd00:8::/64", "wg0", {}, ["gloo takes 10.8.0.2, the first address of wg0"]),
        ("10.8.0.0/24", "wg0", {"NCCL_SOCKET_FAMILY": "AF_INET6"}, ["NCCL takes fd00:8::2"]),
        ("198.51.100.0/24", "eth0", {}, ["gloo takes 192.0.2.10", "name that network too"]),
    ],
)
def test_groups_that_would_listen_elsewhere_are_refused(
    text: str, interface: str, environment: dict[str, str], parts: list[str]
) -> None:
    with pytest.raises(UserError, match=f"^{FLAG} {text}: ") as error:
        variables(text, interface, environment)
    for part in [*parts, "which is not in it; "]:
        assert part in str(error.value)


def test_no_choice_of_interfaces_leads_outside() -> None:
    """Whatever the environment says: it is refused, or all that gloo and NCCL take is inside."""
    names = ["lo", "eth0", "wg0", "wg6"]
    lists = [",".join(part) for n in (1, 2) for part in itertools.permutations(names, n)]
    nccl = [prefix + text for prefix in ("", "=", "^", "^=") for text in (*lists, "wg", "e", "x")]
    accepted = 0
    for text, interface in (("wg0", "wg0"), ("fd00:9::/64", "wg6"), ("10.8.0.0/24", "wg0")):
        parsed = network(text)
        for gloo, of_nccl in itertools.product(["", *lists], ["", *nccl]):
            environment = {"GLOO_SOCKET_IFNAME": gloo, "NCCL_SOCKET_IFNAME": of_nccl}
            try:
                added = variables(text, interface, environment)
            except UserError:
                continue
            accepted += 1
            told = {**environment, **added}
            taken = told["GLOO_SOCKET_IFNAME"].split(",")
            taken += selected_by_nccl(told["NCCL_SOCKET_IFNAME"], names)
            for name in taken:
                for address in listening_addresses(name, MACHINE):
                    assert parsed.has(name, address), (text, environment, name)
    assert accepted > 20


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("eth", ["eth0", "eth1"]),
        ("=eth", []),
        ("=eth1,lo", ["eth1", "lo"]),
        ("^eth", ["lo", "wg0"]),
        ("^=eth0", ["eth1", "lo", "wg0"]),
        ("eth0:5000", ["eth0"]),
    ],
)
def test_nccls_lists_are_read_as_nccl_reads_them(value: str, names: list[str]) -> None:
    assert selected_by_nccl(value, ["eth0", "eth1", "lo", "wg0"]) == names


LAUNCH = Launch(
    target="train.py", is_module=False, arguments=(), environment={"PATH": "/bin"}, directory="/"
)


def test_workers_of_this_machine_are_confined_to_its_loopback() -> None:
    launch, address = gloo_interface.confined(LAUNCH, "127.0.0.1", network("127.0.0.0/8"))
    assert address == "127.0.0.1"
    assert launch.environment == {
        "PATH": "/bin",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "=lo",
        "NCCL_NET": "Socket",
    }
    with pytest.raises(UserError, match=r"reach this one at 127\.0\.0\.1, which is not in it"):
        gloo_interface.confined(LAUNCH, "127.0.0.1", network("10.8.0.0/24"))
    with pytest.raises(UserError, match=r"at no\.such\.host\.invalid, which is not in it"):
        gloo_interface.confined(LAUNCH, "no.such.host.invalid", network("127.0.0.0/8"))


@pytest.mark.parametrize(
    ("host", "where"), [("localhost", "127.0.0.1"), (socket.gethostname(), "every address")]
)
def test_an_etcd_that_would_listen_outside_is_not_started(host: str, where: str) -> None:
    """Who reaches it commands the job."""
    etcd = HostedEtcd(host=host, port=free_ports(1)[0], starts_here=True)
    told: list[str] = []
    refusal = f"the etcd that this node starts for all would listen at {where}"
    with (
        pytest.raises(UserError, match=refusal) as error,
        hosted(etcd, told.append, network("203.0.113.0/24")),
    ):
        pass
    assert "--rdzv-endpoint" in str(error.value) and not told
    assert gloo_interface.has_address(network("lo"), "127.0.0.1")
    assert not gloo_interface.has_address(network("127.0.0.0/8"), "::")


def member(node: str, host: str, **changes: Any) -> Member:
    return Member(node, "i", host, 1, 1, 1, **changes)


@pytest.mark.parametrize("text", ["127.0.0.0/8", "lo"])
def test_a_world_with_a_node_outside_is_refused(text: str) -> None:
    parsed = network(text)
    gloo_interface.check_members(parsed, [member("a", "127.0.0.1"), member("b", "127.0.0.2")])
    for host in ("192.0.2.77", "2001:db8::77", "localhost", "no.such.host.invalid"):
        with pytest.raises(UserError, match=f"node b of this job is at {host}, which is not in it"):
            gloo_interface.check_members(parsed, [member("a", "127.0.0.1"), member("b", host)])
