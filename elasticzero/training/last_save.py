"""Saves the state at which training stops because of numbers that are not finite."""

from __future__ import annotations

from elasticzero.comm.process_group import ProcessGroups
from elasticzero.ipc.agent_client import AgentClient
from elasticzero.snapshots.requests import await_saves
from elasticzero.snapshots.stager import StateStager
from elasticzero.state.auxiliary import BoundaryCopy


def save_at_the_end(
    link: AgentClient, groups: ProcessGroups | None, stager: StateStager, copy: BoundaryCopy | None
) -> str:
    """Saves a boundary's state as a checkpoint, and awaits running saves, on all ranks.

    copy: of the boundary; None: its state is not finite. Returns a description of the result.
    """
    lost = await_saves(link, groups, stager)
    if copy is not None and stager.save_last(copy):
        lost = await_saves(link, groups, stager)
    text = stager.newest_checkpoint_text()
    if lost and copy is not None:
        why = stager.save_error or "it failed on another rank"
        text = f"the state of step {copy.step} could not be saved ({why}); {text}"
    return text
