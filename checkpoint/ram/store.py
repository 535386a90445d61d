"""Lists, seals, reads and removes the snapshots in this node's shared memory.

`<root>/gen-<generation>/step-000000001200/` holds the same shard and checksum files as a
checkpoint, and one manifest for each rank whose shard is here. A worker writes its shard and then a
draft of its manifest. The agent *seals* the shard: it adds the checksums, and the manifest last. A
shard with a manifest is whole, whether it is this node's own or a replica of another's.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from weakref import WeakValueDictionary

from elasticzero.checkpoint.format import finite
from elasticzero.checkpoint.format.checksums import SharedSums
from elasticzero.checkpoint.format.finite import Range
from elasticzero.checkpoint.format.manifest import Manifest, ShardFile, to_json, with_digest
from elasticzero.checkpoint.format.names import (
    SUMS_SUFFIX,
    generation_directory,
    generation_of,
    is_snapshot_file,
    rank_of_snapshot_draft,
    rank_of_snapshot_manifest,
    shard_file_name,
    snapshot_draft_name,
    snapshot_manifest_name,
    step_directory,
    step_of,
)
from elasticzero.checkpoint.ram.slots import HEADROOM_BYTES, SLOTS, free_bytes
from elasticzero.checkpoint.steps.catalog import read_manifest
from elasticzero.checkpoint.storage.disk import DiskStorage
from elasticzero.errors import ElasticZeroError, StorageError
from elasticzero.serialization import decode, encode

HELD = "held"
"""Name of the folder of the links that readers hold while a snapshot may be removed."""
_PART_BYTES = 16 << 20
"""Number of bytes copied at a time, which a disk writes past the page cache at full speed."""
_SHARD_SUFFIX = ".safetensors"
_UNFINISHED = ".unfinished"
"""Ends the name of a shard's draft while bytes of the shard are still to come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSnapshot:
    """Describes the part of one snapshot that lies on this node."""

    generation: int
    step: int
    ranks: tuple[int, ...]
    """The ranks whose whole shards are here, in the world that wrote the snapshot."""
    world_size: int


@dataclass(frozen=True, slots=True, order=True)
class ShardName:
    """Identifies one rank's shard of one snapshot."""

    generation: int
    step: int
    rank: int
    world_size: int
    """World size of the snapshot: 1, with rank 0, for a complete one."""


@dataclass(frozen=True, slots=True)
class Seal:
    """Holds the checksum file and the manifest, which make a shard whole."""

    sums: bytes
    """Contents of the shard's checksum file."""
    manifest: bytes
    """Contents of the shard's manifest."""


class HeldShard:
    """Presents a shard's file in memory, which does not change while it is held."""

    def __init__(self, name: str, data: memoryview, sums: SharedSums) -> None:
        """Presents a file that is mapped already.

        Args:
            name: Name of the shard's file.
            data: The mapped file.
            sums: The file's checksums, which all its holders share.
        """
        self.name = name
        self.data = data
        self.sums = sums

    def parts(self, *, sealed: bool) -> Iterator[memoryview]:
        """Yields the file's bytes, and computes checksums on the way unless the shard is
        `sealed`."""
        for start, part in self._passes():
            if not sealed:
                self.sums.add(start, part)
            yield part

    def add_sums(self) -> None:
        """Computes the missing checksums from the end backwards, since a copy comes from the
        front."""
        for start, part in reversed(list(self._passes())):
            self.sums.add(start, part)

    def _passes(self) -> Iterator[tuple[int, memoryview]]:
        for start in range(0, len(self.data), _PART_BYTES):
            yield start, self.data[start : start + _PART_BYTES]


class SnapshotStore:
    """Manages this node's snapshots in a directory of shared memory, which the agent owns.

    A second directory on a disk takes the shards that do not fit there.
    """

    def __init__(self, root: Path, overflow: Path | None = None) -> None:
        """Takes the directory in shared memory and the `overflow` on a disk.

        A shard lies whole in one of the two, with all files that belong to it.
        """
        self.root = root
        self.overflow = overflow
        self._roots: tuple[Path, ...] = (root,) if overflow is None else (root, overflow)
        self._lock = threading.Lock()
        self._sums: WeakValueDictionary[tuple[ShardName, str], SharedSums] = WeakValueDictionary()
        """Checksums of the files that are held, by shard and by file name. The name has the
        generation's token, and the shards of its other steps have the same name."""
        self._maps: dict[tuple[int, int], mmap.mmap] = {}
        """Mappings of the slots, by device and inode: a slot that was read once stays mapped, page
        by page, for the next reading."""

    def path(self, generation: int, step: int, root: Path | None = None) -> Path:
        """Returns the directory of one snapshot, which need not exist.

        Args:
            generation: The generation that took it.
            step: Its step.
            root: One of the two directories; None: the one in shared memory.
        """
        return (root or self.root) / generation_directory(generation) / step_directory(step)

    def path_of(self, shard: ShardName) -> Path:
        """Returns the directory with this shard's part of the snapshot, by default the one in
        shared memory."""
        return self.path(shard.generation, shard.step, self._root_of(shard))

    def _root_of(self, shard: ShardName) -> Path:
        for root in self._roots[1:]:
            if _is_in(self.path(shard.generation, shard.step, root), shard):
                return root
        return self.root

    def open(self, generation: int, step: int, root: Path | None = None) -> DiskStorage:
        """Returns the storage of one snapshot in one of the two directories.

        Args:
            generation: The generation that took it.
            step: Its step.
            root: One of the two directories; None: the one in shared memory.
        """
        return DiskStorage(self.path(generation, step, root), durable=False)

    def root_with(self, size: int, *, spare: int) -> Path:
        """Returns the one of the two directories that has room for a copy.

        Args:
            size: Bytes of the copy.
            spare: Bytes that must stay free beside it.

        Raises:
            StorageError: Neither has room.
        """
        for root in self._roots:
            if free_bytes(root) >= size + spare + HEADROOM_BYTES:
                return root
        raise StorageError(f"{self.root} has no room for {(size + spare >> 20) + 1} MiB more")

    def held(self) -> list[HeldSnapshot]:
        """Returns every snapshot of which a rank's whole shard is here, oldest first."""
        ranks_by_snapshot: dict[tuple[int, int, int], list[int]] = {}
        for shard in self._shards(rank_of_snapshot_manifest):
            if self._whole(shard):
                key = (shard.generation, shard.step, shard.world_size)
                ranks_by_snapshot.setdefault(key, []).append(shard.rank)
        return [
            HeldSnapshot(
                generation=generation, step=step, ranks=tuple(sorted(ranks)), world_size=world
            )
            for (generation, step, world), ranks in sorted(ranks_by_snapshot.items())
        ]

    def drafts(self) -> list[ShardName]:
        """Returns the shards that are written and not sealed, oldest first."""
        return self._shards(rank_of_snapshot_draft)

    def has(self, shard: ShardName) -> bool:
        """Returns whether a shard was written, sealed or not."""
        return _is_in(self.path_of(shard), shard)

    def sealed(self, shard: ShardName) -> bool:
        """Returns whether a shard is whole: this node's own with its checksums, or a replica."""
        name = snapshot_manifest_name(shard.rank, shard.world_size)
        return (self.path_of(shard) / name).exists()

    def read_seal(self, shard: ShardName) -> Seal:
        """Returns the seal of a sealed shard; raises `FileNotFoundError` if it has none."""
        path = self.path_of(shard)
        name = snapshot_manifest_name(shard.rank, shard.world_size)
        sums = (path / (self.file_of(shard) + SUMS_SUFFIX)).read_bytes()
        return Seal(sums, (path / name).read_bytes())

    def file_of(self, shard: ShardName) -> str:
        """Returns the name of a written shard's file, sealed or not; raises `FileNotFoundError` if
        it is gone."""
        path = self.path_of(shard)
        start = shard_file_name(shard.rank, shard.world_size, "")[: -len(_SHARD_SUFFIX)]
        for name in _names(path):
            if name.startswith(start) and name.endswith(_SHARD_SUFFIX):
                return name
        raise FileNotFoundError(f"{path} holds no shard of rank {shard.rank}")

    def drop(self, shard: ShardName) -> None:
        """Removes one rank's part of a snapshot, its manifest first."""
        path = self.path_of(shard)
        of = f"rank-{shard.rank:05d}-of-{shard.world_size:05d}"
        for name in sorted(_names(path), key=lambda name: not name.startswith("manifest")):
            if of in name:
                (path / name).unlink(missing_ok=True)

    def drop_superseded(self) -> None:
        """Removes the shards of each state that is also here whole, in fewer shards."""
        whole = {
            (held.generation, held.step): held.world_size
            for held in reversed(self.held())
            if len(held.ranks) == held.world_size
        }
        for shard in [*self._shards(rank_of_snapshot_manifest), *self.drafts()]:
            size = whole.get((shard.generation, shard.step), shard.world_size)
            if shard.world_size > size:
                self.drop(shard)

    def drop_draft(self, shard: ShardName) -> None:
        """Removes the draft of a shard that cannot be sealed."""
        path = self.path_of(shard)
        (path / snapshot_draft_name(shard.rank, shard.world_size)).unlink(missing_ok=True)

    def write_draft(
        self,
        manifest: Manifest,
        rank: int,
        must_be_finite: Collection[Range] = (),
        root: Path | None = None,
    ) -> None:
        """Records what a rank's shard is to be; it counts once `finish_draft` was called.

        Args:
            manifest: The manifest without `files`.
            rank: The rank whose shard this is.
            must_be_finite: Ranges of the file that must be finite for the shard to be sealed.
            root: The one of the two directories that holds the shard; None: the one in shared
                memory.
        """
        storage = self.open(manifest.generation, manifest.step, root)
        text = b'{"layout_digest":"%s","finite":%s,"manifest":%s}\n' % (
            manifest.layout.digest().encode(),
            json.dumps(encode(list(must_be_finite)), separators=(",", ":")).encode(),
            to_json(manifest).strip(),
        )
        storage.write(snapshot_draft_name(rank, manifest.layout.world_size) + _UNFINISHED, [text])

    def finish_draft(self, shard: ShardName, root: Path | None = None) -> None:
        """Records that all bytes of a shard are written; its writer calls this last.

        Args:
            shard: The shard.
            root: As for `write_draft`.
        """
        folder = self.path(shard.generation, shard.step, root)
        name = snapshot_draft_name(shard.rank, shard.world_size)
        (folder / (name + _UNFINISHED)).rename(folder / name)

    def seal(self, shard: ShardName) -> Seal | None:
        """Adds the checksums and the manifest to a shard that its worker has written; returns both.

        Returns None if the shard is sealed already. Raises `FileNotFoundError` if the snapshot is
        gone, and `NotFinite` if trained tensors are not finite, because training must never resume
        from such a state.
        """
        storage = DiskStorage(self.path_of(shard), durable=False)
        of = (shard.rank, shard.world_size)
        if self.sealed(shard):
            storage.remove(
                snapshot_draft_name(*of)
            )  # the process that sealed it may have been killed before this
            return None
        draft = json.loads((storage.path / snapshot_draft_name(*of)).read_bytes())
        value = draft["manifest"]
        names = [
            shard_file_name(r, shard.world_size, value["token"]) for r in range(shard.world_size)
        ]
        file_name = names[shard.rank]
        ranges = decode(tuple[Range, ...], draft.get("finite", []), "the draft of a snapshot")
        with self.holding(shard, file_name) as held:
            finite.check_ranges(held.data, ranges, f"step {shard.step} on rank {shard.rank}")
            held.add_sums()
            data, file = held.sums.finish(file_name, draft["layout_digest"])
        storage.write(file_name + SUMS_SUFFIX, [data])
        files = [ShardFile(name, 0, None) for name in names]
        files[shard.rank] = file
        value["files"] = encode(files)
        value.pop("digest")
        text = with_digest(value)
        storage.write(snapshot_manifest_name(*of), [text])
        storage.remove(snapshot_draft_name(*of))
        return Seal(data, text)

    @contextmanager
    def holding(self, shard: ShardName, name: str) -> Iterator[HeldShard]:
        """Yields a shard's file through a separate link, so that removing its snapshot does not
        free the slot meanwhile."""
        root = self._root_of(shard)
        folder = root / HELD
        folder.mkdir(exist_ok=True)
        link = folder / f"{os.getpid()}-{os.urandom(6).hex()}"
        os.link(self.path(shard.generation, shard.step, root) / name, link)
        try:
            with self._lock:
                data = self._mapped(link)
                sums = self._sums.setdefault((shard, name), SharedSums(len(data)))
            yield HeldShard(name, data, sums)
        finally:
            link.unlink(missing_ok=True)

    def _mapped(self, path: Path) -> memoryview:
        """Returns a slot's mapped bytes. While it is mapped here, no other file gets its inode."""
        living = {place for root in self._roots for place in _inodes(root / SLOTS)}
        self._maps = {place: mapped for place, mapped in self._maps.items() if place in living}
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            place = (status.st_dev, status.st_ino)
            mapped = self._maps.get(place)
            if mapped is None or len(mapped) < status.st_size:
                mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
                self._maps[place] = mapped
        return memoryview(mapped)[: status.st_size]

    def keep_only(self, states: Collection[tuple[int, int]]) -> None:
        """Removes every snapshot except those of these (generation, step) pairs."""
        kept = {generation for generation, _ in states}
        for root in self._roots:
            for generation in _generations(root):
                folder = root / generation_directory(generation)
                for name in _names(folder):
                    if (generation, step_of(name)) not in states:
                        shutil.rmtree(folder / name, ignore_errors=True)
                if generation not in kept:  # a worker may be about to write into a new one
                    with suppress(OSError):
                        folder.rmdir()

    def clear(self) -> None:
        """Removes every snapshot and slot; the two directories themselves stay."""
        for root in self._roots:
            generations = [generation_directory(generation) for generation in _generations(root)]
            for name in (*generations, SLOTS, HELD):
                shutil.rmtree(root / name, ignore_errors=True)

    def open_file(self, generation: int, step: int, name: str) -> BinaryIO:
        """Opens one of a snapshot's files to read.

        Args:
            generation: The generation that took the snapshot.
            step: Its step.
            name: Name of the file.

        Raises:
            FileNotFoundError: There is no such file, or no snapshot has a file of that name.
        """
        if not is_snapshot_file(name) or min(generation, step) < 0:
            raise FileNotFoundError(f"a snapshot has no file {name!r}")
        paths = [self.path(generation, step, root) / name for root in self._roots]
        path = next((path for path in paths if os.path.lexists(path)), paths[0])
        if path.is_symlink():
            raise FileNotFoundError(f"{name!r} is a link, which no snapshot has")
        return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")

    def _shards(self, rank_of: Callable[[str], tuple[int, int] | None]) -> list[ShardName]:
        """Returns every shard with a file whose name `rank_of` parses, oldest first."""
        shards = set()
        for root in self._roots:
            for generation in _generations(root):
                for directory in _names(root / generation_directory(generation)):
                    step = step_of(directory)
                    if step is None:
                        continue
                    for name in _names(self.path(generation, step, root)):
                        if (of := rank_of(name)) is not None:
                            shards.add(ShardName(generation, step, *of))
        return sorted(shards)

    def _whole(self, shard: ShardName) -> bool:
        storage = DiskStorage(self.path_of(shard), durable=False)
        try:
            manifest = read_manifest(storage, snapshot_manifest_name(shard.rank, shard.world_size))
            file = manifest.files[shard.rank]
            return (
                file.name == shard_file_name(shard.rank, shard.world_size, manifest.token)
                and storage.size(file.name) == file.bytes
                and storage.size(file.name + SUMS_SUFFIX) > 0
            )
        except (ElasticZeroError, FileNotFoundError, IndexError):
            return False


def _generations(root: Path) -> list[int]:
    numbers = (generation_of(name) for name in _names(root))
    return sorted(generation for generation in numbers if generation is not None)


def _is_in(path: Path, shard: ShardName) -> bool:
    """Returns whether a snapshot's directory holds a shard, sealed or not."""
    of = (shard.rank, shard.world_size)
    # Sealing adds the manifest before it removes the draft, so this order finds one of them.
    return (path / snapshot_draft_name(*of)).exists() or (
        path / snapshot_manifest_name(*of)
    ).exists()


def _inodes(folder: Path) -> list[tuple[int, int]]:
    try:
        device = folder.stat().st_dev
        return [(device, entry.inode()) for entry in os.scandir(folder)]
    except FileNotFoundError:
        return []


def _names(path: Path) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except FileNotFoundError:
        return []
