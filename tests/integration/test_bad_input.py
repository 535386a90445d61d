"""A mistake costs one clear line: an exit code, no traceback, nothing left running."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elasticzero.launcher.store.etcd.server import EtcdServer
from elasticzero.processes import descendants, is_alive
from tests.integration.clusters import REGRESSION, SCRIPTS, elasticzero, story
from tests.support.cases import slow
from tests.support.deadlines import patience

FAILS_ON_IMPORT = SCRIPTS / "fails_on_import.py"


def test_a_script_s_own_hook_sees_its_error_and_cannot_hide_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    hook = "lambda kind, *_: print('seen', kind.__name__, flush=True) or sys.exit(0)"
    script.write_text(f"import sys\nsys.excepthook = {hook}\n1 / 0\n")
    arguments = ["--max-restarts=0", "--http-port=0", "--preemption=none"]
    arguments += ["--log-dir", str(tmp_path)]
    done = run("run", *arguments, str(script))
    output = done.stdout + done.stderr
    assert done.returncode not in (0, 64) and "ZeroDivisionError" in output
    assert any("seen ZeroDivisionError" in path.read_text() for path in tmp_path.glob("*/*/0.log"))


def run(*arguments: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        elasticzero(*arguments), capture_output=True, text=True, timeout=timeout, check=False
    )


CASES = [
    ("nnodes the wrong way round", ["run", "--nnodes", "3:1"], 64, "--nnodes 3:1: MIN must"),
    ("nnodes no number", ["run", "--nnodes", "two"], 64, "--nnodes two"),
    ("unknown strategy", ["run", "--strategy", "zero9"], 64, "zero9"),
    ("unknown option", ["run", "--nodes", "3"], 64, "--nodes"),
    ("several nodes, no etcd", ["run", "--nnodes", "2:4"], 64, "--etcd"),
    ("etcd without a job", ["run", "--etcd", "127.0.0.1:2379"], 64, "--job"),
    ("a bad name", ["run", "--node-name", "a/b"], 64, "--node-name"),
    ("a bad nproc", ["run", "--nproc-per-node", "many"], 64, "--nproc-per-node many"),
    ("a bad fault", ["local", "--nodes", "2", "--fault", "explode@3"], 64, "--fault explode@3"),
    ("no nodes", ["local", "--nodes", "0"], 64, "--nodes 0"),
    ("local keeps none", ["local", "--nodes", "2", "--keep", "0"], 64, "error: --keep 0"),
    ("no place to save", ["run", "--checkpoint-every", "5"], 64, "needs --checkpoint-dir"),
]


@pytest.mark.parametrize(
    ("arguments", "code", "text"), [row[1:] for row in CASES], ids=[row[0] for row in CASES]
)
def test_bad_options(arguments: list[str], code: int, text: str) -> None:
    completed = run(*arguments, str(REGRESSION))
    assert completed.returncode == code, completed.stderr
    assert text in completed.stderr
    assert "Traceback" not in completed.stderr


def test_a_script_that_is_not_there() -> None:
    completed = run("run", "/nowhere/train.py")
    assert completed.returncode == 64
    assert "/nowhere/train.py does not exist" in completed.stderr


def test_a_script_that_fails_on_import(tmp_path: Path) -> None:
    completed = run("run", "--http-port", "0", "--log-dir", str(tmp_path), str(FAILS_ON_IMPORT))
    assert completed.returncode == 64
    assert "ModuleNotFoundError: No module named 'there_is_no_such_module'" in completed.stderr
    assert "Traceback" not in completed.stderr


def test_etcd_out_of_reach() -> None:
    """A raw line of gRPC's, without time and node, came before."""
    arguments = ["run", "--etcd", "127.0.0.1:1", "--job", "x", "--join-timeout", "2"]
    completed = run(*arguments, "--node-name", "n", str(REGRESSION))
    assert completed.returncode == 69
    assert all(re.match(r"\[[\d:]+ n\] |error: ", line) for line in completed.stderr.splitlines())
    assert "failed to connect to all addresses" not in completed.stderr
    assert "etcd at 127.0.0.1:1 did not answer within 2 s (--join-timeout)" in completed.stderr
    assert "Traceback" not in completed.stderr


@pytest.mark.parametrize("arguments", [["run"], ["local", "--nodes", "2"]], ids=["run", "local"])
def test_a_log_directory_that_cannot_be_made(arguments: list[str], tmp_path: Path) -> None:
    """It was a traceback and exit code 1, which Kubernetes tries again."""
    (tmp_path / "file").write_text("")
    where = tmp_path / "file" / "logs"
    completed = run(*arguments, "--log-dir", str(where), str(REGRESSION))
    assert completed.returncode == 64
    assert completed.stderr == (
        f"error: --log-dir {where}: logs cannot be written there (a part of its path is a file); "
        "give another --log-dir DIR\n"
    )
    assert completed.stdout == ""


@pytest.mark.slow
def test_a_log_directory_that_mutes_the_terminal_is_said(tmp_path: Path) -> None:
    arguments = ["--log-dir", str(tmp_path), str(REGRESSION), "--epochs", "1"]
    completed = run("run", "--http-port", "0", *arguments)
    assert "--tee repeats it here" in completed.stderr
    assert "[0] " not in completed.stdout
    assert "--tee repeats it here" in run("local", "--nodes", "1", *arguments).stdout
    completed = run("run", "--http-port", "0", "--tee", *arguments)
    assert "--tee repeats" not in completed.stderr
    assert "[0] " in completed.stdout


@pytest.mark.slow
def test_a_plain_script_is_told_apart_from_a_training(tmp_path: Path) -> None:
    """It was "finished after step 0", with 0 steps recomputed; its faults were passed over."""
    script = tmp_path / "sleeps.py"
    script.write_text("import time; time.sleep(8)")
    completed = run("local", "--nodes", "2", "--fault", "kill-node@3", str(script))
    assert completed.returncode == 0
    assert "--fault kill-node@3 waits: no worker has called elasticzero.run yet" in completed.stdout
    assert "--fault kill-node@3 was not injected: the script never called" in completed.stdout
    assert completed.stdout.splitlines()[-1].endswith("none called elasticzero.run")
    assert "step 0" not in completed.stdout and "recomputed" not in completed.stdout
    script.write_text("")
    completed = run("run", "--http-port", "0", str(script))
    assert "the job is done: every rank's script has ended with status 0" in completed.stderr
    assert "step 0" not in completed.stderr


@pytest.mark.parametrize("place", ["file", "foreign"])
def test_a_checkpoint_directory_that_is_none(place: str, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    if place == "file":
        directory.write_text("not a directory")
    else:
        directory.mkdir()
        (directory / "thesis.tex").write_text("years of work")
    completed = run("run", "--checkpoint-dir", str(directory), str(REGRESSION))
    assert completed.returncode == 64, completed.stderr
    assert str(directory) in completed.stderr
    assert "Traceback" not in completed.stderr
    assert place == "file" or (directory / "thesis.tex").read_text() == "years of work"


def test_a_global_batch_smaller_than_the_world(tmp_path: Path) -> None:
    arguments = ["local", "--nodes", "2", "--log-dir", str(tmp_path), str(REGRESSION)]
    completed = run(*arguments, "--global-batch", "1")
    assert completed.returncode == 64, completed.stderr
    assert "global_batch is 1, smaller than the world of 2 ranks" in completed.stderr
    assert "Traceback" not in completed.stderr


def test_a_checkpoint_that_does_not_fit_the_model(tmp_path: Path) -> None:
    arguments = ["run", "--http-port", "0", "--checkpoint-dir", str(tmp_path / "c")]
    script = [str(REGRESSION), "--epochs", "1"]
    assert run(*arguments, "--log-dir", str(tmp_path / "a"), *script).returncode == 0
    completed = run(*arguments, "--log-dir", str(tmp_path / "b"), *script, "--hidden", "9")
    assert completed.returncode == 64, completed.stderr
    assert "model/0.weight" in completed.stderr
    assert "give the model that wrote it, or start in another checkpoint" in completed.stderr
    assert "Traceback" not in completed.stderr


def test_a_crash_is_told_once_with_its_traceback(tmp_path: Path) -> None:
    arguments = ["local", "--nodes", "2", "--max-restarts", "0", "--log-dir", str(tmp_path)]
    completed = run(*arguments, str(REGRESSION), "--fail-at", "7")
    assert completed.returncode == 70, completed.stderr
    assert completed.stderr.count("ValueError: told to fail at step 7\n") == 1
    for generation in (1, 2):
        row = rf"  generation {generation}: rank 0 on node-\d, after step 6: the error above\n"
        assert re.search(row, completed.stderr), completed.stderr
    assert "; without progress past step 6" in completed.stderr
    assert "2 generations in a row failed alike, on node-" in completed.stderr
    assert completed.stderr.count("Traceback") == 1
    assert "forking/server.py" not in completed.stderr and "entry_point.py" not in completed.stderr
    log = re.search(r"^log of rank 0: (.*)$", completed.stderr, re.MULTILINE)
    assert log and "ValueError: told to fail at step 7" in Path(log[1]).read_text()
    assert "error: rank 0 on node-" in completed.stderr


def test_two_agents_of_one_name(tmp_path: Path, job: str, etcd: EtcdServer) -> None:
    arguments = ["--nnodes", "1:2", "--settle", "0", "--lease-ttl", "2", str(REGRESSION)]
    with story(tmp_path, etcd.endpoint, job, [*arguments, "--pause", "0.2"], nodes=1) as told:
        told.wait_for_step(2)
        common = ["--etcd", etcd.endpoint, "--job", job, "--node-name", "node-0"]
        common += ["--lease-ttl", "2", "--http-port", "0", "--nnodes", "1:2"]
        completed = run("run", *common, str(REGRESSION))
        assert completed.returncode == 64
        assert (
            "another agent of this job runs on this machine under the same --node-name"
            in completed.stderr
        )
        told.wait_for_step(told.step + 3)
        assert told.generation == 1


def test_a_job_that_is_done(tmp_path: Path, job: str, etcd: EtcdServer) -> None:
    script = [str(REGRESSION), "--epochs", "1"]
    with story(tmp_path, etcd.endpoint, job, ["--nnodes", "1:1", *script], nodes=1) as told:
        assert told.wait_for_end() == {"node-0": 0}
    arguments = ["run", "--etcd", etcd.endpoint, "--job", job, "--http-port", "0"]
    arguments += ["--log-dir", str(tmp_path / "again")]
    completed = run(*arguments, *script)
    assert completed.returncode == 64
    assert "is already done" in completed.stderr
    assert run(*arguments, "--restart", *script).returncode == 0


@pytest.mark.slow  # a unit test has the line, which comes after 10 s
def test_fewer_nodes_than_wanted_says_who_is_there(
    tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    arguments = ["run", "--etcd", etcd.endpoint, "--job", job, "--nnodes", "2:3"]
    arguments += ["--http-port", "0"]
    arguments += ["--node-name", "lonely", "--join-timeout", "13", "--log-dir", str(tmp_path)]
    completed = run(*arguments, str(REGRESSION))
    assert completed.returncode == 69, completed.stderr
    assert "waiting for nodes: 1 of at least 2 are here (lonely); 1 missing" in completed.stderr


@pytest.mark.parametrize(
    "number", [signal.SIGINT, *(slow(number) for number in (signal.SIGTERM, signal.SIGHUP))]
)
def test_ctrl_c_stops_everything(number: signal.Signals, tmp_path: Path) -> None:
    arguments = ["local", "--nodes", "3", "--log-dir", str(tmp_path), str(REGRESSION)]
    process = subprocess.Popen(
        elasticzero(*arguments, "--pause", "0.1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "  step " in line:
            break
    pids = descendants(process.pid)
    assert len(pids) > 6
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    deadline_s = time.monotonic() + patience(10.0)
    while any(map(is_alive, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.02)  # the kernel ends what is bound to a process that has ended
    assert not [pid for pid in pids if is_alive(pid)]
    assert "Traceback" not in output


@pytest.mark.cold
def test_the_command_line_needs_no_torch() -> None:
    code = "import elasticzero.cli.main, sys; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
