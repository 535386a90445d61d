"""`elasticzero doctor` on this machine, with what it examines in good and bad states."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from elasticzero.launcher.store.etcd.server import EtcdServer
from elasticzero.launcher.store.etcd.store import EtcdStore
from tests.clouds import Aws
from tests.integration.clusters import elasticzero
from tests.mounts import fill, small_disk
from tests.support.cases import slow

NO_CLOUD = {
    f"ELASTICZERO_{name}_METADATA_URL": "http://127.0.0.1:1" for name in ("AWS", "GCP", "AZURE")
}
"""Where no metadata server answers, whatever this machine is."""


def examined(
    *arguments: str, environment: Mapping[str, str] = NO_CLOUD
) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """The exit code, and the findings by topic."""
    done = subprocess.run(
        elasticzero("doctor", "--json", *arguments),
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "NO_PROXY": "*", **environment},
        check=False,
    )
    assert done.stderr == "", done.stderr
    report = json.loads(done.stdout)
    findings: dict[str, list[dict[str, Any]]] = {}
    for finding in report["findings"]:
        findings.setdefault(finding["topic"], []).append(finding)
    problems = [f for listed in findings.values() for f in listed if f["level"] == "problem"]
    assert report["problems"] == len(problems)
    assert done.returncode == (1 if problems else 0), problems
    return done.returncode, findings


def worst(findings: dict[str, list[dict[str, Any]]], topic: str) -> dict[str, Any]:
    return max(findings[topic], key=lambda f: ("ok", "note", "problem").index(f["level"]))


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "shm", 512) as place:
        yield place


def test_without_etcd_it_says_so(memory: Path) -> None:
    code, findings = examined("--snapshot-dir", str(memory))
    assert code == 0
    assert worst(findings, "etcd")["level"] == "note"
    assert "no --etcd is given" in worst(findings, "etcd")["text"]
    assert worst(findings, "storage")["text"].startswith("no --checkpoint-dir is given")
    assert worst(findings, "versions")["level"] == "ok"
    assert "torch 2." in worst(findings, "versions")["text"]
    assert worst(findings, "gpu")["level"] in ("ok", "note")
    assert worst(findings, "preemption")["level"] == "note"


def test_with_etcd_storage_and_a_peer(etcd: EtcdServer, memory: Path, tmp_path: Path) -> None:
    directory = tmp_path / "new" / "checkpoints"
    arguments = ["--etcd", etcd.endpoint, "--checkpoint-dir", str(directory), "--peer", "127.0.0.1"]
    code, findings = examined(
        *arguments, "--snapshot-dir", str(memory), "--snapshot-size", "100MiB"
    )
    assert code == 0
    text = findings["etcd"][0]["text"]
    assert text.startswith(f"{etcd.endpoint} takes writes, ") and "version 3." in text
    missing, speed = (finding["text"] for finding in findings["storage"])
    assert missing == f"{directory} does not exist yet: a job makes it in {tmp_path}"
    assert speed.startswith(f"{directory} writes ")
    assert "refused" in worst(findings, "peer")["text"]
    assert worst(findings, "shared memory")["text"].endswith("snapshots need 100.0 MiB")
    assert not (tmp_path / "new").exists()
    with EtcdStore([etcd.endpoint], "/elasticzero/.doctor") as store:
        assert not store.read("").entries


def test_an_etcd_that_is_not_there(memory: Path) -> None:
    code, findings = examined("--etcd", "127.0.0.1:1", "--snapshot-dir", str(memory))
    assert code == 1
    assert worst(findings, "etcd")["level"] == "problem"
    assert worst(findings, "etcd")["text"].startswith("etcd at 127.0.0.1:1: ")
    assert "check that etcd runs" in worst(findings, "etcd")["text"]


def test_a_full_shared_memory_and_a_full_disk(memory: Path, tmp_path: Path) -> None:
    fill(memory)
    with small_disk(tmp_path / "disk", 64) as disk:
        fill(disk)
        arguments = ["--snapshot-dir", str(memory), "--checkpoint-dir", str(disk / "c")]
        code, findings = examined(*arguments)
    assert code == 1
    assert "it is full" in worst(findings, "shared memory")["text"]
    assert worst(findings, "storage")["level"] == "problem"
    assert "No space left on device" in worst(findings, "storage")["text"]


def test_a_small_shared_memory_is_a_containers(tmp_path: Path) -> None:
    with small_disk(tmp_path / "shm", 64) as place:
        code, findings = examined("--snapshot-dir", str(place))
    assert code == 1
    assert "64.0 MiB free of 64.0 MiB" in worst(findings, "shared memory")["text"]


@pytest.mark.parametrize("explicit", [True, slow(False)], ids=["given", "default"])
def test_a_port_that_is_taken(explicit: bool, memory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        arguments = ["--http-host", "127.0.0.1", "--snapshot-dir", str(memory)]
        environment = dict(NO_CLOUD)
        arguments += ["--http-port", str(port)] if explicit else []
        code, findings = examined(*arguments, environment=environment)
    if explicit:
        assert code == 1
        assert f"port {port} cannot be used: " in worst(findings, "http port")["text"]
        assert "ss -ltnp" in worst(findings, "http port")["advice"]
    else:
        assert worst(findings, "http port")["level"] in ("ok", "note")


def test_a_cloud_that_answers(memory: Path) -> None:
    with Aws() as cloud:
        _, findings = examined(
            "--snapshot-dir", str(memory), environment=NO_CLOUD | cloud.environment
        )
    assert worst(findings, "preemption")["text"] == "the metadata server of AWS answers"
    code, findings = examined("--preemption", "gcp", "--snapshot-dir", str(memory))
    assert code == 1
    assert "http://127.0.0.1:1" in worst(findings, "preemption")["text"]


def test_lines_for_people(memory: Path) -> None:
    arguments = ["doctor", "--preemption", "none", "--snapshot-dir", str(memory)]
    done = subprocess.run(
        elasticzero(*arguments), capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout
    *lines, last = done.stdout.splitlines()
    assert all(line.split()[0] in ("ok", "note", "problem") for line in lines)
    assert len(lines) >= 9
    assert last.startswith("0 problems, ")
    assert done.stderr.startswith("examining this machine; this takes some seconds\n")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--etcd", "nowhere"], "'nowhere' is not HOST:PORT"),
        (["--snapshot-size", "much"], "--snapshot-size much: a size such as 40GiB"),
        (["--http-port", "70000"], "--http-port 70000: a port from 0"),
    ],
)
def test_bad_options(arguments: list[str], text: str) -> None:
    done = subprocess.run(
        elasticzero("doctor", *arguments), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 64
    assert text in done.stderr and "Traceback" not in done.stderr
