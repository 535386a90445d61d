"""Writes one rank's part of a captured state: into shared memory, or to storage for want of it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from elasticzero.checkpoint.format.layout import Layout
from elasticzero.checkpoint.format.manifest import Manifest
from elasticzero.checkpoint.format.shards import shard_header
from elasticzero.checkpoint.io.writer import TensorPiece
from elasticzero.checkpoint.ram.staging import SharedMemoryStager, StagedShard, StagingOptions
from elasticzero.ipc.agent_client import AgentClient
from elasticzero.ipc.assignment import Assignment
from elasticzero.snapshots.direct_save import check_finite, write_while_waiting
from elasticzero.snapshots.manifest_draft import WriterInfo, as_changed, draft
from elasticzero.snapshots.memory import Reservation, Sizes
from elasticzero.state.auxiliary import BoundaryCopy
from elasticzero.state.model import RankState

States = Collection[tuple[int, int]]
"""Names states by generation and step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """Holds the state at a boundary as it is to be written."""

    writer: WriterInfo
    manifest: Manifest
    pieces: list[TensorPiece]
    trained: Collection[str]
    """Names of the tensors that training changes."""


class CaptureWriter:
    """Writes the captures of one generation on one rank."""

    def __init__(
        self,
        link: AgentClient,
        strategy: str,
        share: Callable[[], RankState],
        shards: int,
        warn: Callable[[str], None],
    ) -> None:
        """Reserves no memory yet.

        Args:
            link: The client of the agent.
            strategy: The strategy's name.
            share: Returns this rank's parameters and optimizer state.
            shards: Number of ranks that hold the whole state together.
            warn: Prints a message.
        """
        a = link.assignment
        overflow = Path(a.overflow_root) if a.overflow_root else None
        self._link = link
        self._strategy = strategy
        self._share, self._shards = share, shards
        self._memory = SharedMemoryStager(Path(a.snapshot_root), a.local_rank, overflow)
        self._warn = warn
        self._reservation = Reservation(self._memory, warn)
        self._layout: Layout | None = None
        """The newest layout, which is likely to be the next one too."""

    @property
    def _assignment(self) -> Assignment:
        return self._link.assignment

    @property
    def ready(self) -> bool:
        """Returns whether the memory is reserved."""
        return self._reservation.done

    @property
    def reserving(self) -> bool:
        """Returns whether a reservation was begun."""
        return self._reservation.begun

    def enter_world(self, shards: int) -> None:
        """Goes on in another world, of which so many ranks hold the whole state together. Its
        shards have other sizes, so that memory is to be reserved anew."""
        self._reservation = Reservation(self._memory, self._warn, earlier=self._reservation)
        self._shards, self._layout = shards, None

    def reserve(self, copy: BoundaryCopy) -> None:
        """Allocates and maps memory for captures of this size, while training goes on."""
        self._reservation.begin(self._shard_bytes(self.draft(copy)))

    def await_memory(self) -> None:
        """Waits until the memory is reserved, or is known not to be there."""
        self._reservation.wait()

    def sizes(self, copy: BoundaryCopy, *, whole: bool) -> Sizes:
        """Returns the sizes of a capture.

        Args:
            copy: The small state at a boundary.
            whole: Whether this node holds the complete state.
        """
        shard = self._shard_bytes(self.draft(copy))
        if not whole:
            return Sizes(shard=shard)
        writer = self._writer_info(complete=True)
        manifest, _ = draft(self._share_for(complete=True), copy, writer)
        apart = 2 * sum(part.nbytes for part in self._share().residual.values())
        apart *= self._assignment.local_world_size  # where a peer is lost
        state = self._shards * shard_header(manifest, writer.rank)[1]
        return Sizes(shard=shard, whole=state + apart)

    def _shard_bytes(self, drafted: Drafted) -> int:
        return shard_header(drafted.manifest, self._assignment.rank)[1]

    def draft(self, copy: BoundaryCopy, *, complete: bool = False) -> Drafted:
        """Returns what this rank writes of a boundary's state.

        Args:
            copy: The small state at the boundary.
            complete: Whether only ranks that hold the whole state together write it; by default all
                ranks write a part.
        """
        writer, share = self._writer_info(complete=complete), self._share_for(complete=complete)
        trained = share.trained()  # before the draft adds buffers and other tensors
        manifest, pieces = draft(share, copy, writer, self._layout)
        self._layout = manifest.layout
        return Drafted(writer=writer, manifest=manifest, pieces=pieces, trained=trained)

    def _share_for(self, *, complete: bool) -> RankState:
        """Returns this rank's parameters and optimizer state. Where ranks that hold the same part
        of them write it each by itself, as `complete` says, what they have alone is left out."""
        share = self._share()
        if complete and self._shards < self._assignment.world_size:
            share.residual = share.residual_sum
        return share

    def _writer_info(self, *, complete: bool) -> WriterInfo:
        return WriterInfo.of(self._assignment, self._strategy, self._shards, complete=complete)

    def begin_into_memory(
        self, drafted: Drafted, keep: States, *, every_byte: bool, extra: bool, beside: bool
    ) -> StagedShard:
        """Begins to write this rank's shard into shared memory; the state may change after this.

        Args:
            drafted: What is written.
            keep: The states in memory that must stay.
            every_byte: Whether tensors that are likely to be as they were are written too.
            extra: Whether memory may be allocated beyond that of other captures.
            beside: Whether a part may be written while training goes on.

        Raises:
            StorageError: There is no room for the shard, or it cannot be written.
        """
        return self._memory.begin(
            drafted.manifest,
            drafted.writer.rank,
            as_changed(drafted.pieces) if every_byte else drafted.pieces,
            keep,
            StagingOptions(extra=extra, trained=drafted.trained, beside=beside),
        )

    def onto_storage(self, drafted: Drafted) -> str:
        """Writes this rank's shard to storage, while training waits; returns its own manifest, by
        which rank 0's agent commits."""
        pieces = as_changed(drafted.pieces)
        return write_while_waiting(self._link, drafted.manifest, pieces, drafted.trained)

    def check_finite(self, drafted: Drafted) -> None:
        """Raises `NotFinite` if tensors that training changes are not finite."""
        check_finite(self._assignment, drafted.manifest, drafted.pieces, drafted.trained)

    def close(self) -> None:
        """Releases this process's mappings of the memory; the snapshots stay."""
        self._reservation.wait()
        self._memory.close()
