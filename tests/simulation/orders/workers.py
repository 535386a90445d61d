"""The workers of a node, as one process, and the steps that the nodes of a world make together."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from elasticzero.checkpoint.ram.store import HeldSnapshot
from elasticzero.ipc.assignment import Resume
from elasticzero.launcher.protocol.documents import Failure, World
from elasticzero.launcher.protocol.view import WorkerGroupState
from elasticzero.launcher.workers.group_lifecycle import GroupEvent, advance
from tests.simulation.storage import State

TOTAL_STEPS = 2
READY = (GroupEvent.FIRST_ATTACHED, GroupEvent.ALL_ATTACHED, GroupEvent.ALL_RESTORED)


class Memory:
    """What one node holds: whole snapshots, each named by its generation and step."""

    def __init__(self) -> None:
        self.states: set[State] = set()

    def held(self) -> list[HeldSnapshot]:
        return [
            HeldSnapshot(generation=generation, step=step, ranks=(0,), world_size=1)
            for generation, step in sorted(self.states)
        ]

    def keep_only(self, states: Collection[State]) -> None:
        self.states &= set(states)


class Workers:
    """The workers of one node in one generation: all that its agent asks of them."""

    def __init__(self, world: World, index: int, memory: Memory) -> None:
        self.world = world
        self.index = index
        self._memory = memory
        state = WorkerGroupState(
            generation=world.generation, token=world.token, running=1, step=world.resume.step
        )
        self.state = advance(state, *READY)

    @property
    def progress_monitor(self) -> Workers:
        return self

    @property
    def ended(self) -> bool:
        """They are gone, and their training is not done."""
        return not self.state.running and not self.state.finished

    def view(self, now_s: float) -> WorkerGroupState:
        return self.state

    def request(self, flags: int) -> None:
        asked = replace(self.state, requested=self.state.requested | flags)
        self.state = advance(asked, GroupEvent.REQUEST)

    def stop(self, reason: str, now_s: float) -> None:
        """They stop where they are, and leave their state in memory."""
        if self.state.running:
            self._leave(replace(self.state, aborted_s=now_s), GroupEvent.STOP)

    def kill(self, *, spare_saving: bool = False) -> None:
        self.state = advance(replace(self.state, running=0), GroupEvent.KILL)

    def withdraw(self, reason: str) -> None:
        raise AssertionError("they were told to prepare for nothing")

    def kill_unresponsive(self) -> None:
        return

    def kill_suspended(self) -> None:
        return

    def dump_stacks(
        self, limit_s: float | None, now_s: float, suspended_s: float | None = None
    ) -> None:
        return

    def leave_at_boundary(self) -> None:
        self._leave(self.state, GroupEvent.ALL_STOPPED)

    def fail(self, blame: str, message: str) -> None:
        failure = Failure(
            rank=self.index,
            blame=blame,  # type: ignore[arg-type]
            message=message,
            step=self.state.step,
        )
        self._leave(replace(self.state, failure=failure), GroupEvent.WORKER_FAILED)

    def make_step(self, now_s: float) -> None:
        state = replace(self.state, step=self.state.step + 1, stepped_s=now_s)
        if state.step >= TOTAL_STEPS:
            state = advance(replace(state, running=0), GroupEvent.ALL_FINISHED)
        self.state = state

    def _leave(self, state: WorkerGroupState, event: GroupEvent) -> None:
        self._memory.states.add((state.generation, state.step))
        self.state = advance(replace(state, running=0), event)


class Training:
    """The workers of all nodes, by the world that they were started for."""

    def __init__(self, can_read: Callable[[Workers, Resume], bool]) -> None:
        """can_read: whether workers can read the state that they start from."""
        self._can_read = can_read
        self._groups: dict[str, dict[int, Workers]] = {}

    def add(self, workers: Workers) -> None:
        self._groups.setdefault(workers.world.token, {})[workers.index] = workers

    def due(self) -> list[Workers]:
        """The workers to which something happens next: those of one world."""
        for group in self._groups.values():
            running = [workers for workers in group.values() if workers.state.running]
            alone = any(workers.ended for workers in group.values())
            if running and (alone or len(running) == len(running[0].world.members)):
                return running
        return []

    def go_on(self, now_s: float) -> list[Workers]:
        """They make a step, or end; returns them."""
        workers = self.due()
        resume = workers[0].world.resume
        flags = [one for one in workers if one.state.requested]
        unread = [one for one in workers if not one.state.stepped_s and resume.tier == "ram"]
        blind = [one for one in unread if not self._can_read(one, resume)]
        if len(workers) < len(workers[0].world.members):
            for one in workers:
                one.fail("peer", "connection reset by peer")
        elif blind:
            blind[0].fail("environment", "a shard of the snapshot cannot be read")
        elif flags:
            for one in workers:
                one.leave_at_boundary()
        else:
            for one in workers:
                one.make_step(now_s)
        return workers

    def state(self) -> int:
        """A digest."""
        groups = self._groups.items()
        return hash(tuple((t, i, w.state) for t, group in groups for i, w in group.items()))
