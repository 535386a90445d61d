"""How a worker waits at the step of a fault, and what ends the wait."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from elasticzero.ipc.agent_client import STANDALONE, AgentClient, GenerationEnded
from elasticzero.ipc.channel import Channel
from elasticzero.ipc.fault_hold import FaultHold, open_fault_hold
from elasticzero.ipc.messages import (
    FAULT_STEPS_VARIABLE,
    AwaitsFault,
    Busy,
    FaultStruck,
    Message,
)
from tests.support.deadlines import patience


@pytest.fixture
def ends() -> Iterator[tuple[Channel, AgentClient]]:
    """The agent's end of a channel, and the worker's client, whose thread ends with neither."""
    ours, theirs = socket.socketpair()
    with closing(Channel(ours)) as channel:
        client = AgentClient(None, STANDALONE)
        client._channel = Channel(theirs)
        yield channel, client
        theirs.close()


def next_message(channel: Channel) -> Message | None:
    return channel.receive(patience(10.0))


def test_only_a_worker_whose_command_has_faults_at_steps_waits(
    ends: tuple[Channel, AgentClient],
) -> None:
    _, client = ends
    assert open_fault_hold({}, client) is None
    assert open_fault_hold({FAULT_STEPS_VARIABLE: ""}, client) is None
    assert open_fault_hold({FAULT_STEPS_VARIABLE: "60,7"}, client) is not None
    alone = AgentClient(None, STANDALONE)
    assert open_fault_hold({FAULT_STEPS_VARIABLE: "60"}, alone) is None


def test_a_worker_waits_at_the_step_until_the_fault_has_come(
    ends: tuple[Channel, AgentClient],
) -> None:
    channel, client = ends
    hold = FaultHold([7, 60], client)
    for step in range(7):
        hold.hold(step)
    thread = threading.Thread(target=hold.hold, args=(7,))
    thread.start()
    assert next_message(channel) == AwaitsFault(step=7)
    assert next_message(channel) == Busy(doing="waiting for a fault")
    assert thread.is_alive()
    client._handle(FaultStruck(step=7))
    thread.join(patience(10.0))
    assert not thread.is_alive()
    assert next_message(channel) == Busy(doing=None)
    for step in range(7, 60):
        hold.hold(step)  # none of these waits
    client._handle(FaultStruck(step=60))
    client._handle(FaultStruck(step=7))  # told twice, and late
    hold.hold(60)


def test_training_that_begins_behind_the_step_waits_at_once(
    ends: tuple[Channel, AgentClient],
) -> None:
    channel, client = ends
    hold = FaultHold([7, 60], client)
    thread = threading.Thread(target=hold.hold, args=(75,))
    thread.start()
    assert next_message(channel) == AwaitsFault(step=75)
    client._handle(FaultStruck(step=75))
    thread.join(patience(10.0))
    assert not thread.is_alive()


def test_the_end_of_the_generation_ends_the_wait(ends: tuple[Channel, AgentClient]) -> None:
    """As after a fault that has struck another node."""
    _, client = ends
    hold = FaultHold([7], client)
    client.aborted = "node-2 is lost"
    with pytest.raises(GenerationEnded, match="node-2 is lost"):
        hold.hold(7)
    client.aborted = None
    client.fault_struck = 7
    hold.hold(8)
