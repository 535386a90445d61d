"""Prints what happens in a cluster on this machine, from its agents' events."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from elasticzero.errors import ExitCode, same_error
from elasticzero.ipc.thread_location import place_in_traceback
from elasticzero.launcher.addresses import host_and_port
from elasticzero.launcher.observability.lineage import Lineage
from elasticzero.launcher.observability.output import Ticker, terminal
from elasticzero.launcher.observability.progress.display import ProgressDisplay, is_one_place
from elasticzero.launcher.observability.progress.island_lines import IslandLines
from elasticzero.launcher.observability.progress.states import PLAIN, Mode, Trains, steps_text
from elasticzero.launcher.observability.step_rate import StepRate
from elasticzero.launcher.protocol.leader import PLAIN_END
from elasticzero.text import count_text, print_foreign, printable

PROGRESS_EVERY_S = 2.0
NO_ERRORS = ("peer", "checkpoint", "rollback")
"""Causes of a failure that are no error of the worker: others report them, or all ranks agree."""
ENDS = ("world", "exit", "error")
"""Events before which all errors of a generation have come."""
ABOVE = " by the error above"
HELD_S = 3.0
"""Seconds for which an error is held back in which another rank's may explain it."""

MUTED = "; workers' output goes there alone (--tee repeats it here)"
LARGE_CHANGE = 5
"""A snapshot interval is printed if it differs from the last printed one by this factor."""


def differs_much(before: int | None, new: int) -> bool:
    """Returns whether to print an interval between snapshots: the first, and one much different.

    Args:
        before: The last one that was printed.
        new: The present one.
    """
    if before is None or min(before, new) < 1:
        return before != new
    return max(before, new) >= LARGE_CHANGE * min(before, new)


def fresh_start(generation: int, *, session: bool) -> str:
    """Returns how a generation begins that has no state to go on from.

    Args:
        generation: Number of the generation.
        session: Whether a worker has called `elasticzero.run` before; without that the script's own
            state is not known.
    """
    if generation > 1 and not session:
        return "the script starts anew"
    return "step 0, from the beginning" if session else "a fresh start"


def skipped_checkpoint_line(step: int, message: str, resume_step: int) -> str:
    """Returns a line about the damaged checkpoint that a generation does not begin from.

    Args:
        step: Step of the damaged checkpoint.
        message: What is wrong with it.
        resume_step: Step that the generation begins from.
    """
    return f"the checkpoint of step {step} is damaged: {message}; going on from step {resume_step}"


def network_text(network: str, version: str, gpu_direct: bool | None) -> str:
    """Returns which network NCCL takes, such as `InfiniBand with GPUDirect RDMA (NCCL 2.27.5)`.

    Args:
        network: Its name.
        version: Version of NCCL; empty: not known.
        gpu_direct: Whether it reads and writes the GPUs' memory by itself; None: not known.
    """
    direct = " with GPUDirect RDMA" if gpu_direct else ""
    return f"{network}{direct}{f' (NCCL {version})' if version else ''}"


def tagged_text(step: int, tags: Sequence[str], error: str | None) -> str:
    """Returns a line that says that tags name a step, or why they do not.

    Args:
        step: The step.
        tags: The tags.
        error: Why they do not name it; None: they do.
    """
    has, why = ("has the tag", "") if error is None else ("has no tag", f": {error}")
    return f"the checkpoint of step {step} {has} {', '.join(tags)}{why}"


class HeldErrors:
    """Holds back errors of workers until it is known whether another rank's explains them.

    Bad input that one rank has met, as a call that is refused, is to be read before the errors that
    follow from it on others, such as a file that the refused rank has not written.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Holds nothing yet.

        Args:
            clock: Returns the present time in seconds.
        """
        self._clock = clock
        self._held: list[tuple[float, str, Callable[[], None]]] = []
        """Errors with the time at which they came, and what prints them."""

    def put(self, message: str, show: Callable[[], None], *, explains: bool) -> None:
        """Prints an error, or holds it back.

        Args:
            message: The error in one line.
            show: Prints it.
            explains: Whether it is printed at once, and those that are held after it.
        """
        if not explains:
            self._held.append((self._clock(), message, show))
            return
        show()
        self.release()

    def has(self, text: str) -> bool:
        """Returns whether an error is held that is in this text."""
        return any(message in text for _, message, _ in self._held)

    def tick(self) -> None:
        """Prints what is held once the first of it has waited for HELD_S."""
        if self._held and self._clock() - self._held[0][0] >= HELD_S:
            self.release()

    def release(self) -> None:
        """Prints what is held, in the order in which it came."""
        held, self._held = self._held, []
        for _, _, show in held:
            show()


class PrintedErrors:
    """Knows the errors of workers that were printed, so that each is printed whole once."""

    def __init__(self) -> None:
        self._messages: list[str] = []
        self._traced: list[str] = []
        """The messages whose traceback was printed."""

    def text(self, rank: str, message: str, traceback: str, *, in_one_line: bool) -> str:
        """Returns what to print of an error: all of it, or that it came again.

        Args:
            rank: The rank, with its node where that is not plain.
            message: The error in one line.
            traceback: Its traceback; empty: it has none.
            in_one_line: Whether to leave out the traceback.
        """
        if message in self._messages:
            return f"{rank} failed by the same error"
        is_new = not self.has(message)
        self._messages.append(message)
        place = place_in_traceback(traceback)
        at = f" at {place}" if place and place not in message else ""
        if is_new and traceback and not (in_one_line or _is_own(traceback)):
            self._traced.append(message)
            return f"{rank} failed{at}:\n{traceback.rstrip()}"
        return f"{rank} failed{at}: {message}"

    def has(self, message: str) -> bool:
        """Returns whether this error was printed, or one that differs by numbers alone."""
        return any(same_error(printed, message) for printed in self._messages)

    def has_traceback(self, text: str) -> bool:
        """Returns whether the traceback of an error in this sentence was printed."""
        return any(message in text for message in self._traced)

    def shortened(self, text: str, instead: str = "") -> str:
        """Returns a sentence without the errors that were printed.

        Args:
            text: The sentence, which may have errors after a colon or in brackets.
            instead: What stands there instead.
        """
        for message in self._messages:
            for form in (f": {message}", f" ({message})"):
                text = text.replace(form, instead)
        return text


def _is_own(traceback: str) -> bool:
    """Returns whether an error is one of this project's, whose message says what to do: its
    traceback leads through the project's own code."""
    return traceback.rstrip().rpartition("\n")[2].startswith("elasticzero.")


class ClusterConsole:
    """Prints events as they happen: lines, and one that moves where there is a terminal."""

    def __init__(
        self,
        log_dir: Path,
        nodes: int,
        endpoint: str,
        *,
        mode: Mode = "log",
        muted: bool = False,
        quiet: bool = False,
    ) -> None:
        """Prints that the cluster starts.

        Args:
            log_dir: Directory of the job's logs; its name is the job's.
            nodes: Number of nodes that start.
            endpoint: Endpoint of etcd.
            mode: How progress is shown. For a line that moves, `terminal` writes in the background.
            muted: Whether the workers' output is only in the logs.
            quiet: Whether only errors are printed.
        """
        self.islands: IslandLines | None = None
        """Follows the nodes as islands; None: they are none."""
        self._mode = mode
        self._quiet = quiet
        self._display = ProgressDisplay(mode, lambda text: self.print_line(f"  {text}"), time.time)
        self._rate = StepRate()
        self._absent = {f"node-{i}" for i in range(nodes)}
        """Nodes that start and are not registered yet."""
        self._restored = self._in_round = False
        """True if the present generation has its state; if the job is between two generations."""
        self.step = 0
        self.plain = False
        """True if no worker has called `elasticzero.run` for so long that the script is taken for a
        plain one, which makes no visible steps."""
        self._session = False
        """True if a worker has called it."""
        self._every: int | None = None
        self._reported_faults: set[str] = set()
        self.training: list[str] = []
        """Nodes of the current world, in rank order."""
        self.lineage = Lineage()
        self._began_s = time.time()
        self.generation = 0
        """Number of the newest generation; 0: there is none yet."""
        self._loss: float | None = None
        self._total = 0
        self._killed_s: float | None = None
        self._stepped_s: float | None = None
        self._opened: set[str] = set()
        """Lines about opened trackers that were printed; the next leader opens the same ones."""
        self._unsaved: set[int] = set()
        """Steps of which a line has said that they were not saved."""
        self._shown_s = 0.0
        self._stopped = self._said_standing = False
        self._end_reason = ""
        """Reason for which the script ended training early."""
        self._printed = PrintedErrors()
        self._held = HeldErrors()
        self._muted = muted
        self._errors: dict[str, dict[str, Any]] = {}
        """Event of the error with which the agent of a node has ended, by node."""
        self._pages: dict[str, str] = {}
        """Address of the status page that each node serves."""
        self._saved_step: int | None = None
        """Step of the newest checkpoint."""
        self._how = f"{_program()} status --url --job {log_dir.name} --etcd {endpoint}"
        self._log_dir = log_dir
        self.print_line(
            f"{count_text(nodes, 'node')} starting on this machine; etcd at {endpoint}; "
            f"logs in {log_dir}{MUTED if muted else ''}"
        )

    def print_line(self, text: str, at_s: float | None = None) -> None:
        """Prints a line with the time since the start.

        Args:
            text: The line.
            at_s: Unix time of what it is about; None: the present.
        """
        if self._quiet:
            return
        line = f"{(at_s or time.time()) - self._began_s:7.2f} s  {text}"
        if self._mode == "line":
            terminal.do(partial(terminal.repeat, f"{printable(line)}\n"))
        else:
            print_foreign(line, to=sys.stdout)

    @property
    def ticker(self) -> Ticker:
        """Returns what shows the line that moves."""
        return self._display.ticker

    def tick(self) -> None:
        """Shows what the job does now, if that is due, and errors that have waited."""
        self._held.tick()
        if self._display.is_due():
            self._display.show(self._progress())
            if self._mode == "log":
                self.ticker.line()

    def _progress(self) -> Trains | str | None:
        """Returns how far training has come, or what is waited for; None: nothing is to be
        shown."""
        if not self.generation:
            names = ", ".join(sorted(self._absent))
            return f"waiting for {names} to load torch" if names else "waiting for the first world"
        if self._in_round:
            return "waiting for the next generation"
        if self.plain:
            return PLAIN
        if not self._session:
            return "waiting for the script to call elasticzero.run"
        if not self._restored:
            return "waiting for the ranks to meet and load their state"
        if self._rate.steps == 0 or self._stepped_s is None:
            return "waiting for the first step"
        if self._mode != "line":  # `_stepped` prints them
            return None
        return Trains(
            step=self.step,
            stepped_s=self._stepped_s,
            total=self._total or None,
            loss=self._loss,
            steps_per_s=self._rate.steps_per_s(),
        )

    def record(self, node: str, event: dict[str, Any]) -> None:
        """Prints one event of one node's log, and what it lets be printed."""
        is_end = event["event"] in ENDS
        if is_end and not self._is_explained(event):
            self._held.release()
        self._print_event(node, event)
        for line in self.islands.lines(node, event) if self.islands is not None else ():
            self.print_line(line, event["time"])
        if is_end:
            self._held.release()

    def _print_event(self, node: str, event: dict[str, Any]) -> None:
        at_s = event["time"]
        match event["event"]:
            case "serving":
                scheme = event.get("scheme", "http")
                self._pages[node] = f"{scheme}://{host_and_port(event['host'], event['port'])}/"
            case "registered":
                self._registered(node, at_s)
            case "round":
                self._in_round = True
            case "world" if event["generation"] > self.generation:
                self._world(event, at_s)
            case "attached":
                self._session, self.plain = True, False
            case "plain":
                self.plain = not self._session
            case "restored" if event["generation"] == self.generation and node == self.training[0]:
                self._restored = True
                phases = f"connect {event['connect_s']:.2f} s, restore {event['restore_s']:.2f} s"
                device = f" on {event['device']}" if event.get("device") else ""
                begins = f"goes on from step {event['step']}" if event["step"] else "begins"
                self.print_line(f"  training {begins}{device} ({phases})", at_s)
            case "data_changed" | "shares_changed" | "residual_lost":
                self.print_line(f"  {event['message']}", at_s)
            case "standing" if not self._said_standing:
                self._said_standing = True
                self.print_line(f"  {event['message']}", at_s)
            case "tracker" if event["opened"] not in self._opened:
                self._print_tracker(event, at_s)
            case "step":
                self._stepped(event, at_s)
            case "log":
                self._loss = event.get("loss", self._loss)
            case "checkpoint" | "tagged" | "saved":
                self._checkpoint(event, at_s)
            case "paced" if differs_much(self._every, event["every"]):
                self._every = event["every"]
                self.print_line(
                    f"  snapshots every {count_text(event['every'], 'step')}: one costs "
                    f"{event['cost_s'] * 1000:.1f} ms, a step {event['step_s'] * 1000:.0f} ms",
                    at_s,
                )
            case "failed" if event["blame"] not in NO_ERRORS:
                show = partial(self._failed, node, event)
                self._held.put(event["message"], show, explains=event["final"])
            case "looked" if event["blame"] == "hung":
                self.print_line(f"{node}: rank {event['rank']} hangs: {event['message']}", at_s)
            case "exit":
                self._stopped |= event.get("outcome") == "stopped"
                if event.get("outcome") == "finished":
                    self._end_reason = event.get("end_reason", "")
                if event["code"] == ExitCode.LEFT:
                    self.print_line(f"{node} has left", at_s)
            case "error":
                self._errors[node] = event

    def _print_tracker(self, event: dict[str, Any], at_s: float) -> None:
        self._opened.update({event["opened"]} - {None})
        self.print_line(f"  {event['error'] or event['opened']}", at_s)

    def _registered(self, node: str, at_s: float) -> None:
        self._absent.discard(node)
        self.print_line(f"{node} is here", at_s)

    def _is_explained(self, event: dict[str, Any]) -> bool:
        """Returns whether an event tells of another error than those that are held."""
        text = event.get("message") or event.get("reason", "")
        return " failed" in text and not self._held.has(text)

    def _failed(self, node: str, event: dict[str, Any]) -> None:
        text = self._printed.text(
            f"rank {event['rank']} on {node}",
            event["message"],
            event["traceback"],
            in_one_line=event["blame"] == "memory" or self._muted,
        )
        self.print_line(text, event["time"])

    def _checkpoint(self, event: dict[str, Any], at_s: float) -> None:
        match event["event"]:
            case "checkpoint":
                self._saved_step = event["step"]
                tags = f", with the tag {', '.join(event['tags'])}" if event.get("tags") else ""
                text = f"checkpoint of step {event['step']} written in {event['seconds']:.2f} s"
                self.print_line(f"  {text}{tags}", at_s)
            case "tagged":
                text = tagged_text(event["step"], event["tags"], event["error"])
                self.print_line(f"  {text}", at_s)
            case "saved" if event["error"] is not None and event["step"] not in self._unsaved:
                self._unsaved.add(event["step"])
                text = f"the checkpoint of step {event['step']} was not saved: {event['error']}"
                self.print_line(f"  {text}", at_s)

    def _world(self, event: dict[str, Any], at_s: float) -> None:
        first = not self.generation
        self.generation = event["generation"]
        self.training = event["members"]
        self.lineage.world(self.generation, event["resume_step"])
        self._restored, self._in_round = event["tier"] == "live", False
        if event["tier"] != "live":
            self._rate.begin(at_s)
        place = {
            "ram": f"step {event['resume_step']} from memory",
            "storage": f"step {event['resume_step']} from storage",
            "live": f"on from step {event['resume_step']} without a stop",
            "fresh": fresh_start(self.generation, session=self._session),
        }
        lost = self.lineage.lost(self.generation)
        are = "is" if lost == 1 else "are"
        again = f", {count_text(lost, 'step')} {are} computed again" if lost else ""
        if self.islands is not None:
            return
        reason = event["reason"]
        if (damage := event.get("skipped")) is not None:
            reason = damage["cause"]
            line = skipped_checkpoint_line(damage["step"], damage["message"], event["resume_step"])
            self.print_line(line, at_s)
        self.print_line(
            f"generation {self.generation}: {count_text(event['world_size'], 'rank')} on "
            f"{', '.join(self.training)} ({self._printed.shortened(reason)}); "
            f"{place[event['tier']]}{again}",
            at_s,
        )
        if first:
            self._page(at_s)

    def _page(self, at_s: float) -> None:
        """Prints once where the status page is."""
        page = next((self._pages[n] for n in self.training if n in self._pages), None)
        if page is not None:
            self.print_line(f"status page: {page} (with the token: {self._how})", at_s)

    def reached(self, step: int) -> None:
        """Notes that all ranks are at the boundary of a step, of which no event has come yet."""
        self.step = max(self.step, step)

    def _stepped(self, event: dict[str, Any], at_s: float) -> None:
        generation, step = event["generation"], event["step"]
        first = generation not in self.lineage.reached
        self.lineage.stepped(generation, step)
        self.step = max(self.step, step)
        self._total = max(self._total, event.get("total", 0))
        if first and generation > 1:
            self._print_pause(at_s)
        self._stepped_s = at_s
        self._rate.stepped(at_s)
        if self._mode == "log" and at_s - self._shown_s >= PROGRESS_EVERY_S:
            self._shown_s = at_s
            self.print_line(f"  {steps_text(step, self._total, self._loss)}", at_s)

    def _print_pause(self, at_s: float) -> None:
        """Prints for how long training paused, at the first step of a new generation."""
        if self._killed_s is not None:
            self.print_line(f"  next step done {at_s - self._killed_s:.2f} s after the kill", at_s)
            self._killed_s = None
        elif self._stepped_s is not None:
            self.print_line(f"  training paused for {at_s - self._stepped_s:.2f} s", at_s)

    def report_fault(self, what: str, node: str, at_s: float) -> None:
        """Prints that a fault was injected.

        Args:
            what: The kind of fault.
            node: The node that the fault hits.
            at_s: Time of the fault.
        """
        descriptions = {
            "kill-node": f"SIGKILL to every process of {node}",
            "kill-worker": f"SIGKILL to a worker of {node}",
            "drain": f"SIGTERM to {node}: it leaves at the next step",
            "join": f"{node} comes",
        }
        where = f"step {self.step}: " if self._session else ""
        self.print_line(f"{where}{descriptions[what]}", at_s)
        if what in ("kill-node", "kill-worker"):
            self._killed_s = at_s

    def report_waiting_fault(self, fault: str) -> None:
        """Prints once that a fault waits for a step that this script does not make."""
        if fault not in self._reported_faults:
            self._reported_faults.add(fault)
            self.print_line(
                f"--fault {fault} waits: no worker has called elasticzero.run yet, and without "
                "that no steps are seen; for a script that never does, give a time, as in "
                "kill-node@30s"
            )

    def report_missed_fault(self, fault: str, *, timed: bool) -> None:
        """Prints that a fault had not been injected when the job ended.

        Args:
            fault: The text that the user gave.
            timed: Whether it was to come at a time, and not at a step.
        """
        why = f"the job ended after step {self.step}"
        if not self._session:
            steps = "the script never called elasticzero.run, so no steps were seen"
            why = "the job ended before it" if timed else steps
        self.print_line(f"--fault {fault} was not injected: {why}")

    def quote(self, nodes: Sequence[str]) -> None:
        """Prints the error with which the agent of the first of these nodes has ended.

        A traceback is printed once. Nor is the error itself repeated, if standard output and
        standard error lead to the same place.

        Args:
            nodes: Names of the nodes.
        """
        event = next((self._errors[node] for node in nodes if node in self._errors), None)
        if event is None:
            return
        message, trace = event["message"], event.get("traceback", "").rstrip()
        if self._printed.has_traceback(message):
            trace = ""
        if is_one_place():
            message = self._printed.shortened(message, ABOVE)
        error = f"error: {message}".replace("\n", "\n  ")  # so that no line passes for our own
        text = "\n".join(filter(None, [error, trace, event["details"]]))
        terminal.log_line(f"{printable(text)}\n")

    def interrupt(self) -> None:
        """Prints what is left of a job that is interrupted, if its script has a session."""
        if self._session:
            left = "no checkpoint was written"
            if self._saved_step is not None:
                left = f"the newest checkpoint is that of step {self._saved_step}"
            self.print_line(f"interrupted after step {self.step}; {left}")

    def close(self, code: ExitCode) -> None:
        generations = count_text(len(self.lineage.resume_steps), "generation")
        again = count_text(self.lineage.recomputed, "step")
        if code == ExitCode.DONE:
            how = "stopped" if self._stopped else "done"
            if not self._session:
                self.print_line(f"{how}: {generations}; {PLAIN_END}")
                return
            why = f"; {self._end_reason}" if self._end_reason else ""
            begun_at = max(self.lineage.resume_steps.values(), default=0)
            done = count_text(max(self.step, begun_at), "step")
            done += " (none were left)" if self.step < begun_at else ""
            what = f"{done}, {generations}, {again} recomputed"
            if self.islands is not None:
                what = self.islands.end()
            self.print_line(f"{how}: {what}{why}")
        else:
            self.print_line(f"the job ended with exit code {int(code)}; logs in {self._log_dir}")


def _program() -> str:
    """Returns the word by which a shell finds this program."""
    if shutil.which("elasticzero") is not None:
        return "elasticzero"
    return os.path.relpath(Path(sys.executable).with_name("elasticzero"))
