"""Loops over batches with real workers: their epochs, how they go on, how they end for all."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from elasticzero.checkpoint.format.names import step_directory
from elasticzero.data.sampling import SampleOrder
from elasticzero.ipc.assignment import Resume
from elasticzero.ipc.failure import Failed
from elasticzero.ipc.messages import FLAG_LEAVE, Finished, Request, Stopping
from tests.integration.scripts import loops
from tests.integration.training_harness import Pool, Running
from tests.support.cases import slow

SCRIPT = Path(loops.__file__)


def start(
    pool: Pool, folder: Path, world_size: int, told: dict[str, Any], **options: Any
) -> Running:
    """All ranks on one node, so that every snapshot is found on disk."""
    shared = {"node": "node", "snapshot_root": str(folder / "snapshots")}
    return pool.start(
        SCRIPT, [json.dumps(told)], world_size, **shared | {"generation": 1} | options
    )


def lines(told: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(told["log"]).read_text().splitlines()]


def used(told: dict[str, Any], loop_of: dict[int, int]) -> dict[int, list[int]]:
    """By dataset the samples in the order of their use, by rank 0's account of each step."""
    steps: dict[int, dict[str, Any]] = {}
    for line in lines(told):
        if line.get("rank") == 0 and "samples" in line:
            steps[line["step"]] = line
    assert sorted(steps) == list(range(1, len(steps) + 1))
    samples: dict[int, list[int]] = {}
    for step in sorted(steps):
        samples.setdefault(loop_of[steps[step]["loop"]], []).extend(steps[step]["samples"])
    return samples


def in_order(dataset: int, epochs: int) -> list[int]:
    """The samples of a dataset's first epochs."""
    samples = loops.SAMPLES[dataset]
    order = SampleOrder(samples=samples)
    return [int(i) for epoch in range(epochs) for i in order.indices(epoch, 0, samples)]


def test_the_usual_epoch_loop_reshuffles(tmp_path: Path) -> None:
    """`for epoch in range(3)` around a loop of one epoch used the first epoch's order each time."""
    told = {"log": str(tmp_path / "log"), "loops": [{"epochs": 1}] * 3, "ends": True}
    command = [sys.executable, str(SCRIPT), json.dumps(told)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert used(told, dict.fromkeys(range(3), 0)) == {0: in_order(0, 3)}
    steps = [line for line in lines(told) if "samples" in line]
    assert [line["epoch"] for line in steps] == [0] * 6 + [1] * 6 + [2] * 6
    assert [line["end"] for line in lines(told) if "end" in line] == [0, 1, 2]
    assert lines(told)[-1] == {"ended": [0, 1, 2], "stopped": None}


def ask_at(running: Running, told: dict[str, Any]) -> None:
    """Have the generation end at the boundary after the step in which the ranks are held."""
    hold = Path(told["hold"])
    at = [Path(f"{hold}-at-{worker.rank}") for worker in running.workers]
    running.until(lambda: all(path.exists() for path in at))
    for worker in running.workers:
        worker.channel.send(Request(flags=FLAG_LEAVE))
    time.sleep(0.5)
    hold.touch()
    running.until(running.ended)
    assert [w.exit_code for w in running.workers] == [0] * len(running.workers), running.logs()


@pytest.mark.parametrize("strategy", [slow("ddp"), "zero2"])
def test_generations_end_around_an_epochs_end(pool: Pool, tmp_path: Path, strategy: str) -> None:
    """Just before the last step of an epoch, just after it, and just after the next one's first;
    with loops of another dataset between, one left by `break` and one that ends by its steps."""
    told = {
        "log": str(tmp_path / "log"),
        "strategy": strategy,
        "ends": True,
        "loops": [
            {"epochs": 1},
            {"dataset": 1, "steps": 3},
            {"epochs": 1, "breaks": 4},
            {"dataset": 1, "epochs": 1},
            {"epochs": 2},
        ],
    }  # steps: 1-6; 7-9; 10-13; 14, 15; 16, 17 (the rest), 18-23
    resume, worlds = Resume(tier="fresh"), [2, 3, 1, 2, 3, 2]
    for generation, at in enumerate([5, 6, 7, 15, 17], start=1):
        hold = {"hold": str(tmp_path / f"hold-{generation}"), "hold_at": at}
        options = {"generation": generation, "resume": resume}
        running = start(pool, tmp_path, worlds[generation - 1], told | hold, **options)
        ask_at(running, told | hold)
        resume = running.resume()
        assert resume.step == at
    assert start(pool, tmp_path, 2, told, generation=6, resume=resume).finish() == 23
    samples = used(told, {0: 0, 1: 1, 2: 0, 3: 1, 4: 0})
    assert samples == {0: in_order(0, 3), 1: in_order(1, 1)}
    assert lines(told)[-1]["ended"] == [0, 0, 1, 2]
    ran = [
        (line["step"], line["end"])
        for line in lines(told)
        if line.get("rank") == 0 and "end" in line
    ]
    assert ran == [(6, 0), (15, 0), (17, 1), (23, 2)]


@pytest.mark.parametrize("world", [1, 3])
def test_any_rank_may_end_training_for_all(pool: Pool, tmp_path: Path, world: int) -> None:
    """`session.stop` in a step: all ranks leave at one boundary, and the state is saved."""
    directory = tmp_path / "checkpoints"
    told = {
        "log": str(tmp_path / "log"),
        "loops": [{"epochs": 100}, {"dataset": 1, "epochs": 1}],
        "stop": [world - 1, 5],
    }
    running = start(pool, tmp_path, world, told, checkpoint_dir=str(directory))
    step = running.finish()
    assert 5 <= step <= 6
    assert {w.last(Finished).step for w in running.workers} == {step}
    assert {w.last(Finished).reason for w in running.workers} == {"good enough"}
    steps = [line["step"] for line in lines(told) if "samples" in line]
    assert steps.count(step) == world and max(steps) == step
    assert lines(told)[-1] == {"ended": [], "stopped": "good enough"}
    assert [path.name for path in directory.glob("step-*")] == [step_directory(step)]


def test_a_stop_after_validation_ends_the_loop_at_once(pool: Pool, tmp_path: Path) -> None:
    """Early stopping: no step of the next epoch is made, though one rank alone asked for it."""
    told = {
        "log": str(tmp_path / "log"),
        "loops": [{"epochs": 1}] * 5,
        "ends": True,
        "stop_after_epoch": [1, 1],
    }
    running = start(pool, tmp_path, 2, told)
    assert running.finish() == 12
    assert lines(told)[-1] == {"ended": [0, 1], "stopped": "the validation loss rises"}
    assert running.workers[0].last(Finished).reason == "the validation loss rises"


def test_a_stop_holds_in_the_next_generation(pool: Pool, tmp_path: Path) -> None:
    """A generation that ends at the very boundary at which training was ended."""
    told = {
        "log": str(tmp_path / "log"),
        "loops": [{"epochs": 100}],
        "stop": [0, 5],
        "hold": str(tmp_path / "hold"),
        "hold_at": 6,
    }
    running = start(pool, tmp_path, 2, told)
    ask_at(running, told)
    resume = running.resume()
    assert resume.step == 6
    again = start(pool, tmp_path, 2, told, generation=2, resume=resume)
    assert again.finish() == 6
    assert again.workers[1].last(Finished).reason == "good enough"


@pytest.mark.parametrize(
    ("leaves", "where"),
    [
        ({"leave": [1, 5, "break"]}, "after step 5, having left its loop at loops.py:"),
        ({"exit": [1, 5, "after"]}, "after step 5, having left its loop at loops.py:"),
        ({"exit": [1, 5, "before"]}, "after step 5, having left its loop at loops.py:"),
        ({"exit": [0, 5, "before"]}, "after step 5, having left its loop at loops.py:"),
        ({"evaluate": [1, 5, "after"]}, "is in session.evaluate after step 5"),
        ({"evaluate": [0, 5, "before"]}, "is in session.evaluate after step 5"),
    ],
)
def test_a_rank_that_leaves_its_loop_alone_is_named(
    pool: Pool, tmp_path: Path, leaves: dict[str, Any], where: str
) -> None:
    """All others waited, up to 30 minutes, or one of them was blamed."""
    told = {"log": str(tmp_path / "log"), "loops": [{"epochs": 100}], **leaves}
    running = start(pool, tmp_path, 3, told)
    running.until(running.ended, 30)
    (leaver,) = {**leaves}.values()
    failures = {w.rank: w.last(Failed) for w in running.workers}
    blamed = failures.pop(leaver[0])
    assert blamed.blame == "user" and blamed.final and f"rank {leaver[0]} " in blamed.message
    assert "session.stop(reason)" in blamed.message and where in blamed.message, blamed.message
    assert {failure.blame for failure in failures.values()} == {"peer"}, running.logs()
    assert all(w.last(Stopping).clean for w in running.workers if w.rank != leaver[0])
