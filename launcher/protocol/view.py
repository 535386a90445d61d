"""Defines what `decide` is given: this node's workers, the store's health, what the agent has read.

Pure values. Times are seconds on the agent's own monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal

from elasticzero.launcher.protocol.documents import (
    UNSTATED,
    Alarm,
    Control,
    Done,
    Failure,
    Holding,
    Member,
    Proposal,
    Report,
    World,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionNotice:
    """Says that this node is to leave."""

    reason: str
    """Reason as the world's reason will repeat it: `AWS spot interruption in 118 s`."""
    received_s: float
    by_s: float | None = None
    """Time at which the machine is gone; None: the machine stays."""


@dataclass(frozen=True, slots=True)
class DamagedCheckpoint:
    """Names a committed checkpoint that cannot be used."""

    step: int
    reason: str
    """Names the damaged file, and the bytes of it."""


class GroupStage(Enum):
    """Says how far the workers of a node have come into their generation."""

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
    """Says how the training of a node's workers has ended in their generation."""

    OPEN = auto()
    AT_BOUNDARY = auto()
    """All have left the loop together at a boundary."""
    INTERRUPTED = auto()
    """One has failed, or they were told to stop where they are: they leave at no boundary."""
    FINISHED = auto()
    """All have ended well, with their training done."""


class GroupOrder(Enum):
    """Says what an agent has told its workers to do."""

    TRAIN = auto()
    STOP_AT_BOUNDARY = auto()
    STOP = auto()
    """They are to stop where they are."""
    KILL_UNSAVED = auto()
    """Workers that did not write a snapshot were killed."""
    KILL = auto()
    """All were killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGroupState:
    """Holds the state of this node's workers, all of one generation."""

    generation: int = 0
    token: str = ""
    """Token of that generation; empty: not stated."""
    running: int = 0
    """Number of processes that are alive."""
    stage: GroupStage = GroupStage.STARTING
    outcome: GroupOutcome = GroupOutcome.OPEN
    order: GroupOrder = GroupOrder.TRAIN
    saving: int = 0
    """Number of live processes that have left the loop, and may be writing their snapshot."""
    end_reason: str = ""
    """Reason for which the script ended training early; empty: it did not."""
    failure: Failure | None = None
    requested: int = 0
    """Flags that were already requested of the workers."""
    aborted_s: float | None = None
    """Time at which the workers were told to stop where they are."""
    sealing: bool = False
    """True if a shard of theirs in memory is not sealed yet."""
    stepped_s: float = 0.0
    """Time at which the last step was finished; 0 if none was."""
    step: int = 0
    held: int | None = None
    """Newest step whose snapshot all nodes hold, or the one that the generation started from; None:
    snapshots do not decide how many steps a lost node costs."""
    held_s: float = 0.0
    """Time of the first step after which that was so."""
    silent_s: float = 0.0
    """Longest time that one of the workers has made no step, where steps are due."""
    before_step_s: float = 0.0
    """Longest time without a step before the generation's first one, or out of the loop."""
    frozen_s: float = 0.0
    """Longest time that one of the workers has been suspended by a signal, until its training is
    over."""
    stopped_s: float = 0.0
    """Longest time that a worker has been suspended, whatever it was doing."""
    longest_step_s: float = 0.0
    """Longest of the last steps, with the time between steps."""
    examination: Literal["none", "open", "over"] = "none"
    """State of the examination of workers that make no step, since their last step."""
    stalled: Failure | None = None
    """Failure that the workers wait for, after an examination found none to blame here."""
    prepared: Proposal | None = None
    """Proposal for which the workers were told to prepare; None: for none."""
    withdrawn: bool = False
    """True if they were told to forget it."""
    refused: str = ""
    """Reason for which a worker cannot be prepared; empty: there is none so far."""
    awaits: bool = False
    """True if all wait to come into the proposed generation, in which they begin."""
    switched: Literal["no", "entered", "left"] = "no"
    """Whether the workers have gone over to the proposed generation, or have left it to the
    others; `generation` and `token` stay those before until the agent enters its world."""
    switched_step: int = 0
    """Boundary at which that happened."""
    switched_s: float = 0.0
    """Time at which the agent learnt of it."""

    @property
    def attached(self) -> bool:
        """Returns whether all have called `elasticzero.run`, so that they can be asked to stop at a
        boundary."""
        return self.stage in (GroupStage.ATTACHED, GroupStage.ATTACHED_LATE, GroupStage.RESTORED)

    @property
    def restored(self) -> bool:
        """Returns whether the state of all is in place."""
        return self.stage is GroupStage.RESTORED

    @property
    def plain(self) -> bool:
        """Returns whether the script is taken for a plain one."""
        return self.stage is GroupStage.PLAIN

    @property
    def late(self) -> bool:
        """Returns whether the state of some should be in place by now, and is not."""
        late = (GroupStage.PLAIN, GroupStage.ATTACHING_LATE, GroupStage.ATTACHED_LATE)
        return self.stage in late

    @property
    def finished(self) -> bool:
        """Returns whether all have ended well, with their training done."""
        return self.outcome is GroupOutcome.FINISHED

    @property
    def at_boundary(self) -> bool:
        """Returns whether they have left the loop together, as some node has asked."""
        return self.outcome is GroupOutcome.AT_BOUNDARY

    @property
    def failed(self) -> bool:
        """Returns whether a failure of this node's workers is known."""
        return self.failure is not None

    @property
    def killed(self) -> bool:
        """Returns whether all have been killed."""
        return self.order is GroupOrder.KILL


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreHealth:
    reachable: bool = True
    outage_end_s: float = 0.0
    """End of the last known outage of the store."""
    confirmed_s: float = 0.0
    """Time at which the node's own lease was last confirmed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Holds all that one agent can see; it is never changed in place."""

    me: Member
    members: Mapping[str, Member] | None = None
    """Registrations, oldest first; None: this agent does not watch them now."""
    oldest: bool = False
    """True if this node's registration is the oldest."""
    began_s: float = 0.0
    """Time at which this agent began to wait for the first world."""
    last_join_s: float = 0.0
    world: World | None = None
    world_unread: bool = False
    """True if the store has not answered yet whether the job has a world."""
    world_s: float | None = None
    """Time at which this agent first saw that world."""
    outside_s: float | None = None
    """Time since which `world` does not name this registration."""
    surplus: bool = False
    """True if MAX nodes and as many spares as may wait were registered before this one, and
    stay."""
    alarm: Alarm | None = None
    alarm_s: float | None = None
    """Time at which this agent first saw the alarm, which asks every node whether it is alive."""
    answered_s: float | None = None
    """Time at which the acting leader last saw another answer to it; None: it saw none come."""
    round_s: float | None = None
    """Time at which this agent first saw that the round of this generation is open."""
    reports: Mapping[str, Report] | None = None
    """Reports of this generation, by node; None: this agent does not watch them now."""
    my_report: Report | None = None
    """Report that this agent has already put for this generation."""
    proposal: Proposal | None = None
    """Proposal of this world; None: it has none, as far as this agent sees."""
    proposal_s: float | None = None
    """Time at which this agent first saw that proposal."""
    asked_s: float | None = None
    """Time since which this agent's report says that its node is to leave, while it trains."""
    done: Done | None = None
    later_run: int = UNSTATED
    """Number of a later run that has taken the place of this node's; UNSTATED: none has."""
    control: Control = field(default_factory=Control)
    remnants: bool = False
    """True if the store was restored from a backup a moment ago: registrations may be remnants of
    nodes that are gone, and bring no node into a world."""
    leaving: bool = False
    notice: PreemptionNotice | None = None
    """Reason for which this node leaves, and its deadline; None: it stays."""
    workers: WorkerGroupState = WorkerGroupState()
    holdings: tuple[Holding, ...] = ()
    saving: bool = False
    """True if a save of this node has not ended."""
    saved_held: tuple[int, int] | None = None
    """Generation and step of the snapshot that this node was last told to save from memory."""
    saved_ranks: tuple[int, ...] = ()
    """Ranks whose shards of it this node was told to save."""
    can_save: bool = False
    """True if there is a checkpoint directory."""
    bad_steps: tuple[int, ...] = ()
    """Steps whose checkpoints were found damaged."""
    storage_asked_s: float | None = None
    """Time since which this agent waits for an answer of storage; None: it does not wait."""
    storage_step: int | None = None
    """Step of the newest good checkpoint."""
    storage_pending: str | None = None
    """Reason for which it is not known yet what storage holds; None: it is known, or was not asked
    for."""
    damage: DamagedCheckpoint | None = None
    """Damage of the newest committed checkpoint."""
    refusing: frozenset[str] = frozenset()
    """Members that have not answered in this round, and whose hosts refuse connections to them."""
    missing_since_s: Mapping[str, float] = field(default_factory=dict)
    """Members of the world without a registration, and since when."""
    unanswered_since_s: Mapping[str, float] = field(default_factory=dict)
    """Those of them whose agents answer no request, and since when."""
    struck_s: Mapping[str, float] = field(default_factory=dict)
    """Nodes with strikes, and since when they have so many."""
    store: StoreHealth = StoreHealth()
    token: str = ""
    """Token for the next world, drawn by the caller."""
