"""The control tree of a job with TLS: what is sent, who takes part, and how it breaks."""

from __future__ import annotations

import signal
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress

import pytest
import torch.distributed as dist

from elasticzero.comm.control_tree import WIDTH, MaxTree
from elasticzero.comm.tls_stream import TlsPipe, TlsStream
from elasticzero.errors import is_peer_error
from elasticzero.security.certificates import Credentials, client_context, server_context
from tests.support.certificates import credentials_of
from tests.unit.comm.test_control_tree import joined, met

NUMBER = 0x1122334455667788
LONG_S = 60.0


@pytest.fixture(scope="module")
def credentials() -> Credentials:
    return credentials_of("a-token-of-the-job")


@pytest.mark.parametrize("size", [2, 3, 18, 40])
def test_ranks_agree_and_may_be_ahead(size: int, credentials: Credentials) -> None:
    with joined(size, tls=credentials) as (ranks, pool):
        for turn in range(5):
            for rank in ranks:
                rank.submit([turn])
            pairs = zip(ranks, range(size), strict=True)
            maxima = list(pool.map(lambda pair: pair[0].allreduce_max(pair[1]), pairs))
            assert maxima == [size - 1] * size
            assert [rank.collect()[0] for rank in ranks] == [turn] * size


@pytest.mark.parametrize(("size", "lost"), [(2, 0), (2, 1), (18, 0), (18, 17)])
def test_a_lost_rank_is_an_error_for_every_other(
    size: int, lost: int, credentials: Credentials
) -> None:
    with joined(size, tls=credentials) as (ranks, pool):
        ranks[lost].close()

        def error(rank: MaxTree) -> str:
            for _ in range(3):
                with pytest.raises(dist.DistNetworkError) as raised:
                    rank.allreduce_max(1)
                assert is_peer_error(raised.value)
            return str(raised.value)

        others = [rank for rank in ranks if rank is not ranks[lost]]
        assert all("could not agree" in text for text in pool.map(error, others))


class Relay:
    """Passes one connection on, and keeps what passes."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._target, self._ends = target, [self._listener]
        self.address = f"127.0.0.1 {self._listener.getsockname()[1]}"
        self.seen = bytearray()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        ends = [self._listener.accept()[0], socket.create_connection(self._target)]
        self._ends += ends
        for source, sink in (ends, reversed(ends)):
            threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(4096):
                self.seen += data
                sink.sendall(data)

    def close(self) -> None:
        for end in self._ends:
            end.close()


@pytest.mark.parametrize("encrypted", [False, True])
def test_numbers_are_encrypted(encrypted: bool, credentials: Credentials) -> None:
    options = {"tls": credentials} if encrypted else {}
    with met(2, **options) as (store, join_rank), ThreadPoolExecutor(1) as pool:
        top = pool.submit(join_rank, 0)
        host, port = store.get("t/tree/0").decode().split()
        with closing(Relay((host, int(port)))) as relay:
            store.set("t/tree/0", relay.address)
            ranks = [join_rank(1), top.result(LONG_S)]
            for rank in ranks:
                rank.submit([NUMBER])
            assert [rank.collect()[0] for rank in ranks] == [NUMBER] * 2
            assert len(relay.seen) > 2 * 8 * WIDTH
            assert (struct.pack("!q", NUMBER) in relay.seen) == (not encrypted)
            for rank in ranks:
                rank.close()


def test_a_rank_of_another_authority_is_refused(credentials: Credentials) -> None:
    """It has proven the secret, and does not get the certificate that goes with it."""
    with (
        met(2, tls=credentials) as (store, join_rank),
        met(2, tls=credentials_of("another-token-of-the-job")) as (other_store, join_other),
        ThreadPoolExecutor(1) as pool,
    ):
        top = pool.submit(join_rank, 0)
        other_store.set("t/tree/0", store.get("t/tree/0").decode())
        with pytest.raises(dist.DistNetworkError, match="rank 0 is not reached"):
            join_other(1)
        with pytest.raises(dist.DistNetworkError, match="no TLS with rank 1"):
            top.result(LONG_S)


@pytest.fixture
def pair(credentials: Credentials) -> Iterator[tuple[TlsStream, TlsStream]]:
    """Both ends of an encrypted connection."""
    ends = socket.socketpair()
    server = TlsStream(ends[0], server_context(credentials), server_side=True)
    context = client_context(credentials.authorities, credentials)
    client = TlsStream(ends[1], context, server_side=False)
    deadline_s = time.monotonic() + LONG_S
    with ThreadPoolExecutor(1) as pool, ExitStack() as opened:
        for end in (server, client):
            opened.callback(end.close)
        done = pool.submit(server.set_up, deadline_s)
        client.set_up(deadline_s)
        done.result(LONG_S)
        yield server, client


def test_a_descriptor_tells_of_each_message(pair: tuple[TlsStream, TlsStream]) -> None:
    """Two messages that came at once would else be one for `poll`."""
    import select

    server, client = pair
    for message in (b"first", b"second"):
        client.sendall(message)
    ready = select.poll()
    ready.register(server.fileno(), select.POLLIN)
    for message in (b"first", b"second"):
        assert ready.poll(1000 * LONG_S)
        assert server.recv(100) == message
    assert not ready.poll(0)


def test_a_closed_end_is_an_error_whatever_a_script_does_with_signals(
    pair: tuple[TlsStream, TlsStream],
) -> None:
    server, client = pair
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        with pytest.raises(OSError):
            for _ in range(100):
                client.sendall(b"x" * 1000)
        with pytest.raises(OSError):
            client.recv(1)
    finally:
        signal.signal(signal.SIGPIPE, before)


def test_nothing_is_sent_unencrypted_after_an_end_is_shut(
    pair: tuple[TlsStream, TlsStream],
) -> None:
    server, client = pair
    client.shutdown(socket.SHUT_RDWR)
    with pytest.raises(OSError):
        client.sendall(b"a secret")
    with pytest.raises((ConnectionResetError, ssl.SSLError)):
        server.recv(100)


def test_a_handshake_without_an_answer_ends_in_time(credentials: Credentials) -> None:
    ends = socket.socketpair()
    with ends[0], ends[1]:
        stream = TlsStream(ends[0], client_context(credentials.authorities), server_side=False)
        with pytest.raises(TimeoutError):
            stream.set_up(time.monotonic() + 0.05)


def test_a_pipe_takes_records_in_any_pieces(credentials: Credentials) -> None:
    """A connection that is served with others gives what has come, be it one byte."""
    pipe = TlsPipe(server_context(credentials))
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = client_context(credentials.authorities, credentials)
    client = context.wrap_bio(incoming, outgoing)
    for _ in range(2):
        with suppress(ssl.SSLWantReadError):
            client.do_handshake()
        for byte in outgoing.read():
            assert pipe.decrypt(bytes([byte])) == b""
        incoming.write(pipe.encrypt())
    client.write(b"a request")
    client.write(b", and another")
    assert b"".join(pipe.decrypt(bytes([byte])) for byte in outgoing.read()) == (
        b"a request, and another"
    )
    for size in (1, 1 << 14, 300_000):
        client.write(b"x" * size)
        assert pipe.decrypt(outgoing.read()) == b"x" * size
        incoming.write(pipe.encrypt(b"y" * size))
        answer = b""
        while len(answer) < size:
            answer += client.read(size)
        assert answer == b"y" * size
    with suppress(ssl.SSLWantReadError):
        client.unwrap()
    with pytest.raises(ConnectionResetError):
        pipe.decrypt(outgoing.read())


def test_a_pipe_says_why_it_takes_no_handshake(credentials: Credentials) -> None:
    pipe = TlsPipe(server_context(credentials))
    with pytest.raises(ssl.SSLError):
        pipe.decrypt(b"GET / HTTP/1.1\r\n\r\n")
    alert = 0x15
    assert pipe.encrypt()[:1] in (b"", bytes([alert]))
