"""Storage in phases: saves and retention are the real code of `checkpoint/steps`, on files in
memory.

A node's part of a save is a task. What it does to the storage is a phase: a shard, its checksums, a
listing, the manifest, each removal of retention. A phase may be late, longer than a lease lives; it
may be done twice, fail before it is done, or be done though its answer says that it failed. The
storage has a clock of its own, by which files are old soon.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from random import Random
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import greenlet

from elasticzero.checkpoint.format.layout import Group, Layout, TensorSpec
from elasticzero.checkpoint.format.manifest import Manifest
from elasticzero.checkpoint.format.names import MANIFEST_NAME, SUMS_SUFFIX, step_directory, step_of
from elasticzero.checkpoint.format.shards import shard_header, shard_specs, write_shard
from elasticzero.checkpoint.steps import commit
from elasticzero.checkpoint.steps.loose_files import written_anew
from elasticzero.checkpoint.steps.retention import RetentionPolicy, apply_retention
from elasticzero.checkpoint.storage.base import Bytes
from elasticzero.checkpoint.storage.base import Storage as StepFiles
from elasticzero.errors import ElasticZeroError, StorageError
from tests.simulation.storage import Checkpoint, Part, Storage
from tests.simulation.timeline import Timeline

if TYPE_CHECKING:
    from tests.simulation.agents import Agent

FEW_RANKS = 4
QUICK_S, LATE_S = (0.001, 0.02), (1.0, 12.0)
LATE_SHARE, FAILING_SHARE, TWICE_SHARE = 0.03, 0.02, 0.05
CRITICAL_SHARE = 0.1
"""So many of the manifests, and of the removals, are late."""
CLOCK_RATE = 20.0
"""Seconds of the storage's clock a second: a save is old after 3 s, and a lease lives for 2."""
RESUMED_WITHIN_S = 0.01
"""A save goes on so soon after its process was resumed."""
REMOVED_S = (0.02, 0.1)
"""A request to remove a file takes so long where another process is resumed just then."""
PARTS_S = 20.0
"""A committer waits so long for the parts of other nodes."""
LOOK_AGAIN_S = 0.2
T = TypeVar("T")


class StoredFile(NamedTuple):
    data: bytes
    at_s: float
    """When it was written, by the storage's clock."""
    version: str


Files = dict[str, dict[str, StoredFile]]
"""By step's directory and name."""


def draft_of(part: Part) -> Manifest:
    """The manifest of a snapshot, without its files."""
    generation, step, size = part.name
    tensors = {"w": TensorSpec("F64", (2 * size,))}
    layout = Layout(world_size=size, tensors=tensors, groups=(Group("even", ("w",)),))
    return Manifest(
        step=step,
        generation=generation,
        token=f"{part.token:0<24}",
        strategy="zero1",
        layout=layout,
        state={},
    )


class PhasedStorage(Storage):
    """The checkpoint directory, and the saves under way."""

    def __init__(
        self,
        timeline: Timeline,
        random: Random,
        keep: int | None,
        require: Callable[[bool, str, str], None],
    ) -> None:
        """keep: good steps that retention leaves; None: all."""
        super().__init__(timeline, possible=True)
        self.random = random
        self.files: Files = {}
        self.written = 0
        """Number of times that a file was written."""
        self.keep = RetentionPolicy(last=keep)
        self._require = require
        self._queues: dict[Agent, list[Access]] = {}
        """Of each node, which saves one part at a time."""
        self._active = 0
        """Parts that are not over."""
        self._held: set[tuple[object, object]] = set()
        """Agent and snapshot of each part that is saved from memory now."""
        self._well: set[str] = set()
        """Directories of steps whose manifest is of a save that has ended well."""
        self._is_whole = True
        """Nothing was damaged."""
        self._late: list[tuple[Access, float, float]] = []
        """Late requests: of which save, and from when to when."""
        self._left_open: set[str] = set()
        """Directories in which a process was killed, or could withdraw no manifest of its own."""

    def noted_late(self, access: Access, seconds: float) -> None:
        """Storage answers a request of a save so late."""
        now_s = self.timeline.now_s
        self._late.append((access, now_s, now_s + seconds))

    def late_s(self, seconds: float) -> float:
        """Two nodes' saves wait one after the other: the committer, and the last of the others."""
        now_s, late_s = self.timeline.now_s, dict.fromkeys(self._queues, 0.0)
        for access, from_s, to_s in self._late:
            abandoned_s = access.abandoned_s
            in_the_way = abandoned_s is not None and from_s <= abandoned_s <= to_s
            if access.from_memory or access.commits or in_the_way:
                lasted_s = min(to_s, now_s) - max(from_s, now_s - seconds)
                late_s[access.part.agent] += max(0.0, lasted_s)
        return sum(sorted(late_s.values())[-2:])

    # -- what saves ask

    def persist(self, part: Part) -> None:
        self._add(Access(self, part))

    def save_part(self, part: Part) -> None:
        key = (part.agent, part.name)
        if key in self._held:
            return
        self._held.add(key)
        for access in self._queues.get(part.agent, []):
            access.abandon()
        self._add(Access(self, part, from_memory=True))

    def _add(self, access: Access) -> None:
        self._active += 1
        queue = self._queues.setdefault(access.part.agent, [])
        queue.append(access)
        if len(queue) == 1:
            self.timeline.task(lambda: self._work(queue))

    def _work(self, queue: list[Access]) -> None:
        """One part after another, as long as the node's agent lives."""
        while queue:
            lives = self._run(queue[0], waiting=queue[1:])
            over = queue[:1] if lives else queue[:]
            del queue[: len(over)]
            self._active -= len(over)
            if lives and not self._active:
                self._check_all()

    def _run(self, access: Access, waiting: list[Access]) -> bool:
        """Saves one part; returns whether the node's agent lives."""
        part = access.part
        try:
            if not access.abandoned or not _replaced(part, waiting):
                self._save(part, access)
        except ElasticZeroError:
            if part.agent.storage is part.agent.cluster.storage:
                part.agent.cluster.rules.cause("storage-fails")
            if self.away and self._has_manifest(part):
                self._left_open.add(step_directory(part.name[1]))
            part.over(False)
        except greenlet.GreenletExit:
            self._left_open.add(access.place)
            return False
        finally:
            self._held.discard((part.agent, part.name))
        return True

    def _has_manifest(self, part: Part) -> bool:
        """Returns whether a part's step is committed by the save that it belongs to."""
        manifest = self.files.get(step_directory(part.name[1]), {}).get(MANIFEST_NAME)
        return manifest is not None and json.loads(manifest.data)["token"] == draft_of(part).token

    def _save(self, part: Part, access: Access) -> None:
        """See `CheckpointSaver`: what a try that fails has written stays for the next one."""
        directory = PhasedDirectory(self, access)
        draft, stood_still = draft_of(part), part.agent.standstills
        storage = commit.prepare(directory, draft.step)
        self._write_shards(access, draft, storage)
        if 0 not in part.ranks:
            self._await_commit(access)
            return
        self._await_parts(access, draft, directory)
        access.commits = True
        saved = commit.commit(
            storage,
            draft,
            wait_s=0.0,
            replacing=part.replacing,
            may_not=lambda: (
                None if part.agent.standstills == stood_still else "this node stood still"
            ),
        )
        part.over(True)
        if saved:
            self._note_saved(draft, access)
        if saved and part.agent.standstills == stood_still:
            apply_retention(
                *(directory, draft, self.keep),
                bad_steps=part.bad_steps,
                go_on=lambda: not access.abandoned,
            )

    def _write_shards(self, access: Access, draft: Manifest, storage: StepFiles) -> None:
        """See `persist` of `checkpoint/ram/transfer.py`."""
        for rank in access.part.ranks:
            specs = shard_specs(draft, rank).values()
            contents = bytes([draft.generation % 256]) * sum(spec.nbytes for spec in specs)
            if not access.part.replacing:
                if access.from_memory and self._has_shard(draft, rank):
                    continue
                if commit.is_good(storage):
                    continue
                if access.from_memory:
                    name = draft.file_name(rank)
                    with written_anew(storage, draft.token, (name, name + SUMS_SUFFIX)):
                        write_shard(storage, draft, rank, [contents])
                    continue
            write_shard(storage, draft, rank, [contents])

    def _has_shard(self, draft: Manifest, rank: int) -> bool:
        """Returns whether a shard is there, whole."""
        files, name = self.files.get(step_directory(draft.step), {}), draft.file_name(rank)
        _, size = shard_header(draft, rank)
        return name in files and len(files[name].data) == size and name + SUMS_SUFFIX in files

    def _await_commit(self, access: Access) -> None:
        """The node of rank 0 commits the step."""
        until_s = self.timeline.now_s + PARTS_S
        while access.part.name[1] not in self.steps and self._waits(access, until_s):
            self.timeline.sleep(LOOK_AGAIN_S)
            if access.part.agent.dead:
                raise greenlet.GreenletExit

    def _await_parts(self, access: Access, draft: Manifest, directory: PhasedDirectory) -> None:
        storage = directory.step(step_directory(draft.step))
        ranks = range(draft.layout.world_size)
        sums = {draft.file_name(rank) + SUMS_SUFFIX for rank in ranks}
        until_s = self.timeline.now_s + PARTS_S
        while not sums <= set(storage.names()):
            if draft.step in self.steps and not access.part.replacing:
                return
            if not self._waits(access, until_s):
                raise StorageError("the parts of other nodes are missing")
            self.timeline.sleep(LOOK_AGAIN_S)

    def _waits(self, access: Access, until_s: float) -> bool:
        """Returns whether a save waits for other nodes."""
        lasts = access.part.lasts() and not access.abandoned
        return lasts and self.timeline.now_s < until_s

    # -- what becomes of the steps

    def placed(self, name: str, data: bytes) -> None:
        """A manifest stands."""
        self._well.discard(name)
        step, generation = step_of(name), json.loads(data)["generation"]
        assert step is not None
        self.steps[step] = Checkpoint(generation, self.timeline.now_s)
        self.committed(generation, step)

    def removes(self, name: str, file: str, save: Part) -> None:
        """R22: of a file that is about to be removed by a save.

        A save may withdraw its own manifest, though another process has written back meanwhile what
        it had found missing. And it may remove its own shard late, which it writes anew then.
        """
        step, keep = step_of(name), self.keep.last
        assert step is not None
        if file == MANIFEST_NAME:
            withdraws = self._token_of(name) == draft_of(save).token
            newer = [other for other in self.files if other > name and self._fault(other) is None]
            text = f"step {step} is removed, and {len(newer)} newer ones are good"
            enough = keep is not None and len(newer) >= keep
            is_good = self._fault(name) is None and self._is_whole
            self._require(enough or not is_good or withdraws, "R22", text)
            self._well.discard(name)
            self.gone[step] = self.steps.pop(step)
            self.gone[step].damaged_s = self.timeline.now_s
        elif name in self._well and not file.endswith(SUMS_SUFFIX):
            entries = json.loads(self.files[name][MANIFEST_NAME].data)["files"]
            named = any(entry["name"] == file for entry in entries)
            anew = file in {draft_of(save).file_name(rank) for rank in save.ranks}
            self._require(
                not named or anew, "R22", f"{file} of step {step} is removed, which is committed"
            )

    def damage(self, *, hidden: bool) -> None:
        """A file of the newest step is cut short, where that is to be seen."""
        super().damage(hidden=hidden)
        self._is_whole = False
        if self.steps and not hidden:
            files = self.files[step_directory(max(self.steps))]
            shard = next(name for name in sorted(files) if name.startswith("rank-"))
            files[shard] = files[shard]._replace(data=files[shard].data[:-1])

    def _token_of(self, name: str) -> str:
        """The token of a committed step's save."""
        token: str = json.loads(self.files[name][MANIFEST_NAME].data)["token"]
        return token

    def _fault(self, name: str) -> str | None:
        """Why a step is not good; None: it is."""
        files = self.files[name]
        if MANIFEST_NAME not in files:
            return "no manifest"
        for entry in json.loads(files[MANIFEST_NAME].data)["files"]:
            shard, size = entry["name"], entry["bytes"]
            if shard not in files or f"{shard}{SUMS_SUFFIX}" not in files:
                return f"{shard} is missing"
            if len(files[shard].data) != size:
                return f"{shard} is cut short"
        return None

    def _note_saved(self, draft: Manifest, access: Access) -> None:
        """R22: a save that says that it is committed has its shards, as long as its manifest is
        there: another process may have removed both while the save removed what it replaced."""
        name = step_directory(draft.step)
        files = self.files.get(name, {})
        if MANIFEST_NAME not in files:
            return
        manifest = json.loads(files[MANIFEST_NAME].data)
        if manifest["token"] != draft.token:
            return
        self._well.add(name)
        gone = [entry["name"] for entry in manifest["files"] if entry["name"] not in files]
        whole = access.removed or not gone
        self._require(whole, "R22", f"step {draft.step} is saved, without {gone}")

    def _check_all(self) -> None:
        """R22: once no save is under way each committed step has its files."""
        for name, files in self.files.items():
            step = step_of(name)
            if MANIFEST_NAME in files and step is not None and name not in self._left_open:
                fault = self._fault(name)
                well = fault is None or bool(self.steps[step].damaged)
                self._require(well, "R22", f"step {step} is committed, and {fault}")


def _replaced(part: Part, waiting: list[Access]) -> bool:
    """Returns whether a save from memory waits that makes a part of an abandoned one needless."""
    steps = [access.part.name[1] for access in waiting if access.from_memory]
    return max(steps, default=-1) >= part.name[1]


class Access:
    """How the process of one save reaches the storage."""

    def __init__(self, storage: PhasedStorage, part: Part, *, from_memory: bool = False) -> None:
        self._storage = storage
        self._agent = part.agent
        self.part = part
        self.from_memory = from_memory
        """It is tried again, and its workers are gone."""
        self.abandoned_s: float | None = None
        """Time at which a save from memory first came after it."""
        self._share = min(1.0, FEW_RANKS / part.name[2])
        """Of many ranks one would be late, or fail, in nearly each save."""
        self.commits = False
        """All parts are there: what it asks now a save from memory would have to ask too."""
        self.removed = False
        """It has removed files, which took time."""
        self.place = ""
        """The directory that it was last about to change."""

    @property
    def abandoned(self) -> bool:
        return self.abandoned_s is not None

    def abandon(self) -> None:
        """A save from memory comes after it."""
        if self.abandoned_s is None:
            self.abandoned_s = self._storage.timeline.now_s

    def begin_manifest(self) -> None:
        """The manifest is about to be made."""
        if (freeze := self._storage.before_manifest) is not None:
            freeze(self._agent, self.part.name[1])

    def begin_removal(self, name: str) -> None:
        """A file of a step is about to be removed."""
        happens, step = self._storage.before_removal, step_of(name)
        if happens is not None and step is not None and happens(self._agent, step):
            self._storage.timeline.sleep(self._storage.random.uniform(*REMOVED_S))

    def phase(self, place: str, do: Callable[[], T], *, critical: bool = False) -> T:
        """Does it, late, twice, or in vain. critical: others look at what it does."""
        storage, random = self._storage, self._storage.random
        self.place = place
        late = CRITICAL_SHARE if critical else LATE_SHARE
        is_late = random.random() < late * self._share
        delay_s = random.uniform(*(LATE_S if is_late else QUICK_S))
        if is_late:
            storage.noted_late(self, delay_s)
        storage.timeline.sleep(delay_s)
        while (left_s := self._agent.store.stopped_until_s - storage.timeline.now_s) > 0:
            storage.timeline.sleep(min(left_s, RESUMED_WITHIN_S))
        if self._agent.dead:
            raise greenlet.GreenletExit
        draw = random.random() / self._share
        if storage.away or draw < FAILING_SHARE / 2:
            raise StorageError(f"{place}: no answer") from TimeoutError("no answer in time")
        result = do()
        if draw < FAILING_SHARE:
            raise StorageError(f"{place}: no answer") from TimeoutError("no answer in time")
        return do() if draw < FAILING_SHARE + TWICE_SHARE else result


class PhasedDirectory:
    """The checkpoint directory, as one process has it."""

    where = "/checkpoints"

    def __init__(self, storage: PhasedStorage, access: Access) -> None:
        self._storage = storage
        self._access = access

    def names(self) -> list[str]:
        return self._access.phase("", lambda: sorted(self._storage.files))

    def files(self) -> dict[str, dict[str, float]]:
        files = self._storage.files
        return self._access.phase(
            "",
            lambda: {step: {n: file.at_s for n, file in of.items()} for step, of in files.items()},
        )

    def step(self, name: str) -> PhasedStep:
        return PhasedStep(self._storage, self._access, name)

    def make(self, name: str) -> PhasedStep:
        self._access.phase(name, lambda: self._storage.files.setdefault(name, {}))
        return self.step(name)

    def remove(self, name: str) -> None:
        def remove() -> None:
            if not self._storage.files.get(name, {"": None}):
                del self._storage.files[name]

        self._access.phase(name, remove)

    def check_writable(self) -> None:
        return


class PhasedStep:
    """The files of one step, as one process has them. What it only reads takes no time: the real
    code reads in several threads."""

    def __init__(self, storage: PhasedStorage, access: Access, name: str) -> None:
        self.where = f"{PhasedDirectory.where}/{name}"
        self._storage = storage
        self._access = access
        self._name = name

    @property
    def _files(self) -> dict[str, StoredFile]:
        return self._storage.files.get(self._name, {})

    def _read(self, name: str) -> bytes:
        if name not in self._files:
            raise FileNotFoundError(f"{self.where}/{name}")
        return self._files[name].data

    def size(self, name: str) -> int:
        return len(self._read(name))

    def read_into(self, name: str, start: int, *buffers: memoryview) -> int:
        data, position = self._read(name), start
        for buffer in buffers:
            part = data[position : position + len(buffer)]
            buffer[: len(part)] = part
            position += len(part)
        return position - start

    def names(self) -> list[str]:
        return self._access.phase(self._name, lambda: sorted(self._files))

    def write(
        self, name: str, chunks: Iterable[Bytes], *, size: int | None = None, cached: bool = True
    ) -> None:
        data = b"".join(map(bytes, chunks))
        self._access.phase(self._name, lambda: self._put(name, data))

    def create_exclusive(self, name: str, data: bytes, *, instead_of: bytes | None = None) -> bool:
        def create() -> bool:
            present = self._files[name].data if name in self._files else None
            if present not in (data, instead_of):
                return False
            if present != data:
                self._put(name, data)
            return True

        if name == MANIFEST_NAME:
            self._access.begin_manifest()
        return self._access.phase(self._name, create, critical=True)

    def versions(self) -> dict[str, str]:
        return self._access.phase(
            self._name, lambda: {name: file.version for name, file in self._files.items()}
        )

    def remove(
        self, name: str, *, holding: bytes | None = None, version: str | None = None
    ) -> None:
        self._access.removed = True
        self._access.begin_removal(self._name)

        def remove() -> None:
            present = self._files.get(name)
            if present is None or holding not in (None, present.data):
                return
            if version not in (None, present.version):
                return
            self._storage.removes(self._name, name, self._access.part)
            del self._files[name]

        self._access.phase(self._name, remove, critical=True)

    def _put(self, name: str, data: bytes) -> None:
        storage = self._storage
        storage.written += 1
        files = storage.files.setdefault(self._name, {})
        files[name] = StoredFile(data, CLOCK_RATE * storage.timeline.now_s, str(storage.written))
        if name == MANIFEST_NAME:
            self._storage.placed(self._name, data)
