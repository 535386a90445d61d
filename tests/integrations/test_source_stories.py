"""Training on data of other packages, on real clusters and through faults: each sample once by the
workers' own account, and the weights of an undisturbed run.

`make integrations` runs these in an environment that has the packages.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from elasticzero.launcher.local.cluster import Placement, on_loopback
from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.scripts import regression
from tests.integration.scripts.sources import KINDS, Numbered
from tests.integration.test_streams import check_training, train
from tests.mounts import with_own_memory

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(400)]


@pytest.mark.parametrize(
    ("kind", "package"),
    [
        ("stateful-loader", "torchdata"),
        ("huggingface", "datasets"),
        ("webdataset", "webdataset"),
        ("litdata", "litdata"),
        ("mosaic", "streaming"),
    ],
)
def test_each_sample_is_used_once_through_faults(
    kind: str,
    package: str,
    tmp_path: Path,
    job: str,
    etcd: EtcdServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker dies, then a node, and another one joins, while data workers read."""
    if find_spec(package) is None:
        pytest.skip("`make integrations` has it")
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setenv("STREAM_DATA", str(folder))
    KINDS[kind].write(Numbered(regression.dataset()), folder)

    def place(node: str) -> Placement:
        if kind != "mosaic":
            return on_loopback(node)
        # The workers of a node share memory and files by names that depend on nothing else.
        node_directory = tmp_path / "nodes" / node
        node_directory.mkdir(parents=True)
        environment = {
            "ELASTICZERO_NPROC_PER_NODE": "2",
            "STREAM_CACHE": str(node_directory / "cache"),
            "TMPDIR": str(node_directory),
        }
        return replace(with_own_memory(node), environment=environment)

    told = train(tmp_path, etcd, job, kind, ["--workers", "2"], place)
    check_training(told, tmp_path, kind)
