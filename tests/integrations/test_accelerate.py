"""The launch tests that the `accelerate` package ships run unmodified under `elasticzero run`.

`make integrations` runs these in an environment that has accelerate. Its test_ddp_comm_hook and
test_merge_weights end in errors about GPUs where there are none. Its test_distributed_data_loop
waits for ever there, under torchrun too.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from elasticzero.launcher.store.etcd.server import free_ports
from tests.integration.clusters import elasticzero

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(300)]
PATIENCE_S = 280.0
ENVIRONMENT = {
    "ACCELERATE_USE_CPU": "true",
    "ELASTICZERO_HTTP_PORT": "0",
    "ELASTICZERO_PREEMPTION": "none",
}


def run(*arguments: str, node: str = "a") -> subprocess.Popen[str]:
    return subprocess.Popen(
        elasticzero("run", "--max-restarts=0", *arguments),
        env=os.environ | ENVIRONMENT | {"ELASTICZERO_NODE_NAME": node},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("name", ["test_script", "test_sync", "test_ops"])
def test_a_script_of_accelerate(name: str) -> None:
    pytest.importorskip("accelerate", reason="`make integrations` has it")
    process = run("--nproc-per-node=2", "-m", f"accelerate.test_utils.scripts.{name}")
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, output[-4000:]
    assert "[1] " in output


def test_a_script_of_accelerate_on_two_nodes(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="`make integrations` has it")
    arguments = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-id=a", "--rdzv-backend=c10d"]
    arguments += [f"--rdzv-endpoint=localhost:{free_ports(1)[0]}"]
    arguments += ["-m", "accelerate.test_utils.scripts.test_ops"]
    processes = [run(*arguments, node=node) for node in ("a", "b")]
    outputs = [process.communicate(timeout=PATIENCE_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
