"""A model of one node's workers of one generation: what `launcher/workers/group.py` is to an
agent."""

from __future__ import annotations

import signal
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Literal

from elasticzero.ipc.messages import FLAG_GROW, FLAG_LEAVE
from elasticzero.launcher.protocol.documents import Failure, Proposal, World
from elasticzero.launcher.protocol.failure_policy import explains, judge_exit
from elasticzero.launcher.protocol.hang_rules import STOPPED_S
from elasticzero.launcher.protocol.planned.switch import world_after
from elasticzero.launcher.protocol.view import WorkerGroupState
from elasticzero.launcher.workers.group import LATE_AFTER_S
from elasticzero.launcher.workers.group_lifecycle import GroupEvent, advance
from tests.simulation.hanging import Hanging
from tests.simulation.planned import TOLD_S
from tests.simulation.training import Group, Worker

if TYPE_CHECKING:
    from tests.simulation.agents import Agent

LONG_SECTION_S = 4.0
"""A worker in a long kernel hears an abort so late."""
SLOW_END_S = 0.2
"""An agent learns of a worker's own end so much later than its peers at most."""
SLOW_SHARE = 0.25
"""Of scripts that start slowly, where some do."""
WAITS_S = 0.5
"""Without a step for so long workers wait for one; no step takes so long."""


class WorkerGroup:
    """The workers, and what they have told their agent."""

    def __init__(
        self, agent: Agent, world: World, index: int, into: Proposal | None = None
    ) -> None:
        """into: what they come into, inside of the loops of others."""
        self.agent = agent
        self.host = agent.host
        self.cluster = agent.cluster
        self.index = index
        self.generation = world.generation
        self.coming_into = into
        self.group: Group = (
            self.cluster.group(world) if into is None else Group(agent.cluster, world)
        )
        self.group.worker_groups[index] = self
        self.workers = [Worker(self, self.group, rank) for rank in world.ranks(index)]
        self.flags = 0
        self.kept = self.unkept = self.saved = self.unsaved = -1
        self.aborted_s: float | None = None
        self.killed = False
        self.failure: Failure | None = None
        self.prepared: Proposal | None = into
        """What the workers were told to prepare for."""
        self.waiting = 0
        """Number of workers that wait to come in."""
        self.withdrawn = False
        self.refused = ""
        self.switched: Literal["no", "entered", "left"] = "no"
        self.switched_step = 0
        self.switched_s = 0.0
        self._present: Group | None = None
        """The generation that those leave into whose next one these workers come."""
        self._carries: Group | None = None
        """Generation whose workers wait for the word of the boundary before it through these."""
        self._shown = (world.generation, world.token)
        """What its agent takes it for."""
        self._attached = 0
        self._complete_given = False
        self._heard_step = 0
        self._heard_s = 0.0
        self._held: int | None = None
        self._held_s = 0.0
        self.progress_monitor = Hanging(self)
        self._viewed: tuple[object, WorkerGroupState] = (None, WorkerGroupState())
        """What there was to be seen last, and the view of it."""
        plan, random = self.cluster.plan, self.cluster.random
        self._patience = 2.0**world.fruitless
        self._began_s = self.cluster.timeline.now_s
        for worker in self.workers:
            slow = plan.slow_start_s and random.random() < SLOW_SHARE
            more_s = random.uniform(0.0, plan.slow_start_s) if slow else 0.0
            self.cluster.later(0.05 + more_s, 0.3 + more_s, self._attach, worker)

    @classmethod
    def coming_in(cls, agent: Agent, world: World, proposal: Proposal) -> WorkerGroup:
        """Workers that come into a proposed generation. world: the one that it changes."""
        me, following = agent.membership.me, world_after(world, proposal)
        index = proposal.find(me.node, me.incarnation)
        assert index is not None
        made = cls(agent, following, index, into=proposal)
        made._shown = (world.generation, world.token)
        made._present = agent.cluster.group(world)
        return made

    def wake(self) -> None:
        self.agent.wake()

    # -- the agent's side

    def view(self, now_s: float) -> WorkerGroupState:
        """What `decide` sees: see `launcher.workers.WorkerGroup.view`."""
        workers = self.workers
        self._hear_steps()
        running = saving = heard = 0
        restored = finished = left = True
        for worker in workers:
            alive = worker.phase != "gone" or worker.unheard
            running += alive
            saving += alive and worker.stopping
            restored &= worker.restored
            finished &= worker.finished
            left &= worker.stopping and not worker.failed
            if self._heard_step or worker.finished:
                heard = max(heard, worker.step)
        late = self.cluster.timeline.now_s - self._began_s >= LATE_AFTER_S
        attached, flags = self._attached, self.flags
        inputs = (running, saving, restored, finished, left, heard, attached, flags, late)
        told = (
            *(self._heard_s, self.aborted_s, self.killed, self.failure, self._shown),
            *(self.prepared, self.withdrawn, self.refused, self.switched, self.waiting),
        )
        if self._viewed[0] != (inputs, told):
            self._viewed = ((inputs, told), self._view(inputs))
        view = self._viewed[1]
        waits = self.cluster.timeline.now_s - (self.group.stepped_s or inf) > WAITS_S
        if not running or not (waits or self.progress_monitor.suspected):
            return view
        return replace(view, **self.progress_monitor.seen())

    def _view(
        self, inputs: tuple[int, int, bool, bool, bool, int, int, int, bool]
    ) -> WorkerGroupState:
        running, saving, restored, finished, left, heard, attached, asked, late = inputs
        happened = {
            GroupEvent.FIRST_ATTACHED: attached > 0,
            GroupEvent.ALL_ATTACHED: attached == len(self.workers),
            GroupEvent.ALL_RESTORED: restored,
            GroupEvent.LATE: late,
            GroupEvent.REQUEST: asked != 0,
            GroupEvent.STOP: self.aborted_s is not None,
            GroupEvent.KILL: self.killed,
            GroupEvent.ALL_STOPPED: left,
            GroupEvent.ALL_FINISHED: running == 0 and finished,
        }
        state = WorkerGroupState(
            generation=self._shown[0],
            token=self._shown[1],
            running=running,
            saving=saving,
            failure=self.failure,
            requested=asked,
            aborted_s=self.aborted_s,
            stepped_s=self._heard_s,
            step=heard,
            prepared=self.prepared,
            withdrawn=self.withdrawn,
            refused=self.refused,
            awaits=self.coming_into is not None and self.waiting == len(self.workers),
            switched=self.switched,
            switched_step=self.switched_step,
            switched_s=self.switched_s,
            held=self._held,
            held_s=self._held_s,
        )
        return advance(state, *(event for event, did in happened.items() if did))

    def _hear_steps(self) -> None:
        """A step is heard of when it ends, or when the agent next listens."""
        group = self.group
        if group.stepped_s is not None and group.step > self._heard_step:
            self._heard_step = group.step
            self._heard_s = self.host.clock_at(max(group.stepped_s, self.agent.deaf_until_s))
            held = group.told_held
            if held is not None and (self._held is None or held > self._held):
                self._held, self._held_s = held, self.host.clock_at(group.held_s)
            self.progress_monitor.moved()

    def request(self, flags: int) -> None:
        self.cluster.rules.promises.asks(self.agent)
        self.flags |= flags
        self.cluster.note(f"{self.host.name}: asked {_names(flags)}")

    # -- a change inside the loops

    def prepare(self, proposal: Proposal) -> None:
        self.prepared, self.withdrawn, self.refused = proposal, False, ""
        self.group.preparation.tell(self, proposal)

    def withdraw(self, reason: str) -> None:
        self.withdrawn = True
        self.group.preparation.withdraw(self.index)

    def _await_others(self, worker: Worker) -> None:
        """A worker has come to its restore, and waits for the boundary of the others."""
        if worker.phase != "connecting" or self.coming_into is None:
            return
        if worker.deaf:
            self.cluster.later(0.1, 0.3, self._await_others, worker)
        elif self.host.bad_input in ("model", "script"):
            self.fails_by_input(worker)
        else:
            self.waiting += 1
            assert self._present is not None
            self._present.preparation.come(self, self.coming_into)
            self.wake()

    def begin_inside(self, new: Group, index: int, step: int) -> None:
        """The workers have restored the state of the others' boundary."""
        self.coming_into = None
        for worker in self.workers:
            if worker.alive:
                worker.phase, worker.restored = "training", True
                self.progress(worker)
        self.go_over(new, index, step)
        for worker in self.workers:
            if not worker.alive:
                new.lose(worker)

    def refuse(self, reason: str) -> None:
        """They cannot be prepared."""
        if self.prepared is not None and self.switched == "no":
            self.refused = f"{self.host.name}: {reason}"
            self.wake()

    def enter(self, world: World) -> None:
        """Its agent takes it for the workers of the world that they have entered."""
        self._shown = (world.generation, world.token)
        self.prepared, self.withdrawn, self.refused, self.switched = None, False, "", "no"

    def go_over(self, new: Group, index: int, step: int) -> None:
        """The workers enter another generation at a boundary."""
        self.index, self.group, self.generation = index, new, new.generation
        new.worker_groups[index] = self
        self.kept = self.unkept = self.saved = self.unsaved = -1
        for worker, rank in zip(self.workers, new.world.ranks(index), strict=True):
            worker.group, worker.rank, worker.step = new, rank, step
            new.workers[rank] = worker
        self.cluster.later(0.0, TOLD_S, self._tell_switch, "entered", new.world.token, step)

    def leave_to_others(self, new: Group, step: int) -> None:
        """The workers leave their loops, because the others go on without this node. new: where
        these go on; the word of the boundary comes to some of them through these workers."""
        token = self.prepared.token if self.prepared is not None else ""
        self._carries = new
        self.cluster.later(0.0, TOLD_S, self._leave, token, step)

    def _leave(self, token: str, step: int) -> None:
        """The workers have read the word of the boundary, and passed it on."""
        self._carries = None
        for worker in self.workers:
            if worker.alive and not worker.stopping:
                worker.phase, worker.stopping = "stopping", True
                self.cluster.later(0.06, 0.2, self._end, worker)
        self._tell_switch("left", token, step)

    def _tell_switch(self, how: Literal["entered", "left"], token: str, step: int) -> None:
        if self.prepared is not None and self.prepared.token == token and not self.agent.dead:
            self.switched, self.switched_step = how, step
            self.switched_s = self.host.clock()
            self.wake()

    def stop(self, reason: str, now_s: float) -> None:
        """Tell the workers to stop where they are."""
        self.aborted_s = self.host.clock()
        for worker in self.workers:
            worker.exiting = worker.unheard
            self._tell_abort(worker)

    def _tell_abort(self, worker: Worker) -> None:
        busy = self.cluster.random.random() < 0.03 and self.cluster.plan.long_kernels
        delay_s = LONG_SECTION_S if busy else self.cluster.random.uniform(0.001, 0.02)
        delay_s = max(delay_s, worker.long_until_s - self.cluster.timeline.now_s)
        self.cluster.timeline.after(delay_s, self.abort, worker)

    def abort(self, worker: Worker) -> None:
        if not worker.alive or worker.deaf or worker.stopping:
            return
        if worker.phase in ("starting", "connecting"):
            self._end(worker)
        else:
            self.group.lose(worker)
            self._stop(worker)

    def kill(self, *, spare_saving: bool = False) -> None:
        self.killed = self.killed or not spare_saving
        for worker in self.workers:
            if worker.alive and not (spare_saving and worker.stopping):
                self.kill_one(worker)

    def kill_unresponsive(self) -> None:
        """End the workers that, as a look has found, could not obey."""
        for worker in self.workers:
            if worker.alive and worker.rank in self.progress_monitor.unresponsive:
                self.kill_one(worker)

    def kill_suspended(self) -> None:
        """End the workers that a signal has stopped."""
        for worker in self.workers:
            if worker.alive and self.progress_monitor.frozen_s(worker) >= STOPPED_S:
                self.kill_one(worker)

    def kill_one(self, worker: Worker) -> None:
        """SIGKILL, by its agent."""
        if worker.alive:
            self._end(worker)
            self.group.lose(worker)
            self._cut()

    def _cut(self) -> None:
        """A word that came through a worker does not come."""
        carries, self._carries = self._carries, None
        if carries is not None:
            carries.cut()

    def crash(self, worker: Worker) -> None:
        """A worker dies of itself; its peers may notice before its agent has read of its end."""
        if not worker.alive:
            return
        has_reported = worker.failed or worker.stopping
        if not has_reported and self.aborted_s is None and not self.agent.dead:
            self.cluster.rules.promises.crashed(self.group.world.token, self.host.name)
        self._end(worker)
        worker.unheard = True
        self.group.lose(worker)
        self._cut()
        self.cluster.later(0.0, SLOW_END_S, self._read_end, worker, has_reported)

    def _read_end(self, worker: Worker, has_reported: bool) -> None:
        worker.unheard = False
        asked, code = self.aborted_s is not None, -signal.SIGKILL
        failure = judge_exit(
            worker.rank, code, worker.step, stop_requested=asked, exiting=worker.exiting
        )
        if failure is not None and not has_reported:
            self._blame(worker, failure)
        self.wake()

    # -- a worker's life

    def _attach(self, worker: Worker) -> None:
        if not worker.alive:
            return
        if self.host.bad_input == "import":
            self.fails_by_input(worker)
            return
        if self.host.bad_input == "crash":
            self.cluster.rules.cause("bad-join")
            self.crash(worker)
            return
        if worker.deaf:
            self.cluster.later(0.1, 0.3, self._attach, worker)
            return
        self._attached += 1
        self.progress(worker)
        self.wake()
        if self.aborted_s is not None:
            self._end(worker)
            return
        worker.phase = "connecting"
        if self.coming_into is not None:
            self.cluster.later(0.02, 0.3, self._await_others, worker)
            return
        start_s = self.cluster.plan.start_s * self._patience
        self.cluster.timeline.after(start_s, self._too_late, worker)
        self._reach(worker, self.cluster.timeline.now_s + self._connect_s)

    @property
    def _connect_s(self) -> float:
        return self.cluster.plan.connect_s * self._patience

    def _reach(self, worker: Worker, until_s: float) -> None:
        """Come to rank 0's store, unless this machine or rank 0's is cut off for too long."""
        if worker.phase != "connecting":
            return
        if not self.group.reaches(worker):
            if self.cluster.timeline.now_s >= until_s:
                self._too_late(worker)
            else:
                self.cluster.later(0.1, 0.3, self._reach, worker, until_s)
            return
        self.group.connect(worker)

    def all_are_there(self, worker: Worker) -> None:
        """Every rank has come to the store: now the process group is set up."""
        self.cluster.timeline.after(self._connect_s, self._too_late, worker)

    def _too_late(self, worker: Worker) -> None:
        """Not all came, or the process group was not set up, in time."""
        if worker.phase == "connecting" and not worker.deaf:
            failure = Failure(rank=worker.rank, blame="peer", message="not set up in time")
            worker.failed = True
            self._end(worker)
            self._blame(worker, failure)
            self.group.lose(worker)

    def fails_by_input(self, worker: Worker) -> None:
        """Its script, or what the script needs, is not that of the others."""
        self.cluster.rules.cause("bad-join")
        kind, final = self.host.bad_input, self.host.bad_input != "script"
        self.fail(worker, "user", f"{kind}Error: not as on the others", final=final)

    def fail(
        self,
        worker: Worker,
        blame: str,
        message: str,
        *,
        bad_step: int | None = None,
        final: bool = False,
    ) -> None:
        """An error ends a worker: S1 to S4 of `elasticzero/worker/stop_protocol.py`."""
        if not worker.alive or worker.stopping:
            return
        worker.failed = True
        self.group.lose(worker)
        self._blame(
            worker,
            Failure(
                rank=worker.rank,
                blame=blame,  # type: ignore[arg-type]
                message=message,
                step=worker.step if worker.phase == "training" else 0,
                bad_step=bad_step,
                final=final,
            ),
        )
        self._stop(worker)

    def blame(self, failure: Failure) -> None:
        """Keep the failure that explains the others; of equals the first."""
        if self.failure is None or explains(failure) < explains(self.failure):
            self.failure = failure
        self.wake()

    def progress(self, worker: Worker) -> None:
        """A worker shows that it comes on."""
        worker.progress_s = self.cluster.timeline.now_s
        self.progress_monitor.moved()

    def _blame(self, worker: Worker, failure: Failure) -> None:
        if self.aborted_s is None or failure.blame != "peer":
            self.blame(failure)
        self.wake()

    def leave_at_boundary(self) -> None:
        """All ranks agreed: leave with the state of this step."""
        for worker in self.workers:
            if worker.alive and not worker.stopping:
                self._stop(worker, agreed=True)

    def _stop(self, worker: Worker, *, agreed: bool = False) -> None:
        """Say `Stopping`, leave the state in memory where it is whole, and exit."""
        group, plan, random = self.group, self.cluster.plan, self.cluster.random
        trained = worker.phase == "training"
        worker.phase, worker.stopping = "stopping", True
        self.progress(worker)
        replicated = plan.strategy == "ddp" or group.size == 1
        torn = not agreed and plan.strategy != "ddp" and random.random() < 0.15
        clean = trained and not torn
        snapshot_due = clean and not (replicated and self._complete_given)
        self._complete_given |= snapshot_due and replicated
        can = agreed or replicated or not group.ledger.copying
        if snapshot_due and can:
            keep = group.kept_states()
            if not agreed and group.ledger.taken is not None:
                keep.add((self.generation, group.ledger.taken))
            name = (self.generation, worker.step, 1 if replicated else group.size)
            self.host.memory.write(name, 0 if replicated else worker.rank, keep)
        self.wake()
        self.cluster.later(0.005, 0.15, self._end, worker)

    def finish(self) -> None:
        """The training function has returned."""
        for worker in self.workers:
            if worker.alive and not worker.deaf:
                worker.finished = True
                self.cluster.later(0.001, 0.1, self._end, worker)

    def _end(self, worker: Worker) -> None:
        """The process is gone."""
        if not worker.alive:
            return
        worker.phase = "gone"
        worker.deaf, worker.hang, worker.busy = False, "", False
        self.progress(worker)
        if not any(w.alive for w in self.workers) and self.host.memory.drafts:
            self.cluster.later(0.005, 0.15, self.agent.seal_all)
        self.wake()


def _names(flags: int) -> str:
    return " and ".join(
        text for flag, text in ((FLAG_LEAVE, "to leave"), (FLAG_GROW, "to grow")) if flags & flag
    )
