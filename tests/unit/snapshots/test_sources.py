"""Where a worker reads the shards of a snapshot from, and over how many connections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from elasticzero.checkpoint.storage.base import Readable
from elasticzero.checkpoint.storage.disk import DiskStorage
from elasticzero.checkpoint.storage.http import HttpStorage
from elasticzero.ipc.assignment import Assignment, Resume, Source
from elasticzero.snapshots import restore

SOURCES = tuple(
    Source(rank=rank, node=node, address=f"{node}:9400")
    for rank, node in ((0, "a"), (1, "a"), (2, "b"), (3, "b"), (3, "a"), (0, "c"))
)
ASSIGNMENT = Assignment(
    job="j",
    node="b",
    generation=3,
    token="t",
    rank=0,
    local_rank=0,
    world_size=1,
    local_world_size=1,
    group_rank=0,
    master_address="127.0.0.1",
    master_port=1234,
    store_fd=None,
    strategy="zero3",
    resume=Resume(tier="ram", step=7, generation=2, sources=SOURCES),
    snapshot_root="/dev/shm/none",
)


def test_the_shards_of_a_node_are_read_over_the_same_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each shard had connections of its own, of which each has a handshake in a job with TLS."""
    opened = list[Mapping[int, Sequence[Readable]]]()

    def opening(places: Mapping[int, Sequence[Readable]], *_: object) -> object:
        opened.append(places)
        return object()

    monkeypatch.setattr(restore, "open_snapshot", opening)
    restore.open_source(ASSIGNMENT)
    (places,) = opened
    first, second = places[0][0], places[1][0]
    assert isinstance(first, HttpStorage) and first is second is places[3][1]
    assert places[0][1] is not first and places[0][1].where == "http://c:9400/snapshots/2/7"
    assert isinstance(places[2][0], DiskStorage) and isinstance(places[3][0], DiskStorage)
