"""The next world is offered, taken back, connected, promised and entered in any order."""

from __future__ import annotations

import os
import queue
import random
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elasticzero.comm.process_group import ProcessGroups, connect
from elasticzero.comm.rendezvous import RankInfo, rendezvous
from elasticzero.comm.worlds import next_world
from elasticzero.comm.worlds.next_world import STAGES, Event, NextWorld, Stage
from elasticzero.errors import RetryError
from elasticzero.ipc.agent_client import STANDALONE
from elasticzero.ipc.messages import Message, Prepare, PrepareFailed, Withdraw
from elasticzero.torch_internals.groups import forget_group
from tests.support.deadlines import patience
from tests.support.groups import end_groups

CPU = torch.device("cpu")


@dataclass(eq=False)
class Groups:
    """The connected groups of a world."""

    token: str
    retired: int = 0

    def retire(self) -> threading.Thread:
        self.retired += 1
        thread = threading.Thread(target=lambda: None)
        thread.start()
        return thread


@dataclass(eq=False)
class Store:
    closed: threading.Event = field(default_factory=threading.Event)

    def close(self) -> None:
        self.closed.set()


class Agent:
    """The client of the agent, and what connects worlds when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[Message] = []
        self.made: list[Groups] = []
        self._outcomes: dict[str, queue.SimpleQueue[bool]] = {}
        self.stores: dict[str, Store] = {}
        monkeypatch.setattr(next_world, "connect_beside", self._connect)
        self.world = NextWorld(self, CPU)  # type: ignore[arg-type]

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def _connect(
        self,
        info: RankInfo,
        device: torch.device,
        limit_s: float,
        reached: Callable[[Any], None],
    ) -> Groups:
        store, outcomes = Store(), self._outcomes[info.token]
        self.stores[info.token] = store
        reached(store)
        while True:
            try:
                succeeds = outcomes.get(timeout=0.002)
                break
            except queue.Empty:
                if store.closed.is_set():
                    raise RetryError("the store is closed") from None
        if not succeeds:
            raise RetryError("a rank did not come")
        self.made.append(Groups(info.token))
        return self.made[-1]

    def offer(self, token: str, *, leaves: bool = False) -> None:
        self._outcomes[token] = queue.SimpleQueue()
        assignment = None if leaves else replace(STANDALONE, token=token)
        self.world.receive(Prepare(token=token, assignment=assignment))

    def withdraw(self, token: str) -> None:
        self.world.receive(Withdraw(token=token, reason="the test"))

    def connect(self, token: str, *, succeeds: bool = True) -> None:
        self._outcomes[token].put(succeeds)
        self.settle()

    def settle(self) -> None:
        """Waits for the threads whose outcome is known."""
        for thread in self.world._threads:
            thread.join(0.02)

    @property
    def failures(self) -> list[PrepareFailed]:
        return [message for message in self.sent if isinstance(message, PrepareFailed)]


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Agent:
    made = Agent(monkeypatch)
    made.world.admit("")
    return made


def until(condition: Callable[[], bool]) -> None:
    done = threading.Event()
    for _ in range(int(patience(20.0) / 0.01)):
        if condition():
            return
        done.wait(0.01)
    raise AssertionError("too late")


def test_a_rank_that_stays_is_prepared_once_its_groups_are_connected(agent: Agent) -> None:
    agent.offer("a")
    assert not agent.world.offered and not agent.world.promise()
    agent.connect("a")
    until(lambda: agent.world.offered)
    assert agent.world.promise() and agent.world.decide(enters=False) is None
    assert agent.world.promise()
    entered = agent.world.decide(enters=True)
    groups: Any = agent.made[0]
    assert entered is not None and entered.groups is groups
    assert agent.world.decide(enters=True) is None and agent.made[0].retired == 1


def test_a_rank_that_leaves_is_prepared_at_once(agent: Agent) -> None:
    agent.offer("a", leaves=True)
    assert agent.world.promise()
    entered = agent.world.decide(enters=True)
    assert entered is not None and (entered.token, entered.assignment) == ("a", None)


@pytest.mark.parametrize("enters", [True, False])
def test_what_was_promised_is_kept_though_it_is_withdrawn(agent: Agent, enters: bool) -> None:
    agent.offer("a")
    agent.connect("a")
    until(lambda: agent.world.promise())
    agent.withdraw("a")
    assert agent.made[0].retired == 0
    entered = agent.world.decide(enters=enters)
    assert (entered is not None) == enters
    assert agent.made[0].retired == (0 if enters else 1)
    assert not agent.world.promise()


def test_a_message_with_another_token_takes_nothing_back(agent: Agent) -> None:
    agent.offer("a")
    agent.withdraw("b")
    agent.connect("a")
    until(lambda: agent.world.offered)


def test_a_world_that_is_withdrawn_while_it_connects_ends_without_a_word(agent: Agent) -> None:
    agent.offer("a")
    until(lambda: "a" in agent.stores)
    agent.withdraw("a")
    assert agent.stores["a"].closed.is_set()
    until(lambda: not any(thread.is_alive() for thread in agent.world._threads))
    assert agent.sent == [] and not agent.world.offered


def test_a_world_that_is_offered_again_is_not_the_one_that_was_withdrawn(agent: Agent) -> None:
    agent.offer("a")
    until(lambda: "a" in agent.stores)
    first = agent.stores.pop("a")
    agent.world._offer = replace(agent.world._offer, store=None)  # it is reached, and not noted yet
    agent.withdraw("a")
    agent.offer("a")
    until(lambda: "a" in agent.stores)
    first.close()  # the thread that connects the first one fails
    until(lambda: sum(thread.is_alive() for thread in agent.world._threads) == 1)
    assert agent.sent == []
    agent.connect("a")
    until(lambda: agent.world.offered)


def test_a_failure_is_said_for_each_offer_and_stays(agent: Agent) -> None:
    agent.offer("a")
    agent.connect("a", succeeds=False)
    until(lambda: len(agent.failures) == 1)
    agent.offer("a")
    assert [(f.token, f.final) for f in agent.failures] == [("a", False)] * 2
    assert "did not come" in agent.failures[0].reason
    agent.offer("b", leaves=True)
    assert agent.world.offered


def test_an_offer_during_a_promise_to_another_world_is_refused(agent: Agent) -> None:
    agent.offer("a", leaves=True)
    assert agent.world.promise()
    agent.offer("b")
    assert [(f.token, f.final) for f in agent.failures] == [("b", False)]
    entered = agent.world.decide(enters=True)
    assert entered is not None and entered.token == "a"


@pytest.mark.parametrize(("obstacle", "final"), [(None, False), ("a GPU", True)])
def test_an_offer_that_is_not_taken_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch, obstacle: str | None, final: bool
) -> None:
    agent = Agent(monkeypatch)
    if obstacle is not None:
        agent.world.admit(obstacle)
        agent.world.admit("")  # it stays
    with socket.socket() as bound:
        fd = os.dup(bound.fileno())
    agent.world.receive(Prepare(token="a", assignment=replace(STANDALONE, store_fd=fd)))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert [(f.token, f.final) for f in agent.failures] == [("a", final)]


def test_nothing_is_left_of_a_generation_that_ends(agent: Agent) -> None:
    agent.offer("a")
    agent.connect("a")
    until(lambda: agent.world.promise())
    agent.world.decide(enters=True)
    agent.offer("b")
    until(lambda: "b" in agent.stores)
    agent.world.close()
    assert agent.stores["b"].closed.is_set() and agent.made[0].retired == 1
    agent.offer("c", leaves=True)
    assert not agent.world.offered


def test_a_promise_always_ends_by_the_word_of_all_ranks() -> None:
    bound = {Stage.PROMISED, Stage.RECALLED}
    for (stage, event), after in STAGES.items():
        if stage in bound and event not in (Event.DECLINED, Event.ENTERED):
            assert after in bound
    assert {(s, e) for s in bound for e in (Event.DECLINED, Event.ENTERED)} <= STAGES.keys()


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_messages_keeps_promises_and_groups(agent: Agent, seed: int) -> None:
    """A rank enters what it has promised alone, and each connected group is ended once."""
    chance, promised, returned = random.Random(seed), "", 0
    for _ in range(40):
        token = chance.choice("abc")
        match chance.randrange(6):
            case 0 | 1:
                agent.offer(token, leaves=chance.random() < 0.3)
            case 2:
                agent.withdraw(token)
            case 3 if token in agent.stores and not agent.stores[token].closed.is_set():
                agent.connect(token, succeeds=chance.random() < 0.8)
            case 3:
                agent.settle()
            case 4 if not promised:
                if agent.world.promise():
                    promised = agent.world._offer.token
            case 5:
                enters = chance.random() < 0.5
                offer = agent.world.decide(enters=enters)
                assert (offer is not None) == bool(promised and enters)
                if offer is not None:
                    assert offer.token == promised
                    assert offer.assignment is None or offer.groups is not None
                    returned += 1
                promised = ""
        if promised:
            offer = agent.world._offer
            assert offer.token == promised and (offer.groups is not None) == bool(offer.assignment)
            assert not isinstance(offer.groups, Groups) or not offer.groups.retired
    agent.world.close()
    until(lambda: not any(thread.is_alive() for thread in agent.world._threads))
    assert all(groups.retired == 1 for groups in agent.made)


def bound_store() -> tuple[int, int]:
    """The descriptor and the port of a socket for rank 0's store."""
    store = socket.socket()
    store.bind(("127.0.0.1", 0))
    port: int = store.getsockname()[1]
    return store.detach(), port


def test_a_world_whose_ranks_do_not_come_ends_by_its_limit() -> None:
    fd, port = bound_store()
    place = RankInfo(rank=0, world_size=2, master_port=port, store_fd=fd, token="next")
    with pytest.raises(RetryError, match="rank 1 did not"):
        next_world.connect_beside(place, CPU, 0.2, lambda store: None)
    with pytest.raises(RetryError, match="was not reached in time"):
        absent = RankInfo(rank=1, world_size=2, master_port=port, token="next")
        next_world.connect_beside(absent, CPU, 0.2, lambda store: None)


def test_a_wait_for_ranks_ends_with_the_store() -> None:
    fd, port = bound_store()
    place = RankInfo(rank=0, world_size=2, master_port=port, store_fd=fd, token="next")
    stores: queue.SimpleQueue[Any] = queue.SimpleQueue()
    errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()

    def connect() -> None:
        try:
            next_world.connect_beside(place, CPU, 60.0, stores.put)
        except Exception as error:  # noqa: BLE001 - what the test looks at
            errors.put(error)

    thread = threading.Thread(target=connect)
    thread.start()
    stores.get().close()
    thread.join(patience(20.0))
    assert not thread.is_alive() and isinstance(errors.get_nowait(), dist.DistError)


@pytest.mark.parametrize("forgets", [False, True])
def test_a_world_of_one_rank_takes_the_place_of_another_and_ends(
    monkeypatch: pytest.MonkeyPatch, *, forgets: bool
) -> None:
    """`forgets`: torch only forgets the groups, as it does those of NCCL."""
    if forgets:
        monkeypatch.setattr(ProcessGroups, "_forget", lambda self, group: forget_group(group))
    end_groups()
    (fd, port), (next_fd, next_port) = bound_store(), bound_store()
    place = RankInfo(rank=0, world_size=1, master_port=port, store_fd=fd, token="first")
    groups = connect(place, CPU, rendezvous(place))
    following = next_world.connect_beside(
        replace(place, master_port=next_port, store_fd=next_fd, token="next"),
        CPU,
        10.0,
        lambda s: None,
    )
    default, number = dist.group.WORLD, torch.ones(1, dtype=torch.float64)
    assert groups.sum(number).item() == 1 and default is groups.world.process_group
    groups.enter(following)
    assert groups.rank_info.token == "next"
    assert dist.group.WORLD is groups.world.process_group is not default
    following.retire().join(patience(20.0))
    dist.all_reduce(number)
    assert groups.broadcast_bytes(torch.ones(1, dtype=torch.uint8)).item() == 1
    apart = groups.apart().process_group
    dist.all_reduce(number, group=apart)
    groups.shut()
    with pytest.raises(dist.DistBackendError, match="closed"):
        groups.enter(following)
    assert groups.end_all()
    assert not dist.is_initialized()
