"""Two generations write one directory on a disk, by turns between two calls into the system.

A request to a disk is several calls: `test_fence` changes turns between requests.
"""

from __future__ import annotations

import random
import shutil
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from elasticzero.checkpoint.storage.disk import DiskDirectory
from elasticzero.errors import ElasticZeroError
from tests.unit.checkpoint.steps.test_fence import (
    CASES,
    Case,
    check,
    each_case,
    no_exchange,
    no_exchange_no_links,
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
