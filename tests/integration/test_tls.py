"""An agent's server over TLS: who gets what with and without a certificate, and what breaks it."""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from elasticzero.checkpoint.storage.http import HttpStorage
from elasticzero.checkpoint.storage.signed_requests import RUN_HEADER, RequestSigner
from elasticzero.errors import StorageError
from elasticzero.launcher.http import limits
from elasticzero.launcher.http.access import AgentAccess
from elasticzero.launcher.http.agent_client import query_agent
from elasticzero.launcher.http.routes import Answer, Route
from elasticzero.launcher.http.server import ENCRYPTED_BYTES, AgentServer, TokenlessAccess, listen
from elasticzero.launcher.protocol.documents import Member
from elasticzero.launcher.secrets import Secret
from elasticzero.launcher.tls.authority import RENEW_S, IssuedCredentials, JobAuthority
from elasticzero.launcher.tls.contexts import TlsContexts
from elasticzero.launcher.tls.credentials import NodeName
from elasticzero.security.certificates import client_context
from elasticzero.security.proofs import run_secret
from tests.integration.http_server import no_events
from tests.lost_hosts import lost_host
from tests.support.certificates import Authority
from tests.support.deadlines import patience

TOKEN = "the-job's-own-password"
RUN = 3
CONTENT = bytes(range(256)) * (ENCRYPTED_BYTES // 256 * 5 // 2) + b"the end"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


class Files:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open_file(self, generation: int, step: int, name: str) -> BinaryIO:
        return (self.folder / name).open("rb")


@pytest.fixture(scope="module")
def authority() -> JobAuthority:
    return JobAuthority(Secret(TOKEN), "j")


def contexts(authority: JobAuthority, node: str, run: int = RUN) -> TlsContexts:
    name = NodeName(job="j", run=run, node=node)
    return TlsContexts(IssuedCredentials(authority, name, ["127.0.0.1"]))


@pytest.fixture
def server(authority: JobAuthority, tmp_path: Path) -> Iterator[AgentServer]:
    (tmp_path / "shard").write_bytes(CONTENT)
    routes = {
        "/healthz": Route(answer=lambda query: Answer(content=b"ok\n"), served_to="everyone"),
        "/page": Route(answer=lambda query: Answer(content=b"<p>\n"), served_to="everyone"),
        "/status": Route(answer=lambda query: Answer(content=b"{}\n"), served_to="token holders"),
    }
    with AgentServer(
        listen("127.0.0.1", 0),
        routes=routes,
        snapshots=Files(tmp_path),
        events=no_events,
        token=lambda: Secret(TOKEN),
        tokenless=TokenlessAccess(names=("watch.example.org",)),
        run=RUN,
        tls=contexts(authority, "server"),
    ) as running:
        yield running


def unchecked() -> ssl.SSLContext:
    """As a probe: it shows no certificate, and checks none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def ask(
    server: AgentServer, context: ssl.SSLContext, path: str, **headers: str
) -> tuple[int, bytes]:
    connection = http.client.HTTPSConnection(
        "127.0.0.1", server.port, context=context, timeout=patience(30)
    )
    with closing(connection):
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()


def test_without_a_certificate_the_open_paths_are_served(server: AgentServer) -> None:
    assert ask(server, unchecked(), "/healthz") == (200, b"ok\n")
    assert ask(server, unchecked(), "/page") == (200, b"<p>\n")
    assert ask(server, unchecked(), "/status")[0] == 401
    assert ask(server, unchecked(), "/snapshots/1/1/shard")[0] == 401


def test_a_certificate_stands_for_the_token(server: AgentServer, authority: JobAuthority) -> None:
    node = contexts(authority, "node-b").client()
    assert ask(server, node, "/status") == (200, b"{}\n")
    assert ask(server, node, "/snapshots/1/1/shard") == (200, CONTENT)
    without = client_context(authority.certificate)
    assert ask(server, without, "/status")[0] == 401
    assert ask(server, without, "/status", **BEARER) == (200, b"{}\n")


class Counted(http.client.HTTPSConnection):
    """Counts its requests."""

    requests = 0

    def request(self, *args: Any, **options: Any) -> None:
        self.requests += 1
        super().request(*args, **options)


def test_a_certificate_needs_no_proof_and_a_proof_no_certificate(
    server: AgentServer, authority: JobAuthority
) -> None:
    """A node's first request is answered at once; a command has no certificate."""
    node = contexts(authority, "node-b").client()
    for context, requests in ((node, 1), (client_context(authority.certificate), 2)):
        connection = Counted("127.0.0.1", server.port, context=context, timeout=patience(30))
        with closing(connection):
            signer = RequestSigner(run_secret(TOKEN, RUN))
            response = signer.send(connection, "GET", "/snapshots/1/1/shard", {})
            assert (response.status, response.read()) == (200, CONTENT)
            assert connection.requests == requests


def test_a_certificate_of_another_run_is_refused(
    server: AgentServer, authority: JobAuthority
) -> None:
    earlier = contexts(authority, "node-b", run=RUN - 1).client()
    status, text = ask(server, earlier, "/status")
    assert status == 409 and b"not of run 2" in text
    header = {RUN_HEADER: str(RUN)}
    assert ask(server, earlier, "/status", **header)[0] == 409, "the certificate cannot lie"


def test_a_browser_with_a_certificate_is_asked_for_the_servers_name(
    server: AgentServer, authority: JobAuthority
) -> None:
    """It shows its certificate to every page that is led here, as by DNS rebinding."""
    node = contexts(authority, "node-b").client()
    assert ask(server, node, "/status", Host="evil.example.com")[0] == 421
    assert ask(server, node, "/status", Host="watch.example.org")[0] == 200
    assert ask(server, node, "/status", Host="evil.example.com", **BEARER)[0] == 200


def test_certificates_of_strangers_make_no_connection(
    server: AgentServer, authority: JobAuthority, tmp_path: Path
) -> None:
    stranger = contexts(JobAuthority(Secret("another-token-altogether"), "j"), "node-b")
    with pytest.raises(ssl.SSLError):
        ask(server, stranger.client(), "/status")
    shown = Authority(tmp_path / "pems", "elsewhere").sign("node-b")
    context = client_context(authority.certificate)
    context.load_cert_chain(shown.cert, shown.key)
    with pytest.raises(OSError):  # which of the two ends is faster decides what it is
        ask(server, context, "/healthz")
    member = Member("a", "i", "127.0.0.1", server.port, 1, 1, run=RUN)
    tls = contexts(authority, "node-b")
    assert query_agent(member, AgentAccess(Secret(TOKEN), tls.client), "/status") == {}
    other = AgentAccess(Secret(TOKEN), stranger.client)
    assert query_agent(member, other, "/status") is None, "nor is the token shown to a stranger"


def test_plain_http_is_told_that_this_is_https(server: AgentServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=patience(30))
    with closing(connection):
        connection.request("GET", "/healthz")
        response = connection.getresponse()
        assert response.status == 400 and response.read() == b"this server speaks HTTPS\n"


def test_snapshots_are_read_by_ranges(server: AgentServer, authority: JobAuthority) -> None:
    tls = contexts(authority, "node-b").client()
    storage = HttpStorage(f"https://127.0.0.1:{server.port}/snapshots/1/1", "", run=RUN, tls=tls)
    with closing(storage):
        assert storage.size("shard") == len(CONTENT)
        for start, size in ((0, 1), (1, len(CONTENT) - 1), (len(CONTENT) - 7, 100)):
            buffer = bytearray(size)
            count = storage.read_into("shard", start, memoryview(buffer))
            assert buffer[:count] == CONTENT[start : start + size]


def test_the_next_step_shows_a_renewed_certificate(
    server: AgentServer, authority: JobAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the certificate before it goes on over the connection before."""
    handshakes = list[ssl.SSLContext]()
    wrap = ssl.SSLContext.wrap_socket

    def counting(context: ssl.SSLContext, *arguments: Any, **options: Any) -> ssl.SSLSocket:
        if not options.get("server_side"):
            handshakes.append(context)
        return wrap(context, *arguments, **options)

    monkeypatch.setattr(ssl.SSLContext, "wrap_socket", counting)
    node, renewed = (contexts(authority, "node-b").client() for _ in range(2))
    earlier: HttpStorage | None = None
    for step, tls in enumerate((node, node, renewed, renewed)):
        url = f"https://127.0.0.1:{server.port}/snapshots/1/{step}"
        storage = HttpStorage(url, "", run=RUN, tls=tls)
        if earlier is not None:
            storage.take_over(earlier)
        assert storage.size("shard") == len(CONTENT)
        earlier = storage
    storage.close()
    assert handshakes == [node, renewed]


def test_a_server_of_another_authority_is_not_read(server: AgentServer) -> None:
    other = client_context(JobAuthority(Secret("another-token-altogether"), "j").certificate)
    url = f"https://127.0.0.1:{server.port}/snapshots/1/1"
    with (
        closing(HttpStorage(url, TOKEN, run=RUN, tls=other)) as storage,
        pytest.raises(StorageError, match=r"CERTIFICATE_VERIFY_FAILED|certificate verify failed"),
    ):
        storage.size("shard")


def test_a_handshake_without_an_answer_is_abandoned(authority: JobAuthority) -> None:
    with lost_host("stopped") as host:
        tls = contexts(authority, "node-b").client()
        storage = HttpStorage(f"https://{host.address}/x", TOKEN, timeout_s=60.0, tls=tls)
        errors: list[BaseException] = []

        def read() -> None:
            try:
                storage.size("file")
            except StorageError as error:
                errors.append(error)

        thread = threading.Thread(target=read)
        thread.start()
        deadline_s = time.monotonic() + patience(30)
        while not host.is_asked():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        storage.abandon()
        thread.join(patience(30))
        assert len(errors) == 1


def secured(server: AgentServer, context: ssl.SSLContext) -> ssl.SSLSocket:
    raw = socket.create_connection(("127.0.0.1", server.port), timeout=patience(30))
    return context.wrap_socket(raw)


def test_requests_in_one_record_are_all_answered(server: AgentServer) -> None:
    """The second one is within TLS then, where no descriptor tells of it."""
    head = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with closing(secured(server, unchecked())) as client:
        client.sendall(head * 3)
        received = b""
        while received.count(b"ok\n") < 3:
            received += (part := client.recv(65536))
            assert part, received


def test_a_long_head_is_refused_within_tls(server: AgentServer) -> None:
    with closing(secured(server, unchecked())) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nX: " + b"x" * limits.HEAD_BYTES)
        assert b" 431 " in client.recv(65536)


@pytest.mark.parametrize("sent", [b"", b"\x16", b"\x16\x03\x01\x02\x00" + b"\x01" * 300])
def test_handshakes_that_do_not_go_on_hold_nobody_up(
    server: AgentServer, authority: JobAuthority, sent: bytes
) -> None:
    held = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
    try:
        for connection in held:
            connection.sendall(sent)
        began_s = time.monotonic()
        node = contexts(authority, "node-b").client()
        assert ask(server, node, "/status")[0] == 200
        assert ask(server, client_context(authority.certificate), "/status", **BEARER)[0] == 200
        assert time.monotonic() - began_s < patience(5)
    finally:
        for connection in held:
            connection.close()


def test_a_handshake_has_a_deadline(server: AgentServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEAD_TIMEOUT_S", 0.2)
    monkeypatch.setattr(limits, "IDLE_TIMEOUT_S", 1000.0)
    with socket.create_connection(("127.0.0.1", server.port), timeout=patience(30)) as connection:
        connection.sendall(b"\x16")
        assert connection.recv(100) == b""


def test_a_connection_after_a_renewal_shows_the_new_certificate(authority: JobAuthority) -> None:
    clock = [time.time()]
    name = NodeName(job="j", run=RUN, node="server")
    source = IssuedCredentials(authority, name, ["127.0.0.1"], lambda: clock[0])
    with AgentServer(
        listen("127.0.0.1", 0),
        routes={},
        snapshots=Files(Path()),
        events=no_events,
        token=lambda: Secret(TOKEN),
        tls=TlsContexts(source),
    ) as server:
        context = client_context(authority.certificate)
        with closing(secured(server, context)) as client:
            before = client.getpeercert(binary_form=True)
            clock[0] += RENEW_S
            with closing(secured(server, context)) as later:
                assert later.getpeercert(binary_form=True) != before
            client.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert b" 404 " in client.recv(65536), "the connections before go on"
