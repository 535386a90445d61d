"""Stages tensors in shared memory, which is the part of a save that training waits for.

The stager copies a shard's header and its pieces into a slot that is already allocated and mapped.
What it copied there before and training has not changed, such as the base of a LoRA, stays. Where a
GPU has the room, it copies them within the GPU, and from there to the slot while training goes on.
It computes no checksums and writes nothing to storage: the agent seals the shard and copies it
there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elasticzero.checkpoint.format.finite import CHECKED_DTYPES, Range
from elasticzero.checkpoint.format.layout import Layout
from elasticzero.checkpoint.format.manifest import Manifest
from elasticzero.checkpoint.format.shards import shard_header, shard_specs
from elasticzero.checkpoint.io.writer import TensorPiece, ordered_pieces
from elasticzero.checkpoint.ram import device_image
from elasticzero.checkpoint.ram.device_image import DeviceImage
from elasticzero.checkpoint.ram.slots import MemorySlot, Slots, SlotsInUse
from elasticzero.checkpoint.ram.store import ShardName, SnapshotStore
from elasticzero.checkpoint.storage.base import as_storage_error
from elasticzero.state.digests import change_marks

_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class StagedShard:
    """Describes a shard of which each byte is in shared memory, or in an image on the device."""

    size: int
    """Number of its bytes."""
    finish: Callable[[], None] | None = None
    """Waits until all bytes are in shared memory, from when on the shard counts; another thread may
    call it, once, while no other write is begun. None: all of them are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingOptions:
    """Holds the options for staging one shard."""

    extra: bool = False
    """A third slot is allowed."""
    trained: Collection[str] = ()
    """Names of the tensors that must be finite for the shard to be sealed."""
    beside: bool = False
    """Tensors may be copied within their device first, if it has room."""


@dataclass(frozen=True, slots=True)
class _Contents:
    """Says which frozen pieces a slot has, and where."""

    layout: Layout
    rank: int
    start: int
    """Number of bytes in the file before the first piece."""
    marks: Mapping[str, tuple[int, ...]]

    def kept_from(self, before: _Contents | None) -> set[str]:
        """Returns the names of the pieces that a slot with contents of before has already."""
        if before is None or not self.marks or before.rank != self.rank:
            return set()
        same = before.layout is self.layout or before.layout == self.layout
        if before.start != self.start or not same:
            return set()
        return {name for name, mark in self.marks.items() if before.marks.get(name) == mark}


def _ranges(draft: Manifest, rank: int, start: int, trained: Collection[str]) -> list[Range]:
    """Returns the ranges of the trained tensors in a shard's file whose tensors begin at
    `start`.

    Args:
        draft: The manifest without `files`.
        rank: The rank whose shard it is.
        start: Position in the file of the first tensor's first byte.
        trained: Names of the tensors that must be finite.
    """
    ranges = []
    for name, spec in shard_specs(draft, rank).items():
        if name in trained and spec.nbytes and spec.dtype in CHECKED_DTYPES:
            ranges.append(Range(name, spec.dtype, start, start + spec.nbytes))
        start += spec.nbytes
    return ranges


def _placed(
    draft: Manifest, rank: int, pieces: Iterable[TensorPiece], there: Collection[str]
) -> dict[int, torch.Tensor]:
    """Returns the tensors of a shard that are to be copied, by the position of their first byte
    behind the header.

    Args:
        draft: The manifest, which says where each tensor lies.
        rank: The rank whose shard this is.
        pieces: One for each of `draft.layout.spans(rank)`.
        there: Names of the tensors that are there already.
    """
    placed, start = {}, 0
    ordered = ordered_pieces(draft, rank, pieces)
    for name, (spec, data) in zip(shard_specs(draft, rank), ordered, strict=True):
        if spec.nbytes and name not in there:
            placed[start] = data
        start += spec.nbytes
    return placed


def _by_device(
    placed: Mapping[int, torch.Tensor],
) -> Iterator[tuple[torch.device, dict[int, torch.Tensor]]]:
    """Yields each device with its tensors."""
    for device in dict.fromkeys(tensor.device for tensor in placed.values()):
        yield device, {start: t for start, t in placed.items() if t.device == device}


class SharedMemoryStager:
    """Writes the shards of one worker, each into its own slot; one thread at a time may use it."""

    def __init__(
        self, root: Path, local_rank: int, overflow: Path | None = None, *, name: str = ""
    ) -> None:
        """Takes the places of the slots that this worker writes to.

        Args:
            root: The directory of the node's snapshots.
            local_rank: The worker's number on its node.
            overflow: A directory on a disk, for shards that do not fit in `root`; None: there is
                none.
            name: What the slots' names begin with; empty: what those of the worker's own begin
                with.
        """
        self._store = SnapshotStore(root, overflow)
        self._slots = Slots(root, name or f"worker-{local_rank}", overflow)
        self._memory: dict[MemorySlot, torch.Tensor] = {}
        self._contents: dict[MemorySlot, _Contents] = {}
        self._image_bytes = 0
        """Size of the largest image that was made."""
        self._gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        """The worker's own GPU. Another thread's current device is the machine's first until it
        sets one."""
        self._stream: torch.cuda.Stream | None = None

    def reserve(self, size: int) -> None:
        """Allocates and maps memory for shards of `size` bytes in advance, so that no write pays
        for it."""
        for slot in self._slots.reserve(size):
            self._contents.pop(slot, None)
            self._bytes_of(slot)[::_PAGE_BYTES].zero_()

    def write(
        self,
        draft: Manifest,
        rank: int,
        pieces: Iterable[TensorPiece],
        keep: Collection[tuple[int, int]] | None,
        *,
        extra: bool = False,
        trained: Collection[str] = (),
    ) -> int:
        """Copies a rank's pieces into a slot and writes a draft; returns the size of the shard in
        bytes.

        The pieces may change once this returns.

        Args:
            draft: The manifest without `files`, the same on every rank.
            rank: The rank whose shard this is.
            pieces: One for each of `draft.layout.spans(rank)`.
            keep: The snapshots to retain, by generation and step; the slots of all others are freed
                first. None: all are retained.
            extra: A third slot is allowed.
            trained: Names of the tensors that must be finite for the shard to be sealed.

        Raises:
            StorageError: There is no room for the shard, or it cannot be written.
        """
        options = StagingOptions(extra=extra, trained=trained)
        return self.begin(draft, rank, pieces, keep, options).size

    def begin(
        self,
        draft: Manifest,
        rank: int,
        pieces: Iterable[TensorPiece],
        keep: Collection[tuple[int, int]] | None,
        options: StagingOptions,
    ) -> StagedShard:
        """Begins what `write` does; the pieces may change once this returns.

        Args:
            draft: The manifest without `files`, the same on every rank.
            rank: The rank whose shard this is.
            pieces: One for each of `draft.layout.spans(rank)`.
            keep: The snapshots to retain; None: all.
            options: How it is staged.

        Raises:
            StorageError: There is no room for the shard, or it cannot be written.
        """
        with self._as_storage_error():
            return self._begin(draft, rank, pieces, keep, options)

    def _as_storage_error(self) -> AbstractContextManager[None]:
        return as_storage_error(f"cannot write a snapshot in {self._store.root}", or_missing=True)

    def _begin(
        self,
        draft: Manifest,
        rank: int,
        pieces: Iterable[TensorPiece],
        keep: Collection[tuple[int, int]] | None,
        options: StagingOptions,
    ) -> StagedShard:
        shard = ShardName(draft.generation, draft.step, rank, draft.layout.world_size)
        if keep is not None:
            self._store.keep_only({*keep, (draft.generation, draft.step)})
        head, size = shard_header(draft, rank)
        if self._store.has(shard):
            if (self._store.path_of(shard) / draft.file_name(rank)).exists():
                return StagedShard(size)
            self._store.drop(shard)  # the shard is of another run with the same numbers
        slot = self._free_slot(size, options)
        memory = self._bytes_of(slot)
        memory[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        by_name = {piece.name: piece for piece in pieces}
        frozen = {name: piece.data for name, piece in by_name.items() if piece.frozen}
        now = _Contents(draft.layout, rank, len(head), change_marks(frozen))
        there = now.kept_from(self._contents.pop(slot, None))
        placed = _placed(draft, rank, by_name.values(), there)
        ranges = _ranges(draft, rank, len(head), options.trained)
        path = self._store.path(draft.generation, draft.step, slot.root)
        path.mkdir(parents=True, exist_ok=True)
        self._store.write_draft(draft, rank, ranges, slot.root)
        images = self._copy(memory[len(head) : size], placed, beside=options.beside)

        def show() -> None:
            self._contents[slot] = now
            slot.link(path / draft.file_name(rank))
            self._store.finish_draft(shard, slot.root)

        def finish() -> None:
            for image in images:
                image.await_written()
            with self._as_storage_error():
                try:
                    show()
                except Exception as error:
                    (path / draft.file_name(rank)).unlink(missing_ok=True)  # the slot is free again
                    # A newer capture of another rank of the node may have replaced this one.
                    if not isinstance(error, FileNotFoundError) or not slot.path.exists():
                        raise

        if images:
            return StagedShard(size, finish)
        show()
        return StagedShard(size)

    def _free_slot(self, size: int, options: StagingOptions) -> MemorySlot:
        """Returns a free slot; drops shards of states that this node also holds whole if it must.

        Where every node holds the whole state, a worker that is stopped right after a capture has
        a part of that state in one slot, and all of it in the other.
        """
        try:
            return self._slots.take(size, extra=options.extra)
        except SlotsInUse:
            self._store.drop_superseded()
            return self._slots.take(size, extra=options.extra)

    def close(self) -> None:
        for memory in self._memory.values():
            self._unpin(memory)
        self._memory.clear()
        self._contents.clear()
        self._slots.close()

    def _copy(
        self, memory: torch.Tensor, placed: Mapping[int, torch.Tensor], *, beside: bool
    ) -> list[DeviceImage]:
        """Copies tensors into a slot's memory, or into images that are written there later.

        Args:
            memory: The slot's memory behind the header.
            placed: The tensors, by the position in `memory` of their first byte.
            beside: Whether images may be made.

        Returns:
            The images.
        """
        images = []
        on_gpu = False
        for device, tensors in _by_device(placed):
            if beside and (image := self._image(memory, device, tensors)) is not None:
                images.append(image)
                continue
            for start, tensor in tensors.items():
                place = memory[start : start + tensor.nbytes].view(tensor.dtype)
                if tensor.is_cuda:
                    on_gpu = True
                    with torch.cuda.stream(self._side_stream()):
                        place.copy_(tensor.reshape(-1), non_blocking=True)
                else:
                    place.copy_(tensor.reshape(-1))
        if on_gpu:
            self._side_stream().synchronize()
        return images

    def _image(
        self, memory: torch.Tensor, device: torch.device, tensors: Mapping[int, torch.Tensor]
    ) -> DeviceImage | None:
        """Returns an image of tensors on one device; None: it has no room, or it is a GPU that is
        not the worker's own or cannot write to the slot by itself."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        if size > device_image.room(device, self._image_bytes):
            return None
        on_gpu = device.type == "cuda"
        if on_gpu and not (device.index == self._gpu and memory.is_pinned()):
            return None
        try:
            image = DeviceImage(memory, tensors, self._side_stream() if on_gpu else None)
        except torch.OutOfMemoryError:
            return None
        self._image_bytes = max(self._image_bytes, size)
        return image

    def _bytes_of(self, slot: MemorySlot) -> torch.Tensor:
        """Returns the slot's memory as a tensor, pinned if there is a GPU and the system permits
        it."""
        memory = self._memory.get(slot)
        if memory is None or memory.numel() != slot.bytes:
            if memory is not None:
                self._unpin(memory)
            memory = torch.frombuffer(slot.view(), dtype=torch.uint8)
            self._pin(memory)
            self._memory[slot] = memory
            for gone in [slot for slot in self._memory if slot.closed]:
                self._unpin(self._memory.pop(gone))
                self._contents.pop(gone, None)
        return memory

    def _side_stream(self) -> torch.cuda.Stream:
        """Returns a stream whose copies wait for the training's earlier work, and not for its later
        work."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._gpu)
        self._stream.wait_stream(torch.cuda.current_stream(self._gpu))
        return self._stream

    def _pin(self, memory: torch.Tensor) -> None:
        start, size = memory.data_ptr(), memory.numel()
        self._run_in_thread(lambda: torch.cuda.cudart().cudaHostRegister(start, size, 0))

    def _unpin(self, memory: torch.Tensor) -> None:
        start = memory.data_ptr()
        self._run_in_thread(lambda: torch.cuda.cudart().cudaHostUnregister(start))

    def _run_in_thread(self, call: Callable[[], Any]) -> None:
        """Runs a CUDA call in a separate thread, if there is a GPU.

        CUDA keeps the error of a failed call (for memory on a disk's file system, say), and reports
        it at the next kernel that the same thread starts.
        """
        gpu = self._gpu
        if gpu is None:
            return

        def on_own_gpu() -> None:
            torch.cuda.set_device(gpu)
            call()

        thread = threading.Thread(target=on_own_gpu, name="elasticzero-pin", daemon=True)
        thread.start()
        thread.join()
