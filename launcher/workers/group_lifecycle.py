"""Defines how the state of a node's worker group changes within one generation.

Pure. The state has three parts, each an enum of `launcher/protocol/view.py`, and one table
(`GROUP_TRANSITIONS`) moves them:

 GroupStage    how far the workers have come into the generation.
 GroupOutcome  how their training has ended, as far as they have reported that.
 GroupOrder    what the agent has told them to do.

The events of the first two follow from the states of the workers (`group_events`), those of the
third from what the agent does. Every part only moves forward. An event that the table does not list
for a part leaves that part as it is; so a repeated event changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto

from elasticzero.launcher.protocol.view import (
    GroupOrder,
    GroupOutcome,
    GroupStage,
    WorkerGroupState,
)
from elasticzero.launcher.workers.lifecycle import WorkerState


class GroupEvent(Enum):
    """Lists the events of a group: its workers advance, time passes, or the agent gives an
    order."""

    FIRST_ATTACHED = auto()
    """A worker has called `elasticzero.run`."""
    ALL_ATTACHED = auto()
    """Every worker has called it."""
    ALL_RESTORED = auto()
    """The state of every worker is in place."""
    LATE = auto()
    """The workers were started so long ago that every state should be in place."""
    ALL_STOPPED = auto()
    """Every worker has left its loop before its training was done, and none has failed."""
    WORKER_FAILED = auto()
    """A worker has reported an error."""
    ALL_FINISHED = auto()
    """The training of every worker is done, and no process works for the generation."""
    REQUEST = auto()
    """The agent requests a stop at a boundary."""
    STOP = auto()
    """The agent tells the workers to stop where they are."""
    KILL_UNSAVED = auto()
    """The agent kills the workers that do not write a snapshot."""
    KILL = auto()
    """The agent kills every worker."""


GroupPart = GroupStage | GroupOutcome | GroupOrder

GROUP_TRANSITIONS: Mapping[tuple[GroupPart, GroupEvent], GroupPart] = {
    (GroupStage.STARTING, GroupEvent.FIRST_ATTACHED): GroupStage.ATTACHING,
    (GroupStage.STARTING, GroupEvent.LATE): GroupStage.PLAIN,
    (GroupStage.PLAIN, GroupEvent.FIRST_ATTACHED): GroupStage.ATTACHING_LATE,
    (GroupStage.ATTACHING, GroupEvent.LATE): GroupStage.ATTACHING_LATE,
    (GroupStage.ATTACHING, GroupEvent.ALL_ATTACHED): GroupStage.ATTACHED,
    (GroupStage.ATTACHING_LATE, GroupEvent.ALL_ATTACHED): GroupStage.ATTACHED_LATE,
    (GroupStage.ATTACHED, GroupEvent.LATE): GroupStage.ATTACHED_LATE,
    (GroupStage.ATTACHED, GroupEvent.ALL_RESTORED): GroupStage.RESTORED,
    (GroupStage.ATTACHED_LATE, GroupEvent.ALL_RESTORED): GroupStage.RESTORED,
    (GroupOutcome.OPEN, GroupEvent.ALL_STOPPED): GroupOutcome.AT_BOUNDARY,
    (GroupOutcome.OPEN, GroupEvent.WORKER_FAILED): GroupOutcome.INTERRUPTED,
    (GroupOutcome.OPEN, GroupEvent.STOP): GroupOutcome.INTERRUPTED,
    (GroupOutcome.OPEN, GroupEvent.ALL_FINISHED): GroupOutcome.FINISHED,
    (GroupOutcome.AT_BOUNDARY, GroupEvent.WORKER_FAILED): GroupOutcome.INTERRUPTED,
    (GroupOutcome.AT_BOUNDARY, GroupEvent.STOP): GroupOutcome.INTERRUPTED,
    (GroupOutcome.INTERRUPTED, GroupEvent.ALL_FINISHED): GroupOutcome.FINISHED,
    (GroupOrder.TRAIN, GroupEvent.REQUEST): GroupOrder.STOP_AT_BOUNDARY,
    (GroupOrder.TRAIN, GroupEvent.STOP): GroupOrder.STOP,
    (GroupOrder.TRAIN, GroupEvent.KILL_UNSAVED): GroupOrder.KILL_UNSAVED,
    (GroupOrder.TRAIN, GroupEvent.KILL): GroupOrder.KILL,
    (GroupOrder.STOP_AT_BOUNDARY, GroupEvent.STOP): GroupOrder.STOP,
    (GroupOrder.STOP_AT_BOUNDARY, GroupEvent.KILL_UNSAVED): GroupOrder.KILL_UNSAVED,
    (GroupOrder.STOP_AT_BOUNDARY, GroupEvent.KILL): GroupOrder.KILL,
    (GroupOrder.STOP, GroupEvent.KILL_UNSAVED): GroupOrder.KILL_UNSAVED,
    (GroupOrder.STOP, GroupEvent.KILL): GroupOrder.KILL,
    (GroupOrder.KILL_UNSAVED, GroupEvent.KILL): GroupOrder.KILL,
}


def advance(group: WorkerGroupState, *events: GroupEvent) -> WorkerGroupState:
    """Returns the state of the group once the events have happened, in this order."""
    parts: list[GroupPart] = [group.stage, group.outcome, group.order]
    for event in events:
        parts = [GROUP_TRANSITIONS.get((part, event), part) for part in parts]
    stage, outcome, order = parts
    if (stage, outcome, order) == (group.stage, group.outcome, group.order):
        return group
    assert isinstance(stage, GroupStage)
    assert isinstance(outcome, GroupOutcome)
    assert isinstance(order, GroupOrder)
    return replace(group, stage=stage, outcome=outcome, order=order)


def group_events(workers: Sequence[WorkerState]) -> Iterator[GroupEvent]:
    """Yields the events that follow from the states of all workers; none if there are no
    workers."""
    if any(worker.attached for worker in workers):
        yield GroupEvent.FIRST_ATTACHED
        if all(worker.attached for worker in workers):
            yield GroupEvent.ALL_ATTACHED
        if all(worker.restored for worker in workers):
            yield GroupEvent.ALL_RESTORED
    if any(worker.failed for worker in workers):
        yield GroupEvent.WORKER_FAILED
    elif workers and all(worker.stopping for worker in workers):
        yield GroupEvent.ALL_STOPPED
    if workers and all(worker.finished and not worker.at_work for worker in workers):
        yield GroupEvent.ALL_FINISHED
