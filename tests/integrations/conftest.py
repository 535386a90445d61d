"""Gives tests what stories of jobs need, as in tests/integration, and what torchao compiles."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.conftest import etcd, job, pool, pool_of_session

__all__ = ["compiled", "etcd", "job", "pool", "pool_of_session"]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Processes share what they compile, for this module alone."""
    pytest.importorskip("torchao", reason="`make integrations` has it")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        yield
