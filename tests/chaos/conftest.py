"""The fixtures of the integration tests."""

from tests.integration.conftest import job, reference

__all__ = ["job", "reference"]
