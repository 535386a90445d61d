"""`elasticzero k8s`: what it prints, what it runs, and what it says of mistakes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import yaml

from elasticzero.cli.main import main

RENDER = (
    *("k8s", "render", "--name", "train", "--image", "registry/image:1"),
    *("--nnodes", "2:4", "--checkpoints", "none"),
)


def test_yaml_and_json_are_the_same_objects(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RENDER, "/app/train.py", "--steps", "10"]) == 0
    from_yaml = list(yaml.safe_load_all(capsys.readouterr().out))
    assert main([*RENDER, "--output", "json", "/app/train.py", "--steps", "10"]) == 0
    from_json = json.loads(capsys.readouterr().out)
    assert from_json["kind"] == "List"
    assert from_json["items"] == from_yaml
    (job,) = (m for m in from_yaml if m["kind"] == "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["run", "/app/train.py", "--steps", "10"]


def test_a_script_keeps_every_character(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "import os\n\n\nprint('a: b', \"# no comment\", 'ü', '\\t')  \n\ttab\nend"
    (tmp_path / "train.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main([*RENDER, "train.py"]) == 0
    manifests = list(yaml.safe_load_all(capsys.readouterr().out))
    (held,) = (m for m in manifests if "train.py" in m.get("data", {}))
    assert held["data"]["train.py"] == text


def test_modules_beside_the_script_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pods would have ended in a ModuleNotFoundError."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "common.py").touch()
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").touch()
    (tmp_path / "train.py").write_text(
        "import os, torch.nn\nfrom common import x\ndef f():\n    import models.gpt\n"
    )
    main([*RENDER, "train.py"])
    note = "note: train.py imports common, models from beside it, "
    assert capsys.readouterr().err.startswith(note)
    (tmp_path / "train.py").write_text("import os\n")
    main([*RENDER, "train.py"])
    assert not capsys.readouterr().err


def test_without_pyyaml_json_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert main([*RENDER, "/app/train.py"]) == 64
    assert "elasticzero[k8s]" in capsys.readouterr().err
    assert main([*RENDER, "--output", "json", "/app/train.py"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.py"], "missing.py: No such file or directory"),
        (["--env", "NCCL_DEBUG", "/app/train.py"], "KEY=VALUE is expected"),
        (["--spot", "/app/train.py"], "--spot needs --cloud"),
        (["--nnodes", "4:2", "/app/train.py"], "--nnodes 4:2"),
        (["--gpus", "x", "/app/train.py"], "--gpus"),
        (["--resource", "amd.com/gpu", "/app/train.py"], "NAME=N is expected"),
        (["--resource=a.b/c=1", "--resource=a.b/c=2", "/app/train.py"], "a.b/c=1 is given as well"),
        (["--volume", "data:/data", "/app/train.py"], "--volume data:/data: pvc/NAME:PATH"),
        (["--patch", "missing.yaml", "/app/train.py"], "missing.yaml: No such file"),
        (["--zones", "two", "/app/train.py"], "--zones"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main([*RENDER, *arguments])
    except SystemExit as error:
        code = int(error.code or 0)
    assert code == 64
    assert message in capsys.readouterr().err


KUBECTL = """#!/bin/sh
echo "$@" >> "$LOG"
case "$1" in
  get) printf "$2-7" ;;
  patch) exit 3 ;;
esac
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "kubectl"
    program.write_text(KUBECTL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    return tmp_path / "log"


def test_a_drain_is_printed(log: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["k8s", "drain", "train", "2"]) == 0
    assert "kubectl drain" in capfd.readouterr().out
    assert not log.exists()


def test_apply_runs_what_is_printed(log: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["k8s", "drain", "train", "2", "--apply"]) == 0
    assert "kubectl drain" in capfd.readouterr().out
    job, pods, drain = log.read_text().splitlines()
    assert job.startswith("get job train ")
    assert pods.endswith("controller-uid=job-7,batch.kubernetes.io/job-completion-index=2")
    assert drain.endswith("--pod-selector=batch.kubernetes.io/controller-uid=job-7 pods-7")


def test_a_command_that_fails_ends_it(log: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["k8s", "scale", "train", "2:6", "--apply"]) == 69
    assert "kubectl failed with exit code 3" in capfd.readouterr().err
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["exec", "patch"]


def test_apply_without_kubectl_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["k8s", "scale", "train", "2:6", "--apply"]) == 69
    assert "kubectl, which is not on PATH" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["scale", "Train", "2:6"], ["drain", "a b", "1"]])
def test_a_bad_name_reaches_no_shell(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["k8s", *arguments]) == 64
    assert f"k8s {arguments[0]}" in capsys.readouterr().err
