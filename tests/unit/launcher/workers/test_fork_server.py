"""What the fork server and the agent make of messages that they cannot read."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest

from elasticzero.ipc.channel import ChannelClosed
from elasticzero.launcher.workers.forking import server as fork_server
from elasticzero.launcher.workers.forking.client import ForkServer
from elasticzero.launcher.workers.forking.preload import Preload
from elasticzero.launcher.workers.forking.requests import MAX_MESSAGE_BYTES, Launch, Preparation
from elasticzero.security.certificates import Credentials, contexts_of
from elasticzero.serialization import decode, encode, parse_json
from tests.support.certificates import credentials_of

LAUNCH = Launch(target="t", is_module=False, arguments=(), environment={}, directory="/")


@pytest.mark.parametrize(
    "data", [b"not json", b"[]", b"{}", json.dumps(encode(LAUNCH)).encode()[:-1]]
)
def test_a_request_that_cannot_be_read_is_refused(data: bytes) -> None:
    """The server died of it, and its workers with it."""
    ours, theirs = socket.socketpair()
    answer = fork_server._launch(ours, data, [], (0, 0), Preload(), set())
    assert set(answer) == {"refused"} and answer["refused"].startswith("launch")
    ours.close()
    theirs.close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ForkServer, socket.socket]]:
    """An agent's side whose server is the test."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made = ForkServer.__new__(ForkServer)
    made._socket, made._pending, made._prepared_for = ours, [], None
    yield made, theirs
    ours.close()
    theirs.close()


@pytest.mark.parametrize("data", [b"not json", b"[]", b'{"ended": "x"}', b'{"ended": 1e3}'])
def test_an_answer_that_cannot_be_read_is_a_dead_server(
    data: bytes, server: tuple[ForkServer, socket.socket]
) -> None:
    """The agent starts another one then; it ended in a traceback."""
    agent, theirs = server
    theirs.send(data)
    with pytest.raises(ChannelClosed, match="the fork server's answer cannot be read"):
        agent.ended()


def test_a_refused_launch_is_a_dead_server(server: tuple[ForkServer, socket.socket]) -> None:
    agent, theirs = server
    theirs.send(b'{"ended": 7, "status": -9}')
    theirs.send(b'{"refused": "launch.target is missing"}')
    with pytest.raises(ChannelClosed, match="refuses a launch: launch"):
        agent.start(LAUNCH, [])
    assert agent.ended() == [(7, -9)]


def test_answers_have_what_an_agent_reads(server: tuple[ForkServer, socket.socket]) -> None:
    agent, theirs = server
    theirs.send(b'{"started": 5, "fds": [7, 8]}')
    assert agent.start(LAUNCH, []) == (5, [7, 8])


def prepared_for(server: socket.socket) -> list[Credentials]:
    """The certificates that the agent has had prepared, in turn."""
    server.setblocking(False)
    sent = list[Credentials]()
    while True:
        try:
            data = server.recv(MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return sent
        sent.append(decode(Preparation, parse_json(data, "sent"), "sent").tls)


def test_a_certificate_is_prepared_once_and_a_renewed_one_again(
    server: tuple[ForkServer, socket.socket],
) -> None:
    agent, theirs = server
    first, renewed = credentials_of("the token"), credentials_of("the token")
    for shown in (None, first, first, None, renewed, renewed):
        agent.prepare(shown)
    assert prepared_for(theirs) == [first, renewed]


def test_a_server_that_takes_no_preparation_keeps_no_agent_waiting(
    server: tuple[ForkServer, socket.socket],
) -> None:
    """It is full, is sent too much at once, or has died: workers make their contexts then."""
    agent, theirs = server
    first = credentials_of("the token")
    for number in range(10_000):
        agent.prepare(replace(first, certificate=str(number)))
    agent.prepare(replace(first, certificate="x" * (16 << 20)))
    theirs.close()
    agent.prepare(replace(first))


def test_a_preparation_makes_what_workers_need_and_answers_nothing() -> None:
    credentials = credentials_of("the token")
    contexts_of.cache_clear()
    for shown in (replace(credentials, certificate="none"), credentials):
        data = json.dumps(encode(Preparation(tls=shown))).encode()
        with socket.socket() as unused:
            assert fork_server._launch(unused, data, [], (0, 0), Preload(), set()) == {}
    misses = contexts_of.cache_info().misses
    contexts_of(replace(credentials)).check()
    assert contexts_of.cache_info().misses == misses
