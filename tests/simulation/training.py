"""A model of workers: one process group a generation, in which they train step by step.

A worker starts, connects, restores and trains; a step is finished when every rank is up and in
reach. Who sees a peer's end stops with the state of its own last step, and leaves it in memory.
Captures follow `elasticzero.snapshots.schedule`, the real one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from elasticzero.comm.control import ControlWord
from elasticzero.launcher.protocol.documents import World
from elasticzero.launcher.protocol.placement import replica_sources
from elasticzero.snapshots.schedule import CaptureSchedule
from tests.simulation.hanging import Hang
from tests.simulation.planned import Preparation
from tests.simulation.storage import Part, SnapshotName, State

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.worker_group import WorkerGroup

COLLECTIVE_TIMEOUT_S = 600.0
"""A collective that waits for a silent peer fails then."""
SUPERSEDED_S = 1.0
"""A save whose generation is over is given up then."""
PULL_LIMIT_S = 3.0
AWAKE_S = 0.01
"""An agent that stood still works again so soon."""

Phase = Literal["starting", "connecting", "restoring", "training", "stopping", "gone"]


class Worker:
    """One rank's process."""

    __slots__ = (
        "busy",
        "deaf",
        "exiting",
        "failed",
        "finished",
        "group",
        "hang",
        "hung_s",
        "long_until_s",
        "phase",
        "progress_s",
        "rank",
        "restored",
        "step",
        "stopping",
        "unheard",
        "worker_group",
    )

    def __init__(self, worker_group: WorkerGroup, group: Group, rank: int) -> None:
        self.worker_group = worker_group
        self.group = group
        self.rank = rank
        self.phase: Phase = "starting"
        self.step = group.step
        self.deaf = False
        """Stopped, or in a dead loop: only SIGKILL ends it."""
        self.hang: Hang = ""
        """Why it is deaf."""
        self.hung_s = 0.0
        """Since when."""
        self.long_until_s = 0.0
        """In a long kernel until then: it hears nothing."""
        self.busy = False
        """In a section in which no step is due."""
        self.progress_s = worker_group.cluster.timeline.now_s
        self.restored = self.stopping = self.failed = self.finished = False
        self.unheard = False
        """It has died, and its agent has not learnt of it."""
        self.exiting = False
        """That was so when it was asked to stop."""

    @property
    def alive(self) -> bool:
        return self.phase != "gone"


@dataclass(slots=True)
class Save:
    """A checkpoint on its way to storage."""

    step: int
    parts: set[int] = field(default_factory=set)
    """Ranks whose shards are written."""
    over: bool = False
    well: bool = True


class Group:
    """The process group of one generation, and what its ranks know alike."""

    def __init__(self, cluster: Cluster, world: World) -> None:
        self.cluster = cluster
        self.world = world
        self.generation = world.generation
        self.size = world.world_size
        self.worker_groups: dict[int, WorkerGroup] = {}
        """By index of the member."""
        self.workers: dict[int, Worker] = {}
        """By rank: those that connected."""
        self.step = world.resume.step
        self.stepped_s: float | None = None
        self.told_held: int | None = None
        self.held_s = 0.0
        """The newest step that ranks have told their agents of as `held_step`, and when the step
        ended with which they did so first."""
        self.broken = False
        self.epoch = 0
        """Grows when a step that was under way will not end as it was to."""
        self._stalled = False
        self.stuck = False
        """The ranks wait for each other: no step ends any more."""
        self._began_s = 0.0
        self._step_s = 0.0
        plan = cluster.plan
        self.snapshots = plan.snapshot_every > 0 and (plan.strategy != "ddp" or self.size == 1)
        self.ledger = CaptureSchedule.begun(self.step, plan.snapshot_every, world.resume)
        self.word: ControlWord | None = None
        self.owed: int | None = None
        self.saved = self.step if world.resume.tier == "storage" else None
        self.save: Save | None = None
        self._restored = 0
        self.preparation = Preparation(self)

    @property
    def held_step(self) -> int | None:
        """What ranks tell their agents: see `CaptureState.held_step`."""
        if not self.snapshots or self.size == 1:
            return None
        return self.ledger.held_step

    # -- coming together

    def connect(self, worker: Worker) -> None:
        """A worker has come; when all are there and in reach of each other they restore."""
        self.cluster.rules.connects(self, worker)
        self.workers[worker.rank] = worker
        if len(self.workers) == self.size:
            for peer in self.workers.values():
                peer.worker_group.all_are_there(peer)
        self.look_again()

    def reaches(self, worker: Worker) -> bool:
        """Whether nothing lies between its machine and rank 0's."""
        host, first = worker.worker_group.host, self.cluster.hosts[self.world.members[0].node]
        return host is first or not (host.dark or first.dark)

    def look_again(self) -> None:
        """Something may be in reach again."""
        if self.broken or self.stuck or len(self.workers) < self.size:
            return
        if not all(self.able(worker) for worker in self.workers.values()):
            return
        if self._stalled:
            self._stalled = False
            self._go_on()
        elif all(w.phase == "connecting" for w in self.workers.values()):
            for worker in self.workers.values():
                worker.phase = "restoring"
                self.cluster.later(0.02, 0.3, self._restore, worker)

    @staticmethod
    def able(worker: Worker) -> bool:
        """Whether it does its part of a step."""
        up = worker.phase != "gone" and not worker.deaf and not worker.busy
        return up and not worker.worker_group.host.dark

    def _restore(self, worker: Worker) -> None:
        if worker.phase != "restoring":
            return
        if worker.deaf:
            self.cluster.later(0.1, 0.3, self._restore, worker)
            return
        if worker.worker_group.host.bad_input in ("model", "script"):
            worker.worker_group.fails_by_input(worker)
            return
        trouble = self.cluster.unreadable(self.world.resume, worker.worker_group.host)
        if trouble is not None:
            blame, message, bad_step = trouble
            worker.worker_group.fail(worker, blame, message, bad_step=bad_step)
            return
        worker.phase, worker.restored = "training", True
        worker.worker_group.progress(worker)
        worker.worker_group.host.breaks(worker)
        self._restored += 1
        worker.worker_group.wake()
        if self._restored == self.size:
            self.cluster.rules.trains(self)
        if self._restored == self.size and not self.broken:
            if self.step >= self.cluster.plan.total_steps:
                self._finish()
            else:
                self._go_on()

    # -- steps

    def _go_on(self) -> None:
        self.epoch += 1
        random = self.cluster.random
        self._began_s = self.cluster.timeline.now_s
        self._step_s = self.cluster.plan.step_s * random.uniform(0.8, 1.3)
        self.cluster.timeline.after(self._step_s, self._end_step, self.epoch)

    def _end_step(self, epoch: int) -> None:
        if epoch != self.epoch or self.broken:
            return
        if self.stuck or not all(self.able(worker) for worker in self.workers.values()):
            self._stalled = True
            self.cluster.timeline.after(COLLECTIVE_TIMEOUT_S, self._time_out, epoch)
            return
        cluster = self.cluster
        if cluster.plan.crash_at == self.step + 1:
            cluster.rules.cause("crash")
            worker = self.workers[min(cluster.plan.crash_rank, self.size - 1)]
            worker.worker_group.fail(worker, "user", "ValueError: bad sample")
            return
        self.step += 1
        if self.stepped_s is None or self.told_held != self.held_step:
            self.told_held, self.held_s = self.held_step, cluster.timeline.now_s
        self.stepped_s = cluster.timeline.now_s
        for worker in self.workers.values():
            worker.step = self.step
        cluster.rules.stepped(self)
        if self.step >= cluster.plan.total_steps:
            self._finish()
        elif not self._boundary():
            self._go_on()

    def _time_out(self, epoch: int) -> None:
        """A collective gives up waiting."""
        if epoch == self.epoch and not self.broken and self._stalled:
            for worker in self._trainers():
                if not worker.deaf and not worker.worker_group.host.dark:
                    worker.worker_group.fail(worker, "peer", "gloo: timed out")

    def _trainers(self) -> list[Worker]:
        return [w for w in self.workers.values() if w.alive and not w.stopping]

    def lose(self, cause: Worker) -> None:
        """A worker's sockets are shut, by itself or by its end: the others notice soon."""
        host = cause.worker_group.host
        if cause.rank not in self.workers or host.silent or host.dark:
            return
        if cause.rank and len(self.workers) < self.size:
            return  # so far the others are connected to rank 0's store alone
        first, self.broken = not self.broken, True
        if not first:
            return
        self.epoch += 1
        random, now_s = self.cluster.random, self.cluster.timeline.now_s
        plan, following = self.cluster.plan, self.step + 1
        possible = following not in (plan.crash_at, plan.total_steps + 1)
        nearly_done = possible and self._step_s and (now_s - self._began_s) / self._step_s > 0.8
        for worker in self._trainers():
            if worker is cause or worker.worker_group.host.dark:
                continue
            if nearly_done and not self._stalled and random.random() < 0.5:
                worker.step = following
                self.cluster.rules.stepped_alone(self, worker)
            late = random.random() < 0.05 and plan.long_kernels
            delay_s = random.uniform(0.2, 2.0) if late else random.uniform(0.002, 0.06)
            worker.long_until_s = now_s + delay_s if late else 0.0
            self.cluster.timeline.after(delay_s, self.notice, worker)

    def cut(self) -> None:
        """A rank does not learn that it has come here: it takes its peers for lost."""
        worker = self.workers[self.size - 1]
        if not self.broken:
            self.cluster.later(0.0, 0.02, self.notice, worker)

    def notice(self, worker: Worker) -> None:
        if worker.alive and not worker.deaf and not worker.stopping:
            worker.worker_group.fail(worker, "peer", "connection reset by peer")

    # -- boundaries

    def _boundary(self) -> bool:
        """Exchange words and capture what is due; whether the generation ends here."""
        before, self.word = self.word, self._word()
        entered = self.preparation.exchange(self.word.flags)
        if before is not None:
            self.ledger = self.ledger.after_exchange(before)
            if before.flags:
                for worker_group in self.worker_groups.values():
                    worker_group.leave_at_boundary()
                self.ends_here()
                return True
        if entered is not None:
            self.preparation.switch(entered)
            return True
        every = self.cluster.plan.checkpoint_every
        if every and self.step % every == 0 and (self.saved is None or self.step > self.saved):
            self.owed = self.step
        due = self.ledger.due(self.step, checkpoint=self.owed is not None, snapshots=self.snapshots)
        if due == "checkpoint":
            self.owed = None
        if due != "nothing":
            self._capture(checkpoint=due == "checkpoint")
        return False

    def _word(self) -> ControlWord:
        worker_groups = self.worker_groups.values()
        least = self.ledger.start - 1
        flags = 0
        for worker_group in worker_groups:
            flags |= worker_group.flags
        return ControlWord(
            flags=flags,
            ready=self.stepped_s is not None,
            held=max(least, min(worker_group.kept for worker_group in worker_groups)),
            saved=max(least, min(worker_group.saved for worker_group in worker_groups)),
            not_held=max(worker_group.unkept for worker_group in worker_groups),
            unsaved=max(worker_group.unsaved for worker_group in worker_groups),
        )

    def ends_here(self) -> None:
        """Its ranks have left it at a boundary."""
        self.broken = True
        self.epoch += 1

    def goes_on(self, before: Group) -> None:
        """The ranks have come here from another generation, inside their loops."""
        before.supersede()
        self.ledger = before.ledger.entered(self.step, before.generation)
        self.saved, self.owed, self.stepped_s = before.saved, before.owed, before.stepped_s
        self._restored = self.size
        self.cluster.rules.trains(self)
        self._go_on()

    def kept_states(self) -> set[State]:
        """What a capture must leave."""
        return self.ledger.states_to_keep(self.generation)

    def _capture(self, *, checkpoint: bool) -> None:
        name = (self.generation, self.step, self.size)
        keep = self.kept_states()
        self.ledger = self.ledger.captured(self.step, checkpoint=checkpoint)
        save = None
        if checkpoint:
            self.saved = self.step
            save = self.save = Save(self.step)
        for index, worker_group in self.worker_groups.items():
            for worker in worker_group.workers:
                worker_group.host.memory.write(name, worker.rank, keep)
            if save is not None:
                worker_group.agent.saves += 1
            self.cluster.later(0.005, 0.1, self._seal, index, worker_group, name, save)

    def _seal(
        self, index: int, worker_group: WorkerGroup, name: SnapshotName, save: Save | None
    ) -> None:
        if worker_group.agent.dead:
            return
        if worker_group.agent.stands_still:
            self._later_than(worker_group, self._seal, index, worker_group, name, save)
            return
        worker_group.host.memory.seal([name])
        if save is not None:
            self.cluster.later(0.05, 0.8, self._persist, index, worker_group, save)
        until_s = self.cluster.timeline.now_s + PULL_LIMIT_S
        self.cluster.later(0.005, 0.1, self._pull, index, worker_group, name, until_s)

    def _later_than(self, worker_group: WorkerGroup, act: Callable[..., None], *args: Any) -> None:
        """Has an agent that stands still do something once it runs."""
        left_s = worker_group.agent.deaf_until_s - self.cluster.timeline.now_s
        self.cluster.timeline.after(left_s + AWAKE_S, act, *args)

    def _pull(
        self, index: int, worker_group: WorkerGroup, name: SnapshotName, until_s: float
    ) -> None:
        """Pull the replica that belongs to a step, and say that the step is kept here."""
        if worker_group.agent.dead or worker_group.agent.worker_group is not worker_group:
            return
        if worker_group.agent.stands_still:
            self._later_than(worker_group, self._pull, index, worker_group, name, until_s)
            return
        owners = replica_sources([member.zone for member in self.world.members])
        if owners and self.snapshots:
            owner = owners[index]
            other = self.worker_groups[owner]
            reach = not (other.agent.dead or other.host.dark or worker_group.host.dark)
            reach &= not other.agent.stands_still
            ranks = self.world.ranks(owner)
            if not reach or not all(other.host.memory.has(name, rank) for rank in ranks):
                if self.cluster.timeline.now_s < until_s:
                    self.cluster.later(0.02, 0.2, self._pull, index, worker_group, name, until_s)
                else:
                    worker_group.unkept = max(worker_group.unkept, name[1])
                return
            worker_group.host.memory.add(name, ranks)
        worker_group.kept = max(worker_group.kept, name[1])

    def _persist(self, index: int, worker_group: WorkerGroup, save: Save) -> None:
        if worker_group.agent.dead:
            return
        part = Part(
            agent=worker_group.agent,
            name=(self.generation, save.step, self.size),
            token=self.world.token,
            ranks=self.world.ranks(index),
            replacing=save.step in self.world.bad_steps,
            bad_steps=self.world.bad_steps,
            parts=save.parts,
            lasts=lambda: not save.over,
            over=lambda well: self._save_over(save, well=well),
        )
        worker_group.agent.storage.persist(part)

    def _save_over(self, save: Save, *, well: bool) -> None:
        if save.over:
            return
        save.over, save.well = True, well
        for worker_group in self.worker_groups.values():
            worker_group.agent.saves -= 1
            worker_group.saved = save.step
            if not well:
                worker_group.unsaved = save.step
            else:
                worker_group.agent.cluster_observer.saved(save.step)
            worker_group.wake()

    def supersede(self) -> None:
        """A newer generation has begun: nobody waits long for this one's save."""
        if self.save is not None and not self.save.over:
            self.cluster.timeline.after(SUPERSEDED_S, self.drop_save)

    def drop_save(self) -> None:
        """Give up the save in flight."""
        if self.save is not None:
            self._save_over(self.save, well=False)

    # -- the end

    def _finish(self) -> None:
        """All steps are done: the last state is saved, if there is a place for it."""
        if self.broken:
            return
        saving = self.ledger.saving is not None and self.save is not None and not self.save.over
        storage = self.cluster.storage.possible
        unsaved = storage and (self.saved is None or self.step > self.saved)
        if not saving and unsaved:
            self._capture(checkpoint=True)
            saving = True
        if saving or any(worker.deaf for worker in self.workers.values()):
            for worker in self._trainers():
                worker.busy |= self.cluster.plan.phased and not worker.deaf  # it may take long
            self.cluster.timeline.after(0.1, self._finish_when_saved)
            return
        if storage and self.save is not None and not self.save.well and self.save.step == self.step:
            trainers = self._trainers()
            if trainers:
                worker = trainers[0]
                worker.worker_group.fail(worker, "storage", "the last checkpoint was not saved")
            return
        for worker_group in self.worker_groups.values():
            worker_group.finish()

    def _finish_when_saved(self) -> None:
        if self.broken:
            return
        if any(worker.deaf for worker in self.workers.values()) or (
            self.save is not None and not self.save.over
        ):
            self.cluster.timeline.after(0.1, self._finish_when_saved)
        else:
            self.ledger = replace(self.ledger, saving=None)
            self._finish()
