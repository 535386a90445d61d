"""`elasticzero rehearse` with real clusters: green where all is kept, and it names what is not."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from elasticzero.errors import ExitCode
from elasticzero.launcher.snapshots.shared_memory import snapshot_directory
from elasticzero.processes import descendants, is_alive
from tests.integration.clusters import SCRIPTS, elasticzero
from tests.integration.scripts.rehearsed import PARTS
from tests.support.cases import slow

REHEARSED = SCRIPTS / "rehearsed.py"
LATE_S = 900.0
"""A generous deadline."""
QUICK = ("--steps", "6", "--json")


def rehearsal(
    folder: Path, *options: str, script: Path = REHEARSED, arguments: Sequence[str] = ()
) -> tuple[int, str, str]:
    """The exit code of a rehearsal, its output and its errors."""
    ended = subprocess.run(
        elasticzero("rehearse", *options, str(script), *arguments),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LATE_S,
        check=False,
    )
    return ended.returncode, ended.stdout, ended.stderr


def outcomes(folder: Path, *options: str, **others: Any) -> tuple[int, dict[tuple[str, str], Any]]:
    """The exit code of a rehearsal, and its runs by strategy and fault."""
    code, out, err = rehearsal(folder, *QUICK, *options, **others)
    assert out, err
    runs = json.loads(out)["runs"]
    return code, {(run["strategy"], run["fault"]): run for run in runs}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_script_whose_state_is_kept_is_green(tmp_path: Path) -> None:
    options = ("--strategies", "zero2", "--faults", "kill-worker,kill-node")
    code, runs = outcomes(tmp_path, *options)
    assert code == ExitCode.DONE, runs
    assert runs["zero2", "kill-worker"]["outcome"] == "equal", runs
    assert runs["zero2", "kill-node"]["outcome"] == "within rounding", runs
    assert [run["exit_code"] for run in runs.values()] == [0] * 5


@pytest.mark.timeout(300)
def test_a_number_that_a_module_keeps_to_itself_is_found(tmp_path: Path) -> None:
    """It is in no state_dict, so that nothing can keep it: what follows from it differs."""
    options = ("--strategies", "ddp", "--faults", "kill-worker")
    code, runs = outcomes(tmp_path, *options, arguments=["--attribute"])
    assert code == 1
    assert runs["ddp", "kill-worker"]["outcome"] == "DIFFERS", runs
    assert "step 4" in runs["ddp", "kill-worker"]["note"]


@pytest.mark.slow  # its first run ends as that of a script that ends badly
def test_a_script_of_torchrun_is_refused(tmp_path: Path, root: Path) -> None:
    script = root / "examples" / "torchrun_ddp.py"
    arguments = ["--checkpoint", str(tmp_path / "model.pt")]
    code, out, err = rehearsal(tmp_path, "--strategies", "ddp", script=script, arguments=arguments)
    assert (code, out) == (ExitCode.USAGE, "")
    assert "trains without calling elasticzero.run" in err


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_strategy_that_refuses_the_script_has_one_run(tmp_path: Path) -> None:
    options = ("--strategies", "zero1", "--faults", "kill-worker")
    code, runs = outcomes(tmp_path, *options, arguments=["--optimizer", "remembering"])
    assert code == 1, "nothing was rehearsed"
    assert [(run["fault"], run["outcome"]) for run in runs.values()] == [("none", "refused")]
    assert "Remembering" in runs["zero1", "none"]["note"]


@pytest.mark.parametrize("number", [signal.SIGINT, slow(signal.SIGTERM)])
def test_what_was_started_ends_with_the_command(number: signal.Signals, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    command = subprocess.Popen(
        elasticzero("rehearse", "--log-dir", str(logs), str(REHEARSED)),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with command:
        deadline_s = time.monotonic() + 60
        while not list(logs.rglob("records/*.jsonl")) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        started = descendants(command.pid)
        command.send_signal(number)
        _, err = command.communicate(timeout=60)
    assert command.returncode == ExitCode.INTERRUPTED, err
    assert len(started) >= 3  # etcd and two agents, at least
    deadline_s = time.monotonic() + 10
    while any(map(is_alive, started)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not [pid for pid in started if is_alive(pid)]
    [job] = [path.name for path in logs.iterdir()]
    assert not any(snapshot_directory(f"{job}-1", node).exists() for node in ("node-0", "node-1"))


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_every_fault_in_every_strategy_is_green(strategy: str, tmp_path: Path) -> None:
    code, runs = outcomes(tmp_path, "--strategies", strategy, "--worlds", "2,3")
    assert code == ExitCode.DONE, runs
    faulted = {key[1]: run["outcome"] for key, run in runs.items()}
    assert faulted["kill-worker"] == "equal", runs
    assert {faulted[name] for name in ("kill-node", "drain", "join")} <= {
        "within rounding",
        "equal",
    }, runs


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_draws_are_not_compared_without_slices(tmp_path: Path) -> None:
    options = ("--strategies", "ddp", "--faults", "kill-worker,join")
    code, runs = outcomes(tmp_path, *options, arguments=["--dropout", "0.2"])
    assert code == ExitCode.DONE, runs
    for fault in ("kill-worker", "join"):
        assert runs["ddp", fault]["outcome"] == "not comparable", runs
        assert "virtual_batch=" in runs["ddp", fault]["note"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "strategy"), [(name, s) for name, part in PARTS.items() for s in part.strategies]
)
def test_what_is_forgotten_is_named(name: str, strategy: str, tmp_path: Path) -> None:
    part = PARTS[name]
    arguments = ["--optimizer", part.optimizer, "--forget", name, "--dropout", "0.1"]
    options = ("--strategies", strategy, "--faults", part.fault)
    code, runs = outcomes(tmp_path, *options, arguments=arguments)
    assert code == 1, runs
    assert runs[strategy, part.fault]["outcome"] == "DIFFERS", runs
    assert part.named in runs[strategy, part.fault]["note"], runs
    assert "before step 4" in runs[strategy, part.fault]["note"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_tensors_under_any_key_are_kept(strategy: str, tmp_path: Path) -> None:
    """As those above, with nothing forgotten."""
    options = ("--strategies", strategy, "--faults", "kill-worker,kill-node")
    code, runs = outcomes(tmp_path, *options, arguments=["--optimizer", "averaging"])
    assert code == ExitCode.DONE, runs
    assert runs[strategy, "kill-worker"]["outcome"] == "equal", runs
    assert runs[strategy, "kill-node"]["outcome"] == "within rounding", runs


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["transformers_trainer", "lightning_trainer", "accelerate_loop"])
def test_scripts_of_frameworks_are_green(name: str, tmp_path: Path) -> None:
    """As they are; of the faults two, and of the strategies one that deals the state."""
    arguments = [str(tmp_path / "output"), "--global-batch", "8"]
    options = ("--strategies", "zero2", "--faults", "kill-worker,join")
    script = SCRIPTS / f"{name}.py"
    code, runs = outcomes(tmp_path, *options, script=script, arguments=arguments)
    assert code == ExitCode.DONE, runs
    assert runs["zero2", "kill-worker"]["outcome"] == "equal", runs
    assert runs["zero2", "join"]["outcome"] in ("equal", "within rounding"), runs


def test_a_script_that_ends_badly_is_quoted(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\nimport elasticzero\nprint('step 0')\nsys.exit('no data in /d')\n"
    )
    options = ("--strategies", "ddp", "--faults", "kill-worker")
    code, out, err = rehearsal(tmp_path, *options, script=script)
    assert code == 1
    sentence = "exited with status 1; the last line that it printed is: no data in /d"
    assert sentence in err and sentence in " ".join(out.split())
