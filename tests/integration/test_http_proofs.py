"""Requests between agents prove the job's secret: what is on the wire is of no use to a reader."""

from __future__ import annotations

import http.client
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

import pytest

from elasticzero.checkpoint.storage.http import HttpStorage
from elasticzero.checkpoint.storage.signed_requests import RequestSigner
from elasticzero.errors import StorageError
from elasticzero.launcher.http import reception
from elasticzero.launcher.http.access import AgentAccess
from elasticzero.launcher.http.agent_client import query_agent
from elasticzero.launcher.http.authentication import Nonces
from elasticzero.launcher.http.routes import Answer, Route
from elasticzero.launcher.http.server import AgentServer, listen
from elasticzero.launcher.protocol.documents import UNSTATED, Member
from elasticzero.launcher.secrets import Secret
from elasticzero.ops.cli import report
from elasticzero.security.proofs import run_secret
from tests.integration.http_agent import Agent
from tests.integration.http_server import NoSnapshots, no_events
from tests.support.deadlines import patience

TOKEN = "the-job's-own-password"
ACCESS = AgentAccess(Secret(TOKEN))
CONTENT = bytes(range(256)) * 40
NAME = "rank-00000-of-00002.safetensors"
PATH = f"/snapshots/3/120/{NAME}"
STATUS = b'{"step": 7}\n'


class Folder:
    """Snapshots under a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def open_file(self, generation: int, step: int, name: str) -> BinaryIO:
        return (self.root / str(generation) / str(step) / name).open("rb")


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., AgentServer]]:
    """Starts an agent's server of a run, at a port."""
    folder = tmp_path / "3" / "120"
    folder.mkdir(parents=True)
    (folder / NAME).write_bytes(CONTENT)
    slow = threading.Event()

    def wait(query: str) -> Answer:
        slow.wait(patience(60))
        return Answer(content=b"")

    routes = {
        "/status": Route(answer=lambda query: Answer(content=STATUS), served_to="token holders"),
        "/slow": Route(answer=wait, served_to="everyone"),
        "/told": Route(answer=tell, served_to="other agents"),
    }
    with ExitStack() as stack:

        def start(run: int = 1, port: int = 0) -> AgentServer:
            return stack.enter_context(
                AgentServer(
                    listen("127.0.0.1", port),
                    routes=routes,
                    snapshots=Folder(tmp_path),
                    events=no_events,
                    token=lambda: Secret(TOKEN),
                    run=run,
                )
            )

        yield start
        slow.set()


TOLD: list[str] = []


def tell(query: str) -> Answer:
    TOLD.append(query)
    return Answer(content=b'{"told": 1}')


def test_what_is_for_other_agents_needs_a_proof_of_the_run(
    serve: Callable[..., AgentServer],
) -> None:
    """The token alone, which a process of an earlier run has, does nothing."""
    first, second = serve(1), serve(2)
    shown = b"Host: x\r\nAuthorization: Bearer " + TOKEN.encode() + b"\r\n\r\n"
    TOLD.clear()
    assert raw(second.port, b"GET /told?a=1 HTTP/1.1\r\n" + shown) == [401]
    assert raw(second.port, b"GET /told?a=1 HTTP/1.1\r\nHost: x\r\n\r\n") == [401]
    assert not TOLD
    assert query_agent(member(second.port, 2), ACCESS, "/told?a=2") == {"told": 1}
    assert query_agent(member(first.port), ACCESS, "/told?a=3") == {"told": 1}
    assert query_agent(member(second.port, 1), ACCESS, "/told?a=4") is None
    with socket.create_connection(("127.0.0.1", first.port), timeout=patience(30)) as s:
        s.sendall(b"HEAD /told?a=5 HTTP/1.1\r\n" + shown)
        assert s.recv(100).startswith(b"HTTP/1.1 200")
    assert TOLD == ["a=2", "a=3", ""], "a request for the head asks for nothing"


class Sniffer:
    """Relays connections to a port, and keeps what went either way."""

    def __init__(self, port: int) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self._target = port
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, name="sniffer")]
        self.sent: list[bytearray] = []
        """Holds what clients have sent, by connection."""
        self.received: list[bytearray] = []
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near = self._listening.accept()[0]
                far = socket.create_connection(("127.0.0.1", self._target))
                self._ends += [near, far]
                for ends, kept in (((near, far), self.sent), ((far, near), self.received)):
                    kept.append(bytearray())
                    relay = threading.Thread(
                        target=self._relay, args=(*ends, kept[-1]), name="sniffer"
                    )
                    relay.start()
                    self._threads.append(relay)

    @staticmethod
    def _relay(source: socket.socket, target: socket.socket, kept: bytearray) -> None:
        with suppress(OSError):
            while part := source.recv(1 << 16):
                kept += part
                target.sendall(part)
            target.shutdown(socket.SHUT_WR)

    def heads(self) -> list[bytes]:
        """The heads of all requests so far."""
        return [head for sent in self.sent for head in re.findall(rb"[^\0]+?\r\n\r\n", bytes(sent))]

    def close(self) -> None:
        for end in (self._listening, *self._ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in self._threads:
            thread.join(patience(10))

    def __enter__(self) -> Sniffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def member(port: int, run: int = 1) -> Member:
    return Member("a", "i-a", "127.0.0.1", port, 29500, 1, run=run)


def snapshot(port: int, run: int = 1, *, proofs: bool = True) -> HttpStorage:
    address = f"http://127.0.0.1:{port}/snapshots/3/120"
    return HttpStorage(address, run_secret(TOKEN, run), run=run, proofs=proofs)


def read(storage: HttpStorage, start: int, count: int) -> bytes:
    data = bytearray(count)
    return bytes(data[: storage.read_into(NAME, start, memoryview(data))])


def raw(port: int, *heads: bytes) -> list[int]:
    """The statuses of the answers to these requests, which one connection sends one by one."""
    statuses = []
    with socket.create_connection(("127.0.0.1", port), timeout=patience(30)) as s:
        for head in heads:
            s.sendall(head)
            response = http.client.HTTPResponse(s)
            response.begin()
            response.read()
            statuses.append(response.status)
    return statuses


@pytest.mark.parametrize("run", [1, 2])
def test_a_sniffer_reads_no_token_and_can_use_nothing(
    serve: Callable[..., AgentServer], run: int
) -> None:
    server = serve(run)
    with Sniffer(server.port) as sniffer:
        assert query_agent(member(sniffer.port, run), ACCESS, "/status?a=1") == {"step": 7}
        storage = snapshot(sniffer.port, run)
        assert storage.size(NAME) == len(CONTENT)
        assert [read(storage, at, 100) for at in (0, 500)] == [CONTENT[:100], CONTENT[500:600]]
        storage.close()
        heads = sniffer.heads()
        wire = b"".join(map(bytes, (*sniffer.sent, *sniffer.received)))
    assert len(sniffer.sent) == 2 and len(heads) == 2 + 1 + 3, "one more for each connection"
    for secret in (TOKEN, run_secret(TOKEN, run)):
        assert secret.encode() not in wire
    signed = [head for head in heads if b"proof=" in head]
    assert len(signed) == 4
    for head in signed:
        assert raw(server.port, head) == [401], "it was replayed"
        for other in (head.replace(b" /s", b" /s/../s", 1), head.replace(b"/120/", b"/121/")):
            assert raw(server.port, other) == [401]
        assert raw(server.port, re.sub(rb"count=\d+", b"count=99", head)) == [401]
        assert raw(server.port, head.replace(b"bytes=0-99", b"bytes=0-999")) == [401]
        assert raw(server.port, head, head, head) == [401] * 3, "nor on one connection"


def test_every_reader_of_agents_shows_no_token(tmp_path: Path) -> None:
    """Fetching logs for a report is a request of its own."""
    (tmp_path / "events.jsonl").write_bytes(b'{"time": 2.0, "event": "round"}\n' * 2)
    agent = Agent(tmp_path)
    agent.run = 1
    with agent.serve() as server, Sniffer(server.port) as sniffer:
        report._fetch_log(member(sniffer.port), ACCESS, tmp_path / "log", 1 << 20)
        heads = sniffer.heads()
    assert len(heads) == 2 and not any(TOKEN.encode() in head for head in heads)
    assert b'"round"' in (tmp_path / "log").read_bytes()


def test_the_release_before_is_shown_the_token_and_shows_it(
    serve: Callable[..., AgentServer],
) -> None:
    """In the first run of a job alone: only there can such nodes take part."""
    server = serve(1)
    with Sniffer(server.port) as sniffer:
        assert query_agent(member(sniffer.port, UNSTATED), ACCESS, "/status") is not None
        storage = snapshot(sniffer.port, proofs=False)
        assert read(storage, 5, 9) == CONTENT[5:14]
        storage.close()
        assert len(sniffer.heads()) == 2, "nothing is asked first"
        assert all(f"Bearer {TOKEN}".encode() in head for head in sniffer.heads())
    later = serve(2)
    bearer = f"GET {PATH} HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
    assert raw(later.port, bearer) == [401]
    assert raw(later.port, bearer.replace(PATH.encode(), b"/status")) == [200], "as browsers do"


def test_no_answer_makes_a_client_show_the_token(serve: Callable[..., AgentServer]) -> None:
    """A server that knows no nonces is not of this job, or of a release that etcd says nothing
    of."""
    for answer in (b"Bearer", b"Basic", b"ElasticZero", b"ElasticZero nonce=x", b""):
        received = bytearray()
        with socket.create_server(("127.0.0.1", 0)) as listening:
            thread = threading.Thread(
                target=refuse, args=(listening, answer, received), name="refuses"
            )
            thread.start()
            storage = snapshot(listening.getsockname()[1])
            with pytest.raises(StorageError, match="answered 401"):
                storage.size(NAME)
            storage.close()
            thread.join()
        assert received.count(b"\r\n\r\n") == 1 and TOKEN.encode() not in received


def refuse(listening: socket.socket, answer: bytes, received: bytearray) -> None:
    """Answers the first request of one connection with 401, and keeps all that comes."""
    with listening.accept()[0] as connection:
        while not received.endswith(b"\r\n\r\n"):
            received += connection.recv(1 << 16)
        head = b"HTTP/1.1 401 No\r\nContent-Length: 0\r\nWWW-Authenticate: "
        connection.sendall(head + answer + b"\r\n\r\n")
        received += connection.recv(1 << 16)


@pytest.mark.parametrize("process_run", [1, 3])
def test_a_process_of_another_run_is_a_stranger(
    serve: Callable[..., AgentServer], process_run: int
) -> None:
    """Even one that states the run of the server, and has the secret of its own."""
    server = serve(2)
    for stated in (process_run, 2, None):
        address = f"http://127.0.0.1:{server.port}/snapshots/3/120"
        storage = HttpStorage(address, run_secret(TOKEN, process_run), run=stated)
        with pytest.raises(StorageError, match="answered 401"):
            storage.size(NAME)
        storage.close()
    assert query_agent(member(server.port, process_run), ACCESS, "/status") is None
    storage = snapshot(server.port, 2)
    assert read(storage, 0, 5) == CONTENT[:5]
    storage.close()


def test_reads_go_on_when_a_nonce_is_too_old_or_the_server_is_another(
    serve: Callable[..., AgentServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    storage = snapshot(server.port)
    assert read(storage, 0, 9) == CONTENT[:9]
    is_current = Nonces.is_current
    answers = [False, True]
    monkeypatch.setattr(
        Nonces, "is_current", lambda nonces, nonce: answers.pop(0) and is_current(nonces, nonce)
    )
    assert read(storage, 9, 9) == CONTENT[9:18]
    assert not answers
    monkeypatch.undo()
    server.close()
    serve(port=server.port)
    assert read(storage, 18, 9) == CONTENT[18:27]
    storage.close()


def test_a_proof_waits_for_no_stranger(
    serve: Callable[..., AgentServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """RE6: threads that answer strangers are all taken, and requests of others wait for them."""
    monkeypatch.setattr(reception, "SLOW_S", 600.0)
    server = serve()
    with ExitStack() as stack:
        for _ in range(3 * reception.MAX_ANSWERED):
            stranger = socket.create_connection(("127.0.0.1", server.port))
            stack.enter_context(stranger).sendall(b"GET /slow HTTP/1.1\r\n\r\n")
        answer = query_agent(member(server.port), ACCESS, "/status", patience(20))
        assert answer == {"step": 7}


ASKS = b"GET /status HTTP/1.1\r\nAuthorization: ElasticZero\r\n\r\n"


def test_a_client_that_asks_gets_one_nonce_a_turn(serve: Callable[..., AgentServer]) -> None:
    """One that sends many requests at once would have the only thread work for it alone."""
    server = serve()
    assert raw(server.port, ASKS, ASKS, ASKS) == [401] * 3
    with socket.create_connection(("127.0.0.1", server.port), timeout=patience(30)) as greedy:
        answer = b""
        with suppress(ConnectionError):
            greedy.sendall(ASKS * 200)
            while part := greedy.recv(1 << 16):
                answer += part
    assert not answer, "it is closed at once"
    assert query_agent(member(server.port), ACCESS, "/status") is not None


def test_a_wrong_proof_is_logged_and_a_request_for_a_nonce_is_not(
    serve: Callable[..., AgentServer], caplog: pytest.LogCaptureFixture
) -> None:
    server = serve()
    assert query_agent(member(server.port), ACCESS, "/status") is not None
    assert not caplog.records
    guess = AgentAccess(Secret("a-guess-of-the-token"))
    assert query_agent(member(server.port), guess, "/status") is None
    assert [record.getMessage() for record in caplog.records] == [
        "refused an HTTP request of 127.0.0.1: its proof is wrong, or was used before"
    ]


@pytest.mark.parametrize("lost", [1, 2], ids=["before its nonce", "before its proof"])
def test_a_stranger_that_is_dropped_connects_again(lost: int) -> None:
    """The server closes connections without a proof where it has too many."""
    with AgentServer(
        listen("127.0.0.1", 0),
        routes={"/x": Route(answer=lambda query: Answer(content=b"x"), served_to="token holders")},
        snapshots=NoSnapshots(),
        events=no_events,
        token=lambda: Secret(TOKEN),
    ) as server:
        connection = Dropped("127.0.0.1", server.port, timeout=patience(30))
        connection.lost = lost
        response = RequestSigner(TOKEN).send(connection, "GET", "/x", {})
        assert (response.status, response.read()) == (200, b"x")
        assert connection.requests == 3
        connection.close()


class Dropped(http.client.HTTPConnection):
    """A connection that is closed before one of its requests."""

    requests = 0
    lost = 0
    """Number of that request, from 1."""

    def request(self, *args: object, **kwargs: object) -> None:
        self.requests += 1
        if self.requests == self.lost:
            if self.sock is None:
                self.connect()
            self.sock.shutdown(socket.SHUT_RDWR)
        super().request(*args, **kwargs)  # type: ignore[arg-type]
