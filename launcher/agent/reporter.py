"""What an agent tells of itself: the event log, metrics, status, and lines for people."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from elasticzero.errors import ElasticZeroError, ExitCode, same_error
from elasticzero.ipc.messages import (
    Attached,
    Captured,
    Failed,
    Logged,
    MemoryShort,
    Restored,
    SnapshotHeld,
    SnapshotInterval,
    Stepped,
    Stopping,
)
from elasticzero.launcher.observability.console import fresh_start, split_damage, worth_telling
from elasticzero.launcher.observability.event_log import EventLog
from elasticzero.launcher.observability.events import EventName
from elasticzero.launcher.observability.goodput import GoodputMeter
from elasticzero.launcher.observability.metrics import Metrics
from elasticzero.launcher.protocol.actions import Decision, WriteWorld
from elasticzero.launcher.protocol.documents import Control, Done, Failure, NodeStrikes, World
from elasticzero.launcher.protocol.failure_policy import ASIDE_AFTER, quarantined, term_s, why_aside
from elasticzero.launcher.protocol.policy import with_operator_overrides
from elasticzero.launcher.protocol.view import PreemptionNotice, View, WorkerGroupState
from elasticzero.launcher.snapshots.checkpoint_saver import SaveFailed, SaveFinished
from elasticzero.launcher.workers import error_file
from elasticzero.launcher.workers.group import Ended, Heard, WorkerGroup
from elasticzero.launcher.workers.log_tail import LogTail
from elasticzero.launcher.workers.process import Worker

if TYPE_CHECKING:
    from elasticzero.launcher.agent.config import AgentOptions

WHO_IS_HERE_EVERY_S = 10.0
STORE_TROUBLE_EVERY_S = 10.0
NAMES_SHOWN = 8


def say(node: str, text: str) -> None:
    """A line for whoever watches the terminal; if nobody can read it, none."""
    with suppress(OSError):
        print(f"[{time.strftime('%H:%M:%S')} {node}] {text}", file=sys.stderr, flush=True)


class _Log(logging.Handler):
    """Says what modules log as the agent says everything: with time and node."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(Exception):  # a log line must not end what it tells of
            self._tell(self.format(record))


def log_to(tell: Callable[[str], None]) -> None:
    """Have this package's warnings said by `tell`; the script's own logging is untouched."""
    logger = logging.getLogger("elasticzero")
    for handler in [h for h in logger.handlers if isinstance(h, _Log)]:
        logger.removeHandler(handler)
    logger.addHandler(_Log(tell))
    logger.propagate = False


def _repeat(text: str) -> None:
    with suppress(OSError):
        sys.stdout.write(text)
        sys.stdout.flush()


class AgentReporter:
    """Takes note of what the agent hears and decides."""

    def __init__(self, options: AgentOptions, events: EventLog, metrics: Metrics) -> None:
        self._options = options
        self._events = events
        self._metrics = metrics
        self._tail = LogTail(_repeat)
        self._reason = ""
        self._notice: PreemptionNotice | None = None
        self._world: World | None = None
        self._round_seen_s: float | None = None
        self._marks: dict[str, float] = {}
        self._goodput = GoodputMeter()
        self._began_s = time.monotonic()
        self._control = Control()
        self._last: dict[str, Any] = {
            "step": 0,
            "total_steps": None,
            "loss": None,
            "checkpoint_step": None,
            "snapshot_step": None,
        }
        self._waiting_since_s: float | None = None
        self._said_trouble_s = 0.0
        self._done: Done | None = None
        self._said_outlasted = 0
        """The generation of which it was said."""
        self._aside: NodeStrikes | None = None
        """This node's strikes, as it was last said that it is set aside for them."""
        self._traced: list[str] = []
        """Errors whose traceback this agent has repeated on the terminal."""
        self._said_short = False
        self._save_failed: tuple[int, int, str] | None = None
        """Generation, step and error of the failed save that was said last."""
        self._session = False
        """A worker has called `elasticzero.run`."""
        self._plain = False
        self._every: int | None = None
        """The snapshot interval that was said last."""
        self._silent: dict[int, float] = {}
        """When it was said of a rank that it makes no step."""

    def note(self, event: EventName, **fields: Any) -> None:
        self._events.write(event, **fields)

    def decided(self, view: View, decision: Decision) -> None:
        """Log the reason when it changes; count what changed in the world."""
        if view.world is not None and view.world != self._world:
            self._world_changed(view.world)
        if view.control != self._control:
            self._say_control(view)
        if view.round_s is not None and self._round_seen_s is None:
            self._round_seen_s = view.round_s
            reason = view.alarm.reason if view.alarm is not None else "all stopped at a boundary"
            kind = view.alarm.kind if view.alarm is not None else "boundary"
            self.note("round", generation=view.workers.generation, kind=kind, reason=reason)
            self._metrics.restarts.labels(kind).inc()
            if view.workers.stepped_s:
                self._recovery("detect", max(0.0, view.round_s - view.workers.stepped_s))
        if view.notice is not None and view.notice != self._notice:
            self._notice = view.notice
            self.notice(view.notice)
        if view.workers.plain and not self._plain and not self._session:
            self.note("plain", generation=view.workers.generation)
        self._plain = view.workers.plain and not self._session
        if decision.reason != self._reason:
            self._reason = decision.reason
            self.note("reason", reason=decision.reason)
        for action in decision.actions:
            if isinstance(action, WriteWorld):
                self.note("writes", generation=action.world.generation)
        self._done = view.done

    def _world_changed(self, world: World) -> None:
        self._world = world
        resume = world.resume
        self.note(
            "world",
            generation=world.generation,
            members=[member.node for member in world.members],
            world_size=world.world_size,
            resume_step=resume.step,
            tier=resume.tier,
            reason=world.reason,
            bad_steps=list(world.bad_steps),
        )
        self._metrics.generation.set(world.generation)
        self._metrics.world_size.set(world.world_size)
        self._metrics.members.set(len(world.members))
        self._say_world(world)
        self._say_aside(world)

    def _say_aside(self, world: World) -> None:
        """That the world does without this node, and why."""
        me = self._options.node
        struck = [s for s in world.strikes if s.node == me and s.count >= ASIDE_AFTER]
        if not struck or me in [member.node for member in world.members]:
            self._aside = None
        elif struck[0] != self._aside:
            self._aside = struck[0]
            why = why_aside(struck, me)
            say(
                me,
                f"this node is set aside for {term_s(struck[0].count):g} s: {why}; the others go "
                f"on without it, and it is tried again then; its workers' logs are in "
                f"{self._options.log_dir}",
            )

    def _say_world(self, world: World) -> None:
        mine = self._options.limits.strategy
        if mine != world.strategy:
            text = (
                f"this job trains with --strategy {world.strategy}; {mine}, given here, is ignored"
            )
            say(self._options.node, text)
        resume = world.resume
        origin = {
            "fresh": fresh_start(world.generation, session=self._session),
            "ram": f"from step {resume.step}, held in memory",
            "storage": f"from the checkpoint of step {resume.step}",
        }
        reason, damage = split_damage(world.reason, resume.step, world.bad_steps)
        if damage is not None:
            say(self._options.node, damage)
        names = ", ".join(member.node for member in world.members[:NAMES_SHOWN])
        more = len(world.members) - NAMES_SHOWN
        say(
            self._options.node,
            f"generation {world.generation}: {world.world_size} rank"
            f"{'s' * (world.world_size > 1)} on {names}{f' and {more} more' if more > 0 else ''}, "
            f"{origin[resume.tier]}: {reason}",
        )

    def _say_control(self, view: View) -> None:
        """What operators ask of the whole job, when it changes."""
        before, self._control = self._control, view.control
        given = self._control.nnodes
        if given != before.nnodes and given is not None:
            text = f"an operator scaled the job to {given[0]}:{given[1]} nodes"
            say(self._options.node, text)
        if self._control.stop and not before.stop:
            say(self._options.node, "an operator stops the job")
        if self._control.drains(view.me) and not before.drains(view.me):
            say(self._options.node, "an operator drains this node")
        self.note("control", nnodes=given, stop=self._control.stop)

    def waiting(self, look: Callable[[], Iterable[str]]) -> None:
        """Say every 10 s which nodes are here while there are too few; look: their names."""
        now_s = time.monotonic()
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s
        if now_s - self._waiting_since_s < WHO_IS_HERE_EVERY_S:
            return
        self._waiting_since_s = now_s
        here = sorted(look())
        least = with_operator_overrides(self._options.limits, self._control).min_nodes
        if len(here) < least:
            say(
                self._options.node,
                f"waiting: {len(here)} of at least {least} nodes are here ({', '.join(here)}); "
                f"{least - len(here)} missing",
            )

    def not_waiting(self) -> None:
        self._waiting_since_s = None

    def starting(self, world: World, index: int, now_s: float) -> None:
        self._marks = {"start": now_s}
        self._silent = {}
        self._goodput.begin(now_s)
        self._metrics.forget_workers()
        if self._round_seen_s is not None:
            self._recovery("regroup", now_s - self._round_seen_s)
        self._round_seen_s = None
        member = world.members[index]
        first = world.first_rank(index)
        self.note(
            "start",
            generation=world.generation,
            index=index,
            ranks=list(range(first, first + member.nproc)),
        )

    def started(self, gang: WorkerGroup) -> None:
        self.note("started", pids=[worker.pid for worker in gang.workers], kept=gang.kept)
        self._metrics.workers_running.set(len(gang.workers))

    def heard(self, gang: WorkerGroup, heard: Iterable[Heard], now_s: float) -> None:
        """Take note of what workers said."""
        for worker, message in heard:
            local = worker.local_rank
            match message:
                case Attached():
                    if not self._session:
                        self._session = True
                        self.note("attached", rank=worker.rank)
                    self._recovery("start", now_s - self._marks.get("start", now_s))
                case Restored():
                    self._recovery("connect", message.connect_s)
                    self._recovery("build", message.build_s)
                    self._recovery("restore", message.restore_s)
                    self._marks["restored"] = now_s
                    if local == 0:
                        self.note("restored", generation=gang.generation, **_plain(message))
                case Stepped():
                    if "restored" in self._marks:
                        first_s = max(0.0, message.at_s - self._marks.pop("restored"))
                        self._recovery("first_step", first_s)
                    self._metrics.observe_step(
                        local,
                        step=message.step,
                        seconds=message.step_s,
                        data_wait_s=message.data_wait_s,
                        samples=message.samples,
                    )
                    self._moves_again(worker.rank, message.at_s)
                    if local == 0:
                        self._last["step"] = message.step
                        self._last["total_steps"] = message.total or None
                        useful_s = max(0.0, message.step_s - message.data_wait_s)
                        self._goodput.stepped(message.step, useful_s, message.at_s)
                        ago_s = time.monotonic() - message.at_s
                        at = {"time": time.time() - ago_s, "generation": gang.generation}
                        self.note("step", **_plain(message) | at)
                case Logged():
                    if "loss" in message.scalars:
                        self._metrics.loss.labels(str(local)).set(message.scalars["loss"])
                        self._last["loss"] = message.scalars["loss"]
                    self.note("log", rank=worker.rank, step=message.step, **message.scalars)
                case Captured():
                    self._metrics.observe_capture(message.seconds, message.bytes)
                    self.note("captured", **_plain(message))
                case SnapshotInterval():
                    self._say_pace(message)
                    self.note("paced", **_plain(message))
                case MemoryShort():
                    self._say_memory_short(message)
                case Stopping():
                    self.note("stopping", **_plain(message) | {"rank": worker.rank})
                case Failed():
                    if message.traceback and self._repeats(worker):
                        self._traced.append(message.message)
                    self.note("failed", rank=worker.rank, **_plain(message))
                case Ended(code):
                    self.note("ended", rank=worker.rank, pid=worker.pid, code=code)
                    running = sum(w.running for w in gang.workers)
                    self._metrics.workers_running.set(running)
        self._tee(gang, last=False)

    def kept(self, news: SnapshotHeld) -> None:
        """This node holds its part of a snapshot, or could not."""
        self.note("kept", **_plain(news))
        if news.error is None:
            self._last["snapshot_step"] = news.step
            self._metrics.snapshot_step.set(news.step)
        else:
            say(self._options.node, f"the snapshot of step {news.step} is not kept: {news.error}")

    def saved(self, over: SaveFinished) -> None:
        """A save has ended here."""
        self.note("saved", **_plain(over))
        for text in over.notes:
            say(self._options.node, text)
        if over.error is not None:
            text = f"the checkpoint of step {over.step} was not saved: {over.error}"
            say(self._options.node, text)
            return
        self._last["checkpoint_step"] = over.step
        self._metrics.observe_checkpoint(
            step=over.step,
            seconds=over.seconds,
            written_bytes=over.bytes,
        )
        if over.committed:
            text = f"checkpoint of step {over.step} written in {over.seconds:.2f} s"
            say(self._options.node, text)
            self.note("checkpoint", **_plain(over))

    def save_failed(self, failed: SaveFailed) -> None:
        """A save of the newest state failed and is tried again; said when the error is another."""
        self.note("save_failed", **_plain(failed))
        case = (failed.generation, failed.step, failed.error)
        if case == self._save_failed:
            return
        self._save_failed = case
        first = (failed.newest or 0) + 1
        steps = f"steps {first} to {failed.step} are" if first < failed.step else "it is"
        have = f"of step {failed.newest}" if failed.newest else "not there yet"
        say(
            self._options.node,
            f"step {failed.step} could not be saved: {failed.error}; {steps} at stake, for the "
            f"newest checkpoint is {have}; memory holds the state, and saving it is tried again "
            f"for up to {self._options.limits.save_timeout_s:g} s (--save-timeout)",
        )

    def _say_memory_short(self, message: MemoryShort) -> None:
        """Said once: what it takes does not change while a job trains."""
        self.note("memory_short", **_plain(message))
        if self._said_short:
            return
        self._said_short = True
        folder, overflow = self._options.snapshot_dir.parent, self._options.overflow_dir
        instead = f"what finds no room goes to {overflow}" if overflow else "some find no room"
        say(
            self._options.node,
            f"{folder} is short: this node's snapshots need {_mebibytes(message.needed_bytes)} MiB "
            f"and it has {_mebibytes(message.free_bytes)} MiB; {instead}, which is slower. Give it "
            "more (docker run --shm-size, in Kubernetes an emptyDir with medium: Memory at "
            "/dev/shm), or name a larger one by --snapshot-dir",
        )

    def _say_pace(self, message: SnapshotInterval) -> None:
        if not worth_telling(self._every, message.every):
            return
        self._every = message.every
        say(
            self._options.node,
            f"snapshots every {message.every} step{'s' * (message.every > 1)}: one costs "
            f"{message.cost_s * 1000:.1f} ms, a step {message.step_s * 1000:.0f} ms",
        )

    def _recovery(self, phase: str, seconds: float) -> None:
        self._metrics.recovery_seconds.labels(phase).observe(seconds)

    def _repeats(self, worker: Worker) -> bool:
        """Whether this worker's output is repeated on the terminal."""
        return self._options.console.shown(worker.local_rank) != 0

    def _tee(self, gang: WorkerGroup, *, last: bool) -> None:
        for worker in gang.workers:
            self._tail.follow(worker, self._options.console.shown(worker.local_rank), last=last)

    def looked(self, gang: WorkerGroup, found: Failure) -> None:
        """What a look found about a worker that makes no step."""
        self.note("looked", generation=gang.generation, **_plain(found))
        self._silent.setdefault(found.rank, time.monotonic())
        if found.blame != "hung":
            say(self._options.node, f"rank {found.rank}: {found.message}")
            return
        logs = {worker.rank: worker.log for worker in gang.workers}
        say(
            self._options.node,
            f"rank {found.rank}: {found.message}; its stack is in {logs[found.rank]}",
        )

    def outlasted(self, gang: WorkerGroup, now_s: float) -> None:
        """Says once of a generation that workers have finished and others of its world run on."""
        if self._said_outlasted == gang.generation or self._done is not None:
            return
        ended = gang.outlasted(now_s)
        if not ended:
            return
        self._said_outlasted = gang.generation
        ranks, more = ", ".join(str(w.rank) for w in ended), len(ended) > 1
        running = ", ".join(str(w.rank) for w in gang.workers if w.running)
        self.note("outlasted", ranks=[w.rank for w in ended])
        others = f"rank{'s' * (',' in running)} {running} here" if running else "other nodes"
        say(
            self._options.node,
            f"rank{'s' * more} {ranks} {'have' if more else 'has'} ended "
            f"{now_s - ended[0].ended_s:.0f} s ago; the job waits for the workers of {others} to "
            "end too",
        )

    def stuck_at_exit(self, worker: Worker, limit_s: float) -> None:
        self.note("stuck_at_exit", rank=worker.rank, exit_code=worker.script_exit_code)
        say(
            self._options.node,
            f"rank {worker.rank}: its script had ended, but the process did not within "
            f"{limit_s:g} s (--exit-timeout), so it is killed; the script's exit code, "
            f"{worker.script_exit_code}, counts",
        )

    def _moves_again(self, rank: int, at_s: float) -> None:
        """A step was made; say so where it was said that none is."""
        since_s = self._silent.pop(rank, None)
        if since_s is not None:
            say(
                self._options.node,
                f"rank {rank} makes steps again, {max(0.0, at_s - since_s):.1f} s later: the hang "
                "ended by itself",
            )

    def retired(self, gang: WorkerGroup) -> None:
        """The last of a gang's output."""
        self._tee(gang, last=True)

    def notice(self, notice: PreemptionNotice) -> None:
        """This node is to leave."""
        left_s = None if notice.by_s is None else round(notice.by_s - notice.heard_s, 3)
        self.note("notice", reason=notice.reason, left_s=left_s)
        say(self._options.node, f"{notice.reason}: leaving at the next boundary between steps")

    def leaves(self, reason: str) -> None:
        """The agent ends for this reason."""
        say(self._options.node, reason)

    def store_recovery(self, text: str) -> None:
        """etcd has lost its data, or was told anew what it had lost."""
        self.note("store_recovery", message=text)
        say(self._options.node, text)

    def store_trouble(self, error: ElasticZeroError) -> None:
        """A write to etcd has failed; said now and then while it is tried again."""
        now_s = time.monotonic()
        if now_s - self._said_trouble_s >= STORE_TROUBLE_EVERY_S:
            self._said_trouble_s = now_s
            self.note("store_trouble", message=str(error))
            say(self._options.node, str(error))

    def status(self, view: View | None, leaving: bool) -> dict[str, Any]:
        """Plain values for `/status`."""
        world = view.world if view is not None else None
        workers = view.workers if view is not None else WorkerGroupState()
        limits = with_operator_overrides(self._options.limits, self._control)
        now_s = time.monotonic()
        aside = (
            quarantined(world.strikes, world.strikes, view.struck_s, now_s)
            if world is not None and view is not None
            else {}
        )
        return {
            "job": self._options.job,
            "node": self._options.node,
            "reason": self._reason,
            "generation": world.generation if world is not None else 0,
            "world_size": world.world_size if world is not None else 0,
            "members": [member.node for member in world.members] if world is not None else [],
            "nnodes": [limits.min_nodes, limits.max_nodes],
            "set_aside_s": aside,
            "up_s": now_s - self._began_s,
            "generation_age_s": self._goodput.generation_age_s(now_s),
            "step_age_s": self._goodput.step_age_s(now_s),
            "steps_per_s": self._goodput.steps_per_s(),
            "goodput": self._goodput.goodput(now_s),
            "leaving": leaving,
            "workers": {
                "running": workers.running,
                "restored": workers.restored,
                "plain": self._plain,
                "step": workers.step,
            },
            **self._last,
        }

    def close(self, code: ExitCode | None) -> None:
        """The last words: if the job failed, the error that brought it about, once."""
        done = self._done
        outcome, reason = (done.outcome, done.reason) if done is not None else (None, "")
        self.note("exit", code=code, outcome=outcome, reason=reason)
        if done is not None and done.outcome == "failed":
            lines = [f"error: {done.reason}"]
            if len(done.setbacks) > 1:
                lines += [
                    f"  generation {s.generation}: rank {s.rank} on {s.node}, after step {s.step}: "
                    f"{s.message}"
                    for s in done.setbacks
                ]
            failure = done.failure
            if failure is not None and failure.traceback and not failure.final:
                told = any(same_error(text, failure.message) for text in self._traced)
                text = failure.traceback.rstrip()
                lines.append("its traceback stands above" if told else text)
            lines.append(f"logs: {self._options.log_dir.parent}")
            with suppress(OSError):
                print("\n".join(lines), file=sys.stderr, flush=True)
            trace = failure.traceback if failure is not None else ""
            error_file.write_own(done.reason, trace, int(ExitCode.FAILED))
        self._events.close()


def _mebibytes(size: int) -> int:
    return (size + (1 << 20) - 1) >> 20


def _plain(message: Any) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__dataclass_fields__}
