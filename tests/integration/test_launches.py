"""A node that comes after the end of its job: of the same launch it ends as the job did, and of
another one it is told so."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from elasticzero.launcher.protocol.documents import Done, Member, to_bytes
from elasticzero.launcher.store.api import job_prefix
from elasticzero.launcher.store.etcd.server import EtcdServer
from elasticzero.launcher.store.etcd.store import EtcdStore
from elasticzero.launcher.store.watch_cache import DONE
from elasticzero.serialization import decode
from tests.integration.clusters import REGRESSION, SCRIPTS
from tests.integration.test_bad_input import run

FAILS_ON_IMPORT = SCRIPTS / "fails_on_import.py"


def job_arguments(etcd: EtcdServer, job: str, launch: str, logs: Path) -> list[str]:
    return [
        *("run", "--etcd", etcd.endpoint, "--job", job, "--http-port", "0"),
        *("--launch-id", launch, "--log-dir", str(logs)),
    ]


def end_of(etcd: EtcdServer, job: str) -> tuple[Done, int]:
    """The end of the job, and the revision at which it was written."""
    with EtcdStore([etcd.endpoint], job_prefix(job)) as store:
        entry = store.read(DONE).entries[DONE]
    return decode(Done, json.loads(entry.value), DONE), entry.mod_revision


@pytest.mark.timeout(240)
def test_a_finished_launch_and_the_next(tmp_path: Path, job: str, etcd: EtcdServer) -> None:
    script = [str(REGRESSION), "--epochs", "1"]
    first, second = (job_arguments(etcd, job, launch, tmp_path) for launch in ("first", "second"))
    assert run(*first, *script).returncode == 0
    done, revision = end_of(etcd, job)
    assert done.launch_id == "first"
    late = run(*first, *script)
    assert late.returncode == 0, late.stderr
    assert f"this node came after the end of the job: {done.reason}" in late.stderr
    refused = run(*second, *script)
    assert refused.returncode == 64
    assert "is already done" in refused.stderr
    assert end_of(etcd, job) == (done, revision)
    assert run(*second, "--restart", *script).returncode == 0
    again, later = end_of(etcd, job)
    assert again.launch_id == "second"
    late = run(*second, "--restart", *script)
    assert late.returncode == 0, "a pod that is replaced runs with the same words"
    assert end_of(etcd, job) == (again, later), "and begins nothing anew"


@pytest.mark.slow
def test_a_failed_launch_fails_those_that_come_later(
    tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    command = job_arguments(etcd, job, "first", tmp_path)
    failed = run(*command, str(FAILS_ON_IMPORT))
    assert failed.returncode == 64
    late = run(*command, str(FAILS_ON_IMPORT))
    assert late.returncode == failed.returncode
    assert "this node came after the end of the job" in late.stderr


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_restart_waits_for_the_nodes_of_the_run_before_to_be_gone(
    tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    """Pods of a launch that ended are still there for a moment; an agent that hangs is for good."""
    script = [str(REGRESSION), "--epochs", "1"]
    command = [*job_arguments(etcd, job, "first", tmp_path), "--lease-ttl", "2"]
    assert run(*command, *script).returncode == 0
    again = [*job_arguments(etcd, job, "second", tmp_path), "--lease-ttl", "2"]
    again += ["--restart", *script]
    with EtcdStore([etcd.endpoint], job_prefix(job)) as store:
        store.write({"members/old": to_bytes(Member("old", "i", "127.0.0.1", 1, 1, 1))})
        refused = run(*again)
        assert refused.returncode == 64
        assert f"job '{job}' still has nodes (old)" in refused.stderr
        goes = threading.Timer(1.0, store.write, ({},), {"deletes": ["members/old"]})
        goes.start()
        assert run(*again).returncode == 0
        goes.join()
    assert end_of(etcd, job)[0].launch_id == "second"
