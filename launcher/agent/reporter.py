"""Records what happens to one agent: in its event log, its metrics, and on its console.

The agent's loop calls it. An error in it is logged, and concerns nothing else; what takes long is
done in the background (`observability/output.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from elasticzero.errors import ElasticZeroError, ExitCode, one_line
from elasticzero.ipc.failure import Failed
from elasticzero.ipc.messages import (
    Attached,
    Captured,
    DataChanged,
    Logged,
    MemoryShort,
    NetworkTaken,
    ResidualLost,
    Restored,
    ScriptEnded,
    SharesChanged,
    SnapshotHeld,
    SnapshotInterval,
    Stepped,
    Stopping,
    Switched,
    Tagged,
)
from elasticzero.launcher.agent.config import AgentOptions
from elasticzero.launcher.agent.console import AgentConsole
from elasticzero.launcher.agent.status import Latest, agent_status, job_state, progress_of
from elasticzero.launcher.goodput import TimeAccount, TimeSpent, Waiting, stall_of
from elasticzero.launcher.observability import logging_setup
from elasticzero.launcher.observability.compute_time import WorkerTimes
from elasticzero.launcher.observability.event_log import EventLog
from elasticzero.launcher.observability.events import EventName
from elasticzero.launcher.observability.job_metrics import job_exposition
from elasticzero.launcher.observability.metrics import Metrics
from elasticzero.launcher.observability.output import contained, terminal
from elasticzero.launcher.observability.progress.display import ProgressDisplay
from elasticzero.launcher.observability.recovery.record import RecoveryRecord
from elasticzero.launcher.protocol.actions import (
    Decision,
    PrepareWorkers,
    WithdrawPreparation,
    WriteWorld,
)
from elasticzero.launcher.protocol.documents import Done, Failure, World
from elasticzero.launcher.protocol.leader import is_leader
from elasticzero.launcher.protocol.planned.proposal import without
from elasticzero.launcher.protocol.policy import with_operator_overrides
from elasticzero.launcher.protocol.regroup import waiting_class
from elasticzero.launcher.protocol.view import PreemptionNotice, View
from elasticzero.launcher.snapshots.save_events import SaveFailed, SaveFinished
from elasticzero.launcher.workers import error_file
from elasticzero.launcher.workers.group import Ended, Received, WorkerGroup
from elasticzero.launcher.workers.log_rotation import part, rotate
from elasticzero.launcher.workers.log_tail import LogTail
from elasticzero.launcher.workers.process import Worker
from elasticzero.launcher.workers.reserve.standbys import Standing
from elasticzero.serialization import encode, field_values

DECISIONS: Mapping[type, EventName] = {
    DataChanged: "data_changed",
    SharesChanged: "shares_changed",
    ResidualLost: "residual_lost",
    MemoryShort: "memory_short",
    NetworkTaken: "network",
    SnapshotInterval: "paced",
}
"""Events of what a worker has decided or found out for all."""
KEEP_LOGS_EVERY_S = 2.0
"""Seconds between two looks at the sizes of the logs."""
FRESH_S = 10.0
"""An agent whose first world was written fewer seconds ago has seen it begin; the nodes' clocks may
differ by less."""


log = logging.getLogger(__name__)
recorded = contained("a record of what the agent does")


class AgentReporter:
    """Records what the agent receives and decides."""

    def __init__(
        self,
        options: AgentOptions,
        events: EventLog,
        metrics: Metrics,
        compute_times: Callable[[], WorkerTimes] = dict,
        progress: ProgressDisplay | None = None,
    ) -> None:
        """Records nothing yet.

        Args:
            options: options of the node.
            events: the agent's event log.
            metrics: metrics of the node.
            compute_times: returns the own times of the workers of all nodes, where this agent
                leads.
            progress: shows what the job does; None: nothing shows it.
        """
        self._options = options
        self._progress = progress
        self._compute_times = compute_times
        self._events = events
        self._metrics = metrics
        self._tail = LogTail(terminal.repeat, terminal.takes_output, options.console)
        self._kept_logs_s = 0.0
        """Time at which the logs were last looked after."""
        self._tee_waits = False
        """True if a piece of work that repeats the workers' output waits."""
        self._notice: PreemptionNotice | None = None
        self._world: World | None = None
        self._latest = Latest(began_s=time.monotonic())
        self.console = AgentConsole(options)
        self._done: Done | None = None
        self._logged_outlasted = 0
        """Generation of which a line said that workers have finished and others run on."""
        self._session = False
        """True if a worker has called `elasticzero.run`."""
        self._time = TimeAccount(time.monotonic())
        self._time_complete = True
        """False if this agent has not seen all of the job's time since the present world began."""
        self._waiting: Waiting | None = None
        """Reason for which no workers run; None: they do."""
        self._recovery = RecoveryRecord(
            lambda cause, phase, s: metrics.recovery_seconds.labels(cause, phase).observe(s)
        )
        self._decided_s = time.monotonic()
        """Time of the last turn of the agent's loop."""

    @recorded
    def note(self, event: EventName, /, **fields: Any) -> None:
        self._events.write(event, **fields)

    @recorded
    def registered(self, incarnation: str, run: int) -> None:
        """Records that the node is registered for a run: the job's time counts from now."""
        self.note("registered", incarnation=incarnation, run=run)
        self._time = TimeAccount(time.monotonic())

    @recorded
    def decided(self, view: View, decision: Decision) -> None:
        """Logs the reason when it changes; counts what changed in the world."""
        now_s = time.monotonic()
        self._metrics.leader.set(is_leader(view))
        self._observe_store(view, now_s)
        if view.world is not None and view.world != self._world:
            self._world_changed(view, view.world, now_s)
        if view.control != self._latest.control:
            before, self._latest.control = self._latest.control, view.control
            self.console.control(view, before)
            self.note("control", nnodes=view.control.nnodes, stop=view.control.stop)
        if view.world is not None and view.reports:
            self._latest.counts.reports(view.world.generation, view.reports)
        if view.round_s is not None and not self._recovery.round_is_open:
            reason = view.alarm.reason if view.alarm is not None else "all stopped at a boundary"
            kind = view.alarm.kind if view.alarm is not None else "boundary"
            self.note("round", generation=view.workers.generation, kind=kind, reason=reason)
            self._metrics.restarts.labels(kind).inc()
            self._time.round_opened(view.round_s)
            self._recovery.round_opened(kind, reason, view.round_s, view.workers.stepped_s)
        if view.world is None or view.round_s is not None:
            policy = with_operator_overrides(self._options.policy, view.control)
            self._wait(waiting_class(view, now_s, policy), now_s)
        if view.notice is not None and view.notice != self._notice:
            self._notice = view.notice
            self.notice(view.notice)
        if view.workers.plain and not self._latest.plain and not self._session:
            self.note("plain", generation=view.workers.generation)
            self._time.plain()
        self._latest.plain = view.workers.plain and not self._session
        if decision.reason != self._latest.reason:
            self._latest.reason = decision.reason
            self.note("reason", reason=decision.reason)
        for action in decision.actions:
            match action:
                case WriteWorld(world):
                    self.note("writes", generation=world.generation)
                case PrepareWorkers(proposal) if view.world is not None:
                    leavers = without(view.world, proposal)
                    self.note("prepares", generation=proposal.generation, leavers=leavers)
                case WithdrawPreparation(reason):
                    self.note("withdrawn", reason=reason)
                case _:
                    pass
        self.console.versions(view)
        self._done = view.done
        self._latest.seconds = self._time.seconds(now_s) if self._time_complete else None

    @recorded
    def progress(self, view: View, group: WorkerGroup | None) -> None:
        """Shows what the job does now, if that is due."""
        self.console.tick()
        if self._progress is not None and self._progress.is_due():
            self._progress.show(progress_of(view, group, self._latest))

    def _observe_store(self, view: View, now_s: float) -> None:
        """Counts the time for which etcd does not answer."""
        before_s, self._decided_s = self._decided_s, now_s
        self._metrics.etcd_reachable.set(view.store.reachable)
        if not view.store.reachable:
            self._metrics.etcd_away.inc(now_s - before_s)

    def _wait(self, why: Waiting, now_s: float) -> None:
        if why != self._waiting:
            self._waiting = why
            self._time.waits(why, now_s)
            self.note("waiting", why=why)

    @recorded
    def time_spent(self, view: View, following: World) -> TimeSpent | None:
        """Returns where the job's time has gone, for the world that is to follow."""
        until = time.time()
        goes_on = following.resume.tier == "live"  # and no step is done again
        step = self._latest.step if goes_on else following.resume.step
        if self._time_complete:
            return self._time.spent(time.monotonic(), until, step)
        before = view.world.time_spent if view.world is not None else None
        return before.unseen(until, step).redone_from(step) if before is not None else None

    def _world_changed(self, view: View, world: World, now_s: float) -> None:
        self._latest.counts.world(self._world, world)
        seen = world.resume.tier == "live" and self._time_complete and self._world is not None
        if (spent := world.time_spent) is not None and not seen:
            self._time = TimeAccount(now_s, spent)
            seen = self._world is not None or abs(time.time() - spent.until) < FRESH_S
            self._time_complete = seen and world.names(view.me)
        former, self._world, self._latest.world_time = self._world, world, time.time()
        resume = world.resume
        self.note(
            "world",
            generation=world.generation,
            members=list(world.nodes),
            world_size=world.world_size,
            resume_step=resume.step,
            tier=resume.tier,
            reason=world.reason,
            bad_steps=list(world.bad_steps),
            skipped=field_values(world.skipped) if world.skipped is not None else None,
            time_spent=encode(world.time_spent),
        )
        logging_setup.context.generation = world.generation
        me = (self._options.job, self._options.node)
        self._metrics.identify(*me, world.strategy, world.shard, world.redundancy)
        self._metrics.observe_world(world.generation, world.world_size, len(world.members))
        self.console.world(world, session=self._session)
        self.console.quarantined(world)
        index = world.find(view.me.node, view.me.incarnation)
        comes_in = world.resume.tier == "live" and (former is None or not former.names(view.me))
        if comes_in and index is not None:
            self.starting(world, index, now_s)

    @recorded
    def starting(self, world: World, index: int, now_s: float) -> None:
        """Records that the workers of a generation start.

        Args:
            world: World of the generation.
            index: Index of this node in its order of members.
            now_s: Present time, on the monotonic clock.
        """
        lost = max(0, self._latest.step - world.resume.step)
        self._recovery.starting(now_s, lost)
        self._latest.starting(now_s)
        self._time.started(now_s)
        self._waiting = None
        self.console.starting()
        self._metrics.forget_workers()
        member = world.members[index]
        first = world.first_rank(index)
        self.note(
            "start",
            generation=world.generation,
            index=index,
            ranks=list(range(first, first + member.nproc)),
        )

    @recorded
    def started(self, group: WorkerGroup) -> None:
        pids = [worker.pid for worker in group.workers]
        self.note("started", pids=pids, kept=group.reused, stood_by=group.stood_by)
        self._metrics.workers_running.set(len(group.workers))

    @recorded
    def received(self, group: WorkerGroup, received: Sequence[Received], now_s: float) -> None:
        """Records messages of workers.

        Args:
            group: The node's workers.
            received: Pairs of a worker and its message, in the order in which they came.
            now_s: Present time, on the monotonic clock.
        """
        entering = {w.local_rank for w, m in received if isinstance(m, Switched)}
        for worker, message in received:
            local = worker.local_rank
            if not isinstance(message, Ended):
                self._metrics.received(local, message)
                self._latest.received(local, message)
            match message:
                case Attached():
                    if not self._session:
                        self._session = True
                        self.note("attached", rank=worker.rank)
                    self._recovery.attached(now_s)
                case Restored():
                    self._restored(group, local, message, now_s)
                case Switched():
                    entering.discard(local)
                    switch = {"generation": group.generation, "rank": worker.rank}
                    self.note("switched", step=message.step, seconds=message.seconds, **switch)
                case Stepped():
                    self._stepped(worker, message, group.generation - (local in entering))
                case Logged():
                    # The script chooses the scalars' names, and may take one of ours.
                    place = {"time": time.time(), "rank": worker.rank, "step": message.step}
                    self.note("log", **{**place, **message.scalars, **place})
                case Captured():
                    if local == 0:
                        kind = stall_of(message.checkpoint or message.direct)
                        self._time.stalled(kind, message.seconds)
                    self.note("captured", local_rank=local, **field_values(message))
                case (
                    DataChanged()
                    | SharesChanged()
                    | ResidualLost()
                    | SnapshotInterval()
                    | MemoryShort()
                    | NetworkTaken()
                ):
                    self.note(DECISIONS[type(message)], **field_values(message))
                    self.console.decided(message)
                case Stopping():
                    self.note("stopping", **field_values(message) | {"rank": worker.rank})
                case Failed():
                    self.note("failed", rank=worker.rank, **field_values(message))
                    if group.is_failure(worker, message):
                        repeated = self._repeats(worker)
                        self.console.worker_failed(worker.rank, message, is_repeated=repeated)
                case ScriptEnded(missing_bytes=missing, missing_why=why) if missing:
                    self.console.output_missing(worker, missing, why)
                case Ended(code):
                    self.note("ended", rank=worker.rank, pid=worker.pid, code=code)
                    running = sum(w.running for w in group.workers)
                    self._metrics.workers_running.set(running)
        self._tee(group, last=False)
        if now_s - self._kept_logs_s >= KEEP_LOGS_EVERY_S:
            self._kept_logs_s = now_s
            terminal.do(partial(self._keep_logs, list(group.workers)))

    def _restored(
        self, group: WorkerGroup, local_rank: int, message: Restored, now_s: float
    ) -> None:
        """Records that a worker has its state.

        Args:
            group: Its group.
            local_rank: Its place on this node.
            message: Its message.
            now_s: Present time, on the monotonic clock.
        """
        self._recovery.restored(message, now_s)
        if local_rank == 0:
            self._time.restored(now_s, message.connect_s, message.restore_s)
            self.note("restored", generation=group.generation, **field_values(message))
            self.console.device(message.device, len(group.workers))

    def _stepped(self, worker: Worker, message: Stepped, generation: int) -> None:
        """Records a step of a worker.

        Args:
            worker: The worker.
            message: Its message.
            generation: Generation of its group.
        """
        self._first_step(generation, message.at_s)
        self.console.progress_resumed(worker.rank, message.at_s)
        if worker.local_rank == 0:
            self._time.stepped(message.step, message.at_s, message.data_wait_s)
            ago_s = time.monotonic() - message.at_s
            at = {"time": time.time() - ago_s, "generation": generation}
            rank, own_s = self._latest.compute.slowest()
            slowest = {"slowest_local_rank": rank, "compute_s": own_s}
            fields = field_values(message)
            fields.pop("wire_bytes", None)  # they are a metric alone
            self.note("step", **fields | at | slowest)

    @recorded
    def snapshot_held(self, held: SnapshotHeld) -> None:
        """Records that this node holds its part of a snapshot, or could not take it."""
        self.note("kept", **field_values(held))
        self._metrics.observe_snapshot(held.step, held=held.error is None)
        if held.error is None:
            self._latest.snapshot_held(held.step)
        else:
            self.console.log_line(f"the snapshot of step {held.step} is not kept: {held.error}")

    @recorded
    def saved(self, finished: SaveFinished) -> None:
        """Records that a save has ended here."""
        self.note("saved", **field_values(finished))
        for text in finished.notes:
            self.console.log_line(text)
        if finished.error is not None:
            self._metrics.checkpoints_failed.inc()
            text = f"the checkpoint of step {finished.step} was not saved: {finished.error}"
            self.console.log_line(text)
            return
        self._latest.saved(finished.step)
        self._time.saved(finished.seconds)
        self._metrics.observe_checkpoint(
            step=finished.step, seconds=finished.seconds, written_bytes=finished.bytes
        )
        if finished.committed:
            text = f"checkpoint of step {finished.step} written in {finished.seconds:.2f} s"
            self.console.log_line(text)
            self.note("checkpoint", **field_values(finished))
        if finished.tags:
            self.console.tagged(finished.step, finished.tags)

    @recorded
    def tagged(self, tagged: Tagged) -> None:
        """Records that tags name a step that was saved before, or why they do not."""
        self.note("tagged", **field_values(tagged))
        self.console.tagged(tagged.step, tagged.tags, tagged.error)

    @recorded
    def save_failed(self, failed: SaveFailed) -> None:
        """Records that a save of the newest state failed; prints it if the error is another."""
        self.note("save_failed", **field_values(failed))
        self._metrics.checkpoints_failed.inc()
        self.console.save_failed(failed)

    def _first_step(self, generation: int, at_s: float) -> None:
        """Records a recovery as a whole, at the first step after it."""
        recovery = self._recovery.stepped(at_s)
        if recovery is not None:
            self._metrics.steps_lost.inc(recovery["steps_lost"])
            self._latest.counts.recovered(recovery)
            self.note("recovery", generation=generation, **recovery)

    def _repeats(self, worker: Worker) -> bool:
        """Returns whether this worker's output is repeated on the terminal."""
        return self._options.console.repeated_streams(worker.local_rank) != 0

    def _tee(self, group: WorkerGroup, *, last: bool) -> None:
        """Has the workers' new output repeated."""
        if self._tee_waits and not last:
            return
        pairs = [(w, self._options.console.repeated_streams(w.local_rank)) for w in group.workers]
        followed = [(worker, streams) for worker, streams in pairs if streams]
        if followed:
            self._tee_waits = True  # before the thread may do it, and says so
            if not terminal.do(partial(self._follow, followed, last)):
                self._tee_waits = False

    def _follow(self, followed: Sequence[tuple[Worker, int]], last: bool) -> None:
        self._tee_waits = False
        for worker, streams in followed:
            self._tail.follow(worker, streams, last=last)

    def _keep_logs(self, workers: Sequence[Worker]) -> None:
        """Makes the directory of the logs again if it was deleted, and cuts off long logs."""
        self._events.restore()
        paths = [path for w in workers for path in (w.log, w.stdout_log) if path is not None]
        for path in rotate(paths, self._options.logs):
            self._tail.cut_off(path, part(path, 1))

    @recorded
    def examined(self, group: WorkerGroup, failure: Failure) -> None:
        """Records what was found about a worker that makes no step."""
        self.note("looked", generation=group.generation, **field_values(failure))
        self.console.examined(group, failure)

    @recorded
    def outlasted(self, group: WorkerGroup, now_s: float) -> None:
        """Records once a generation that workers have finished and others of its world run on."""
        if self._logged_outlasted == group.generation or self._done is not None:
            return
        ended = group.outlasted(now_s)
        if ended:
            self._logged_outlasted = group.generation
            self.note("outlasted", ranks=[w.rank for w in ended])
            self.console.outlasted(group, ended, now_s)

    @recorded
    def stuck_at_exit(self, worker: Worker, limit_s: float) -> None:
        """Records that a process was killed that did not end although its script had."""
        self.note("stuck_at_exit", rank=worker.rank, exit_code=worker.script_exit_code)
        self.console.stuck_at_exit(worker, limit_s)

    @recorded
    def standing(self, told: Sequence[Standing], private_bytes: int) -> None:
        """Records what has become of the processes that stand by.

        Args:
            told: What has changed.
            private_bytes: Memory that all of them share with no other process.
        """
        self._metrics.standby_bytes.set(private_bytes)
        for standing in told:
            self.note("standing", **field_values(standing), message=standing.message)
            self.console.standing(standing)

    @recorded
    def retired(self, group: WorkerGroup) -> None:
        """Prints the rest of a group's output."""
        self._tee(group, last=True)

    @recorded
    def notice(self, notice: PreemptionNotice) -> None:
        """Records that this node is to leave."""
        left_s = None if notice.by_s is None else round(notice.by_s - notice.received_s, 3)
        self.note("notice", reason=notice.reason, left_s=left_s)
        self.console.log_line(f"{notice.reason}: leaving at the next boundary between steps")

    @recorded
    def exits(self, reason: str, *, failed: bool = False) -> None:
        """Records the reason for which the agent ends; `failed`: it is an error of this node."""
        if self._progress is not None:
            self._progress.show(None)
        self.console.exits(reason, failed=failed)

    @recorded
    def store_recovery(self, text: str) -> None:
        """Records that etcd has lost its data, or that the agent wrote the data anew."""
        self.note("store_recovery", message=text)
        self.console.log_line(text)

    @recorded
    def turn_failed(self, error: Exception, failures: int) -> None:
        """Records an unexpected error in the agent's loop, or one of the machine that may pass.

        Args:
            error: The error.
            failures: Number of turns that have failed so far; 0: this one may pass.
        """
        if failures:
            log.error("an unexpected error in the agent's loop", exc_info=error)
        elif self.console.is_due("machine"):
            self.console.log_line(
                f"this machine refuses what the agent needs, which tries again: {one_line(error)}",
                level=logging.WARNING,
            )
        else:
            return
        self.note("loop_error", message=one_line(error), failures=failures)

    @recorded
    def store_failed(self, error: ElasticZeroError) -> None:
        """Records that a write to etcd has failed; prints it now and then while it is retried."""
        if self.console.store_failed(str(error)):
            self.note("store_trouble", message=str(error))

    def status(self, view: View | None, leaving: bool) -> dict[str, Any]:
        """Returns plain values for `/status`."""
        return agent_status(self._options, view, self._latest, leaving=leaving)

    def job_metrics(self, view: View | None) -> bytes:
        """Returns what `/metrics/job` serves: nothing where this agent does not lead."""
        return job_exposition(job_state(self._options, view, self._latest, self._compute_times()))

    @recorded
    def close(self, code: ExitCode | None) -> None:
        """Records the end of the agent; if the job failed, prints the error that caused it,
        once."""
        done = self._done
        if done is not None and done.outcome == "finished":
            self._time.ended(time.monotonic())
        whole = self._time_complete and (self._world is not None or done is None)
        spent = self._time.seconds(time.monotonic()) if whole else None
        outcome, reason = (done.outcome, done.reason) if done is not None else (None, "")
        early = done.end_reason if done is not None else ""
        self.note(
            "exit", code=code, outcome=outcome, reason=reason, end_reason=early, seconds=spent
        )
        if done is not None and done.outcome == "failed":
            details, trace = self.console.failed(done, self._world)
            self.note("error", message=done.reason, details=details, traceback=trace)
            failure = done.failure
            trace = failure.traceback if failure is not None else ""
            error_file.write_own(done.reason, trace, int(ExitCode.FAILED))
        self._events.close()
