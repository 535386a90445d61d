"""What every store does, whatever holds its keys."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from elasticzero.errors import StoreUnavailable
from elasticzero.launcher.store.api import MAX_OPERATIONS, Condition, LeaseLost, Store
from tests.support.deadlines import patience
from tests.watching import DEADLINE_S, Told, has

Connect = Callable[[], Store]


def test_an_empty_store_reads_as_nothing_at_a_revision(store: Store) -> None:
    snapshot = store.read("")
    assert dict(snapshot.entries) == {}
    assert snapshot.revision >= 1


def test_a_write_is_read_with_its_revisions(store: Store) -> None:
    first = store.write({"world": b"1"})
    second = store.write({"world": b"2", "control": b""})
    assert first is not None and second is not None and second > first
    snapshot = store.read("")
    assert snapshot.revision >= second
    world, control = snapshot.entries["world"], snapshot.entries["control"]
    assert (world.value, world.create_revision, world.mod_revision) == (b"2", first, second)
    assert (control.value, control.create_revision, control.mod_revision) == (b"", second, second)
    assert world.key == "world" and not world.leased


def test_a_read_takes_what_begins_with_the_prefix(store: Store) -> None:
    store.write({"members/a": b"", "members/b": b"", "membership": b"", "world": b""})
    assert set(store.read("members/").entries) == {"members/a", "members/b"}
    assert set(store.read("member").entries) == {"members/a", "members/b", "membership"}
    assert set(store.read("world").entries) == {"world"}


def test_values_are_bytes_and_keys_are_any_text(store: Store) -> None:
    value = bytes(range(256)) * 100
    store.write({"reports/1/nœud-é": value})
    assert store.read("reports/1/nœud-é").entries["reports/1/nœud-é"].value == value


def test_entries_are_in_order_of_creation_also_with_a_limit(store: Store) -> None:
    """A limit takes the oldest."""
    for name in "cabd":
        store.write({f"members/{name}": b""})
    store.write({"members/c": b"again"})
    store.write({}, deletes=["members/a"])
    store.write({"members/a": b"new"})
    assert list(store.read("members/").entries) == [f"members/{n}" for n in "cbda"]
    assert list(store.read("members/", limit=2).entries) == ["members/c", "members/b"]
    assert len(store.read("members/", limit=9).entries) == 4


def test_how_many_there_were_at_a_revision(store: Store) -> None:
    store.write({"membership": b"", "world": b""})
    revisions = [store.write({f"members/{name}": b""}) or 0 for name in "cab"]
    store.write({"members/c": b"again"})
    assert [store.count("members/", revision) for revision in revisions] == [1, 2, 3]
    assert store.count("alarm/", revisions[-1]) == 0


def test_a_key_that_must_not_exist(store: Store) -> None:
    assert store.write({"k": b"1"}, conditions=[Condition(key="k", mod_revision=0)])
    assert store.write({"k": b"2"}, conditions=[Condition(key="k", mod_revision=0)]) is None
    assert store.write({"k": b"2"}, conditions=[Condition(key="k", create_revision=0)]) is None
    assert store.read("k").entries["k"].value == b"1"


def test_a_condition_on_the_last_write(store: Store) -> None:
    first = store.write({"k": b"1"})
    second = store.write({"k": b"2"}, conditions=[Condition(key="k", mod_revision=first)])
    assert second is not None
    assert store.write({"k": b"3"}, conditions=[Condition(key="k", mod_revision=first)]) is None
    assert store.write({"k": b"4"}, conditions=[Condition(key="k", mod_revision=second)])


def test_a_condition_on_the_creation_of_another_key(store: Store) -> None:
    """How a leader binds its writes to its own incarnation."""
    born = store.write({"members/a": b""})
    store.write({"members/a": b"changed"})
    alive = Condition(key="members/a", create_revision=born)
    assert store.write({"world": b"1"}, conditions=[alive])
    store.write({}, deletes=["members/a"])
    assert store.write({"world": b"2"}, conditions=[alive]) is None
    store.write({"members/a": b"reborn"})
    assert store.write({"world": b"2"}, conditions=[alive]) is None


def test_both_revisions_of_one_condition_must_hold(store: Store) -> None:
    born = store.write({"k": b"1"})
    last = store.write({"k": b"2"})
    both = Condition(key="k", create_revision=born, mod_revision=last)
    wrong = Condition(key="k", create_revision=last, mod_revision=last)
    assert store.write({"x": b""}, conditions=[wrong]) is None
    assert store.write({"x": b""}, conditions=[both])


def test_a_write_is_all_or_nothing(store: Store) -> None:
    store.write({"old/1": b"", "k": b""})
    refused = store.write(
        {"a": b"", "b": b""},
        deletes=["old/"],
        conditions=[Condition(key="none", mod_revision=0), Condition(key="k", mod_revision=0)],
    )
    assert refused is None
    assert set(store.read("").entries) == {"old/1", "k"}
    revision = store.write({"a": b"", "b": b""}, deletes=["old/", "k"])
    entries = store.read("").entries
    assert set(entries) == {"a", "b"}
    assert {e.mod_revision for e in entries.values()} == {revision}


def test_deleting_a_key_spares_what_begins_like_it(store: Store) -> None:
    store.write({"alarm/1": b"", "alarm/10": b"", "alarm": b""})
    store.write({}, deletes=["alarm/1"])
    assert set(store.read("alarm").entries) == {"alarm/10", "alarm"}
    store.write({}, deletes=["alarm/"])
    assert set(store.read("alarm").entries) == {"alarm"}
    assert store.write({}, deletes=["alarm/", "nothing"]) is not None


def test_what_no_transaction_can_hold_is_refused(store: Store) -> None:
    with pytest.raises(ValueError, match="both puts and deletes 'a/b'"):
        store.write({"a/b": b""}, deletes=["a/"])
    with pytest.raises(ValueError, match="129 puts"):
        store.write({str(i): b"" for i in range(MAX_OPERATIONS + 1)})
    with pytest.raises(ValueError, match="names no revision"):
        Condition(key="k")
    assert store.write({str(i): b"" for i in range(MAX_OPERATIONS)})


def test_of_writers_on_the_same_condition_one_wins(connect: Connect) -> None:
    stores = [connect() for _ in range(4)]
    for key in ("round/1", "round/2", "round/3"):
        start = threading.Barrier(len(stores))
        won: list[str] = []

        def race(
            store: Store, name: str, key: str, start: threading.Barrier, won: list[str]
        ) -> None:
            start.wait(DEADLINE_S)
            absent = Condition(key=key, mod_revision=0)
            if store.write({key: name.encode()}, conditions=[absent]) is not None:
                won.append(name)

        threads = [
            threading.Thread(target=race, args=(store, str(i), key, start, won))
            for i, store in enumerate(stores)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert len(won) == 1
        assert stores[0].read(key).entries[key].value == won[0].encode()


def test_a_watch_tells_what_is_and_then_each_change_in_order(connect: Connect) -> None:
    watcher, writer = connect(), connect()
    writer.write({"k/a": b"0", "other": b""})
    told = Told()
    watcher.watch("k/", told)
    told.until(has(k__a=b"0"))
    revision = 0
    for i in range(1, 6):
        revision = writer.write({"k/a": str(i).encode()}) or 0
    writer.write({"k/b": b""})
    writer.write({"other": b"changed"})
    told.until(has(k__a=b"5", k__b=b""))
    writer.write({}, deletes=["k/"])
    last = told.until(lambda s: s.revision > revision and not s.entries)
    assert dict(last.entries) == {}
    revisions = [snapshot.revision for snapshot in told.snapshots]
    assert revisions == sorted(set(revisions))
    values = [int(v["k/a"]) for v in told.values() if "k/a" in v]
    assert values == sorted(values)
    assert len(told.threads) == 1


def test_a_watch_of_nothing_tells_that_first(store: Store) -> None:
    told = Told()
    store.watch("empty/", told)
    assert dict(told.until(lambda _: True).entries) == {}


def test_a_watch_tells_one_transaction_at_once(connect: Connect) -> None:
    watcher, writer = connect(), connect()
    writer.write({"k/a": b"1", "k/b": b"1"})
    told = Told()
    watcher.watch("k/", told)
    told.until(has(k__a=b"1", k__b=b"1"))
    writer.write({"k/a": b"2", "k/c": b"2"}, deletes=["k/b"])
    told.until(has(k__a=b"2", k__c=b"2"))
    assert told.values() == [
        {"k/a": b"1", "k/b": b"1"},
        {"k/a": b"2", "k/c": b"2"},
    ]


def test_a_closed_watch_tells_nothing_more(connect: Connect) -> None:
    store = connect()
    told, others = Told(), Told()
    subscription = store.watch("k", told)
    store.watch("k", others)
    told.until(lambda _: True)
    subscription.close()
    before = len(told.snapshots)
    store.write({"k": b"1"})
    others.until(has(k=b"1"))
    assert len(told.snapshots) == before
    subscription.close()


def test_watches_of_one_store_do_not_mix(connect: Connect) -> None:
    """Some are opened and closed while changes come."""
    watcher, writer = connect(), connect()
    tolds = {name: Told() for name in "abcdef"}
    for n, (name, told) in enumerate(tolds.items()):
        passing = watcher.watch(f"{name}/", Told())
        writer.write({f"{name}/k": b"0"})
        watcher.watch(f"{name}/", told)
        passing.close()
        for other in "abcdef"[: n + 1]:
            writer.write({f"{other}/k": str(n).encode()})
    for name, told in tolds.items():
        told.until(lambda s: [e.value for e in s.entries.values()] == [b"5"])
        assert {key for values in told.values() for key in values} <= {f"{name}/k"}
        revisions = [snapshot.revision for snapshot in told.snapshots]
        assert revisions == sorted(set(revisions))


def test_a_watch_tells_entries_in_order_of_creation(connect: Connect) -> None:
    watcher, writer = connect(), connect()
    told = Told()
    watcher.watch("k/", told)
    told.until(has())
    writer.write({"k/z": b"", "k/b": b""})
    assert list(told.until(has(k__z=b"", k__b=b"")).entries) == ["k/b", "k/z"]
    writer.write({"k/a": b""})
    writer.write({"k/b": b"again"})
    writer.write({}, deletes=["k/z"])
    writer.write({"k/z": b"new"})
    last = told.until(has(k__a=b"", k__b=b"again", k__z=b"new"))
    assert list(last.entries) == ["k/b", "k/a", "k/z"]


def test_a_watch_may_begin_another_and_close_itself(store: Store) -> None:
    told = Told()
    closed = threading.Event()

    def react(snapshot: object) -> None:
        store.watch("answer", told)
        subscription.close()
        closed.set()

    ready = threading.Event()

    def react_when_ready(snapshot: object) -> None:
        ready.wait(DEADLINE_S)
        react(snapshot)

    subscription = store.watch("question", react_when_ready)
    ready.set()
    store.write({"answer": b"1"})
    told.until(has(answer=b"1"))
    assert closed.wait(DEADLINE_S)


def test_a_renewed_lease_outlives_its_ttl_not_its_owner(connect: Connect) -> None:
    owner, watcher = connect(), connect()
    lease = owner.lease(2)
    assert owner.write({"members/a": b"", "kept": b""}, lease=lease)
    assert watcher.read("members/a").entries["members/a"].leased
    told, markers = Told(), Told()
    watcher.watch("members/", told)
    told.until(has(members__a=b""))
    marker = connect().lease(2)
    watcher.write({"marker": b""}, lease=marker)
    watcher.watch("marker", markers)
    markers.until(has(marker=b""))
    marker.close(revoke=False)
    markers.until(lambda s: not s.entries)  # a TTL has passed
    assert set(watcher.read("").entries) == {"members/a", "kept"}
    assert not lease.lost
    asked_s = time.monotonic()
    while lease.confirmed_s < asked_s:
        assert time.monotonic() < asked_s + DEADLINE_S, "the lease is not kept alive"
        time.sleep(0.02)
    owner.close()
    told.until(lambda s: not s.entries)
    assert dict(watcher.read("").entries) == {}


def test_a_revoked_lease_takes_its_keys_along_at_once(connect: Connect) -> None:
    owner, watcher = connect(), connect()
    lease = owner.lease(60)
    owner.write({"members/a": b""}, lease=lease)
    owner.write({"members/b": b""})
    lease.close(revoke=True)
    assert set(watcher.read("").entries) == {"members/b"}


def test_a_write_under_a_lease_that_is_gone_writes_nothing(store: Store) -> None:
    lease = store.lease(60)
    lease.close(revoke=True)
    with pytest.raises(LeaseLost, match="take a new one"):
        store.write({"k": b"", "l": b""}, lease=lease)
    assert dict(store.read("").entries) == {}


def test_a_key_written_without_its_lease_outlives_it(store: Store) -> None:
    lease = store.lease(60)
    store.write({"k": b"1"}, lease=lease)
    store.write({"k": b"2"})
    lease.close(revoke=True)
    assert store.read("k").entries["k"].value == b"2"
    assert not store.read("k").entries["k"].leased


def test_a_closed_store_says_so(store: Store) -> None:
    store.write({"k": b""})
    assert store.reachable and store.last_outage_end_s == 0.0
    store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        store.read("k")
    with pytest.raises(StoreUnavailable, match="closed"):
        store.write({"k": b""})


Losing = tuple[Connect, Callable[[], None]]


def test_a_store_that_lost_its_data_says_so_and_is_followed_anew(losing: Losing) -> None:
    """A watch stayed at the revision that it knew, and so told nothing of the new data."""
    connect, lose = losing
    store, other, told = connect(), connect(), Told()
    for value in (b"1", b"2", b"3"):
        store.write({"k/a": value, "k/b": value})
    lease = store.lease(10)
    store.write({"members/a": b""}, lease=lease)
    store.watch("k/", told)
    told.until(has(k__a=b"3", k__b=b"3"))
    assert store.history.number == 0
    lose()
    deadline_s = time.monotonic() + patience(DEADLINE_S)
    while not store.history.number:
        assert time.monotonic() < deadline_s, "the loss was not noticed"
        with suppress(StoreUnavailable):
            assert not store.read("k/").entries
    assert store.history.number == 1 and store.history.reason
    assert told.until(lambda snapshot: not snapshot.entries).history == 1
    other.write({"k/a": b"new"})
    state = told.until(has(k__a=b"new"))
    assert (state.history, state.entries["k/a"].value) == (1, b"new")
    while not lease.lost:
        assert time.monotonic() < deadline_s, "the lease of the lost data seems to live"
        time.sleep(0.02)
    with pytest.raises(LeaseLost):
        store.write({"members/a": b""}, lease=lease)


def test_a_condition_may_name_the_value_too(store: Store) -> None:
    """A revision alone may be that of another history."""
    revision = store.write({"world": b"1"})
    wrong = Condition(key="world", mod_revision=revision, value=b"2")
    right = Condition(key="world", mod_revision=revision, value=b"1")
    assert store.write({"world": b"3"}, conditions=[wrong]) is None
    assert store.write({"world": b"3"}, conditions=[right]) is not None


def test_what_a_caller_knows_begins_another_history_once(store: Store) -> None:
    store.write({"k": b"1"})
    assert store.history.begin("the record is gone", 0)
    assert not store.history.begin("the record is gone", 0)
    assert store.history.number == 1
    assert store.read("k").history == 1
    assert store.history.reason == "the record is gone"
