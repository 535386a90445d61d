"""Connects the ranks of the next world beside the training, and says when this rank is prepared.

An agent hands the next world over by `Prepare`, and takes it back by `Withdraw`. One table moves
what becomes of it (`STAGES`):

 Stage  how far this rank has come with the next world.

Rules:
 NW1  There is one next world at a time. A `Prepare` with the token of the present one changes
      nothing. One with another token takes its place, as if the present one was withdrawn before.
 NW2  A rank that stays is prepared once a thread has connected the groups of the next world. A rank
      that leaves is prepared at once.
 NW3  A control word in which a rank is prepared is a promise. Until the word of all ranks is there,
      a `Withdraw` is kept. If all are prepared, this rank goes over all the same, as all others do.
      If not, the promise ends, and the `Withdraw` takes effect.
 NW4  A rank that cannot connect says so, once for each `Prepare`. Training goes on.
 NW5  The groups of the world before are ended at the first boundary of the next one: by then all
      ranks that stay have gone over, and need nothing from them.
Invariant: as long as a promise lasts, the groups of the next world are there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum, auto

import torch

from elasticzero.comm import nccl
from elasticzero.comm.control_tree import join
from elasticzero.comm.process_group import DESTROY_TIMEOUT_S, WORLD, ProcessGroups
from elasticzero.comm.rendezvous import ClosableStore, RankInfo, rendezvous
from elasticzero.comm.store.addressed import AddressedStore
from elasticzero.comm.worlds import entering
from elasticzero.errors import one_line
from elasticzero.ipc.agent_client import AgentClient, close_store_of
from elasticzero.ipc.assignment import Assignment
from elasticzero.ipc.messages import Prepare, PrepareFailed, Withdraw
from elasticzero.rank_groups.group import RankGroup
from elasticzero.torch_internals.groups import PrefixStore, group_beside

CONNECT_S, CONNECT_GPUS_S = 8.0, 28.0
"""Time in seconds within which the ranks of the next world must connect by gloo, and by NCCL.
Agents give up after a little more."""
Introduce = Callable[[str], AbstractContextManager[str]]
"""Returns, by the token of a world, what rank 0 tells the ranks that come into it before they
connect; it holds as long as the context is open."""
NOT_TRAINING = "its script has not restored its state yet"


def no_introduction(token: str) -> AbstractContextManager[str]:
    """Tells nothing."""
    return nullcontext("")


class Stage(Enum):
    """Says how far this rank has come with the next world."""

    EMPTY = auto()
    """There is none."""
    CONNECTING = auto()
    FAILED = auto()
    """It could not be connected."""
    PREPARED = auto()
    PROMISED = auto()
    """The word of the step that runs says that this rank is prepared."""
    RECALLED = auto()
    """The same, and it was withdrawn since."""


class Event(Enum):
    """Names what happens to the next world."""

    OFFERED = auto()
    """The agent offers it."""
    CONNECTED = auto()
    """Its groups are connected, or this rank leaves."""
    FAILED = auto()
    """Its groups cannot be connected."""
    WITHDRAWN = auto()
    """The agent takes it back."""
    PROMISED = auto()
    """The word of this rank says that it is prepared."""
    DECLINED = auto()
    """The word of all ranks says that one of them is not prepared."""
    ENTERED = auto()
    """The word of all ranks says that all are prepared."""


STAGES = {
    (Stage.EMPTY, Event.OFFERED): Stage.CONNECTING,
    (Stage.CONNECTING, Event.CONNECTED): Stage.PREPARED,
    (Stage.CONNECTING, Event.FAILED): Stage.FAILED,
    (Stage.CONNECTING, Event.WITHDRAWN): Stage.EMPTY,
    (Stage.FAILED, Event.WITHDRAWN): Stage.EMPTY,
    (Stage.PREPARED, Event.FAILED): Stage.FAILED,
    (Stage.PREPARED, Event.WITHDRAWN): Stage.EMPTY,
    (Stage.PREPARED, Event.PROMISED): Stage.PROMISED,
    (Stage.PROMISED, Event.WITHDRAWN): Stage.RECALLED,
    (Stage.PROMISED, Event.DECLINED): Stage.PREPARED,
    (Stage.PROMISED, Event.ENTERED): Stage.EMPTY,
    (Stage.RECALLED, Event.DECLINED): Stage.EMPTY,
    (Stage.RECALLED, Event.ENTERED): Stage.EMPTY,
}
"""The stage after each event; an event that is not here changes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Holds the next world as this rank has it."""

    token: str = ""
    number: int = 0
    """Its number among those that were offered, of which a token may be offered again."""
    assignment: Assignment | None = None
    """This rank's place in it; None: this rank leaves."""
    groups: ProcessGroups | None = None
    """Its groups, once they are connected."""
    store: ClosableStore | None = None
    """The store at which its ranks meet, once it is reached."""
    joins: bool = False
    """True if ranks that are not of the present world come into it."""
    stage: Stage = Stage.EMPTY
    reason: str = ""
    """Why it could not be connected."""

    def after(self, event: Event) -> Offer:
        """Returns the offer after an event; what is empty has nothing."""
        stage = STAGES.get((self.stage, event), self.stage)
        if stage is self.stage:
            return self
        return Offer() if stage is Stage.EMPTY else replace(self, stage=stage)


class NextWorld:
    """Holds the next world of one generation on one rank.

    The thread that receives the agent's messages calls `receive` and `abandon`, and the main thread
    all else.
    """

    def __init__(self, link: AgentClient, device: torch.device, obstacle: str = "") -> None:
        """Begins without one, before the script has restored its state.

        Args:
            link: The client of the agent.
            device: The device of the tensors that collectives take.
            obstacle: Why no world can be entered inside of a loop; empty: nothing prevents it.
        """
        self._link, self._device = link, device
        on_gpu = device.type == "cuda"
        self._limit_s = CONNECT_GPUS_S if on_gpu else CONNECT_S
        self._end_s = nccl.ABORT_S if on_gpu else DESTROY_TIMEOUT_S
        """Seconds for which the end of groups is waited for."""
        self._lock = threading.Lock()
        self._offer = Offer()
        self._count = 0
        """Number of worlds that were offered."""
        self._introduce: Introduce = no_introduction
        self._obstacle_of_joins: Callable[[], str] = str
        """Returns why no world can be entered into which other ranks come; empty: it can."""
        self._obstacle = obstacle or NOT_TRAINING
        """Why no `Prepare` is taken; empty: it is."""
        self._final = bool(obstacle)
        """True if that stays so."""
        self._before: ProcessGroups | None = None
        """What had the groups of the world that was entered last, and has those of the one before
        once `ProcessGroups.enter` was called (NW5)."""
        self._threads: list[threading.Thread] = []

    def admit(
        self,
        obstacle: str,
        introduce: Introduce = no_introduction,
        obstacle_of_joins: Callable[[], str] = str,
    ) -> None:
        """Takes a `Prepare` from here on.

        Args:
            obstacle: Why none is taken, now and later; empty: nothing prevents it.
            introduce: Returns what rank 0 tells ranks that come into a world, while they connect.
            obstacle_of_joins: Returns why none is taken of a world with such ranks.
        """
        self._introduce, self._obstacle_of_joins = introduce, obstacle_of_joins
        if not self._final:
            self._obstacle, self._final = obstacle, bool(obstacle)

    # The thread that receives messages.

    def receive(self, message: Prepare | Withdraw) -> None:
        """Does what the agent says; does not wait."""
        if isinstance(message, Withdraw):
            self._withdraw(message.token)
            return
        failure = self._take(message)
        if failure is not None:
            close_store_of(message)
            if failure:
                self._fail(message.token, failure, final=self._final)

    def _take(self, message: Prepare) -> str | None:
        """Begins with the next world that a message offers; returns why not, empty where it has
        been offered before, and None where this has begun."""
        obstacle = self._obstacle or (self._obstacle_of_joins() if message.joins else "")
        if obstacle:
            return obstacle
        with self._lock:
            present = self._offer
            if present.stage is not Stage.EMPTY and present.token == message.token:
                return present.reason
            if present.stage in (Stage.PROMISED, Stage.RECALLED):
                return "it is about to go over to another world"
            self._count += 1
            offered = Offer(
                token=message.token,
                number=self._count,
                assignment=message.assignment,
                joins=message.joins,
            ).after(Event.OFFERED)
            if message.assignment is None:
                offered = offered.after(Event.CONNECTED)
            self._offer = offered
        self._drop(present)
        if message.assignment is not None:
            thread = threading.Thread(
                target=self._connect,
                args=(offered, RankInfo.from_assignment(message.assignment)),
                name="elasticzero-next-world",
                daemon=True,
            )
            self._threads.append(thread)
            thread.start()
        return None

    def _withdraw(self, token: str) -> None:
        with self._lock:
            present = self._offer
            if present.token != token:
                return
            self._offer = after = present.after(Event.WITHDRAWN)
        if after.stage is Stage.EMPTY:
            self._drop(present)

    def _fail(self, token: str, reason: str, *, final: bool = False) -> None:
        self._link.send(PrepareFailed(token=token, reason=reason, final=final))

    def abandon(self) -> None:
        """Drops the next world, because the generation ends; there will be no other."""
        self._obstacle, self._final = "the generation ends", True
        with self._lock:
            present, self._offer = self._offer, Offer()
        self._drop(present)

    # The thread that connects.

    def _connect(self, offered: Offer, info: RankInfo) -> None:
        told = ExitStack()

        def reached(store: ClosableStore) -> None:
            if not self._connecting(offered, lambda present: replace(present, store=store)):
                store.close()
            if offered.joins and info.rank == 0:
                text = told.enter_context(self._introduce(info.token))
                entering.tell(store, info.token, entering.SCRIPT, text)

        try:
            with told:
                groups = connect_beside(info, self._device, self._limit_s, reached)
        except Exception as error:  # noqa: BLE001 - the top of a thread: told to the agent
            reason = one_line(error)

            def failed(present: Offer) -> Offer:
                return replace(present.after(Event.FAILED), reason=reason)

            if self._connecting(offered, failed):
                self._fail(offered.token, reason)
            return

        def connected(present: Offer) -> Offer:
            return replace(present.after(Event.CONNECTED), groups=groups)

        if not self._connecting(offered, connected):
            groups.retire()

    def _connecting(self, offered: Offer, change: Callable[[Offer], Offer]) -> bool:
        """Changes the present offer if it is still this one, and connects; returns whether it is.

        Args:
            offered: The offer that a thread connects.
            change: Returns what takes its place.
        """
        with self._lock:
            present = self._offer
            if present.number != offered.number or present.stage is not Stage.CONNECTING:
                return False
            self._offer = change(present)
            return True

    def _drop(self, offer: Offer) -> None:
        """Ends what was connected of a world that is not entered."""
        if offer.groups is not None:
            self._threads.append(offer.groups.retire())
        elif offer.store is not None:
            offer.store.close()

    # The main thread.

    @property
    def offered(self) -> bool:
        """Returns whether this rank is prepared."""
        return self._offer.stage is Stage.PREPARED

    @property
    def joins(self) -> bool:
        """Returns whether ranks that are not of the present world come into the next one."""
        return self._offer.joins

    @property
    def place(self) -> Assignment | None:
        """Returns this rank's place in the next world; None: it has none."""
        return self._offer.assignment

    def promise(self) -> bool:
        """Returns whether this rank is prepared, which binds it until `decide` is called (NW3)."""
        if self.joins and (obstacle := self._obstacle_of_joins()):
            self.give_up(obstacle)
        with self._lock:
            self._offer = self._offer.after(Event.PROMISED)
            return self._offer.stage in (Stage.PROMISED, Stage.RECALLED)

    def decide(self, *, enters: bool) -> Offer | None:
        """Ends a promise by the word of all ranks, which they have reached this boundary with.

        Args:
            enters: Whether all are prepared.

        Returns:
            The world that this rank goes over to now; None: it stays.
        """
        self._end_before()
        if self._offer.stage not in (Stage.PROMISED, Stage.RECALLED):
            return None
        with self._lock:
            present = self._offer
            self._offer = present.after(Event.ENTERED if enters else Event.DECLINED)
        if enters:
            self._before = present.groups
            return present
        if self._offer.stage is Stage.EMPTY:
            self._drop(present)
        return None

    def give_up(self, reason: str) -> None:
        """Drops the next world, of which no promise is open: this rank cannot enter it after all.

        Args:
            reason: Why not.
        """
        with self._lock:
            present = self._offer
            if present.stage is not Stage.PREPARED:
                return
            failed = present.after(Event.FAILED)
            self._offer = replace(failed, groups=None, store=None, reason=reason)
        self._drop(present)
        self._fail(present.token, reason, final=True)

    def _end_before(self) -> None:
        before, self._before = self._before, None
        if before is not None:
            self._threads.append(before.retire())

    def close(self) -> None:
        """Ends the groups that no generation uses, and gives the threads time to end."""
        self.abandon()
        self._end_before()
        for thread in self._threads:
            thread.join(self._end_s)


def connect_beside(
    info: RankInfo,
    device: torch.device,
    limit_s: float | None,
    reached: Callable[[ClosableStore], None],
) -> ProcessGroups:
    """Connects the ranks of the next world, beside the groups that this process has; any thread may
    call it.

    torch's default group stays what it is until `ProcessGroups.enter`.

    Args:
        info: This rank's place in the next world.
        device: The device of the tensors that collectives take.
        limit_s: Seconds within which all ranks must come, and again for a step that needs no other
            rank's decision; None: those of `info`. A rank that stops in between may keep this
            waiting for longer.
        reached: Is called with the store that the wait depends on; closing it ends the wait.

    Returns:
        The groups, whose ranks are all connected.
    """
    hurried = info
    if limit_s is not None:
        limit_s = min(limit_s, info.connect_timeout_s)
        hurried = replace(info, connect_timeout_s=limit_s, start_timeout_s=limit_s)
    store = rendezvous(hurried, reached=reached)
    with ExitStack() as undo:
        undo.callback(store.close)
        tree = join(hurried, store)
        undo.callback(tree.close)
        addressed, patience_s = AddressedStore(store), hurried.connect_timeout_s
        if device.type == "cuda":
            nccl.set_up(device)
        with addressed.recording() as connections:
            group = group_beside(
                PrefixStore(info.token, addressed),
                info.rank,
                info.world_size,
                timedelta(seconds=info.collective_timeout_s),
                device,
            )
            if device.type == "cuda":
                nccl.connect_beside(group, device)
            else:
                group.allreduce([torch.zeros(1)]).wait(timedelta(seconds=patience_s))
        undo.pop_all()
    store.set_timeout(timedelta(seconds=info.connect_timeout_s))
    addressed.set_timeout(timedelta(seconds=info.connect_timeout_s))
    world = RankGroup(WORLD, range(info.world_size), group, connections)
    return ProcessGroups(info, device, tree, world, addressed)
