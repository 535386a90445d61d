"""What the integration tests share: an etcd, and the run that nothing disturbed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest
from torch import Tensor

from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.reference import undisturbed
from tests.integration.training_harness import Pool
from tests.support import warm

_jobs = itertools.count()
_server = warm.Server()
COLD = os.environ.get("TESTS_COLD") == "1"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    warm.install(None if COLD or item.get_closest_marker("cold") else _server)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    yield
    warm.uninstall()


def pytest_sessionfinish() -> None:
    _server.close()


@pytest.fixture(scope="session")
def etcd() -> Iterator[EtcdServer]:
    """For jobs of other names each; a test that harms an etcd starts one of its own."""
    with EtcdServer() as member:
        yield member


@pytest.fixture(scope="session")
def pool_of_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(tmp_path_factory.mktemp("pool")) as started:
        yield started


@pytest.fixture(scope="module")
def pool(pool_of_session: Pool) -> Iterator[Pool]:
    """A fork server with torch imported, which all tests of a process share."""
    yield pool_of_session
    pool_of_session.end_worlds()


@pytest.fixture
def job(request: pytest.FixtureRequest) -> str:
    """A job id that no other test has."""
    return f"test-{os.getpid()}-{next(_jobs)}"


@pytest.fixture(scope="session")
def reference() -> dict[str, Tensor]:
    """The weights after an undisturbed run of `scripts/regression.py`, by plain PyTorch."""
    return undisturbed(global_batch=10, epochs=3)
