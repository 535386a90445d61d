"""A node's workers go over to another generation inside their loops, as their group sees it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from elasticzero.ipc.assignment import Assignment, Resume
from elasticzero.ipc.channel import Channel
from elasticzero.ipc.messages import (
    Abort,
    Attached,
    AwaitsBoundary,
    Message,
    Prepare,
    PrepareFailed,
    Restored,
    SaveState,
    Stepped,
    Stopping,
    Switched,
    Withdraw,
)
from elasticzero.launcher.protocol.documents import Member, Proposal, World
from elasticzero.launcher.protocol.planned.switch import world_after
from elasticzero.launcher.workers.forking.client import ForkServer
from elasticzero.launcher.workers.group import WorkerGroup
from elasticzero.launcher.workers.process import Worker
from elasticzero.launcher.workers.progress_monitor import WorkerProgress

A, B, C = (Member(name, f"i-{name}", "127.0.0.1", 1, 2, 2, run=1) for name in "abc")
WORLD = World(
    generation=3,
    token="t",
    members=(A, B, C),
    strategy="ddp",
    resume=Resume(tier="fresh"),
    reason="test",
    proofs=True,
)
PROPOSAL = Proposal(
    generation=4, token="new", of="t", members=(B, C), leavers=("a",), reason="a leaves"
)
NOW_S = 50.0


class Node:
    """The group of node c, of ranks 4 and 5, whose processes are the test."""

    def __init__(self, directory: Path) -> None:
        self.group = WorkerGroup(cast(ForkServer, None), generation=3, wakeup_fd=-1, first_rank=4)
        self.ends: list[Channel] = []
        for local_rank, rank in enumerate((4, 5)):
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            log = directory / f"{local_rank}.log"
            worker = Worker(rank, local_rank, 1 << 29, Channel(ours), log, 0)
            self.ends.append(Channel(theirs))
            self.group.workers.append(worker)
            progress = WorkerProgress(rank=rank, pid=1 << 29, log=log, request_location=print)
            self.group.progress_monitor.add(progress)
        for end in self.ends:
            end.send(Attached(pid=1))
            end.send(Restored(step=0, tier="fresh", connect_s=0, build_s=0, restore_s=0))
        self.poll()

    def poll(self) -> list[tuple[int, str]]:
        received = self.group.poll_messages(NOW_S, ())
        return [(worker.local_rank, type(message).__name__) for worker, message in received]

    def receives(self, local_rank: int) -> Message | None:
        return self.ends[local_rank].receive(1.0)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    for channel in (*made.ends, *(worker.channel for worker in made.group.workers)):
        channel.close()


def places(*ranks: int) -> list[Assignment]:
    return [
        Assignment(
            job="job",
            node="c",
            generation=4,
            token="new",
            rank=rank,
            local_rank=local_rank,
            world_size=4,
            local_world_size=2,
            group_rank=1,
            master_address="127.0.0.1",
            master_port=1,
            store_fd=None,
            strategy="ddp",
            resume=Resume(tier="live", step=-1),
            snapshot_root="/tmp",
        )
        for local_rank, rank in enumerate(ranks)
    ]


def stepped(step: int) -> Stepped:
    return Stepped(step=step, at_s=NOW_S, step_s=0.1, data_wait_s=0.0, samples=1)


def test_each_worker_gets_its_place_and_rank_zero_the_store(node: Node) -> None:
    with socket.create_server(("127.0.0.1", 0)) as store:
        node.group.prepare(PROPOSAL, places(0, 1), store, joins=False)
        port = store.getsockname()[1]
    for local_rank in (0, 1):
        message = node.receives(local_rank)
        assert isinstance(message, Prepare)
        assert message.token == "new"
        assert message.assignment is not None and message.assignment.rank == local_rank
    fd = node.ends[0].take_fd()
    assert fd is not None and node.ends[1].take_fd() is None
    with socket.socket(fileno=fd) as received:
        assert received.getsockname()[1] == port
    assert node.group.view(NOW_S).prepared == PROPOSAL


def test_workers_have_other_ranks_once_they_have_gone_over(node: Node) -> None:
    """All have, at one boundary, as soon as one says so; the agent enters the world later."""
    node.group.prepare(PROPOSAL, places(2, 3), None, joins=False)
    node.ends[1].send(stepped(7))
    node.ends[1].send(Switched(token="new", step=7, seconds=0.01))
    node.ends[1].send(stepped(8))
    node.ends[0].send(stepped(7))
    assert node.poll() == [(0, "Stepped"), (1, "Stepped"), (1, "Switched"), (1, "Stepped")]
    assert [worker.rank for worker in node.group.workers] == [2, 3]
    assert (node.group.generation, node.group.first_rank) == (4, 2)
    view = node.group.view(NOW_S)
    assert (view.switched, view.switched_step, view.step) == ("entered", 7, 8)
    assert view.generation < 4, "its agent has not read that world"
    node.group.enter(world_after(WORLD, PROPOSAL, 7), NOW_S)
    view = node.group.view(NOW_S)
    assert (view.generation, view.switched, view.prepared) == (4, "no", None)
    assert view.restored
    node.ends[0].send(Switched(token="new", step=7, seconds=0.01))
    node.poll()
    assert node.group.view(NOW_S) == view, "what was entered is entered once"


def test_a_world_is_entered_though_its_workers_have_not_said_so(node: Node) -> None:
    node.group.prepare(PROPOSAL, places(2, 3), None, joins=False)
    node.group.enter(world_after(WORLD, PROPOSAL, 7), NOW_S)
    assert [worker.rank for worker in node.group.workers] == [2, 3]
    assert node.group.view(NOW_S).generation == 4


def test_workers_of_a_leaver_save_nothing(node: Node) -> None:
    node.group.prepare(PROPOSAL, (), None, joins=False)
    for local_rank in (0, 1):
        message = node.receives(local_rank)
        assert isinstance(message, Prepare) and message.assignment is None
        left = Stopping(step=7, clean=True, complete=True, reason="it leaves", switched="new")
        node.ends[local_rank].send(left)
    node.poll()
    assert node.receives(0) == node.receives(1) == SaveState(write=False)
    view = node.group.view(NOW_S)
    assert (view.switched, view.switched_step, view.at_boundary) == ("left", 7, True)


def test_a_worker_that_cannot_be_prepared_says_why(node: Node) -> None:
    node.group.prepare(PROPOSAL, places(2, 3), None, joins=False)
    node.ends[0].send(PrepareFailed(token="another", reason="late"))
    node.poll()
    assert node.group.view(NOW_S).refused == ""
    node.ends[1].send(PrepareFailed(token="new", reason="no port"))
    node.poll()
    assert node.group.view(NOW_S).refused == "rank 5 cannot be prepared: no port"
    node.group.withdraw("no port")
    for local_rank in (0, 1):
        assert isinstance(node.receives(local_rank), Prepare)
        assert node.receives(local_rank) == Withdraw(token="new", reason="no port")
    assert node.group.view(NOW_S).withdrawn


def test_workers_that_went_over_are_stopped_like_any_others(node: Node) -> None:
    node.group.prepare(PROPOSAL, places(2, 3), None, joins=False)
    node.ends[0].send(Switched(token="new", step=7, seconds=0.01))
    node.poll()
    node.group.stop("it broke", NOW_S)
    for local_rank in (0, 1):
        assert isinstance(node.receives(local_rank), Prepare)
        assert node.receives(local_rank) == Abort(reason="it broke")
    stopping = Stopping(step=9, clean=True, complete=True, reason="it broke")
    for end in node.ends:
        end.send(stopping)
    node.poll()
    assert node.receives(0) == SaveState(write=True)
    assert node.receives(1) == SaveState(write=False), "one of them saves the whole state"


def test_workers_that_come_in_are_ready_once_all_wait(node: Node) -> None:
    """Then they go over with the others; until the agent enters the world they are of the one
    before."""
    node.group.come_in(WORLD, PROPOSAL)
    node.ends[0].send(AwaitsBoundary())
    node.poll()
    assert not node.group.view(NOW_S).awaits
    node.ends[1].send(AwaitsBoundary())
    node.poll()
    view = node.group.view(NOW_S)
    assert (view.awaits, view.generation, view.prepared) == (True, WORLD.generation, PROPOSAL)
    node.ends[0].send(Switched(token="new", step=7, seconds=0.01))
    node.poll()
    view = node.group.view(NOW_S)
    assert (view.switched, view.switched_step) == ("entered", 7)
    node.group.enter(replace(WORLD, generation=4, token="new"), NOW_S)
    view = node.group.view(NOW_S)
    assert (view.generation, view.awaits, view.switched) == (4, False, "no")


def test_workers_are_told_whether_others_come_in(node: Node) -> None:
    node.group.prepare(PROPOSAL, places(2, 3), None, joins=True)
    message = node.receives(0)
    assert isinstance(message, Prepare) and message.joins
