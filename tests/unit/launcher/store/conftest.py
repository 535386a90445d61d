"""A store in memory, and nodes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elasticzero.launcher.secrets import Secret
from tests.support.memory_store import MemoryServer
from tests.unit.launcher.store.nodes import Node


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer(lambda: 0.0)


@pytest.fixture
def node(server: MemoryServer) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def make(name: str, secret: Secret | None = None, **options: Any) -> Node:
        nodes.append(Node(server, name, secret, **options))
        return nodes[-1]

    yield make
    for one in nodes:
        one.store.close()
