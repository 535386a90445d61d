"""Two nodes and what happens to them: the events that can come next, and the rules that must hold.

The tasks have an order; the first one that has something to do comes next. To delay a task is to
put it behind all others, also behind the clock, until its turn comes. A delayed loop is a process
that is suspended: nothing of it runs until then, and its lease runs out at the next tick.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elasticzero.errors import ExitCode
from elasticzero.ipc.assignment import Resume
from elasticzero.launcher.protocol.documents import FIRST_RUN, Done, Member, World, outranks
from elasticzero.launcher.protocol.invariants import check_invariants
from elasticzero.launcher.protocol.policy import JobPolicy
from elasticzero.launcher.protocol.termination import exit_code_of
from elasticzero.launcher.store.api import Entry
from elasticzero.launcher.store.decoding import document
from elasticzero.launcher.store.job_run import RUN, number_in
from elasticzero.launcher.store.watch_cache import DONE, MEMBERS, WORLD
from tests.simulation.etcd import Etcd
from tests.simulation.orders.process import TTL_S, Connection, Process
from tests.simulation.orders.workers import TOTAL_STEPS, Training, Workers
from tests.simulation.rules import Violation
from tests.simulation.scenario import Even
from tests.simulation.timeline import Timeline

TICK_S = 3.0
"""Longer than a lease lives, and than a node has to answer."""
IDLE_TICKS = 4
"""Once so many ticks in a row have changed nothing, no time brings anything about."""
NODES = ("a", "b")
OF_A_PROCESS = ("watch", "lease", "loop")
TASKS = (*(f"{kind} {node}" for node in NODES for kind in OF_A_PROCESS), "story", "train", "clock")
POLICY = JobPolicy(
    min_nodes=1,
    max_nodes=2,
    strategy="ddp",
    settle_s=0.4,
    grow_settle_s=0.2,
    stop_s=2.5,
    save_s=2.5,
    lease_ttl_s=TTL_S,
    handover_s=4.0,
    hang_timeout_s=0.0,
    changes_inside="off",
)
"""Leaves are by a stop here: what workers do inside their loops is no order of agents."""


@dataclass(frozen=True, slots=True)
class Happening:
    """Something that a story brings about."""

    name: str
    may: Callable[[Pair], bool]
    """Tells whether it can happen now."""
    act: Callable[[Pair], None]


@dataclass(frozen=True, slots=True)
class Story:
    """What happens to two nodes, one thing after another."""

    happenings: tuple[Happening, ...]
    is_begun: Callable[[Pair], bool]
    """Events from then on come in all orders; what was before comes in the default order."""


class Pair:
    """Two nodes, etcd, and the story's next happening."""

    def __init__(self, story: Story, tell: Callable[[str], None] | None = None) -> None:
        """tell: receives a line on each event."""
        self.now_s = 100.0
        self.policy = POLICY
        self.etcd = Etcd(Timeline(), Even())
        self.etcd.written = self._written
        self.etcd.removed = self._removed
        self.etcd.restored = self._restored
        self.training = Training(self._can_read)
        self.processes: dict[str, Process] = {}
        """Holds the last one of each node."""
        self.run = FIRST_RUN
        """The present run of the job, by what etcd holds."""
        self.done: Done | None = None
        """The end of the present run."""
        self.ends: dict[int, Done] = {}
        """Ends of runs, by run."""
        self._delayed: list[list[str]] = []
        """Tasks that were delayed together."""
        self._story = story.happenings
        self._happened = 0
        self._idle_ticks = 0
        self._tell = tell
        self._documents: dict[tuple[type, bytes], Any] = {}
        self._counts = dict.fromkeys(NODES, 0)
        self._stands: World | None = None
        self._tokens: set[str] = set()
        self._numbers: set[tuple[int, int]] = set()
        """Run and generation of each world that was written."""
        self._registered: set[tuple[str, str]] = set()
        while not story.is_begun(self):
            task = self.next()
            assert task is not None
            self.go_on(task)

    # -- what stories and processes use

    def note(self, text: str) -> None:
        if self._tell is not None:
            self._tell(f"{self.now_s:7.1f}  {text}")

    def read_document(self, kind: type[Any], data: bytes) -> Any:
        key = (kind, data)
        if key not in self._documents:
            self._documents[key] = document(kind, data)
        return self._documents[key]

    def begin_process(self, node: str) -> None:
        """A node's agent is started."""
        self._counts[node] += 1
        of_node = self._with(f"loop {node}")
        others = [[task for task in group if task not in of_node] for group in self._delayed]
        self._delayed = list(filter(None, others))
        self.processes[node] = Process(self, node, self._counts[node])
        self.note(f"{self.processes[node].name} begins")

    def connection(self) -> Connection:
        """Returns the connection of an operator's command."""
        return Connection(self.etcd, lambda: self.now_s)

    def ended(self, node: str) -> bool:
        """Tells whether the node has no agent any more."""
        process = self.processes.get(node)
        return process is not None and not process.lives

    def close(self) -> None:
        """Nothing is played any more."""
        for process in self.processes.values():
            process.end()

    # -- the order of events

    def next(self) -> str | None:
        """The task that comes next; None: nothing happens any more."""
        return next(filter(self._is_due, self._order()), None)

    def is_alone(self, task: str) -> bool:
        """Tells whether to delay a task changes nothing: no other one has something to do."""
        of_it = self._with(task)
        return not any(self._is_due(other) for other in TASKS if other not in of_it)

    def delay(self, task: str) -> None:
        """Everything else comes before it."""
        self.note(f"-- {task} is delayed")
        tasks = self._with(task)
        before = [[one for one in group if one not in tasks] for group in self._delayed]
        self._delayed = [*filter(None, before), tasks]

    def go_on(self, task: str) -> None:
        """The event that is due."""
        others = [group for group in self._delayed if task not in group]
        if len(others) < len(self._delayed):
            self._delayed, self._idle_ticks = others, 0
        kind, _, node = task.partition(" ")
        match kind:
            case "watch":
                self.processes[node].is_told()
            case "lease":
                self.processes[node].loses_lease()
            case "loop":
                self.processes[node].go_on()
            case "story":
                self._happen()
            case "train":
                self._train()
            case _:
                self._tick()

    def digest(self) -> int:
        """Returns a digest of all that decides what happens next."""
        processes = [
            (p.name, p.digest, p.pending, p.lives, self._lease(p), frozenset(p.memory.states))
            for p in self.processes.values()
        ]
        etcd = (self.etcd.entries(), self.etcd.revision, self.etcd.cluster)
        rest = (self.now_s, self._idle_ticks, self._happened, self.training.state())
        return hash((tuple(map(tuple, self._delayed)), tuple(processes), etcd, rest))

    def _order(self) -> list[str]:
        delayed = [task for group in self._delayed for task in group]
        return [task for task in TASKS if task not in delayed] + delayed

    @staticmethod
    def _with(task: str) -> list[str]:
        """The tasks that are delayed with one: all of a process with its loop."""
        kind, _, node = task.partition(" ")
        return [f"{other} {node}" for other in OF_A_PROCESS] if kind == "loop" else [task]

    def _is_due(self, task: str) -> bool:
        kind, _, node = task.partition(" ")
        process = self.processes.get(node)
        match kind:
            case "story":
                following = self._story[self._happened : self._happened + 1]
                return bool(following) and following[0].may(self)
            case "train":
                return bool(self.training.due())
            case "clock":
                return self._idle_ticks < IDLE_TICKS and not self._is_over()
        if process is None or not process.lives:
            return False
        match kind:
            case "watch":
                return any(watch.pending for watch in process.connection.watches)
            case "lease":
                return self._ends(process)
            case _:
                return process.due

    def _lease(self, process: Process) -> tuple[float, bool]:
        kept = process.connection.kept
        return (kept.confirmed_s if kept is not None else 0.0, self._ends(process))

    @staticmethod
    def _ends(process: Process) -> bool:
        kept = process.connection.kept
        return kept is not None and kept.ends

    def _is_over(self) -> bool:
        live = any(process.lives for process in self.processes.values())
        return self._happened == len(self._story) and not live

    def _happen(self) -> None:
        happening = self._story[self._happened]
        self._happened += 1
        self._idle_ticks = 0
        self.note(f"-- {happening.name}")
        happening.act(self)

    def _train(self) -> None:
        self._idle_ticks = 0
        workers = self.training.go_on(self.now_s)
        steps = [(one.world.members[one.index].node, one.state) for one in workers]
        for node, state in steps:
            self.note(f"{node}: step {state.step}, {state.outcome.name}")
            process = self.processes[node]
            if process.worker_group in workers:
                process.receive("workers", state)
                process.wake()

    def _tick(self) -> None:
        self._idle_ticks += 1
        for process in self.processes.values():
            kept = process.connection.kept
            if process.lives and kept is not None:
                kept.tick(self.now_s + TICK_S, runs=not process.due)
        self.now_s += TICK_S

    # -- what processes do

    def starts(self, process: Process, workers: Workers) -> None:
        """R1 and R6: a node starts what was written, and in its own place."""
        world = workers.world
        text = f"{process.name} starts generation {world.generation}"
        self._require(world.token in self._tokens, "R1", text)
        member = world.members[workers.index]
        self._require(member.node == process.node, "R6", f"{text} in the place of {member.node}")
        self._idle_ticks = 0
        self.training.add(workers)

    def exited(self, process: Process) -> None:
        """R8 and R20."""
        code = process.exit_code
        self._idle_ticks = 0
        self.note(f"{process.name} exits with {code}: {process.reason}")
        text = f"{process.name} of run {process.run} exits with {code}"
        done = self.ends.get(process.run)
        if code is ExitCode.DONE:
            self._require(done is not None, "R8", f"{text} before `done`")
        if process.run == self.run:
            self._require(code is not ExitCode.SUPERSEDED, "R20", text)
        elif process.run:
            as_usual = [ExitCode.LEFT, ExitCode.USAGE, *([exit_code_of(done)] if done else [])]
            self._require(code is ExitCode.SUPERSEDED or code in as_usual, "R20", text)

    def at_the_end(self) -> None:
        """R7: nothing happens any more."""
        lives = [f"{p.name}: {p.reason}" for p in self.processes.values() if p.lives]
        self._require(not lives, "R7", f"nothing happens any more: {'; '.join(lives)}")
        self._require(self.done is not None, "R7", f"run {self.run} has no end")

    def stuck(self) -> None:
        """R7: so many events have brought no end."""
        reasons = "; ".join(f"{p.name}: {p.reason}" for p in self.processes.values() if p.lives)
        self._require(False, "R7", f"no end: {reasons}")

    def _require(self, so: bool, rule: str, text: str) -> None:
        if not so:
            raise Violation(f"{rule}: {text}")

    def _can_read(self, workers: Workers, resume: Resume) -> bool:
        """Tells whether a source, or the node itself, holds the state."""
        reader = workers.world.members[workers.index].node
        sources = {source.node for source in resume.sources} | {reader}
        state = (resume.generation, resume.step)
        holders = [self.processes[node] for node in sources if node in self.processes]
        return any(state in process.memory.states for process in holders)

    # -- what is written

    def _written(self, key: str, entry: Entry) -> None:
        self._idle_ticks = 0
        writers = [p for p in self.processes.values() if p.connection is self.etcd.writer]
        self.note(f"{writers[0].name if writers else 'an operator'} writes {key}")
        for process in writers:
            text = f"{process.name} of run {process.run} writes {key}"
            earlier = 0 < process.run < self.run
            self._require(not earlier, "R20", text)
        if key == RUN and number_in(entry) > self.run:
            self.run = number_in(entry)
            self.done = self._stands = None
        elif key == WORLD:
            self._world_written(document(World, entry.value))
        elif key == DONE:
            self._done_written(document(Done, entry.value))
        elif key.startswith(MEMBERS):
            member = document(Member, entry.value)
            self._registered.add((member.node, member.incarnation))

    def _removed(self, key: str, entry: Entry) -> None:
        if key == WORLD:
            self._stands = None
        elif key == DONE and self.etcd.losses:
            self.done = None

    def _restored(self, key: str, entry: Entry) -> None:
        if key == WORLD:
            self._stands = document(World, entry.value)

    def _world_written(self, world: World) -> None:
        """R1 to R4, and R8."""
        number, lost = (self.run, world.generation), self.etcd.losses > 0
        text = f"generation {world.generation} of run {self.run}"
        self._require(self.done is None, "R8", f"{text} was written after `done`")
        if lost and self._stands is not None:
            over = f"{text} was written over {self._stands.generation}"
            self._require(outranks(world, self._stands), "R1", over)
        if world.token in self._tokens:
            self._require(lost, "R1", f"{text} was written again")
        else:
            self._require(lost or number not in self._numbers, "R1", f"{text} was written twice")
            self._check_world(self._stands, world, text)
        self._numbers.add(number)
        self._tokens.add(world.token)
        self._stands = world

    def _check_world(self, before: World | None, world: World, text: str) -> None:
        if before is None:
            fresh = world.generation == 1 or self.etcd.losses > 0
            self._require(fresh, "R2", f"{text} follows none")
        try:
            check_invariants(before, world)
        except AssertionError as error:
            raise Violation(f"R2: {text}: {error}") from None
        for member in world.members:
            present = (member.node, member.incarnation) in self._registered
            self._require(present, "R3", f"{text} names {member.node}, which was never registered")
        for source in world.resume.sources:
            process = self.processes[source.node]
            state = (world.resume.generation, world.resume.step)
            holds = not process.lives or state in process.memory.states
            self._require(holds, "R4", f"{text}: {source.node} does not hold {state}")

    def _done_written(self, done: Done) -> None:
        """R8 and R9."""
        if self.etcd.losses and self.done is None and self.ends.get(self.run) is not None:
            self.done = done
            return
        self._require(self.done is None, "R8", "`done` was written twice")
        if done.outcome == "finished":
            self._require(done.step == TOTAL_STEPS, "R9", f"done after step {done.step}")
        self.done = self.ends[self.run] = done
