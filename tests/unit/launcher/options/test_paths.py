"""`~` and variables in every option that is a path are replaced, wherever its value comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elasticzero.cli.main import main
from elasticzero.errors import UserError
from elasticzero.launcher.options.parser import Parser
from elasticzero.launcher.options.table import (
    ALL_RUN_OPTIONS,
    JOB_OPTIONS,
    LOCAL_OPTIONS,
    add_run_options,
)
from elasticzero.launcher.options.validation import check_metrics_directory
from elasticzero.ops.rehearse.command import OPTIONS as REHEARSE_OPTIONS
from elasticzero.options.training import TRAINING_OPTIONS
from elasticzero.options.values import expanded_items, expanded_path
from elasticzero.worker.single_process import read_settings

TABLES = (ALL_RUN_OPTIONS, JOB_OPTIONS, LOCAL_OPTIONS, TRAINING_OPTIONS, REHEARSE_OPTIONS)
ENVIRONMENT = {"HOME": "/home/me", "RUN": "seven", "DOLLAR": "$RUN"}


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("~", "/home/me"),
        ("~/a b", "/home/me/a b"),
        ("a/~/b", "a/~/b"),
        ("$RUN", "seven"),
        ("/x/${RUN}-1/$RUN.log", "/x/seven-1/seven.log"),
        ("s3://bucket/$RUN", "s3://bucket/seven"),
        ("$DOLLAR", "$RUN"),
        ("./~x", "./~x"),
        ("5$", "5$"),
        ("$(RUN)", "$(RUN)"),
        ("", ""),
    ],
)
def test_a_path_is_expanded_as_by_a_shell(text: str, path: str) -> None:
    assert expanded_path("--x", text, ENVIRONMENT) == path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("/a/$NONE", r"--x /a/\$NONE: the variable NONE is not set"),
        ("${NONE}", "the variable NONE is not set"),
        ("${RUN:-1}", r"of variables only \$NAME and \$\{NAME\} are replaced"),
        ("~bob/x", r"only ~ alone is replaced.*is \./~bob/x"),
    ],
)
def test_what_cannot_be_expanded_names_the_option(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        expanded_path("--x", text, ENVIRONMENT)


def test_a_home_that_is_not_known_is_said() -> None:
    with pytest.raises(UserError, match="the variable HOME is not set, which ~ stands for"):
        expanded_path("--x", "~/a", {})


def test_lists_with_paths() -> None:
    assert (
        expanded_items("--x", "tensorboard:~/r,mlflow", ENVIRONMENT)
        == "tensorboard:/home/me/r,mlflow"
    )
    assert expanded_items("--x", "cert=$RUN,timeout=5", ENVIRONMENT, "=") == "cert=seven,timeout=5"


def test_every_option_that_is_a_path_is_expanded() -> None:
    rows = {row.flags[0]: row for table in TABLES for row in table}
    paths = {flag for flag, row in rows.items() if row.metavar in ("FILE", "DIR", "PATH")}
    assert len(paths) >= 11
    for flag in {*paths, "--log-to", "--rdzv-conf"}:
        assert rows[flag].expand is not None, flag


def parsed(*arguments: str) -> Any:
    parser = Parser(prog="elasticzero run")
    add_run_options(parser)
    return parser.parse_args(list(arguments))


def test_a_flag_a_variable_and_the_file_are_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RUN", "seven")
    (tmp_path / "job.toml").write_text(
        'snapshot-dir = "~/s"\nscript = "~/$RUN.py"\nargs = ["~"]\nlog-to = "wandb:~/w"\n'
    )
    monkeypatch.setenv("ELASTICZERO_CONFIG", "~/job.toml")
    monkeypatch.setenv("ELASTICZERO_CHECKPOINT_DIR", "$HOME/${RUN}")
    monkeypatch.setenv("PET_LOG_DIR", "~/pet")
    values = parsed("--token-file=~/t", "--rdzv-conf", "cert=~/c")
    assert values.token_file == f"{tmp_path}/t"
    assert values.snapshot_dir == f"{tmp_path}/s"
    assert values.script == f"{tmp_path}/seven.py" and values.arguments == ["~"]
    assert values.log_to == f"wandb:{tmp_path}/w"
    assert values.checkpoint_dir == f"{tmp_path}/seven"
    assert values.log_dir == f"{tmp_path}/pet"
    assert values.rdzv_conf == f"cert={tmp_path}/c"


@pytest.mark.parametrize("place", ["flag", "variable", "file", "config"])
def test_an_error_says_where_the_value_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.delenv("NONE", raising=False)
    config = tmp_path / "job.toml"
    config.write_text('log-dir = "$NONE/x"\n' if place == "file" else "")
    arguments = {"flag": ["--log-dir=$NONE/x"], "config": ["--config=$NONE/x"]}.get(place, [])
    if place == "variable":
        monkeypatch.setenv("ELASTICZERO_LOG_DIR", "$NONE/x")
    note = {"variable": r" \(from ELASTICZERO_LOG_DIR\)", "file": rf" \(from {config}:1\)"}
    flag = "--config" if place == "config" else "--log-dir"
    arguments = arguments if place == "config" else [f"--config={config}", *arguments]
    end = note.get(place, "")
    with pytest.raises(UserError, match=rf"^{flag} \$NONE/x: the variable NONE is not set{end}$"):
        parsed(*arguments, "train.py")


def test_a_process_without_an_agent_expands_too() -> None:
    environment = {**ENVIRONMENT, "ELASTICZERO_CHECKPOINT_DIR": "~/$RUN"}
    assert read_settings(environment).checkpoint_dir == "/home/me/seven"
    environment["ELASTICZERO_CHECKPOINT_DIR"] = "$NONE"
    with pytest.raises(UserError, match=r"NONE is not set \(from ELASTICZERO_CHECKPOINT_DIR\)"):
        read_settings(environment)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ("checkpoint export a b --config=$NONE", "--config"),
        ("checkpoint export $NONE b", "path"),
        ("checkpoint import --format hf a $NONE", "target"),
        ("checkpoint reshard --world-size 2 a $NONE", "target"),
        ("checkpoint diff a $NONE", "b"),
        ("checkpoint list $NONE", "directory"),
        ("checkpoint verify $NONE", "path"),
        ("report $NONE", "LOG_DIR"),
    ],
)
def test_paths_of_commands_are_expanded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str, name: str
) -> None:
    monkeypatch.delenv("NONE", raising=False)
    assert main(arguments.split()) == 64
    assert f"{name} $NONE: the variable NONE is not set" in capsys.readouterr().err


def test_a_metrics_directory_that_is_none_is_a_sentence(tmp_path: Path) -> None:
    for variable in ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"):
        check_metrics_directory({variable: str(tmp_path)})
        with pytest.raises(UserError, match=f"{variable}=.*/no: a directory that can be written"):
            check_metrics_directory({variable: str(tmp_path / "no")})


@pytest.mark.parametrize("command", [["run"], ["local", "--nodes", "2"]])
def test_no_command_starts_with_such_a_directory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "no"))
    assert main([*command, "--log-dir", str(tmp_path), "--dry-run", str(script)]) == 64
    assert "PROMETHEUS_MULTIPROC_DIR" in capsys.readouterr().err
