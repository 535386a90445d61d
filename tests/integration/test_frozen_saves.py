"""A real process is frozen at each line of its commit, while others go on in its directory.

No clock has a part in it: the saver's lease lasts for ever, so that nothing but the order of the
requests to storage keeps an old save from harm (rules FC in `checkpoint/steps/loose_files.py`).
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fsspec
import pytest

from elasticzero.checkpoint.format.manifest import Manifest
from elasticzero.checkpoint.steps import catalog, commit, owner
from elasticzero.checkpoint.steps.retention import RetentionPolicy, apply_retention
from elasticzero.checkpoint.steps.tag_files import read_tags
from elasticzero.checkpoint.steps.tags import set_tags
from elasticzero.checkpoint.storage.base import Directory
from elasticzero.checkpoint.storage.urls import open_directory
from tests.contract.s3_server import running_server
from tests.integration.killing import Savers, serving, wait_for_state
from tests.integration.scripts.freeze_at_line import JOB, LAST, STEP, TAG, prepare
from tests.support.cases import slow
from tests.unit.checkpoint.cases import draft_of, elements, simple_layout, write_ranks

LAYOUT = simple_layout(numel=100)
CONTENTS = elements(LAYOUT.tensors)
BEFORE, NEW, NEXT = (f"g{n:06d}-{n:016x}" for n in (4, 6, 7))
NEXT_RUN = replace(JOB, run=2)
TOKEN_OF_NEXT_RUN = f"g{1:06d}-{2:016x}"
ALL = RetentionPolicy()
QUICK = frozenset({"_commit", "_known_bad", "_place", "_set_own_tags", "commit", "may_not"})
"""Functions at whose lines `make test` freezes; `make slow` does at those of all."""
IN_STORE = QUICK | {"create_exclusive", "_replace", "put_matching", "remove_matching"}
"""The same in an object store, where each request takes longer."""
Line = tuple[str, int, str]
State = dict[int, tuple[str, str | None]]


@pytest.fixture(scope="module")
def savers(root: Path) -> Iterator[Savers]:
    with serving("freeze_at_line", root) as started:
        yield started


@pytest.fixture
def place() -> Iterator[Path]:
    """Gives a directory in memory, where fsync takes no time."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as path:
        yield Path(path)


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """The URL of a bucket, which the processes that save see too."""
    with running_server() as port, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "id")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        fsspec.get_filesystem_class("s3").clear_instance_cache()  # another test's server
        fsspec.filesystem("s3", use_listings_cache=False).mkdir("frozen")
        yield "s3://frozen"
        fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.fixture(scope="module")
def savers_to_bucket(root: Path, bucket: str) -> Iterator[Savers]:
    with serving("freeze_at_line", root) as started:
        yield started


def draft(step: int, token: str, run: int = 1, tags: tuple[str, ...] = ()) -> Manifest:
    generation = int(token[1:7])
    return draft_of(LAYOUT, step=step, token=token, generation=generation, run=run, tags=tags)


def save(
    directory: Directory, manifest: Manifest, keep: RetentionPolicy, *, replacing: bool = False
) -> bool:
    """Commits a step, as the node of rank 0 does in a generation that goes on."""
    storage = commit.prepare(directory, manifest.step)
    write_ranks(storage, manifest, CONTENTS)
    committed = commit.commit(storage, manifest, wait_s=0.0, replacing=replacing)
    if committed:
        set_tags(directory, manifest.step, manifest.tags)
        since_s = owner.renew(directory, replace(JOB, run=manifest.run))
        apply_retention(directory, manifest, keep, since_s=since_s)
    return committed


def state(directory: Directory) -> State:
    """The token of each committed step, and why it is not good."""
    return {
        info.step: (
            catalog.read_manifest(info.storage).token,
            catalog.step_error_text(info.storage),
        )
        for info in catalog.steps(directory)
    }


def assert_good(steps: State) -> None:
    assert not {step: error for step, (_, error) in steps.items() if error is not None}


def next_generation_saves(step: int, *, replacing: bool = False) -> Callable[[Directory], State]:
    """Returns what commits a step of the next generation."""

    def meanwhile(directory: Directory) -> State:
        committed = save(
            directory, draft(step, NEW), ALL if replacing else LAST, replacing=replacing
        )
        steps = state(directory)
        return {step: steps[step]} if committed else {}

    return meanwhile


@dataclass(frozen=True, slots=True)
class Case:
    """Describes what happens while a process of the older generation is frozen."""

    meanwhile: Callable[[Directory], State]
    damaged: bool = False


GENERATIONS = {
    "an earlier step": Case(next_generation_saves(90)),
    "the same step": Case(next_generation_saves(STEP)),
    "a later step": Case(next_generation_saves(110)),
    "the damaged step": Case(next_generation_saves(STEP, replacing=True), damaged=True),
}


class Freezer:
    """Plays one case at one line."""

    def __init__(self, savers: Savers, place: Path, root: str) -> None:
        """Takes where the memory and the checkpoint directories are made."""
        self._savers = savers
        self._root = root
        self._report = place / "report"
        self._memory = place / "memory"
        prepare(self._memory)

    def directory(self, *, damaged: bool) -> Directory:
        """A directory that the job has, with a checkpoint."""
        directory = open_directory(f"{self._root}/{uuid.uuid4().hex}")
        owner.claim(directory, JOB, lambda _: False)
        assert save(directory, draft(STEP if damaged else 80, BEFORE), ALL)
        return directory

    def save(self, directory: Directory, line: Any, meanwhile: Any, *, damaged: bool) -> Any:
        """Has the older generation save; returns what `meanwhile` returns, and its report."""
        order = directory.where, self._memory, self._report, line, damaged
        (process,) = self._savers.start(*order)
        result = None
        if line is not None:
            try:
                wait_for_state([process], "TZ")
                result = meanwhile(directory)
            finally:
                os.kill(process, signal.SIGCONT)
        assert self._savers.wait() == {process: 0}
        report = json.loads(self._report.read_text())
        assert line is None or line in report["met"], "it was never frozen"
        return result, report

    def lines(self, places: frozenset[str] | None, *, damaged: bool) -> list[Line]:
        """The lines that an undisturbed save meets in these files and functions; None: all."""
        _, report = self.save(self.directory(damaged=damaged), None, None, damaged=damaged)
        assert report["committed"] and report["error"] is None, report
        met = [line for line in report["met"] if places is None or not places.isdisjoint(line)]
        assert len(met) > 10
        return met


def frozen_beside_a_generation(freezer: Freezer, case: Case, line: Line) -> None:
    """The newest step never goes back, and what the newer generation has committed stays."""
    directory = freezer.directory(damaged=case.damaged)
    newest: list[int] = []

    def meanwhile(place: Directory) -> State:
        newest.append(catalog.newest_good(place) or 0)
        steps = case.meanwhile(place)
        newest.append(catalog.newest_good(place) or 0)
        return steps

    committed, _ = freezer.save(directory, line, meanwhile, damaged=case.damaged)
    steps = state(directory)
    assert_good(steps)
    newest.append(max(steps))
    assert newest == sorted(newest)
    assert committed.items() <= steps.items()
    assert read_tags(directory).get(TAG, STEP) == STEP
    assert save(directory, draft(120, NEXT), LAST)
    steps = state(directory)
    assert_good(steps)
    assert steps[120][0] == NEXT and steps.keys() <= {120, STEP}


def next_run_begins(directory: Directory) -> tuple[int, State]:
    """A later run takes the directory, goes on from its newest step and saves one later."""
    owner.claim(directory, NEXT_RUN, lambda _: False)
    newest = catalog.newest_good(directory)
    assert newest is not None
    assert save(directory, draft(newest + 5, TOKEN_OF_NEXT_RUN, run=2, tags=(TAG,)), ALL)
    return newest, state(directory)


def frozen_beside_a_run(freezer: Freezer, line: Line) -> None:
    """The next run has the steps that it has begun with and its own, and no others, ever."""
    directory = freezer.directory(damaged=False)
    (start, steps), _ = freezer.save(directory, line, next_run_begins, damaged=False)
    after = state(directory)
    assert_good(after)
    assert after.items() <= steps.items(), "it may have gone on to remove an older one"
    assert {start, start + 5} <= after.keys()
    assert read_tags(directory) == {TAG: start + 5}
    own_step = draft(STEP, TOKEN_OF_NEXT_RUN, run=2)
    assert save(directory, own_step, ALL) == (start < STEP)
    assert save(directory, draft(120, TOKEN_OF_NEXT_RUN, run=2), LAST)
    steps = state(directory)
    assert_good(steps)
    assert steps.keys() == {120, start + 5}


def at_each_line(
    freezer: Freezer,
    play: Callable[[Line], None],
    places: frozenset[str] | None,
    *,
    damaged: bool = False,
) -> None:
    for line in freezer.lines(places, damaged=damaged):
        try:
            play(line)
        except AssertionError as error:
            error.add_note(f"frozen at {line}")
            raise


@pytest.mark.parametrize(
    ("case", "places"),
    [("the damaged step", QUICK), *(slow(name, None) for name in GENERATIONS)],
)
def test_the_next_generation_goes_on_at_any_line(
    savers: Savers, place: Path, case: str, places: frozenset[str] | None
) -> None:
    """A save that had known a step to be damaged overwrote what the next generation had put in its
    place."""
    freezer, played = Freezer(savers, place, str(place)), GENERATIONS[case]
    at_each_line(
        freezer,
        lambda line: frozen_beside_a_generation(freezer, played, line),
        places,
        damaged=played.damaged,
    )


@pytest.mark.parametrize("places", [QUICK, slow(None)])
def test_the_next_run_begins_at_any_line(
    savers: Savers, place: Path, places: frozenset[str] | None
) -> None:
    """A save whose manifest was about to come became the newest step of a run that had begun from
    an earlier one."""
    freezer = Freezer(savers, place, str(place))
    at_each_line(freezer, lambda line: frozen_beside_a_run(freezer, line), places)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=pytest.mark.slow if played.damaged else pytest.mark.chaos)
        for name, played in GENERATIONS.items()
    ],
)
def test_the_next_generation_goes_on_in_an_object_store(
    savers_to_bucket: Savers, bucket: str, place: Path, case: str
) -> None:
    freezer, played = Freezer(savers_to_bucket, place, bucket), GENERATIONS[case]
    at_each_line(
        freezer,
        lambda line: frozen_beside_a_generation(freezer, played, line),
        IN_STORE,
        damaged=played.damaged,
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_next_run_begins_in_an_object_store(
    savers_to_bucket: Savers, bucket: str, place: Path
) -> None:
    freezer = Freezer(savers_to_bucket, place, bucket)
    at_each_line(freezer, lambda line: frozen_beside_a_run(freezer, line), IN_STORE)
