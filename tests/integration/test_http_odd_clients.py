"""Clients of the agent's server that do not behave: it refuses them, and serves the others."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticzero.launcher.http import limits as http_guard
from elasticzero.launcher.http.server import AgentServer
from tests.integration.http_agent import BEARER, CONTENT, FILE, TOKEN, Agent, agent_in, ask, raw
from tests.support.deadlines import patience


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    return agent_in(tmp_path)


@pytest.fixture
def server(agent: Agent) -> Iterator[AgentServer]:
    with agent.serve() as running:
        yield running


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET\r\n\r\n", b"400"),
        (b"GET /status HTTP/9.9\r\n\r\n", b"505"),
        (b"GET /status JUNK\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"400"),
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n", b"414"),
        (b"GET /status HTTP/1.1\r\nX: " + b"a" * 100_000 + b"\r\n\r\n", b"431"),
        (b"GET /status HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n", b"431"),
        (b"GET /status HTTP/1.1\r\n" + b"A: bcdefghijkl\r\n" * 1_200 + b"\r\n", b"431"),
        (b"GET /metrics HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"400"),
        (b"GET /status HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", b"400"),
        (b"GET /status HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
    ],
)
def test_malformed_requests_are_refused_and_harm_nobody(
    server: AgentServer, request_bytes: bytes, status: bytes
) -> None:
    answer = raw(server, request_bytes)
    assert status in answer.splitlines()[0] if answer else status in (b"414", b"431")
    assert answer.count(b"HTTP/1.1 ") <= 1
    assert ask(server, "/healthz")[0] == 200


def test_a_client_that_leaves_in_the_middle_harms_nobody(server: AgentServer) -> None:
    for request in (
        b"GET /sta",
        f"GET {FILE} HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode(),
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
            s.sendall(request)
    assert ask(server, FILE, **BEARER)[2] == CONTENT


def test_a_client_that_says_nothing_is_closed(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_guard, "IDLE_TIMEOUT_S", 0.1)
    with agent.serve() as server, socket.create_connection(("127.0.0.1", server.port)) as s:
        s.settimeout(10)
        s.sendall(b"GET /status HTTP/1.1\r\n")
        assert s.recv(1) == b""


def test_a_client_that_never_ends_its_request_is_closed(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Slow loris: a byte now and then, so that no pause is long."""
    monkeypatch.setattr(http_guard, "HEAD_TIMEOUT_S", 0.5)
    with agent.serve() as server, socket.create_connection(("127.0.0.1", server.port)) as s:
        s.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert s.recv(12) == b"HTTP/1.1 200"
        time.sleep(0.6)  # a rest between two requests is no sin
        s.sendall(b"GET /healthz HTTP/1.1\r\nX: ")
        deadline_s = time.monotonic() + patience(30)
        try:
            while True:
                s.sendall(b"a")
                time.sleep(0.05)
                assert time.monotonic() < deadline_s, "never closed"
        except ConnectionError:
            pass
        assert ask(server, "/healthz")[0] == 200
    assert "its head was not whole in time" in caplog.text


def test_strangers_cannot_take_all_connections(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a new one the oldest that has shown no token is closed."""
    monkeypatch.setattr(http_guard, "MAX_CONNECTIONS", 3)
    with agent.serve() as server:
        client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        client.request("GET", FILE, headers={**BEARER, "Range": "bytes=0-9"})
        assert client.getresponse().read() == CONTENT[:10]
        first_socket = client.sock
        strangers = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(9)]
        for stranger in strangers[:7]:
            stranger.settimeout(10)
            assert stranger.recv(1) == b""
        assert ask(server, "/healthz")[0] == 200
        assert ask(server, FILE, Range="bytes=5-8", **BEARER)[2] == CONTENT[5:9]
        client.request("GET", FILE, headers={**BEARER, "Range": "bytes=10-19"})
        assert client.getresponse().read() == CONTENT[10:20]
        assert client.sock is first_socket
        client.close()
        for stranger in strangers:
            stranger.close()


def test_too_many_with_the_token_are_closed_and_others_served_again(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_guard, "MAX_CONNECTIONS", 3)
    with agent.serve() as server:
        held = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(3)]
        for s in held:
            head = f"GET /status HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
            s.sendall(head.encode())
            assert s.recv(12) == b"HTTP/1.1 200"
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            ask(server, "/healthz")
        for s in held:
            s.close()
        deadline_s = time.monotonic() + patience(30)
        while True:
            try:
                assert ask(server, "/healthz")[0] == 200
                break
            except (ConnectionError, http.client.HTTPException):
                assert time.monotonic() < deadline_s
