"""Prints what one agent does for a person at the terminal, one line an event."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from elasticzero.errors import same_error
from elasticzero.ipc.failure import Failed
from elasticzero.ipc.messages import (
    DataChanged,
    MemoryShort,
    NetworkTaken,
    ResidualLost,
    SharesChanged,
    SnapshotInterval,
)
from elasticzero.ipc.thread_location import place_in_traceback
from elasticzero.launcher.agent.config import AgentOptions
from elasticzero.launcher.observability.console import (
    ABOVE,
    NO_ERRORS,
    HeldErrors,
    PrintedErrors,
    differs_much,
    fresh_start,
    network_text,
    skipped_checkpoint_line,
    tagged_text,
)
from elasticzero.launcher.protocol.documents import (
    Control,
    Done,
    Failure,
    Member,
    NodeStrikes,
    World,
)
from elasticzero.launcher.protocol.failure_policy import (
    QUARANTINE_STRIKES,
    quarantine_reason,
    quarantine_s,
)
from elasticzero.launcher.protocol.leader import is_leader, odd_one_text
from elasticzero.launcher.protocol.placement import choose_build, of_build, version_line
from elasticzero.launcher.protocol.policy import JobPolicy, with_operator_overrides
from elasticzero.launcher.protocol.view import View
from elasticzero.launcher.snapshots.save_events import SaveFailed
from elasticzero.launcher.workers.group import WorkerGroup
from elasticzero.launcher.workers.process import Worker
from elasticzero.launcher.workers.reserve.standbys import Standing
from elasticzero.text import count_text, list_text, named_text, size_text

WAITING_LINE_EVERY_S = 10.0
TROUBLE_EVERY_S = 10.0
"""Seconds between two lines about trouble of one kind."""
NAMES_SHOWN = 8


log = logging.getLogger(__name__)


def log_for_node(node: str, text: str) -> None:
    """Logs a line for people about a node."""
    log.info("%s", text, extra={"node": node})


class AgentConsole:
    """Prints the lines of one agent; most are printed once, until their content changes."""

    def __init__(self, options: AgentOptions) -> None:
        self._options = options
        self._errors = PrintedErrors()
        self._held = HeldErrors()
        self._waiting_since_s: float | None = None
        self._logged_s: dict[str, float] = {}
        """Time at which trouble of a kind was printed last."""
        self._logged_quarantine: NodeStrikes | None = None
        """Strikes of this node for which a line has already said that it is set aside."""
        self._memory_short_logged = False
        self._said_standing = False
        self._save_failed: tuple[int, int, str] | None = None
        """Generation, step and error of the last failed save that was printed."""
        self._logged_interval: int | None = None
        """Last snapshot interval that was printed."""
        self._logged_device = ""
        """Last device of the workers that was printed."""
        self._stalled_since_s: dict[int, float] = {}
        """Time at which a line said of a rank that it makes no step."""
        self._logged_versions: dict[str, str] = {}
        """Last line about the versions of each node."""
        self._compared: tuple[object, World | None] = (None, None)
        """Registrations and world whose versions were compared last."""
        self._logged_network = ""
        """Last text that said which network NCCL takes."""
        self._logged_better = ""
        """Last warning that the machine has a better one."""

    def log_line(self, text: str, *, rank: int | None = None, level: int = logging.INFO) -> None:
        """Logs a line for people.

        Args:
            text: The line.
            rank: Rank of the worker that it is about; None: it is about no single one.
            level: Level of the record, as `logging` has them.
        """
        log.log(level, "%s", text, extra={"node": self._options.node, "rank": rank})

    def tick(self) -> None:
        """Prints errors that have waited for one that explains them."""
        self._held.tick()

    def starting(self) -> None:
        """Notes that workers of a new generation start."""
        self._stalled_since_s = {}

    def world(self, world: World, *, session: bool) -> None:
        """Prints a new generation."""
        for name in ("strategy", "shard", "redundancy"):
            chosen, its = getattr(self._options.policy, name), getattr(world, name)
            if chosen != its:
                self.log_line(
                    f"this job trains with --{name} {its}; {chosen}, given here, is ignored"
                )
        resume = world.resume
        origin = {
            "fresh": fresh_start(world.generation, session=session),
            "ram": f"from step {resume.step}, held in memory",
            "storage": f"from the checkpoint of step {resume.step}",
            "live": f"from step {resume.step}, without a stop",
        }
        reason = world.reason
        if (damage := world.skipped) is not None:
            reason = damage.cause
            self.log_line(skipped_checkpoint_line(damage.step, damage.message, resume.step))
        if self._held.has(reason):
            self._held.release()
        names = list_text(world.nodes, NAMES_SHOWN)
        self.log_line(
            f"generation {world.generation}: {count_text(world.world_size, 'rank')} on {names}, "
            f"{origin[resume.tier]}: {self._errors.shortened(reason)}",
        )
        self._held.release()

    def quarantined(self, world: World) -> None:
        """Prints that the world does without this node, and why."""
        me = self._options.node
        struck = [s for s in world.strikes if s.node == me and s.count >= QUARANTINE_STRIKES]
        if not struck or me in world.nodes:
            self._logged_quarantine = None
        elif struck[0] != self._logged_quarantine:
            self._logged_quarantine = struck[0]
            why = quarantine_reason(struck, me)
            self.log_line(
                f"this node is set aside for {quarantine_s(struck[0].count):g} s: {why}; the "
                f"others go on without it, and it is tried again then; its workers' logs are in "
                f"{self._options.log_dir}",
            )

    def control(self, view: View, before: Control) -> None:
        """Prints what operators ask of the whole job, when it changes."""
        nnodes = view.control.nnodes
        if nnodes != before.nnodes and nnodes is not None:
            text = f"an operator scaled the job to {nnodes[0]}:{nnodes[1]} nodes"
            self.log_line(text)
        if view.control.stop and not before.stop:
            self.log_line("an operator stops the job")
        if view.control.drains(view.me) and not before.drains(view.me):
            self.log_line("an operator drains this node")

    def versions(self, view: View) -> None:
        """Prints, once for each node, that it has other versions than the world that trains: on
        the node itself, and on the leader's.

        Args:
            view: What this agent sees.
        """
        world = view.world
        members, last = self._compared
        if world is None or (members is view.members and last is world):
            return
        self._compared = (view.members, world)
        others = (view.members or {}).values() if is_leader(view) else ()
        for member in {member.node: member for member in (*others, view.me)}.values():
            self._log_versions(member, version_line(member, world))

    def _log_versions(self, member: Member, text: str) -> None:
        if text != self._logged_versions.get(member.node, ""):
            self._logged_versions[member.node] = text
            if text:
                self.log_line(text, level=logging.WARNING)

    def waiting(self, present: Callable[[], Mapping[str, Member]], control: Control) -> None:
        """Prints every 10 s which nodes are here while there are too few, or too few that can be in
        one world.

        Args:
            present: Returns the registrations by node, oldest first; called only when a line is
                due.
            control: What operators ask, which may change the fewest nodes.
        """
        now_s = time.monotonic()
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s
        if now_s - self._waiting_since_s < WAITING_LINE_EVERY_S:
            return
        self._waiting_since_s = now_s
        registered = present()
        names, policy = sorted(registered), with_operator_overrides(self._options.policy, control)
        least = policy.min_nodes
        self._compare(list(registered.values()), policy)
        if len(names) < least:
            self.log_line(
                f"waiting for nodes: {len(names)} of at least {least} are here "
                f"({', '.join(names)}); {least - len(names)} missing",
            )

    def network(self, message: NetworkTaken) -> None:
        """Prints which network NCCL takes, and that the machine has a better one; each once."""
        text = network_text(message.network, message.version, message.gpu_direct)
        if text != self._logged_network:
            self._logged_network = text
            self.log_line(f"between nodes NCCL takes {text}")
        if message.warning not in ("", self._logged_better):
            self._logged_better = message.warning
            self.log_line(message.warning, level=logging.WARNING)

    def _compare(self, registered: Sequence[Member], policy: JobPolicy) -> None:
        """Prints that nodes cannot be in one world, where too few are left for one."""
        build = choose_build(registered, None, policy.min_nodes, policy.max_nodes)
        candidates = of_build(registered, build)
        if len(candidates) < policy.min_nodes and (text := odd_one_text(registered, candidates)):
            self._log_versions(registered[0], text)

    def not_waiting(self) -> None:
        self._waiting_since_s = None

    def memory_short(self, message: MemoryShort) -> None:
        """Prints once that memory is short: the need for it does not change while a job trains."""
        if self._memory_short_logged:
            return
        self._memory_short_logged = True
        folder, overflow = self._options.snapshot_dir.parent, self._options.overflow_dir
        instead = f"what finds no room goes to {overflow}" if overflow else "some find no room"
        self.log_line(
            f"{folder} is short: this node's snapshots need {_mebibytes(message.needed_bytes)} MiB "
            f"and it has {_mebibytes(message.free_bytes)} MiB; {instead}, which is slower. Give it "
            "more (docker run --shm-size, in Kubernetes an emptyDir with medium: Memory at "
            "/dev/shm), or name a larger one by --snapshot-dir",
        )

    def snapshot_interval(self, message: SnapshotInterval) -> None:
        """Prints the interval between snapshots: the first, and one that differs much."""
        if not differs_much(self._logged_interval, message.every):
            return
        self._logged_interval = message.every
        self.log_line(
            f"snapshots every {count_text(message.every, 'step')}: one costs "
            f"{message.cost_s * 1000:.1f} ms, a step {message.step_s * 1000:.0f} ms",
        )

    def tagged(self, step: int, tags: Sequence[str], error: str | None = None) -> None:
        """Prints that tags name a step, or why they do not.

        Args:
            step: Step of the checkpoint.
            tags: The tags.
            error: Why they do not name the step; None: they do.
        """
        level = logging.INFO if error is None else logging.WARNING
        self.log_line(tagged_text(step, tags, error), level=level)

    def device(self, name: str, workers: int) -> None:
        """Prints on what this node's workers compute, once unless that changes.

        Args:
            name: The device of the first of them, in words; empty: not known.
            workers: Number of them.
        """
        if name in ("", self._logged_device):
            return
        self._logged_device = name
        all_of_them = "worker computes" if workers == 1 else f"{workers} workers compute"
        self.log_line(f"this node's {all_of_them} on {name}")

    def decided(
        self,
        message: DataChanged
        | SharesChanged
        | ResidualLost
        | SnapshotInterval
        | MemoryShort
        | NetworkTaken,
    ) -> None:
        """Prints what a worker has decided or found out for all."""
        match message:
            case DataChanged(message=text) | SharesChanged(message=text):
                self.log_line(text)
            case ResidualLost(message=text):
                self.log_line(text, level=logging.WARNING)
            case SnapshotInterval():
                self.snapshot_interval(message)
            case MemoryShort():
                self.memory_short(message)
            case NetworkTaken():
                self.network(message)

    def save_failed(self, failed: SaveFailed) -> None:
        """Prints that a save of the newest state failed, when the error is another one."""
        case = (failed.generation, failed.step, failed.error)
        if case == self._save_failed:
            return
        self._save_failed = case
        first = (failed.newest or 0) + 1
        steps = f"steps {first} to {failed.step} are" if first < failed.step else "it is"
        have = f"of step {failed.newest}" if failed.newest else "not there yet"
        self.log_line(
            f"step {failed.step} could not be saved: {failed.error}; {steps} at stake, for the "
            f"newest checkpoint is {have}; memory holds the state, and saving it is tried again "
            f"for up to {self._options.policy.save_timeout_s:g} s (--save-timeout)",
            level=logging.WARNING,
        )

    def examined(self, group: WorkerGroup, failure: Failure) -> None:
        """Prints what was found about a worker that makes no step."""
        self._stalled_since_s.setdefault(failure.rank, time.monotonic())
        if failure.blame != "hung":
            self.log_line(f"rank {failure.rank}: {failure.message}", rank=failure.rank)
            return
        logs = {worker.rank: worker.log for worker in group.workers}
        self.log_line(
            f"rank {failure.rank}: {failure.message}; its stack is in {logs[failure.rank]}",
            rank=failure.rank,
            level=logging.WARNING,
        )

    def outlasted(self, group: WorkerGroup, ended: Sequence[Worker], now_s: float) -> None:
        """Prints that these workers have ended and the job waits for others.

        Args:
            group: The node's workers.
            ended: Workers that have ended; the line has the time of the first one.
            now_s: Present time, on the monotonic clock.
        """
        ranks = [worker.rank for worker in ended]
        running = [worker.rank for worker in group.workers if worker.running]
        others = f"{named_text('rank', running, NAMES_SHOWN)} here" if running else "other nodes"
        self.log_line(
            f"{named_text('rank', ranks, NAMES_SHOWN)} ended "
            f"{now_s - ended[0].ended_s:.0f} s ago; the job waits for the workers of {others} to "
            "end too",
        )

    def stuck_at_exit(self, worker: Worker, limit_s: float) -> None:
        """Prints that a process is killed that did not end although its script had."""
        self.log_line(
            f"rank {worker.rank}: its script had ended, but the process did not within "
            f"{limit_s:g} s (--exit-timeout), so it is killed; the script's exit code, "
            f"{worker.script_exit_code}, counts",
            rank=worker.rank,
            level=logging.WARNING,
        )

    def standing(self, standing: Standing) -> None:
        """Prints, once, that processes stand by for this node's workers, or why none does."""
        if standing.refused or not self._said_standing:
            self._said_standing = True
            self.log_line(standing.message)

    def output_missing(self, worker: Worker, missing_bytes: int, why: str) -> None:
        """Prints that a log lacks some of a worker's output.

        Args:
            worker: The worker.
            missing_bytes: Number of bytes that could not be written.
            why: Why not.
        """
        self.log_line(
            f"rank {worker.rank}: {size_text(missing_bytes)} of its output could not be written "
            f"into {worker.log}: {why}",
            rank=worker.rank,
            level=logging.WARNING,
        )

    def progress_resumed(self, rank: int, at_s: float) -> None:
        """Prints that a rank makes steps again, where a line said that it makes none."""
        since_s = self._stalled_since_s.pop(rank, None)
        if since_s is not None:
            self.log_line(
                f"rank {rank} makes steps again, {max(0.0, at_s - since_s):.1f} s later: the hang "
                "ended by itself",
                rank=rank,
            )

    def store_failed(self, text: str) -> bool:
        """Prints trouble with etcd now and then; returns whether it did."""
        due = self.is_due("store")
        if due:
            self.log_line(text, level=logging.WARNING)
        return due

    def is_due(self, kind: str) -> bool:
        """Returns whether to print trouble of a kind, which is repeated while it lasts."""
        now_s = time.monotonic()
        last_s = self._logged_s.get(kind)
        due = last_s is None or now_s - last_s >= TROUBLE_EVERY_S
        if due:
            self._logged_s[kind] = now_s
        return due

    def worker_failed(self, rank: int, failed: Failed, *, is_repeated: bool) -> None:
        """Prints an error of a worker: whole where it is new.

        Args:
            rank: Rank of the worker.
            failed: The error.
            is_repeated: Whether the worker's output is repeated on the terminal. Otherwise an error
                that another try would meet again is printed without its traceback.
        """
        if failed.blame not in NO_ERRORS:
            show = partial(self._worker_failed, rank, failed, is_repeated=is_repeated)
            self._held.put(failed.message, show, explains=failed.final)

    def _worker_failed(self, rank: int, failed: Failed, *, is_repeated: bool) -> None:
        text = self._errors.text(
            f"rank {rank}",
            failed.message,
            failed.traceback,
            in_one_line=failed.blame == "memory" or (failed.final and not is_repeated),
        )
        self.log_line(text, rank=rank, level=logging.WARNING)

    def exits(self, reason: str, *, failed: bool) -> None:
        """Prints why this agent ends.

        Args:
            reason: The reason.
            failed: Whether it is an error of this node.
        """
        self._held.release()
        text = self._errors.shortened(reason, ABOVE)
        self.log_line(text, level=logging.ERROR if failed else logging.INFO)

    def failed(self, done: Done, world: World | None) -> tuple[str, str]:
        """Prints why the job failed, with the error that caused it unless that was printed, and
        where its log is.

        Args:
            done: End of the job.
            world: World of the generation that failed; None: there was none.

        Returns:
            The lines after the reason, and the worker's traceback before them, empty if there is
            none that helps.
        """
        if self._held.has(done.reason):
            self._held.release()
        lines = []
        if len(done.setbacks) > 1:
            told = done.failure.message if done.failure is not None else ""
            for setback in done.setbacks:
                same = same_error(setback.message, told)
                lines.append(
                    f"  generation {setback.generation}: rank {setback.rank} on {setback.node}, "
                    f"after step {setback.step}: {'the error above' if same else setback.message}"
                )
        failure = done.failure
        traceback = ""
        if failure is not None and not failure.final:
            traceback = failure.traceback.rstrip()
        elif failure is not None and not self._errors.has(failure.message):
            place = place_in_traceback(failure.traceback)
            lines += [f"  at {place}"] if place and place not in failure.message else []
        logs = self._options.log_dir.parent
        if failure is not None and world is not None and failure.rank < world.world_size:
            lines.append(f"log of rank {failure.rank}: {_log_of(world, failure.rank, logs)}")
        lines.append(f"logs: {logs}")
        details = "\n".join(lines)
        is_printed = failure is not None and self._errors.has(failure.message)
        shown = details if is_printed or not traceback else f"{traceback}\n{details}"
        reason = self._errors.shortened(done.reason, ABOVE)
        log.error("error: %s\n%s", reason, shown, extra={"node": self._options.node, "bare": True})
        self._held.release()
        return details, traceback


def _log_of(world: World, rank: int, logs: Path) -> str:
    """Returns the path of a worker's log, which is on the node of the rank.

    Args:
        world: World in which the rank is.
        rank: Rank of the worker.
        logs: Directory of the job's logs, which has one directory for each node.
    """
    indexes = range(len(world.members))
    index = next(i for i in indexes if rank in world.ranks(i))
    return str(logs / world.members[index].node / f"{rank - world.first_rank(index)}.log")


def _mebibytes(size: int) -> int:
    return (size + (1 << 20) - 1) >> 20
