"""The fixtures of the integration tests."""

from tests.integration.conftest import (
    etcd,
    job,
    pool,
    pool_of_session,
    pytest_runtest_setup,
    pytest_runtest_teardown,
    pytest_sessionfinish,
    reference,
)

__all__ = [
    "etcd",
    "job",
    "pool",
    "pool_of_session",
    "pytest_runtest_setup",
    "pytest_runtest_teardown",
    "pytest_sessionfinish",
    "reference",
]
