"""Takes one rank over to the next world inside of its loop, at a boundary that all ranks share.

Rules:
 WC1  A rank is prepared in the word of a step if `NextWorld` is, no checkpoint is being saved, rank
      0 has nothing to find for all, and the script has no process groups of its own, whose ranks
      would be other ones then.
 WC2  All ranks go over at the boundary whose word says that all are prepared, unless a script keeps
      rows of parameters, which the next world divides otherwise. Where it has a flag,
      or asks for a checkpoint, none does. Where others come into the world, none does at the end of
      a loop or of an epoch whose function is to be called, nor where a checkpoint is due: there a
      rank that comes to the boundary by a restore would do other things than those that are there.
      Likewise where state moves and a GPU has too little memory for it.
 WC3  What scripts have asked to be saved at that boundary is exchanged before, in the old world,
      so that nothing that a rank which leaves has asked for is lost.
 WC4  Where ranks divide the state, or keep what they have not sent of gradients, each that stays
      gets what it will have of it, and all ranks wait until all have it: as long as that may fail,
      nothing has changed.
 WC5  Then a rank that leaves ends its part by the stop protocol. On a rank that stays the groups go
      first, which may fail too. Until a divided state is laid over the next world it is torn.
 WC6  Random generators are set as a restore of this boundary would set them: rank 0 goes on with
      its own, and the others are seeded by rank and step.
 WC7  The script's functions are called last, in the new world. What they change is of the boundary.
 WC8  Where others come into the world, its rank 0, or all ranks that divide the state, capture it
      before they go over. Once all have, rank 0 tells the others (`comm/worlds/entering.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from elasticzero.comm.control import ControlWord
from elasticzero.comm.process_group import ProcessGroups
from elasticzero.comm.rank_zero import SharedState
from elasticzero.comm.worlds import entering
from elasticzero.comm.worlds.entering import NewestStep
from elasticzero.comm.worlds.next_world import NextWorld, Offer
from elasticzero.consistency.configuration import Comparison
from elasticzero.consistency.replicas import ReplicaVerifier
from elasticzero.errors import OperatorError, one_line
from elasticzero.ipc.agent_client import AgentClient
from elasticzero.ipc.assignment import Assignment, Resume, torchrun_environment
from elasticzero.parallel import Strategy
from elasticzero.parallel.buckets.plan import BucketPlan
from elasticzero.snapshots.restore import seeded_generators
from elasticzero.snapshots.stager import StateStager
from elasticzero.state.auxiliary import AuxiliaryState, BoundaryCopy
from elasticzero.torch_internals.groups import script_groups
from elasticzero.training.step_machine import StepEvent
from elasticzero.training.worlds.rows import Rows


@dataclass(frozen=True, slots=True)
class PartsOfWorld:
    """Holds what depends on the world in one rank's training state."""

    strategy: Strategy
    plan: Callable[[], BucketPlan]
    """Returns how a generation that begins now fills its buckets."""
    auxiliary: AuxiliaryState
    stager: StateStager
    verifier: ReplicaVerifier
    shared: SharedState
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
        comparison: Comparison,
    ) -> None:
        """Begins in the world that the rank has joined.

        Args:
            link: The client of the agent.
            groups: The process groups, which will be those of the next world.
            following: The next world, as far as it is connected.
            functions: The script's functions, which are called after each change (WC7).
            comparison: Has the description of the loop that the ranks are in.
        """
        self._comparison = comparison
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

    def decide(
        self, word: ControlWord, parts: PartsOfWorld, admits: Callable[[], BoundaryCopy | None]
    ) -> Offer | None:
        """Returns the world that this rank goes over to at this boundary; None: it stays (WC2).

        Args:
            word: What all ranks have said of this boundary.
            parts: What depends on the world.
            admits: Returns the small state that others begin with who come into a world here; None:
                none may come. It is the same on all ranks, which call it together.
        """
        enters, failure = word.prepared and not word.flags and not word.asks, ""
        joins = self._next.joins
        if enters and (joins or parts.strategy.may_be_tied):
            failure = parts.strategy.tied_to_world(self._growth)
            copy = admits() if joins else None
            if copy is not None and not failure:
                failure = self._capture_for_others(parts, copy)
            stays = bool(failure) or (joins and copy is None)
            enters = not self._groups.control_tree.allreduce_max(int(stays))
        offer = self._next.decide(enters=enters)
        if failure:
            self._next.give_up(failure)
        return offer

    @property
    def _growth(self) -> float:
        """Returns by what this rank's part of a divided state is multiplied in the next world."""
        place = self._next.place
        return self._groups.rank_info.world_size / place.world_size if place is not None else 0.0

    def _capture_for_others(self, parts: PartsOfWorld, copy: BoundaryCopy) -> str:
        """Captures what ranks that come into the next world begin with (WC8); returns why not.

        Args:
            parts: What depends on the world.
            copy: The small state of this boundary.
        """
        place = self._next.place
        if not parts.strategy.divides and (place is None or place.rank > 0):
            return ""
        try:
            parts.stager.capture_for_others(copy)
        except OperatorError as error:
            return f"no memory has what others begin with: {one_line(error)}"
        return ""

    def bring_state(self, offer: Offer, parts: PartsOfWorld) -> None:
        """Brings this rank what it will have of what ranks do not have alike; all ranks call this
        together, and when it returns all ranks have theirs (WC4).

        Args:
            offer: The next world.
            parts: What depends on the world.

        Raises:
            DistBackendError: A rank is lost; nothing has changed.
        """
        if not (parts.strategy.divides or parts.strategy.residual.is_kept):
            self._groups.drain_sends()  # a rank that leaves ends its communicator
            return
        groups, place = self._groups, offer.assignment
        following = torch.zeros(groups.rank_info.world_size, dtype=torch.int64)
        if place is not None:
            following[groups.rank_info.rank] = place.rank + 1
        with self._link.busy("moving state to the ranks of the next world"):
            numbers = groups.sum(following).tolist()
            size = place.world_size if place is not None else max(numbers)
            rank_of = {number: rank for rank, number in enumerate(numbers)}
            ranks = [rank_of.get(number) for number in range(1, size + 1)]
            parts.strategy.bring_state(ranks, parts.plan() if offer.joins else None)
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
        self._groups.enter(offer.groups)
        divided = parts.strategy.divides
        if divided:
            parts.record(StepEvent.TEAR)
        assignment = _carried_over(self._link.assignment, offer.assignment, step)
        self._link.enter_world(assignment)
        os.environ.update(torchrun_environment(assignment))
        rows = Rows.arrange(assignment, self._groups, parts.stager.strategy)
        parts.strategy.enter_world(rows.mesh, parts.plan() if offer.joins else None)
        parts.verifier.enter_world(assignment, step)
        parts.shared.enter_world()
        parts.stager.enter_world(step, parts.strategy.shards)
        if divided:
            parts.record(StepEvent.KEPT)
        if assignment.rank:
            device = parts.auxiliary.device
            parts.auxiliary.restore_rng(seeded_generators(assignment.rank, step, device))
            parts.auxiliary.set_generators()
        return rows

    def tell_others(self, offer: Offer, stager: StateStager, newest: NewestStep) -> None:
        """Tells those that come into a world at which boundary it is entered (WC8): all ranks have
        captured its state, and are bound to go over.

        Args:
            offer: The world.
            stager: Knows what ranks know alike of their captures.
            newest: The step of this boundary.
        """
        a, place, groups = self._link.assignment, offer.assignment, offer.groups
        if not offer.joins or place is None or place.rank or groups is None:
            return
        boundary = entering.Boundary(
            newest=newest,
            captures=stager.known_alike(),
            checkpoint_every=a.checkpoint_every,
            snapshot_every=a.snapshot_every,
            verify_every=a.verify_every,
            loop=self._comparison.loop,
        )
        entering.tell(groups.store, place.token, entering.BOUNDARY, boundary.encoded())

    def call_functions(self) -> bool:
        """Calls the script's functions; returns whether there are any."""
        if self._functions:
            with self._link.busy("on_world_change"):
                for function in self._functions:
                    function()
        return bool(self._functions)


def obstacle(assignment: Assignment, *, rehearses: bool) -> str:
    """Returns why this rank can enter no world inside of its loop; empty: it can.

    Args:
        assignment: This rank's settings.
        rehearses: Whether each boundary is recorded for a rehearsal.
    """
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
