"""Processes that save and are killed, and what they may leave."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from elasticzero.checkpoint.format.dtypes import torch_dtype
from elasticzero.checkpoint.format.names import MANIFEST_NAME
from elasticzero.checkpoint.io.reader import Checkpoint, open_step
from elasticzero.checkpoint.steps import verify
from elasticzero.checkpoint.steps.retention import COMMIT_S
from elasticzero.checkpoint.storage.base import Storage
from elasticzero.checkpoint.storage.disk import DiskDirectory
from elasticzero.processes import process_state
from elasticzero.spans import Span
from elasticzero.state.model import LoadTarget
from tests.integration.scripts.save_until_killed import state
from tests.support.deadlines import patience

WAIT_S = 60.0
"""A generous deadline."""
FOREVER = 1_000_000
"""A last step that is never reached."""
QUICK = 8
"""Seeds that `make test` plays of the twenty of each test; `make slow` plays the others."""


class Savers:
    """Starts saving processes, by a script that serves such orders."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def start(self, *order: object) -> list[int]:
        """The ids of the processes that the script starts."""
        ids: list[int] = self._ask(order)
        return ids

    def wait(self) -> dict[int, int]:
        """Until all have ended; their exit statuses by id, negative for a signal."""
        return {int(process): status for process, status in self._ask(None).items()}

    def save(self, *order: object) -> None:
        """Undisturbed saves."""
        self.start(*order)
        ended = self.wait()
        assert not any(ended.values()), ended

    def _ask(self, order: object) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order, default=str) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@contextmanager
def serving(script: str, root: Path) -> Iterator[Savers]:
    """A process of this script, run in the repository's root."""
    process = subprocess.Popen(
        [sys.executable, "-m", f"tests.integration.scripts.{script}"],
        cwd=root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield Savers(process)
        assert process.stdin is not None
        process.stdin.close()


def wait_for_state(processes: Sequence[int], states: str) -> None:
    """Until each process has one of these states, as in /proc/PID/stat."""
    deadline_s = time.monotonic() + patience(WAIT_S)
    while any(process_state(process) not in states for process in processes):
        assert time.monotonic() < deadline_s, [process_state(process) for process in processes]
        time.sleep(0.005)


def kill_soon(dice: random.Random, processes: Sequence[int], within_s: float) -> None:
    """Kill these after a random time in which some steps are saved."""
    time.sleep(dice.uniform(0.0, within_s))
    for process in processes:
        os.kill(process, signal.SIGKILL)


def assert_right(storage: Storage) -> int:
    """A step is whole, and bit for bit what the generation that its manifest names had; which."""
    assert list(verify.find_corruption(storage)) == []
    return assert_bits(open_step(storage))


def assert_bits(checkpoint: Checkpoint) -> int:
    """It loads, bit for bit, what the generation that its manifest names had; which."""
    manifest = checkpoint.manifest
    loaded = {
        name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
        for name, spec in manifest.layout.tensors.items()
    }
    checkpoint.load(LoadTarget(n, Span(0, t.numel()), t) for n, t in loaded.items())
    expected = state(manifest.generation, manifest.step)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    return manifest.generation


def let_a_minute_pass(directory: Path) -> None:
    """Makes all files so old that no save which lacks only its manifest may be committed still.

    A process that was killed within its retention, after it had removed a manifest, leaves such
    files; the next save removes them once they are that old.
    """
    for path in directory.glob("step-*/*"):
        written_s = path.stat().st_mtime - 2 * COMMIT_S
        os.utime(path, (written_s, written_s))


def assert_nothing_left(directory: Path) -> None:
    """Whole steps and nothing else, two at most."""
    files: Mapping[str, Mapping[str, float]] = DiskDirectory(directory).files()
    assert all(len(names) == 5 and MANIFEST_NAME in names for names in files.values()), files
    assert len(files) <= 2
