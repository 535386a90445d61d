"""What stories of jobs need, as in tests/integration."""

from __future__ import annotations

from tests.integration.conftest import etcd, job

__all__ = ["etcd", "job"]
