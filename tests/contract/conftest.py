"""Every contract test runs against each implementation of the store."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import pytest

from elasticzero.launcher.embedded import EmbeddedEtcd
from elasticzero.launcher.etcd import EtcdStore
from elasticzero.launcher.memory import MemoryServer, MemoryStore
from elasticzero.launcher.store import Store, job_prefix

_jobs = itertools.count()


@pytest.fixture(scope="module")
def etcd() -> Iterator[EmbeddedEtcd]:
    with EmbeddedEtcd() as member:
        yield member


@pytest.fixture(params=["memory", "etcd"])
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[[], Store]]:
    """Makes connections to one store, empty at first; all are closed after the test."""
    opened: list[Store] = []
    if request.param == "memory":
        server = MemoryServer(time.monotonic)
        make: Callable[[], Store] = lambda: MemoryStore(server)  # noqa: E731
    else:
        endpoint = request.getfixturevalue("etcd").endpoint
        prefix = job_prefix(f"contract-{next(_jobs)}")
        make = lambda: EtcdStore([endpoint], prefix)  # noqa: E731

    def connect_one() -> Store:
        opened.append(make())
        return opened[-1]

    yield connect_one
    for store in opened:
        store.close()


@pytest.fixture
def store(connect: Callable[[], Store]) -> Store:
    return connect()
