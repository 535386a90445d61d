"""Scripts written for torchrun run unchanged; they start anew at each generation."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.clusters import elasticzero, story

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "torchrun_ddp.py"


@pytest.mark.timeout(150)
def test_a_torchrun_script_survives_a_killed_worker_and_a_killed_node(
    tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    checkpoint = tmp_path / "model.pt"
    arguments = ["--nnodes", "1:2", str(SCRIPT), "--checkpoint", str(checkpoint)]
    arguments += ["--epochs", "8", "--samples", "8192"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=2) as told:

        def output() -> str:
            return "".join(p.read_text() for p in told.directory().glob("*/0.log"))

        told.wait("a first checkpoint", checkpoint.exists)
        told.cluster.kill_worker(told.node(1))
        told.wait("training goes on", lambda: "world 2 restarts 1" in output())
        told.cluster.kill_node(told.node(0))
        codes = told.wait_for_end()
        text = output()
    assert codes == {"node-0": -9, "node-1": 0}, told.logs()
    assert told.generation == 3
    assert "start epoch 0 world 2 restarts 0" in text
    assert "world 1 restarts 2" in text
    assert "epoch 7 world 1" in text


@pytest.mark.timeout(150)
def test_a_torchrun_script_runs_from_a_module_and_takes_torchruns_spellings(
    tmp_path: Path, job: str, etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(SCRIPT.parent)
    arguments = ["--rdzv_endpoint", etcd.endpoint, "--nproc_per_node", "2", "-m", "torchrun_ddp"]
    arguments += ["--checkpoint", str(tmp_path / "model.pt"), "--epochs", "2", "--samples", "256"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=1) as told:
        assert told.wait_for_end() == {"node-0": 0}
        assert "epoch 1 world 2" in (told.directory() / "node-0" / "0.log").read_text()


ENDS = """
import os, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def train(i):
    place = f"file://{sys.argv[1]}/{i}"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=size)
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()
for i in range(30):
    train(i)
print("trained", flush=True)
"""


@pytest.mark.timeout(150)
def test_a_plain_script_that_has_finished_does_not_hang(tmp_path: Path, job: str) -> None:
    """Gloo's destructor, run as the model goes out of scope, waits for a thread that waits for
    Python's lock; one such end in three never came back."""
    script = tmp_path / "script.py"
    script.write_text(ENDS)
    completed = subprocess.run(
        elasticzero("run", "--nproc-per-node", "2", "--http-port", "0", str(script), str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.count("trained") == 2


AT_EXIT = """
import atexit, os, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
executor = ThreadPoolExecutor(1)
executor.submit(lambda: (time.sleep(0.5), print("the executor's work is done", flush=True)))
atexit.register(lambda: (time.sleep(1.5), print("the exit function has run", flush=True)))
threading.Thread(target=time.sleep, args=(300,), name="uploader").start()
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 3])
def test_a_thread_left_behind_keeps_no_process(tmp_path: Path, job: str, code: int) -> None:
    """Exit functions get their time, the script's exit code is kept, and the thread is named."""
    script = tmp_path / "script.py"
    script.write_text(AT_EXIT)
    arguments = ["run", "--http-port", "0", "--max-restarts", "0", "--exit-timeout", "1"]
    completed = subprocess.run(
        elasticzero(*arguments, str(script), str(code)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert completed.returncode == (0 if code == 0 else 70), completed.stderr
    assert "the executor's work is done" in completed.stdout
    assert "the exit function has run" in completed.stdout
    assert "exit functions still run after" in completed.stdout
    assert "rank 0: the script has ended, but a thread still runs after 1 s" in completed.stdout
    assert "uploader; the process ends with the script's exit code" in completed.stdout
    assert (f"exited with status {code}" in completed.stderr) == (code != 0)


STUCK = """
import ctypes, threading, time
class Stuck(threading.Thread):
    def join(self, timeout=None):
        ctypes.PyDLL(None).sleep(300)  # with Python's lock held, as a native destructor may
    def run(self):
        time.sleep(300)
Stuck().start()
"""


def test_a_process_stuck_after_its_scripts_end_is_killed(tmp_path: Path, job: str) -> None:
    """Nothing in the process itself can notice; its agent does, and the script's code counts."""
    script = tmp_path / "script.py"
    script.write_text(STUCK)
    completed = subprocess.run(
        elasticzero("run", "--http-port", "0", "--exit-timeout", "1", str(script)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    assert "rank 0: its script had ended, but the process did not within 1 s" in completed.stderr


def test_workers_that_have_ended_while_others_go_on_are_told_of(tmp_path: Path, job: str) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, time\ntime.sleep(4.0 * int(os.environ['RANK']))\n")
    arguments = ["run", "--nproc-per-node", "2", "--http-port", "0", "--exit-timeout", "1"]
    completed = subprocess.run(
        elasticzero(*arguments, str(script)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    assert "rank 0 ended " in completed.stderr
    assert "the job waits for the workers of rank 1 here to end too" in completed.stderr
