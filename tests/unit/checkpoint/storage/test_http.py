"""An agent's HTTP server as a place to read from, beside a disk; and what harms such reads."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest

from elasticzero.checkpoint.storage.base import Readable, read_small
from elasticzero.checkpoint.storage.disk import DiskStorage
from elasticzero.checkpoint.storage.http import HttpStorage
from elasticzero.checkpoint.storage.signed_requests import (
    SCHEME,
    SignedRequest,
    challenge,
    credentials_in,
)
from elasticzero.errors import StorageError, UserError
from tests.lost_hosts import Loss, lost_host

TOKEN = "secret"
NONCE = "0" * 64
CONTENT = bytes(range(256)) * 40
LONG_S = 60.0
"""A read that waits for so long has not been ended."""


class Handler(BaseHTTPRequestHandler):
    """Serves the files of `server.root` by single ranges, as an agent does."""

    protocol_version = "HTTP/1.1"
    server: Server

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        self.server.connections.add(self.client_address)
        path = self.server.root / self.path.rsplit("/", 1)[-1]
        if not self.is_proven():
            self.reply(401)
        elif not path.is_file():
            self.reply(404, self.server.refusal, with_body=with_body)
        elif not (asked := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))):
            self.reply(200, path.read_bytes(), with_body=with_body)
        elif int(asked[1]) >= path.stat().st_size:
            self.reply(416)
        else:
            body = path.read_bytes()[int(asked[1]) : int(asked[2]) + 1]
            self.server.fault(self, int(asked[1]), body)

    def is_proven(self) -> bool:
        scheme, _, text = self.headers.get("Authorization", "").partition(" ")
        credentials = credentials_in(text)
        request = SignedRequest(
            method=self.command, target=self.path, byte_range=self.headers.get("Range", "")
        )
        return (
            scheme == SCHEME
            and credentials is not None
            and credentials.proof == request.prove(TOKEN, NONCE, credentials.count)
        )

    def reply(self, status: int, body: bytes = b"", *, with_body: bool = True, at: int = 0) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if status == 401:
            self.send_header("WWW-Authenticate", challenge(NONCE))
        if status == 206:
            self.send_header("Content-Range", f"bytes {at}-{at + len(body) - 1}/*")
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.root = root
        self.connections: set[object] = set()
        self.fault: Callable[[Handler, int, bytes], None] = well
        self.refusal = b""
        self.stuck = threading.Event()
        self.go_on = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/snapshots/3/7"


def well(handler: Handler, at: int, body: bytes) -> None:
    handler.reply(206, body, at=at)


def well_and_close(handler: Handler, at: int, body: bytes) -> None:
    well(handler, at, body)
    handler.close_connection = True


def whole_file_instead(handler: Handler, at: int, body: bytes) -> None:
    handler.reply(200, CONTENT)


def other_range(handler: Handler, at: int, body: bytes) -> None:
    handler.reply(206, body, at=at + 1)


def cut_off(handler: Handler, at: int, body: bytes) -> None:
    handler.send_response(206)
    handler.send_header("Content-Length", str(len(body)))
    handler.send_header("Content-Range", f"bytes {at}-{at + len(body) - 1}/*")
    handler.end_headers()
    handler.wfile.write(body[:-1])
    handler.close_connection = True


def hang_up(handler: Handler, at: int, body: bytes) -> None:
    handler.close_connection = True


def get_stuck(handler: Handler, at: int, body: bytes) -> None:
    """In the middle of the answer, or before it where one byte is asked for."""
    if len(body) > 1:
        handler.send_response(206)
        handler.send_header("Content-Length", str(len(body)))
        handler.send_header("Content-Range", f"bytes {at}-{at + len(body) - 1}/*")
        handler.end_headers()
        handler.wfile.write(body[:-1])
    handler.server.stuck.set()
    handler.server.go_on.wait()
    handler.close_connection = True


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), name="test-http")
        thread.start()
        yield server
        server.go_on.set()
        server.shutdown()
        thread.join()


@pytest.fixture(params=["disk", "http"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Readable]:
    (tmp_path / "file").write_bytes(CONTENT)
    (tmp_path / "empty").write_bytes(b"")
    if request.param == "disk":
        yield DiskStorage(tmp_path)
        return
    storage = HttpStorage(request.getfixturevalue("server").url + "/", TOKEN)
    yield storage
    storage.close()


def read(place: Readable, name: str, start: int, count: int) -> bytes:
    data = bytearray(count)
    return bytes(data[: place.read_into(name, start, memoryview(data))])


def test_sizes(place: Readable) -> None:
    assert (place.size("file"), place.size("empty")) == (len(CONTENT), 0)


@pytest.mark.parametrize(
    ("start", "count"), [(0, 1), (0, len(CONTENT)), (1000, 3000), (len(CONTENT) - 1, 1), (5, 0)]
)
def test_a_range_is_read(place: Readable, start: int, count: int) -> None:
    assert read(place, "file", start, count) == CONTENT[start : start + count]


def test_a_range_past_the_end_is_cut_short(place: Readable) -> None:
    assert read(place, "file", len(CONTENT) - 10, 100) == CONTENT[-10:]
    assert read(place, "file", len(CONTENT), 100) == b""
    assert read(place, "file", 10**9, 100) == b""
    assert read(place, "empty", 0, 100) == b""
    assert read(place, "file", 0, 3) == CONTENT[:3]


def test_a_file_that_is_not_there(place: Readable) -> None:
    with pytest.raises(FileNotFoundError):
        place.size("nothing")
    with pytest.raises(FileNotFoundError):
        read(place, "nothing", 0, 1)
    assert read(place, "file", 0, 1) == CONTENT[:1]


def test_a_small_file_is_read_whole_and_a_large_one_refused(place: Readable) -> None:
    assert read_small(place, "file", len(CONTENT)) == CONTENT
    with pytest.raises(StorageError, match="file has 10240 bytes, more than the 100"):
        read_small(place, "file", 100)


def test_reads_share_one_connection_and_survive_its_end(server: Server) -> None:
    (server.root / "file").write_bytes(CONTENT)
    storage = HttpStorage(server.url, TOKEN)
    for _ in range(3):
        assert read(storage, "file", 5, 5) == CONTENT[5:10]
    assert len(server.connections) == 1
    with pytest.raises(FileNotFoundError):
        storage.size("gone")
    storage.close()
    assert read(storage, "file", 5, 5) == CONTENT[5:10]
    storage.close()


@pytest.mark.parametrize("text", [b"", b"no such file\n", b"x" * (1 << 16)])
def test_a_missing_file_is_asked_for_again_over_the_same_connection(
    server: Server, text: bytes
) -> None:
    """A node that waited for a snapshot's file connected anew for each question. An answer that is
    longer than a refusal is not read to its end."""
    storage = HttpStorage(server.url, TOKEN)
    server.refusal = text
    for _ in range(3):
        with pytest.raises(FileNotFoundError):
            storage.size("file")
        with pytest.raises(FileNotFoundError):
            read(storage, "file", 0, 100)
    (server.root / "file").write_bytes(CONTENT)
    assert read(storage, "file", 0, 100) == CONTENT[:100]
    assert len(server.connections) == (4 if len(text) > 100 else 1)
    storage.close()


def test_the_next_step_is_read_over_the_same_connection(server: Server) -> None:
    (server.root / "file").write_bytes(CONTENT)
    steps = [HttpStorage(f"{server.url}{step}", TOKEN) for step in range(3)]
    assert read(steps[0], "file", 0, 100) == CONTENT[:100]
    for earlier, storage in pairwise(steps):
        storage.take_over(earlier)
        assert read(storage, "file", 5, 5) == CONTENT[5:10]
    assert len(server.connections) == 1
    assert read(steps[0], "file", 5, 5) == CONTENT[5:10], "it can connect again"
    assert len(server.connections) == 2
    for storage in steps:
        storage.close()


@pytest.mark.parametrize("changed", ["secret", "server", "abandoned"])
def test_no_connection_of_another_peer_is_taken_over(server: Server, changed: str) -> None:
    (server.root / "file").write_bytes(CONTENT)
    earlier = HttpStorage(server.url, TOKEN)
    assert read(earlier, "file", 0, 100) == CONTENT[:100]
    if changed == "abandoned":
        earlier.abandon()
    url = server.url.replace("127.0.0.1", "localhost") if changed == "server" else server.url
    storage = HttpStorage(url, "wrong" if changed == "secret" else TOKEN)
    storage.take_over(earlier)
    if changed == "secret":
        with pytest.raises(StorageError, match="answered 401"):
            read(storage, "file", 5, 5)
    else:
        assert read(storage, "file", 5, 5) == CONTENT[5:10]
    assert len(server.connections) == 2
    storage.close()


def test_threads_read_at_once_over_connections_of_their_own(server: Server) -> None:
    (server.root / "file").write_bytes(CONTENT)
    storage = HttpStorage(server.url, TOKEN)
    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(lambda at: read(storage, "file", at, 100), range(0, 10_000, 50)))
    assert parts == [CONTENT[at : at + 100] for at in range(0, 10_000, 50)]
    assert len(server.connections) <= 4
    storage.close()


def test_a_connection_closed_by_the_server_is_made_anew(server: Server) -> None:
    (server.root / "file").write_bytes(CONTENT)
    storage = HttpStorage(server.url, TOKEN)
    server.fault = well_and_close
    for _ in range(3):
        assert read(storage, "file", 0, 100) == CONTENT[:100]
    assert len(server.connections) == 3
    storage.close()


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        (whole_file_instead, "answered 200"),
        (other_range, "not the range"),
        (cut_off, "broke off after 99 bytes"),
        (hang_up, "closed connection without response"),
    ],
)
def test_after_a_wrong_answer_the_next_read_works(
    server: Server, fault: Callable[[Handler, int, bytes], None], complaint: str
) -> None:
    """The answer itself is an error."""
    (server.root / "file").write_bytes(CONTENT)
    storage = HttpStorage(server.url, TOKEN)
    server.fault = fault
    with pytest.raises(StorageError, match=complaint):
        read(storage, "file", 0, 100)
    server.fault = well
    assert read(storage, "file", 0, 100) == CONTENT[:100]
    storage.close()


def test_a_wrong_token_is_refused(server: Server) -> None:
    (server.root / "file").write_bytes(CONTENT)
    storage = HttpStorage(server.url, "wrong")
    with pytest.raises(StorageError, match="answered 401"):
        read(storage, "file", 0, 1)
    storage.close()


def test_nobody_listening() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(StorageError, match=f"127.0.0.1:{port}/x/file: Connection refused"):
            HttpStorage(f"http://127.0.0.1:{port}/x", TOKEN).size("file")


def test_an_address_that_is_none() -> None:
    with pytest.raises(UserError, match="not an http:// address"):
        HttpStorage("ftp://host/x", TOKEN)


def ended_by_abandoning(storage: HttpStorage, count: int, waits: Callable[[], bool]) -> str:
    """The error of a read that is under way when its server is given up."""
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, storage, "file", 0, count)
        deadline_s = time.monotonic() + LONG_S
        while not waits():
            assert time.monotonic() < deadline_s, "nothing was asked"
            time.sleep(0.01)
        storage.abandon()
        error = reading.exception(LONG_S)
    assert isinstance(error, StorageError) and "timed out" not in str(error)
    return str(error)


@pytest.mark.parametrize("loss", get_args(Loss))
def test_a_server_that_is_given_up_is_waited_for_no_more(loss: Loss) -> None:
    with lost_host(loss) as host:
        storage = HttpStorage(f"http://{host.address}/x", TOKEN, timeout_s=LONG_S)
        assert host.address in ended_by_abandoning(storage, 9, host.is_asked)
        with pytest.raises(StorageError, match="/x: the server was abandoned"):
            storage.size("file")
        storage.close()


@pytest.mark.parametrize("count", [1, 1000], ids=["before", "in the middle of"])
def test_a_read_is_aborted_before_or_within_its_answer(server: Server, count: int) -> None:
    (server.root / "file").write_bytes(CONTENT)
    storage = HttpStorage(server.url, TOKEN, timeout_s=LONG_S)
    assert read(storage, "file", 0, 100) == CONTENT[:100]
    server.fault = get_stuck
    ended_by_abandoning(storage, count, server.stuck.is_set)
    assert len(server.connections) == 1, "nobody connects again"
    storage.close()
