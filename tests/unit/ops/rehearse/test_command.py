"""What `elasticzero rehearse` takes of its command line, and what it looks at before a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elasticzero.cli.main import main, parse
from elasticzero.errors import ExitCode, UserError
from elasticzero.ops.rehearse.cluster_run import worker_environment
from elasticzero.ops.rehearse.command import Choice, chosen, cpu_remark
from elasticzero.ops.rehearse.left_files import MOST_FILES, changed_files, file_times
from elasticzero.ops.rehearse.script_imports import imports_elasticzero


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text("import elasticzero as ez\n")
    return path


def choice_of(line: str) -> Choice:
    return chosen(parse(["rehearse", *line.split()]))


@pytest.mark.parametrize(
    "line",
    [
        "--steps 8 --strategies ddp,zero2 train.py --lr 0.1",
        "train.py --lr 0.1 --steps 8 --strategies ddp,zero2",
        "--steps=8 train.py --strategies=ddp,zero2 --lr 0.1",
        "--strategies ddp,zero2 --steps 8 train.py -- --lr 0.1",
    ],
)
def test_own_options_may_stand_behind_the_script(line: str, script: Path) -> None:
    choice = choice_of(line)
    assert choice.script == str(script)
    assert choice.arguments == ("--lr", "0.1")
    assert choice.strategies == ("ddp", "zero2")
    assert choice.steps == 8


def test_behind_two_dashes_all_words_are_the_scripts(script: Path) -> None:
    choice = choice_of("train.py --steps 6 -- --steps 500 --json")
    assert choice.steps == 6
    assert choice.arguments == ("--steps", "500", "--json")


@pytest.mark.parametrize(("gpus", "on_cpu"), [(0, False), (1, True), (2, True), (3, False)])
def test_runs_without_enough_gpus_are_told(gpus: int, on_cpu: bool, script: Path) -> None:
    """The runs with another node have three ranks."""
    remarks = list(cpu_remark(choice_of("train.py"), gpus))
    assert bool(remarks) == on_cpu
    assert not list(cpu_remark(choice_of("train.py --faults kill-worker --worlds 1"), 1))


def test_defaults(script: Path) -> None:
    choice = choice_of("train.py")
    assert choice.strategies == ("ddp", "zero1", "zero2", "zero3")
    assert choice.worlds == (2,)
    assert choice.faults == ("kill-worker", "kill-node", "drain", "join")
    assert choice.steps == 12


def test_an_option_without_its_value_is_an_error(script: Path) -> None:
    with pytest.raises(UserError, match="--steps: a value is expected"):
        choice_of("train.py --lr 0.1 --steps")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--strategies dpp train.py", "--strategies dpp: one of ddp, zero1, zero2, zero3"),
        ("--strategies diloco train.py", "trained by the inner strategy"),
        ("--strategies ddp,ddp train.py", "each once"),
        ("--faults kill train.py", "--faults kill: one of kill-worker, kill-node, drain, join"),
        ("--worlds 0 train.py", "--worlds 0: numbers of ranks from 1 on are expected"),
        ("--worlds two train.py", "numbers of ranks from 1 on are expected"),
        ("--worlds 1 --faults drain train.py", "--faults drain: a world of 2 ranks is expected"),
        ("--steps 3 train.py", "--steps 3: 4 steps or more are expected"),
        ("--timeout 0 train.py", "more than 0 seconds are expected"),
        ("absent.py", "the training script"),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    line: str, sentence: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError) as raised:
        choice_of(line)
    assert sentence in str(raised.value)
    assert main(["rehearse", *line.split()]) == ExitCode.USAGE
    assert sentence in capsys.readouterr().err


def test_an_unknown_option_before_the_script_is_refused(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["rehearse", "--strategy", "ddp", "train.py"])
    assert ended.value.code == ExitCode.USAGE
    assert "--strategies" in capsys.readouterr().err


def test_workers_send_nothing_and_options_of_jobs_do_not_count(tmp_path: Path) -> None:
    user = {"ELASTICZERO_ETCD": "host:1", "PET_NNODES": "4", "WANDB_MODE": "online", "HOME": "/h"}
    environment = {**user, **worker_environment(user, tmp_path)}
    assert environment["ELASTICZERO_ETCD"] == environment["PET_NNODES"] == ""
    assert environment["WANDB_MODE"] == "offline"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["HOME"] == "/h"


def test_files_that_a_script_leaves_are_named(tmp_path: Path) -> None:
    (tmp_path / "kept.txt").write_text("a")
    (tmp_path / "changed.txt").write_text("a")
    before = file_times(tmp_path)
    (tmp_path / "changed.txt").write_text("ab")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.pt").touch()
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "train.pyc").touch()
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "x").touch()
    after = file_times(tmp_path)
    assert changed_files(before, after) == ["changed.txt", os.path.join("out", "model.pt")]
    assert changed_files(after, after) == []


def test_a_crowded_directory_is_not_looked_at() -> None:
    many = {str(number): (1, 1) for number in range(MOST_FILES // 2 + 1)}
    assert changed_files({}, many) == []


def test_a_script_that_imports_the_package_by_a_module_beside_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\nfrom common import loop\n")
    assert not imports_elasticzero(script)
    (tmp_path / "common.py").write_text("from tools import session\n")
    assert not imports_elasticzero(script)
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "__init__.py").touch()
    (tmp_path / "tools" / "session.py").write_text("from elasticzero import run\n")
    assert imports_elasticzero(script)


@pytest.mark.parametrize(
    ("text", "imports"),
    [
        ("import elasticzero as ez", True),
        ("from elasticzero.integrations.accelerate import Accelerator", True),
        ('"""Run it by elasticzero run."""\nimport torch', False),
        ("import elasticzeroes", False),
        ("def broken(:", True),
    ],
)
def test_what_counts_as_an_import(text: str, imports: bool, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert imports_elasticzero(script) == imports
