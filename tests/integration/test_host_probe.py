"""Which agents are gone from hosts that answer, and which are suspended."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import pytest

from elasticzero.launcher.http import host_probe
from elasticzero.launcher.http.access import AgentAccess
from elasticzero.launcher.http.agent_client import is_answering
from elasticzero.launcher.http.host_probe import CONFIRM_S, HostProbe
from elasticzero.launcher.protocol.documents import Member
from elasticzero.launcher.secrets import Secret

DEADLINE_S = 30.0


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def address_of(server: socket.socket) -> str:
    return f"127.0.0.1:{server.getsockname()[1]}"


def test_a_host_without_a_listener_refuses_and_one_with_does_not(listening: socket.socket) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone = address_of(closed)
    woken = threading.Event()
    probe = HostProbe(woken.set, lambda member: True)
    asked = {"gone": gone, "here": address_of(listening), "nowhere": "nowhere.invalid:1"}
    began_s = time.monotonic()
    assert not probe.refusing(asked)
    assert woken.wait(DEADLINE_S)
    assert time.monotonic() - began_s >= CONFIRM_S
    assert probe.refusing(asked) == {"gone"}
    assert not probe.refusing({"come anew": gone}), "what another agent there has refused"
    assert not probe.refusing(asked), "of an earlier round"


def test_a_refusal_counts_once_it_is_confirmed(listening: socket.socket) -> None:
    """A server that listens again before the second connection is no dead one."""
    where = address_of(listening)
    listening.close()
    woken = threading.Event()
    probe = HostProbe(woken.set, lambda member: True)
    probe.refusing({"a": where})
    time.sleep(CONFIRM_S / 4)
    host, _, port = where.rpartition(":")
    with socket.create_server((host, int(port))) as again:
        again.settimeout(DEADLINE_S)
        again.accept()[0].close()
        assert not probe.refusing({"a": where})
    assert not woken.is_set()


class Asked:
    """Answers for agents, as a test wants."""

    def __init__(self) -> None:
        self.silent: set[str] = set()
        self.asked = threading.Event()

    def answers(self, member: Member) -> bool:
        self.asked.set()
        return member.node not in self.silent


def test_an_agent_is_silent_from_the_first_question_without_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_probe, "ASK_AGAIN_S", 0.0)
    agents = Asked()
    probe = HostProbe(lambda: None, agents.answers)
    members = {f"{n}-1": Member(n, f"{n}-1", "127.0.0.1", 1, 2, 1) for n in "ab"}
    clock = itertools.count()

    def ask_until(so: Callable[[Mapping[str, float]], bool]) -> Mapping[str, float]:
        deadline_s = time.monotonic() + DEADLINE_S
        while not so(since := probe.unanswered_since(members, float(next(clock)))):
            assert time.monotonic() < deadline_s, since
            time.sleep(0.001)
        return since

    assert not probe.unanswered_since(members, 0.0)
    assert agents.asked.wait(DEADLINE_S)
    agents.silent = {"a"}
    began_s = next(clock)
    since_s = ask_until(lambda since: "a-1" in since)["a-1"]
    assert since_s >= began_s
    again = next(clock)
    ask_until(lambda since: next(clock) > again + 50)
    assert probe.unanswered_since(members, float(next(clock))) == {"a-1": since_s}
    agents.silent = {"b"}
    ask_until(lambda since: since.keys() == {"b-1"})
    probe.unanswered_since({}, 0.0)
    assert not probe.unanswered_since({}, 0.0), "what has come back is forgotten"


def test_a_server_that_takes_connections_and_does_not_answer_is_silent(
    listening: socket.socket,
) -> None:
    """As the kernel does for a process that a signal has suspended."""
    host, port = listening.getsockname()
    access = AgentAccess(Secret("a-token-of-the-job"))
    assert not is_answering(Member("a", "a-1", host, port, 2, 1), access, 0.05)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone = closed.getsockname()[1]
    assert not is_answering(Member("a", "a-1", host, gone, 2, 1), access, DEADLINE_S)
