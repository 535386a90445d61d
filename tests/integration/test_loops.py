"""Loops over batches with real workers: their epochs, how they go on, how they end for all."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticzero.data import Order
from elasticzero.messages import FLAG_LEAVE, Request, Resume
from tests.integration.scripts import loops
from tests.integration.training_harness import Pool, Running

SCRIPT = Path(loops.__file__)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(tmp_path_factory.mktemp("pool")) as started:
        yield started


def start(pool: Pool, folder: Path, world_size: int, told: dict[str, Any], **given: Any) -> Running:
    """All ranks on one node, so that every snapshot is found on disk."""
    shared = {"node": "node", "snapshot_root": str(folder / "snapshots")}
    return pool.start(SCRIPT, [json.dumps(told)], world_size, **shared | {"generation": 1} | given)


def lines(told: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(told["log"]).read_text().splitlines()]


def used(told: dict[str, Any], loop_of: dict[int, int]) -> dict[int, list[int]]:
    """By dataset the samples in the order of their use, by rank 0's account of each step."""
    steps: dict[int, dict[str, Any]] = {}
    for line in lines(told):
        if line.get("rank") == 0 and "samples" in line:
            steps[line["step"]] = line
    assert sorted(steps) == list(range(1, len(steps) + 1))
    found: dict[int, list[int]] = {}
    for step in sorted(steps):
        found.setdefault(loop_of[steps[step]["loop"]], []).extend(steps[step]["samples"])
    return found


def epochs_of(dataset: int, count: int) -> list[list[int]]:
    samples = loops.SAMPLES[dataset]
    order = Order(samples=samples)
    return [[int(i) for i in order.indices(epoch, 0, samples)] for epoch in range(count)]


def test_the_usual_epoch_loop_reshuffles(tmp_path: Path) -> None:
    """`for epoch in range(3)` around a loop of one epoch used the first epoch's order each time."""
    told = {"log": str(tmp_path / "log"), "loops": [{"epochs": 1}] * 3, "ends": True}
    command = [sys.executable, str(SCRIPT), json.dumps(told)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert used(told, dict.fromkeys(range(3), 0)) == {0: sum(epochs_of(0, 3), [])}
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


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
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
        given = {"generation": generation, "resume": resume}
        running = start(pool, tmp_path, worlds[generation - 1], told | hold, **given)
        ask_at(running, told | hold)
        resume = running.resume()
        assert resume.step == at
    assert start(pool, tmp_path, 2, told, generation=6, resume=resume).finish() == 23
    found = used(told, {0: 0, 1: 1, 2: 0, 3: 1, 4: 0})
    assert found == {0: sum(epochs_of(0, 3), []), 1: epochs_of(1, 1)[0]}
    assert lines(told)[-1]["ended"] == [0, 0, 1, 2]
    ran = [
        (line["step"], line["end"])
        for line in lines(told)
        if line.get("rank") == 0 and "end" in line
    ]
    assert ran == [(6, 0), (15, 0), (17, 1), (23, 2)]
