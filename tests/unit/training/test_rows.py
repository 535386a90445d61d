"""Which ranks hold the whole state together, and worlds that cannot be divided so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elasticzero.comm.process_group import ProcessGroups
from elasticzero.errors import UserError
from elasticzero.ipc.agent_client import STANDALONE
from elasticzero.ipc.assignment import Assignment
from elasticzero.parallel.mesh import Mesh
from elasticzero.rank_groups.group import RankGroup
from elasticzero.training.worlds.rows import Rows
from tests.support.fake_groups import fake_group


class Divided(ProcessGroups):
    """Groups that were never connected."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.world = fake_group(6)
        self.row, self.replicas = fake_group(2, "row"), fake_group(3, "replicas")

    def divide(self, row: int) -> tuple[RankGroup, RankGroup]:
        self.asked.append(row)
        return self.row, self.replicas


def assignment(directory: Path, **options: Any) -> Assignment:
    """The fourth of six ranks, two on each of three nodes."""
    fields: dict[str, Any] = {"rank": 3, "local_rank": 1, "world_size": 6, "local_world_size": 2}
    fields |= {"nodes": 3, "node": "b", "snapshot_root": str(directory), "token": "t"}
    return replace(STANDALONE, **fields | options)


def test_a_row_is_a_node(tmp_path: Path) -> None:
    groups = Divided()
    rows = Rows.arrange(assignment(tmp_path, shard="node"), groups, "zero2")
    assert groups.asked == [2]
    assert rows.mesh == Mesh(
        shard=1,
        shards=2,
        replica=1,
        replicas=3,
        world_group=groups.world,
        shard_group=groups.row,
        replica_group=groups.replicas,
    )
    assert rows.mesh.rank == 3
    assert rows.agreement is not None
    rows.close()


def test_a_row_of_one_rank_need_not_agree(tmp_path: Path) -> None:
    lone = assignment(tmp_path, shard="node", world_size=3, rank=2, local_world_size=1)
    rows = Rows.arrange(lone, Divided(), "zero1")
    assert (rows.mesh.shards, rows.mesh.replicas, rows.mesh.replica) == (1, 3, 2)
    assert rows.agreement is None


@pytest.mark.parametrize(
    ("strategy", "options"),
    [("zero2", {"shard": "world"}), ("ddp", {"shard": "node"})],
)
def test_a_row_is_the_world(tmp_path: Path, strategy: str, options: dict[str, Any]) -> None:
    groups = Divided()
    rows = Rows.arrange(assignment(tmp_path, **options), groups, strategy)
    assert rows == Rows(Mesh.of_world(3, 6, groups.world))
    assert groups.asked == []


def test_nodes_with_unequal_workers_are_refused(tmp_path: Path) -> None:
    uneven = assignment(tmp_path, shard="node", world_size=5)
    groups = Divided()
    with pytest.raises(UserError) as raised:
        Rows.arrange(uneven, groups, "zero3")
    assert str(raised.value) == (
        "--shard node divides state alike within each node; 3 nodes have 5 workers together, of "
        "which b has 2: give all nodes the same --nproc-per-node, or --shard world"
    )
    assert groups.asked == []
