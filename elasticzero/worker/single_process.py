"""Trains on one process, without an agent: `python train.py`.

The process reads the options that concern it from the environment, as `elasticzero run` does. It
goes on from the newest good checkpoint, writes checkpoints itself while training waits, and prints
its progress. Ctrl-C and SIGTERM end training at the next boundary, with the state saved; a second
Ctrl-C ends it at once.
"""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from types import FrameType
from typing import Any, NoReturn

from elasticzero.checkpoint.format.manifest import Manifest
from elasticzero.checkpoint.io.writer import TensorPiece, write_checkpoint
from elasticzero.checkpoint.steps.catalog import check_writable, step_error_text, steps
from elasticzero.checkpoint.steps.retention import RetentionPolicy, apply_retention
from elasticzero.checkpoint.steps.tags import set_tags
from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.errors import CheckpointDamaged, ElasticZeroError, ExitCode, UserError, one_line
from elasticzero.ipc.agent_client import STANDALONE, AgentClient, GenerationEnded
from elasticzero.ipc.assignment import Resume
from elasticzero.ipc.messages import (
    FLAG_LEAVE,
    FLAG_STOP,
    DataChanged,
    Finished,
    Logged,
    LoopExited,
    Message,
    Restored,
    Stepped,
    TagStep,
)
from elasticzero.ipc.thread_location import mistake_place
from elasticzero.options.resolve import (
    check_checkpoint_options,
    parse_options,
    values_in,
    with_source,
)
from elasticzero.options.settings import TrainingSettings
from elasticzero.options.training import TRAINING_OPTIONS
from elasticzero.serialization import field_values
from elasticzero.text import count_text, print_foreign
from elasticzero.training.training_state import TrainingState

PROGRESS_EVERY_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(TrainingSettings):
    """Holds the training options that concern a single process."""

    strategy: str = "ddp"
    keep: RetentionPolicy = field(default_factory=RetentionPolicy)
    strict: bool = False
    """True: raise an error instead of skipping a damaged checkpoint."""


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Reads the training options from the environment, as `elasticzero run` does.

    Raises `UserError`, in the launcher's words, for an invalid value. An empty one counts as unset.
    """
    values, sources = values_in(TRAINING_OPTIONS, environment)
    try:
        parsed = parse_options(TRAINING_OPTIONS, values)
        keep = RetentionPolicy(**parsed.keep)
        check_checkpoint_options(parsed)
    except UserError as error:
        raise with_source(error, sources) from None
    if parsed.training.rolls_back:
        names = ("on_nonfinite", "on_spike")
        variables = " and ".join(o.variable for o in TRAINING_OPTIONS if o.name in names)
        raise UserError(
            f"{variables} must stop or skip in a process without an agent, which holds no state to "
            "go back to; for rollback start it by elasticzero run"
        )
    return Settings(
        strategy=parsed.policy["strategy"],
        keep=keep,
        strict=parsed.policy["strict_checkpoint"],
        **field_values(parsed.training),
    )


class Console:
    """Prints the progress of training, a line every few seconds."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._shown_s = 0.0
        self._loss: float | None = None
        self._pending_step: Stepped | None = None

    def print_line(self, text: str) -> None:
        print_foreign(f"[{time.strftime('%H:%M:%S')}] {text}")

    def record(self, message: Message) -> None:
        """Records a message that a worker would send to its agent."""
        match message:
            case Stepped():
                self._show()
                if message.at_s - self._shown_s >= PROGRESS_EVERY_S:
                    self._pending_step = message
            case Logged(step=step, scalars=scalars):
                self._loss = scalars.get("loss", self._loss)
                if (
                    "loss" in scalars
                    and self._pending_step is not None
                    and step >= self._pending_step.step
                ):
                    self._show()
            case LoopExited():
                self._show()
            case DataChanged(message=text):
                self.print_line(text)
            case Finished(step=step, reason=reason):
                why = f": {reason}" if reason else ""
                took_s = time.monotonic() - self._began_s
                loss = "" if self._loss is None else f"  loss {self._loss:.4f}"
                self.print_line(f"finished after step {step} in {took_s:.1f} s{loss}{why}")
            case _:
                pass

    def _show(self) -> None:
        """Prints the progress line if it is due."""
        if (step := self._pending_step) is None:
            return
        self._pending_step, self._shown_s = None, time.monotonic()
        of = f"/{step.total}" if step.total else ""
        loss = "" if self._loss is None else f"  loss {self._loss:.4f}"
        self.print_line(f"step {step.step}{of}{loss}")


class LocalLink(AgentClient):
    """Stands in for `AgentClient` in a process without an agent."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.console = Console()
        self._damaged_steps: set[int] = set()
        where = settings.checkpoint_dir
        if where is not None:
            check_writable(open_directory(where))
        assignment = replace(
            STANDALONE,
            token=f"g{STANDALONE.generation:06d}-{secrets.token_hex(8)}",
            strategy=settings.strategy,
            resume=self._newest_good(),
            **{f.name: getattr(settings, f.name) for f in fields(TrainingSettings)},
        )
        super().__init__(None, assignment)

    def send(self, message: Message) -> None:
        if isinstance(message, Restored):
            self._print_start(message)
        if isinstance(message, TagStep):
            self.tags_missing = 0
            self._set_tags(message.step, message.tags)
        self.console.record(message)

    def _set_tags(self, step: int, tags: Collection[str]) -> None:
        """Makes tags name a step that is saved; prints what prevents it."""
        if not tags or (where := self._settings.checkpoint_dir) is None:
            return
        names = ", ".join(sorted(tags))
        try:
            set_tags(open_directory(where), step, tags)
            self.console.print_line(f"the checkpoint of step {step} has the tag {names}")
        except (ElasticZeroError, OSError) as error:
            self.console.print_line(f"step {step} has no tag {names}: {one_line(error)}")

    def _print_start(self, restored: Restored) -> None:
        settings, step = self._settings, restored.step
        origin = f"the checkpoint of step {step}" if restored.tier == "storage" else "the beginning"
        saved = "nothing is saved: set ELASTICZERO_CHECKPOINT_DIR to have checkpoints"
        if settings.checkpoint_dir is not None:
            every = settings.checkpoint_every
            how = f"every {count_text(every, 'step')} and " if every else ""
            saved = f"checkpoints {how}at the end in {settings.checkpoint_dir}"
        self.console.print_line(f"training on one process, from {origin}; {saved}")

    def _newest_good(self) -> Resume:
        """Returns the state to start from, which is the newest good checkpoint.

        Raises `CheckpointDamaged` if there are several and none is good, or if `strict` forbids
        skipping one.
        """
        where, damage = self._settings.checkpoint_dir, ""
        for info in steps(open_directory(where)) if where is not None else []:
            why = (
                "it was found damaged"
                if info.step in self._damaged_steps
                else step_error_text(info.storage)
            )
            if why is not None:
                damage = damage or f"the checkpoint of step {info.step} is damaged: {why}"
                continue
            if damage and self._settings.strict:
                raise CheckpointDamaged(
                    f"{damage}; ELASTICZERO_STRICT_CHECKPOINT forbids going on from step "
                    f"{info.step}"
                )
            if damage:
                self.console.print_line(f"{damage}; the one of step {info.step} is used")
            return Resume(tier="storage", step=info.step)
        if damage:
            raise CheckpointDamaged(
                f"{damage}; no other is good; mend it, or give an empty directory to begin anew"
            )
        return Resume(tier="fresh")

    def restore(self, training: TrainingState) -> int:
        """Loads the newest checkpoint that proves good when it is read; returns the bytes read."""
        while True:
            try:
                return training.restore()
            except CheckpointDamaged as error:
                self._fall_back(error)

    def _fall_back(self, error: CheckpointDamaged) -> None:
        """Selects an older checkpoint than the one that was read and found damaged."""
        resume = self.assignment.resume
        if resume.tier != "storage":
            raise error
        self.console.print_line(one_line(error))
        self._damaged_steps.add(resume.step)
        self.assignment = replace(self.assignment, resume=self._newest_good())

    def save(self, manifest: Manifest, pieces: list[TensorPiece]) -> None:
        """Writes a checkpoint, while training waits; raises `ElasticZeroError`."""
        assert self._settings.checkpoint_dir is not None
        directory = open_directory(self._settings.checkpoint_dir)
        written = write_checkpoint(directory, manifest, 0, pieces)
        if written.committed:
            text = f"checkpoint of step {manifest.step} written in {written.seconds:.2f} s"
            self.console.print_line(text)
        self._set_tags(manifest.step, manifest.tags)
        if not written.committed:
            return
        tidied = apply_retention(
            directory, manifest, self._settings.keep, bad_steps=self._damaged_steps
        )
        for problem in tidied.problems[:3]:
            self.console.print_line(f"not removed: {problem}")

    @contextmanager
    def interruptions(self, boundary: Callable[[], TrainingState | None]) -> Iterator[None]:
        """Makes Ctrl-C and SIGTERM end training at the next boundary if state exists by then.

        A script's own handlers stay.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        wishes: dict[int, int] = {signal.SIGINT: FLAG_STOP, signal.SIGTERM: FLAG_LEAVE}
        usual: dict[int, Any] = {
            signal.SIGINT: signal.default_int_handler,
            signal.SIGTERM: signal.SIG_DFL,
        }
        process = os.getpid()

        def note(number: int, frame: FrameType | None) -> None:
            at, wish = boundary(), wishes[number]
            in_loop = at is not None and at.at.in_loop and self._settings.checkpoint_dir is not None
            if os.getpid() != process or not in_loop or self.flags & wish:
                signal.signal(number, usual[number])
                os.kill(os.getpid(), number)
                return
            self.flags |= wish
            again = "; Ctrl-C again ends it at once" if number == signal.SIGINT else ""
            self.console.print_line(f"training ends after this step, and is saved{again}")

        taken = [number for number in wishes if signal.getsignal(number) == usual[number]]
        for number in taken:
            signal.signal(number, note)
        try:
            yield
        finally:
            for number in taken:
                signal.signal(number, usual[number])

    def end(self, error: BaseException, at: TrainingState | None) -> NoReturn:
        """Ends the process after an error left the training function.

        It raises `SystemExit` for an error that is not the script's own.
        """
        if isinstance(error, (GenerationEnded, KeyboardInterrupt)):
            asked = isinstance(error, GenerationEnded)
            left = asked and not self.flags & FLAG_STOP
            code = ExitCode.LEFT if left else ExitCode.INTERRUPTED
            try:
                if asked and at is not None:
                    at.stager.finish(at.boundary_copy())
            except ElasticZeroError as failed:
                self.console.print_line(f"error: {one_line(failed)}")
            step = at.step if at is not None else 0
            self.console.print_line(f"interrupted after step {step}; {self._resume_hint()}")
            raise SystemExit(int(code)) from error
        if isinstance(error, ElasticZeroError):
            print_foreign(f"error: {error}{mistake_place(error)}")
            raise SystemExit(int(error.exit_code)) from error
        raise error

    def _resume_hint(self) -> str:
        """Describes what the next start of the same command does."""
        where = self._settings.checkpoint_dir
        if where is None:
            return "nothing was saved: set ELASTICZERO_CHECKPOINT_DIR to have checkpoints"
        try:
            newest = self._newest_good()
        except ElasticZeroError as error:
            return one_line(error)
        if newest.tier == "fresh":
            return f"there is no checkpoint in {where}"
        return f"the same command goes on from the checkpoint of step {newest.step}"


def begin(environment: Mapping[str, str]) -> LocalLink:
    """Returns the `LocalLink` of a process that no agent has started; raises `ElasticZeroError`."""
    if environment.get("WORLD_SIZE", "1") not in ("", "1") and "RANK" in environment:
        raise UserError(
            f"this is one of {environment['WORLD_SIZE']} processes that torchrun or another "
            "launcher has started, and each would train alone: start the script by `elasticzero "
            "run` with the same options"
        )
    return LocalLink(read_settings(environment))
