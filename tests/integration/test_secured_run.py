"""A whole run over TLS, with certificates on both sides, a user and a token, and a node that is
killed: nothing secret is to be found anywhere."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import urllib.request
from pathlib import Path

import pytest
from torch import Tensor

from elasticzero.launcher.secrets import ETCD_PASSWORD, TOKEN
from elasticzero.processes import descendants
from tests.integration.clusters import REGRESSION, Story, story
from tests.integration.clusters import elasticzero as command
from tests.integration.etcd_members import Members, Tls
from tests.integration.test_elastic_training import check_samples, check_weights
from tests.support.certificates import LOOPBACK, Authority

PASSWORD, JOB_TOKEN = "the-users-password-in-etcd", "the-token-of-this-very-job"


def check_no_process_shows(told: Story, agents_may: bool) -> None:
    """Command lines of all, and environments of what agents start."""
    read = 0
    for node in told.cluster.running():
        for pid in [node.process.pid, *descendants(node.process.pid)]:
            files = (
                ["cmdline"] if pid == node.process.pid and agents_may else ["cmdline", "environ"]
            )
            for name in files:
                try:
                    data = Path(f"/proc/{pid}/{name}").read_bytes()
                except OSError:
                    continue  # it has just ended
                read += 1
                for secret in (PASSWORD, JOB_TOKEN):
                    assert secret.encode() not in data, f"{name} of {pid}"
    assert read > 0


@pytest.mark.cold
@pytest.mark.timeout(180)
def test_a_run_behind_locks_survives_a_killed_node(
    tmp_path: Path, job: str, reference: dict[str, Tensor]
) -> None:
    authority = Authority(tmp_path / "pems", "ours")
    server, client = authority.sign("etcd", LOOPBACK), authority.sign("agent")
    tls = Tls(cert=server.cert, key=server.key, ca=authority.cert, clients=True)
    checkpoints = tmp_path / "checkpoints"
    arguments = ["--nnodes", "1:3", "--lease-ttl", "2", "--strategy", "zero2"]
    locks = ["--etcd-cacert", str(authority.cert), "--etcd-user", "trainer"]
    locks += ["--etcd-cert", str(client.cert), "--etcd-key", str(client.key)]
    arguments += [*locks, "--checkpoint-dir", str(checkpoints), "--snapshot-every", "3"]
    arguments += [str(REGRESSION), "--pause", "0.06"]
    options = {"auth-token-ttl": "1", "bcrypt-cost": "4"}
    secrets = {ETCD_PASSWORD: PASSWORD, TOKEN: JOB_TOKEN}
    with Members(tmp_path / "etcd", tls=tls, options=options) as etcd:
        etcd.enable_users("trainer", PASSWORD)
        with story(
            tmp_path, etcd.endpoints, job, arguments, nodes=3, environments=[secrets] * 3
        ) as told:
            told.wait_for_step(15)
            told.pause(1.0)  # so that training does not end meanwhile
            check_no_process_shows(told, agents_may=True)
            port = told.of("serving")[0]["port"]
            certificate = subprocess.run(
                command("tls", "ca", "--job", job),
                capture_output=True,
                text=True,
                env={**os.environ, **secrets},
                timeout=60,
                check=True,
            ).stdout
            context = ssl.create_default_context(cadata=certificate)
            request = urllib.request.Request(
                f"https://127.0.0.1:{port}/status", headers={"Authorization": f"Bearer {JOB_TOKEN}"}
            )
            with urllib.request.urlopen(request, timeout=30, context=context) as answer:
                status = answer.read().decode()
            assert json.loads(status)["job"] == job
            shown = subprocess.run(
                command("status", "--job", job, "--etcd", etcd.endpoints, *locks),
                capture_output=True,
                text=True,
                env={**os.environ, **secrets},
                timeout=60,
                check=False,
            )
            assert shown.returncode == 0 and "steps/s" in shown.stdout, shown.stderr + shown.stdout
            told.pause(0.06)
            told.cluster.kill_node(told.node(1))
            codes = told.wait_for_end()
    assert codes == {"node-0": 0, "node-1": -9, "node-2": 0}, told.logs()
    assert told.generation == 2 and told.of("world")[-1]["tier"] == "ram"
    assert told.lineage.recomputed <= 6
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)
    written = "".join(
        path.read_text(errors="replace") for path in told.directory().rglob("*") if path.is_file()
    )
    for secret in (PASSWORD, JOB_TOKEN):
        assert secret not in written + status
