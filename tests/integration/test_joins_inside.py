"""Ranks come into a world inside of the others' loops, which end as if nobody had come."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elasticzero.checkpoint.ram.store import Seal, ShardName, SnapshotStore
from elasticzero.ipc.failure import Failed
from elasticzero.ipc.messages import FLAG_STOP, Captured, Request, Stopping
from tests.integration.test_changes_inside import (
    TOLD,
    Case,
    begin,
    check_equal,
    drawn,
    result,
    run,
    used,
)
from tests.integration.training_harness import Pool, Running
from tests.integration.training_inside import KEEPS
from tests.integration.world_changes import Change


def grow(pool: Pool, case: Case, folder: Path, joins: list[int], leave: int | None) -> Running:
    """Trains to the end in a world into which so many ranks come, one change after the other, and
    which the rank `leave` then leaves."""
    folder.mkdir()
    slow = folder / "slow"
    slow.touch()
    running = begin(
        pool, {**case.told, "slow": str(slow)}, folder, case.world, strategy=case.strategy
    )
    after = 3
    for count in joins:
        running.until(running.reached(after))
        change = Change.joined(running, count)
        change.send()
        after = change.complete() + 1
    if leave is not None:
        running.until(running.reached(after))
        change = Change.without(running, [leave])
        change.send()
        change.complete()
    slow.unlink()
    running.until(running.ended)
    assert {worker.exit_code for worker in running.workers} == {0}, running.logs()
    assert not any(worker.all(Failed) for worker in running.workers), running.logs()
    return running


def check_as_alone(pool: Pool, told: dict[str, Any], folder: Path, other: Path) -> None:
    alone, _ = run(pool, Case(told, 1, ()), other)
    check_equal(told, result(folder), alone)
    assert used(folder) == used(other)


SEEDS = [
    4,
    51,
    *(pytest.param(seed, marks=pytest.mark.slow) for seed in [*range(40, 51), *range(52, 62)]),
]


@pytest.mark.parametrize("seed", SEEDS)
def test_ranks_that_come_in_change_nothing_of_the_result(
    pool: Pool, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    case = drawn(seed)
    told = {**case.told, "half": False, "epochs": 3}
    joins = chance.choice([[1], [2], [1, 1]])  # a global batch has four slices
    world = chance.choice([1, 2, 2])
    # What the script keeps by itself, rank 0 has from its beginning.
    leave = chance.choice([None, *range(1 if world == 1 else 0, world + sum(joins))])
    grown = replace(case, told=told, world=world)
    grow(pool, grown, tmp_path / "grown", joins, leave)
    check_as_alone(pool, told, tmp_path / "grown", tmp_path / "alone")


@pytest.mark.parametrize(
    ("told", "options"),
    [
        ({"micro": 3}, {}),
        ({"stream": True}, {"verify_every": 1}),
    ],
    ids=["micro-batches that are a whole part in the larger world", "a stream, compared each step"],
)
def test_loops_are_the_same_in_both_worlds(
    pool: Pool, tmp_path: Path, told: dict[str, Any], options: dict[str, Any]
) -> None:
    folder = tmp_path / "grown"
    folder.mkdir()
    slow = folder / "slow"
    slow.touch()
    told = {**TOLD, **told}
    running = begin(pool, {**told, "slow": str(slow)}, folder, 2, **options)
    running.until(running.reached(3))
    change = Change.joined(running, 1)
    change.send()
    change.complete()
    slow.unlink()
    running.until(running.ended)
    assert {worker.exit_code for worker in running.workers} == {0}, running.logs()
    check_as_alone(pool, told, folder, tmp_path / "alone")


@pytest.mark.parametrize("every", [None, 2])
def test_all_ranks_go_on_to_capture_at_the_same_steps(
    pool: Pool, tmp_path: Path, every: int | None
) -> None:
    """The interval is one that rank 0 has chosen, or one that was given."""
    slow = tmp_path / "slow"
    slow.touch()
    told = {**TOLD, "epochs": 8, "pause": 0.01, "slow": str(slow)}
    options = {"snapshot_every": every, "checkpoint_dir": str(tmp_path / "saved")}
    running = begin(pool, told, tmp_path, 2, strategy="zero1", checkpoint_every=5, **options)
    running.until(running.reached(12))
    change = Change.joined(running, 1, snapshot_every=every, checkpoint_every=3)
    change.send()
    step = change.complete()
    slow.unlink()
    running.until(running.ended)
    assert {worker.exit_code for worker in running.workers} == {0}, running.logs()
    taken = [{m.step for m in w.all(Captured) if m.step > step} for w in running.workers]
    assert taken[0] == taken[1] == taken[2] and len(taken[0]) > 2


@pytest.mark.parametrize("strategy", ["zero1", pytest.param("zero2", marks=pytest.mark.slow)])
def test_masters_of_16_bits_come_too(pool: Pool, tmp_path: Path, strategy: str) -> None:
    told = {**TOLD, "clip": None, "half": True, "virtual": 2}
    grow(pool, Case(told, 2, (), strategy), tmp_path / "grown", [1], 0)
    alone, _ = run(pool, Case(told, 1, (), strategy), tmp_path / "alone")
    check_equal(told, result(tmp_path / "grown"), alone)


def test_a_rank_whose_script_differs_does_not_connect(pool: Pool, tmp_path: Path) -> None:
    """Nobody is prepared then, and training goes on."""
    slow = tmp_path / "slow"
    slow.touch()
    running = begin(pool, {**TOLD, "slow": str(slow)}, tmp_path, 2)
    running.until(running.reached(3))
    change = Change.joined(running, 1, bucket_bytes=2 << 20)
    change.send()
    running.until(lambda: running.workers[2].exit_code is not None)
    refused = running.workers[2].last(Failed)
    assert refused.blame == "peer" and "script" in refused.message, refused
    change.withdraw([0, 1])
    slow.unlink()
    running.until(running.ended)
    assert [worker.exit_code for worker in running.workers[:2]] == [0, 0], running.logs()
    assert change.switched(0) is None


def test_ranks_that_would_call_together_what_a_newcomer_calls_alone_say_so(
    pool: Pool, tmp_path: Path
) -> None:
    """They have evaluated between the restore and their loop, and it would do so too."""
    running = begin(pool, {**TOLD, "pause": 0.1, "evaluate": True}, tmp_path, 2)
    running.until(running.reached(3))
    change = Change.joined(running, 1)
    change.send()
    running.until(lambda: len(change.failures()) == 2)
    reasons = {failure.reason for failure in change.failures()}
    assert len(reasons) == 1 and "session.evaluate" in reasons.pop()
    running.kill()


@pytest.mark.parametrize(
    ("meets", "who", "message"),
    [
        ("with others", 0, "collectives of its own"),
        ("early", 2, "init_process_group"),
    ],
)
def test_scripts_that_meet_by_torch_come_in_by_a_stop(
    pool: Pool, tmp_path: Path, meets: str, who: int, message: str
) -> None:
    """As libraries do where the environment names several ranks."""
    slow = tmp_path / "slow"
    slow.touch()
    running = begin(pool, {**TOLD, "slow": str(slow), "meets": meets}, tmp_path, 2)
    running.until(running.reached(3))
    if who == 0:
        change = Change.joined(running, 1)
        change.send()
        running.until(lambda: bool(change.failures()))
        assert message in change.failures()[0].reason
    else:
        Change.joined(running, 1, waits=False)
        running.until(lambda: running.workers[2].exit_code is not None)
        assert message in running.workers[2].last(Failed).message
    running.kill()


@pytest.mark.parametrize("told", [*({"keeps": kept} for kept in KEEPS), {"takes": "an average"}])
def test_rows_that_a_script_keeps_are_of_one_world(
    pool: Pool, tmp_path: Path, told: dict[str, Any]
) -> None:
    """In another one a tensor over the mesh cannot be computed with, and a view changes nothing."""
    running = begin(pool, {**TOLD, "pause": 0.1, **told}, tmp_path, 2, strategy="zero3")
    running.until(running.reached(3))
    change = Change.without(running, [1])
    change.send()
    running.until(lambda: len(change.failures()) == 2)
    (reason,) = {failure.reason for failure in change.failures()}
    named = {"its rows": "to_local", "values of its rows": "to_local", "a frozen average": "freeze"}
    assert named.get(told.get("keeps", ""), "keeps rows") in reason
    running.kill()


@pytest.mark.parametrize("strategy", ["zero3", pytest.param("ddp", marks=pytest.mark.slow)])
def test_a_model_without_values_comes_in(pool: Pool, tmp_path: Path, strategy: str) -> None:
    told = {**TOLD, "meta": True}
    grow(pool, Case(told, 2, (), strategy), tmp_path / "grown", [1], None)
    alone, _ = run(pool, Case(told, 1, (), strategy), tmp_path / "alone")
    check_equal(told, result(tmp_path / "grown"), alone)


def test_a_newcomer_waits_for_each_node_to_hold_its_shard(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal = SnapshotStore.seal

    def seal_late(store: SnapshotStore, shard: ShardName) -> Seal | None:
        if shard.rank == 1:
            time.sleep(0.3)
        return seal(store, shard)

    monkeypatch.setattr(SnapshotStore, "seal", seal_late)
    grow(pool, Case(TOLD, 2, (), "zero3"), tmp_path / "grown", [1], None)
    check_as_alone(pool, TOLD, tmp_path / "grown", tmp_path / "alone")


def test_a_stop_that_comes_with_newcomers_ends_the_generation(pool: Pool, tmp_path: Path) -> None:
    running = begin(pool, {**TOLD, "pause": 0.1}, tmp_path, 2)
    running.until(running.reached(3))
    change = Change.joined(running, 1)
    for place in (0, 1):
        change.tell(place, Request(flags=FLAG_STOP))
    change.send()
    running.until(lambda: all(w.exit_code is not None for w in running.workers[:2]))
    for place in (0, 1):
        assert running.workers[place].last(Stopping).clean
        assert change.switched(place) is None
    running.kill()


@pytest.mark.parametrize(
    ("place", "where"),
    [
        (2, "as it restores"),
        pytest.param(2, "before its loop", marks=pytest.mark.slow),
        pytest.param(2, "in the first step", marks=pytest.mark.slow),
        pytest.param(0, "once its groups are exchanged", marks=pytest.mark.slow),
        pytest.param(1, "in the first step", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "strategy",
    ["ddp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("zero2", "zero3"))],
)
def test_a_rank_that_is_killed_as_others_come_in_costs_the_running_step(
    pool: Pool, tmp_path: Path, place: int, where: str, strategy: str
) -> None:
    told = {**TOLD, "pause": 0.1, "world": 2, "die": [place, where]}
    running = begin(pool, told, tmp_path, 2, strategy=strategy)
    running.until(running.reached(3))
    change = Change.joined(running, 1)
    change.send()
    running.until(lambda: running.workers[place].exit_code is not None)
    running.until(running.ended)
    assert running.workers[place].exit_code == -9
    others = [w for p, w in enumerate(running.workers[:2]) if p != place]
    steps = {worker.last(Stopping).step for worker in others}
    switched = {m.step for p in (0, 1) if (m := change.switched(p)) is not None}
    assert len(steps) == 1 and len(switched) == 1
    assert steps.pop() - switched.pop() in (0, 1)
    assert all(worker.last(Stopping).clean for worker in others)
