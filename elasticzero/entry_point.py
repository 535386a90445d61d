"""Implements `run`, which hands a training script over to the session, generation by generation."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from elasticzero.errors import ElasticZeroError
from elasticzero.ipc.agent_client import AgentClient, exit_now
from elasticzero.session import Session
from elasticzero.worker import single_process
from elasticzero.worker.generation import Generation
from elasticzero.worker.process_reuse import (
    EndedGeneration,
    ProcessBaseline,
    prepare_for_next_generation,
)


def run(train: Callable[[Session], None], *, keep_process: bool = True) -> None:
    """Trains: calls `train` with the session of this process's generation.

    Under an agent the process ends here when the generation does, and `train` is entered again in
    another process, or with --keep-workers in the same one. The lines after `run` are reached once
    training has finished.

    Without an agent this trains on one process. It prints its progress and saves as
    ELASTICZERO_CHECKPOINT_DIR and its like say. It prints an error of this project's in one line
    and raises `SystemExit` with its exit code, and so it does at Ctrl-C.

    train: the training function. keep_process: False if `train` uses what was made outside of it,
    as a model, so that --keep-workers must not enter it again in the same process.
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


def _generation(link: AgentClient, train: Callable[[Session], None]) -> EndedGeneration | None:
    """Runs one generation; returns None once training has finished."""
    generation = Generation(link)
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
    try:
        link = single_process.begin(os.environ)
    except ElasticZeroError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(int(error.exit_code)) from error
    generation = Generation(link)
    with link.interruptions(lambda: generation.training):
        try:
            generation.enter()
            _enter(train, generation)
            generation.finish()
        except BaseException as error:  # noqa: BLE001 - raised again there
            link.end(error, generation.training)


def _enter(train: Callable[[Session], None], generation: Generation) -> None:
    try:
        train(Session(generation))
    except SystemExit as exit_:
        if exit_.code not in (None, 0):
            raise
