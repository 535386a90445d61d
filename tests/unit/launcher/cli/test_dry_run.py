"""--dry-run: the error of the real run or a table of everything, and nothing stays behind."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from elasticzero.cli.main import main
from elasticzero.errors import ExitCode

COMMANDS = [["run"], ["local", "--nodes", "2"]]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of a user's, with a script; a temporary directory that is looked through."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "train.py").write_text("raise SystemExit('this was started')")
    return tmp_path


def tree(place: Path) -> set[str]:
    return {str(path.relative_to(place)) for path in place.rglob("*")}


def rows(out: str) -> dict[str, tuple[str, str]]:
    """The rows of the first table: value and source by option."""
    lines = out.partition("OPTION")[2].partition("\n\n")[0].splitlines()[1:]
    cells = [[cell for cell in line.split("  ") if cell.strip()] for line in lines]
    return {row[0].strip(): (row[1].strip(), row[-1].strip()) for row in cells}


@pytest.mark.parametrize("command", COMMANDS, ids=["run", "local"])
def test_each_value_is_shown_with_its_source(
    command: list[str],
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (place / "job.toml").write_text("\nkeep = 3\ncheckpoint-dir = 'new/deep'\nargs = ['-x', 2]\n")
    monkeypatch.setenv("ELASTICZERO_GRACE", "9")
    before = tree(place)
    arguments = ["--config", "job.toml", "--dry-run", "--strategy", "zero2", "train.py"]
    assert main([*command, *arguments]) == ExitCode.DONE
    out = capsys.readouterr().out
    settings = rows(out)
    assert settings["strategy"] == ("zero2", "flag")
    assert settings["keep"] == ("3", "job.toml:2")
    assert settings["checkpoint-dir"] == ("new/deep", "job.toml:3")
    assert settings["grace"] == ("9", "ELASTICZERO_GRACE")
    assert settings["spares"] == ("(all that come)", "default")
    assert settings["config"] == ("job.toml", "flag")
    assert settings["script"] == ("train.py", "command line")
    assert settings["args"] == ("-x 2", "job.toml:4")
    assert "dry-run" not in settings and "rdzv-backend" not in settings
    assert f"{place}/train.py -x 2\n" in out
    assert tree(place) == before


def test_the_environment_of_a_worker_is_shown(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_SETTING", "as it is")
    arguments = ["--nnodes", "2:3", "--nproc-per-node", "2", "--etcd", "h:1", "--job", "j"]
    assert main(["run", "--dry-run", *arguments, "--role", "r", "train.py"]) == ExitCode.DONE
    out = capsys.readouterr().out
    assert "2 workers on each of 2 to 3 nodes\n" in out
    shown = [" ".join(line.split()) for line in out.splitlines()]
    for line in (
        "MY_SETTING environment as it is",
        "RANK each worker's own 0",
        "WORLD_SIZE each worker's own 6",
        "LOCAL_WORLD_SIZE elasticzero 2",
        "ROLE_NAME elasticzero r",
        "TORCHELASTIC_RUN_ID elasticzero j",
        "OMP_NUM_THREADS elasticzero 1",
    ):
        assert line in shown or (line.startswith("OMP") and "OMP_NUM_THREADS" in os.environ), line


def test_no_secret_is_printed(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    secrets = {
        "ELASTICZERO_TOKEN": "0123456789abcdef-token",
        "ELASTICZERO_ETCD_PASSWORD": "open-sesame",
        "HF_TOKEN": "hf_abcdef",
        "AWS_SECRET_ACCESS_KEY": "aws-very-secret",
        "https_proxy": "http://me:proxy-pass@proxy:3128",
        "COPIED": "a copy of 0123456789abcdef-token",
    }
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    arguments = ["--nnodes", "2", "--etcd", "h:1", "--job", "j", "--etcd-user", "u", "--dry-run"]
    assert main(["run", *arguments, "train.py", "--api-key", "word-secret"]) == ExitCode.DONE
    out = capsys.readouterr().out
    for value in ("0123456789", "sesame", "hf_abc", "aws-very", "proxy-pass", "word-secret"):
        assert value not in out, value
    assert "HF_TOKEN" in out and "--api-key '(hidden)'" in out


@pytest.mark.parametrize("command", COMMANDS, ids=["run", "local"])
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nowhere.py"], "nowhere.py does not exist"),
        (["."], "is a directory"),
        (["--keep", "0", "train.py"], "error: --keep 0"),
        (["--nproc-per-node", "many", "train.py"], "--nproc-per-node many"),
        (["--checkpoint-every", "5", "train.py"], "needs --checkpoint-dir"),
        (
            ["--checkpoint-dir", "train.py", "train.py"],
            "train.py is a file, and no directory",
        ),
        (
            ["--checkpoint-dir", "train.py/x", "train.py"],
            "train.py is a file, and no directory",
        ),
        (["--snapshot-dir", "nowhere", "train.py"], "--snapshot-dir nowhere does not exist"),
        (["--snapshot-dir", "train.py", "train.py"], "--snapshot-dir train.py is no directory"),
        (
            ["--log-dir", "train.py/logs", "train.py"],
            "logs cannot be written there (a part of its path is a file)",
        ),
        (
            ["--log-dir", "train.py", "--job", "j", "train.py"],
            "logs cannot be written there (a part of its path is a file)",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_error_is_that_of_the_real_run(
    command: list[str],
    arguments: list[str],
    text: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def starts(*_: object) -> int:
        raise AssertionError("something was started")

    monkeypatch.setattr("elasticzero.launcher.local.cluster.Cluster.start_node", starts)
    monkeypatch.setattr("elasticzero.launcher.agent.main.run_agent", starts)
    before = tree(place)
    assert main([*command, "--dry-run", *arguments]) == ExitCode.USAGE
    captured = capsys.readouterr()
    assert text in captured.err and captured.err.startswith("error: ")
    assert captured.out == ""
    assert tree(place) == before


def test_a_directory_that_nodes_with_an_etcd_cannot_write_is_an_error_too(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--etcd", "h:1", "--job", "j", "--checkpoint-dir", "train.py", "train.py"]
    assert main(["run", "--dry-run", *arguments]) == ExitCode.USAGE
    assert "train.py cannot be written" in capsys.readouterr().err


def test_faults_and_nodes_of_local_are_checked(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, text in (
        (["--nodes", "0"], "--nodes 0: at least 1"),
        (["--nodes", "2", "--fault", "melt@3"], "--fault melt@3"),
        (["--nodes", "2", "--nnodes", "3"], "the job needs 3 nodes"),
    ):
        assert main(["local", "--dry-run", *arguments, "train.py"]) == ExitCode.USAGE
        assert text in capsys.readouterr().err


def test_directories_that_were_there_stay(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "logs" / "j").mkdir(parents=True)
    (place / "checkpoints").mkdir()
    before = tree(place)
    arguments = ["--log-dir", "logs", "--checkpoint-dir", "checkpoints", "--job", "j"]
    assert main(["run", "--dry-run", *arguments, "train.py"]) == ExitCode.DONE
    assert tree(place) == before


def test_the_example_of_a_file_passes(
    place: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (root / "examples" / "job.toml").read_text()
    assert f"```toml\n{text}```\n" in (root / "docs" / "command-line.md").read_text()
    (place / "job.toml").write_text(text.replace("/shared", str(place)))
    assert main(["run", "--config", "job.toml", "--dry-run"]) == ExitCode.DONE
    settings = rows(capsys.readouterr().out)
    assert settings["nproc-per-node"] == ("8", "job.toml:2")
    assert settings["args"] == ("--lr 0.0003 --epochs 3", "job.toml:11")
