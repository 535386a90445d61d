"""Nodes leave inside of the loops of the others, which end as if nobody had left."""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.training_harness import Pool, Running
from tests.integration.world_changes import Change

SCRIPT = Path(__file__).parent / "training_inside.py"


@dataclass(frozen=True)
class Case:
    """A script, a world, and who leaves it."""

    told: dict[str, Any]
    world: int
    departures: tuple[tuple[int, tuple[int, ...]], ...]
    """After which step the change is offered, and the places of the workers that leave."""


def drawn(seed: int) -> Case:
    """A case in which any rank may leave, the first one too, and several at a time."""
    chance = random.Random(seed)
    told: dict[str, Any] = {"epochs": chance.choice([2, 3]), "batch": 8, "pause": 0.01}
    if chance.random() < 0.5:
        told["virtual"] = 2
    elif chance.random() < 0.5:
        told["micro"] = chance.choice([1, 2, 3])
    told |= {"clip": chance.choice([None, 0.5]), "weighted": chance.random() < 0.4}
    told |= {"stream": chance.random() < 0.4, "workers": chance.choice([0, 0, 0, 1])}
    world = chance.choice([2, 3, 4])
    places, departures, step = list(range(world)), [], chance.randrange(3, 6)
    while len(places) > 1 and (not departures or chance.random() < 0.6):
        leave = tuple(sorted(chance.sample(places, chance.randint(1, min(2, len(places) - 1)))))
        departures.append((step, leave))
        places = [place for place in places if place not in leave]
        step += chance.randrange(3, 5)
    return Case(told, world, tuple(departures))


def options_of(case: Case) -> dict[str, Any]:
    return {"generation": 1, "deterministic": bool(case.told.get("virtual"))}


def run(pool: Pool, case: Case, folder: Path) -> tuple[dict[str, Any], list[int]]:
    """What the script wrote, and the steps at which nodes left."""
    folder.mkdir()
    told = {**case.told, "out": str(folder / "out.json"), "log": str(folder)}
    running = pool.start(
        SCRIPT, [json.dumps(told)], case.world, changes_inside=True, **options_of(case)
    )
    steps = []
    for after, leavers in case.departures:
        running.until(reached(running, after))
        time.sleep(random.Random(str(case)).random() * 0.01)
        change = Change.without(running, leavers)
        change.send()
        steps.append(change.complete())
    running.until(running.ended)
    assert {worker.exit_code for worker in running.workers} == {0}, running.logs()
    return json.loads((folder / "out.json").read_text()), steps


def reached(running: Running, step: int) -> Any:
    alive = [w for w in running.workers if w.exit_code is None]
    return lambda: all(any(s.step >= step for s in steps_of(w)) for w in alive)


def steps_of(worker: Any) -> Any:
    from elasticzero.ipc.messages import Stepped

    return worker.all(Stepped)


def used(folder: Path) -> dict[int, list[int]]:
    """The samples of each step, over all ranks."""
    samples: dict[int, list[int]] = {}
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            step, _, indices = json.loads(line)
            samples.setdefault(step, []).extend(indices)
    return {step: sorted(indices) for step, indices in samples.items()}


def check_equal(case: Case, disturbed: dict[str, Any], alone: dict[str, Any]) -> None:
    if case.told.get("virtual"):
        assert disturbed["bits"] == alone["bits"]
        assert disturbed["values"] == alone["values"]
    for name, numbers in alone["floats"].items():
        assert disturbed["floats"][name] == pytest.approx(numbers, rel=1e-9, abs=1e-12), name
    assert disturbed["values"] == pytest.approx(alone["values"], rel=1e-9)
    for name in ("step", "epochs", "rate"):
        assert disturbed[name] == alone[name]


SEEDS = [3, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(20, 34))]


@pytest.mark.parametrize("seed", SEEDS)
def test_nodes_that_leave_change_nothing_of_the_result(
    pool: Pool, tmp_path: Path, seed: int
) -> None:
    case = drawn(seed)
    disturbed, steps = run(pool, case, tmp_path / "disturbed")
    alone, _ = run(pool, Case(case.told, 1, ()), tmp_path / "alone")
    check_equal(case, disturbed, alone)
    assert used(tmp_path / "disturbed") == used(tmp_path / "alone")
    stays = min(set(range(case.world)) - {p for _, leave in case.departures for p in leave})
    left = case.world
    expected = []
    for number, ((_, leave), step) in enumerate(zip(case.departures, steps, strict=True), 2):
        left -= len(leave)
        gone = {p for _, more in case.departures[: number - 1] for p in more}
        rank = sum(1 for place in range(stays) if place not in gone)
        expected.append([number, rank, left, step])
    assert disturbed["changes"] == expected
