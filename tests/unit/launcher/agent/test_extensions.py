"""What an agent passes on to its extensions, and that none of them can stop it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from elasticzero.ipc.assignment import Resume
from elasticzero.ipc.messages import Logged, Message
from elasticzero.launcher.agent.config import AgentOptions
from elasticzero.launcher.agent.extensions.base import AgentContext, AgentExtension, Extensions
from elasticzero.launcher.http.access import AgentAccess
from elasticzero.launcher.http.routes import Answer, Route
from elasticzero.launcher.protocol.documents import Member, World
from elasticzero.launcher.protocol.policy import JobPolicy
from elasticzero.launcher.protocol.view import View
from elasticzero.launcher.secrets import Secret
from elasticzero.launcher.workers.forking.requests import Launch
from elasticzero.launcher.workers.group import Ended

ME = Member("a", "a-1", "127.0.0.1", 1, 2, 1)
WORLD = World(
    generation=1,
    token="t",
    members=(ME,),
    strategy="ddp",
    resume=Resume(tier="fresh"),
    reason="test",
)
VIEW = View(me=ME, world=WORLD)
ACCESS = AgentAccess(Secret("the-job's-own-password"))


class Watching(AgentExtension):
    """Notes what it gets, and fails in the method that it is told to fail in."""

    def __init__(self, name: str, calls: list[str], fails_in: str = "") -> None:
        self._name, self._calls, self._fails_in = name, calls, fails_in

    def _note(self, method: str) -> None:
        self._calls.append(f"{self._name} {method}")
        if method == self._fails_in:
            raise RuntimeError("a bug")

    def started(self, world: World, ranks: tuple[int, ...]) -> None:
        self._note("started")

    def received(self, rank: int, message: Message | Ended) -> None:
        self._note("received")

    def recorded(self, event: Mapping[str, Any]) -> None:
        self._note("recorded")

    def turn(self, view: View, access: AgentAccess) -> None:
        self._note("turn")

    def routes(self) -> Mapping[str, Route]:
        return {
            f"/{self._name}": Route(answer=lambda query: Answer(content=b""), served_to="everyone")
        }

    def close(self, outcome: str | None) -> None:
        self._note(f"close {outcome}")


@pytest.fixture
def context(tmp_path: Path) -> AgentContext:
    options = AgentOptions(
        job="j",
        node="a",
        policy=JobPolicy(min_nodes=1, max_nodes=1),
        nproc=1,
        launch=Launch(target="x", is_module=False, arguments=(), environment={}, directory="/"),
        log_dir=tmp_path,
        snapshot_dir=tmp_path,
    )
    return AgentContext(options=options, status=dict, note=lambda event, **fields: None)


def played(context: AgentContext, *made: AgentExtension) -> Extensions:
    """All that an agent passes on, twice, and its end."""
    extensions = Extensions([lambda _, one=one: one for one in made], context)  # type: ignore[misc]
    for _ in range(2):
        extensions.started(WORLD, (0,))
        extensions.received(0, Logged(step=1, scalars={"loss": 0.5}))
        extensions.recorded({"event": "start", "time": 1.0})
        extensions.turn(VIEW, ACCESS)
    extensions.close("finished")
    return extensions


ALL = ["started", "received", "recorded", "turn"]


def test_all_get_everything_and_the_last_is_closed_first(context: AgentContext) -> None:
    calls: list[str] = []
    extensions = played(context, Watching("a", calls), Watching("b", calls))
    passed_on = [f"{name} {method}" for method in ALL for name in "ab"]
    assert calls == [*passed_on, *passed_on, "b close finished", "a close finished"]
    assert extensions.routes().keys() == {"/a", "/b"}


@pytest.mark.parametrize("method", ALL)
def test_one_that_fails_is_left_out_and_closed(
    context: AgentContext, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []
    with caplog.at_level(logging.ERROR):
        played(context, Watching("a", calls, method), Watching("b", calls))
    until = ALL[: ALL.index(method) + 1]
    assert [c for c in calls if c[0] == "a"] == [*(f"a {m}" for m in until), "a close finished"]
    assert [c for c in calls if c[0] == "b"] == [f"b {m}" for m in ALL * 2] + ["b close finished"]
    (record,) = caplog.records
    assert record.getMessage() == "Watching failed; the agent goes on without it"
    assert record.exc_info is not None


def test_one_that_fails_to_close_lets_the_others_close(context: AgentContext) -> None:
    calls: list[str] = []
    played(context, Watching("a", calls), Watching("b", calls, "close finished"))
    assert calls[-2:] == ["b close finished", "a close finished"]


def test_an_extension_may_leave_out_what_it_does_not_need(context: AgentContext) -> None:
    assert played(context, AgentExtension()).routes() == {}
