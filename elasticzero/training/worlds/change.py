"""Takes one rank over to the next world inside of its loop, at a boundary that all ranks share.

Rules:
 WC1  A rank is prepared in the word of a step if `NextWorld` is, no checkpoint is being saved, rank
      0 has nothing to find for all, and the script has no process groups of its own, whose ranks
      would be other ones then.
 WC2  All ranks go over at the boundary whose word says that all are prepared. Where it has a flag,
      or asks for a checkpoint, none does.
 WC3  What scripts have asked to be saved at that boundary is exchanged before, in the old world,
      so that nothing that a rank which leaves has asked for is lost.
 WC4  Where ranks divide the state, each that stays gets what it will have of it, and all ranks wait
      until all have it: as long as that may fail, nothing has changed.
 WC5  Then a rank that leaves ends its part by the stop protocol. On a rank that stays the groups go
      first, which may fail too. Until a divided state is laid over the next world it is torn.
 WC6  Random generators are set as a restore of this boundary would set them: rank 0 goes on with
      its own, and the others are seeded by rank and step.
 WC7  The script's functions are called last, in the new world. What they change is of the boundary.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from elasticzero.comm.control import ControlWord
from elasticzero.comm.next_world import NextWorld, Offer
from elasticzero.comm.process_group import ProcessGroups
from elasticzero.consistency.replicas import ReplicaVerifier
from elasticzero.ipc.agent_client import AgentClient
from elasticzero.ipc.assignment import Assignment, Resume, torchrun_environment
from elasticzero.parallel import Strategy
from elasticzero.snapshots.restore import seeded_generators
from elasticzero.snapshots.stager import StateStager
from elasticzero.state.auxiliary import AuxiliaryState
from elasticzero.torch_internals import script_groups
from elasticzero.training.step_machine import StepEvent
from elasticzero.training.worlds.rows import Rows


@dataclass(frozen=True, slots=True)
class PartsOfWorld:
    """Holds what depends on the world in one rank's training state."""

    strategy: Strategy
    auxiliary: AuxiliaryState
    stager: StateStager
    verifier: ReplicaVerifier
    record: Callable[[StepEvent], None] = lambda event: None
    """Records whether the state is of a world."""


class WorldChange:
    """Takes one rank of a generation over to the next world."""

    def __init__(
        self,
        link: AgentClient,
        groups: ProcessGroups,
        following: NextWorld,
        functions: Sequence[Callable[[], object]],
    ) -> None:
        """Begins in the world that the rank has joined.

        Args:
            link: The client of the agent.
            groups: The process groups, which will be those of the next world.
            following: The next world, as far as it is connected.
            functions: The script's functions, which are called after each change (WC7).
        """
        self._link = link
        self._groups = groups
        self._next = following
        self._functions = functions

    def promise(self, stager: StateStager, auxiliary: AuxiliaryState) -> bool:
        """Returns whether this rank is prepared in the word that it submits now (WC1).

        Args:
            stager: Says whether a checkpoint is being saved.
            auxiliary: Says whether all ranks wait for rank 0.
        """
        if not self._next.offered:
            return False
        saves = stager.saving is not None or stager.newest_save == "pending"
        if saves or auxiliary.awaits_rank_zero or script_groups():
            return False
        return self._next.promise()

    def decide(self, word: ControlWord) -> Offer | None:
        """Returns the world that this rank goes over to at this boundary; None: it stays (WC2)."""
        return self._next.decide(enters=word.prepared and not word.flags and not word.asks)

    def bring_state(self, offer: Offer, strategy: Strategy) -> None:
        """Brings this rank what it will have of a divided state; all ranks call this together, and
        when it returns all ranks have theirs (WC4).

        Args:
            offer: The next world.
            strategy: The strategy, in the present world.

        Raises:
            DistBackendError: A rank is lost; nothing has changed.
        """
        if strategy.shards == 1:
            return
        groups, place = self._groups, offer.assignment
        following = torch.zeros(groups.rank_info.world_size, dtype=torch.int64)
        if place is not None:
            following[groups.rank_info.rank] = place.rank + 1
        with self._link.busy("moving state to the ranks of the next world"):
            numbers = groups.sum(following).tolist()
            stay = (rank for rank, number in enumerate(numbers) if number)
            strategy.bring_state(sorted(stay, key=numbers.__getitem__))
            groups.verify_collectives()
            groups.control_tree.allreduce_max(0)

    def enter(self, offer: Offer, step: int, parts: PartsOfWorld) -> Rows:
        """Has all that depends on the world be of the next one, and returns its rows (WC5).

        Args:
            offer: The next world.
            step: The step of this boundary.
            parts: What depends on the world.

        Raises:
            DistBackendError: The groups of one of the two worlds were shut.
        """
        assert offer.assignment is not None and offer.groups is not None
        assert parts.strategy.enter_world is not None
        self._groups.enter(offer.groups)
        divided = parts.strategy.shards > 1
        if divided:
            parts.record(StepEvent.TEAR)
        assignment = _carried_over(self._link.assignment, offer.assignment, step)
        self._link.enter_world(assignment)
        os.environ.update(torchrun_environment(assignment))
        rows = Rows.arrange(assignment, self._groups, parts.stager.strategy)
        parts.strategy.enter_world(rows.mesh)
        parts.verifier.enter_world(assignment)
        parts.stager.enter_world(step, parts.strategy.shards)
        if divided:
            parts.record(StepEvent.KEPT)
        if assignment.rank:
            device = parts.auxiliary.device
            parts.auxiliary.restore_rng(seeded_generators(assignment.rank, step, device))
            parts.auxiliary.set_generators()
        return rows

    def call_functions(self) -> bool:
        """Calls the script's functions; returns whether there are any."""
        if self._functions:
            with self._link.busy("on_world_change"):
                for function in self._functions:
                    function()
        return bool(self._functions)


def obstacle(assignment: Assignment, strategy: Strategy, *, rehearses: bool) -> str:
    """Returns why this rank can enter no world inside of its loop; empty: it can.

    Args:
        assignment: This rank's settings.
        strategy: The strategy.
        rehearses: Whether each boundary is recorded for a rehearsal.
    """
    if strategy.enter_world is None:
        return "its strategy cannot divide the state in another way inside a loop"
    if assignment.rolls_back:
        return "training may go back to a snapshot of this generation"
    return "each boundary is recorded for a rehearsal" if rehearses else ""


def _carried_over(present: Assignment, following: Assignment, step: int) -> Assignment:
    """Returns the assignment of the next world, with what all ranks have agreed on in this one.

    Args:
        present: The assignment of this world.
        following: That of the next one, as the agent has sent it.
        step: The step of the boundary.
    """
    return replace(
        following,
        resume=Resume(tier="live", step=step, generation=present.generation),
        store_fd=None,
        trained=True,
        checkpoint_every=present.checkpoint_every,
        snapshot_every=present.snapshot_every,
        verify_every=present.verify_every,
    )
