"""Real processes killed in the middle of saves, and two generations that save the same steps.

python -m pytest tests/integration/test_killed_saves.py            # 8 seeds
KILLS=200 python -m pytest -m chaos tests/integration/test_killed_saves.py
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from elasticzero.checkpoint.steps import catalog
from elasticzero.checkpoint.storage.disk import DiskDirectory
from tests.integration.killing import (
    FOREVER,
    QUICK,
    Savers,
    assert_nothing_left,
    assert_right,
    kill_soon,
    let_a_minute_pass,
    serving,
    wait_for_state,
)
from tests.support.cases import slow

WAIT_S = 30.0


@pytest.fixture(scope="module")
def savers(root: Path) -> Iterator[Savers]:
    with serving("save_until_killed", root) as savers:
        yield savers


def kill_and_look(savers: Savers, directory: Path, seed: int) -> None:
    dice = random.Random(seed)
    place = DiskDirectory(directory)
    savers.save(directory, 1, 1, 1, WAIT_S)
    assert_right(catalog.resolve(directory))
    processes = savers.start(directory, 2, 2, FOREVER, 0.4)
    kill_soon(dice, dice.choice([processes[:1], processes[1:], processes]), within_s=0.15)
    savers.wait()
    newest = catalog.newest_good(place)
    assert newest is not None
    assert assert_right(catalog.resolve(directory)) == (1 if newest == 1 else 2)
    let_a_minute_pass(directory)
    savers.save(directory, 3, newest + 1, newest + 1, WAIT_S)
    assert catalog.newest_good(place) == newest + 1
    assert assert_right(catalog.resolve(directory)) == 3
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


def steps_there(place: DiskDirectory) -> dict[int, int]:
    """The generation of each committed step, all of which are whole."""
    return {info.step: assert_right(info.storage) for info in catalog.steps(place)}


@pytest.mark.parametrize(
    ("first", "aged"),
    [
        (2, True),
        (3, True),
        pytest.param(2, False, marks=pytest.mark.slow),
        pytest.param(3, False, marks=pytest.mark.slow),
    ],
)
def test_a_saver_frozen_before_its_manifest_wakes(
    savers: Savers, tmp_path: Path, first: int, aged: bool
) -> None:
    """The next generation saves the same step or later ones meanwhile, and applies retention. Where
    the frozen save is beaten, or old enough, its shards are removed; its step existed without."""
    place = DiskDirectory(tmp_path)
    savers.save(tmp_path, 1, 1, 1, WAIT_S)
    committer, other = savers.start(tmp_path, 2, 2, 2, WAIT_S, True)
    try:
        wait_for_state([committer], "T")
        os.kill(other, signal.SIGKILL)  # its shard is there
        if aged:
            let_a_minute_pass(tmp_path)
        wait_for_state(savers.start(tmp_path, 3, first, 5, WAIT_S), "Z")
        before = steps_there(place)
        assert before == {4: 3, 5: 3}
    finally:
        os.kill(committer, signal.SIGCONT)
    ended = savers.wait()
    assert ended.pop(other) == -signal.SIGKILL
    assert not any(ended.values()), ended
    after = steps_there(place)
    assert before.items() <= after.items()
    removed = aged or first == 2
    assert after.keys() - before.keys() == (set() if removed else {2})
    let_a_minute_pass(tmp_path)
    savers.save(tmp_path, 4, 6, 7, WAIT_S)
    assert assert_right(catalog.resolve(tmp_path)) == 4
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("seed", range(5))
def test_two_generations_that_save_the_same_steps_never_mix(
    savers: Savers, tmp_path: Path, seed: int
) -> None:
    """The older one is a zombie: it may win a step, and never harms what the newer one has."""
    dice = random.Random(seed)
    place = DiskDirectory(tmp_path)
    savers.save(tmp_path, 1, 1, 1, WAIT_S)
    for generation in dice.sample([2, 3], 2):
        savers.start(tmp_path, generation, 2, 6, WAIT_S)
        time.sleep(dice.uniform(0.0, 0.02))
    savers.wait()
    assert catalog.newest_good(place) == 6
    for info in catalog.steps(place):
        with suppress(FileNotFoundError):
            assert assert_right(info.storage) in (1, 2, 3)
    savers.save(tmp_path, 4, 7, 7, WAIT_S)
    assert assert_right(catalog.resolve(tmp_path)) == 4
    assert_nothing_left(tmp_path)
