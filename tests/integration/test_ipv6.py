"""Nodes that have IPv6 alone, also as their loopback: networks of their own without IPv4."""

from __future__ import annotations

import ctypes
import http.client
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from elasticzero.launcher.local.cluster import Placement
from elasticzero.launcher.store.etcd.server import EtcdServer
from elasticzero.processes import descendants
from tests.integration.clusters import REGRESSION, elasticzero, events_in, story
from tests.support.deadlines import patience

CLONE_NEWNET = 0x40000000
PREFIX = "fd00:e1a5:71c2::"
T = TypeVar("T")


class Ipv6Networks:
    """Network namespaces `a` and `b` without IPv4, joined by a cable."""

    def __init__(self) -> None:
        self._tag = f"ez6{os.getpid() & 0xFFFFFF:06x}"
        self.names = {node: f"{self._tag}{node}" for node in "ab"}
        self.addresses = {"a": f"{PREFIX}a", "b": f"{PREFIX}b"}
        for name in self.names.values():
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "del", "127.0.0.1/8", "dev", "lo")
        end = ("type", "veth", "peer", "name", "eth0", "netns", self.names["b"])
        ip("-n", self.names["a"], "link", "add", "eth0", *end)
        for node, name in self.names.items():
            ip("-n", name, "addr", "add", f"{self.addresses[node]}/64", "dev", "eth0", "nodad")
            ip("-n", name, "link", "set", "eth0", "up")

    def prefix(self, node: str) -> tuple[str, ...]:
        """The command that executes the words after it in the network of a node."""
        return ("ip", "netns", "exec", self.names[node])

    def inside(self, node: str, body: Callable[[], T]) -> T:
        """What `body` returns, in a thread whose sockets and processes are in a node's network."""

        def enter() -> T:
            with open(f"/run/netns/{self.names[node]}") as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            return body()

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(enter).result()

    def close(self) -> None:
        for name in self.names.values():
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr.strip()}"


@pytest.fixture
def networks() -> Iterator[Ipv6Networks]:
    trial = [["unshare", "-n", "ip", "link", "set", "lo", "up"], ["ip", "-6", "addr"]]
    may = shutil.which("ip") is not None and not any(
        subprocess.run(command, check=False, capture_output=True).returncode for command in trial
    )
    if not may and os.environ.get("CI") != "true":
        pytest.skip("this machine allows no network namespaces")
    made = Ipv6Networks()
    try:
        yield made
    finally:
        made.close()


@pytest.mark.timeout(150)
def test_nodes_train_and_lose_one_where_the_loopback_is_ipv6(
    networks: Ipv6Networks, tmp_path: Path, job: str
) -> None:
    """Rank 0's store was bound to IPv4: no generation formed, and no line said why."""

    def body() -> None:
        at = Placement(command_prefix=networks.prefix("a"))
        assert at.address == "::1"
        arguments = ["--nnodes", "1:2", "--strategy", "zero2", "--snapshot-every", "2"]
        arguments += [str(REGRESSION), "--epochs", "2", "--pause", "0.05"]
        with (
            EtcdServer() as etcd,
            story(tmp_path, etcd.endpoint, job, arguments, nodes=2, place=lambda name: at) as told,
        ):
            assert etcd.endpoint.startswith("[::1]:")
            told.wait_for_step(10)
            assert told.generation == 1
            lost = told.node(1).process.pid
            for pid in [lost, *descendants(lost)]:
                os.kill(pid, signal.SIGKILL)
            assert told.wait_for_end() == {"node-0": 0, "node-1": -9}, told.logs()
            assert told.generation == 2
            worlds = told.of("world")
            assert worlds[-1]["tier"] == "ram", "it went on from the replica of the lost node"

    networks.inside("a", body)


@pytest.mark.timeout(150)
def test_nodes_with_addresses_of_their_own_need_no_host(
    networks: Ipv6Networks, tmp_path: Path, job: str
) -> None:
    """As pods of a cluster that has IPv6 alone; each has an address of its link too."""

    def body() -> None:
        with EtcdServer(address="::") as etcd:
            port = etcd.endpoint.rpartition(":")[2]
            nodes = []
            for node in "ab":
                arguments = ["run", "--job", job, "--nnodes", "2", "--log-dir", str(tmp_path)]
                arguments += ["--etcd", f"[{networks.addresses['a']}]:{port}", "--node-name", node]
                arguments += ["--http-port", "0", "--max-restarts", "0", "--preemption", "none"]
                command = elasticzero(*arguments, str(REGRESSION), "--epochs", "1")
                nodes.append(
                    subprocess.Popen(
                        [*networks.prefix(node), *command], stderr=subprocess.PIPE, text=True
                    )
                )
            assert nodes[0].stderr is not None
            lines = [nodes[0].stderr.readline()]
            while "status page" not in lines[-1]:
                assert lines[-1], lines
                lines.append(nodes[0].stderr.readline())
            serving = next(e for e in events_in(tmp_path / job) if e["event"] == "serving")
            for host in (networks.addresses["a"], "::1"):
                connection = http.client.HTTPConnection(host, serving["port"], timeout=30)
                connection.request("GET", "/metrics")
                assert connection.getresponse().status == 200
                connection.close()
            outputs = [node.communicate(timeout=patience(100))[1] for node in nodes]
            assert [node.returncode for node in nodes] == [0, 0], outputs
            hosts = {e["host"] for e in events_in(tmp_path / job) if e["event"] == "serving"}
            assert hosts == set(networks.addresses.values())

    networks.inside("a", body)
