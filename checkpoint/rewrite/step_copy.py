"""Writes a step from a source: ranks in parallel, in bounded memory, safe to interrupt.

A step that is written again under the same token continues where it stopped: a rank's file with a
checksum file beside it is whole and durable, and is not written again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from elasticzero.checkpoint.format.checksums import read_sums
from elasticzero.checkpoint.format.layout import TensorSpec
from elasticzero.checkpoint.format.manifest import Manifest
from elasticzero.checkpoint.format.names import SUMS_SUFFIX, is_own_partial
from elasticzero.checkpoint.format.shards import shard_header, shard_specs, write_shard
from elasticzero.checkpoint.format.strict_json import check_depth
from elasticzero.checkpoint.format.validation import check_nesting
from elasticzero.checkpoint.rewrite.progress import ProgressBar
from elasticzero.checkpoint.rewrite.sources import OpenSource, TensorSource
from elasticzero.checkpoint.steps import catalog, commit
from elasticzero.checkpoint.steps.retention import clean_up_after_manual_save
from elasticzero.checkpoint.storage.base import Directory, Storage
from elasticzero.checkpoint.storage.urls import open_directory, open_storage
from elasticzero.errors import CheckpointDamaged, ElasticZeroError, UserError
from elasticzero.spans import Span

DEFAULT_BUFFER_BYTES = 64 << 20
LEAST_BUFFER_BYTES = 4 << 20
"""Minimum size of the buffer of one worker."""
_MOST_WORKERS = 8
_WORKERS_PER_CORE = 2
"""Number of workers for each core. A rank's file is one job: with as many workers as cores, all but
one core would often be idle while the last file is written. On a disk, a worker waits most of the
time."""

CopyJob = Callable[[TensorSource], None]
"""Writes one file, and reads the tensors from the source that it is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOptions:
    """Limits the memory and threads that a copy may use."""

    buffer_bytes: int = DEFAULT_BUFFER_BYTES
    """Size of the buffers of all workers together."""
    workers: int | None = None
    """Number of threads; None: two for each core, at most 8."""
    progress: ProgressBar = field(default_factory=ProgressBar)

    def __post_init__(self) -> None:
        if self.buffer_bytes < LEAST_BUFFER_BYTES:
            raise UserError(
                f"a buffer of {self.buffer_bytes} bytes is too small: give 4 MiB or more"
            )
        if self.workers is not None and self.workers < 1:
            raise UserError(f"{self.workers} workers: give 1 or more")

    def threads(self, jobs: int) -> int:
        """Returns the number of threads for this many jobs."""
        cores = len(os.sched_getaffinity(0))
        most = self.workers or min(_MOST_WORKERS, _WORKERS_PER_CORE * cores)
        return max(1, min(jobs, most, self.buffer_bytes // LEAST_BUFFER_BYTES))


class _Cancelled(Exception):
    """Reports that another job failed, or that the user interrupted the copy."""


class _CountedSource:
    """Counts the bytes that are read from a source, and can stop the reading."""

    def __init__(self, inner: TensorSource, progress: ProgressBar, stop: threading.Event) -> None:
        self._inner = inner
        self._progress = progress
        self._stop = stop

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return self._inner.specs

    def chunks(self, name: str, span: Span) -> Iterator[memoryview]:
        for chunk in self._inner.chunks(name, span):
            if self._stop.is_set():
                raise _Cancelled
            yield chunk
            self._progress.add(len(chunk))


def run_jobs(jobs: Sequence[CopyJob], open_source: OpenSource, copy_options: CopyOptions) -> None:
    """Runs the jobs in several threads.

    When one fails, or at Ctrl-C, the others stop at their next chunk and the failure is raised.

    Args:
        jobs: Jobs, each of which writes one file.
        open_source: Opens the source for each job, with a share of the buffers.
        copy_options: Memory, threads and progress of the copy.
    """
    threads = copy_options.threads(len(jobs))
    stop = threading.Event()

    def run(job: CopyJob) -> None:
        job(
            _CountedSource(
                open_source(copy_options.buffer_bytes // threads), copy_options.progress, stop
            )
        )

    if threads == 1:
        for job in jobs:
            run(job)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="checkpoint-copy") as pool:
        running = [pool.submit(run, job) for job in jobs]
        try:
            for done in as_completed(running):
                done.result()
        except BaseException:
            stop.set()
            for future in running:
                future.cancel()
            raise


@contextmanager
def new_directory(url: str) -> Iterator[Storage]:
    """Yields a new or empty directory to write files into, and restores it after a failure.

    Partial files of a process that was killed do not make a directory non-empty; they are removed.
    """
    storage = open_storage(url)
    names = storage.names()
    partial = [name for name in names if is_own_partial(name)]
    if len(partial) == len(names):
        for left in partial:
            storage.remove(left)
    else:
        raise UserError(f"{storage.where} is not empty: give a new directory")
    parent, _, name = storage.where.rpartition("/")
    directory = open_directory(parent or "/")
    is_new = name not in directory.names()
    if is_new:
        directory.make(name)
    try:
        yield storage
    except BaseException:
        with suppress(ElasticZeroError, OSError):
            for written in storage.names():
                storage.remove(written)
            if is_new:
                directory.remove(name)
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyResult:
    """Describes a step that a copy wrote, or found already written."""

    where: str
    step: int
    world_size: int
    bytes: int
    """Size of all rank files."""
    kept: int = 0
    """Number of rank files that an earlier, interrupted run had finished."""
    already: bool = False
    """True if the whole step was committed before."""


def write_step(
    directory: Directory,
    draft: Manifest,
    open_source: OpenSource,
    copy_options: CopyOptions,
    *,
    resumable: bool = False,
) -> CopyResult:
    """Writes every rank's file of a step from a source, then commits the step.

    A failure leaves nothing behind.

    Args:
        directory: The checkpoint directory.
        draft: As for `write_checkpoint`; every tensor in it is in the source.
        open_source: Opens the source once for each thread.
        copy_options: Memory, threads and progress of the copy.
        resumable: The token determines all bytes, so finished files stay when the user interrupts
            the copy.

    Raises:
        UserError: The directory has another checkpoint of that step.
    """
    catalog.check_writable(directory)
    try:
        check_depth(draft.state)
        check_nesting(draft)
    except ValueError as error:
        raise UserError(
            f"step {draft.step} cannot be written to {directory.where}: {error}"
        ) from None
    storage = commit.prepare(directory, draft.step)
    if commit.is_good(storage):
        return _existing_result(storage, draft)
    digest = draft.layout.digest()
    world = draft.layout.world_size
    names = set(storage.names())
    missing = [rank for rank in range(world) if not _finished(storage, names, draft, rank, digest)]
    kept = set(range(world)).difference(missing)
    copy_options.progress.expect(
        sum(spec.nbytes for spec in draft.layout.tensors.values())
        - sum(spec.nbytes for rank in kept for spec in shard_specs(draft, rank).values())
    )
    try:
        run_jobs([_rank_job(storage, draft, rank) for rank in missing], open_source, copy_options)
        if not commit.commit(storage, draft, wait_s=0.0):
            return _existing_result(storage, draft)
    except BaseException as error:
        if not (resumable and isinstance(error, KeyboardInterrupt)):
            commit.discard(directory, draft, range(world))
        raise
    _remove_partials(storage, draft)
    clean_up_after_manual_save(directory, draft)
    return _result_of(storage, kept=len(kept))


def _rank_job(storage: Storage, draft: Manifest, rank: int) -> CopyJob:
    def job(source: TensorSource) -> None:
        spans = draft.layout.spans(rank)
        names = shard_specs(draft, rank)
        chunks = (chunk for name in names for chunk in source.chunks(name, spans[name]))
        write_shard(storage, draft, rank, chunks)

    return job


def _finished(
    storage: Storage, names: set[str], draft: Manifest, rank: int, layout_digest: str
) -> bool:
    """Returns whether an earlier run wrote the whole of this rank's file.

    Args:
        storage: The step's files.
        names: Names of all of them.
        draft: The manifest without `files`.
        rank: The rank whose file it is.
        layout_digest: Digest of the draft's layout, which the checksum file must have.
    """
    name = draft.file_name(rank)
    if not {name, name + SUMS_SUFFIX} <= names:
        return False
    try:
        sums = read_sums(storage, name)
    except CheckpointDamaged:
        return False
    expected = shard_header(draft, rank)[1]
    return sums.layout_digest == layout_digest and sums.size == expected == storage.size(name)


def _existing_result(storage: Storage, draft: Manifest) -> CopyResult:
    """Returns the committed step if it has the draft's token; else raises `UserError`."""
    if catalog.read_manifest(storage).token != draft.token:
        raise UserError(f"{storage.where} holds a checkpoint already: give another directory")
    return _result_of(storage, already=True)


def _result_of(storage: Storage, *, kept: int = 0, already: bool = False) -> CopyResult:
    manifest, error = catalog.examine(storage)
    if error is not None:
        raise error
    assert manifest is not None
    return CopyResult(
        where=storage.where,
        step=manifest.step,
        world_size=manifest.layout.world_size,
        bytes=sum(file.bytes for file in manifest.files),
        kept=kept,
        already=already,
    )


def _remove_partials(storage: Storage, draft: Manifest) -> None:
    """Removes the partial files of killed runs with this token, as far as possible."""
    files = {draft.file_name(rank) for rank in range(draft.layout.world_size)}
    with suppress(ElasticZeroError, OSError):
        for name in storage.names():
            if draft.token in name and name.removesuffix(SUMS_SUFFIX) not in files:
                storage.remove(name)
