"""A node that is confined to a private network listens nowhere else, and meets nobody elsewhere."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from elasticzero.launcher.store.api import job_prefix
from elasticzero.launcher.store.etcd.server import EtcdServer
from elasticzero.launcher.store.etcd.store import EtcdStore
from elasticzero.launcher.store.watch_cache import MEMBERS
from elasticzero.ops.doctor.finding import Finding
from elasticzero.ops.doctor.path_probes import path_facts
from elasticzero.ops.doctor.path_rules import judge_path
from tests.integration.clusters import REGRESSION, elasticzero, events_in
from tests.integration.ipv6_networks import CLONE_NEWNET, PREFIX, Ipv6Networks, ipv6_networks
from tests.support.deadlines import patience

PUBLIC = "2001:db8:71c2::"


@pytest.fixture
def networks() -> Iterator[Ipv6Networks]:
    yield from ipv6_networks()


def node_command(job: str, folder: Path, etcd: str, name: str, *options: str) -> list[str]:
    arguments = ["run", "--job", job, "--nnodes", "2", "--log-dir", str(folder), "--etcd", etcd]
    arguments += ["--http-port", "0", "--node-name", name, "--max-restarts", "0"]
    arguments += ["--preemption", "none", *options, str(REGRESSION), "--epochs", "1"]
    return elasticzero(*arguments, "--pause", "0.02")


def test_a_node_outside_does_not_start(etcd: EtcdServer, tmp_path: Path, job: str) -> None:
    config = tmp_path / "job.toml"
    config.write_text('[network]\nrequire-private-network = "203.0.113.0/24"\n')
    options = ["--config", str(config), "--host", "127.0.0.1"]
    command = node_command(job, tmp_path / "logs", etcd.endpoint, "a", *options)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 64, done.stderr
    (line,) = [row for row in done.stderr.splitlines() if "private-network" in row]
    refusal = "--require-private-network 203.0.113.0/24: other nodes would reach this one at"
    assert f"{refusal} 127.0.0.1, which is not in it; bring up this machine's interface" in line
    assert f"{config}:2" in line
    with EtcdStore([etcd.endpoint], job_prefix(job)) as store:
        assert not store.read(MEMBERS).entries


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_nothing_but_http_listens_outside(networks: Ipv6Networks, tmp_path: Path, job: str) -> None:
    """Nodes that have IPv6 alone, each with a public address besides: rank 0's store and the ranks'
    connections listened there too."""
    networks.lay("pub0", PUBLIC)

    def body() -> None:
        with EtcdServer(address="::") as etcd:
            port = int(etcd.endpoint.rpartition(":")[2])
            options = ["--require-private-network", f"{PREFIX}/64"]
            at = f"[{networks.addresses['a']}]:{port}"
            nodes = [
                subprocess.Popen(
                    [*networks.prefix(n), *node_command(job, tmp_path, at, n, *options)],
                    stderr=subprocess.PIPE,
                    text=True,
                )
                for n in "ab"
            ]
            seen = set()
            deadline_s = time.monotonic() + patience(100)
            while any(node.poll() is None for node in nodes):
                assert time.monotonic() < deadline_s
                seen |= networks.listening("a") | networks.listening("b")
                time.sleep(0.05)
            outputs = [node.communicate()[1] for node in nodes]
            assert [node.returncode for node in nodes] == [0, 0], outputs
        serving = [e for e in events_in(tmp_path / job) if e["event"] == "serving"]
        assert {e["host"] for e in serving} == set(networks.addresses.values())
        allowed = {port, *(e["port"] for e in serving)}
        others = [(a, p) for a, p in seen if p not in allowed and not a.is_loopback]
        inside = ipaddress.ip_network(f"{PREFIX}/64")
        assert [place for place in others if place[0] not in inside] == []
        assert len({address for address, _ in others}) == 2, "both nodes have gloo's ports"

    networks.inside("a", body)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_no_group_is_formed_with_a_node_outside(
    networks: Ipv6Networks, tmp_path: Path, job: str
) -> None:
    """A node without the option came by its public address, and the others sent it gradients."""
    public = networks.lay("pub0", PUBLIC)

    def body() -> None:
        with EtcdServer(address="::") as etcd:
            at = f"[{networks.addresses['a']}]:{etcd.endpoint.rpartition(':')[2]}"
            private = ["--require-private-network", "eth0"]
            outside = node_command(job, tmp_path, at, "a", *private, "--host", public["a"])
            done = subprocess.run(
                [*networks.prefix("a"), *outside], capture_output=True, text=True, timeout=60
            )
            assert done.returncode == 64
            assert f"at {public['a']}, which is not in it; give --host {PREFIX}a" in done.stderr
            commands = {
                "a": node_command(job, tmp_path, at, "a", *private),
                "b": node_command(job, tmp_path, at, "b", "--host", public["b"]),
            }
            nodes = {
                node: subprocess.Popen(
                    [*networks.prefix(node), *command], stderr=subprocess.PIPE, text=True
                )
                for node, command in commands.items()
            }
            try:
                told = nodes["a"].communicate(timeout=patience(100))[1]
            finally:
                nodes["b"].kill()
                nodes["b"].communicate()
            assert nodes["a"].returncode == 71, told
            assert f"node b of this job is at {public['b']}, which is not in it" in told
            starts = [e for e in events_in(tmp_path / job) if e["event"] == "step"]
            assert not starts, "no step was made with it"

    networks.inside("a", body)


def in_new_network(body: Callable[[], Finding]) -> Finding:
    """What `body` returns, in a thread with a network of its own."""

    def enter() -> Finding:
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
            if os.environ.get("CI") == "true":
                raise OSError(ctypes.get_errno(), "unshare")
            pytest.skip("this machine allows no network namespaces")
        return body()

    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` command (Debian's package iproute2)")
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(enter).result()


def ran(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


POLICY = (
    *("ip", "xfrm", "policy", "add", "src", "10.77.0.1/32", "dst", "10.77.0.2/32", "dir", "out"),
    *("tmpl", "src", "10.77.0.1", "dst", "10.77.0.2", "proto", "esp", "reqid", "1"),
)


@pytest.mark.parametrize(
    ("making", "with_policy", "level", "text"),
    [
        ("link add x7 type veth peer name y7", False, "note", "cannot be seen: this is a contai"),
        ("link add x7 type veth peer name y7", True, "ok", "demands IPsec (ESP)"),
        ("link add x7 type bridge", False, "note", "leave by x7 as they are"),
        ("link add x7 type dummy", False, "note", "leave by x7 as they are"),
        ("tuntap add dev x7 mode tun", False, "note", "cannot be seen: a program of this machine"),
        ("link add x7 type wireguard", False, "ok", "leave by x7, which encrypts them: WireGuard"),
        ("link add x7 type xfrm dev lo if_id 7", False, "ok", "which encrypts them: IPsec"),
    ],
)
def test_the_way_to_a_peer_over_a_real_interface(
    making: str, with_policy: bool, level: str, text: str
) -> None:
    def body() -> Finding:
        if not ran("ip", *making.split()):
            pytest.skip(f"this kernel does not do: ip {making}")
        for command in (
            "link set lo up",
            "addr add 10.77.0.1/24 dev x7",
            "link set x7 up",
        ):
            assert ran("ip", *command.split()), command
        if with_policy and not ran(*POLICY):
            pytest.skip("this kernel has no IPsec policies")
        local = judge_path(path_facts("10.77.0.1"))
        assert (local.level, local.text) == (
            "ok",
            "10.77.0.1 is this machine: nothing leaves it",
        )
        return judge_path(path_facts("10.77.0.2"))

    finding = in_new_network(body)
    assert finding.level == level, finding
    assert text in finding.text
