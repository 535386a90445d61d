"""The help of each command: options under headings, and examples that are taken as they stand."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from elasticzero.cli.examples import EXAMPLES
from elasticzero.cli.main import build_parser, main, parse
from elasticzero.errors import ExitCode
from elasticzero.launcher.options.parser import HELP_ALL, Parser
from elasticzero.launcher.options.table import (
    ALL_RUN_OPTIONS,
    COMMAND_OPTIONS,
    all_local_options,
)
from elasticzero.options.option import Option
from tests.conftest import ROOT


def every_parser(parser: Parser) -> Iterator[Parser]:
    yield parser
    for command in parser.commands.values():
        yield from every_parser(command)


PARSERS = {parser.prog: parser for parser in every_parser(build_parser())}
LINES = [
    (command, line.replace("\\\n", ""))
    for command, examples in EXAMPLES.items()
    for _, text in examples
    for line in ([text] if "\\\n" in text else text.splitlines())
]


def arguments_of(line: str) -> list[str]:
    """The arguments of an example, after the program's name and before its output's file; the
    variables before it are set."""
    arguments = shlex.split(line.partition(" > ")[0])
    while "=" in arguments[0]:
        arguments.pop(0)
    assert arguments.pop(0) == "elasticzero"
    return arguments


@pytest.mark.parametrize("prog", PARSERS)
def test_every_command_has_two_or_three_examples(prog: str) -> None:
    name = prog.removeprefix("elasticzero").strip()
    assert len(EXAMPLES[name]) in ((1,) if name == "help" else (2, 3))
    shown = PARSERS[prog].format_help()
    for what, line in EXAMPLES[name]:
        assert f"  # {what}\n  {line}\n" in shown
    assert max(map(len, shown[shown.index("examples:") :].splitlines())) <= 100


def test_no_example_is_of_a_command_that_does_not_exist() -> None:
    assert {f"elasticzero {name}".strip() for name in EXAMPLES} == set(PARSERS)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: Path) -> Path:
    """What the examples name: a script, a file of options, and checkpoints."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "job.toml").write_text("script = 'train.py'\nkeep = 3\ncheckpoint-dir = 'c'\n")
    shutil.copytree(root / "tests/fixtures/checkpoints/zero1", tmp_path / "checkpoints")
    shutil.copytree(root / "tests/fixtures/checkpoints/ddp", tmp_path / "other-checkpoints")
    return tmp_path


@pytest.mark.parametrize("line", [line for _, line in LINES if "completion" not in line])
def test_the_words_of_an_example_are_taken(
    line: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for word in shlex.split(line):
        if "=" in word and word.isupper() is False and word.startswith("ELASTICZERO_"):
            monkeypatch.setenv(*word.split("=", 1))
    parse(arguments_of(line))


@pytest.mark.parametrize("command", ["run", "local"])
def test_examples_that_start_a_job_pass_its_checks(
    command: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, line in LINES:
        if name == command:
            first, *arguments = arguments_of(line)
            assert main([first, "--dry-run", *arguments]) == ExitCode.DONE, capsys.readouterr().err


def test_examples_of_plan_and_checkpoint_run_one_after_the_other(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = 0
    for name, line in LINES:
        if name.startswith(("plan", "checkpoint ")):
            code = main(arguments_of(line))
            codes = {0, 1} if name == "checkpoint diff" else {0}
            assert code in codes, (line, capsys.readouterr().err)
            tried += 1
    assert tried >= 16


@pytest.mark.parametrize(
    ("arguments", "prog"),
    [
        ("help", "elasticzero"),
        ("help run", "elasticzero run"),
        ("help checkpoint verify", "elasticzero checkpoint verify"),
        ("run --help", "elasticzero run"),
        ("help help", "elasticzero help"),
    ],
)
def test_help_of_a_command(arguments: str, prog: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: {prog}")
    assert "\nexamples:\n  # " in out


def test_help_of_what_is_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["help", "dance"])
    assert ended.value.code == ExitCode.USAGE
    text = "error: unknown command dance; the commands are run, local, "
    assert capsys.readouterr().err.startswith(text)


@pytest.mark.parametrize("options", [ALL_RUN_OPTIONS, all_local_options()], ids=["run", "local"])
def test_every_option_of_a_job_stands_under_a_heading(options: list) -> None:  # type: ignore[type-arg]
    loose = [o.flags[0] for o in options if not o.group and o.help != argparse.SUPPRESS]
    assert loose == [option.flags[0] for option in COMMAND_OPTIONS]


def listed_by(arguments: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """Returns the flags that begin a line of a command's help, but for those of help itself."""
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "\nexamples:\n  # " in text
    flags = set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.MULTILINE))
    assert {"--help", HELP_ALL} <= flags
    return flags - {"--help", HELP_ALL}


@pytest.mark.parametrize(
    ("command", "options"), [("run", ALL_RUN_OPTIONS), ("local", all_local_options())]
)
def test_help_lists_25_options_and_help_all_every_one(
    command: str, options: Sequence[Option], capsys: pytest.CaptureFixture[str]
) -> None:
    """A new option takes the place of another, or is among those that `--help-all` lists."""
    short = listed_by(f"{command} --help", capsys)
    assert len(short) == 25
    flags_of = {o.name: o.flags for o in options if o.help != argparse.SUPPRESS}
    listed = {name for name, flags in flags_of.items() if short.intersection(flags)}
    assert listed == {option.name for option in options if option.is_listed}
    every = listed_by(f"{command} --help-all", capsys)
    assert all(every.intersection(flags) for flags in flags_of.values())
    assert listed_by(f"{command} --nnodes 2 {HELP_ALL} --etcd", capsys) == every


@pytest.mark.parametrize("prog", PARSERS)
def test_each_help_text_is_a_sentence(prog: str) -> None:
    for action in PARSERS[prog].actions:
        if action.help not in (None, argparse.SUPPRESS) and action.dest not in ("help", "version"):
            text = (action.help or "").partition(" (default: ")[0]
            assert text.endswith((".", ")")), (action.dest, text)


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        ("run --checkpont-dir c train.py", "--checkpoint-dir"),
        ("status --ectd h:1 --job j", "--etcd"),
        ("checkpoint reshard --word-size 3 a b --world-size 3", "--world-size"),
    ],
)
def test_an_unknown_option_is_told_with_the_nearest(
    arguments: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(arguments.split())
    assert f"did you mean {near}?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("rnu train.py", "unknown command rnu; did you mean run?"),
        ("lcoal --nodes 3 train.py", "unknown command lcoal; did you mean local?"),
        ("help stauts", "unknown command stauts; did you mean status?"),
        ("import a b", "unknown command import; did you mean elasticzero checkpoint import?"),
        ("render train.py", "unknown command render; did you mean elasticzero k8s render?"),
        ("checkpoint lst dir", "unknown command lst; did you mean list?"),
        ("k8s rendr train.py", "unknown command rendr; did you mean render?"),
        ("train.py", "unknown command train.py; to run a script: elasticzero run train.py"),
        ("checkpoint list a b", "unknown argument b: elasticzero checkpoint list takes no more"),
        ("xyzzy", "unknown command xyzzy; the commands are run, local, rehearse, "),
        ("plan --params 1 --dtype bf17", "--dtype bf17: one of bf16, fp16, fp32 is expected"),
    ],
)
def test_an_unknown_word_is_told_with_the_nearest(
    arguments: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was a list of all commands, each in quotes, and the word among them."""
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert ended.value.code == ExitCode.USAGE
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "flag", "value", "choices", "nearest"),
    [
        ("run", "--strategy", "zreo2", "ddp, zero1, zero2, zero3, diloco, auto", "zero2"),
        ("rehearse", "--faults", "kill-nod", "kill-worker, kill-node, drain, join", "kill-node"),
    ],
)
def test_an_unknown_value_is_told_with_the_nearest(
    command: str,
    flag: str,
    value: str,
    choices: str,
    nearest: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([command, flag, value, str(ROOT / "examples" / "gpt.py")]) == ExitCode.USAGE
    text = f"{flag} {value}: one of {choices} is expected; did you mean {nearest}?"
    assert capsys.readouterr().err == f"error: {text}\n"


def test_help_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "COLUMNS", "80")
    text = PARSERS["elasticzero run"].format_help().partition("examples:")[0]
    assert max(map(len, text.splitlines())) <= 80
