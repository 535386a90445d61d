"""What a decision can ask an agent to do. Pure values."""

from __future__ import annotations

from dataclasses import dataclass

from elasticzero.errors import ExitCode
from elasticzero.launcher.protocol.documents import Alarm, Done, Report, World


@dataclass(frozen=True, slots=True)
class Start:
    world: World
    index: int


@dataclass(frozen=True, slots=True)
class RequestBoundaryStop:
    flags: int


@dataclass(frozen=True, slots=True)
class StopWorkers:
    reason: str


@dataclass(frozen=True, slots=True)
class KillWorkers:
    reason: str
    spare_saving: bool = False
    """Not those that may be writing their snapshot."""


@dataclass(frozen=True, slots=True)
class KillUnresponsive:
    """End the workers that, as a look has found, could not obey."""


@dataclass(frozen=True, slots=True)
class KillSuspended:
    """End the workers that a signal has stopped: they will not obey."""


@dataclass(frozen=True, slots=True)
class DumpStacks:
    """Find out where the workers are that make no step, and dump their stacks."""

    limit_s: float | None
    """Without a step for so long a worker may be to blame; None: only one that is stopped."""


@dataclass(frozen=True, slots=True)
class RaiseAlarm:
    alarm: Alarm


@dataclass(frozen=True, slots=True)
class PutReport:
    report: Report


@dataclass(frozen=True, slots=True)
class WriteWorld:
    world: World
    gone: tuple[str, ...] = ()
    """Registrations that end with the former world: who lives registers anew."""


@dataclass(frozen=True, slots=True)
class WriteDone:
    done: Done


@dataclass(frozen=True, slots=True)
class SaveHeldSnapshot:
    """Make a checkpoint of a snapshot whose workers are gone: write these ranks' shards."""

    generation: int
    step: int
    world_size: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExitAgent:
    code: ExitCode


Action = (
    Start
    | RequestBoundaryStop
    | StopWorkers
    | KillWorkers
    | KillUnresponsive
    | KillSuspended
    | DumpStacks
    | RaiseAlarm
    | PutReport
    | WriteWorld
    | WriteDone
    | SaveHeldSnapshot
    | ExitAgent
)


@dataclass(frozen=True, slots=True)
class Decision:
    actions: tuple[Action, ...]
    reason: str


def wait(reason: str) -> Decision:
    """Nothing to do now, and why."""
    return Decision((), reason)
