"""What may stand at the cursor, whatever the shell."""

from __future__ import annotations

import pytest

from elasticzero.cli.main import COMMANDS, COMPLETE, build_parser, main
from elasticzero.errors import ExitCode
from elasticzero.ops.cli.completion import completions


def completion_of(line: str) -> tuple[list[str], str]:
    """Whole words and what the shell adds, for a line up to the cursor."""
    result = completions(line.split(" "), build_parser)
    return list(result.descriptions), result.rest


@pytest.mark.parametrize(
    ("line", "candidates", "rest"),
    [
        ("st", ["status", "stop"], "nothing"),
        ("checkpoint ver", ["verify"], "nothing"),
        ("dance ", [], "nothing"),
        ("run --strategy zero", ["zero1", "zero2", "zero3"], "nothing"),
        ("run --strategy=zero2", ["--strategy=zero2"], "nothing"),
        ("run --log-format=", ["--log-format=text", "--log-format=json"], "nothing"),
        ("run --checkpoint-d", ["--checkpoint-dir"], "nothing"),
        ("run --checkpoint_d", ["--checkpoint-dir"], "nothing"),
        ("run --no-k", ["--no-keep-workers"], "nothing"),
        ("run --checkpoint-dir ", [], "directories"),
        ("run --checkpoint-dir=ch", [], "directories"),
        ("run --config ", [], "files"),
        ("run --keep ", [], "nothing"),
        ("run --keep=", [], "nothing"),
        ("run --tee=", [], "nothing"),
        ("run ", [], "files"),
        ("run --keep-workers tr", [], "files"),
        ("run --keep 3 tr", [], "files"),
        ("run train.py --str", [], "files"),
        ("run --strategy zero2 train.py --strategy ", [], "files"),
        ("local --nod", ["--nodes"], "nothing"),
        ("local --http-p", [], "nothing"),
        ("status --et", ["--etcd", "--etcd-cacert", "--etcd-cert", "--etcd-key", "--etcd-user",
                         "--etcd-password-file"], "nothing"),
        ("status --json --jo", ["--job"], "nothing"),
        ("checkpoint reshard --str", ["--strategy"], "nothing"),
        ("checkpoint reshard a b --dtype b", ["bf16"], "nothing"),
        ("checkpoint reshard ", [], "directories"),
        ("checkpoint verify a ", [], "nothing"),
        ("completion z", ["zsh"], "nothing"),
        ("doctor --preemption a", ["auto", "aws", "azure"], "nothing"),
        ("plan --optimizer adamw --dtype f", ["fp16", "fp32"], "nothing"),
    ],
)  # fmt: skip
def test_what_completes(line: str, candidates: list[str], rest: str) -> None:
    assert completion_of(line) == (candidates, rest)


def test_all_commands_and_hidden_options() -> None:
    assert completion_of("") == (list(COMMANDS), "nothing")
    flags, _ = completion_of("run --")
    assert {"--help", "--help-all", "--spares", "--rdzv-backend"} <= set(flags)
    assert not [flag for flag in flags if "_" in flag or flag == "--tee-streams"]


def test_what_is_printed_for_the_shells(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([COMPLETE, "run", "--strategy", "zero1"]) == 0
    assert capsys.readouterr().out == "zero1\n:nothing\n"
    assert main([COMPLETE, "dra"]) == 0
    assert capsys.readouterr().out == f"drain\t{COMMANDS['drain'].rstrip('.')}\n:nothing\n"


@pytest.mark.parametrize("arguments", ["--print_completion zsh", "--print-c=zsh train.py"])
def test_torchruns_option_prints_the_script_and_runs_nothing(
    arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", "zsh"]) == ExitCode.DONE
    script = capsys.readouterr().out
    assert main(["run", *arguments.split()]) == ExitCode.DONE
    assert capsys.readouterr().out == script


def test_torchruns_option_names_the_shells_that_have_a_script(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["run", "--print-completion", "tcsh"]) == ExitCode.USAGE
    assert capsys.readouterr().err == (
        "error: no script for the shell tcsh: bash, zsh, fish have one\n"
    )
