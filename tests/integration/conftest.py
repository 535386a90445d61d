"""What the integration tests share: an etcd, and the run that nothing disturbed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest
from torch import Tensor

from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.reference import undisturbed

_jobs = itertools.count()


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServer]:
    with EtcdServer() as member:
        yield member


@pytest.fixture
def job(request: pytest.FixtureRequest) -> str:
    """A job id that no other test has."""
    return f"test-{os.getpid()}-{next(_jobs)}"


@pytest.fixture(scope="session")
def reference() -> dict[str, Tensor]:
    """The weights after an undisturbed run of `scripts/regression.py`, by plain PyTorch."""
    return undisturbed(global_batch=10, epochs=3)
