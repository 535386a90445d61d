"""What stories of jobs need, as in tests/integration."""

from __future__ import annotations

from tests.integration.conftest import etcd, job, pool, pool_of_session

__all__ = ["etcd", "job", "pool", "pool_of_session"]
