"""Names a group of ranks, whose collectives are called in it.

All objects of a generation refer to a `RankGroup`, and it alone refers to torch's process group. So
a group can be ended, by its name, while objects that have used it still exist.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from elasticzero.rank_groups.connections import Connections


class RankGroup:
    """Holds the process group of some ranks until it is ended."""

    __slots__ = ("_process_group", "connections", "name", "ranks")

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        process_group: dist.ProcessGroup | None,
        connections: Connections | None = None,
    ) -> None:
        """Takes over a process group.

        Args:
            name: The name by which the group is ended, and that errors show.
            ranks: The numbers of its ranks in the world.
            process_group: The process group, to which nothing but torch refers; None: its ranks
                have no connections.
            connections: What the group's connections are known by; None: it has none.
        """
        self.name = name
        self.ranks = ranks
        self.connections = connections or Connections()
        self._process_group = process_group

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Returns the process group; raises torch's error of a lost peer if it has ended."""
        if self._process_group is None:
            raise dist.DistBackendError(f"the process group of {self.name} is closed")
        return self._process_group

    @property
    def is_connected(self) -> bool:
        """Returns whether there is a process group."""
        return self._process_group is not None

    def adopt(self, other: RankGroup) -> None:
        """Takes over the process group of another group of the same ranks, which has none then."""
        self._process_group, self.connections = other.take(), other.connections

    def take(self) -> dist.ProcessGroup:
        """Returns the process group, and refers to it no more."""
        process_group, self._process_group = self.process_group, None
        return process_group


def message_device(process_group: dist.ProcessGroup) -> torch.device:
    """Returns the device of the tensors that the collectives of a group take."""
    if dist.get_backend(process_group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


ALONE = RankGroup("a process alone", (0,), None)
"""The group of a rank that has no others."""
