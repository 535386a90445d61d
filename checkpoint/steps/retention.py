"""Removes old checkpoints and what failed saves have left behind.

The process that commits a step applies retention after it. What another save may still be writing
stays: files of a newer generation, of this generation's next steps, and files that were written
lately. An age is the difference between two files of the same storage, by its clock alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from elasticzero.checkpoint.format.manifest import Manifest
from elasticzero.checkpoint.format.names import (
    MANIFEST_NAME,
    is_partial,
    step_directory,
    step_of,
    token_generation,
    token_of_file,
)
from elasticzero.checkpoint.steps.catalog import read_manifest, step_error_text
from elasticzero.checkpoint.storage.base import Directory, Storage, explain
from elasticzero.errors import CheckpointDamaged, ElasticZeroError, UserError

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """Which committed steps stay; by default all."""

    last: int | None = None
    """So many of the newest good ones; None: all."""
    every: int | None = None
    """And each step that this number divides."""

    def __post_init__(self) -> None:
        if self.last is not None and self.last < 1:
            raise UserError(
                f"--keep {self.last} must be 1 or more: at least one checkpoint must stay"
            )
        if self.every is not None and self.every < 1:
            raise UserError(f"--keep-every {self.every} must be 1 or more")
        if self.every is not None and self.last is None:
            raise UserError("--keep-every needs --keep N: it adds to the steps that --keep N keeps")


@dataclass(slots=True, kw_only=True)
class CleanupResult:
    """What was removed, and what could not be."""

    steps: list[int] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    """Left by saves that failed: the step's directory and the name."""
    problems: list[str] = field(default_factory=list)
    """Errors in words; the next call tries again."""


class SaveIdentity(Protocol):
    """A save, as the names of its files tell it apart from others. A manifest is one."""

    @property
    def step(self) -> int: ...

    @property
    def generation(self) -> int: ...

    @property
    def token(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingSave:
    """A save of which there is no manifest yet."""

    step: int
    generation: int
    token: str


def apply_retention(
    directory: Directory,
    committed: Manifest,
    keep: RetentionPolicy,
    *,
    bad_steps: Collection[int] = (),
) -> CleanupResult:
    """Removes the steps that need not stay and the leftovers of failed saves; never raises.

    `committed`: what the caller has just written, with checksums, and committed: the newest
    checkpoint that is known to be right in every byte. Nothing is removed unless it is still
    committed, and it stays. `bad_steps`: known to be damaged though their sizes are right; they do
    not count as good.
    """
    cleaner = _Cleaner(directory, committed)
    with cleaner.noting():
        files = directory.files()
        now_s = files.get(step_directory(committed.step), {}).get(MANIFEST_NAME)
        if now_s is None or not _stands(directory, committed):
            return cleaner.result
        cleaner.now_s = now_s
        stay = _staying(directory, committed, keep, files, bad_steps)
        for name, times in files.items():
            step = step_of(name)
            if step is not None and MANIFEST_NAME in times and step not in stay:
                cleaner.remove_step(name, step, times)
            elif step is not None:
                cleaner.remove_leftovers(name, step, times)
    return cleaner.result


def clean_up_after_manual_save(directory: Directory, committed: Manifest) -> CleanupResult:
    """Removes leftovers after a save that no job made; see `apply_retention`.

    Every step stays, and so do a job's files until they are a day old. The generation in
    `committed` is the one that was copied, so it is not compared.
    """
    return apply_retention(directory, replace(committed, generation=0), RetentionPolicy())


def make_room(directory: Directory, save: SaveIdentity) -> CleanupResult:
    """Removes the leftovers of failed saves where `save`, not committed yet, finds no space.

    What any running save may still need stays: all files of this one's step, and what is of a
    newer generation, or was saved by hand within the hour. Never raises.
    """
    cleaner = _Cleaner(directory, save, committed=False)
    with cleaner.noting():
        files = directory.files()
        cleaner.now_s = max(
            (at_s for times in files.values() for at_s in times.values()), default=0
        )
        for name, times in files.items():
            if (step := step_of(name)) is not None:
                cleaner.remove_leftovers(name, step, times)
    return cleaner.result


class _Cleaner:
    """Removes what one save may remove."""

    def __init__(self, directory: Directory, save: SaveIdentity, *, committed: bool = True) -> None:
        self.result = CleanupResult()
        self.now_s = 0.0
        """When the committed manifest was written; before there is one, when the newest file
        was."""
        self._stands = committed
        self._directory = directory
        self._committed = save

    def remove_step(self, name: str, step: int, times: Mapping[str, float]) -> None:
        """Removes a committed step, its manifest first: it is never committed without its files."""
        storage = self._directory.step(name)
        with self.noting():
            named = _token_of_step(storage)
            if self._is_newer(named, times[MANIFEST_NAME]):
                return
            storage.remove(MANIFEST_NAME)
            self.result.steps.append(step)
            rest = times.keys() - {MANIFEST_NAME}
            for file in sorted(rest) if named is not None else ():
                if token_of_file(file) == named:
                    storage.remove(file)
                    rest.remove(file)
            self.remove_leftovers(name, step, {file: times[file] for file in rest})

    def remove_leftovers(self, name: str, step: int, times: Mapping[str, float]) -> None:
        """Removes files that no manifest names and that no save can still be writing."""
        storage = self._directory.step(name)
        with self.noting():
            tokens = {file: token for file in times if (token := token_of_file(file)) is not None}
            named = None
            if MANIFEST_NAME in times and (
                len(set(tokens.values())) > 1 or any(map(is_partial, times))
            ):
                named = _token_of_step(storage)
                if named is None:
                    return
            elif MANIFEST_NAME in times:
                return
            loose = [file for file in tokens if tokens[file] != named or is_partial(file)]
            dead = [file for file in loose if self._is_dead(step, tokens[file], times[file])]
            # A manifest is staged after its shards: while those live it may be about to stand.
            alone = len(dead) == len(loose)
            dead += [file for file in times if is_partial(file) and file not in tokens and alone]
            for file in dead:
                storage.remove(file)
                self.result.files.append(f"{name}/{file}")
            # By hand, several steps may be begun at once: an empty directory may be such a one.
            begun_before = self._committed.generation > 0 and step < self._committed.step
            if len(dead) == len(times) and (dead or begun_before):
                self._directory.remove(name)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Turns an error into a problem in the result: the removal is tried again after the next
        save."""
        try:
            yield
        except ElasticZeroError as error:
            self.result.problems.append(str(error))
        except OSError as error:
            self.result.problems.append(f"{self._directory.where}: {explain(error)}")

    def _is_dead(self, step: int, token: str, written_s: float) -> bool:
        """Returns whether a file of this token belongs to a save that is over."""
        if token == self._committed.token:
            return step < self._committed.step
        generation = token_generation(token)
        if generation is None:  # by hand: it never replaces a committed step
            beaten = self._stands and step == self._committed.step
            return beaten or self.now_s - written_s > HOUR_S
        return generation < self._committed.generation or self.now_s - written_s > DAY_S

    def _is_newer(self, token: str | None, written_s: float) -> bool:
        """Returns whether a newer generation of this job wrote it; what is a day old is another
        job's."""
        generation = token_generation(token) if token is not None else None
        newer = generation is not None and generation > self._committed.generation
        return newer and self.now_s - written_s <= DAY_S


def _stands(directory: Directory, committed: Manifest) -> bool:
    storage = directory.step(step_directory(committed.step))
    return read_manifest(storage).token == committed.token and step_error_text(storage) is None


def _staying(
    directory: Directory,
    committed: Manifest,
    keep: RetentionPolicy,
    files: Mapping[str, Mapping[str, float]],
    bad_steps: Collection[int],
) -> set[int]:
    """Returns the committed steps that are not to be removed.

    Only what is older than the last of the newest good ones goes: a damaged step that is newer
    stays for a person to look at.
    """
    names = {
        step: n for n in files if MANIFEST_NAME in files[n] and (step := step_of(n)) is not None
    }
    if keep.last is None:
        return set(names)
    good = 0
    stay = {committed.step}
    for step in sorted(names, reverse=True):
        if good < keep.last or (keep.every is not None and step % keep.every == 0):
            stay.add(step)
        if step not in bad_steps and good < keep.last:
            good += step_error_text(directory.step(names[step])) is None
    return stay if good == keep.last else set(names)


def _token_of_step(storage: Storage) -> str | None:
    """Returns the token in a step's manifest; none where it cannot be read."""
    try:
        return read_manifest(storage).token
    except CheckpointDamaged:
        return None
