"""Real processes killed in the middle of saves, and two generations that save the same steps.

python -m pytest tests/integration/test_killed_saves.py            # 20 seeds
KILLS=200 python -m pytest -m chaos tests/integration/test_killed_saves.py
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from elasticzero.checkpoint import commit, verify
from elasticzero.checkpoint.disk import DiskDirectory
from elasticzero.checkpoint.manifest import MANIFEST_NAME
from elasticzero.checkpoint.reader import Target, open_step, torch_dtype
from elasticzero.checkpoint.storage import Storage
from elasticzero.spans import Span
from tests.integration.scripts.save_until_killed import state

SCRIPT = "tests.integration.scripts.save_until_killed"
FOREVER = 1_000_000


class Savers:
    """Starts saving processes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def start(
        self, directory: Path, generation: int, first: int, last: int, wait_s: float = 30.0
    ) -> list[int]:
        """Two ranks; their process ids, by rank."""
        orders = [[str(directory), rank, generation, first, last, wait_s] for rank in range(2)]
        return [int(self._ask(order)) for order in orders]

    def wait(self) -> None:
        """Until all have ended."""
        assert self._ask(None) == "ended"

    def save(self, directory: Path, generation: int, first: int, last: int) -> None:
        """Undisturbed saves."""
        self.start(directory, generation, first, last)
        self.wait()

    def _ask(self, order: object) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()


@pytest.fixture(scope="module")
def savers(root: Path) -> Iterator[Savers]:
    process = subprocess.Popen(
        [sys.executable, "-m", SCRIPT],
        cwd=root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        yield Savers(process)
        assert process.stdin is not None
        process.stdin.close()


def assert_right(storage: Storage) -> int:
    """A step is whole, and bit for bit what the generation that its manifest names had; which."""
    assert list(verify.faults(storage)) == []
    checkpoint = open_step(storage)
    manifest = checkpoint.manifest
    loaded = {
        name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
        for name, spec in manifest.layout.tensors.items()
    }
    checkpoint.load(Target(n, Span(0, t.numel()), t) for n, t in loaded.items())
    wanted = state(manifest.generation, manifest.step)
    assert loaded.keys() == wanted.keys()
    assert all(torch.equal(loaded[name], wanted[name]) for name in wanted)
    return manifest.generation


def assert_nothing_left(directory: Path) -> None:
    files = DiskDirectory(directory).files()
    assert all(len(names) == 5 and MANIFEST_NAME in names for names in files.values()), files
    assert len(files) <= 2


def kill_and_look(savers: Savers, directory: Path, seed: int) -> None:
    dice = random.Random(seed)
    place = DiskDirectory(directory)
    savers.save(directory, 1, 1, 1)
    assert_right(commit.resolve(directory))
    processes = savers.start(directory, 2, 2, FOREVER, wait_s=0.4)
    time.sleep(dice.uniform(0.0, 0.15))
    for rank in dice.choice([(0,), (1,), (0, 1), (1, 0)]):
        os.kill(processes[rank], signal.SIGKILL)
    savers.wait()
    newest = commit.newest_good(place)
    assert newest is not None
    assert assert_right(commit.resolve(directory)) == (1 if newest == 1 else 2)
    savers.save(directory, 3, newest + 1, newest + 1)
    assert commit.newest_good(place) == newest + 1
    assert assert_right(commit.resolve(directory)) == 3
    assert_nothing_left(directory)


@pytest.mark.parametrize("seed", range(20))
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


@pytest.mark.parametrize("seed", range(5))
def test_two_generations_that_save_the_same_steps_never_mix(
    savers: Savers, tmp_path: Path, seed: int
) -> None:
    """The older one is a zombie: it may win a step, and never harms what the newer one has."""
    dice = random.Random(seed)
    place = DiskDirectory(tmp_path)
    savers.save(tmp_path, 1, 1, 1)
    for generation in dice.sample([2, 3], 2):
        savers.start(tmp_path, generation, 2, 6)
        time.sleep(dice.uniform(0.0, 0.02))
    savers.wait()
    assert commit.newest_good(place) == 6
    for info in commit.steps(place):
        with suppress(FileNotFoundError):
            assert assert_right(info.storage) in (1, 2, 3)
    savers.save(tmp_path, 4, 7, 7)
    assert assert_right(commit.resolve(tmp_path)) == 4
    assert_nothing_left(tmp_path)
