"""torchrun's documented command lines work with one word changed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from elasticzero.errors import ExitCode
from elasticzero.launcher.store.etcd.server import free_ports
from tests.integration.clusters import SCRIPTS, elasticzero

ENVIRONMENT = SCRIPTS / "environment.py"
PATIENCE_S = 100.0
OURS = {"ELASTICZERO_HTTP_PORT": "0", "ELASTICZERO_PREEMPTION": "none"}
Started = subprocess.Popen[str]


@contextmanager
def started(
    arguments: Sequence[str], environment: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Iterator[Started]:
    """`elasticzero run` with these words, ended with the test."""
    with subprocess.Popen(
        elasticzero("run", *arguments),
        env=os.environ | OURS | dict(environment or {}),
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def finish(process: Started, code: int = 0) -> str:
    """What the process printed until its end."""
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code, output
    return output


def run(
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    code: int = 0,
    cwd: Path | None = None,
) -> str:
    with started(arguments, environment, cwd) as process:
        return finish(process, code)


def seen(directory: Path) -> dict[int, dict[str, Any]]:
    """What the workers found, by rank."""
    return {int(path.stem): json.loads(path.read_text()) for path in directory.glob("*.json")}


def sizes(directory: Path) -> list[tuple[str, str]]:
    return [
        (report["environment"]["RANK"], report["environment"]["WORLD_SIZE"])
        for _, report in sorted(seen(directory).items())
    ]


TWO = [("0", "2"), ("1", "2")]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--standalone", "--nnodes=1", "--nproc-per-node=2"],
        ["--nnodes=1", "--nproc_per_node=2"],
        ["--nproc_per_node", "2", "--master_port", "29511"],
        ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--nnodes=1", "--nproc-per-node=2"],
    ],
    ids=["standalone", "nothing", "master-port", "c10d port 0"],
)
def test_one_node(arguments: list[str], tmp_path: Path) -> None:
    run([*arguments, str(ENVIRONMENT), str(tmp_path), "--lr", "${local_rank}"])
    assert sizes(tmp_path) == TWO
    assert [report["arguments"] for _, report in sorted(seen(tmp_path).items())] == [
        ["--lr", "0"],
        ["--lr", "1"],
    ]


def test_a_module(tmp_path: Path) -> None:
    arguments = ["--standalone", "--nproc-per-node=2", "-m", "environment", str(tmp_path)]
    run(arguments, cwd=SCRIPTS)
    assert sizes(tmp_path) == TWO
    assert all(report["main"] for report in seen(tmp_path).values())


def test_a_program_without_python(tmp_path: Path) -> None:
    """A shell script, and a Python of its own that then calls `elasticzero.run`."""
    text = f'echo "$LOCAL_RANK of $WORLD_SIZE" > {tmp_path}/$RANK; exec sleep 0'
    arguments = ["--standalone", "--nproc-per-node=2", "--no-python", "bash", "-c", text]
    output = run(arguments)
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["0 of 2\n", "1 of 2\n"]
    assert "every rank's script has ended with status 0" in output


@pytest.mark.slow
def test_a_program_may_be_a_python_that_trains(tmp_path: Path) -> None:
    script = [str(SCRIPTS / "regression.py"), "--epochs", "1"]
    arguments = ["--nproc-per-node=2", "--no-python", sys.executable, *script]
    assert re.search(r"finished after step [1-9]", run(arguments))


def test_a_program_that_fails(tmp_path: Path) -> None:
    arguments = ["--standalone", "--max-restarts=0", "--no-python", "bash", "-c", "exit 3"]
    output = run(arguments, code=ExitCode.FAILED)
    assert "rank 0" in output
    assert "exited with status 3" in output
    broken = tmp_path / "program"
    broken.write_text("#!/nowhere/sh\n")
    broken.chmod(0o755)
    output = run(["--standalone", "--no-python", str(broken)], code=ExitCode.USAGE)
    assert f"{broken} cannot be run: No such file or directory" in output
    assert "generation 2" not in output


def test_options_from_pet_variables(tmp_path: Path) -> None:
    """As Kubeflow's PyTorchJob gives them."""
    pet = {
        "PET_NPROC_PER_NODE": "2",
        "PET_NNODES": "1",
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"localhost:{free_ports(1)[0]}",
        "PET_RDZV_ID": "from-pet",
        "PET_MAX_RESTARTS": "2",
        "PET_ROLE": "trainer",
    }
    run([str(ENVIRONMENT), str(tmp_path)], pet)
    assert sizes(tmp_path) == TWO
    environment = seen(tmp_path)[1]["environment"]
    assert (environment["TORCHELASTIC_RUN_ID"], environment["ROLE_NAME"]) == ("from-pet", "trainer")
    assert environment["TORCHELASTIC_MAX_RESTARTS"] == "2"


def test_two_nodes_meet_by_c10d(tmp_path: Path) -> None:
    """Torch's own documented line; both nodes are on the host that is named."""
    port = free_ports(1)[0]
    arguments = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-id=29:a", "--rdzv-backend=c10d"]
    arguments += [f"--rdzv-endpoint=localhost:{port}", str(ENVIRONMENT), str(tmp_path)]
    with (
        started(arguments, {"ELASTICZERO_NODE_NAME": "a"}) as first,
        started(arguments, {"ELASTICZERO_NODE_NAME": "b"}) as second,
    ):
        output = finish(first) + finish(second)
    assert sizes(tmp_path) == TWO
    assert output.count("losing this host loses coordination") == 1


@pytest.mark.parametrize("host", [pytest.param("127.0.0.1", marks=pytest.mark.slow), "name"])
def test_two_nodes_meet_at_a_master_address(host: str, tmp_path: Path) -> None:
    """The second starts first, waits for the host, and is the second all the same."""
    port = free_ports(1)[0]
    address = socket.gethostname() if host == "name" else host
    arguments = ["--nnodes=2", "--nproc_per_node=1", f"--master_addr={address}"]
    arguments += [f"--master_port={port}", str(ENVIRONMENT), str(tmp_path)]
    b = {"ELASTICZERO_NODE_NAME": "b", "LAUNCHED_AS": "1"}
    a = {"ELASTICZERO_NODE_NAME": "a", "LAUNCHED_AS": "0"}
    with started(["--node_rank=1", *arguments], b) as second:
        time.sleep(1.0)
        assert second.poll() is None
        with started(["--node_rank=0", *arguments], a) as first:
            waiting, hosting = finish(second), finish(first)
    assert f"waiting for the etcd at {address}:{port}" in waiting
    assert "losing this host loses coordination" in hosting
    environments = [report["environment"] for _, report in sorted(seen(tmp_path).items())]
    assert [(e["RANK"], e["GROUP_RANK"], e["LAUNCHED_AS"]) for e in environments] == [
        ("0", "0", "0"),
        ("1", "1", "1"),
    ]
    assert {e["GROUP_WORLD_SIZE"] for e in environments} == {"2"}


def test_a_taken_master_port_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = ["--nnodes=2", "--node-rank=0"]
        arguments += ["--master-addr=127.0.0.1", f"--master-port={port}"]
        output = run([*arguments, str(ENVIRONMENT), str(tmp_path)], code=ExitCode.UNAVAILABLE)
    assert f"port {port} of 127.0.0.1 is taken" in output
    assert "Traceback" not in output


DIFFERS = {
    "MASTER_ADDR": "of the node of rank 0, by its address",
    "MASTER_PORT": "a port that is free",
    "TORCHELASTIC_RUN_ID": "torchrun draws one too",
    "TORCHELASTIC_ERROR_FILE": "in the directory of logs",
    "PWD": "",
    "_": "",
    "SHLVL": "",
}
"""Variables of which the values need not be the same."""


def test_workers_find_torchruns_environment(tmp_path: Path) -> None:
    """Every variable that torchrun sets is there, with the same value; fails when torch adds
    one."""
    arguments = ["--standalone", "--nproc-per-node=2", "--max-restarts=3", "--role=trainer"]
    theirs, ours = tmp_path / "torchrun", tmp_path / "elasticzero"
    clean = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    for command, where in (
        ([sys.executable, "-m", "torch.distributed.run"], theirs),
        (elasticzero("run", "--preemption", "none", "--http-port", "0"), ours),
    ):
        where.mkdir()
        done = subprocess.run(
            [*command, *arguments, str(ENVIRONMENT), str(where)],
            env=clean,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        expected, report = (seen(where)[rank] for where in (theirs, ours))
        for name, value in expected["environment"].items():
            if name == "TORCHELASTIC_USE_AGENT_STORE":
                assert report["environment"][name] == "False", "an agent holds no such store"
            elif name in DIFFERS:
                assert report["environment"].get(name), name
            elif name not in clean:
                assert report["environment"].get(name) == value, name
        assert report["threads"] == expected["threads"] == 1


def test_a_script_that_trains_is_not_held_to_one_thread(tmp_path: Path) -> None:
    """OMP_NUM_THREADS is torchrun's 1 only for scripts that have no session, and so are NCCL's
    variables."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, torch, elasticzero\n"
        "def train(session):\n"
        "    nccl = os.environ.get('TORCH_NCCL_ASYNC_ERROR_HANDLING')\n"
        "    print('threads', torch.get_num_threads(), nccl, flush=True)\n"
        "print('before', os.environ['TORCH_NCCL_ASYNC_ERROR_HANDLING'], flush=True)\n"
        "elasticzero.run(train)\n"
    )
    clean = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [*elasticzero("run", "--nproc-per-node", "2", "--http-port", "0"), str(script)],
        env=clean,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert f"[1] threads {threads} None" in done.stdout, done.stdout + done.stderr
    assert "[1] before 1" in done.stdout


def test_the_error_that_record_wrote_is_the_jobs(tmp_path: Path) -> None:
    """Also from a program that has no other way to say it; and the agent passes it on."""
    error_file = tmp_path / "termination-log"
    arguments = ["--standalone", "--nproc-per-node=2", "--max-restarts=0", "--no-python"]
    arguments += [sys.executable, str(ENVIRONMENT), str(tmp_path), "--fail"]
    output = run(arguments, {"TORCHELASTIC_ERROR_FILE": str(error_file)}, code=ExitCode.FAILED)
    assert "rank 1" in output
    assert "ValueError: no such colour: octarine" in output
    assert 'raise ValueError("no such colour: octarine")' in output
    message = json.loads(error_file.read_text())["message"]
    assert "no such colour: octarine" in message["message"]
    assert message["errorCode"] == ExitCode.FAILED
    assert "octarine" in message["extraInfo"]["py_callstack"]


@pytest.mark.slow
def test_streams_go_where_redirects_and_tee_say(tmp_path: Path) -> None:
    script = tmp_path / "speaks.py"
    script.write_text(
        "import os, sys\n"
        "print('out of', os.environ['RANK'], flush=True)\n"
        "print('err of', os.environ['RANK'], file=sys.stderr, flush=True)\n"
    )
    arguments = ["--standalone", "--nproc-per-node=3", "--log-dir", str(tmp_path / "logs")]
    arguments += ["--rdzv-id", "j", "--redirects", "3", "--tee", "0:1,1:2,2:3"]
    output = run(
        [*arguments, "--local-ranks-filter", "0,1", str(script)],
        {
            "ELASTICZERO_NODE_NAME": "n",
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "${role_name}/${rank}: ",
        },
    )
    lines = {line for line in output.splitlines() if re.search(r"\b(out|err) of \d", line)}
    assert lines == {"default/0: out of 0", "default/1: err of 1"}
    logs = tmp_path / "logs" / "j" / "n"
    assert (logs / "0.stdout.log").read_text() == "out of 0\n"
    assert (logs / "0.log").read_text() == "err of 0\n"
    assert sorted((logs / "2.log").read_text().splitlines()) == ["err of 2", "out of 2"]


@pytest.mark.slow
def test_a_node_leaves_at_the_signals_that_are_named(tmp_path: Path) -> None:
    """As SLURM announces the end of an allocation by SIGUSR1."""
    script = tmp_path / "waits.py"
    script.write_text("import time; print('here', flush=True); time.sleep(600)")
    with started(["--standalone", "--signals-to-handle", "SIGTERM,SIGUSR1", str(script)]) as node:
        assert node.stdout is not None
        for line in node.stdout:
            if "here" in line:
                break
        node.send_signal(signal.SIGUSR1)
        output = finish(node, ExitCode.LEFT)
    assert "SIGUSR1 (25 s of grace)" in output


@pytest.mark.slow  # worker_settings has a unit test
def test_each_worker_sees_its_own_gpu_only(tmp_path: Path) -> None:
    arguments = ["--standalone", "--nproc-per-node=2", "--virtual-local-rank"]
    run([*arguments, str(ENVIRONMENT), str(tmp_path)], {"CUDA_VISIBLE_DEVICES": "5,7"})
    environments = [f["environment"] for _, f in sorted(seen(tmp_path).items())]
    assert [(e["LOCAL_RANK"], e["CUDA_VISIBLE_DEVICES"]) for e in environments] == [
        ("0", "5"),
        ("0", "7"),
    ]


def test_options_without_effect_are_said(tmp_path: Path) -> None:
    arguments = ["--standalone", "--start-method", "spawn", "--monitor-interval=1", "--run-path"]
    output = run([*arguments, str(ENVIRONMENT), str(tmp_path)])
    assert output.count("--start-method has no effect: workers are always forked") == 1
    assert output.count("--monitor-interval has no effect") == 1
    assert "--run-path" not in output
