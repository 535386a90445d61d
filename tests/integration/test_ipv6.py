"""Nodes that have IPv6 alone, also as their loopback: networks of their own without IPv4."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import os
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
from cryptography import x509

from elasticzero.comm.store.wire import MAGIC
from elasticzero.launcher.local.cluster import Placement
from elasticzero.launcher.secrets import TOKEN, Secret
from elasticzero.launcher.store.etcd.server import EtcdServer
from elasticzero.launcher.tls.authority import JobAuthority
from elasticzero.processes import descendants
from tests.integration.clusters import REGRESSION, elasticzero, events_in, story
from tests.integration.ipv6_networks import PREFIX, Ipv6Networks, ipv6_networks
from tests.integration.packet_sniffer import PacketSniffer
from tests.integration.test_tls_job import weights_of
from tests.support.certificates import Authority, Mounted
from tests.support.deadlines import patience

JOB_TOKEN = "the-token-of-this-very-job"
HANDSHAKE, ALERT = b"\x16\x03", b"\x15\x03"
"""What each side of a connection with TLS sends first; an alert, where it takes no handshake."""
RANK_STORE, STORE_KEY = MAGIC, b"/here/count"
"""What the ranks' store sends first, and a part of a key that each rank names there."""


@pytest.fixture
def networks() -> Iterator[Ipv6Networks]:
    yield from ipv6_networks()


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_nodes_with_addresses_of_their_own_need_no_host(
    networks: Ipv6Networks, tmp_path: Path, job: str
) -> None:
    """As pods of a cluster that has IPv6 alone; each has an address of its link too. They use TLS
    with certificates that name these addresses."""
    environment = {**os.environ, TOKEN: JOB_TOKEN}
    authority = JobAuthority(Secret(JOB_TOKEN), job).certificate

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
                        [*networks.prefix(node), *command],
                        stderr=subprocess.PIPE,
                        text=True,
                        env=environment,
                    )
                )
            assert nodes[0].stderr is not None
            lines = [nodes[0].stderr.readline()]
            while "status page" not in lines[-1]:
                assert lines[-1], lines
                lines.append(nodes[0].stderr.readline())
            serving = next(e for e in events_in(tmp_path / job) if e["event"] == "serving")
            for host in (networks.addresses["a"], "::1"):
                context = ssl.create_default_context(cadata=authority)
                connection = http.client.HTTPSConnection(
                    host, serving["port"], timeout=30, context=context
                )
                connection.request("GET", "/metrics")
                assert connection.getresponse().status == 200
                connection.close()
            outputs = [node.communicate(timeout=patience(100))[1] for node in nodes]
            assert [node.returncode for node in nodes] == [0, 0], outputs
            hosts = {e["host"] for e in events_in(tmp_path / job) if e["event"] == "serving"}
            assert hosts == set(networks.addresses.values())

    networks.inside("a", body)


def shown_certificate(address: str, port: int, authorities: Path) -> bytes:
    """The certificate that a node's server shows, which is one for its address."""
    context = ssl.create_default_context(cafile=authorities)
    with (
        socket.create_connection((address, port), timeout=patience(30)) as plain,
        context.wrap_socket(plain, server_hostname=address) as secured,
    ):
        shown = secured.getpeercert(binary_form=True)
    assert shown is not None
    return shown


class CertificateFiles:
    """The certificates of two nodes, each with the node's address, as cert-manager gives them."""

    def __init__(self, folder: Path, addresses: Mapping[str, str]) -> None:
        self._authority = Authority(folder, "ours")
        self._addresses = addresses
        self._mounted = {node: Mounted(folder / node) for node in addresses}
        self.renew("first")

    def renew(self, name: str) -> None:
        for node, mounted in self._mounted.items():
            address = x509.IPAddress(ipaddress.ip_address(self._addresses[node]))
            mounted.sign(self._authority, f"{node}-{name}", address)

    def environment(self, node: str) -> dict[str, str]:
        files = self._mounted[node].files
        names = zip(("CERT", "KEY", "CA"), files.paths(), strict=True)
        return {f"ELASTICZERO_TLS_{name}": path for name, path in names}

    def shown_by(self, node: str, port: int) -> bool:
        """Tells whether a node's server shows the newest certificate."""
        certificate = Path(self._mounted[node].files.certificate).read_text()
        shown = shown_certificate(self._addresses[node], port, self._authority.cert)
        return shown == ssl.PEM_cert_to_DER_cert(certificate)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", ["job", "files", "off"])
def test_a_node_that_is_cut_off_comes_back(
    mode: str, networks: Ipv6Networks, tmp_path: Path, job: str
) -> None:
    """Each node has a network of its own and is confined to the one that joins them. Between them
    a sniffer finds no token, and no snapshot but without TLS: what ranks gather of weights is not
    encrypted, so that bytes of the optimizer's state are looked for. Certificates in files are
    renewed while the node is away."""
    files = CertificateFiles(tmp_path / "pems", networks.addresses)
    secrets = {TOKEN: JOB_TOKEN}
    places = {
        f"node-{number}": Placement(
            command_prefix=networks.prefix(node),
            address=networks.addresses[node],
            environment=secrets | (files.environment(node) if mode == "files" else {}),
        )
        for number, node in enumerate("ab")
    }
    arguments = ["--nnodes", "1:2", "--strategy", "zero2", "--snapshot-every", "2", "--tls", mode]
    arguments += ["--lease-ttl", "3", "--require-private-network", f"{PREFIX}/64"]
    arguments += [str(REGRESSION), "--epochs", "8", "--pause", "0.05", "--hidden", "64"]
    windows: set[bytes] = set()

    def body() -> None:
        with (
            EtcdServer(address="::") as etcd,
            contextlib.closing(PacketSniffer(networks.packets("a"))) as sniffer,
        ):
            at = f"[{networks.addresses['a']}]:{etcd.endpoint.rpartition(':')[2]}"
            with story(tmp_path, at, job, arguments, nodes=2, place=places.__getitem__) as told:
                for step in (4, 7, 10):
                    told.wait_for_step(step)
                    windows.update(weights_of(told))
                told.pause(0.5)
                networks.cut("b")
                files.renew("second")
                told.wait_for_generation(2)
                told.wait_for_first_step(2)
                networks.mend("b")
                told.wait_for_generation(3)
                told.wait_for_first_step(3)
                windows.update(weights_of(told))
                ports = {
                    node: event["port"] for node, event in told.told if event["event"] == "serving"
                }
                if mode == "files":
                    for number, node in enumerate("ab"):
                        shown = partial(files.shown_by, node, ports[f"node-{number}"])
                        told.wait(f"a renewed certificate of {node}", shown)
                assert told.wait_for_end() == {"node-0": 0, "node-1": 0}, told.logs()
            tier = told.of("world")[-1]["tier"]
            assert tier in ("live", "ram"), "no finished step was lost"
            assert sniffer.count_lost() == 0
            streams = sniffer.streams()

            def passed(secret: bytes) -> bool:
                return any(secret in stream for stream in streams)

            assert passed(job.encode()), "the keys of the job in etcd"
            assert any(stream.startswith(RANK_STORE) for stream in streams)
            assert passed(STORE_KEY) == (mode == "off")
            assert not passed(JOB_TOKEN.encode())
            begins = {stream[: len(HANDSHAKE)] for stream in sniffer.streams(set(ports.values()))}
            assert (begins <= {HANDSHAKE, ALERT}) == (mode != "off"), begins
            assert len(windows) > 4
            assert any(map(passed, windows)) == (mode == "off")

    networks.inside("a", body)
