"""Stands in for the groups of a rank that is to enter a world inside of the others' loops.

Such a rank lays its model over the world before it is connected to it, and goes through its script
from the restored state to its loop while the others compute. Rules:
 UC1  Where ranks agree on numbers, the answer is what it would be if all others gave the same ones.
      What must be equal is compared with what the others tell (`entering`).
 UC2  What the others would have to take part in is refused, also a meeting by torch's own means,
      which libraries call where the environment names several ranks and no group is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from elasticzero.comm.barriers import WORDS, Call, call_of
from elasticzero.comm.control_tree import MaxTree
from elasticzero.comm.process_group import WORLD, ProcessGroups
from elasticzero.comm.rendezvous import RankInfo
from elasticzero.errors import EntryRefused
from elasticzero.rank_groups.group import RankGroup
from elasticzero.torch_internals.groups import replace_init

ALIKE = frozenset({Call.STEP, Call.PREPARE, Call.LOOP})
"""The calls that a rank may make before it has entered its loop."""


def unconnected(info: RankInfo, device: torch.device) -> ProcessGroups:
    """Returns the groups of a rank that is not connected to the others.

    Args:
        info: This rank's place in the world that it is to enter.
        device: The device of the tensors that its collectives will take.
    """
    world = RankGroup(WORLD, range(info.world_size), None)
    return ProcessGroups(info, device, UnconnectedTree(), world)


def refuse_meetings() -> Callable[[], object]:
    """Has `init_process_group` raise `EntryRefused`; returns what ends that."""

    def refuse(*args: object, **options: object) -> None:
        raise EntryRefused(
            "the script, or a library, calls torch.distributed.init_process_group before its loop, "
            "where no other rank would meet this one"
        )

    return replace_init(refuse)


class UnconnectedTree(MaxTree):
    """Answers as if all ranks gave the same numbers (UC1, UC2)."""

    def __init__(self) -> None:
        super().__init__(None, ())

    def submit(self, numbers: Sequence[int]) -> None:
        call = call_of(numbers)
        if call is not None and call not in ALIKE:
            raise EntryRefused(
                f"the script {WORDS[call]} between session.restore and its loop, where the ranks "
                "that train take no part in it"
            )
        super().submit(numbers)
