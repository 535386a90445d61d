"""What an agent does with the processes that stand by, and with what they say."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from elasticzero.ipc.assignment import NodePlace, WorkerSettings
from elasticzero.ipc.channel import Channel
from elasticzero.ipc.messages import CannotStandBy, Confirm, Message, Outdated, StandsBy
from elasticzero.launcher.workers.forking.requests import Launch
from elasticzero.launcher.workers.process import Logs, Worker
from elasticzero.launcher.workers.reserve import standbys as module
from elasticzero.launcher.workers.reserve.standby_rules import (
    MOST_CHANGES,
    MOST_DEATHS,
    StandbyFacts,
)
from elasticzero.launcher.workers.reserve.standbys import LEAST_LIMIT_S, LEAVE_S, Standbys
from elasticzero.processes import Ram, is_alive
from tests.support.deadlines import patience

NEEDED = StandbyFacts(settled_s=10.0, script_s=3.0)


@dataclass
class Node:
    """A node whose processes are those of `sleep`, and say what a test has them say."""

    standbys: Standbys
    ends: dict[int, Channel] = field(default_factory=dict)
    """The process's end of the channel, by local rank."""
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    promoted: list[int] = field(default_factory=list)
    now_s: float = 100.0
    channels: list[Channel] = field(default_factory=list)
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def fork(self, _: object, place: NodePlace, *__: object) -> tuple[Worker, int]:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        process = subprocess.Popen(["sleep", "100"], start_new_session=True)
        rank = place.local_rank
        self.ends[rank], self.processes[rank] = Channel(theirs), process
        channel = Channel(ours)
        self.channels += [channel, self.ends[rank]]
        self.started.append(process)
        output = os.memfd_create("output")
        os.write(output, b"a line\nlast words\n")
        return Worker(-1, rank, process.pid, channel, Path("log"), 0), output

    def promote(self, pid: int) -> None:
        self.promoted.append(pid)

    def begin(self) -> None:
        standbys = self.standbys
        facts = replace(NEEDED, beginning=standbys.beginning, refused=standbys.refused)
        standbys.turn(cast(Any, self), facts, self.now_s)

    def say(self, rank: int, message: Message) -> None:
        self.ends[rank].send(message)

    def poll(self, *ended: tuple[int, int]) -> list[str]:
        return [told.refused for told in self.standbys.poll(ended, self.now_s)]

    def all_wait(self, count: int) -> None:
        for rank in range(count):
            self.begin()
            self.say(rank, StandsBy(private_bytes=5))
            self.poll()

    def ends_by(self, rank: int) -> int:
        """The signal that has ended a process."""
        return -self.processes[rank].wait(patience(10.0))


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    places = [
        NodePlace(
            job="job",
            local_rank=rank,
            local_world_size=3,
            error_file="",
            settings=WorkerSettings(),
        )
        for rank in range(3)
    ]
    launch = Launch(target="train.py", is_module=False, arguments=(), environment={}, directory="/")
    made = Node(Standbys(places, launch, Logs(directory=tmp_path), 0))
    monkeypatch.setattr(module, "fork_standby", made.fork)
    yield made
    made.standbys.forget_all()
    for channel in made.channels:
        channel.close()
    for process in made.started:
        process.kill()
        process.wait()


def test_one_begins_after_the_other(node: Node) -> None:
    node.begin()
    node.begin()
    assert [*node.ends] == [0] and node.standbys.beginning
    node.say(0, StandsBy(private_bytes=7))
    assert node.poll() == [""] and node.standbys.private_bytes == 7
    node.begin()
    assert [*node.ends] == [0, 1]


def test_those_that_confirm_are_taken_and_others_stay(node: Node) -> None:
    node.all_wait(2)
    node.begin()
    node.say(0, StandsBy(private_bytes=5))
    taken = node.standbys.take(cast(Any, node), {0, 2})
    assert [*taken] == [0] and node.promoted == [node.processes[0].pid]
    assert isinstance(node.ends[0].receive(patience(5.0)), Confirm)
    assert all(is_alive(process.pid) for process in node.processes.values())
    assert node.poll() == [] and node.standbys.beginning


@pytest.mark.parametrize("answer", ["none", "outdated", "closed"])
def test_one_that_does_not_confirm_is_ended(node: Node, answer: str) -> None:
    node.all_wait(2)
    if answer == "outdated":
        node.say(0, Outdated(path="a", stamp="1"))
    elif answer == "closed":
        node.ends[0].close()
    node.say(1, StandsBy(private_bytes=5))
    began_s = time.monotonic()
    assert [*node.standbys.take(cast(Any, node), {0, 1})] == [1]
    assert answer != "none" or time.monotonic() - began_s >= module.CONFIRM_S
    assert node.ends_by(0) == signal.SIGKILL


def test_one_that_cannot_be_held_ends_all_others_and_leaves_by_itself(node: Node) -> None:
    """While the other ones are looked at, too."""
    node.all_wait(2)
    node.begin()
    node.say(0, CannotStandBy(reason="the script looks at RANK"))
    assert node.poll() == ["the script looks at RANK"]
    assert node.ends_by(1) == signal.SIGKILL and node.ends_by(2) == signal.SIGINT
    assert is_alive(node.processes[0].pid)
    node.now_s += LEAVE_S + 1.0
    assert node.poll() == [] and node.ends_by(0) == signal.SIGKILL
    node.begin()
    assert len(node.ends) == 3 and not node.standbys.beginning


def test_edits_are_counted_and_not_processes(node: Node) -> None:
    """Each edit ends the processes of all local ranks."""
    for edit in range(MOST_CHANGES):
        node.ends.clear()
        node.all_wait(3)
        for rank in range(3):
            node.say(rank, Outdated(path="settings", stamp=str(edit)))
        told = node.poll()
        assert len(told) == (edit == MOST_CHANGES - 1)
        pids = [node.processes[rank].pid for rank in range(3)]
        node.poll(*((pid, 0) for pid in pids))
    assert told == ["settings, which the script reads first, changes again and again"]


def test_ends_by_themselves_are_counted(node: Node) -> None:
    for death in range(MOST_DEATHS):
        node.begin()
        if death == 1:
            node.say(0, StandsBy(private_bytes=5))
            node.poll()
        told = node.poll((node.processes[0].pid, 3))
    assert told == ["it ends by itself, with exit code 3: last words"]


def test_one_that_does_not_arrive_is_interrupted(node: Node) -> None:
    node.begin()
    node.now_s += LEAST_LIMIT_S - 1.0
    assert node.poll() == [] and is_alive(node.processes[0].pid)
    node.now_s += 2.0
    node.poll()
    assert node.ends_by(0) == signal.SIGINT and not node.standbys.beginning


def test_exhausted_memory_ends_all_for_good(node: Node) -> None:
    node.all_wait(1)
    facts = StandbyFacts(settled_s=10.0, script_s=3.0, memory=Ram(1, 100))
    node.standbys.turn(cast(Any, node), facts, node.now_s)
    assert node.poll() == ["memory is exhausted"] and node.ends_by(0) == signal.SIGKILL


def test_what_its_script_holds_is_released_at_the_end(node: Node) -> None:
    node.all_wait(1)
    node.begin()
    node.standbys.close()
    assert node.ends_by(0) == signal.SIGKILL and node.ends_by(1) == signal.SIGINT
