"""Two generations write one directory on a disk, by turns between two calls into the system.

A request to a disk is several calls: `test_fence` changes turns between requests.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from elasticzero.checkpoint.format.names import MANIFEST_NAME
from elasticzero.checkpoint.steps import commit
from elasticzero.checkpoint.storage.base import Storage
from elasticzero.checkpoint.storage.disk import DiskDirectory
from elasticzero.errors import ElasticZeroError
from tests.unit.checkpoint.steps.test_fence import (
    ALL,
    CASES,
    NEW,
    OLD,
    Case,
    check,
    draft,
    each_case,
    no_exchange,
    no_exchange_no_links,
    opened,
    shards,
    state,
    whole_save,
)
from tests.unit.checkpoint.turns import Turns, run_by_calls

pytestmark = pytest.mark.usefixtures("in_one_thread")
Lacks = Callable[[pytest.MonkeyPatch], object]


def nothing(_: pytest.MonkeyPatch) -> None:
    """The file system has all that Linux knows."""


def run_case(place: Path, case: Case, counts: Sequence[int]) -> list[int]:
    """Changes turns after so many calls; returns how many each has made."""
    directory = DiskDirectory(place / uuid.uuid4().hex)
    case.prepare(directory)
    turns = Turns([*counts, 10**9])
    try:
        errors = run_by_calls(directory, case.works, turns)
        unexpected = [e for e in errors if e is not None and not isinstance(e, ElasticZeroError)]
        assert not unexpected, unexpected
        check(directory, case, errors[1])
    except AssertionError as error:
        error.add_note(f"turns changed after {counts} calls of {turns.calls}")
        raise
    shutil.rmtree(directory.path)
    return turns.calls


def run_orders(place: Path, case: Case, count: int, seed: str, most: int | None = None) -> None:
    """For each call of the first process, `count` numbers of calls of the second; `most` of all."""
    old, new = run_case(place, case, ())[0], run_case(place, case, (0, 10**9))[1]
    assert min(old, new) > 10, "each is counted where it comes first"
    dice = random.Random(seed)
    orders = [
        (first, second)
        for first in range(old + 1)
        for second in dice.sample(range(1, new + 1), min(count, new))
    ]
    for order in dice.sample(orders, most or len(orders)):
        run_case(place, case, order)


@each_case
def test_some_orders_of_calls_with_two_switches(place: Path, case: str) -> None:
    run_orders(place, CASES[case], 1, case, most=10)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("lacks", [nothing, no_exchange, no_exchange_no_links])
@each_case
def test_many_orders_of_calls_with_two_switches(
    place: Path, monkeypatch: pytest.MonkeyPatch, case: str, lacks: Lacks
) -> None:
    """On NFS two names cannot be exchanged, and some file systems have no hard links either."""
    lacks(monkeypatch)
    run_orders(place, CASES[case], 4, f"{case} {lacks.__name__}")


@pytest.mark.parametrize("looks", [1, 2])
def test_a_committer_frozen_before_it_replaces_a_pipe(
    place: Path, monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    """The next generation has put a manifest in its place meanwhile: that one was overwritten."""
    directory = opened("disk", place)
    storage = shards(directory, 100, OLD)
    os.mkfifo(Path(storage.where) / MANIFEST_NAME)
    really_look = commit._manifest_or_other
    before_it = itertools.repeat(None, looks - 1)
    committed: list[bool] = []

    def look(target: Storage) -> tuple[bytes | None, bool]:
        seen = really_look(target)
        if next(before_it, storage) is storage:
            monkeypatch.setattr(commit, "_manifest_or_other", really_look)
            committed.append(whole_save(directory, 100, NEW, ALL))
        return seen

    monkeypatch.setattr(commit, "_manifest_or_other", look)
    assert not commit.commit(storage, draft(100, OLD), wait_s=0.0)
    assert committed == [True]
    assert state(directory) == {100: (NEW, None)}
