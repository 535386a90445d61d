"""Every contract test runs against each implementation of the store."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import fsspec
import pytest

from elasticzero.launcher.store.api import Store, job_prefix
from elasticzero.launcher.store.etcd.server import EtcdServer
from elasticzero.launcher.store.etcd.store import EtcdStore
from tests.contract.s3_server import Proxy, proxied, running_server
from tests.integration.conftest import (
    pytest_runtest_setup,
    pytest_runtest_teardown,
    pytest_sessionfinish,
)
from tests.integration.etcd_members import Members
from tests.support.memory_store import MemoryServer, MemoryStore

__all__ = ["pytest_runtest_setup", "pytest_runtest_teardown", "pytest_sessionfinish"]
_jobs = itertools.count()


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServer]:
    with EtcdServer() as member:
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


@pytest.fixture(params=["memory", "etcd"])
def losing(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[Callable[[], Store], Callable[[], None]]]:
    """Makes connections to a store of its own, and has that store lose all its data."""
    opened: list[Store] = []
    with ExitStack() as stack:
        if request.param == "memory":
            server = MemoryServer(time.monotonic)
            make: Callable[[], Store] = lambda: MemoryStore(server)  # noqa: E731
            lose: Callable[[], None] = server.restore
        else:
            etcd = stack.enter_context(Members(tmp_path / "etcd"))
            make = lambda: EtcdStore([etcd.endpoints], job_prefix("loss"))  # noqa: E731
            lose = etcd.wipe

        def connect_one() -> Store:
            opened.append(make())
            return opened[-1]

        yield connect_one, lose
        for store in opened:
            store.close()


@pytest.fixture
def store(connect: Callable[[], Store]) -> Store:
    return connect()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Proxy]:
    """A proxy before an S3 server process that all tests of a run share."""
    with running_server() as port, proxied(port) as proxy:
        yield proxy


@pytest.fixture
def s3(s3_server: Proxy, monkeypatch: pytest.MonkeyPatch) -> Proxy:
    """The server as the environment names it, with an empty bucket `bucket`."""
    s3_server.reset()
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    fs = fsspec.filesystem("s3", use_listings_cache=False)
    if fs.exists("bucket"):
        fs.rm("bucket", recursive=True)
    fs.mkdir("bucket")
    s3_server.seen.clear()
    return s3_server
