"""Messages between agent and worker arrive whole, in order, as what they were."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator

import pytest

from elasticzero.ipc.assignment import Assignment, Resume, Source
from elasticzero.ipc.channel import Channel, ChannelClosed
from elasticzero.ipc.failure import Failed
from elasticzero.ipc.messages import Logged, Message, SaveState, Stepped

Ends = tuple[Channel, Channel]


@pytest.fixture
def ends() -> Iterator[Ends]:
    a, b = socket.socketpair()
    pair = (Channel(a), Channel(b))
    yield pair
    for end in pair:
        end.close()


ASSIGNMENT = Assignment(
    job="j",
    node="n",
    generation=2,
    token="t",
    rank=1,
    local_rank=0,
    world_size=2,
    local_world_size=1,
    group_rank=1,
    master_address="127.0.0.1",
    master_port=1234,
    store_fd=None,
    strategy="zero3",
    resume=Resume(
        tier="ram", step=7, generation=1, sources=(Source(rank=0, node="n", address="h:1"),)
    ),
    snapshot_root="/dev/shm/x",
)
FAILED = Failed(step=1, blame="user", message="ä\n", traceback="line\nline\n", final=True)


@pytest.mark.parametrize(
    "message", [ASSIGNMENT, FAILED, SaveState(write=True), Logged(step=1, scalars={"loss": 0.5})]
)
def test_a_message_arrives_as_it_was(ends: Ends, message: Message) -> None:
    a, b = ends
    a.send(message)
    assert b.receive(30.0) == message


def test_many_messages_arrive_in_order(ends: Ends) -> None:
    a, b = ends
    sent = [Stepped(step=s, at_s=0.5, step_s=0.1, data_wait_s=0.0, samples=8) for s in range(50)]
    for message in sent:
        a.send(message)
    assert [b.receive(30.0), b.receive(30.0)] == sent[:2]
    assert b.drain() == sent[2:]
    assert b.drain() == []


def test_what_was_said_before_the_end_is_not_lost(ends: Ends) -> None:
    a, b = ends
    a.send(SaveState(write=True))
    a.close()
    assert b.drain() == [SaveState(write=True)]
    with pytest.raises(ChannelClosed):
        b.drain()


def test_nothing_said_is_none_and_a_closed_end_an_error(ends: Ends) -> None:
    a, b = ends
    assert b.receive(0.0) is None
    a.close()
    with pytest.raises(ChannelClosed):
        b.receive(30.0)
    with pytest.raises(ChannelClosed):
        b.send(SaveState(write=False))


def test_steps_ring_before_there_is_no_room_for_more(ends: Ends) -> None:
    a, b = ends
    bell, rings = os.pipe2(os.O_NONBLOCK)
    worker = Channel(a._socket, rings)
    sent = 0
    while not select.select([bell], [], [], 0)[0]:
        worker.send(Stepped(step=sent, at_s=0.5, step_s=0.1, data_wait_s=0.0, samples=8))
        sent += 1
    assert sent > 8  # and it did not block
    assert len(b.drain()) == sent
    os.close(bell)
    os.close(rings)
