"""Decides when processes stand by for the workers of a node. Pure.

A process that stands by has run the script up to `elasticzero.run`, and takes the place of a worker
that is lost, or of one that ends with its generation. Another begins only if none of these holds;
the first that holds is the reason:
 SY1  --standby is off.
 SY2  Workers are programs that are executed without Python, which nothing can hold.
 SY3  A process has shown that this script cannot be held: before `elasticzero.run` it looks at a
      variable of its world, or takes away a file that was there before, which the training beside
      it may need, or starts a process that stays, or uses the GPU. Or processes have ended by
      themselves MOST_DEATHS times; or files that they had read have changed MOST_CHANGES times; or
      they were ended because memory was exhausted.
 SY4  The workers have trained for less than SETTLED_S, or the world is about to change: what begins
      now would take the cores that they need. A spare node has waited for that long.
 SY5  The script comes to `elasticzero.run` within WORTH_S, and uses no GPU: there is nothing to
      gain. A spare node does not know that, and has nothing else to do.
 SY6  Less than SCARCE of the memory of the machine, or of the container, is available, or less than
      ROOM_FACTOR times what a worker had taken at `elasticzero.run`.
 SY7  Another one has begun, and is not there yet.
Those that stand by are ended where less than EXHAUSTED of the memory is available. The kernel ends
them first, too, where it has to end a process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from elasticzero.processes import Ram

StandbyMode = Literal["auto", "off"]
SETTLED_S = 2.0
WORTH_S = 0.5
SCARCE, EXHAUSTED = 0.1, 0.05
"""Shares of the machine's memory that are still available."""
ROOM_FACTOR = 2.0
MOST_DEATHS, MOST_CHANGES = 3, 10
"""Numbers for one run of the agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StandbyFacts:
    """Holds what the decision follows from."""

    mode: StandbyMode = "auto"
    is_program: bool = False
    refused: str = ""
    """Why this script cannot be held; empty: nothing speaks against it."""
    settled_s: float | None = None
    """Seconds for which the workers have trained, or a spare node has waited; None: neither."""
    is_spare: bool = False
    script_s: float | None = None
    """Seconds from a worker's fork to `elasticzero.run`; None: not known."""
    on_gpu: bool = False
    memory: Ram = field(default_factory=lambda: Ram(1, 1))
    script_bytes: int = 0
    """Memory that a worker had in RAM at `elasticzero.run`; 0: not known."""
    beginning: bool = False
    """True if a process has begun and is not there yet."""


def reason_for_none(facts: StandbyFacts) -> str:
    """Returns why no process begins to stand by now; empty: one may begin."""
    if facts.mode == "off":
        return "--standby is off"
    if facts.is_program:
        return "the workers are programs that are executed without Python"
    if facts.refused:
        return facts.refused
    if facts.settled_s is None or facts.settled_s < SETTLED_S:
        return "the world is changing"
    gains = facts.on_gpu or facts.script_s is None or facts.script_s >= WORTH_S
    if not facts.is_spare and not gains:
        return f"the script comes to elasticzero.run in {facts.script_s:.1f} s"
    available_bytes = facts.memory.available_bytes
    if available_bytes < max(SCARCE * facts.memory.total_bytes, ROOM_FACTOR * facts.script_bytes):
        return "memory is short"
    return "another one has begun" if facts.beginning else ""


def must_end(facts: StandbyFacts) -> bool:
    """Returns whether those that stand by must end, to free their memory."""
    return facts.memory.available_bytes < EXHAUSTED * facts.memory.total_bytes
