"""Removes old checkpoints and the leftovers of failed saves.

The process that commits a step applies retention after it. Files that another save may still need
stay: files of a newer generation, of this generation's next steps, and recently written files. Of
committed steps the run of the job is compared before the generation, which begins at 1 in each run;
names of files do not state it. An age is the difference between two files of the same storage, by
its clock alone. Steps that tags name stay (rule Y3 in `tags`). A save that goes on nevertheless
finds out (rules FC in `loose_files`). Nothing is removed through a link: a step's directory that is
one is not listed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from elasticzero.checkpoint.format.manifest import Manifest
from elasticzero.checkpoint.format.names import (
    MANIFEST_NAME,
    TAGS_DIRECTORY,
    is_own_partial,
    is_partial,
    is_whole_save,
    step_directory,
    step_of,
    token_generation,
    token_of_file,
)
from elasticzero.checkpoint.steps.catalog import (
    files_error,
    manifest_bytes,
    parse_manifest,
    read_manifest,
    step_error_text,
)
from elasticzero.checkpoint.steps.loose_files import always, remove_loose
from elasticzero.checkpoint.steps.tag_files import read_tags
from elasticzero.checkpoint.steps.tags import keep_for_tags
from elasticzero.checkpoint.storage.base import Directory, Storage, explain
from elasticzero.errors import CheckpointDamaged, ElasticZeroError, UserError

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
COMMIT_S = 60.0
"""Seconds after its last file for which a save that lacks only its manifest may be committed still:
a committer looks four times a second, and refuses if it stood still for longer than its lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """Selects the committed steps that stay; by default all."""

    last: int | None = None
    """Keep this many of the newest good steps; None: all."""
    every: int | None = None
    """Also keep each step that is a multiple of this number."""

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
    """Lists the files that were removed, and those that could not be."""

    steps: list[int] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    """Leftovers of failed saves: the step's directory and the file's name."""
    problems: list[str] = field(default_factory=list)
    """Messages of errors; the next call tries again."""


class SaveIdentity(Protocol):
    """Identifies a save by the names of its files; a manifest has these fields too."""

    @property
    def step(self) -> int: ...

    @property
    def generation(self) -> int: ...

    @property
    def token(self) -> str: ...

    @property
    def run(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingSave:
    """Identifies a save that has no manifest yet."""

    step: int
    generation: int
    token: str
    run: int
    """Number of the job's run."""


def apply_retention(
    directory: Directory,
    committed: Manifest,
    keep: RetentionPolicy,
    *,
    bad_steps: Collection[int] = (),
    since_s: float = 0.0,
    go_on: Callable[[], bool] = always,
) -> CleanupResult:
    """Removes the steps that need not stay and the leftovers of failed saves; never raises.

    Args:
        directory: The checkpoint directory.
        committed: The manifest that the caller has just committed, with checksums: the newest
            checkpoint whose bytes are known to be right. It stays, and nothing is removed unless it
            is still committed.
        keep: Which steps stay.
        bad_steps: Steps that are known to be damaged although their sizes are right; they do not
            count as good.
        since_s: Time by the storage's clock since when the job has the directory. Generations in
            older files are those of earlier jobs, and are not compared.
        go_on: Is called before each removal; False leaves what is left to the next call.
    """
    result = CleanupResult()
    with _collecting_problems(directory, result):
        files = directory.files()
        now_s = files.get(step_directory(committed.step), {}).get(MANIFEST_NAME)
        if now_s is None or not _is_committed(directory, committed):
            return result
        stay = _retained_steps(directory, committed, keep, files, bad_steps)
        tags = read_tags(directory) if keep.last is not None and TAGS_DIRECTORY in files else {}
        stay |= set(tags.values())
        cause = _Cause(save=committed, go_on=go_on)
        cleaner = _Cleaner(directory, cause, result, ages=_Ages(now_s, since_s), tags=tags)
        cleaner.remove_unfinished_tags(files.get(TAGS_DIRECTORY, {}))
        for name, times in files.items():
            step = step_of(name)
            if not go_on():
                break
            if step is not None and MANIFEST_NAME in times and step not in stay:
                cleaner.remove_step(name, step, times)
            elif step is not None:
                cleaner.remove_leftovers(name, step, times)
                cleaner.remove_empty(name, step, times)
    return result


def clean_up_after_manual_save(directory: Directory, committed: Manifest) -> CleanupResult:
    """Removes leftovers after a save that no job made, as `apply_retention` does.

    Every step stays, and so do a job's files until they are a day old. The run and the generation
    in `committed` are those of the copied step, so they are not compared.
    """
    by_hand = replace(committed, run=1, generation=0)
    return apply_retention(directory, by_hand, RetentionPolicy())


def make_room(directory: Directory, save: SaveIdentity) -> CleanupResult:
    """Removes the leftovers of failed saves if `save`, not committed yet, finds no space; never
    raises.

    Files that a running save may still need stay: all files of this save's step, files of a newer
    generation, and files of the last hour that were saved by hand.
    """
    result = CleanupResult()
    with _collecting_problems(directory, result):
        files = directory.files()
        now_s = max((at_s for times in files.values() for at_s in times.values()), default=0)
        cause = _Cause(save=save, committed=False)
        cleaner = _Cleaner(directory, cause, result, ages=_Ages(now_s), tags={})
        for name, times in files.items():
            if (step := step_of(name)) is not None:
                cleaner.remove_leftovers(name, step, times)
    return result


@contextmanager
def _collecting_problems(directory: Directory, result: CleanupResult) -> Iterator[None]:
    """Turns an error into a problem in the result; the next save tries the removal again."""
    try:
        yield
    except ElasticZeroError as error:
        result.problems.append(str(error))
    except OSError as error:
        result.problems.append(f"{directory.where}: {explain(error)}")


@dataclass(frozen=True, slots=True)
class _Ages:
    """Compares times of files, by the storage's clock."""

    now_s: float
    """Time at which the committed manifest was written or, before it exists, the newest file."""
    since_s: float = 0.0
    """Time since when the job has the directory."""

    def exceeds(self, written_s: float, age_s: float) -> bool:
        """Returns whether a file is older than an age."""
        return self.now_s - written_s > age_s

    def of_another_job(self, written_s: float) -> bool:
        """Returns whether an earlier job wrote a file, or it is a day old: the generation that it
        names is then not this job's."""
        return written_s < self.since_s or self.exceeds(written_s, DAY_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cause:
    """Names the save for which files may be removed."""

    save: SaveIdentity
    committed: bool = True
    """True once that save is committed."""
    go_on: Callable[[], bool] = always
    """Returns False once nothing more is to be removed."""


class _Cleaner:
    """Removes the files that one save may remove."""

    def __init__(
        self,
        directory: Directory,
        cause: _Cause,
        result: CleanupResult,
        *,
        ages: _Ages,
        tags: Mapping[str, int],
    ) -> None:
        """Removes nothing yet.

        Args:
            directory: The checkpoint directory.
            cause: The save for which files may be removed.
            result: Gets what is removed, and what prevents it.
            ages: Compares the times of files.
            tags: The step that each tag names.
        """
        self._directory = directory
        self._committed = cause.save
        self._result = result
        self._ages = ages
        self._tags = tags
        self._is_committed = cause.committed
        self._go_on = cause.go_on

    def remove_step(self, name: str, step: int, times: Mapping[str, float]) -> None:
        """Removes a committed step, its manifest first, so that a committed step always has its
        files.

        Args:
            name: Name of the step's directory.
            step: Number of the step.
            times: Time at which each file in it was last written, by the storage's clock.
        """
        storage = self._directory.step(name)
        with _collecting_problems(self._directory, self._result):
            data = manifest_bytes(storage)
            if data is None:
                return
            manifest = _parsed(storage, data)
            named = manifest.token if manifest is not None else None
            if _is_newer(manifest, times[MANIFEST_NAME], self._committed, self._ages):
                return
            if manifest is not None and keep_for_tags(self._directory, manifest, self._tags):
                return
            storage.remove(MANIFEST_NAME, holding=data)
            if manifest_bytes(storage) is not None:
                return  # another save has written the step meanwhile
            self._result.steps.append(step)
            rest = times.keys() - {MANIFEST_NAME}
            if named is not None:
                files = [file for file in rest if token_of_file(file) == named]
                remove_loose(storage, named, files, self._go_on)
                rest -= set(files)
            self.remove_leftovers(name, step, {file: times[file] for file in rest})

    def remove_empty(self, name: str, step: int, times: Mapping[str, float]) -> None:
        """Removes the manifest of a save of an earlier generation that has no file any more.

        Its writer stopped before it created the manifest, for so long that its files were removed
        as leftovers, and was killed before it looked again (FC1).

        Args:
            name: Name of the step's directory.
            step: Number of the step.
            times: Time at which each file in it was last written, by the storage's clock.
        """
        if MANIFEST_NAME not in times or any(map(token_of_file, times)):
            return
        storage = self._directory.step(name)
        with _collecting_problems(self._directory, self._result):
            data = manifest_bytes(storage)
            manifest = _parsed(storage, data) if data is not None else None
            token = manifest.token if manifest is not None else self._committed.token
            if token == self._committed.token or token_generation(token) is None:
                return
            if _is_newer(manifest, times[MANIFEST_NAME], self._committed, self._ages):
                return
            if any(map(token_of_file, storage.names())):
                return
            storage.remove(MANIFEST_NAME, holding=data)
            self._result.files.append(f"{name}/{MANIFEST_NAME}")
            if times.keys() == {MANIFEST_NAME}:
                self._directory.remove(name)

    def remove_unfinished_tags(self, times: Mapping[str, float]) -> None:
        """Removes what processes that were killed while they wrote a tag have left."""
        storage = self._directory.step(TAGS_DIRECTORY)
        with _collecting_problems(self._directory, self._result):
            for name, written_s in times.items():
                if is_own_partial(name) and self._ages.exceeds(written_s, HOUR_S):
                    storage.remove(name)

    def remove_leftovers(self, name: str, step: int, times: Mapping[str, float]) -> None:
        """Removes files that no manifest names and that no save can still be writing.

        Args:
            name: Name of the step's directory.
            step: Number of the step.
            times: Time at which each file in it was last written, by the storage's clock.
        """
        storage = self._directory.step(name)
        with _collecting_problems(self._directory, self._result):
            tokens = {file: token for file in times if (token := token_of_file(file)) is not None}
            named = None
            if MANIFEST_NAME in times and (
                len(set(tokens.values())) > 1 or any(map(is_partial, times))
            ):
                manifest = _manifest_of_step(storage)
                if manifest is None:
                    return
                named = manifest.token
            elif MANIFEST_NAME in times:
                return
            alive = self._may_be_committed(tokens, times) if named is None else ()
            loose = [file for file in tokens if tokens[file] != named or is_partial(file)]
            dead = [
                file
                for file in loose
                if tokens[file] not in alive and self._is_leftover(step, tokens[file], times[file])
            ]
            # A manifest is staged after its shards: while those exist it may be about to appear.
            alone = len(dead) == len(loose)
            dead += [file for file in times if is_partial(file) and file not in tokens and alone]
            self._remove(name, dead)
            # Saves by hand may begin several steps at once: an empty directory may be one of them.
            begun_before = self._committed.generation > 0 and step < self._committed.step
            if len(dead) == len(times) and (dead or begun_before) and self._go_on():
                self._directory.remove(name)

    def _remove(self, name: str, files: Collection[str]) -> None:
        """Removes files of a step, those of each save together.

        Args:
            name: Name of the step's directory.
            files: Names of the files, which no manifest names.
        """
        storage = self._directory.step(name)
        of_save: dict[str, list[str]] = {}
        for file in files:
            token = None if is_partial(file) else token_of_file(file)
            if token is not None:
                of_save.setdefault(token, []).append(file)
            elif self._go_on():
                storage.remove(file)
                self._result.files.append(f"{name}/{file}")
        for token, parts in of_save.items():
            removed = remove_loose(storage, token, parts, self._go_on)
            self._result.files += (f"{name}/{file}" for file in removed)

    def _may_be_committed(self, tokens: Mapping[str, str], times: Mapping[str, float]) -> set[str]:
        """Returns the tokens of saves of other generations whose committers may be alive.

        All files of such a save are there, and one of them is new: its manifest may be about to
        appear.

        Args:
            tokens: Token in the name of each file of a step without a manifest.
            times: Time at which each file was last written, by the storage's clock.
        """
        alive = set()
        for token in set(tokens.values()) - {self._committed.token}:
            files = [file for file in tokens if tokens[file] == token]
            old = self._ages.exceeds(max(times[file] for file in files), COMMIT_S)
            if not old and is_whole_save(files, token):
                alive.add(token)
        return alive

    def _is_leftover(self, step: int, token: str, written_s: float) -> bool:
        """Returns whether a file of this token belongs to a save that has ended.

        Args:
            step: Number of the step that the file is in.
            token: Token in the file's name.
            written_s: Time at which the file was last written, by the storage's clock.
        """
        if token == self._committed.token:
            return step < self._committed.step
        generation = token_generation(token)
        if generation is None:  # a save by hand never replaces a committed step
            beaten = self._is_committed and step == self._committed.step
            return beaten or self._ages.exceeds(written_s, HOUR_S)
        older = generation < self._committed.generation
        return older or self._ages.of_another_job(written_s)


def is_of_newer_generation(
    directory: Directory, data: bytes, save: SaveIdentity, *, since_s: float
) -> bool:
    """Returns whether the manifest of a save's step is of a newer generation than the save, or of a
    later run of the job.

    Args:
        directory: The checkpoint directory.
        data: Contents of the manifest.
        save: The save, of the same step.
        since_s: Time by the storage's clock since when the job has the directory.
    """
    name, files = step_directory(save.step), directory.files()
    written_s = files.get(name, {}).get(MANIFEST_NAME)
    if written_s is None:
        return False
    now_s = max(at_s for times in files.values() for at_s in times.values())
    manifest = _parsed(directory.step(name), data)
    return _is_newer(manifest, written_s, save, _Ages(now_s, since_s))


def _is_newer(manifest: Manifest | None, written_s: float, save: SaveIdentity, ages: _Ages) -> bool:
    """Returns whether a later run of this job, or a newer generation of this run, committed a step.

    Args:
        manifest: Manifest of the step; None: it cannot be read.
        written_s: Time at which it was written, by the storage's clock.
        save: A save of this job.
        ages: Compares the times of files.
    """
    generation = token_generation(manifest.token) if manifest is not None else None
    if manifest is None or generation is None:
        return False
    newer = (manifest.run, generation) > (save.run, save.generation)
    return newer and not ages.of_another_job(written_s)


def _is_committed(directory: Directory, committed: Manifest) -> bool:
    storage = directory.step(step_directory(committed.step))
    manifest = read_manifest(storage)
    return manifest.token == committed.token and files_error(storage, manifest) is None


def _retained_steps(
    directory: Directory,
    committed: Manifest,
    keep: RetentionPolicy,
    files: Mapping[str, Mapping[str, float]],
    bad_steps: Collection[int],
) -> set[int]:
    """Returns the committed steps that are not removed.

    Only steps older than the last of the newest good ones are removed: a damaged step that is newer
    stays for a person to examine.

    Args:
        directory: The checkpoint directory.
        committed: Manifest of the step that was just committed, which stays.
        keep: Which steps stay.
        files: Time of the last write of each file, by the step directory's name, then the file's.
        bad_steps: Steps that are known to be damaged although their sizes are right.
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


def _manifest_of_step(storage: Storage) -> Manifest | None:
    """Returns a step's manifest, or None if it cannot be read."""
    data = manifest_bytes(storage)
    return _parsed(storage, data) if data is not None else None


def _parsed(storage: Storage, data: bytes) -> Manifest | None:
    try:
        return parse_manifest(storage, data)
    except CheckpointDamaged:
        return None
