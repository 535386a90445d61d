"""What a running agent serves: metrics that Prometheus takes, health, status."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from elasticzero.launcher.store import job_token
from elasticzero.launcher.store.api import job_prefix
from elasticzero.launcher.store.etcd.server import EtcdServer
from elasticzero.launcher.store.etcd.store import EtcdStore
from tests.integration.clusters import REGRESSION, elasticzero, story


def get(port: int, path: str, token: str = "") -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=30) as answer:
        return str(answer.read().decode())


def check_that_one_agent_leads(ports: list[int], job: str) -> None:
    """It alone serves the metrics of the job, and says that it leads."""
    leads = ["elasticzero_leader 1.0" in get(port, "/metrics") for port in ports]
    jobs = [get(port, "/metrics/job") for port in ports]
    assert sorted(leads) == [False, True]
    assert [bool(text) for text in jobs] == leads
    assert f'elasticzero_job_members{{job_id="{job}"}} 2.0' in "".join(jobs)


@pytest.mark.timeout(120)
def test_a_running_job_tells_its_state(
    tmp_path: Path, job: str, etcd: EtcdServer, program: Callable[[str], str]
) -> None:
    promtool = program("promtool")
    arguments = ["--nnodes", "2:2", "--checkpoint-dir", str(tmp_path / "c")]
    arguments += ["--checkpoint-every", "5"]
    arguments += [str(REGRESSION), "--pause", "0.1"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=2) as told:
        first = told.wait("rank 0", lambda: [n for n, e in told.told if e["event"] == "checkpoint"])
        stepping = (first[0], "step")
        told.wait(
            "its step 13",
            lambda: any((n, e["event"]) == stepping and e["step"] > 12 for n, e in told.told),
        )
        serving = {node: e["port"] for node, e in told.told if e["event"] == "serving"}
        port = serving[first[0]]
        text = get(port, "/metrics")
        checked = subprocess.run(
            [promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False
        )
        assert checked.returncode == 0, checked.stdout + checked.stderr
        samples = {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        assert samples["elasticzero_generation",] == 1
        assert samples["elasticzero_world_size",] == 2
        assert samples["elasticzero_members",] == 2
        assert samples["elasticzero_step", "0"] >= 12
        assert samples["elasticzero_step_seconds_count", "0"] >= 12
        assert samples["elasticzero_samples_total", "0"] >= 120
        assert samples["elasticzero_loss", "0"] > 0
        assert samples["elasticzero_checkpoint_last_step",] >= 10
        assert samples["elasticzero_checkpoint_bytes_total",] > 0
        assert samples["elasticzero_recovery_seconds_count", "start", "first_step"] == 1
        compute_s = samples["elasticzero_compute_seconds_sum", "0"]
        assert 0 < compute_s < samples["elasticzero_step_seconds_sum", "0"]
        assert samples["elasticzero_gradient_norm", "0"] > 0
        check_that_one_agent_leads(list(serving.values()), job)
        assert any(name[0] == "elasticzero_etcd_request_seconds_count" for name in samples)
        assert get(port, "/healthz").strip()
        with EtcdStore([etcd.endpoint], job_prefix(job)) as store:
            token = job_token.token_for_operator(store, None)
        assert token is not None
        status = json.loads(get(port, "/status", token.reveal))
        assert (status["job"], status["generation"], status["world_size"]) == (job, 1, 2)
        assert sorted(status["members"]) == ["node-0", "node-1"]
        arguments = ["status", "--etcd", etcd.endpoint, "--job", job]
        shown = subprocess.run(elasticzero(*arguments), capture_output=True, text=True, check=False)
        assert shown.returncode == 0, shown.stderr
        assert "generation 1, 2 ranks" in shown.stdout
        assert shown.stdout.count("training") == 2
        for path in ("/status", "/snapshots/1/5/x.safetensors"):
            for wrong in ("", "wrong"):
                with pytest.raises(urllib.error.HTTPError, match="401") as refused:
                    get(port, path, wrong)
                refused.value.close()
    files = [path for path in told.directory().rglob("*") if path.is_file()]
    assert files
    for file in files:
        assert token.reveal not in file.read_text(errors="replace"), file


def test_status_of_a_job_that_nobody_knows(etcd: EtcdServer) -> None:
    arguments = ["status", "--etcd", etcd.endpoint, "--job", "nobody"]
    completed = subprocess.run(elasticzero(*arguments), capture_output=True, text=True, check=False)
    assert completed.returncode == 64
    assert "has no job 'nobody'" in completed.stderr
