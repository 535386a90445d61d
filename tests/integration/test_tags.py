"""Checkpoints that a script asks for, with names: whoever calls, and whoever is killed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import elasticzero.checkpoint
from elasticzero.checkpoint.cli.main import main as checkpoint_command
from elasticzero.checkpoint.steps import catalog, verify
from elasticzero.checkpoint.steps.tag_files import read_tags
from elasticzero.checkpoint.storage.disk import DiskDirectory
from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.clusters import REGRESSION, story
from tests.integration.clusters import elasticzero as command_of
from tests.support.cases import drawn, slow

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(180)

SCRIPT = """
import json, random, sys
import numpy
import torch
import elasticzero as ez

asks = json.loads(sys.argv[1])
torch.manual_seed(1)
DATA = torch.randn(40, 6, dtype=torch.float64)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(6, 9), torch.nn.Linear(9, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return self.b(torch.nn.functional.dropout(self.a(x).tanh(), 0.2, self.training))

def train(session):
    def ask(place, at):
        for where, number, ranks, tag in asks:
            if (where, number) == (place, at) and session.rank in ranks:
                session.checkpoint(tag)

    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(2 + session.rank)
    model, optimizer = session.prepare(
        Model().double(), lambda parameters: torch.optim.AdamW(parameters, lr=0.05)
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    scheduler = session.track("scheduler", schedule)
    session.restore()
    ask("before", session.step_count)
    loops = 0
    for loop in range(2):
        ended = lambda: ask("epoch", session.epoch)
        for batch in session.batches(DATA, global_batch=8, epochs=2, on_epoch_end=ended):
            ask("top", session.step_count)
            random.random(), numpy.random.rand()
            session.backward(model(batch).square().mean())
            ask("between", session.step_count)
            if session.step():
                scheduler.step()
                ask("step", session.step_count)
        ask("loop", loop)

if __name__ == "__main__":
    ez.run(train)
"""

Ask = tuple[str, int, Sequence[int], str | None]
STEPS = 20


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def finished(command: Sequence[str], **variables: str) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def job(script: Path, directory: Path, asks: Sequence[Ask], *arguments: str, nodes: int = 2) -> str:
    command = command_of("local", "--nodes", str(nodes), "--checkpoint-dir", str(directory))
    return finished([*command, *arguments, str(script), json.dumps(asks)])


def alone(script: Path, directory: Path, asks: Sequence[Ask], **settings: str) -> str:
    options = {f"ELASTICZERO_{name.upper()}": value for name, value in settings.items()}
    return finished(
        [sys.executable, str(script), json.dumps(asks)],
        ELASTICZERO_CHECKPOINT_DIR=str(directory),
        **options,
    )


def steps(directory: Path) -> list[int]:
    stored = catalog.steps(DiskDirectory(directory))
    assert not [fault for info in stored for fault in verify.find_corruption(info.storage)]
    return sorted(info.step for info in stored)


def tags(directory: Path) -> dict[str, int]:
    return read_tags(DiskDirectory(directory))


def same(a: Path, b: Path) -> bool:
    """Whether two steps hold the same state, to the last bit."""
    return checkpoint_command(["diff", str(a), str(b), "-q"]) == 0


def step(directory: Path, number: int) -> Path:
    return directory / f"step-{number:012d}"


@pytest.mark.parametrize("strategy", drawn())
def test_one_rank_that_asks_gets_the_state_at_its_call(
    strategy: str, script: Path, tmp_path: Path
) -> None:
    """The other rank hears of it in the next step, which has changed buffers and random states by
    then; what is saved is the same as a checkpoint that falls due at that step, bit by bit."""
    directory = tmp_path / "c"
    asks = [("step", 7, [1], "best"), ("step", 12, [0], "other"), ("step", 16, [0], None)]
    arguments = ["--strategy", strategy, "--snapshot-every", "3"]
    told = job(script, directory, asks, *arguments)
    assert tags(directory) == {"best": 7, "other": 12}, told
    assert {7, 12, 16, 20} <= set(steps(directory)), told
    job(script, tmp_path / "due", [], "--checkpoint-every", "7", "--strategy", strategy)
    assert same(step(directory, 7), step(tmp_path / "due", 7))
    assert re.search(r"checkpoint of step 7 written in .* s, with the tag best", told)


def test_all_ranks_and_all_places(script: Path, tmp_path: Path) -> None:
    """A call in the body of the loop is of the boundary after it; one at an epoch's end, and one
    after a loop, of the state there is."""
    directory = tmp_path / "c"
    both = [0, 1, 2]
    asks: list[Ask] = [
        ("top", 2, both, "top"),
        ("between", 3, [2], "between"),
        ("step", 5, [1], "last-step"),
        ("epoch", 0, both, "epoch"),
        ("loop", 0, [1], "loop"),
        ("step", 20, [2], "end"),
        ("loop", 1, both, "after"),
    ]
    told = job(script, directory, asks, "--strategy", "zero1", nodes=3)
    expected = {"top": 3, "between": 4, "last-step": 5, "epoch": 5}
    assert tags(directory) == expected | {"loop": 10, "end": 20, "after": 20}, told
    assert steps(directory) == [3, 4, 5, 10, 20], told


def test_a_process_without_an_agent(script: Path, tmp_path: Path) -> None:
    directory = tmp_path / "c"
    asks: list[Ask] = [
        ("before", 0, [0], "fresh"),
        ("top", 2, [0], "top"),
        ("epoch", 0, [0], "best"),
        ("step", 12, [0], "best"),
        ("loop", 1, [0], "after"),
    ]
    told = alone(script, directory, asks, keep="1")
    assert tags(directory) == {"fresh": 0, "top": 3, "best": 12, "after": 20}, told
    assert steps(directory) == [0, 3, 12, 20], told
    alone(script, tmp_path / "due", [], checkpoint_every="12")
    assert same(step(directory, 12), step(tmp_path / "due", 12))
    assert "the checkpoint of step 12 has the tag best" in told
    (directory / "tags" / "after.json").unlink()
    told = alone(script, directory, [], keep="1")
    assert tags(directory)["top"] == 3, "nothing is asked for, and nothing is lost"


def test_a_death_between_checkpoint_and_tag_is_mended_at_the_next_start(
    script: Path, tmp_path: Path
) -> None:
    """As a kill leaves it there: the manifest of the newest step has the tag, and no file does."""
    directory = tmp_path / "c"
    told = job(script, directory, [("step", 20, [1], "best")], "--strategy", "zero2")
    assert tags(directory) == {"best": 20}, told
    starts: tuple[Callable[..., str], ...] = (job, alone)
    for start in starts:
        (directory / "tags" / "best.json").unlink()
        told = start(script, directory, [])
        assert tags(directory) == {"best": 20}, told


def test_without_a_directory_training_goes_on(script: Path) -> None:
    command = [sys.executable, str(script), json.dumps([("step", 1, [0], "best")])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("give --checkpoint-dir DIR, or set") == 1


def test_what_is_no_tag_ends_the_script(script: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(script), json.dumps([("step", 1, [0], "a/b")])]
    variables = os.environ | {"ELASTICZERO_CHECKPOINT_DIR": str(tmp_path / "c")}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=ROOT, env=variables
    )
    assert done.returncode == 64 and "session.checkpoint(tag='a/b'): a tag has" in done.stderr


def regression(tmp_path: Path, strategy: str, *options: str) -> tuple[list[str], Path]:
    """The words of a job of the regression script, and the file in which it is asked."""
    asks = tmp_path / "asks.json"
    arguments = ["--nnodes", "1:4", "--strategy", strategy, "--checkpoint-dir", str(tmp_path / "c")]
    arguments += ["--keep", "1", "--lease-ttl", "2", *options, str(REGRESSION), "--epochs", "1"]
    return [*arguments, "--asks", str(asks), "--pause", "0.1"], asks


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every step of a run that nothing disturbs."""
    place = tmp_path_factory.mktemp("undisturbed")
    variables = {"ELASTICZERO_CHECKPOINT_DIR": str(place), "ELASTICZERO_CHECKPOINT_EVERY": "1"}
    finished([sys.executable, str(REGRESSION), "--epochs", "1"], **variables)
    return place


def check(directory: Path, number: int, undisturbed: Path) -> None:
    """The tag names this step, which is whole and has the weights of an undisturbed run; no other
    than the last stays besides."""
    assert tags(directory) == {"best": number}
    assert steps(directory) == [number, 34]
    state = elasticzero.checkpoint.load(directory / "tags" / "best")
    expected = elasticzero.checkpoint.load(step(undisturbed, number))
    for name, tensor in expected.items():
        if name.startswith("model/"):
            assert (tensor - state[name]).abs().max() < 1e-9, name


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["worker", "node"])
def test_the_tag_of_a_job_whose_processes_are_killed(
    lost: str, tmp_path: Path, undisturbed: Path, etcd: EtcdServer, job: str
) -> None:
    """One rank asks; a worker, or a node with its part of the state, is lost soon after."""
    arguments, asks = regression(tmp_path, "zero2", "--snapshot-every", "2")
    asks.write_text(json.dumps([[6, [0], "best"], [12, [1], "best"]]))
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=3) as told:
        told.wait_for_step(13)
        if lost == "worker":
            told.cluster.kill_worker(told.node(2))
        else:
            told.cluster.kill_node(told.node(2))
        told.wait_for_first_step(2)
        told.wait_for_end()
    check(tmp_path / "c", 12, undisturbed)


@pytest.mark.parametrize(("strategy", "number"), [slow("ddp", 13), slow("zero2", 12)])
def test_a_node_lost_in_the_save_itself(
    strategy: str, number: int, tmp_path: Path, undisturbed: Path, etcd: EtcdServer, job: str
) -> None:
    """Its part is not in memory yet when it is killed, so nobody can complete that checkpoint. With
    ddp the others have made one step more, and that state is saved in its place; with zero2
    training goes on from an older one, and the script asks again."""
    (holds := tmp_path / "holds").mkdir()
    arguments, asks = regression(tmp_path, strategy, "--snapshot-every", "2")
    arguments += ["--holds", str(holds), "--save-every", "12"]
    asks.write_text(json.dumps([[6, [0], "best"], [12, [1], "best"]]))
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=3) as told:
        told.wait_for_step(8)
        assert tags(tmp_path / "c") == {"best": 6}
        (holds / "save-1").write_text("2")
        told.wait("the rank in its capture", (holds / "save-1-at-2").exists)
        told.wait("what the others have", lambda: told.of("captured"))
        told.cluster.kill_node(told.node(2))
        told.wait_for_generation(2)
        assert tags(tmp_path / "c") == {"best": 6} and 6 in steps(tmp_path / "c")
        told.wait_for_first_step(2)
        told.wait_for_end()
        logs = "".join(path.read_text() for path in told.directory().glob("*/[0-9]*.log"))
    check(tmp_path / "c", number, undisturbed)
    lost = "the checkpoint of step 12 with the tag best was lost; the state of step 13 is saved"
    assert (lost in logs) == (strategy == "ddp")


@pytest.mark.slow
def test_a_call_at_the_step_at_which_a_node_leaves(
    tmp_path: Path, undisturbed: Path, etcd: EtcdServer, job: str
) -> None:
    """The ranks tell each other before the generation ends, and the next one saves the state."""
    (holds := tmp_path / "holds").mkdir()
    options = ("--snapshot-every", "2", "--changes-inside", "off")
    arguments, asks = regression(tmp_path, "zero2", *options)
    arguments += ["--holds", str(holds)]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=3) as told:
        told.wait_for_step(9)
        told.pause(1.0)  # within which no rank comes to where it is held
        told.wait_for_step(told.step + 1)
        (holds / "step-1").write_text("0 1 2")
        told.wait("all ranks in one step", lambda: held(holds, 3))
        number = told.step + 1
        asks.write_text(json.dumps([[number, [0], "best"]]))
        told.cluster.drain(told.node(1))
        told.wait("the notice", lambda: told.of("notice"))
        told.pause(0.5)
        (holds / "step-1").unlink()
        told.wait_for_first_step(2)
        told.wait_for_end()
    second = next(world for world in told.of("world") if world["generation"] == 2)
    assert second["resume_step"] == number, "the generation ended elsewhere; the test says nothing"
    check(tmp_path / "c", number, undisturbed)


def held(holds: Path, ranks: int) -> bool:
    """Whether so many ranks are held in the body of their loop."""
    return all((holds / f"step-1-at-{rank}").exists() for rank in range(ranks))
