"""Implements `run`, which hands a training script over to the session, generation by generation."""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import ParamSpec

from elasticzero.errors import ElasticZeroError, UserError
from elasticzero.ipc.agent_client import AgentClient, exit_now
from elasticzero.ipc.channel import CHANNEL_FD_VARIABLE
from elasticzero.ipc.thread_location import place_of
from elasticzero.session import Session
from elasticzero.text import print_foreign
from elasticzero.training import argument_checks
from elasticzero.worker import single_process
from elasticzero.worker.generation import Generation
from elasticzero.worker.process_reuse import (
    EndedGeneration,
    ProcessBaseline,
    prepare_for_next_generation,
)

Taken = ParamSpec("Taken")


def _ending_misuse(call: Callable[Taken, None]) -> Callable[Taken, None]:
    """Returns `run` with a check of its arguments, which ends a process without an agent in one
    line."""
    checked = argument_checks.checked("elasticzero.run", call)

    @functools.wraps(call)
    def run_checked(*args: Taken.args, **named: Taken.kwargs) -> None:
        try:
            checked(*args, **named)
        except UserError as error:
            if CHANNEL_FD_VARIABLE in os.environ:
                raise
            print_foreign(f"error: {error} ({place_of(sys._getframe())})")
            raise SystemExit(int(error.exit_code)) from error

    return run_checked


@_ending_misuse
def run(train: Callable[[Session], None], *, keep_process: bool = True) -> None:
    """Trains: calls `train` with the session of this process's generation.

    Under an agent the process ends here when the generation does, and `train` is entered again in
    another process, or with --keep-workers in the same one. Where a node leaves as planned, the
    loop of the others may go on instead, as `session.on_world_change` describes. The lines after
    `run` are reached once training has finished.

    Without an agent this trains on one process. It prints its progress and saves as
    ELASTICZERO_CHECKPOINT_DIR and its like say. It prints an error of this project's in one line
    and raises `SystemExit` with its exit code, and so it does at Ctrl-C.

    Args:
        train: the training function.
        keep_process: False if `train` uses what was made outside of it, as a model, so that
            --keep-workers must not enter it again in the same process.
    """
    link = AgentClient.from_environment()
    if link.standalone:
        _train_standalone(train)
        return
    baseline = ProcessBaseline()
    while (ended := _generation(link, train)) is not None:
        if not keep_process:
            exit_now(ended.code)
        prepare_for_next_generation(link, ended, baseline)


@_ending_misuse
def run_framework(train: Callable[[Session], None], framework: str) -> None:
    """Does what `run` does for a framework whose loop keeps what follows from the number of ranks,
    and a model that was made outside of it: each change of the world enters `train` anew, in
    another process.

    Args:
        train: the training function.
        framework: the framework's name.
    """
    link = AgentClient.from_environment()
    if link.standalone:
        _train_standalone(train)
    elif (ended := _generation(link, train, framework)) is not None:
        exit_now(ended.code)


def _generation(
    link: AgentClient, train: Callable[[Session], None], framework: str = ""
) -> EndedGeneration | None:
    """Runs one generation; returns None once training has finished.

    Args:
        link: The client of the agent.
        train: The training function.
        framework: The framework that trains; empty: the script does.
    """
    generation = Generation(link, framework)
    try:
        generation.enter()
        _enter(train, generation)
        generation.finish()
    except BaseException as error:  # noqa: BLE001 - the end of a generation: told to the agent
        return generation.end(error)
    generation.close()
    return None


def _train_standalone(train: Callable[[Session], None]) -> None:
    """Trains on this process alone, which no agent has started."""
    link = _standalone_link()
    generation = Generation(link)
    with link.interruptions(lambda: generation.training):
        try:
            generation.enter()
            _enter(train, generation)
            generation.finish()
        except BaseException as error:  # noqa: BLE001 - raised again there
            link.end(generation.explained(error), generation.training)


def _standalone_link() -> single_process.LocalLink:
    try:
        return single_process.begin(os.environ)
    except ElasticZeroError as error:
        print_foreign(f"error: {error}")
        raise SystemExit(int(error.exit_code)) from error


def _enter(train: Callable[[Session], None], generation: Generation) -> None:
    try:
        train(Session(generation))
    except SystemExit as exit_:
        if exit_.code not in (None, 0):
            raise


class OpenRun:
    """Runs one generation of a script that has no training function: from here to `finish`.

    An error that ends the script, or the end of the generation, ends the process; a script that
    ends otherwise has finished training. As with `run`, the script runs in each generation.
    """

    def __init__(self) -> None:
        link = AgentClient.from_environment()
        self._open, self._stack = True, ExitStack()
        if link.standalone:
            link = _standalone_link()
        self._generation = Generation(link, "a script without a training function")
        if isinstance(link, single_process.LocalLink):
            self._stack.enter_context(link.interruptions(lambda: self._generation.training))
        self._hook, sys.excepthook = sys.excepthook, self._end
        atexit.register(self.finish)
        self._generation.enter()
        self.session = Session(self._generation)

    def finish(self) -> None:
        """Saves what is not saved yet, and waits for the other ranks; the script goes on alone."""
        if not self._open:
            return
        try:
            self._generation.finish()
        except BaseException as error:  # noqa: BLE001 - the end of a generation: told to the agent
            self._end(type(error), error, error.__traceback__)
        self._close()
        self._generation.close()

    def _close(self) -> None:
        self._open, sys.excepthook = False, self._hook
        self._stack.close()

    def _end(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Ends the generation after an error left the script; the hook for such errors.

        Args:
            kind: The error's class, as `sys.excepthook` gets it.
            error: The error.
            trace: The error's traceback, for the hook that was set before.
        """
        if not self._open:
            self._hook(kind, error, trace)
            return
        self._close()
        link = self._generation.link
        if not isinstance(link, single_process.LocalLink):
            exit_now(self._generation.end(error).code)
        try:
            link.end(self._generation.explained(error), self._generation.training)
        except SystemExit as stop:
            exit_now(stop.code if isinstance(stop.code, int) else 1)
        except BaseException as raised:  # noqa: BLE001 - the script's own error
            self._hook(type(raised), raised, raised.__traceback__)
            exit_now(1)
