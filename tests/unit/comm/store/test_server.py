"""Who is served by the ranks' store, and whom strangers keep waiting."""

from __future__ import annotations

import errno
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from elasticzero.comm.store import client, server
from elasticzero.comm.store.server import StoreServer, most_strangers
from elasticzero.comm.store.wire import (
    CHALLENGE,
    HEADER,
    RESPONSE,
    Message,
    Operation,
    Session,
    generation_secret,
    packed,
)
from elasticzero.errors import is_peer_error
from tests.support.rank_stores import SECRET, served

PATIENCE_S = 20.0
TCP_STORE_HELLO = struct.pack("=BI", 0, 0x3C85F7CE)
"""The first bytes of a client of torch's TCPStore."""
WRONG = generation_secret("the generation", "another job")


def ended(sock: socket.socket) -> bool:
    """Whether the other end closes the connection, perhaps with bytes of ours unread."""
    sock.settimeout(PATIENCE_S)
    with suppress(ConnectionError):
        while sock.recv(4096):
            pass
    return True


def received(sock: socket.socket) -> bytes:
    """All that comes until the other end closes."""
    data = b""
    sock.settimeout(PATIENCE_S)
    with suppress(ConnectionError):
        while part := sock.recv(4096):
            data += part
    return data


def response(challenge: bytes, secret: bytes, rank: int) -> bytes:
    _, nonce = CHALLENGE.unpack(challenge)
    return RESPONSE.pack(bytes(32), rank, Session.of(secret, nonce, bytes(32), rank).client_proof)


def with_wrong_byte(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def test_ranks_have_one_table() -> None:
    with served(3) as store:
        ranks = [store.first, store.rank(1), store.rank(2)]
        ranks[1].set("key", "of rank 1")
        assert [rank.get("key") for rank in ranks] == [b"of rank 1"] * 3
        assert [rank.add("count", 1) for rank in ranks] == [1, 2, 3]
        with ThreadPoolExecutor(3) as pool:
            waiting = [pool.submit(rank.multi_get, ["late", "key"]) for rank in ranks[:2]]
            ranks[2].set("late", b"\0\xff")
            assert [w.result(PATIENCE_S) for w in waiting] == [[b"\0\xff", b"of rank 1"]] * 2


@pytest.mark.parametrize(
    "says",
    [
        pytest.param(lambda challenge: b"", id="nothing, and goes"),
        pytest.param(lambda challenge: b"GET / HTTP/1.1\r\n\r\n" + bytes(90), id="HTTP"),
        pytest.param(lambda challenge: bytes(RESPONSE.size), id="a wrong proof"),
        pytest.param(lambda challenge: response(challenge, WRONG, 1), id="another job's"),
        pytest.param(lambda challenge: response(challenge, SECRET, 0), id="as rank 0"),
        pytest.param(lambda challenge: response(challenge, SECRET, 3), id="as no rank"),
        pytest.param(
            lambda challenge: with_wrong_byte(response(challenge, SECRET, 1)),
            id="one byte is wrong",
        ),
        pytest.param(
            lambda challenge: response(bytes(CHALLENGE.size), SECRET, 1), id="for another nonce"
        ),
        pytest.param(
            lambda challenge: HEADER.pack(9, b"") + packed(Message(Operation.COUNT)), id="a request"
        ),
        pytest.param(lambda challenge: TCP_STORE_HELLO + bytes(80), id="TCPStore"),
    ],
)
def test_a_stranger_gets_a_nonce_and_nothing_else(says: Callable[[bytes], bytes]) -> None:
    with served(3) as store:
        rank = store.rank(1)
        rank.set("key", "value")
        stranger = store.stranger()
        challenge = stranger.recv(CHALLENGE.size)
        with suppress(OSError):
            stranger.sendall(says(challenge))
            stranger.shutdown(socket.SHUT_WR)
        assert received(stranger) == b""
        assert rank.num_keys() == 1
        assert store.rank(2).get("key") == b"value"


def test_many_strangers_keep_no_rank_waiting() -> None:
    """200 connections say nothing, or half of something; a rank that comes then is served."""
    with served(3) as store:
        strangers = [store.stranger() for _ in range(200)]
        for number, stranger in enumerate(strangers):
            with suppress(OSError):  # the oldest are closed by then
                stranger.sendall(bytes(number % RESPONSE.size))
        began_s = time.monotonic()
        rank = store.rank(1)
        rank.set("key", "value")
        assert rank.get("key") == b"value"
        assert time.monotonic() - began_s < PATIENCE_S
        assert len(store.server._strangers) <= 3 + server.MAX_STRANGERS
        assert len(store.server._connections) <= 2 + 3 + server.MAX_STRANGERS
        assert all(len(c.received) < RESPONSE.size for c in store.server._strangers.values())


def test_the_stranger_that_came_first_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "most_strangers", lambda world_size: 1)
    with served(2) as store:
        late = store.stranger()
        challenge = late.recv(CHALLENGE.size)
        store.stranger()
        assert ended(late)
        assert challenge
        assert store.rank(1).add("n", 1) == 1


def test_a_connection_without_proof_is_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PROOF_S", 0.05)
    with served(2) as store:
        slow = store.stranger()
        slow.recv(CHALLENGE.size)
        slow.sendall(b"half")
        assert ended(slow)
        assert store.rank(1).num_keys() == 0


def test_nothing_listens_once_all_ranks_have_come() -> None:
    with served(3) as store:
        stranger = store.stranger()
        first, second = store.rank(1), store.rank(2)
        first.set("key", "value")
        store.rank(1).close()  # one that connects twice counts once
        second.wait(["key"])
        assert ended(stranger)
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", store.port), PATIENCE_S).close()
        assert first.get("key") == second.get("key") == b"value"


def test_a_world_of_one_never_listens() -> None:
    with served(1) as store:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", store.port), PATIENCE_S)
        assert store.first.add("n", 2) == 2


def test_a_rank_that_is_gone_is_forgotten() -> None:
    with served(3) as store, ThreadPoolExecutor(1) as pool:
        rank = store.rank(1)
        waits = pool.submit(rank.get, "never")
        other = store.rank(2)
        while not store.server._table._waits:
            other.num_keys()
        rank.close()
        with pytest.raises(dist.DistNetworkError):
            waits.result(PATIENCE_S)
        while store.server._table._waits:
            other.num_keys()
        other.set("never", "comes")


def test_a_wait_is_broken_by_the_end_of_the_server() -> None:
    """The kind of error is that of a lost peer, and all later calls have it too."""
    with served(2) as store, ThreadPoolExecutor(2) as pool:
        rank = store.rank(1)
        waits: list[Future[Any]] = [pool.submit(rank.get, "never")]
        waits.append(pool.submit(store.first.wait, ["never"]))
        while len(store.server._table._waits) < 2:
            time.sleep(0.001)
        store.server.close()
        for wait in waits:
            with pytest.raises(dist.DistNetworkError) as raised:
                wait.result(PATIENCE_S)
            assert is_peer_error(raised.value)
        for call in (rank.num_keys, store.first.num_keys):
            with pytest.raises(dist.DistNetworkError, match="rank 0 is lost"):
                call()


def test_a_server_that_is_silent_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "ANSWER_S", 0.05)
    ours, theirs = socket.socketpair()
    store = client.RankStore(client.Channel(ours), 0.05)
    for call in (store.num_keys, lambda: store.get("key"), lambda: store.set("key", "value")):
        with pytest.raises(dist.DistNetworkError):
            call()
    store.close()
    theirs.close()


def test_a_fault_of_the_server_ends_all_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with served(2) as store:
        rank = store.rank(1)
        monkeypatch.setattr(store.server._table, "ask", None)
        with pytest.raises(dist.DistNetworkError):
            rank.num_keys()
        store.server._thread.join(PATIENCE_S)
        assert "the ranks' store has failed" in caplog.text


@pytest.mark.parametrize("change", ["payload", "tag", "again", "two at once"])
def test_a_connection_that_another_one_writes_to_ends(change: str) -> None:
    """A seal covers each message and its place among those of the connection."""
    with served(3) as store:
        sock = socket.create_connection(("127.0.0.1", store.port), PATIENCE_S)
        challenge = sock.recv(CHALLENGE.size)
        sock.sendall(response(challenge, SECRET, 1))
        _, nonce = CHALLENGE.unpack(challenge)
        requests, _ = Session.of(SECRET, nonce, bytes(32), 1).seals()
        assert len(sock.recv(32)) == 32
        payload = packed(Message(Operation.SET, 0, (b"key", b"value")))
        frame = HEADER.pack(len(payload), requests.next_tag(payload)) + payload
        if change == "again":
            sock.sendall(frame)
            assert len(sock.recv(4096)) > HEADER.size
        frame = {
            "payload": frame[:-1] + b"f",
            "tag": frame[:5] + bytes([frame[5] ^ 1]) + frame[6:],
            "again": frame,
            "two at once": frame + frame,
        }[change]
        sock.sendall(frame)
        assert received(sock) == b""
        sock.close()
        assert store.rank(2).num_keys() == (1 if change == "again" else 0)


def test_what_listens_elsewhere_must_prove_itself() -> None:
    """A server that cannot prove that it is of the generation learns nothing from a rank."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        port = listener.getsockname()[1]
        for proof in (bytes(32), b""):
            connecting = pool.submit(client.connect, ("127.0.0.1", port), 1, SECRET, PATIENCE_S)
            sock, _ = listener.accept()
            sock.sendall(CHALLENGE.pack(b"EZS1", bytes(32)))
            answer = client.receive(sock, RESPONSE.size, None)
            assert SECRET not in answer
            sock.sendall(proof)
            sock.close()
            with pytest.raises(ConnectionError):
                connecting.result(PATIENCE_S)
        connecting = pool.submit(client.connect, ("127.0.0.1", port), 1, SECRET, PATIENCE_S)
        sock, _ = listener.accept()
        sock.sendall(b"HTTP" + bytes(32))
        with pytest.raises(ConnectionError, match="another service"):
            connecting.result(PATIENCE_S)
        sock.close()


def test_a_port_that_another_process_listens_on_is_an_error() -> None:
    with socket.socket() as first, socket.socket() as second:
        for sock in (first, second):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        first.bind(("127.0.0.1", 0))
        second.bind(first.getsockname())
        first.listen()
        with pytest.raises(OSError, match="in use"):
            StoreServer(second, 2, SECRET)


def test_connections_without_proof_take_a_share_of_the_open_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def limit(files: int) -> None:
        monkeypatch.setattr(resource, "getrlimit", lambda which: (files, files))

    limit(1024)
    assert most_strangers(2) == 2 + server.MAX_STRANGERS
    assert most_strangers(1000) == 256
    limit(resource.RLIM_INFINITY)
    assert most_strangers(1000) == 1000 + server.MAX_STRANGERS


class Full(socket.socket):
    """A listener of a process that can open no file for a while."""

    refusals = 3

    def accept(self) -> tuple[socket.socket, object]:
        if self.refusals:
            self.refusals -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_a_process_without_a_free_file_serves_again_once_it_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "FULL_PAUSE_S", 0.01)
    with served(3, Full) as store:
        assert store.rank(1).add("n", 1) == 1
        assert store.rank(2).add("n", 1) == 2
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", store.port), PATIENCE_S)


def test_nothing_of_it_is_left_after_its_end() -> None:
    with served(2) as store:
        rank = store.rank(1)
        rank.set_timeout(timedelta(seconds=5))
        assert any(thread.name == "elasticzero-store" for thread in threading.enumerate())
        store.first.close()
        store.first.close()
        with pytest.raises(dist.DistNetworkError, match="it is closed"):
            store.first.num_keys()
    assert not any(thread.name == "elasticzero-store" for thread in threading.enumerate())
