"""The fixtures of the integration tests."""

from tests.integration.conftest import etcd, job, reference

__all__ = ["etcd", "job", "reference"]
