"""Gloo's groups listen where `--host` says, whatever the machine's own name resolves to."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticzero.launcher.store.etcd.server import EtcdServer
from elasticzero.launcher.workers.gloo_interface import interface_of
from tests.chaos.networks import Networks, NoNetworks
from tests.integration.clusters import REGRESSION, elasticzero


@pytest.fixture
def networks() -> Iterator[Networks]:
    try:
        made = Networks()
    except NoNetworks as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
    yield made
    made.close()


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.77") is None, "an address that this machine does not have"
    assert interface_of("no.such.host.invalid") is None


def test_a_host_without_an_address_is_named_at_the_start() -> None:
    """The job trained on one node, and gave out an address of its status page that led nowhere."""
    nowhere = ["--etcd", "127.0.0.1:9", "--job", "j", "--join-timeout", "1"]
    done = subprocess.run(
        elasticzero("run", "--host", "no-host.invalid", *nowhere, str(REGRESSION)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 69, done.stderr
    assert "--host no-host.invalid is no name that this machine can resolve" in done.stderr


@pytest.mark.timeout(150)
@pytest.mark.slow
def test_ranks_meet_where_the_host_name_is_loopback(
    networks: Networks, tmp_path: Path, job: str
) -> None:
    """Gloo took 127.0.0.1, to which a machine's own name often resolves, and no rank met another:
    each node has a network of its own here."""
    folder = ["--job", job, "--log-dir", str(tmp_path), "--nnodes", "2"]
    with EtcdServer(address=networks.address) as etcd:
        nodes = []
        for name in ("a", "b"):
            at = networks.place(name)
            arguments = ["run", *folder, "--etcd", etcd.endpoint, "--host", at.address]
            arguments += [
                "--http-port",
                "0",
                "--node-name",
                name,
                "--max-restarts",
                "0",
                "--preemption",
            ]
            environment = {k: v for k, v in os.environ.items() if k != "GLOO_SOCKET_IFNAME"}
            nodes.append(
                subprocess.Popen(
                    [
                        *at.command_prefix,
                        *elasticzero(*arguments, "none", str(REGRESSION), "--epochs", "1"),
                    ],
                    env=environment,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        told = [node.communicate(timeout=100)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], told
