"""Defines what the threads that hold and save captures report to the agent's loop. Pure values."""

from __future__ import annotations

from dataclasses import dataclass

from elasticzero.ipc.messages import SnapshotHeld, Tagged


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFinished:
    """Says that a save has ended on this node."""

    step: int
    generation: int
    """Generation whose workers requested the save."""
    seconds: float
    bytes: int
    committed: bool
    """True if this node created the manifest."""
    error: str | None = None
    notes: tuple[str, ...] = ()
    """Notes on what retention did."""
    tags: tuple[str, ...] = ()
    """Tags that this node has made to name the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed:
    """Says that a save has failed and is tried again."""

    step: int
    generation: int
    error: str
    newest: int | None
    """Step of the newest good checkpoint; None: there is none, or storage cannot be read."""
    pause_s: float
    """Seconds until the next try."""


SaveEvent = SnapshotHeld | SaveFinished | SaveFailed | Tagged
"""Events that the threads which hold and save captures report to the agent's loop."""


def finished_event(generation: int, step: int, error: str | None) -> SaveFinished:
    """Returns the event of a save that took no time and wrote nothing yet.

    Args:
        generation: Generation whose workers requested the save.
        step: The step that was to be saved.
        error: Why it was not saved; None: nothing failed.
    """
    return SaveFinished(
        generation=generation, step=step, seconds=0.0, bytes=0, committed=False, error=error
    )
