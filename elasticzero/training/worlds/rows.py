"""Arranges the ranks in rows that hold the whole state each, and keeps the ranks of a row at one
step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from elasticzero.comm.node_agreement import NodeAgreement
from elasticzero.comm.process_group import ProcessGroups
from elasticzero.errors import UserError, is_peer_error
from elasticzero.ipc.assignment import Assignment
from elasticzero.parallel import Strategy
from elasticzero.parallel.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Rows:
    """Holds the rows of one generation on one rank."""

    mesh: Mesh
    agreement: NodeAgreement | None = None
    """Agreement that binds the ranks of a row to a step; None: a rank holds the whole state, or a
    row is the world."""

    @classmethod
    def arrange(cls, assignment: Assignment, groups: ProcessGroups | None, strategy: str) -> Rows:
        """Sets up the rows; all ranks call this together.

        Args:
            assignment: This rank's place, and the number of ranks in a row.
            groups: The process groups; None for one process alone.
            strategy: The strategy's name; ddp has one row.

        Returns:
            The rows as this rank sees them.

        Raises:
            UserError: Nodes have unequal numbers of workers.
        """
        rank, world, row = assignment.rank, assignment.world_size, assignment.row
        if groups is None:
            return cls(Mesh.of_world(rank, world))
        if row == world or strategy == "ddp":
            return cls(Mesh.of_world(rank, world, groups.world))
        if world != row * assignment.nodes:
            raise UserError(
                f"--shard node divides state alike within each node; {assignment.nodes} nodes have "
                f"{world} workers together, of which {assignment.node} has {row}: give all nodes "
                "the same --nproc-per-node, or --shard world"
            )
        shard_group, replica_group = groups.divide(row)
        mesh = Mesh(
            shard=rank % row,
            shards=row,
            replica=rank // row,
            replicas=world // row,
            world_group=groups.world,
            shard_group=shard_group,
            replica_group=replica_group,
        )
        if row == 1:
            return cls(mesh)
        return cls(mesh, NodeAgreement(Path(assignment.snapshot_root), assignment.token))

    def verify_gradients(self, verify: Callable[[], None]) -> None:
        """Calls `verify`, which raises if the gradients or their norm may be wrong, and binds the
        ranks of the row to the step; raises the error of a lost peer unless they are bound."""
        try:
            verify()
        except RuntimeError as error:
            if self.agreement is None or not is_peer_error(error) or self.agreement.learn() is None:
                raise
            return  # another rank has verified that the gradients of all ranks are right
        if self.agreement is not None:
            self.agreement.commit()

    def own_shard(self, strategy: Strategy) -> dict[str, Tensor]:
        """Returns what the replicas of this rank's shard have too; nothing where there are none."""
        if self.mesh.replicas == 1:
            return {}
        return {name: local.tensor for name, local in strategy.rank_state().held.items()}

    def close(self) -> None:
        if self.agreement is not None:
            self.agreement.close()
