"""Runs the loop of an agent: observe, decide, act. It does no IO of its own.

`Agent` runs it with processes, etcd and the machine's clock; the simulator runs the same code with
models of all three, on virtual time.

Rules of the loop:
 1. Before it observes, the agent maintains what it has in the store: it restores what the store has
    lost, and renews its registration. Neither depends on a decision.
 2. Observing reads caches, memory and messages that have come. It neither writes to the store nor
    waits for it. What the store is read for is left to `Subscriptions`, after the view is made.
    Processes that are past a limit of their own, such as the time to exit, are killed then.
 3. Actions are done in the order in which they were decided. An action that ends a generation, or
    an alarm about a lapsed lease, is not done at once: the loop reads the store, observes and
    decides once more, and does it only if it is decided again. What the first look found on storage
    counts in the second, which does not wait for storage.
 4. A write that fails ends the actions of this cycle, and no action is done for BACKOFF_S. Other
    agents could not write either, so their time to answer begins anew. It does likewise after a
    slow answer to the read of rule 3, once for each world: a store that is always slow would keep
    the next one from being written.
 5. Once a later run of the job has begun (`RunEnded`, or a document that states one), the agent
    maintains and writes nothing more; `decide` ends it (A13).
 6. A start retires the workers of the older generation first, and all of their snapshots but the
    one that the new generation resumes from. A world that the workers have entered inside their
    loops retires nothing: they are its workers, and their snapshots count in it.
 7. Where nothing wakes the loop, it turns again when the next timer is due (`due_s`): a lapsed time
    of the protocol, a retry, a search. In a state in which things follow fast on one another it
    turns soon, and every few moments its node looks after the workers.
 8. A turn of an agent that follows the registrations or reports of all nodes does work for each of
    them. Among more than MANY nodes the loop rests after such a turn (`rest_s`), whatever wakes it:
    what comes meanwhile is taken in together.
 9. An unexpected error ends its turn and not the process: the node leaves at the next boundary,
    with its state handed over. Once MAX_ERRORS turns have failed, the loop cannot be trusted to do
    that: the workers are stopped by their own protocol, and the agent exits with a code that says
    that it has failed, and not the job.
    An error that names what the user must do (another token than the job's, a node outside of the
    private network) does so at once, with the same code: it is a mistake of this node, as far as
    the node can know, and the job goes on without it. An error of the operating system, such as too
    many open files, may pass: the turn is repeated, and counts as failed only once no turn has been
    whole for MACHINE_TROUBLE_S.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Protocol

from elasticzero.errors import (
    ElasticZeroError,
    ExitCode,
    RetryError,
    RunEnded,
    StoreUnavailable,
    UserError,
    one_line,
)
from elasticzero.launcher.agent.observer import ClusterObserver
from elasticzero.launcher.agent.store_writer import StoreWriter, needs_fresh_view
from elasticzero.launcher.agent.subscriptions import MANY, Subscriptions
from elasticzero.launcher.goodput import TimeSpent
from elasticzero.launcher.protocol.actions import (
    Action,
    Decision,
    DumpStacks,
    EnterWorld,
    ExitAgent,
    KillSuspended,
    KillUnresponsive,
    KillWorkers,
    PrepareWorkers,
    PutReport,
    RaiseAlarm,
    RequestBoundaryStop,
    SaveHeldSnapshot,
    Start,
    StopWorkers,
    WithdrawPreparation,
    WriteDone,
    WriteProposal,
    WriteWorld,
)
from elasticzero.launcher.protocol.decide import decide, quiet_until_s
from elasticzero.launcher.protocol.documents import UNSTATED, Proposal, World
from elasticzero.launcher.protocol.drain import merge_notices
from elasticzero.launcher.protocol.policy import JobPolicy
from elasticzero.launcher.protocol.view import PreemptionNotice, View, WorkerGroupState
from elasticzero.launcher.store.membership import Membership
from elasticzero.launcher.store.watch_cache import WORLD, WatchCache

BACKOFF_S = 0.2
"""Seconds without actions after a write that failed."""
MAX_ERRORS = 3
"""Number of turns that may fail by an unexpected error before the agent ends."""
TURN_REST_A_NODE_S, TURN_REST_S = 0.00002, 0.1
"""Seconds for which the loop rests after a turn for each node that it follows, and the most."""
MACHINE_TROUBLE_S = 60.0
"""Seconds without a whole turn, after which an error of the operating system is one that stays:
longer than idle connections, which take up open files, are kept."""


class HangDetector(Protocol):
    """Finds where workers are that make no steps."""

    def dump_stacks(
        self, limit_s: float | None, now_s: float, suspended_s: float | None = None
    ) -> None: ...


class Workers(Protocol):
    """Controls the workers of this node in one generation."""

    @property
    def progress_monitor(self) -> HangDetector: ...

    def view(self, now_s: float) -> WorkerGroupState: ...

    def request(self, flags: int) -> None: ...

    def stop(self, reason: str, now_s: float) -> None: ...

    def withdraw(self, reason: str) -> None: ...

    def kill(self, *, spare_saving: bool = False) -> None: ...

    def kill_unresponsive(self) -> None: ...

    def kill_suspended(self) -> None: ...


class NodeProcesses(Protocol):
    """Controls the processes of this node, with the loop among them."""

    @property
    def worker_group(self) -> Workers | None:
        """Returns the workers of the present generation."""

    def poll(self, now_s: float) -> None:
        """Receives the messages of workers and saves, and kills processes that are past a limit of
        their own."""

    def retire(self, world: World) -> None:
        """Ends the workers of the older generation, which make way for those of `world`."""

    def start(self, world: World, index: int, now_s: float) -> None:
        """Starts the workers of the member at `index` of `world`.

        Args:
            world: World of the generation.
            index: Index of this node in its order of members.
            now_s: Present time, on the agent's clock.
        """

    def prepare_workers(self, world: World, proposal: Proposal) -> None:
        """Tells the workers to connect a proposed generation beside their training.

        Args:
            world: World that the proposal changes.
            proposal: The proposal, by which this node stays or leaves.
        """

    def enter(self, world: World, now_s: float) -> None:
        """Takes the workers for those of a world that they have entered inside their loops.

        Args:
            world: The world.
            now_s: Present time, on the agent's clock.
        """

    def stop_workers(self, reason: str) -> None:
        """Stops the workers by their own protocol, without a decision, and waits for their exits,
        within a limit."""

    def wake(self) -> None:
        """Starts the next turn of the loop at once; callable from any thread and signal handler."""


class NodeMemory(Protocol):
    """Holds the snapshots in this node's memory, and runs their saves."""

    def keep_only(self, keep: Set[tuple[int, int]]) -> Any:
        """Removes all but these snapshots, each a generation and a step."""

    def saving(self) -> bool:
        """Returns whether a save of this node has not ended."""

    def unsealed(self) -> bool:
        """Returns whether there are snapshots that are not sealed yet."""

    def save_held(self, held: SaveHeldSnapshot) -> None:
        """Begins to save shards whose workers are gone."""


class Listener(Protocol):
    """Receives what the loop reports, and accounts for the job's time."""

    def time_spent(self, view: View, following: World) -> TimeSpent | None:
        """Returns where the job's time has gone, for the world that is to follow."""

    def decided(self, view: View, decision: Decision) -> None: ...

    def store_failed(self, error: ElasticZeroError) -> None: ...

    def turn_failed(self, error: Exception, failures: int) -> None:
        """Notes an unexpected error in the loop.

        Args:
            error: The error.
            failures: Number of turns that have failed so far; 0: this one may pass.
        """

    def exits(self, reason: str, *, failed: bool = False) -> None: ...


class DataRecovery(Protocol):
    """Writes into the store what it has lost of the job: see `StoreRecovery`."""

    @property
    def due_s(self) -> float:
        """Returns the time at which `poll` has something to do again; infinite: it has nothing to
        do until something changes."""

    def poll(self, now_s: float) -> None: ...


class RunKey(Protocol):
    """Binds writes to the job's run: see `RunStore`."""

    @property
    def unreadable(self) -> bool:
        """Returns whether the key of the run could not be read when a write last met it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSide:
    """Groups the parts of one agent that work with the store."""

    cache: WatchCache
    membership: Membership
    subscriptions: Subscriptions
    observer: ClusterObserver
    writer: StoreWriter
    recovery: DataRecovery | None = None
    """None: nothing restores what the store has lost."""
    run: RunKey | None = None
    """None: nothing binds writes to a run."""


class AgentCore:
    """Decides what one agent does next, and carries it out."""

    def __init__(
        self,
        policy: JobPolicy,
        node: NodeProcesses,
        memory: NodeMemory,
        store: StoreSide,
        listener: Listener,
        clock: Callable[[], float],
    ) -> None:
        """Creates the core of an agent that is not registered yet.

        Args:
            policy: Limits and times, without operators' changes.
            node: Processes of this node.
            memory: Snapshots in this node's memory, and their saves.
            store: Parts of the agent that work with the store.
            listener: Receives what was seen and decided.
            clock: Returns the present time in seconds; it never goes back.
        """
        self.policy = policy
        self.exit_code: ExitCode | None = None
        """Set when the agent is to end."""
        self._node = node
        self._memory = memory
        self._store = store
        self._listener = listener
        self._clock = clock
        self._notices: list[PreemptionNotice] = []
        self._saved_held: SaveHeldSnapshot | None = None
        self._world_token = ""
        """Token of the world whose workers were started last."""
        self._slow_at: str | None = None
        """Token of the world whose end a slow answer has put off; None: of none so far."""
        self._backoff_until_s = 0.0
        self._later_run = UNSTATED
        """Number of a later run of the job that a write has met; UNSTATED: none."""
        self.whole_s = 0.0
        """Time at which the last turn ended that no unexpected error has cut short."""
        self._looked_s = 0.0
        """Time of the last look at everything."""
        self._errors = 0
        """Number of turns that an unexpected error has ended."""

    def begin(self) -> None:
        """Notes that the node is registered: the time to wait for other nodes counts from now."""
        self.whole_s = self._clock()
        self._store.observer.begin(self.whole_s)

    def leave(self, reason: str, by_s: float | None = None) -> None:
        """Has this node leave at the next boundary; callable from any thread and signal handler.

        Args:
            reason: Becomes part of the world's reason.
            by_s: Time at which the machine is gone, on this agent's clock; None: it stays.
        """
        self._notices.append(PreemptionNotice(reason=reason, received_s=self._clock(), by_s=by_s))
        self._node.wake()

    @property
    def notice(self) -> PreemptionNotice | None:
        """Returns why this node is to leave, and by when; None: it is not to leave."""
        return merge_notices(self._notices)

    @property
    def saved_held(self) -> SaveHeldSnapshot | None:
        """Returns the last save of shards whose workers are gone; None: there was none since the
        last workers began."""
        return self._saved_held

    def turn(self) -> tuple[View, Decision] | None:
        """Does one cycle; returns None if an error has cut it short (rule 9)."""
        seen = None
        try:
            seen = self.cycle()
        except (StoreUnavailable, RetryError) as error:
            self._store_failed(error)
        except RunEnded as error:
            self._end_run(error)
        except UserError as error:
            self._fail("the agent of this node ends", one_line(error))
        except Exception as error:  # noqa: BLE001 - the top of the loop
            self._turn_failed(error)
            return None
        self.whole_s = self._clock()
        return seen

    def _turn_failed(self, error: Exception) -> None:
        now_s = self._clock()
        self._backoff_until_s = now_s + BACKOFF_S
        of_machine = isinstance(error, OSError) or isinstance(error.__cause__, OSError)
        if of_machine and now_s - self.whole_s < MACHINE_TROUBLE_S:
            self._listener.turn_failed(error, 0)
            return
        self._errors += 1
        self._listener.turn_failed(error, self._errors)
        name = type(error).__name__
        if self._errors == 1:
            self.leave(f"an unexpected error in the agent's loop ({name})")
        if self._errors >= MAX_ERRORS:
            self._fail(
                f"the agent of this node fails ({name})",
                f"its loop has failed {self._errors} times, and its workers are stopped; its log "
                "above has the errors, which are worth a report",
            )

    def _fail(self, stopping: str, reason: str) -> None:
        """Ends this agent, and not the job.

        Args:
            stopping: What the workers are told.
            reason: Why it ends.
        """
        self.exit_code = ExitCode.DEFECT
        self._node.stop_workers(stopping)
        self._listener.exits(f"this agent ends, and not the job: {reason}", failed=True)

    def _store_failed(self, error: ElasticZeroError) -> None:
        self._listener.store_failed(error)
        self._store.membership.note_outage(self._clock())
        self._backoff_until_s = self._clock() + BACKOFF_S

    def cycle(self) -> tuple[View, Decision]:
        """Observes, decides and acts once; returns what was seen and decided at first."""
        now_s = self._clock()
        view, decision = self._observe_and_decide(now_s)
        self._listener.decided(view, decision)
        if now_s >= self._backoff_until_s:
            try:
                self._act(view, decision, now_s)
                if any(needs_fresh_view(action) for action in decision.actions):
                    self._confirm(view, decision)
            except StoreUnavailable as error:
                self._store_failed(error)
            except RunEnded as error:
                self._end_run(error)
        return view, decision

    def due_s(self, view: View, decision: Decision) -> float:
        """Returns the time at which the loop must turn again though nothing wakes it, after a turn
        that has returned these; a time that is past means soon."""
        store, now_s = self._store, self._looked_s
        quiet_s = quiet_until_s(view, decision, now_s, self.policy)
        recovery_s = inf if store.recovery is None else store.recovery.due_s
        watch_s = store.subscriptions.due_s(view, now_s, self.policy)
        return min(quiet_s, recovery_s, watch_s, store.membership.due_s, store.writer.due_s)

    def rest_s(self, view: View) -> float:
        """Returns the seconds for which the loop must not turn again, after a turn that has
        returned this view, even if something wakes it (rule 8)."""
        nodes = max(len(view.members or ()), len(view.reports or ()))
        return min(TURN_REST_S, TURN_REST_A_NODE_S * nodes) if nodes > MANY else 0.0

    def _end_run(self, error: RunEnded) -> None:
        """Notes that a later run has begun; the next turn of the loop ends this agent."""
        self._later_run = max(self._later_run, error.later)
        self._node.wake()

    def _observe_and_decide(self, now_s: float, *, confirms: bool = False) -> tuple[View, Decision]:
        self._looked_s = now_s
        saving = self._memory.saving()  # before the message of its end is taken in
        self._maintain(now_s)
        view = self._observe(now_s, saving=saving, confirms=confirms)
        self._store.subscriptions.update(view, now_s, self.policy)
        return view, decide(view, now_s, self.policy)

    def _maintain(self, now_s: float) -> None:
        """Maintains what belongs in the store whatever is decided."""
        if self._later_run or self._store.cache.later_run:
            return
        try:
            if self._store.recovery is not None:
                self._store.recovery.poll(now_s)
            self._store.writer.keep_registered(now_s, leaving=bool(self._notices))
        except RunEnded as error:
            self._end_run(error)

    def _observe(self, now_s: float, *, saving: bool, confirms: bool) -> View:
        node, store = self._node, self._store
        node.poll(now_s)
        if not self._notices and store.cache.control().drains(store.membership.me):
            self.leave("drained by an operator")
        if not self._notices and store.cache.unreadable(World) is not None:
            self.leave("the world in etcd cannot be read")
        if not self._notices and store.run is not None and store.run.unreadable:
            self.leave("the number of the job's run in etcd cannot be read")
        workers = WorkerGroupState()
        if node.worker_group is not None:
            workers = node.worker_group.view(now_s)
            if workers.token != self._world_token:
                workers = replace(workers, token=self._world_token)
        if not workers.running and self._memory.unsealed():
            workers = replace(workers, sealing=True)
        notice = self.notice
        leaving = notice is not None
        view = store.observer.view(workers, leaving, now_s, self.policy, confirms=confirms)
        if notice is not None or saving:
            view = replace(view, notice=notice, saving=saving)
        if later_run := max(self._later_run, store.cache.later_run):
            view = replace(view, later_run=later_run)
        if (held := self._saved_held) is not None:
            state = (held.generation, held.step)
            view = replace(view, saved_held=state, saved_ranks=held.ranks)
        return view

    def _act(self, view: View, decision: Decision, now_s: float) -> None:
        for action in decision.actions:
            match action:
                case Start(world, index):
                    self._start(world, index, now_s)
                case SaveHeldSnapshot():
                    self._saved_held = action
                    self._memory.save_held(action)
                case ExitAgent(code):
                    self._listener.exits(decision.reason)
                    self.exit_code = code
                case WriteWorld(world, gone) if not needs_fresh_view(action):
                    self._write_entered(world, gone, view)
                case WriteWorld() | WriteDone():
                    pass  # see `_confirm`
                case EnterWorld(world):
                    self._world_token = world.token
                    self._node.enter(world, now_s)
                case PrepareWorkers(proposal) if view.world is not None:
                    self._node.prepare_workers(view.world, proposal)
                case RaiseAlarm() | PutReport() | WriteProposal():
                    if not needs_fresh_view(action):
                        self._store.writer.write(action, view)
                case _:
                    if self._node.worker_group is not None:
                        command(self._node.worker_group, action, now_s)

    def _write_entered(self, world: World, gone: tuple[str, ...], view: View) -> None:
        """Records a world that workers have entered, unless another agent has just done so.

        Args:
            world: The world.
            gone: Registrations that end with the one before.
            view: What that was decided from.
        """
        basis, (present, _) = self._store.cache.get(WORLD), self._store.cache.world()
        if present is None or view.world is None or present.token != view.world.token:
            return
        spent = self._listener.time_spent(view, world)
        entered = WriteWorld(replace(world, time_spent=spent), gone)
        self._store.writer.end_generation(entered, view, basis)

    def _confirm(self, view: View, decision: Decision) -> None:
        """Reads the store, observes and decides once more, and writes what is decided again.

        A slow answer may mean that the store was away, and that other agents could not write
        either: their time to answer begins anew, once for each world.
        """
        writer = self._store.writer
        ends = any(isinstance(action, (WriteWorld, WriteDone)) for action in decision.actions)
        began_s = self._clock()
        basis = writer.reread(view, ends=ends)
        asked_s = self._clock()
        token = view.world.token if view.world is not None else ""
        if ends and asked_s - began_s > self.policy.alive_s / 2 and token != self._slow_at:
            self._slow_at = token
            self._store.membership.note_outage(asked_s)
        view, decision = self._observe_and_decide(asked_s, confirms=True)
        for action in decision.actions:
            match action:
                case WriteWorld(world) if ends:
                    spent = self._listener.time_spent(view, world)
                    action = replace(action, world=replace(world, time_spent=spent))
                    writer.end_generation(action, view, basis)
                case WriteDone() if ends:
                    writer.end_generation(action, view, basis)
                case RaiseAlarm() if not ends:
                    writer.write(action, view)
                case _:
                    pass

    def _start(self, world: World, index: int, now_s: float) -> None:
        self._node.retire(world)
        self._memory.keep_only({(world.resume.generation, world.resume.step)})
        self._world_token = world.token
        self._saved_held = None  # it is given up now; the next round may need the same snapshot
        self._node.start(world, index, now_s)


def command(group: Workers, action: Action, now_s: float) -> None:
    """Passes an action on to the workers that it is about.

    Args:
        group: The node's workers.
        action: Action that is about workers.
        now_s: Present time, on the agent's clock.

    Raises:
        AssertionError: The action is not about workers.
    """
    match action:
        case RequestBoundaryStop(flags):
            group.request(flags)
        case StopWorkers(reason):
            group.stop(reason, now_s)
        case WithdrawPreparation(reason):
            group.withdraw(reason)
        case KillWorkers(spare_saving=spare_saving):
            group.kill(spare_saving=spare_saving)
        case KillUnresponsive():
            group.kill_unresponsive()
        case KillSuspended():
            group.kill_suspended()
        case DumpStacks(limit_s, suspended_s):
            group.progress_monitor.dump_stacks(limit_s, now_s, suspended_s)
        case _:
            raise AssertionError(f"no action of workers: {action}")
