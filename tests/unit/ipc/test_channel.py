"""Messages between agent and worker arrive whole, in order, as what they were."""

from __future__ import annotations

import os
import select
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress

import pytest

from elasticzero.ipc.assignment import Assignment, Resume, Source
from elasticzero.ipc.channel import MAX_LINE_BYTES, Channel, ChannelClosed, MessageTooLong
from elasticzero.ipc.failure import Failed
from elasticzero.ipc.messages import Busy, Logged, Message, SaveState, Stepped

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


ODD_LINES = (
    *(b"", b"not json", b"null", b"[]", b"{}", b"\xff", b'{"kind": 1}', b'{"kind": ["x"]}'),
    *(b'{"kind": "Later"}', b'{"kind": "Stepped"}', b'{"kind": "SaveState", "write": "yes"}'),
    *(b'{"kind": "SaveState", "write":' + b"[" * 60_000, b'{"a":' + b"9" * 5000 + b"}"),
)


@pytest.mark.parametrize("odd", ODD_LINES, ids=range(len(ODD_LINES)))
def test_a_line_that_is_no_message_is_left_out(odd: bytes, ends: Ends) -> None:
    """A process that the script starts can write it; it ended the agent."""
    a, b = ends
    for _ in range(2):
        a._socket.sendall(odd + b"\n")
        a.send(SaveState(write=True))
    assert b.receive(30.0) == SaveState(write=True)
    assert b.drain() == [SaveState(write=True)]
    assert b.take_refusal()
    assert b.take_refusal() is None


def test_a_line_of_a_later_release_keeps_what_is_known(ends: Ends) -> None:
    a, b = ends
    a._socket.sendall(b'{"kind": "SaveState", "write": true, "run": 2}\n')
    assert b.drain() == [SaveState(write=True)]


def written_beside(a: Channel, data: bytes, times: int) -> threading.Thread:
    """Has a thread write `data` so often."""

    def write() -> None:
        with suppress(OSError):
            for _ in range(times):
                a._socket.sendall(data)

    thread = threading.Thread(target=write)
    thread.start()
    return thread


def test_a_line_without_an_end_takes_bounded_memory(ends: Ends) -> None:
    a, b = ends
    thread = written_beside(a, b"x" * (1 << 20), MAX_LINE_BYTES // (1 << 20) * 3)
    tracemalloc.start()
    while thread.is_alive() or select.select([b], [], [], 0)[0]:
        assert b.drain() == []
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    thread.join()
    assert most < 3 * MAX_LINE_BYTES
    a._socket.sendall(b" the end of it\n")
    a.send(SaveState(write=False))
    assert b.drain() == [SaveState(write=False)]
    assert "bytes" in (b.take_refusal() or "")


def test_a_line_of_too_many_values_is_left_out(ends: Ends) -> None:
    a, b = ends
    thread = written_beside(a, b'{"kind": "Busy", "doing": [' + b"[]," * (1 << 17) + b"1]}\n", 1)
    while thread.is_alive() or select.select([b], [], [], 0)[0]:
        assert b.drain() == []
    thread.join()
    assert "values" in (b.take_refusal() or "")
    text = "[{,\\" * (1 << 17)
    thread = threading.Thread(target=a.send, args=(Busy(doing=text),))
    thread.start()
    assert b.receive(30.0) == Busy(doing=text), "only what stands outside of texts counts"
    thread.join()


def test_a_writer_without_an_end_does_not_keep_the_reader(ends: Ends) -> None:
    a, b = ends
    thread = written_beside(a, b"not json\n" * 7000, 10_000)
    for _ in range(3):
        assert b.drain() == []
    assert thread.is_alive()
    b._socket.shutdown(socket.SHUT_RDWR)
    thread.join(30.0)
    assert not thread.is_alive()


def test_descriptors_do_not_pile_up_in_an_agent(ends: Ends) -> None:
    a, b = ends
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        a.send_with_fd(SaveState(write=True), 0, 30.0)
        assert b.drain() == [SaveState(write=True)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert b.take_fd() is None


def test_a_long_error_is_shortened_and_others_refused(ends: Ends) -> None:
    a, b = ends
    long = "x" * MAX_LINE_BYTES
    failed = Failed(step=1, blame="user", message=f"begin{long}", traceback=f"at\n{long}\nend")
    thread = threading.Thread(target=a.send, args=(failed,))
    thread.start()
    received = b.receive(30.0)
    thread.join()
    assert isinstance(received, Failed)
    assert received.message.startswith("begin")
    assert received.traceback.startswith("at\nxx") and received.traceback.endswith("\nend")
    with pytest.raises(MessageTooLong, match="a message Busy between worker and agent has"):
        a.send(Busy(doing=long))
