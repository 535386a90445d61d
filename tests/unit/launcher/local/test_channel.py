"""What `elasticzero local` and its agents say to each other, and which agents wait for which."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from elasticzero.ipc.assignment import Resume
from elasticzero.ipc.messages import AwaitsFault, Busy, FaultStruck, Message
from elasticzero.launcher.http.access import AgentAccess
from elasticzero.launcher.local.channel import (
    EVERY_STEP,
    VARIABLE,
    FaultRelay,
    LocalChannel,
    Start,
    await_start,
    inherited_channel,
)
from elasticzero.launcher.protocol.documents import Member, World
from elasticzero.launcher.protocol.view import View
from elasticzero.launcher.secrets import Secret
from tests.support.deadlines import patience

ME = Member("a", "a-1", "127.0.0.1", 1, 2, 1)
WORLD = World(
    generation=3,
    token="t",
    members=(ME,),
    strategy="ddp",
    resume=Resume(tier="fresh"),
    reason="test",
)
VIEW, ACCESS = View(me=ME, world=WORLD), AgentAccess(Secret("the-job's-own-password"))


@pytest.fixture
def ends() -> Iterator[tuple[LocalChannel, LocalChannel]]:
    """The command's end, and the agent's."""
    ours, theirs = LocalChannel.pair()
    with closing(ours), closing(LocalChannel(theirs)) as inherited:
        yield ours, inherited


def test_messages_keep_their_borders_and_an_end_is_noticed(
    ends: tuple[LocalChannel, LocalChannel],
) -> None:
    command, agent = ends
    assert list(command.receive()) == []
    agent.send(ready=True)
    agent.send(waits=60, rank=1)
    assert list(command.receive()) == [{"ready": True}, {"waits": 60, "rank": 1}]
    agent.send(waits=61, rank=1)
    agent.close()
    assert list(command.receive()) == [{"waits": 61, "rank": 1}]
    assert command.closed
    assert list(command.receive(5.0)) == []
    command.send(begin=True)  # nobody is there, and that is no error


def test_an_agent_takes_its_end_out_of_the_environment() -> None:
    ours, theirs = LocalChannel.pair()
    environment = {VARIABLE: str(theirs.fileno()), "OTHER": "x"}
    with closing(ours):
        os.set_inheritable(theirs.fileno(), True)
        taken = inherited_channel(environment)
        assert taken is not None and environment == {"OTHER": "x"}
        assert not os.get_inheritable(theirs.fileno())
        taken.send(ready=True)
        assert list(ours.receive(patience(10.0))) == [{"ready": True}]
        theirs.detach()
        taken.close()
    assert inherited_channel({}) is None
    with socket.socket() as gone:
        number = gone.fileno()
    assert inherited_channel({VARIABLE: str(number)}) is None
    assert inherited_channel({VARIABLE: "x"}) is None


def test_an_agent_waits_until_it_may_begin(ends: tuple[LocalChannel, LocalChannel]) -> None:
    command, agent = ends
    thread = threading.Thread(target=await_start, args=(agent, lambda: False))
    thread.start()
    assert list(command.receive(patience(10.0))) == [{"ready": True}]
    assert thread.is_alive()
    command.send(begin=True)
    thread.join(patience(10.0))
    assert not thread.is_alive()


def test_an_agent_that_is_to_leave_or_whose_command_is_gone_waits_no_longer(
    ends: tuple[LocalChannel, LocalChannel],
) -> None:
    command, agent = ends
    await_start(agent, lambda: True)
    command.close()
    await_start(agent, lambda: False)


def test_nodes_register_together_without_those_that_have_ended() -> None:
    start = Start()
    assert start.may_register([]) == []
    start.note_ready("node-0")
    assert start.may_register(["node-0", "node-1", "node-2"]) == []
    start.note_ready("node-2")
    assert start.may_register(["node-0", "node-1", "node-2"]) == []
    assert start.may_register(["node-0", "node-2"]) == ["node-0", "node-2"]  # node-1 has ended
    assert start.may_register(["node-0", "node-2"]) == []
    start.note_ready("node-3")  # it was started later, and waits for none
    assert start.may_register(["node-0", "node-2", "node-3", "node-4"]) == ["node-3"]


def test_whatever_agents_do_each_that_lives_may_register_once() -> None:
    for seed in range(500):
        draw, start = random.Random(seed), Start()
        nodes = [f"node-{i}" for i in range(draw.randrange(1, 5))]
        running, preparing, registered = set(nodes), set(nodes), list[str]()
        while preparing & running:
            node = draw.choice(sorted(preparing & running))
            if draw.random() < 0.3:
                running.discard(node)
            else:
                preparing.discard(node)
                start.note_ready(node)
            released = start.may_register(running)
            registered += released
            assert not (released and preparing & running), seed
        registered += start.may_register(running)
        assert sorted(registered) == sorted(running), seed


def test_a_rank_that_waits_is_passed_on_and_goes_on_once_it_is_told(
    ends: tuple[LocalChannel, LocalChannel],
) -> None:
    command, agent = ends
    released: list[Message] = []
    relay = FaultRelay(agent, released.append)
    relay.started(WORLD, (4, 5))
    relay.received(4, Busy(doing="waiting for a fault"))
    relay.received(4, AwaitsFault(step=60))
    assert list(command.receive()) == [{"waits": 60, "generation": 3, "rank": 4, "ranks": 2}]
    relay.turn(VIEW, ACCESS)
    assert released == []
    command.send(struck=60)
    relay.turn(VIEW, ACCESS)
    relay.turn(VIEW, ACCESS)
    assert released == [FaultStruck(step=60)]
    relay.received(5, AwaitsFault(step=60))  # a worker that began after it asks in vain
    assert released == [FaultStruck(step=60)] * 2
    assert list(command.receive()) == []


def test_no_rank_waits_for_a_command_that_is_gone(
    ends: tuple[LocalChannel, LocalChannel],
) -> None:
    command, agent = ends
    released: list[Message] = []
    relay = FaultRelay(agent, released.append)
    relay.started(WORLD, (0,))
    relay.received(0, AwaitsFault(step=60))
    command.close()
    relay.turn(VIEW, ACCESS)
    relay.turn(VIEW, ACCESS)
    relay.received(0, AwaitsFault(step=70))
    relay.close(None)
    assert released == [FaultStruck(step=EVERY_STEP)] * 2
