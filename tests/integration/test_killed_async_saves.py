"""Workers that capture, and the agent that seals and saves it: killed at any time, in any company.

python -m pytest tests/integration/test_killed_async_saves.py            # 8 seeds
KILLS=200 python -m pytest -m chaos tests/integration/test_killed_async_saves.py
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticzero.checkpoint.io.reader import open_snapshot
from elasticzero.checkpoint.ram.store import SnapshotStore
from elasticzero.checkpoint.steps import catalog
from elasticzero.checkpoint.storage.disk import DiskDirectory
from tests.integration.killing import (
    FOREVER,
    QUICK,
    Savers,
    assert_bits,
    assert_nothing_left,
    assert_right,
    kill_soon,
    let_a_minute_pass,
    serving,
)
from tests.integration.scripts.capture_until_killed import newest_whole
from tests.support.cases import slow


@pytest.fixture(scope="module")
def savers(root: Path) -> Iterator[Savers]:
    with serving("capture_until_killed", root) as savers:
        yield savers


def assert_memory_right(memory: SnapshotStore) -> None:
    """Of each snapshot that is whole every bit is right."""
    for held in memory.held():
        if len(held.ranks) == held.world_size:
            placed = memory.open(held.generation, held.step)
            places = {rank: [placed] for rank in held.ranks}
            snapshot = open_snapshot(places, held.generation, held.step)
            assert assert_bits(snapshot) == held.generation


def kill_and_look(savers: Savers, directory: Path, seed: int) -> None:
    """The agent's memory lasts as long as the agent: the next one frees what a dead one left."""
    dice = random.Random(seed)
    place = DiskDirectory(directory)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        memory = SnapshotStore(Path(folder))
        savers.save(folder, directory, 1, 1, 1)
        assert newest_whole(memory) == {(1, 1)}
        agent, *workers = savers.start(folder, directory, 2, 2, FOREVER)
        victims = dice.choice([workers[:1], workers[1:], workers, [agent], [agent, workers[0]]])
        kill_soon(dice, victims, within_s=0.25)
        ended = savers.wait()
        assert not any(ended[rank] for rank in ended.keys() - victims), ended
        newest = catalog.newest_good(place)
        assert newest is not None
        assert assert_right(catalog.resolve(directory)) == (1 if newest == 1 else 2)
        assert_memory_right(memory)
        if agent in victims:
            memory.clear()
        else:
            assert not memory.drafts()
            assert newest_whole(memory) == {(1 if newest == 1 else 2, newest)}
        following = newest + 2 - newest % 2  # where a checkpoint may have been begun
        let_a_minute_pass(directory)
        savers.save(folder, directory, 3, following, following)
        assert catalog.newest_good(place) == following
        assert assert_right(catalog.resolve(directory)) == 3
        assert newest_whole(memory) == {(3, following)}
        assert_memory_right(memory)
        assert_nothing_left(directory)


@pytest.mark.parametrize("seed", [*range(QUICK), *map(slow, range(QUICK, 20))])
def test_a_reader_gets_the_old_state_or_the_new_one(
    savers: Savers, tmp_path: Path, seed: int
) -> None:
    kill_and_look(savers, tmp_path, seed)


@pytest.mark.chaos
def test_many_kills(savers: Savers, tmp_path: Path) -> None:
    first = int(os.environ.get("KILLS_SEED", "1000"))
    for seed in range(first, first + int(os.environ.get("KILLS", "200"))):
        try:
            kill_and_look(savers, tmp_path / str(seed), seed)
        except BaseException as error:
            error.add_note(f"KILLS_SEED={seed} KILLS=1 repeats it")
            raise
