"""Defines what a decision can tell an agent to do. Pure values."""

from __future__ import annotations

from dataclasses import dataclass

from elasticzero.errors import ExitCode
from elasticzero.launcher.protocol.documents import Alarm, Done, Proposal, Report, World


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
    """True: workers that may be writing their snapshot are not killed."""


@dataclass(frozen=True, slots=True)
class KillUnresponsive:
    """Kills the workers that, as their stacks have shown, cannot obey."""


@dataclass(frozen=True, slots=True)
class KillSuspended:
    """Kills the workers that a signal has suspended: they cannot obey."""


@dataclass(frozen=True, slots=True)
class DumpStacks:
    """Asks the workers that make no step where they are, and dumps their stacks."""

    limit_s: float | None
    """Seconds without a step after which a worker may be to blame; None: only a suspended one
    may."""
    suspended_s: float | None = None
    """Seconds; only workers that a signal has suspended for so long are examined. None: all are
    that make no step."""


@dataclass(frozen=True, slots=True)
class RaiseAlarm:
    alarm: Alarm
    lost: str = ""
    """Node that counts as lost: the alarm is raised only if its registration has not changed since
    it was read. Empty: it is raised in any case."""


@dataclass(frozen=True, slots=True)
class PutReport:
    report: Report


@dataclass(frozen=True, slots=True)
class WriteWorld:
    world: World
    gone: tuple[str, ...] = ()
    """Registrations that end with the former world; a node that lives registers anew."""


@dataclass(frozen=True, slots=True)
class WriteProposal:
    proposal: Proposal


@dataclass(frozen=True, slots=True)
class PrepareWorkers:
    """Has the workers connect the proposed generation beside their training."""

    proposal: Proposal


@dataclass(frozen=True, slots=True)
class WithdrawPreparation:
    """Has the workers forget the generation that they have prepared."""

    reason: str


@dataclass(frozen=True, slots=True)
class EnterWorld:
    """Takes the workers for those of a world that they have entered inside their loops."""

    world: World


@dataclass(frozen=True, slots=True)
class WriteDone:
    done: Done


@dataclass(frozen=True, slots=True)
class SaveHeldSnapshot:
    """Makes a checkpoint of a snapshot whose workers are gone, by writing the shards of these
    ranks."""

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
    | WriteProposal
    | PrepareWorkers
    | WithdrawPreparation
    | EnterWorld
    | WriteDone
    | SaveHeldSnapshot
    | ExitAgent
)


@dataclass(frozen=True, slots=True)
class Decision:
    actions: tuple[Action, ...]
    reason: str


def wait(reason: str) -> Decision:
    """Returns a decision that does nothing for now, and says why."""
    return Decision((), reason)
