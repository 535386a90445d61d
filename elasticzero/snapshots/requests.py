"""Brings the calls of `session.checkpoint`, which any rank may make, to one save of all ranks.

Rules:
 J1  A call asks for the state of the boundary that follows it, under a tag or without. Calls of
     several ranks before one boundary are one request.
 J2  Where a capture is due at that boundary, and at the end of a loop, of an epoch and of a
     generation by agreement, the ranks tell each other at the boundary what was asked for.
 J3  Elsewhere the control word of the next step says that something was. All ranks have it before
     the optimizer changes the state, and capture that of the boundary then.
 J4  Training waits for a save that still runs, for a later state would be another one.
 J5  What is asked for under tags is part of the training state until it is saved. A generation
     that goes on from such a state has the tags name the step if its checkpoint exists; if not,
     the state that it goes on from is saved in its place.
 J6  A state that was captured before the call (after a loop, or where training resumes) is not
     saved again: the agent of rank 0 makes the tags name it.
 J7  Nothing is asked while ranks run different releases, of which one may not know these rules.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from elasticzero.checkpoint.format.names import step_directory
from elasticzero.checkpoint.steps.commit import is_good
from elasticzero.checkpoint.storage.base import within
from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.comm.barriers import Call
from elasticzero.comm.control import ControlWord
from elasticzero.comm.process_group import ProcessGroups
from elasticzero.data.tag_requests import TagRequests, after_save, tags_of, with_tags
from elasticzero.errors import ElasticZeroError
from elasticzero.ipc.agent_client import AgentClient
from elasticzero.snapshots.schedule import Due
from elasticzero.snapshots.stager import StateStager
from elasticzero.state.auxiliary import BoundaryCopy

log = logging.getLogger(__name__)

SAVE_POLL_S = 0.01
STORAGE_LIMIT_S = 10.0
"""Time limit in seconds for reading whether a step exists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Says where a rank is when it learns what others ask for, as for `ProcessGroups.barrier`."""

    call: Call
    where: str
    left_at: str
    """The place where the script left its loop early; empty: it did not."""


class CheckpointRequests:
    """Holds what the script of one rank has asked for in one generation."""

    def __init__(
        self,
        link: AgentClient,
        groups: ProcessGroups | None,
        stager: StateStager,
        *,
        same_release: bool = True,
    ) -> None:
        """Holds no request at first.

        Args:
            link: The client of the agent.
            groups: The process groups; None for one process alone.
            stager: What captures the state.
            same_release: Whether all ranks run the same release (J7).
        """
        self._same_release = same_release
        self._link = link
        self._groups = groups
        self._stager = stager
        self._new: set[str] = set()
        """Tags of the calls since the last boundary; an empty text is a call without one."""
        self._due: set[str] = set()
        """Tags under which this rank asks for the last boundary's state, in the same form."""
        self._tagging: TagRequests = ()
        """Requests under tags that are not known to be saved; equal on all ranks."""
        self._told = False

    def ask(self, tag: str | None) -> None:
        """Asks for the state of the next boundary (J1); says once where none is saved."""
        if (obstacle := self._obstacle()) is None:
            self._new.add(tag or "")
        elif not self._told:
            self._told = True
            log.warning(f"session.checkpoint saves nothing {obstacle}")

    def _obstacle(self) -> str | None:
        """Returns why nothing can be saved, as the end of a sentence; None: it can."""
        if self._link.assignment.checkpoint_dir is None:
            return (
                "without a checkpoint directory, and training goes on: give --checkpoint-dir DIR, "
                "or set ELASTICZERO_CHECKPOINT_DIR"
            )
        if not self._stager.saves:
            return (
                "because rank 0's node has no --checkpoint-dir, and training goes on: give all "
                "nodes the same"
            )
        return None if self._same_release else "while ranks run different releases"

    @property
    def waiting(self) -> bool:
        """Returns whether this rank asks for the last boundary's state."""
        return bool(self._due)

    def stamped(self, copy: BoundaryCopy) -> BoundaryCopy:
        """Returns a boundary's state with the tags that were asked for (J5)."""
        return replace(copy, position=replace(copy.position, tagging=self._tagging))

    def reach_boundary(self) -> None:
        """Makes all calls so far ask for the state of this boundary."""
        self._due |= self._new
        self._new = set()

    def after_exchange(self, word: ControlWord) -> None:
        """Forgets what is saved, by a word that all ranks have exchanged."""
        self._forget(word.saved, word.unsaved)

    def agree(self, copy: BoundaryCopy, place: RankPlace) -> tuple[bool, BoundaryCopy]:
        """Returns whether a rank asks for this boundary's state, and the state with the tags; all
        ranks call this together (J2)."""
        groups = self._groups
        self.reach_boundary()
        asked = self._stager.saves and self._same_release
        if asked and groups is not None:
            with self._link.awaiting(place.left_at):
                asked = bool(groups.barrier(place.call, int(self.waiting), place.where))
        asked = asked and self.exchange(copy.step)
        return asked, self.stamped(copy)

    def capture(
        self, copy: BoundaryCopy, kind: Due, place: RankPlace | None, verify: Callable[[], None]
    ) -> tuple[Due, BoundaryCopy]:
        """Captures a boundary's state: as `kind` says, or as is asked for.

        Args:
            copy: The small state at the boundary.
            kind: The capture that is due.
            place: Where this rank is, if all ranks are to tell each other now what is asked for;
                None: the words of the next step say so.
            verify: Raises if the ranks differ.

        Returns:
            The kind that it was, and the state with the tags.
        """
        self.reach_boundary()
        if place is not None:
            asked, copy = self.agree(copy, place)
            if asked and not self._stager.has_captured(copy.step):
                return "checkpoint", self.save(copy, verify)
            if asked:
                copy = self._tag(copy)
        self._stager.capture(copy, kind, verify)
        return kind, copy

    def finish(self, copy: BoundaryCopy, place: RankPlace) -> None:
        """Has the state at the end of training saved, as far as it is not, and its tags written."""
        asked, copy = self.agree(copy, place)
        if asked and self._stager.has_captured(copy.step):
            self._tag(copy)
        self._stager.finish(copy)

    def exchange(self, step: int) -> bool:
        """Learns what the ranks ask of the last boundary's state, once they know that one does;
        returns whether one does. All ranks call this together."""
        tags, self._due = self._due, set()
        if self._groups is not None:
            texts = self._groups.exchange(json.dumps(sorted(tags)).encode())
            tags = {tag for text in texts for tag in json.loads(text)}
        self._tagging = with_tags(self._tagging, step, tags - {""})
        return bool(tags)

    def exchange_and_save(self, copy: BoundaryCopy, verify: Callable[[], None]) -> BoundaryCopy:
        """Has the last boundary's state saved, once the ranks know that one of them asks for it
        (J3); returns it with the tags."""
        self.exchange(copy.step)
        return self.save(copy, verify)

    def save(self, copy: BoundaryCopy, verify: Callable[[], None]) -> BoundaryCopy:
        """Has the state of a boundary saved as was asked.

        Args:
            copy: The small state at the boundary.
            verify: Raises if the ranks differ.

        Returns:
            The state with the tags.
        """
        if self._stager.has_captured(copy.step):
            return self._tag(copy)
        if (running := self._stager.saving) is not None:
            with self._link.busy("waiting for a checkpoint to be saved"):
                lost = await_saves(self._link, self._groups, self._stager)
            self._stager.end_save()
            self._forget(running, running if lost else -1)
        copy = self.stamped(copy)
        self._stager.capture(copy, "checkpoint", verify)
        if self._link.standalone:  # it is saved at once
            self._forget(copy.step, -1 if self._stager.has_captured(copy.step) else copy.step)
        return copy

    def _tag(self, copy: BoundaryCopy) -> BoundaryCopy:
        """Has a state that was captured before tagged (J6); returns it with the tags."""
        tags, copy = tags_of(self._tagging, copy.step), self.stamped(copy)
        if tags and self._link.assignment.rank == 0:
            self._link.tag(copy.step, tags)
        if self._link.standalone:  # it is done at once
            self._tagging = ()
        return copy

    def _forget(self, saved: int, unsaved: int) -> None:
        """Forgets requests up to step `saved`, whose save has ended; `unsaved` is the newest step
        whose save has failed."""
        for request in self._tagging:
            if request.step <= min(saved, unsaved):
                self._print(
                    f"the checkpoint of step {request.step} was not saved, so its tag "
                    f"{', '.join(request.tags)} stays where it was"
                )
        self._tagging = after_save(self._tagging, saved)

    def resume(self, requests: TagRequests, step: int) -> None:
        """Takes over what was asked for before this generation, which goes on from the state of
        `step` (J5). All ranks call this together."""
        enabled = self._same_release and self._stager.saves
        for request in requests:
            tags = ", ".join(request.tags)
            if not enabled:
                self._print(f"step {request.step} does not get the tag {tags} that was asked for")
            elif self._exists(request.step):
                if self._link.assignment.rank == 0:
                    self._link.tag(request.step, request.tags)
            else:
                self._due |= set(request.tags)
                self._tagging = with_tags(self._tagging, request.step, request.tags)
                if request.step != step:
                    self._print(
                        f"the checkpoint of step {request.step} with the tag {tags} was lost; the "
                        f"state of step {step} is saved in its place"
                    )

    def go_on(self, requests: TagRequests) -> None:
        """Takes over what others have asked for, in whose generation this rank has come."""
        self._tagging = requests

    def _exists(self, step: int) -> bool:
        """Returns whether a step is a good checkpoint, as rank 0 finds it."""
        good = False
        assignment = self._link.assignment
        if assignment.rank == 0 and (url := assignment.checkpoint_dir) is not None:
            storage = open_directory(url).step(step_directory(step))
            try:
                good = within(STORAGE_LIMIT_S, url, lambda: is_good(storage))
            except (ElasticZeroError, OSError) as error:
                self._print(f"it is not known whether step {step} was saved: {error}")
        groups = self._groups
        return good if groups is None else bool(groups.control_tree.allreduce_max(int(good)))

    def _print(self, text: str) -> None:
        if self._link.assignment.rank == 0:
            log.warning(text)


def await_saves(link: AgentClient, groups: ProcessGroups | None, stager: StateStager) -> bool:
    """Waits until no rank saves any more; all ranks call this together.

    Args:
        link: The client of the agent, which says whether the generation has ended.
        groups: The process groups; None for one process alone.
        stager: This rank's stager, which says what has become of its newest save.

    Returns:
        Whether a save failed on any rank.
    """
    while True:
        link.check()
        most = ("none", "pending", "lost").index(stager.newest_save)
        if groups is not None:
            most = groups.control_tree.allreduce_max(most)
        if most != 1:
            break
        time.sleep(SAVE_POLL_S)
    if most == 2:
        stager.abandon_save()
    return most == 2


def save_at_the_end(
    link: AgentClient, groups: ProcessGroups | None, stager: StateStager, copy: BoundaryCopy | None
) -> str:
    """Saves the state at which training stops because of numbers that are not finite.

    All ranks call this together, and wait until no save runs any more.

    Args:
        link: The client of the agent.
        groups: The process groups; None for one process alone.
        stager: What captures the state.
        copy: The boundary's small state; None: the state is not finite.

    Returns:
        A description of the result.
    """
    lost = await_saves(link, groups, stager)
    if copy is not None and stager.save_last(copy):
        lost = await_saves(link, groups, stager)
    text = stager.newest_checkpoint_text()
    if lost and copy is not None:
        why = stager.save_error or "it failed on another rank"
        text = f"the state of step {copy.step} could not be saved ({why}); {text}"
    return text
