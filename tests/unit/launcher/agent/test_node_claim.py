"""Which name an agent takes on a machine where others of its job run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elasticzero.errors import UserError
from elasticzero.launcher.agent.config import AgentOptions
from elasticzero.launcher.agent.node_claim import listen_on_free_port, node_claim
from elasticzero.launcher.http.server import PortTaken
from elasticzero.launcher.options.table import DEFAULT_HTTP_PORT
from elasticzero.launcher.protocol.policy import JobPolicy
from elasticzero.launcher.snapshots import shared_memory
from elasticzero.launcher.workers.forking.requests import Launch


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AgentOptions:
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(shared_memory, "SWEEP_S", 0.05)
    launch = Launch(target="train.py", is_module=False, arguments=(), environment={}, directory="/")
    return AgentOptions(
        job="job",
        node="host",
        policy=JobPolicy(min_nodes=1, max_nodes=2),
        nproc=1,
        launch=launch,
        log_dir=tmp_path / "logs" / "job" / "host",
        snapshot_dir=tmp_path / "nowhere",
    )


def test_the_next_free_name_is_taken_and_given_back(options: AgentOptions) -> None:
    """An agent that is started again takes its own name, as its predecessor is dead."""
    with node_claim(options, named=False) as (_, first):
        with node_claim(options, named=False) as (_, second):
            assert (first.node, second.node) == ("host", "host-2")
            assert second.log_dir.name == "host-2"
            assert first.snapshot_dir != second.snapshot_dir
            with node_claim(options, named=False) as (_, third):
                assert third.node == "host-3"
        with node_claim(options, named=False) as (_, again):
            assert again.node == "host-2"
    with node_claim(options, named=False) as (_, again):
        assert again.node == "host"


def test_a_name_that_was_given_is_never_changed(options: AgentOptions) -> None:
    with (
        node_claim(options, named=True),
        pytest.raises(UserError, match="--node-name"),
        node_claim(options, named=True),
    ):
        pass


def listening(*taken: int) -> Any:
    def listen(port: int) -> Any:
        if port in taken:
            raise PortTaken(f"{port} is taken")
        return SimpleNamespace(port=port)

    return listen


def test_the_next_free_port_is_taken_and_said() -> None:
    messages: list[str] = []
    first = DEFAULT_HTTP_PORT
    listener: Any = listen_on_free_port(None, listening(), messages.append)
    assert listener.port == first
    assert not messages
    listener = listen_on_free_port(None, listening(first, first + 1), messages.append)
    assert listener.port == first + 2
    assert str(first + 2) in messages[0] and "--http-port" in messages[0]


def test_a_port_that_was_given_is_never_changed() -> None:
    with pytest.raises(PortTaken):
        listen_on_free_port(7000, listening(7000), lambda text: None)
