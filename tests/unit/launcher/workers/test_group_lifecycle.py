"""A worker group's state against a simple model: the flags that it replaced, computed anew from
what every worker has reported and what the agent has told them.

The test drives the real `WorkerGroup`: reports come over real channels, and only the signals are
recorded instead of being sent.
"""

from __future__ import annotations

import signal
import socket
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticzero.ipc.channel import Channel
from elasticzero.ipc.failure import Failed
from elasticzero.ipc.messages import (
    Attached,
    Finished,
    Message,
    Restored,
    Stepped,
    Stopping,
    Waiting,
)
from elasticzero.launcher.protocol.view import (
    GroupOrder,
    GroupOutcome,
    GroupStage,
    WorkerGroupState,
)
from elasticzero.launcher.workers.forking.client import ForkServer
from elasticzero.launcher.workers.group import LATE_AFTER_S, WorkerGroup
from elasticzero.launcher.workers.group_lifecycle import (
    GROUP_TRANSITIONS,
    GroupEvent,
    advance,
    group_events,
)
from elasticzero.launcher.workers.lifecycle import Event, WorkerState
from elasticzero.launcher.workers.process import Worker
from elasticzero.launcher.workers.progress_monitor import WorkerProgress

RANKS = 2
NO_PID = 1 << 29
"""No process has such an id."""
Part = GroupStage | GroupOutcome | GroupOrder
PARTS = (GroupStage, GroupOutcome, GroupOrder)


@dataclass(slots=True)
class SignalledWorker(Worker):
    """A worker that notes its signals, and whether it could still receive them."""

    signals: list[tuple[signal.Signals, bool, bool]] = field(default_factory=list)
    """Each signal, whether the process existed, and whether it was leaving its loop."""

    def send_signal(self, number: signal.Signals) -> None:
        self.signals.append((number, self.running, self.state.stopping))


class Driver:
    """A real group of workers whose processes are the test."""

    def __init__(self, directory: Path) -> None:
        self.group = WorkerGroup(cast(ForkServer, None), generation=3, wakeup_fd=-1)
        self.now_s = 0.0
        self.aborted = self.killed = False
        self.ends: list[Channel] = []
        self.workers: list[SignalledWorker] = []
        for rank in range(RANKS):
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            log = directory / f"{rank}.log"
            worker = SignalledWorker(rank, rank, NO_PID + rank, Channel(ours), log, 0)
            self.ends.append(Channel(theirs))
            self.workers.append(worker)
            progress = WorkerProgress(
                rank=rank, pid=worker.pid, log=log, request_location=lambda: None
            )
            self.group.progress_monitor.add(progress)
        self.group.workers = list(self.workers)

    def close(self) -> None:
        for channel in (*self.ends, *(worker.channel for worker in self.workers)):
            channel.close()

    def says(self, rank: int, message: Message) -> None:
        if self.workers[rank].running:
            self.ends[rank].send(message)
            self.group.poll_messages(self.now_s, ())

    def exits(self, rank: int, code: int) -> None:
        if self.workers[rank].running:
            self.group.poll_messages(self.now_s, [(NO_PID + rank, code)])

    def stop(self) -> None:
        self.aborted = True
        self.group.stop("the test stops it", self.now_s)

    def kill(self, *, spare_saving: bool) -> None:
        self.killed |= not spare_saving
        before = [len(worker.signals) for worker in self.workers]
        self.group.kill(spare_saving=spare_saving)
        for worker, count in zip(self.workers, before, strict=True):
            for number, running, saving in worker.signals[count:]:
                assert number == signal.SIGKILL and running
                assert not (spare_saving and saving), "a worker that saves is spared"

    def model(self) -> dict[str, bool]:
        """The facts as they follow from the states of the workers and the agent's orders."""
        states = [worker.state for worker in self.workers]
        late, working = self.now_s >= LATE_AFTER_S, any(state.at_work for state in states)
        restored = all(state.restored for state in states)
        left = all(state.stopping and not state.failed for state in states)
        return {
            "attached": all(state.attached for state in states),
            "restored": restored,
            "plain": late and not any(state.attached for state in states),
            "late": late and not restored,
            "finished": not working and all(state.finished for state in states),
            "at_boundary": left and not self.aborted,
            "killed": self.killed,
        }


REPORTS: dict[str, Message] = {
    "attached": Attached(pid=1),
    "restored": Restored(step=0, tier="fresh", connect_s=0.0, build_s=0.0, restore_s=0.0),
    "stepped": Stepped(step=1, at_s=0.0, step_s=0.1, data_wait_s=0.0, samples=1),
    "stopping": Stopping(step=1, clean=True, complete=False, reason="a flag"),
    "failed": Failed(step=1, blame="user", message="ValueError: no", traceback=""),
    "lost a peer": Failed(step=1, blame="peer", message="closed", traceback=""),
    "finished": Finished(step=1),
    "waiting": Waiting(),
}
EXITS = {"exits": 0, "exits with an error": 1, "is killed": -signal.SIGKILL}
ORDERS = ("request", "stop", "kill the unsaved", "kill", "wait")
INPUTS = st.one_of(
    st.tuples(st.sampled_from([*REPORTS, *EXITS]), st.integers(0, RANKS - 1)),
    st.tuples(st.sampled_from(ORDERS), st.just(-1)),
)


def put(driver: Driver, kind: str, rank: int) -> None:
    """Has one thing happen to the group."""
    if kind in REPORTS:
        driver.says(rank, REPORTS[kind])
    elif kind in EXITS:
        driver.exits(rank, EXITS[kind])
    elif kind == "request":
        driver.group.request(1)
    elif kind == "stop":
        driver.stop()
    elif kind == "wait":
        driver.now_s += LATE_AFTER_S / 2
    else:
        driver.kill(spare_saving=kind == "kill the unsaved")


def facts(state: WorkerGroupState) -> dict[str, bool]:
    names = ("attached", "restored", "plain", "late", "finished", "at_boundary", "killed")
    return {name: getattr(state, name) for name in names}


def reachable(part: Part) -> set[Part]:
    """The parts to which the table leads from this one, itself among them."""
    reached = {part}
    while next_states := {b for (a, _), b in GROUP_TRANSITIONS.items() if a in reached} - reached:
        reached |= next_states
    return reached


@given(st.lists(INPUTS, max_size=20))
def test_a_group_is_what_its_workers_and_orders_make_it(
    tmp_path_factory: pytest.TempPathFactory, inputs: list[tuple[str, int]]
) -> None:
    driver = Driver(tmp_path_factory.getbasetemp())
    try:
        seen = [driver.group.view(driver.now_s)]
        for kind, rank in inputs:
            put(driver, kind, rank)
            seen.append(driver.group.view(driver.now_s))
            assert facts(seen[-1]) == driver.model()
            assert seen[-1].running == sum(worker.at_work for worker in driver.workers)
        for before, after in pairwise(seen):
            for name in ("stage", "outcome", "order"):
                assert getattr(after, name) in reachable(getattr(before, name))
        for worker in driver.workers:
            assert all(existed for _, existed, _ in worker.signals), "a process id may be reused"
    finally:
        driver.close()


@given(st.lists(st.sampled_from(GroupEvent)))
def test_no_order_of_events_takes_a_part_back(events: list[GroupEvent]) -> None:
    state = WorkerGroupState()
    for event in events:
        after = advance(state, event)
        assert advance(after, event) == after, "a repeated event changes nothing"
        for name in ("stage", "outcome", "order"):
            old, new = getattr(state, name), getattr(after, name)
            assert new is old or GROUP_TRANSITIONS[old, event] is new
        state = after


@given(st.lists(st.tuples(st.integers(0, RANKS - 1), st.sampled_from(Event))), st.integers(0, 20))
def test_the_time_may_be_looked_at_in_the_end(
    reports: list[tuple[int, Event]], position: int
) -> None:
    """A group that becomes late is the same whether its workers report before or after that."""
    early, late = WorkerGroupState(), WorkerGroupState()
    states = [WorkerState()] * RANKS
    for index, (rank, event) in enumerate(reports):
        if index == position:
            early = advance(early, GroupEvent.LATE)
        states[rank] = states[rank].after(event)
        early = advance(early, *group_events(states))
        late = advance(late, *group_events(states))
    assert advance(early, GroupEvent.LATE) == advance(late, GroupEvent.LATE)


def test_every_part_can_be_reached_and_the_last_ones_are_final() -> None:
    first: list[Part] = [GroupStage.STARTING, GroupOutcome.OPEN, GroupOrder.TRAIN]
    for part, kind in zip(first, PARTS, strict=True):
        assert reachable(part) == set(kind)
    final = {part for kind in PARTS for part in kind if reachable(part) == {part}}
    assert final == {GroupStage.RESTORED, GroupOutcome.FINISHED, GroupOrder.KILL}


def test_no_transition_leads_back() -> None:
    for (before, _), after in GROUP_TRANSITIONS.items():
        assert before not in reachable(after)


def test_no_worker_makes_no_event() -> None:
    assert list(group_events([])) == []


def test_a_snapshot_is_held_since_the_first_step_that_says_so(tmp_path: Path) -> None:
    """Whichever rank says it first, and whatever an older message says later."""
    driver = Driver(tmp_path)
    steps = [(0, 1.0, None), (0, 2.0, 0), (1, 3.0, 0), (0, 4.0, 8), (1, 4.5, 8), (1, 5.0, 0)]
    try:
        seen = []
        for rank, at_s, held in steps:
            step = Stepped(step=1, at_s=at_s, step_s=0.1, data_wait_s=0.0, samples=1, held=held)
            driver.says(rank, step)
            view = driver.group.view(driver.now_s)
            seen.append((view.held, view.held_s))
        assert seen == [(None, 0.0), (0, 2.0), (0, 2.0), (8, 4.0), (8, 4.0), (8, 4.0)]
    finally:
        driver.close()
