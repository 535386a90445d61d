"""A committer stops anywhere, and goes on when the next generation has gone on without it."""

from __future__ import annotations

import itertools
import random
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from elasticzero.checkpoint.format.manifest import Manifest
from elasticzero.checkpoint.format.names import MANIFEST_NAME, step_directory, token_generation
from elasticzero.checkpoint.steps import catalog, commit
from elasticzero.checkpoint.steps.loose_files import remove_loose
from elasticzero.checkpoint.steps.retention import (
    RetentionPolicy,
    apply_retention,
    make_room,
)
from elasticzero.checkpoint.storage import disk as disk_module
from elasticzero.checkpoint.storage.base import Directory, Storage
from elasticzero.checkpoint.storage.disk import DiskDirectory
from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.errors import ElasticZeroError, StorageError
from tests.support.cases import slow
from tests.unit.checkpoint.cases import draft_of, elements, simple_layout, write_ranks
from tests.unit.checkpoint.disk_faults import Faults
from tests.unit.checkpoint.storage.test_disk import failing, without_links
from tests.unit.checkpoint.turns import Stopped, Turns, run_by_turns

LAYOUT = simple_layout(numel=100)
CONTENTS = elements(LAYOUT.tensors)
DAMAGED, OLD, NEW = (
    "g000004-cccccccccccccccc",
    "g000005-aaaaaaaaaaaaaaaa",
    "g000006-bbbbbbbbbbbbbbbb",
)
NEXT = "g000007-dddddddddddddddd"
LAST = RetentionPolicy(last=1)
ALL = RetentionPolicy()
Work = Callable[[Directory], object]

each_kind = pytest.mark.parametrize("kind", ["disk", "object"])


def opened(kind: str, place: Path) -> Directory:
    name = uuid.uuid4().hex
    return open_directory(str(place / name) if kind == "disk" else f"memory://{name}")


def draft(step: int, token: str) -> Manifest:
    manifest = draft_of(LAYOUT, step=step, token=token)
    return replace(manifest, generation=token_generation(token) or 0)


def shards(directory: Directory, step: int, token: str) -> Storage:
    """A save that got no manifest."""
    storage = directory.make(step_directory(step))
    write_ranks(storage, draft(step, token), CONTENTS)
    return storage


def save(
    directory: Directory, step: int, token: str, keep: RetentionPolicy, *, replacing: bool = False
) -> bool:
    """All that the node of rank 0 does, once the shards are there."""
    storage, manifest = directory.step(step_directory(step)), draft(step, token)
    committed = commit.commit(storage, manifest, wait_s=0.0, replacing=replacing)
    if committed:
        apply_retention(directory, manifest, keep)
    return committed


def whole_save(
    directory: Directory, step: int, token: str, keep: RetentionPolicy, *, replacing: bool = False
) -> bool:
    shards(directory, step, token)
    return save(directory, step, token, keep, replacing=replacing)


def state(directory: Directory) -> dict[int, tuple[str, str | None]]:
    """The token of each committed step, and why it is not good."""
    return {
        info.step: (
            catalog.read_manifest(info.storage).token,
            catalog.step_error_text(info.storage),
        )
        for info in catalog.steps(directory)
    }


def assert_all_good(directory: Directory) -> None:
    faults = {step: error for step, (_, error) in state(directory).items() if error is not None}
    assert not faults


def before_the_manifest(patch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    """Has something happen once: a committer has seen all shards, and has no manifest yet."""
    check = commit._check_readable

    def freeze(target: Storage, data: bytes) -> None:
        check(target, data)
        patch.setattr(commit, "_check_readable", check)
        happens()

    patch.setattr(commit, "_check_readable", freeze)


@each_kind
def test_a_committer_frozen_before_the_manifest(
    kind: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has seen all shards; the next generation's retention comes before its manifest."""
    directory = opened(kind, place)
    assert whole_save(directory, 80, OLD, ALL)
    storage = shards(directory, 100, OLD)
    committed: list[bool] = []
    before_the_manifest(monkeypatch, lambda: committed.append(whole_save(directory, 90, NEW, LAST)))
    assert commit.commit(storage, draft(100, OLD), wait_s=0.0)
    assert committed == [True]
    assert_all_good(directory)
    assert state(directory)[90] == (NEW, None)


@each_kind
def test_a_committer_frozen_before_it_replaces_a_damaged_step(
    kind: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next generation has replaced the step meanwhile: that newer manifest stays."""
    directory = opened(kind, place)
    assert whole_save(directory, 100, DAMAGED, ALL)
    storage = shards(directory, 100, OLD)
    committed: list[bool] = []
    before_the_manifest(
        monkeypatch,
        lambda: committed.append(whole_save(directory, 100, NEW, ALL, replacing=True)),
    )
    assert not commit.commit(storage, draft(100, OLD), wait_s=0.0, replacing=True)
    assert committed == [True]
    assert state(directory) == {100: (NEW, None)}


class Case:
    """What two generations do in one directory."""

    def __init__(
        self, prepare: Work, old: Work, new: Work, stays: tuple[int, str] | None = None
    ) -> None:
        """Takes the work of the two.

        Args:
            prepare: What was there before.
            old: What the older generation does, which may stop anywhere.
            new: What the next one does.
            stays: A step that the next one's committed save leaves, and its token.
        """
        self.prepare = prepare
        self.works = (old, new)
        self.stays = stays


def prepare_two(directory: Directory) -> None:
    whole_save(directory, 80, OLD, ALL)
    shards(directory, 100, OLD)
    shards(directory, 90, NEW)


def prepare_damaged(directory: Directory) -> None:
    whole_save(directory, 100, DAMAGED, ALL)
    shards(directory, 100, OLD)
    shards(directory, 100, NEW)


def prepare_kept(directory: Directory) -> None:
    for step, token in ((80, DAMAGED), (90, OLD), (100, OLD)):
        whole_save(directory, step, token, ALL)
    shards(directory, 80, NEW)


def prepare_failed(directory: Directory) -> None:
    whole_save(directory, 80, OLD, ALL)
    shards(directory, 100, OLD)


def discard(directory: Directory) -> None:
    """As two ranks do, each its own."""
    for rank in (0, 1):
        commit.discard(directory, draft(100, OLD), [rank])


def remove_leftovers_of_100(directory: Directory) -> None:
    storage = directory.step(step_directory(100))
    remove_loose(storage, OLD, [name for name in storage.names() if OLD in name])


def retention_of_90(directory: Directory) -> None:
    """As if all its leftovers were old enough."""
    remove_leftovers_of_100(directory)
    apply_retention(directory, draft(90, NEW), LAST)


def save_and_retention_of_90(directory: Directory) -> None:
    whole_save(directory, 90, NEW, ALL)
    retention_of_90(directory)


def commit_and_retention_of_90(directory: Directory) -> None:
    commit.commit(directory.step(step_directory(90)), draft(90, NEW), wait_s=0.0)
    retention_of_90(directory)


CASES = {
    "beside": Case(
        prepare_two,
        lambda d: save(d, 100, OLD, LAST),
        lambda d: save(d, 90, NEW, LAST),
        stays=(90, NEW),
    ),
    "leftovers removed": Case(
        prepare_two,
        lambda d: save(d, 100, OLD, ALL),
        commit_and_retention_of_90,
        stays=(90, NEW),
    ),
    "replaced by both": Case(
        prepare_damaged,
        lambda d: save(d, 100, OLD, ALL, replacing=True),
        lambda d: save(d, 100, NEW, ALL, replacing=True),
    ),
    "replaced, and leftovers removed": Case(
        prepare_damaged,
        lambda d: save(d, 100, OLD, ALL, replacing=True),
        save_and_retention_of_90,
        stays=(90, NEW),
    ),
    "removed and written again": Case(
        prepare_kept,
        lambda d: apply_retention(d, draft(100, OLD), LAST),
        lambda d: save(d, 80, NEW, ALL),
    ),
    "removed and replaced": Case(
        prepare_kept,
        lambda d: apply_retention(d, draft(100, OLD), LAST),
        lambda d: save(d, 80, NEW, ALL, replacing=True),
        stays=(80, NEW),
    ),
    "retention of both": Case(
        prepare_kept,
        lambda d: apply_retention(d, draft(100, OLD), LAST),
        lambda d: (whole_save(d, 110, NEW, LAST), apply_retention(d, draft(100, OLD), LAST)),
    ),
    "discarded by one of two": Case(prepare_two, discard, lambda d: save(d, 100, OLD, ALL)),
    "discarded, and saved again": Case(
        prepare_failed,
        discard,
        lambda d: whole_save(d, 100, OLD, ALL),
        stays=(100, OLD),
    ),
    "leftovers removed, and saved again": Case(
        prepare_failed,
        remove_leftovers_of_100,
        lambda d: whole_save(d, 100, OLD, ALL),
        stays=(100, OLD),
    ),
    "room made": Case(
        prepare_two,
        lambda d: save(d, 100, OLD, ALL),
        lambda d: make_room(d, draft(90, NEW)),
    ),
    "the same save twice": Case(
        prepare_two, lambda d: save(d, 100, OLD, ALL), lambda d: save(d, 100, OLD, ALL)
    ),
}
each_case = pytest.mark.parametrize("case", CASES)


def check(directory: Directory, case: Case, new_error: BaseException | None) -> None:
    """No step is without its files, the next generation's is there, and the next save works."""
    assert_all_good(directory)
    if case.stays is not None and new_error is None:
        step, token = case.stays
        assert state(directory)[step] == (token, None)
    assert whole_save(directory, 120, NEXT, ALL)
    assert_all_good(directory)


def forget() -> None:
    """Empties `memory://`, where each request takes the longer the more there is."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def run_case(kind: str, place: Path, case: Case, turns: Turns) -> None:
    directory = opened(kind, place)
    case.prepare(directory)
    errors = run_by_turns(directory, case.works, turns)
    unexpected = [e for e in errors if not isinstance(e, (ElasticZeroError, Stopped, type(None)))]
    assert not unexpected, unexpected
    check(directory, case, errors[1])
    forget()


def count_requests(kind: str, place: Path, case: Case) -> list[int]:
    turns = Turns([10**9])
    run_case(kind, place, case, turns)
    return turns.calls


@pytest.mark.usefixtures("in_one_thread")
@each_case
@each_kind
def test_frozen_at_each_request(kind: str, place: Path, case: str) -> None:
    """The next generation does all it does between two requests; then the old one goes on."""
    calls, _ = count_requests(kind, place, CASES[case])
    assert calls > 4
    for at in range(calls + 1):
        try:
            run_case(kind, place, CASES[case], Turns([at, 10**9]))
        except AssertionError as error:
            error.add_note(f"frozen before request {at}")
            raise


@pytest.mark.usefixtures("in_one_thread")
@each_case
@each_kind
def test_killed_at_each_request_of_the_next_generation(kind: str, place: Path, case: str) -> None:
    """The old one stops for good where it was frozen; whatever it left, the next save works."""
    calls, _ = count_requests(kind, place, CASES[case])
    for at in range(calls + 1):
        directory = opened(kind, place)
        CASES[case].prepare(directory)
        run_by_turns(directory, CASES[case].works, Turns([at, 10**9], killed=0))
        whole_save(directory, 120, NEXT, ALL)
        newest = catalog.newest_good(directory)
        assert newest == 120, at
        bad = [step for step, (_, error) in state(directory).items() if error is not None]
        assert not bad, (at, bad)
        forget()


def switches(place: Path, case: Case, kind: str) -> list[tuple[int, int]]:
    """Numbers of requests of the old generation, then of the next one, before both go on."""
    old, new = count_requests(kind, place, case)
    return list(itertools.product(range(old + 1), range(1, new + 1)))


@each_case
@pytest.mark.parametrize(("kind", "count"), [("object", 20), ("disk", 6)])
def test_some_orders_of_two_switches(kind: str, count: int, place: Path, case: str) -> None:
    orders = switches(place, CASES[case], kind)
    for first, second in random.Random(case).sample(orders, min(count, len(orders))):
        run_noted(kind, place, CASES[case], (first, second))


@pytest.mark.slow
@each_case
@each_kind
def test_all_orders_of_two_switches(kind: str, place: Path, case: str) -> None:
    for first, second in switches(place, CASES[case], kind):
        run_noted(kind, place, CASES[case], (first, second))


def run_noted(kind: str, place: Path, case: Case, counts: tuple[int, int]) -> None:
    try:
        run_case(kind, place, case, Turns([*counts, 10**9]))
    except AssertionError as error:
        error.add_note(f"switched after {counts}")
        raise


class Frozen(Faults):
    """Runs something else just before the `at`-th call into the operating system."""

    def __init__(self, root: Path, at: int, meanwhile: Callable[[], object]) -> None:
        super().__init__(root, at=at)
        self._meanwhile = meanwhile

    def _do_harm(self, number: int, *_: object) -> None:
        if number == self._at:
            self._own = True
            try:
                self._meanwhile()
            finally:
                self._own = False


def no_exchange(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(disk_module, "exchange", failing(22))


def no_exchange_no_links(patch: pytest.MonkeyPatch) -> None:
    no_exchange(patch)
    without_links(patch)


def run_frozen(place: Path, case: Case, at: int) -> list[str]:
    """Freezes the old generation before a call into the system; returns all that it makes."""
    directory = DiskDirectory(place / uuid.uuid4().hex)
    case.prepare(directory)
    old, new = case.works
    errors: list[BaseException | None] = [None]

    def meanwhile() -> None:
        try:
            new(directory)
        except ElasticZeroError as error:
            errors[0] = error

    faults = Frozen(directory.path, at, meanwhile)
    try:
        with suppress(ElasticZeroError), faults:
            old(directory)
        if at >= len(faults.calls):
            meanwhile()
        check(directory, case, errors[0])
    except AssertionError as error:
        error.add_note(f"frozen before call {at}, {faults.calls[at : at + 3]}, of {faults.calls}")
        raise
    return faults.calls


def each_disk() -> Iterator[Any]:
    """Every case on every kind of disk, of which `make test` plays a few."""
    for case in CASES:
        is_quick = case in ("beside", "removed and replaced")
        yield (case, lambda _: None) if is_quick else slow(case, lambda _: None)
        yield slow(case, no_exchange)
        yield (case, no_exchange_no_links) if is_quick else slow(case, no_exchange_no_links)


@pytest.mark.usefixtures("in_one_thread")
@pytest.mark.parametrize(("case", "lacks"), list(each_disk()))
def test_frozen_at_each_call_into_the_system(
    place: Path, monkeypatch: pytest.MonkeyPatch, case: str, lacks: Callable[..., None]
) -> None:
    """Each request to a disk is several calls; on NFS two names cannot be exchanged."""
    lacks(monkeypatch)
    never = 10**9
    calls = len(run_frozen(place, CASES[case], never))
    assert calls > 10
    for at in range(calls):
        run_frozen(place, CASES[case], at)


@each_kind
def test_removed_shards_withdraw_the_manifest(
    kind: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = opened(kind, place)
    storage = shards(directory, 100, OLD)
    names = [name for name in storage.names() if OLD in name]
    removed: list[str] = []
    before_the_manifest(monkeypatch, lambda: removed.extend(remove_loose(storage, OLD, names)))
    with pytest.raises(StorageError, match=r"the shards of 2 ranks \(0, 1\) of 2 were removed"):
        commit.commit(storage, draft(100, OLD), wait_s=0.0)
    assert removed == sorted(names)
    assert storage.names() == []


class Unanswered:
    """A step's files; some requests fail once, before or after they have their effect."""

    def __init__(self, storage: Storage, requests: set[str], *, done: bool) -> None:
        self._storage = storage
        self._requests = requests
        self._done = done

    def __getattr__(self, request: str) -> Any:
        make = getattr(self._storage, request)
        if not callable(make):
            return make

        def fail(*arguments: Any, **options: Any) -> Any:
            if request not in self._requests:
                return make(*arguments, **options)
            self._requests.remove(request)
            if self._done:
                make(*arguments, **options)
            raise StorageError(f"{request}: no answer") from TimeoutError("no answer in time")

        return fail


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("replacing", [False, True])
def test_a_manifest_is_withdrawn_though_requests_fail(
    replacing: bool, done: bool, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step was left committed without its files, for good."""
    directory = opened("disk", place)
    if replacing:
        assert whole_save(directory, 100, DAMAGED, ALL)
    shards(directory, 100, OLD)
    requests: set[str] = set()
    storage: Any = Unanswered(directory.step(step_directory(100)), requests, done=done)

    names = [draft(100, OLD).file_name(1)]
    removes = directory.step(step_directory(100))
    before_the_manifest(monkeypatch, lambda: remove_loose(removes, OLD, names))
    place_manifest = commit._place

    def place_and_fail(*arguments: Any) -> Any:
        placed = place_manifest(*arguments)
        requests.update({"names", "create_exclusive" if replacing else "remove"})
        return placed

    monkeypatch.setattr(commit, "_place", place_and_fail)
    with pytest.raises(StorageError, match="the shards of rank 1 of 2 were removed"):
        commit.commit(storage, draft(100, OLD), wait_s=0.0, replacing=replacing)
    assert not requests
    assert state(directory) == ({100: (DAMAGED, None)} if replacing else {})


@each_kind
def test_a_withdrawn_manifest_gives_the_replaced_one_back(
    kind: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = opened(kind, place)
    assert whole_save(directory, 100, DAMAGED, ALL)
    storage = shards(directory, 100, OLD)
    before_the_manifest(monkeypatch, lambda: storage.remove(draft(100, OLD).file_name(1)))
    with pytest.raises(StorageError, match=r"the shards of rank 1 of 2 were removed"):
        commit.commit(storage, draft(100, OLD), wait_s=0.0, replacing=True)
    assert state(directory) == {100: (DAMAGED, None)}


@each_kind
def test_a_reason_not_to_commit_leaves_no_manifest(kind: str, place: Path) -> None:
    directory = opened(kind, place)
    storage = shards(directory, 100, OLD)
    with pytest.raises(StorageError, match="its lease ran out: this step is not saved"):
        commit.commit(storage, draft(100, OLD), wait_s=0.0, may_not=lambda: "its lease ran out")
    assert state(directory) == {}


@each_kind
def test_the_files_of_a_committed_save_are_not_loose(kind: str, place: Path) -> None:
    directory = opened(kind, place)
    assert whole_save(directory, 100, OLD, ALL)
    storage = directory.step(step_directory(100))
    before = storage.names()
    names = [name for name in before if OLD in name]
    assert remove_loose(storage, OLD, names) == []
    assert storage.names() == before


@each_kind
def test_a_manifest_without_any_file_of_an_older_generation_goes(kind: str, place: Path) -> None:
    """Its committer was killed between the manifest and its look at the files."""
    directory = opened(kind, place)
    for step, token in ((100, OLD), (110, NEXT)):
        assert whole_save(directory, step, token, ALL)
        storage = directory.step(step_directory(step))
        for name in storage.names():
            if name != MANIFEST_NAME:
                storage.remove(name)
    assert whole_save(directory, 90, NEW, LAST)
    assert [info.step for info in catalog.steps(directory)] == [110, 90]


@each_kind
def test_a_save_that_may_be_committed_stays(kind: str, place: Path) -> None:
    """It lacks only its manifest, and its last file is new; one that lacks a shard goes."""
    directory = opened(kind, place)
    whole = shards(directory, 100, OLD)
    part = shards(directory, 110, OLD)
    part.remove(draft(110, OLD).file_name(0) + ".sums")
    assert whole_save(directory, 90, NEW, LAST)
    assert commit.commit(whole, draft(100, OLD), wait_s=0.0)
    assert part.names() == []
    assert_all_good(directory)
