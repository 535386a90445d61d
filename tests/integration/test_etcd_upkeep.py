"""A member of a real etcd is replaced by the commands that `elasticzero k8s` prints, and agents
reach one with the certificates of `k8s/certificates.sh`."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from cryptography import x509

from elasticzero.cli.main import main
from elasticzero.errors import AccessRefused, StoreUnavailable
from elasticzero.launcher.store.api import job_prefix
from elasticzero.launcher.store.etcd.access import Access
from elasticzero.launcher.store.etcd.server import find_etcd
from elasticzero.launcher.store.etcd.store import EtcdStore
from tests.integration.etcd_members import Members, Tls
from tests.support.deadlines import patience
from tests.unit.manifests import agent_of, agents_of, environment, pod_of
from tools.manifests import rendered

KUBECTL = f"""#!{sys.executable}
import json, os, shutil, subprocess, sys
names = json.load(open(os.environ["NAMES"]))
words = sys.argv[1:]
with open(os.environ["NAMES"] + ".log", "a") as log:
    print(*words, file=log)
def real(text):
    for name, url in names["urls"].items():
        text = text.replace(name, url)
    return text
def named(text):
    for name, url in names["urls"].items():
        text = text.replace(url, name)
    return text
match words[0]:
    case "exec":
        command = [real(word) for word in words[words.index("--") + 1:]]
        command[0] = names["etcdctl"]
        found = subprocess.run(command, capture_output=True, text=True)
        print(named(found.stdout), end="")
        print(found.stderr, end="", file=sys.stderr)
        sys.exit(found.returncode)
    case "delete" if words[1] == "pvc":
        shutil.rmtree(names["volumes"][words[2]])
"""
"""A kubectl that knows members by the names of a cluster, and runs etcdctl here."""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_member_that_lost_its_volume_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    binary = find_etcd()
    assert binary is not None
    with Members(tmp_path / "etcd", 3) as etcd:
        urls: dict[str, str] = {}
        for index, member in enumerate(etcd.members):
            host = f"http://train-etcd-{index}.train-etcd"
            urls |= {f"{host}:2379": member.endpoint, f"{host}:2380": member.peer_url}
        lost = etcd.members[2]
        names = {
            "urls": urls,
            "etcdctl": str(binary.with_name("etcdctl")),
            "volumes": {"data-train-etcd-2": str(lost.data)},
        }
        (tmp_path / "names").write_text(json.dumps(names))
        program = tmp_path / "kubectl"
        program.write_text(KUBECTL)
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setenv("NAMES", str(tmp_path / "names"))
        monkeypatch.setenv("ETCDCTL_API", "3")
        etcd.control("put", "/elasticzero/train/done", "kept")
        before = {state["header"]["member_id"] for state in etcd.status()}
        lost.kill()
        damage(lost.data)
        assert main(["k8s", "replace-etcd-member", "train", "2", "--apply"]) == 0
        assert not lost.data.exists()
        *_, patch, claim, pod = (tmp_path / "names.log").read_text().splitlines()
        state = json.loads(patch.partition("--patch=")[2])["data"]
        assert claim.startswith("delete pvc data-train-etcd-2 ")
        assert pod == "delete pod train-etcd-2"
        etcd._options |= state
        etcd.start(lost)
        after = {state["header"]["member_id"] for state in etcd.status()}
        assert len(before & after) == 2, "two members are the old ones"
        etcd.members[0].kill()
        value = etcd_value(lost.endpoint, names["etcdctl"])
        assert value == "kept", "two are enough, and the new one has the data"
    assert "member remove" in capfd.readouterr().out


def damage(data: Path) -> None:
    """A volume whose files are of no use any more."""
    shutil.rmtree(data / "member" / "wal")


def etcd_value(endpoint: str, etcdctl: object) -> str:
    command = [str(etcdctl), f"--endpoints={endpoint}", "--command-timeout=30s"]
    command += ["get", "/elasticzero/train/done", "--print-value-only"]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return completed.stdout.strip()


@pytest.fixture(scope="module")
def certificates(root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder with the certificates of the overlay `tls`, and what the script printed."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("certificates")
    command = [str(root / "k8s" / "certificates.sh"), "elasticzero", "ml"]
    env = {**os.environ, "CERTIFICATES": str(folder)}
    made = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=False)
    assert made.returncode == 0, made.stderr
    return folder, made.stdout


def test_the_certificate_has_every_name_of_the_manifests(certificates: tuple[Path, str]) -> None:
    folder, _ = certificates
    variables = environment(agent_of(agents_of(rendered("overlays/tls"))))
    endpoints = variables["ELASTICZERO_ETCD"].split(",")
    held = x509.load_pem_x509_certificate((folder / "server.crt").read_bytes())
    names = held.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    hosts = set(names.get_values_for_type(x509.DNSName))
    assert {e.removeprefix("https://").partition(":")[0] for e in endpoints} <= hosts
    assert "elasticzero-etcd" in hosts, "the backup asks any member"
    assert "elasticzero-etcd-2.elasticzero-etcd.ml.svc.cluster.local" in hosts
    assert not [host for host in hosts if host.startswith("*")]


def test_the_printed_commands_make_the_secrets(
    certificates: tuple[Path, str], program: Callable[[str], str]
) -> None:
    folder, printed = certificates
    needed = {
        volume["secret"]["secretName"]
        for manifest in rendered("overlays/tls")
        if manifest["kind"] in ("StatefulSet", "Job")
        for volume in pod_of(manifest)["volumes"]
        if "secret" in volume
    }
    made = {}
    for line in printed.splitlines():
        command = [program("kubectl"), *shlex.split(line)[1:], "--dry-run=client", "--output=yaml"]
        completed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert completed.returncode == 0, completed.stderr
        secret = yaml.safe_load(completed.stdout)
        made[secret["metadata"]["name"]] = secret["data"].keys()
    assert made.keys() == needed
    assert all(keys == {"ca.crt", "tls.crt", "tls.key"} for keys in made.values())
    assert not [path for path in folder.glob("*.key") if path.stat().st_mode & 0o077]


@pytest.mark.timeout(120)
def test_etcd_lets_the_clients_certificate_in_and_no_other(
    tmp_path: Path, certificates: tuple[Path, str]
) -> None:
    folder, _ = certificates
    ca = folder / "authority.crt"
    tls = Tls(cert=folder / "server.crt", key=folder / "server.key", ca=ca, clients=True)
    client = Access(cacert=str(ca), cert=str(folder / "client.crt"), key=str(folder / "client.key"))
    with Members(tmp_path / "etcd", tls=tls) as etcd:
        endpoints = etcd.endpoints.split(",")
        assert_reads(endpoints, client)
        with pytest.raises(AccessRefused):
            assert_reads(endpoints, Access(cacert=str(ca)))


def assert_reads(endpoints: list[str], access: Access) -> None:
    """Raises `AccessRefused` where etcd does; a slow machine may not answer at once."""
    deadline_s = time.monotonic() + patience(60.0)
    with EtcdStore(endpoints, job_prefix("train"), access=access) as store:
        while True:
            try:
                store.read("probe")
                return
            except AccessRefused:
                raise
            except StoreUnavailable:
                assert time.monotonic() < deadline_s
