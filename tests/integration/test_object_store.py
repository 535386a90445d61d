"""A whole job whose checkpoints lie in an S3 bucket; a second one goes on from there."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from elasticzero.checkpoint.format.names import step_directory
from elasticzero.checkpoint.steps import catalog, verify
from elasticzero.checkpoint.storage.urls import open_directory
from tests.contract.s3_server import running_server
from tests.integration.clusters import REGRESSION, elasticzero

pytestmark = pytest.mark.slow

URL = "s3://jobs/regression"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with running_server() as port:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        fsspec.get_filesystem_class("s3").clear_instance_cache()  # another test's server
        fsspec.filesystem("s3", use_listings_cache=False).mkdir("jobs")
        yield
        fsspec.get_filesystem_class("s3").clear_instance_cache()


def run(*arguments: str) -> str:
    """The output of a job that ends well."""
    command = elasticzero("local", "--nodes", "2", "--checkpoint-dir", URL, *arguments)
    completed = subprocess.run(command, capture_output=True, text=True, timeout=110, env=os.environ)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


def test_a_job_saves_to_a_bucket_and_the_next_goes_on_from_it(bucket: None, tmp_path: Path) -> None:
    """One rank asks for two steps under one tag, and a worker is killed."""
    (asks := tmp_path / "asks").write_text(json.dumps([[3, [1], "best"], [7, [1], "best"]]))
    arguments = ("--checkpoint-every", "10", "--keep", "2", "--fault", "kill-worker@15")
    told = run(*arguments, str(REGRESSION), "--epochs=1", "--pause=0.05", "--asks", str(asks))
    # A slow save has the ones due beside it left out: the output says which steps were saved.
    saved = sorted(map(int, re.findall(r"checkpoint of step (\d+) written", told)))
    assert saved[-1] == 34
    directory = open_directory(URL)
    steps = catalog.steps(directory)
    assert {info.step for info in steps} == {7, *saved[-2:]}
    assert [problem for info in steps for problem in verify.find_corruption(info.storage)] == []
    files = directory.files()
    assert [list(files.pop(folder)) for folder in (".owner", "tags")] == [
        ["job.json"],
        ["best.json"],
    ]
    assert {folder: len(names) for folder, names in files.items()} == {
        info.name: 5 for info in steps
    }
    assert catalog.resolve(f"{URL}/tags/best").where == f"{URL}/{step_directory(7)}"
    told = run("--checkpoint-every", "0", str(REGRESSION), "--epochs=2")
    assert "step 34 from" in told
    assert catalog.newest_good(directory) == 68
