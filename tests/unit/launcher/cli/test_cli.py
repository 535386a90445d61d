"""Options, their environment variables, and the words of `elasticzero local`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from elasticzero.checkpoint.steps.retention import RetentionPolicy
from elasticzero.cli.main import build_parser, main, parse
from elasticzero.errors import ExitCode, UserError
from elasticzero.launcher.agent.config import AgentOptions
from elasticzero.launcher.agent.extensions.base import ExtensionFactory
from elasticzero.launcher.cli.commands import add_run
from elasticzero.launcher.local.command import agent_arguments
from elasticzero.launcher.observability.event_log import EventReader
from elasticzero.launcher.options.parser import Parser
from elasticzero.launcher.options.table import RUN_OPTIONS
from elasticzero.launcher.options.torchrun import TORCHRUN_OPTIONS
from elasticzero.launcher.options.validation import (
    count_gpus,
    parse_common_options,
    parse_nnodes,
    parse_nproc,
)
from elasticzero.launcher.protocol.policy import JobPolicy
from elasticzero.launcher.workers.log_rotation import LogLimit
from elasticzero.options.option import Option
from elasticzero.options.settings import TrainingSettings
from tests.conftest import ROOT


@pytest.mark.parametrize(("text", "expected"), [("1", (1, 1)), ("2:4", (2, 4)), ("3:3", (3, 3))])
def test_nnodes(text: str, expected: tuple[int, int]) -> None:
    assert parse_nnodes(text) == expected


@pytest.mark.parametrize("text", ["0", "3:1", "a:b", "1:2:3", "-1", ""])
def test_bad_nnodes_name_the_option(text: str) -> None:
    with pytest.raises(UserError, match="--nnodes"):
        parse_nnodes(text)


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 4),
        ("", 0),
        ("2", 1),
        ("0,1, 3", 3),
        ("0,-1,1", 1),
        ("0,7,1", 1),
        ("GPU-7f423230-785a,1", 2),
        ("MIG-1,MIG-2", 1),
        ("none", 0),
    ],
)
def test_as_many_workers_as_cuda_shows_gpus(visible: str | None, count: int) -> None:
    assert count_gpus(4, visible) == count
    assert count_gpus(0, visible) == 0


def test_nproc() -> None:
    assert parse_nproc("3") == 3
    assert parse_nproc("auto") >= 1
    assert parse_nproc("cpu") >= 1
    with pytest.raises(UserError, match="--nproc-per-node 0"):
        parse_nproc("0")


@pytest.mark.parametrize("option", RUN_OPTIONS, ids=lambda option: option.flags[0])
def test_every_option_has_a_variable(option: Option, monkeypatch: pytest.MonkeyPatch) -> None:
    value = {int: "7", float: "7.5"}.get(option.type, "seven")
    if option.choices:
        value = option.choices[-1]
    if option.is_switch:
        value = "1"
    monkeypatch.setenv(option.variable, value)
    args = build_parser().parse_args(["run", "train.py"])
    expected = True if option.is_switch else option.type(value)
    assert getattr(args, option.name) == expected


def test_a_flag_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTICZERO_NNODES", "2:3")
    assert parse(["run", "train.py"]).nnodes == "2:3"
    assert parse(["run", "--nnodes", "1:9", "train.py"]).nnodes == "1:9"


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        (
            "ELASTICZERO_STRATEGY",
            "zero9",
            "one of ddp, zero1, zero2, zero3, diloco, auto is expected",
        ),
        ("ELASTICZERO_KEEP_WORKERS", "maybe", "one of 1, true, yes, 0, false, no is expected"),
        ("ELASTICZERO_CHECKPOINT_EVERY", "often", "a whole number is expected"),
        ("ELASTICZERO_SETTLE", "soon", "a number is expected"),
    ],
)
def test_a_value_from_the_environment_is_checked(
    root: Path, variable: str, value: str, expected: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "elasticzero.cli", "run", "train.py"],
        env=os.environ | {variable: value},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == ExitCode.USAGE
    assert done.stderr == f"error: {variable}={value}: {expected}\n"


def test_the_earlier_name_of_the_command_line_runs_it() -> None:
    """Command lines that people have stored say it."""
    printed = [
        subprocess.check_output([sys.executable, "-m", module, "--help"], text=True, timeout=60)
        for module in ("elasticzero.cli", "elasticzero.launcher.cli")
    ]
    assert printed[0].startswith("usage: elasticzero") and printed[0] == printed[1]


@pytest.mark.parametrize("arguments", [["--strategy", "zero2", "t.py"], ["--help"]])
def test_a_bad_value_of_an_unused_variable_is_ignored(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ELASTICZERO_STRATEGY", "zero9")
    if arguments == ["--help"]:
        with pytest.raises(SystemExit) as ended:
            parse(["run", *arguments])
        assert ended.value.code == 0
        assert "--strategy {ddp,zero1,zero2,zero3,diloco,auto}" in capsys.readouterr().out
    else:
        assert parse(["run", *arguments]).strategy == "zero2"


@pytest.mark.parametrize("command", ["status", "stop"])
def test_an_empty_variable_is_none(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ELASTICZERO_ETCD", "")
    monkeypatch.setenv("ELASTICZERO_JOB", "")
    with pytest.raises(SystemExit) as ended:
        parse([command])
    assert ended.value.code == ExitCode.USAGE
    assert capsys.readouterr().err == (
        "error: --etcd HOST:PORT (or ELASTICZERO_ETCD) and --job ID (or ELASTICZERO_JOB) must "
        f"be given\nsee: elasticzero {command} --help\n"
    )


def test_extensions_are_imported_before_a_name_is_claimed(tmp_path: Path) -> None:
    """A claim ends by SIGTERM only once there is a handler, which `run_agent` sets at once."""
    claims: list[Path] = []

    def extensions() -> tuple[ExtensionFactory, ...]:
        claims.extend((tmp_path / "memory").iterdir())
        raise UserError("the extensions are asked for")

    (tmp_path / "memory").mkdir()
    (tmp_path / "train.py").touch()
    parser = Parser(prog="elasticzero run")
    add_run(parser, extensions, completion=lambda shell: 0)
    arguments = ["--node-name", "n", "--snapshot-dir", str(tmp_path / "memory")]
    arguments += ["--log-dir", str(tmp_path / "logs"), str(tmp_path / "train.py")]
    args = parser.parse_args(arguments)
    with pytest.raises(UserError, match="the extensions are asked for"):
        args.run_command(args)
    assert claims == []


NOT_FOR_A_STATUS = ("ctypes", "elasticzero.checkpoint.storage.disk", "elasticzero.ipc.messages")
"""What the commands that look at a job need no more than its documents do, and takes long to
import."""


def test_commands_on_a_job_import_only_what_they_need() -> None:
    script = (
        "import sys\n"
        "import elasticzero.cli.commands, elasticzero.launcher.cli.control\n"
        "import elasticzero.launcher.cli.status\n"
        f"needless = sys.modules.keys() & set({NOT_FOR_A_STATUS!r})\n"
        "assert not needless, needless\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=60)


def test_a_word_after_the_command_is_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a job's name, of a command that has nothing to do with the variable."""
    monkeypatch.setenv("ELASTICZERO_STRATEGY", "zero9")
    assert parse(["status", "--etcd", "h:1", "--job", "run"]).job == "run"


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ("--quick status --etcd h:1 --job j", "elasticzero status"),
        ("checkpoint inspect --quick .", "elasticzero checkpoint inspect"),
    ],
)
def test_an_unknown_option_leads_to_the_help_of_its_command(
    arguments: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(arguments.split())
    assert capsys.readouterr().err == f"error: unknown option --quick\nsee: {command} --help\n"


@pytest.mark.parametrize(
    ("value", "on"), [("1", True), ("True", True), ("0", False), ("no", False), ("", False)]
)
def test_a_switch_in_the_environment(monkeypatch: pytest.MonkeyPatch, value: str, on: bool) -> None:
    monkeypatch.setenv("ELASTICZERO_TEE", value)
    assert build_parser().parse_args(["run", "train.py"]).tee is on


def every_command(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from every_command(command)


@pytest.mark.parametrize(
    "parser", list(every_command(build_parser())), ids=lambda parser: parser.prog
)
def test_help_can_be_shown(parser: argparse.ArgumentParser) -> None:
    assert parser.prog in parser.format_help()


def test_all_commands_are_there() -> None:
    named = {parser.prog for parser in every_command(build_parser())}
    commands = ("run", "local", "status", "drain", "scale", "stop", "plan", "checkpoint")
    assert {f"elasticzero {name}" for name in commands} < named
    assert "elasticzero checkpoint verify" in named


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--checkpoint-every", "-1"], "--checkpoint-every -1: 0 or more"),
        (["--checkpoint-every", "5"], "--checkpoint-every needs --checkpoint-dir"),
        (["--keep", "2"], "--keep needs --checkpoint-dir"),
        (["--strict-checkpoint"], "--strict-checkpoint needs --checkpoint-dir"),
        (["--keep", "0"], "--keep 0"),
        (["--spares", "-1"], "--spares -1: a number of nodes"),
        (["--keep", "-1"], "--keep -1: a whole number, 1 or more"),
        (["--keep-every", "5"], "--keep-every"),
        (["--snapshot-every", "x"], "--snapshot-every x"),
        (["--nproc-per-node", "many"], "--nproc-per-node many"),
        (["--lease-ttl", "1"], "--lease-ttl 1"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("command", [["run"], ["local", "--nodes", "2"]], ids=["run", "local"])
def test_bad_parsed_are_found_before_anything_starts(
    command: list[str],
    arguments: list[str],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def starts(*_: object) -> int:
        raise AssertionError("something was started")

    monkeypatch.setattr("elasticzero.launcher.local.command.run", starts)
    monkeypatch.setattr("elasticzero.launcher.agent.main.run_agent", starts)
    assert main([*command, *arguments, __file__]) == ExitCode.USAGE
    assert text in capsys.readouterr().err


def test_a_value_from_the_environment_needs_a_directory_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ELASTICZERO_CHECKPOINT_EVERY", "5")
    with pytest.raises(UserError, match="--checkpoint-dir"):
        parse_common_options(build_parser().parse_args(["run", "train.py"]))
    monkeypatch.setenv("ELASTICZERO_CHECKPOINT_DIR", "c")
    monkeypatch.setenv("ELASTICZERO_KEEP", "3")
    parsed = parse_common_options(
        build_parser().parse_args(["run", "--keep-every", "9", "train.py"])
    )
    assert parsed.keep == {"last": 3, "every": 9}
    assert parsed.training.snapshot_every is None


def test_no_checkpoints_at_all_is_fine() -> None:
    arguments = ["run", "--checkpoint-every", "0", "--snapshot-every", "4", "train.py"]
    assert parse_common_options(build_parser().parse_args(arguments)).training.snapshot_every == 4


def test_each_field_of_the_table_exists() -> None:
    homes = {
        "": AgentOptions,
        "policy": JobPolicy,
        "keep": RetentionPolicy,
        "logs": LogLimit,
        "training": TrainingSettings,
    }
    for option in RUN_OPTIONS:
        if option.field:
            home, _, name = option.field.rpartition(".")
            assert name in {field.name for field in fields(homes[home])}, option.flags


def test_local_passes_its_options_on_to_each_agent() -> None:
    """`--restart` was taken and went nowhere."""
    options = "--strategy zero2 --grace 7 --keep-workers --checkpoint-dir c --keep 3 --role r"
    options += " --restart --no-python"
    args = parse(["local", "--nodes", "2", *options.split(), "true", "--nodes", "9"])
    got = parse(["run", *agent_arguments(args, "h:1", 3)])
    assert (got.etcd, got.nnodes, got.http_port, got.preemption) == ("h:1", "1:3", 0, "none")
    assert (got.script, got.arguments, got.tee) == ("true", ["--nodes", "9"], True)
    for option in (*RUN_OPTIONS, *TORCHRUN_OPTIONS):
        if option.in_local == "passed on":
            assert getattr(got, option.name) == getattr(args, option.name), option.flags


def test_an_agent_that_cannot_start_leaves_its_error_as_an_event(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--log-dir", str(tmp_path), "--job", "j", "--node-name", "n"]
    assert main(["run", *place, "--nnodes", "2:1", "train.py"]) == ExitCode.USAGE
    stderr = capsys.readouterr().err.strip()
    (event,) = EventReader(tmp_path / "j" / "n").read()
    assert event["event"] == "error"
    assert stderr == f"error: {event['message']}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoint-every", "x"], "--checkpoint-every x: a whole number is expected"),
        (["--lease-ttl", "1.5"], "--lease-ttl 1.5: a whole number is expected"),
        (
            ["--strategy", "zero9"],
            "--strategy zero9: one of ddp, zero1, zero2, zero3, diloco, auto is expected",
        ),
        (["--http-port", "65536"], "--http-port 65536: a port from 0 to 65535 is expected"),
        (["--settle", "-1"], "--settle -1: 0 or more seconds are expected"),
        (["--settle", "nan"], "--settle nan: 0 or more seconds are expected"),
        (["--join-timeout", "-1"], "--join-timeout -1: 0 or more seconds are expected"),
    ],
)
def test_a_bad_value_is_named_with_its_option(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    assert main(["run", *arguments, str(script)]) == ExitCode.USAGE
    assert capsys.readouterr().err == f"error: {message}\n"


def test_a_local_cluster_too_small_for_its_job_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It waited for a third node until --join-timeout."""
    script = tmp_path / "train.py"
    script.touch()
    assert main(["local", "--nodes", "2", "--nnodes", "3", str(script)]) == ExitCode.USAGE
    assert "the job needs 3 nodes, and --nodes 2 starts too few" in capsys.readouterr().err


def test_a_missing_script_is_all_that_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["run"])
    assert capsys.readouterr().err.startswith("error: a training script must be given, as in: ")


def test_the_nearest_of_many_choices_is_named_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["show", "examples/quickstart"])
    error, _ = capsys.readouterr().err.splitlines()
    assert error == (
        "error: unknown NAME examples/quickstart; did you mean examples/quickstart.py?"
    )


def test_an_option_behind_the_script_is_told_where_it_belongs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse(["local", "train.py", "--nodes", "3"])
    text = "--nodes N must be given before the script, which gets --nodes where it stands\n"
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "a command must be given: run, local, rehearse, "),
        (["k8s"], "a command must be given: render, "),
        (["checkpoint"], "a command must be given: list, inspect, "),
        (["plan"], "--params must be given"),
        (["drain"], "NODE must be given"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_missing_is_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command alone leads on to those below it, by their names."""
    with pytest.raises(SystemExit):
        parse(arguments)
    error, see = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: {message}")
    assert see == f"see: {' '.join(['elasticzero', *arguments])} --help"


def test_a_missing_choice_is_named_with_its_values(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["checkpoint", "import", "a", "b"])
    error = "error: --format must be given: one of hf, dcp, torch, "
    assert capsys.readouterr().err.startswith(error)
