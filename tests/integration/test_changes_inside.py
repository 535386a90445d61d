"""Nodes leave inside of the loops of the others, which end as if nobody had left."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from elasticzero.checkpoint.format.names import step_directory
from elasticzero.checkpoint.steps.catalog import read_manifest, steps
from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.ipc.assignment import Resume, Source
from elasticzero.ipc.messages import (
    FLAG_GROW,
    FLAG_STOP,
    Abort,
    Captured,
    Message,
    PrepareFailed,
    Request,
    Stepped,
    Stopping,
    Switched,
    Waiting,
)
from tests.integration.training_harness import Pool, Running
from tests.integration.training_inside import OPTIMIZERS
from tests.integration.world_changes import Change

SCRIPT = Path(__file__).parent / "training_inside.py"


@dataclass(frozen=True)
class Case:
    """A script, a world, and who leaves it."""

    told: dict[str, Any]
    world: int
    departures: tuple[tuple[int, tuple[int, ...]], ...]
    """After which step the change is offered, and the places of the workers that leave."""
    strategy: str = "ddp"


def for_rows(told: dict[str, Any]) -> dict[str, Any]:
    """Returns the same script without what zero3 refuses, and without rows that it would keep."""
    optimizer = "two" if told["optimizer"] == "Adafactor" else told["optimizer"]
    without = {name: what for name, what in told.items() if name not in ("virtual", "views")}
    return {**without, "optimizer": optimizer, "half": False, "epochs": 3}


def drawn(seed: int) -> Case:
    """A case in which any rank may leave, the first one too, and several at a time."""
    chance = random.Random(seed)
    told: dict[str, Any] = {"epochs": chance.choice([2, 3]), "batch": 8, "pause": 0.01}
    if chance.random() < 0.5:
        told["virtual"] = 2
    elif chance.random() < 0.5:
        told["micro"] = chance.choice([1, 2, 3])
    told |= {"clip": chance.choice([None, 0.5]), "weighted": chance.random() < 0.4}
    if not {"virtual", "micro"} & told.keys():
        told["gather"] = chance.random() < 0.5
    told |= {"stream": chance.random() < 0.4, "workers": chance.choice([0, 0, 0, 1])}
    world = chance.choice([2, 3, 4])
    strategy = chance.choice(["ddp", "zero1", "zero2", "zero3"])
    told |= {"optimizer": chance.choice([*OPTIMIZERS]), "views": chance.random() < 0.3}
    told["odd"] = chance.random() < 0.5
    told["half"] = bool(told.get("virtual")) and chance.random() < 0.5
    told["unheard"] = chance.random() < 0.3
    told["looks"] = not told.get("virtual") and chance.random() < 0.3  # its BatchNorm would count
    told["scaled"] = not told["half"] and chance.random() < 0.3
    if strategy == "zero3":
        told = for_rows(told)
    places, step = list(range(world)), chance.randrange(3, 6)
    departures: list[tuple[int, tuple[int, ...]]] = []
    while len(places) > 1 and (not departures or chance.random() < 0.6):
        leave = tuple(sorted(chance.sample(places, chance.randint(1, min(2, len(places) - 1)))))
        departures.append((step, leave))
        places = [place for place in places if place not in leave]
        step += chance.randrange(3, 5)
    return Case(told, world, tuple(departures), strategy)


def begin(pool: Pool, told: dict[str, Any], folder: Path, world: int, **options: Any) -> Running:
    folder.mkdir(exist_ok=True)
    arguments = {**told, "out": str(folder / "out.json"), "log": str(folder)}
    options = {"generation": 1, "deterministic": bool(told.get("virtual")), **options}
    options = {"changes_inside": True, "changes_with_nccl": True, **options}
    return pool.start(SCRIPT, [json.dumps(arguments)], world, **options)


def result(folder: Path) -> dict[str, Any]:
    made: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return made


def run(pool: Pool, case: Case, folder: Path) -> tuple[dict[str, Any], list[int]]:
    """What the script wrote, and the steps at which nodes left."""
    folder.mkdir(exist_ok=True)
    slow, steps = folder / "slow", list[int]()
    if case.departures:
        slow.touch()
    told = {**case.told, "slow": str(slow)}
    running = begin(pool, told, folder, case.world, strategy=case.strategy)
    for after, leavers in case.departures:
        running.until(running.reached(after))
        time.sleep(random.Random(str(case)).random() * 0.01)
        change = Change.without(running, leavers)
        change.send()
        steps.append(change.complete())
    slow.unlink(missing_ok=True)
    running.until(running.ended)
    assert {worker.exit_code for worker in running.workers} == {0}, running.logs()
    return result(folder), steps


def used(folder: Path) -> dict[int, list[int]]:
    """The samples of each step, over all ranks."""
    samples: dict[int, list[int]] = {}
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            step, _, indices = json.loads(line)
            samples.setdefault(step, []).extend(indices)
    return {step: sorted(indices) for step, indices in samples.items()}


def check_equal(told: dict[str, Any], disturbed: dict[str, Any], alone: dict[str, Any]) -> None:
    if told.get("virtual"):
        assert disturbed["bits"] == alone["bits"]
        assert disturbed["values"] == alone["values"]
    for name, numbers in alone["floats"].items():
        assert disturbed["floats"][name] == pytest.approx(numbers, rel=1e-9, abs=1e-12), name
    assert disturbed["values"] == pytest.approx(alone["values"], rel=1e-9)
    for name in ("step", "epochs", "rate"):
        assert disturbed[name] == alone[name]


SEEDS = [3, 20, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(21, 34))]


@pytest.mark.parametrize("seed", SEEDS)
def test_nodes_that_leave_change_nothing_of_the_result(
    pool: Pool, tmp_path: Path, seed: int
) -> None:
    case = drawn(seed)
    disturbed, steps = run(pool, case, tmp_path / "disturbed")
    alone, _ = run(pool, replace(case, world=1, departures=()), tmp_path / "alone")
    check_equal(case.told, disturbed, alone)
    assert used(tmp_path / "disturbed") == used(tmp_path / "alone")
    stays = min(set(range(case.world)) - {p for _, leave in case.departures for p in leave})
    left = case.world
    expected = []
    for number, ((_, leave), step) in enumerate(zip(case.departures, steps, strict=True), 2):
        left -= len(leave)
        gone = {p for _, places in case.departures[: number - 1] for p in places}
        rank = sum(1 for place in range(stays) if place not in gone)
        expected.append([number, rank, left, step])
    assert disturbed["changes"] == ([] if case.told["unheard"] else expected)


DIVIDED = ["zero1", *(pytest.param(name, marks=pytest.mark.slow) for name in ("zero2", "zero3"))]


@pytest.mark.parametrize("strategy", DIVIDED)
def test_masters_move_with_the_other_state(pool: Pool, tmp_path: Path, strategy: str) -> None:
    """Parameters of 16 bits are rounded from them, so that another world differs in the last."""
    told = {"epochs": 2, "batch": 8, "pause": 0.01, "half": True}
    case = Case(told, 4, ((3, (0, 2)), (7, (1,))), strategy)
    disturbed, _ = run(pool, case, tmp_path / "disturbed")
    alone, _ = run(pool, replace(case, departures=()), tmp_path / "alone")
    for name, numbers in alone["floats"].items():
        assert disturbed["floats"][name] == pytest.approx(numbers, rel=0.02, abs=0.01), name
    assert disturbed["step"] == alone["step"]


TOLD: dict[str, Any] = {"epochs": 4, "batch": 8, "pause": 0.05, "clip": 0.5}


@pytest.fixture(scope="module")
def alone(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run without a change."""
    folder = tmp_path_factory.mktemp("alone")
    run(pool, Case(TOLD, 1, ()), folder)
    return folder


def check_result(folder: Path, alone: Path) -> None:
    check_equal(TOLD, result(folder), result(alone))
    assert used(folder) == used(alone)


def survive(pool: Pool, running: Running, folder: Path) -> None:
    """Trains to the end on one worker, from the newest state that a world has handed over."""
    running.until(running.ended)
    running.settle()
    held = [(w.last(Captured), place) for place, w in enumerate(running.workers) if w.all(Captured)]
    assert held, running.logs()
    newest, place = max(held, key=lambda entry: (entry[0].step, entry[0].generation))
    assert newest.world_size == 1
    was = running.assignments[place]
    assert newest.generation == was.generation, running.logs()
    source = Source(rank=0, node=was.node, address="127.0.0.1:1")
    resume = Resume(tier="ram", step=newest.step, generation=newest.generation, sources=(source,))
    moved = {0: lambda a: replace(a, node=was.node, snapshot_root=was.snapshot_root)}
    options = {"resume": resume, "generation": newest.generation + 1, "odd": moved}
    again = begin(pool, TOLD, folder, 1, **options)
    again.finish()


@pytest.mark.parametrize(
    ("place", "where"),
    [
        (0, "before its groups are exchanged"),
        pytest.param(1, "before its groups are exchanged", marks=pytest.mark.slow),
        pytest.param(1, "once its groups are exchanged", marks=pytest.mark.slow),
        pytest.param(0, "once its groups are exchanged", marks=pytest.mark.slow),
        pytest.param(0, "as its function is called", marks=pytest.mark.slow),
        pytest.param(0, "in the first step", marks=pytest.mark.slow),
        pytest.param(1, "in the first step", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_killed_at_the_change_costs_no_step(
    pool: Pool, tmp_path: Path, alone: Path, place: int, where: str
) -> None:
    """The others are at the boundary, clean, in the one world or in the other."""
    running = begin(pool, {**TOLD, "die": [place, where]}, tmp_path, 3)
    running.until(running.reached(3))
    change = Change.without(running, [2])
    change.send()
    running.until(running.ended)
    assert running.workers[place].exit_code == -9
    left, (other,) = running.workers[2].last(Stopping), {0, 1} - {place}
    stopped = running.workers[other].last(Stopping)
    assert left.clean and left.switched == change.token
    done = left.step + (where == "in the first step")  # its gradient was whole
    assert (stopped.step, stopped.clean, stopped.complete) == (done, True, True)
    survive(pool, running, tmp_path)
    check_equal(TOLD, result(tmp_path), result(alone))


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_the_boundary_of_a_change_that_no_function_hears_of_is_there_in_the_step_after(
    pool: Pool, tmp_path: Path, strategy: str
) -> None:
    """Parameters that lie in the buckets of another world are not changed."""
    told = {**TOLD, "die": [0, "in the first step"], "unheard": True}
    running = begin(pool, told, tmp_path, 3, strategy=strategy, snapshot_every=0)
    running.until(running.reached(3))
    change = Change.without(running, [2])
    change.send()
    running.until(running.ended)
    assert running.workers[1].last(Stopping).clean


@pytest.mark.parametrize("strategy", DIVIDED)
@pytest.mark.parametrize(
    ("place", "where", "generation"),
    [
        (1, "before the state is brought", 1),
        pytest.param(2, "before the state is brought", 1, marks=pytest.mark.slow),
        pytest.param(0, "before the state is brought", 1, marks=pytest.mark.slow),
        (1, "once its groups are exchanged", 2),
        pytest.param(0, "in the first step", 2, marks=pytest.mark.slow),
    ],
)
def test_each_rank_has_its_part_of_a_divided_state_in_one_world_or_the_other(
    pool: Pool, tmp_path: Path, strategy: str, place: int, where: str, generation: int
) -> None:
    """Where one is killed the others hand over the boundary's state in the world that they name."""
    told, options = {**TOLD, "die": [place, where]}, {"strategy": strategy, "snapshot_every": 0}
    running = begin(pool, told, tmp_path, 3, **options)
    running.until(running.reached(3))
    change = Change.without(running, [2])
    change.send()
    running.until(running.ended)
    running.settle()
    assert running.workers[place].exit_code == -9
    others = {0, 1, 2} - {place} if generation == 1 else {0, 1} - {place}
    for other in others:
        worker = running.workers[other]
        stopped, captured = worker.last(Stopping), worker.last(Captured)
        assert stopped.clean and not stopped.complete, (other, stopped)
        of = (captured.generation, captured.world_size, captured.rank, captured.step)
        assert of == (generation, 4 - generation, other, stopped.step), running.logs()


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_rank_that_is_killed_before_the_change_ends_the_old_world(
    pool: Pool, tmp_path: Path, alone: Path, place: int
) -> None:
    """One that stays, or the one that leaves, before the last rank is offered the next world."""
    running = begin(pool, TOLD, tmp_path, 3)
    running.until(running.reached(3))
    change = Change.without(running, [2])
    change.send({0, 1, 2} - {place})
    running.until(running.reached(6))
    os.kill(running.workers[place].pid, signal.SIGKILL)
    running.until(running.ended)
    assert not any(worker.all(Switched) for worker in running.workers)
    for other in {0, 1, 2} - {place}:
        stopping = running.workers[other].last(Stopping)
        assert stopping.clean and not stopping.switched
    survive(pool, running, tmp_path)
    check_equal(TOLD, result(tmp_path), result(alone))


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_rank_that_is_frozen_delays_the_change_and_no_more(
    pool: Pool, tmp_path: Path, alone: Path, place: int
) -> None:
    running = begin(pool, TOLD, tmp_path, 3)
    running.until(running.reached(3))
    change = Change.without(running, [2])
    os.kill(running.workers[place].pid, signal.SIGSTOP)
    change.send()
    until_s = time.monotonic() + 1.0
    running.until(lambda: time.monotonic() > until_s)
    assert not any(worker.all(Switched) for worker in running.workers)
    os.kill(running.workers[place].pid, signal.SIGCONT)
    change.complete()
    running.until(running.ended)
    check_result(tmp_path, alone)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_a_change_is_withdrawn_on_all_ranks_or_on_none(
    pool: Pool, tmp_path: Path, alone: Path, seed: int
) -> None:
    """Whenever the message comes, and to whichever ranks. A later change is made all the same."""
    chance = random.Random(seed)
    running = begin(pool, TOLD, tmp_path, 3)
    running.until(running.reached(2))
    changes: list[Change] = []

    def entered() -> list[Change]:
        return [change for change in changes if change.switched(0) or change.switched(1)]

    def wait(seconds: float) -> None:
        until_s = time.monotonic() + seconds
        running.until(lambda: time.monotonic() > until_s)

    while not entered() and running.workers[0].last(Stepped).step < 12:
        changes.append(Change.without(running, [2]))
        changes[-1].send()
        wait(chance.random() * 0.08)
        changes[-1].withdraw(chance.sample([0, 1, 2], chance.randint(1, 3)))
        wait(0.03)
        changes[-1].withdraw()
    while not entered():
        changes.append(Change.without(running, [2]))
        changes[-1].send()
        running.until(lambda: bool(entered() or changes[-1].failures()))
        if not entered():
            changes[-1].withdraw()
    change, *_ = entered()  # another one may have been offered before the test knew
    change.complete()
    failures = [failure for worker in running.workers for failure in worker.all(PrepareFailed)]
    assert not any(failure.final for failure in failures), failures
    running.until(running.ended)
    assert {worker.exit_code for worker in running.workers} == {0}, running.logs()
    check_result(tmp_path, alone)


@pytest.mark.slow
def test_a_world_that_is_offered_twice_is_entered_once(
    pool: Pool, tmp_path: Path, alone: Path
) -> None:
    running = begin(pool, TOLD, tmp_path, 3)
    running.until(running.reached(2))
    others = Change.without(running, [0])
    others.send([1, 2])
    change = Change.without(running, [1])  # another token takes its place
    for _ in range(3):
        change.send()
    others.withdraw()
    change.complete()
    descriptors = {place: open_files(running.workers[place].pid) for place in (0, 2)}
    running.until(running.ended)
    assert [len(worker.all(Switched)) for worker in running.workers] == [1, 0, 1]
    assert all(count < 60 for count in descriptors.values()), descriptors
    check_result(tmp_path, alone)


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"on_nonfinite": "rollback"}, "snapshot"),
        ({"changes_inside": False}, "no loop in which"),
    ],
)
@pytest.mark.slow
def test_what_cannot_be_entered_inside_is_refused_for_good(
    pool: Pool, tmp_path: Path, alone: Path, options: dict[str, Any], reason: str
) -> None:
    running = begin(pool, TOLD, tmp_path, 2, **options)
    running.until(running.reached(2))
    change = Change.without(running, [1])
    change.send()
    running.until(lambda: len(change.failures()) == 2)
    assert all(f.final and reason in f.reason for f in change.failures()), change.failures()
    assert running.finish()
    check_result(tmp_path, alone)


@pytest.mark.slow
@pytest.mark.parametrize("message", [Request(flags=FLAG_STOP), Abort(reason="the test")])
def test_the_stop_protocol_is_that_of_the_world_that_was_entered(
    pool: Pool, tmp_path: Path, alone: Path, message: Message
) -> None:
    running = begin(pool, TOLD, tmp_path, 3)
    running.until(running.reached(2))
    change = Change.without(running, [0])
    change.send()
    step = change.complete()
    change.tell(2, message)
    survive(pool, running, tmp_path)
    for place in (1, 2):
        stopping = running.workers[place].last(Stopping)
        assert stopping.clean and stopping.step >= step and not stopping.switched
    assert running.workers[1].last(Captured).generation == 2
    check_result(tmp_path, alone)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_generation_that_is_ended_at_any_moment_of_a_change_hands_over_its_state(
    pool: Pool, tmp_path: Path, alone: Path, seed: int
) -> None:
    chance = random.Random(seed)
    running = begin(pool, TOLD, tmp_path, 3)
    running.until(running.reached(3))
    change = Change.without(running, [chance.randrange(3)])
    change.send()
    until_s = time.monotonic() + chance.random() * 0.15
    running.until(lambda: time.monotonic() > until_s)
    for place in range(3):
        change.tell(place, Abort(reason="the test"))
    survive(pool, running, tmp_path)
    check_equal(TOLD, result(tmp_path), result(alone))


@pytest.mark.slow
def test_checkpoints_are_whole_around_a_change(pool: Pool, tmp_path: Path, alone: Path) -> None:
    """None is being saved while a world is entered, and those after it are of the new one."""
    saved = tmp_path / "saved"
    options = {"checkpoint_dir": str(saved), "checkpoint_every": 8}
    running = begin(pool, TOLD, tmp_path, 3, **options)
    running.until(running.reached(3))
    change = Change.without(running, [0])
    change.send()
    step = change.complete()
    running.until(running.ended)
    assert {worker.exit_code for worker in running.workers} == {0}, running.logs()
    check_result(tmp_path, alone)
    directory = open_directory(str(saved))
    made = [directory.step(step_directory(s.step)) for s in steps(directory)]
    worlds = {m.step: m.layout.world_size for m in map(read_manifest, made)}
    assert worlds and all(worlds[s] == (3 if s < step else 2) for s in worlds), (step, worlds)


@pytest.mark.slow
@pytest.mark.parametrize("leaver", [0, 2])
def test_a_checkpoint_that_a_rank_asks_for_as_it_leaves_is_saved(
    pool: Pool, tmp_path: Path, alone: Path, leaver: int
) -> None:
    """By the others, in the world without it."""
    saved = tmp_path / "saved"
    options = {"checkpoint_dir": str(saved), "checkpoint_every": 1000}
    running = begin(pool, {**TOLD, "ask": leaver}, tmp_path, 3, **options)
    running.until(running.reached(3))
    change = Change.without(running, [leaver])
    change.send()
    step = change.complete()
    running.until(running.ended)
    assert {worker.exit_code for worker in running.workers} == {0}, running.logs()
    check_result(tmp_path, alone)
    manifest = read_manifest(open_directory(str(saved)).step(step_directory(step)))
    assert manifest.layout.world_size == 2
    assert json.loads((saved / "tags" / "left.json").read_text())["step"] == step


@pytest.mark.slow
def test_a_process_that_has_entered_a_world_takes_part_in_another_generation(
    pool: Pool, tmp_path: Path
) -> None:
    """Nothing is left in it of the world that it has entered, or of the one before."""
    running = begin(pool, {**TOLD, "epochs": 1000}, tmp_path, 3, keep=True)
    running.until(running.reached(3))
    change = Change.without(running, [0])
    change.send()
    running.until(lambda: all(change.switched(place) for place in (1, 2)))
    last = running.workers[1].last(Stepped).step
    running.until(lambda: running.workers[1].last(Stepped).step > last + 2)
    change.tell(1, Request(flags=FLAG_GROW))
    running.until(lambda: all(worker.all(Waiting) for worker in running.workers))
    assert all(worker.exit_code is None for worker in running.workers)
