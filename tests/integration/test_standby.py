"""Processes that have run the script up to `elasticzero.run` take the place of lost workers."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from elasticzero.launcher.store.etcd.server import EtcdServer
from elasticzero.processes import STANDBY_NAME, descendants, name_of
from tests.integration.clusters import REGRESSION, Story, story
from tests.integration.test_elastic_training import check_samples, check_weights
from tests.integration.test_worker_reuse import starts
from tests.support.cases import slow

SLOW = ["--slow-start", "0.8"]
"""Makes the script come to `elasticzero.run` late enough for processes to stand by."""
STRATEGIES = ("ddp", slow("zero1"), slow("zero2"), slow("zero3"))


def standing(told: Story, node: str) -> list[dict[str, Any]]:
    return [e for name, e in told.told if name == node and e["event"] == "standing"]


def standbys_of(told: Story, node: int) -> list[int]:
    below = descendants(told.node(node).process.pid)
    return [pid for pid in below if name_of(pid) == STANDBY_NAME]


def wait_for_standbys(told: Story, *nodes: int, count: int = 1) -> None:
    def all_stand_by() -> bool:
        return all(len(standing(told, f"node-{node}")) >= count for node in nodes)

    told.wait(f"{count} processes that stand by on each node", all_stand_by)


def job_arguments(tmp_path: Path, strategy: str, *options: str) -> list[str]:
    arguments = ["--nnodes", "1:2", "--strategy", strategy, *options]
    return [*arguments, "--checkpoint-dir", str(tmp_path / "checkpoints")]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_killed_worker_is_replaced_by_what_stood_by(
    strategy: str, tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    """Twice: once a worker is lost, another process stands by for it."""
    arguments = job_arguments(tmp_path, strategy, "--nproc-per-node", "2")
    arguments += [str(REGRESSION), "--pause", "0.1", *SLOW]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=2) as told:
        for deaths in (1, 2):
            told.wait_for_first_step(deaths)
            with told.slowed(0.5):
                wait_for_standbys(told, 0, 1, count=2 * deaths)
                waiting = standbys_of(told, 0)
                assert not set(waiting) & set(told.cluster.workers_of(told.node(0)))
                told.cluster.kill_worker(told.node(0))
                told.wait_for_first_step(deaths + 1)
            last = starts(told, "node-0")[-1]
            assert last["stood_by"] == 2 and set(last["pids"]) == set(waiting), told.logs()
            assert last["pids"] != starts(told, "node-0")[0]["pids"]
        codes = told.wait_for_end()
    assert codes == {"node-0": 0, "node-1": 0}
    check_samples(told.lineage, told.directory())
    check_weights(tmp_path / "checkpoints", reference)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kept", [False, slow(True)])
def test_a_spare_node_comes_in_with_what_stood_by(
    kept: bool, tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    """Where the node that is lost dies, and so also where survivors keep their processes."""
    arguments = job_arguments(tmp_path, "zero2", "--lease-ttl", "2")
    arguments += ["--keep-workers"] if kept else []
    arguments += [str(REGRESSION), "--pause", "0.1", *SLOW]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=2) as told:
        told.wait_for_first_step(1)
        spare = told.cluster.start_node()
        with told.slowed(0.5):
            told.wait("the spare's process", lambda: standing(told, spare.name))
            wait_for_standbys(told, 0, 1)
            told.cluster.kill_node(told.node(0))
            told.wait("the spare's workers", lambda: starts(told, spare.name))
        codes = told.wait_for_end()
    assert codes == {"node-0": -9, "node-1": 0, spare.name: 0}
    assert [start["stood_by"] for start in starts(told, spare.name)] == [1], told.logs()
    check_samples(told.lineage, told.directory())
    check_weights(tmp_path / "checkpoints", reference)


TRAIN = """
def train(session):
    print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, {os.environ['MASTER_PORT']}")
    model = torch.nn.Linear(4, 1)
    model, optimizer = session.prepare(model, lambda p: torch.optim.SGD(p, lr=0.1))
    session.restore()
    data = torch.utils.data.TensorDataset(torch.ones(64, 4))
    for x, in session.batches(data, global_batch=2, epochs=3):
        session.backward(model(x).mean())
        session.step()
        time.sleep(0.1)
"""
ODD_BEGINS = {
    "its rank": ('rank = int(os.environ["RANK"])', "looks at RANK before elasticzero.run"),
    "all variables": ("copy = {**os.environ}", "looks at all variables of the environment before"),
    "a process": (
        "import subprocess; child = subprocess.Popen(['sleep', '100'])",
        "starts a process that still runs at elasticzero.run",
    ),
    "a lock": (
        "def begin():\n"
        "    lock = sys.argv[1] + '-lock'\n"
        "    while True:\n"
        "        try:\n"
        "            os.close(os.open(lock, os.O_CREAT | os.O_EXCL))\n"
        "            break\n"
        "        except FileExistsError: time.sleep(0.05)\n"
        "    try:\n"
        "        os.environ.copy()\n"
        "    finally:\n"
        "        os.remove(lock)\n"
        "begin()",
        "looks at all variables of the environment before",
    ),
    "removes": (
        "import shutil; shutil.rmtree(sys.argv[1] + '-results', ignore_errors=True)\n"
        "os.makedirs(sys.argv[1] + '-results')",
        "removes ",
    ),
    "an end": ("", "it ends by itself, with exit code 3: no data today"),
}
ODD = """
import os, sys, time
import torch, elasticzero as ez

time.sleep(0.8)
if {ends} and os.path.exists(sys.argv[1]):
    print("no data today")
    sys.exit(3)
open(sys.argv[1], "a").close()
{first}

"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", [*list(ODD_BEGINS)[:1], *map(slow, list(ODD_BEGINS)[1:])])
def test_a_script_that_cannot_be_held_trains_as_before(
    kind: str, tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    first, reason = ODD_BEGINS[kind]
    script = tmp_path / "odd.py"
    script.write_text(ODD.format(first=first, ends=kind == "an end") + TRAIN + "ez.run(train)\n")
    arguments = ["--nnodes", "1", str(script), str(tmp_path / "began")]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=1) as told:
        told.wait("the reason", lambda: standing(told, "node-0"))
        assert reason in standing(told, "node-0")[0]["refused"]
        told.wait("its end", lambda: not standbys_of(told, 0))
        (tmp_path / "began").unlink()
        told.cluster.kill_worker(told.node(0))
        codes = told.wait_for_end()
    assert codes == {"node-0": 0}
    assert [start["stood_by"] for start in starts(told, "node-0")] == [0, 0]
    assert [event["refused"] != "" for event in standing(told, "node-0")] == [True], "told once"


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_file_that_is_edited_is_read_anew(tmp_path: Path, job: str, etcd: EtcdServer) -> None:
    """All workers of the next generation have its new content, as they would without standbys."""
    settings, script = tmp_path / "settings.txt", tmp_path / "edited.py"
    settings.write_text("before")
    reads = f"print(open({str(settings)!r}).read()"
    script.write_text(SPEAKS.replace('print(f"local', f'{reads}, f"local').replace("=3", "=6"))
    arguments = ["--nnodes", "1", "--nproc-per-node", "2", str(script)]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=1) as told:
        told.wait("both", lambda: len(standing(told, "node-0")) == 2)
        settings.write_text("afterwards")
        told.wait("both anew", lambda: len(standing(told, "node-0")) == 4)
        told.cluster.kill_worker(told.node(0))
        assert told.wait_for_end() == {"node-0": 0}
    assert [start["stood_by"] for start in starts(told, "node-0")] == [0, 2]
    for rank in (0, 1):
        text = (told.directory() / "node-0" / f"{rank}.log").read_text()
        first, second = text.split("a line of stdout\n")[1:]
        assert "before" in first and "afterwards" in second


SPEAKS = """
import os, sys, time
print("a line of stdout")
print("a line of stderr", file=sys.stderr)
time.sleep(0.8)
import torch, elasticzero as ez
"""
SPEAKS += (
    TRAIN
    + """
print(f"local rank {os.environ['LOCAL_RANK']}, {sys.argv[1:]}")
ez.run(train)
"""
)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("separate", [False, slow(True)])
def test_what_it_has_printed_is_in_its_workers_log(
    separate: bool, tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    """Once it is the worker, and not before; stdout in its own log where it has one."""
    script = tmp_path / "speaks.py"
    script.write_text(SPEAKS)
    arguments = ["--nnodes", "1", "--nproc-per-node", "2"]
    arguments += ["--redirects", "1"] if separate else []
    arguments += [str(script), "${local_rank}"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=1) as told:
        wait_for_standbys(told, 0, count=2)
        logs = told.directory() / "node-0"
        outputs = [logs / ("1.stdout.log" if separate else "1.log"), logs / "1.log"]
        assert outputs[0].read_text().count("a line of stdout\n") == 1
        told.cluster.kill_worker(told.node(0))
        assert told.wait_for_end() == {"node-0": 0}
    first, second = outputs[0].read_text().split("a line of stdout\n")[1:]
    for text in (first, second):
        assert "local rank 1, ['1']\nrank 1 of 2, " in text
    assert outputs[1].read_text().count("a line of stderr\n") == 2
    assert ("a line of stderr" in outputs[0].read_text()) == (not separate)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("what", ["killed", "suspended", "server"])
def test_one_that_is_lost_harms_nothing(
    what: str, tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    """A worker dies while the process that stands by for it is gone, or does not answer."""
    arguments = job_arguments(tmp_path, "ddp", "--hang-timeout", "5")
    arguments += [str(REGRESSION), "--pause", "0.1", *SLOW]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=2) as told:
        told.wait_for_first_step(1)
        with told.slowed(0.5):
            wait_for_standbys(told, 0, 1)
            (pid,) = standbys_of(told, 0)
            if what == "server":
                os.kill(parent_of(pid), signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGKILL if what == "killed" else signal.SIGSTOP)
                told.cluster.kill_worker(told.node(0))
            told.wait_for_first_step(2)
        codes = told.wait_for_end()
    assert codes == {"node-0": 0, "node-1": 0}
    assert [start["stood_by"] for start in starts(told, "node-0")][:2] == [0, 0], told.logs()
    check_samples(told.lineage, told.directory())
    check_weights(tmp_path / "checkpoints", reference)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
