"""What a worker does with the agent's messages about a world that is entered inside of a loop."""

from __future__ import annotations

import os
import queue
import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from elasticzero.ipc.agent_client import STANDALONE, AgentClient, close_store_of
from elasticzero.ipc.channel import Channel
from elasticzero.ipc.messages import Prepare, PrepareFailed, Withdraw
from tests.support.deadlines import patience

OFFER = Prepare(token="next", assignment=replace(STANDALONE, token="next", store_fd=999))


@pytest.fixture
def ends() -> Iterator[tuple[Channel, AgentClient]]:
    """The agent's end of a channel, and the worker's client, whose thread ends with neither."""
    ours, theirs = socket.socketpair()
    with closing(Channel(ours)) as channel:
        client = AgentClient(None, STANDALONE)
        client._channel = Channel(theirs)
        yield channel, client
        theirs.close()


def receive(client: AgentClient) -> None:
    """Handles one message as the receiving thread does."""
    assert client._channel is not None
    message = client._channel.receive(patience(10.0))
    assert message is not None
    client._handle(message)


def test_the_socket_of_the_store_comes_with_the_offer(
    ends: tuple[Channel, AgentClient],
) -> None:
    channel, client = ends
    taken: queue.SimpleQueue[Prepare | Withdraw] = queue.SimpleQueue()
    client.on_change(taken.put)
    with socket.socket() as store:
        channel.send_with_fd(OFFER, store.fileno(), 5.0)
        receive(client)
        offer = taken.get_nowait()
        assert isinstance(offer, Prepare) and offer.assignment is not None
        fd = offer.assignment.store_fd
        assert fd is not None and os.fstat(fd).st_ino == os.fstat(store.fileno()).st_ino
        close_store_of(offer)
    channel.send(Prepare(token="next"))
    channel.send(Withdraw(token="next", reason="the test"))
    for expected in (Prepare(token="next"), Withdraw(token="next", reason="the test")):
        receive(client)
        assert taken.get_nowait() == expected


def test_a_worker_without_a_loop_refuses_for_good_and_keeps_no_socket(
    ends: tuple[Channel, AgentClient],
) -> None:
    channel, client = ends
    before = len(os.listdir("/proc/self/fd"))
    with socket.socket() as store:
        channel.send_with_fd(OFFER, store.fileno(), 5.0)
    receive(client)
    channel.send(Withdraw(token="next", reason="the test"))
    receive(client)
    answer = channel.receive(patience(10.0))
    assert isinstance(answer, PrepareFailed) and answer.final and answer.token == "next"
    assert len(os.listdir("/proc/self/fd")) == before
