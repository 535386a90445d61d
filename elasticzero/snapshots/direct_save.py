"""Saves without shared memory: a rank writes its shard to storage while training waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from elasticzero.checkpoint.format.finite import not_finite_error
from elasticzero.checkpoint.format.manifest import Manifest, to_json, with_own_file
from elasticzero.checkpoint.format.shards import write_shard
from elasticzero.checkpoint.io.writer import TensorPiece, shard_bytes
from elasticzero.checkpoint.steps import catalog, commit
from elasticzero.checkpoint.steps.owner import taken_by_later_run
from elasticzero.checkpoint.steps.retention import make_room
from elasticzero.checkpoint.storage.base import Directory, out_of_space
from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.errors import ElasticZeroError, NotFinite, StorageError, one_line
from elasticzero.ipc.agent_client import AgentClient
from elasticzero.ipc.assignment import Assignment
from elasticzero.state.model import all_finite

JOIN_S = 0.05
"""Pause between two checks of a thread or of the agent, in seconds."""


def write_directly(
    directory: Directory,
    assignment: Assignment,
    manifest: Manifest,
    pieces: list[TensorPiece],
    trained: Collection[str],
) -> str:
    """Writes this rank's shard to storage, unless a later run of the job has taken the directory.

    If storage is full, checkpoints that retention may remove make room first.

    Args:
        directory: The checkpoint directory.
        assignment: This rank's place and settings.
        manifest: The manifest of the step, in which this rank's file is entered.
        pieces: The tensors that this rank writes.
        trained: Names of the tensors that training changes.

    Returns:
        This rank's own manifest as JSON, by which rank 0's agent commits.

    Raises:
        NotFinite: Trained tensors are not finite.
        StorageError: The shard cannot be written, or a later run has the directory.
        OSError: The shard cannot be written.
    """
    rank = assignment.rank

    def write() -> str:
        check_finite(assignment, manifest, pieces, trained)
        if reason := taken_by_later_run(directory, assignment.job, assignment.run):
            raise StorageError(f"step {manifest.step} is not saved: {reason}")
        storage = commit.prepare(directory, manifest.step)
        file = write_shard(storage, manifest, rank, shard_bytes(manifest, rank, pieces))
        return to_json(with_own_file(manifest, rank, file)).decode()

    try:
        return write()
    except StorageError as error:
        if not out_of_space(error) or not make_room(directory, manifest).files:
            raise
        return write()


def write_while_waiting(
    link: AgentClient, manifest: Manifest, pieces: list[TensorPiece], trained: Collection[str]
) -> str:
    """Writes this rank's shard as `write_directly` does, unless the generation ends meanwhile.

    Args:
        link: The client of the agent, which says whether the generation has ended.
        manifest: The manifest of the step.
        pieces: The tensors that this rank writes.
        trained: Names of the tensors that training changes.

    Returns:
        What `write_directly` returns.
    """
    assignment = link.assignment
    assert assignment.checkpoint_dir is not None
    directory = open_directory(assignment.checkpoint_dir)
    with link.busy("writing a checkpoint"):
        return run_interruptibly(
            lambda: write_directly(directory, assignment, manifest, pieces, trained), link.check
        )


def check_finite(
    assignment: Assignment,
    manifest: Manifest,
    pieces: list[TensorPiece],
    trained: Collection[str],
) -> None:
    """Checks that trained tensors are finite, since no agent checks these pieces.

    Args:
        assignment: This rank's place and settings, for the message.
        manifest: The manifest of the step.
        pieces: The tensors that this rank writes.
        trained: Names of the tensors that are checked.

    Raises:
        NotFinite: One is not finite; the error names the newest good checkpoint.
    """
    checked = (piece for piece in pieces if piece.name in trained)
    bad = [piece.name for piece in checked if not all_finite(piece.data)]
    if bad:
        text = not_finite_error(f"step {manifest.step} on rank {assignment.rank}", bad)
        newest = newest_good_checkpoint(assignment.checkpoint_dir)
        raise NotFinite(f"{text}; {newest}; {NotFinite.ADVICE}")


def newest_good_checkpoint(directory: str | None) -> str:
    """Describes the newest good checkpoint in words; None: no checkpoints are written."""
    if directory is None:
        return "there is no --checkpoint-dir, so the state of no step is kept"
    try:
        step = catalog.newest_good(open_directory(directory))
    except (ElasticZeroError, OSError) as error:
        return f"{directory} cannot be read: {one_line(error)}"
    if step is None:
        return f"there is no good checkpoint in {directory}"
    return f"the newest good checkpoint is that of step {step} in {directory}"


def run_interruptibly(work: Callable[[], str], check: Callable[[], None]) -> str:
    """Runs `work()` in a separate thread while `check` may raise here, which abandons the
    thread."""
    result: list[str] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            result.append(work())
        except BaseException as error:  # noqa: BLE001 - the top of a thread: handed to the caller
            errors.append(error)

    thread = threading.Thread(target=body, name="elasticzero-checkpoint", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(JOIN_S)
        if thread.is_alive():
            check()
    if errors:
        raise errors[0]
    return result[0]
