"""Defines what `decide` sees: this node's workers, the store's health, what the agent has read.

Pure values. Times are seconds on the agent's own monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal

from elasticzero.launcher.protocol.documents import (
    Alarm,
    Control,
    Done,
    Failure,
    Holding,
    Member,
    Report,
    World,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionNotice:
    """This node is to leave."""

    reason: str
    """As it will stand in the world's reason: `AWS spot interruption in 118 s`."""
    heard_s: float
    by_s: float | None = None
    """When the machine is gone; None: nobody takes it away."""


@dataclass(frozen=True, slots=True)
class DamagedCheckpoint:
    """A committed checkpoint that cannot be used."""

    step: int
    reason: str
    """Which file, and which of its bytes."""


class GroupStage(Enum):
    """How far the workers of a node have come into their generation."""

    STARTING = auto()
    """None has called `elasticzero.run`."""
    PLAIN = auto()
    """None has called it for so long that the script is taken for a plain one."""
    ATTACHING = auto()
    """Some have called it."""
    ATTACHING_LATE = auto()
    """Some have called it; those that have not are slow."""
    ATTACHED = auto()
    """All have called it."""
    ATTACHED_LATE = auto()
    """All have called it; the state of some should be in place by now, and is not."""
    RESTORED = auto()
    """The state of all is in place."""


class GroupOutcome(Enum):
    """How the training of a node's workers has ended in their generation."""

    OPEN = auto()
    AT_BOUNDARY = auto()
    """All have left the loop together at a boundary."""
    INTERRUPTED = auto()
    """One has failed, or they were told to stop where they are: they leave at no boundary."""
    FINISHED = auto()
    """All have ended well, with their training done."""


class GroupOrder(Enum):
    """What an agent has told its workers to do."""

    TRAIN = auto()
    STOP_AT_BOUNDARY = auto()
    STOP = auto()
    """They are to stop where they are."""
    KILL_UNSAVED = auto()
    """Those that did not write a snapshot were killed."""
    KILL = auto()
    """All were killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGroupState:
    """This node's workers, all of one generation."""

    generation: int = 0
    token: str = ""
    """Of that generation; empty: not told."""
    running: int = 0
    """Processes alive."""
    stage: GroupStage = GroupStage.STARTING
    outcome: GroupOutcome = GroupOutcome.OPEN
    order: GroupOrder = GroupOrder.TRAIN
    saving: int = 0
    """Processes alive that are out of the loop, and may be writing their snapshot."""
    end_reason: str = ""
    """Why the script ended training early, where it did."""
    failure: Failure | None = None
    asked: int = 0
    """Flags already asked of them."""
    aborted_s: float | None = None
    """When they were told to stop where they are."""
    sealing: bool = False
    """A shard of theirs in memory is not sealed yet."""
    stepped_s: float = 0.0
    """When the last step was finished; 0 if none was."""
    step: int = 0
    silent_s: float = 0.0
    """Longest time that one of them has been without a step, where steps are due."""
    before_step_s: float = 0.0
    """The same before the first step of the generation, and out of the loop over batches."""
    frozen_s: float = 0.0
    """Longest time that one of them has been seen stopped by a signal, until its training is
    over."""
    stopped_s: float = 0.0
    """The same, whatever it was at."""
    longest_step_s: float = 0.0
    """Of the last steps, with what lies between them."""
    look: Literal["none", "open", "over"] = "none"
    """Whether those that make no step were looked at since."""
    stalled: Failure | None = None
    """After a look that found nobody to blame here: what the workers wait for."""

    @property
    def attached(self) -> bool:
        """All have called `elasticzero.run`: they can be asked to stop at a boundary."""
        return self.stage in (GroupStage.ATTACHED, GroupStage.ATTACHED_LATE, GroupStage.RESTORED)

    @property
    def restored(self) -> bool:
        """The state of all is in place."""
        return self.stage is GroupStage.RESTORED

    @property
    def plain(self) -> bool:
        """The script is taken for a plain one."""
        return self.stage is GroupStage.PLAIN

    @property
    def late(self) -> bool:
        """The state of some should be in place by now, and is not."""
        late = (GroupStage.PLAIN, GroupStage.ATTACHING_LATE, GroupStage.ATTACHED_LATE)
        return self.stage in late

    @property
    def finished(self) -> bool:
        """All have ended well, with their training done."""
        return self.outcome is GroupOutcome.FINISHED

    @property
    def at_boundary(self) -> bool:
        """They have left the loop together, as some node has asked."""
        return self.outcome is GroupOutcome.AT_BOUNDARY

    @property
    def failed(self) -> bool:
        """A failure of this node's is known."""
        return self.failure is not None

    @property
    def killed(self) -> bool:
        """All have been killed."""
        return self.order is GroupOrder.KILL


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreHealth:
    reachable: bool = True
    well_since_s: float = 0.0
    """Since when nothing was heard of an outage."""
    confirmed_s: float = 0.0
    """When the own lease was last confirmed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """All that one agent sees; never changed in place."""

    me: Member
    members: Mapping[str, Member] | None = None
    """Registrations, oldest first; None: this agent does not watch them now."""
    oldest: bool = False
    """Mine is the oldest registration."""
    began_s: float = 0.0
    """When this agent began to wait for the first world."""
    last_join_s: float = 0.0
    world: World | None = None
    world_s: float | None = None
    """When this agent first saw that world."""
    outside_s: float | None = None
    """Since when `world` does not name this registration."""
    surplus: bool = False
    """MAX nodes and as many spares as may wait were registered before this one, and stay."""
    alarm: Alarm | None = None
    alarm_s: float | None = None
    """When this agent first saw the alarm: from then on everybody was asked who is alive."""
    round_s: float | None = None
    """When this agent first saw that the round of this generation is open."""
    reports: Mapping[str, Report] | None = None
    """Of this generation, by node; None: this agent does not watch them now."""
    my_report: Report | None = None
    """The one already put for this generation."""
    done: Done | None = None
    control: Control = field(default_factory=Control)
    remnants: bool = False
    """The store was restored from a backup a moment ago: registrations may be remnants of nodes
    that are gone, and bring no node into a world."""
    leaving: bool = False
    notice: PreemptionNotice | None = None
    """Why it leaves, and by when."""
    workers: WorkerGroupState = WorkerGroupState()
    holdings: tuple[Holding, ...] = ()
    saving: bool = False
    """A save of this node is not over."""
    saved_held: tuple[int, int] | None = None
    """Generation and step of the snapshot that this node was last told to save from memory."""
    saved_ranks: tuple[int, ...] = ()
    """Whose shards of it."""
    can_save: bool = False
    """There is a checkpoint directory."""
    bad_steps: tuple[int, ...] = ()
    """Checkpoints found damaged."""
    storage_step: int | None = None
    """The newest good checkpoint."""
    storage_pending: str | None = None
    """Why it is not known yet what storage holds; None: it is, or nobody has asked."""
    damage: DamagedCheckpoint | None = None
    """Of the newest committed checkpoint."""
    missing_since_s: Mapping[str, float] = field(default_factory=dict)
    """Members of the world without a registration, since when."""
    struck_s: Mapping[str, float] = field(default_factory=dict)
    """Nodes with strikes, since when they have this many."""
    store: StoreHealth = StoreHealth()
    token: str = ""
    """For the next world, drawn by the caller."""
