"""How ranks agree: the tree, its messages, its connections' ends, and strangers at its door."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from elasticzero.comm import control_tree
from elasticzero.comm.barriers import LEAST
from elasticzero.comm.control_tree import WIDTH, MaxTree, join, relatives
from elasticzero.comm.rendezvous import RankInfo
from elasticzero.errors import is_peer_error

SIZES = [1, 2, 3, 17, 18, 40]
INFO = RankInfo(rank=0, world_size=3, token="t", password="p")
HASH = control_tree._digest(INFO)


@pytest.mark.parametrize("size", [1, 2, 16, 17, 18, 300, 6400])
def test_the_tree_reaches_each_rank_once_and_is_flat(size: int) -> None:
    below = [rank for parent in range(size) for rank in relatives(parent, size)[1]]
    assert sorted(below) == list(range(1, size))
    for rank in range(size):
        above, others = relatives(rank, size)
        assert all(relatives(other, size)[0] == rank for other in others)
        steps = 0
        while above is not None:
            above, steps = relatives(above, size)[0], steps + 1
        assert steps <= 4


@contextmanager
def met(size: int, **options: Any) -> Iterator[tuple[dist.Store, Callable[[int], MaxTree]]]:
    """A store, and what joins a rank of this process."""
    store = dist.HashStore()
    plain = RankInfo(rank=0, world_size=size, token="t", password="p")

    def join_rank(rank: int) -> MaxTree:
        return join(replace(plain, rank=rank, **options), store)

    yield store, join_rank


@contextmanager
def joined(size: int, **options: Any) -> Iterator[tuple[list[MaxTree], ThreadPoolExecutor]]:
    with met(size, **options) as (_, join_rank), ThreadPoolExecutor(size) as pool:
        ranks = list(pool.map(join_rank, range(size)))
        try:
            yield ranks, pool
        finally:
            for rank in ranks:
                rank.close()


@pytest.mark.parametrize("size", SIZES)
def test_all_take_the_greatest_of_each_number(size: int) -> None:
    with joined(size) as (ranks, pool):
        for turn in range(20):
            rank_numbers = [
                [(rank * 7 + turn) % size, -rank, LEAST + 1 + rank] for rank in range(size)
            ]
            for rank, numbers in zip(ranks, rank_numbers, strict=True):
                rank.submit(numbers)
            most = (*map(max, zip(*rank_numbers, strict=True)), *[LEAST] * (WIDTH - 3))
            assert list(pool.map(MaxTree.collect, ranks)) == [most] * size


@pytest.mark.parametrize("size", SIZES)
def test_what_is_taken_later_is_what_was_given_then(size: int) -> None:
    with joined(size) as (ranks, pool):
        for rank in ranks:
            rank.submit([100])
        pairs = zip(ranks, range(size), strict=True)
        assert (
            list(pool.map(lambda pair: pair[0].allreduce_max(pair[1]), pairs)) == [size - 1] * size
        )
        for rank in ranks:
            rank.submit([200])
        assert [rank.collect()[0] for rank in ranks] == [100] * size
        assert [maxima[0] for maxima in pool.map(MaxTree.collect, ranks)] == [200] * size


@pytest.mark.parametrize(("size", "lost"), [(2, 0), (2, 1), (40, 0), (40, 1), (40, 39)])
def test_a_lost_rank_is_an_error_for_every_other(size: int, lost: int) -> None:
    with joined(size) as (ranks, pool):
        ranks[lost].close()

        def error(rank: MaxTree) -> str:
            for _ in range(3):  # it stays so
                with pytest.raises(dist.DistNetworkError) as raised:
                    rank.allreduce_max(1)
                assert is_peer_error(raised.value)
            return str(raised.value)

        others = [rank for rank in ranks if rank is not ranks[lost]]
        assert all("could not agree" in text for text in pool.map(error, others))


def passing_on() -> bool:
    return any(thread.name == "elasticzero-agree" for thread in threading.enumerate())


@pytest.mark.parametrize("submits", [False, True])
def test_nothing_of_it_is_left_after_its_end(submits: bool) -> None:
    up, down = socket.socketpair()
    top = MaxTree(None, [down])
    assert passing_on()
    if submits:
        top.submit([1])  # and waits for the other
    top.close()
    top.close()
    with pytest.raises(dist.DistNetworkError):
        top.collect()
    assert not passing_on()
    assert down.fileno() == -1
    assert up.recv(1) == b""
    up.close()


def _closed(connection: socket.socket) -> bool:
    """By the other end, with bytes of ours unread or not; what it has sent is passed over."""
    with suppress(ConnectionResetError):
        while connection.recv(100):
            pass
    return True


def _unanswered(connection: socket.socket) -> bool:
    """Closed by the other end without another byte."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    "says",
    [
        pytest.param(b"GET / HTTP/1.1\r\n\r\n" + bytes(100), id="another protocol"),
        pytest.param(b"", id="nothing, and goes"),
        pytest.param(None, id="nothing, and stays"),
        pytest.param(struct.pack("!32s32sI", bytes(32), bytes(32), 1), id="a wrong proof"),
        pytest.param(struct.pack("!32sI", HASH, 1), id="what the release before sends"),
    ],
)
def test_a_stranger_is_refused_and_harms_nobody(
    says: bytes | None,
) -> None:
    with met(2) as (store, join_rank), ThreadPoolExecutor(1) as pool:
        top = pool.submit(join_rank, 0)
        host, port = store.get("t/tree/0").decode().split()
        with socket.create_connection((host, int(port))) as stranger:
            with suppress(OSError):  # it may be shown the door by then
                if says is not None:
                    stranger.sendall(says)
                    stranger.shutdown(socket.SHUT_WR)
            ranks = [join_rank(1), top.result()]
            for rank in ranks:
                rank.submit([1])
            assert [rank.collect()[0] for rank in ranks] == [1, 1]
            stranger.settimeout(5)
            assert _closed(stranger)
        for rank in ranks:
            rank.close()


def test_a_child_that_computes_hides_no_dead_one() -> None:
    with joined(3) as (ranks, pool):
        top = pool.submit(ranks[0].allreduce_max, 1)
        ranks[2].close()  # while rank 1 gives nothing
        with pytest.raises(dist.DistNetworkError):
            top.result(timeout=20)


def hello_of(
    connection: socket.socket, rank: int, nonce: bytes | None = None, info: RankInfo = INFO
) -> bytes:
    """What a rank says on a connection to rank 0 once it has received the nonce there."""
    received = connection.recv(32, socket.MSG_WAITALL)
    nonces = (nonce or received, b"n" * 32)
    proven = control_tree._proof(info, "below", (rank, 0), nonces)
    return struct.pack("!32s32sI", nonces[1], proven, rank)


def test_a_proof_is_of_one_connection_one_rank_and_one_generation() -> None:
    """It was a hash of the generation's token and the job's: whoever read it could say it again."""
    with met(3) as (store, join_rank), ThreadPoolExecutor(1) as pool, ExitStack() as opened:
        top = pool.submit(join_rank, 0)
        host, port = store.get("t/tree/0").decode().split()

        def connect() -> socket.socket:
            connection = socket.create_connection((host, int(port)), timeout=20)
            return opened.enter_context(connection)

        first = connect()
        first.sendall(hello := hello_of(first, 1))
        answer = first.recv(32, socket.MSG_WAITALL)
        assert len(answer) == 32
        wrong: tuple[Callable[[socket.socket], bytes], ...] = (
            lambda again: again.recv(32, socket.MSG_WAITALL) and hello,
            lambda again: hello_of(again, 2)[:-4] + struct.pack("!I", 1),
            lambda again: hello_of(again, 1)[:-4] + struct.pack("!I", 2),
            lambda again: hello_of(again, 2, nonce=b"n" * 32),
            lambda again: hello_of(again, 2, info=replace(INFO, token="u")),
            lambda again: hello_of(again, 2, info=replace(INFO, password="q")),
        )
        for make in wrong:
            again = connect()
            again.sendall(make(again))
            assert _unanswered(again)
        twice = connect()
        twice.sendall(hello_of(twice, 1))
        assert _closed(twice), "the rank is there already"
        other = join_rank(2)
        for rank in (other, top.result(timeout=20)):
            rank.close()


def test_a_rank_below_joins_no_process_without_the_secret() -> None:
    """Anybody may write into the store of the rendezvous where the rank above would be."""
    listening = socket.create_server(("127.0.0.1", 0))
    with met(2) as (store, join_rank), ThreadPoolExecutor(1) as pool, listening:
        store.set("t/tree/0", f"127.0.0.1 {listening.getsockname()[1]}")
        below = pool.submit(join_rank, 1)
        with listening.accept()[0] as connection:
            connection.sendall(bytes(32))
            hello = connection.recv(68, socket.MSG_WAITALL)
            connection.sendall(hello[32:64])
            with pytest.raises(dist.DistNetworkError, match="does not prove that it is"):
                below.result(timeout=20)


def test_the_release_before_is_met_as_it_expects() -> None:
    """A world says whether one of its nodes may be of that release."""
    old = replace(INFO, world_size=2, proofs=False)
    store = dist.HashStore()
    with ThreadPoolExecutor(1) as pool:
        top = pool.submit(join, old, store)
        host, port = store.get("t/tree/0").decode().split()
        with socket.create_connection((host, int(port)), timeout=20) as below:
            below.sendall(struct.pack("!32sI", HASH, 1))
            rank = top.result(timeout=20)
            below.sendall(struct.pack(f"!{WIDTH}q", *range(WIDTH)))
            assert rank.allreduce_max(3) == 3
            assert struct.unpack(f"!{WIDTH}q", below.recv(8 * WIDTH))[:2] == (3, 1)
            rank.close()
        with socket.create_server(("127.0.0.1", 0)) as above:
            store.set("t/tree/0", f"127.0.0.1 {above.getsockname()[1]}")
            rank = join(replace(old, rank=1), store)
            with above.accept()[0] as connection:
                assert connection.recv(100) == struct.pack("!32sI", HASH, 1)
            rank.close()


def test_who_says_slowly_who_it_is_is_waited_for() -> None:
    with met(3) as (store, join_rank), ThreadPoolExecutor(2) as pool:
        top = pool.submit(join_rank, 0)
        host, port = store.get("t/tree/0").decode().split()
        with socket.create_connection((host, int(port))) as slow:
            hello = hello_of(slow, 2)
            slow.sendall(hello[:5])
            other = join_rank(1)
            slow.sendall(hello[5:])
            top.result(timeout=20).close()
        other.close()


def test_a_number_that_is_too_great_is_refused_where_it_is_given() -> None:
    with joined(2) as (ranks, _):
        for rank in ranks:
            with pytest.raises(struct.error):
                rank.submit([1 << 70])


def test_many_who_say_nothing_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_tree, "MAX_UNAUTHENTICATED", 3)
    with met(2) as (store, join_rank), ThreadPoolExecutor(1) as pool, ExitStack() as strangers:
        top = pool.submit(join_rank, 0)
        host, port = store.get("t/tree/0").decode().split()
        for _ in range(10):
            strangers.enter_context(socket.create_connection((host, int(port))))
        for rank in (join_rank(1), top.result(timeout=20)):
            rank.close()


def test_a_rank_listens_where_the_others_reach_it_alone() -> None:
    """It listened at every address of its machine, also of public interfaces."""
    with met(2) as (store, join_rank), ThreadPoolExecutor(1) as pool:
        top = pool.submit(join_rank, 0)
        host, port = store.get("t/tree/0").decode().split()
        assert host == "127.0.0.1"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", int(port)))
        for rank in (join_rank(1), top.result(timeout=20)):
            rank.close()


def test_the_rank_that_does_not_come_is_named() -> None:
    with met(3, connect_timeout_s=2) as (_, join_rank), ThreadPoolExecutor(2) as pool:
        top = pool.submit(join_rank, 0)
        other = pool.submit(join_rank, 2)
        with pytest.raises(dist.DistNetworkError, match=r"rank 1 did not connect in 1 s"):
            top.result()
        other.result().close()


def test_a_rank_above_that_is_not_reached_is_named() -> None:
    with met(2, connect_timeout_s=1) as (store, join_rank):
        with socket.create_server(("127.0.0.1", 0)) as gone:
            port = gone.getsockname()[1]
        store.set("t/tree/0", f"127.0.0.1 {port}")
        with pytest.raises(dist.DistNetworkError, match=rf"rank 0 is not .*:{port}: .*efused"):
            join_rank(1)
