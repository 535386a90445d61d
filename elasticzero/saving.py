"""The training state to and from checkpoints and snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from elasticzero.channel import Assignment, Held, Resume, Source
from elasticzero.checkpoint.disk import DiskStorage
from elasticzero.checkpoint.http_storage import HttpStorage
from elasticzero.checkpoint.manifest import Group, Layout, Manifest, TensorSpec, step_directory
from elasticzero.checkpoint.reader import (
    Checkpoint,
    Target,
    open_snapshot,
    open_step,
    torch_dtype,
)
from elasticzero.checkpoint.reader import spec_of as stored_spec_of
from elasticzero.checkpoint.snapshot import SnapshotStore
from elasticzero.checkpoint.storage import Readable, open_directory
from elasticzero.checkpoint.writer import (
    Piece,
    Terms,
    Written,
    write_checkpoint,
    write_snapshot,
)
from elasticzero.data import Position
from elasticzero.errors import CheckpointMismatch
from elasticzero.parallel import Strategy
from elasticzero.records import decode, encode
from elasticzero.spans import Span
from elasticzero.state import (
    MODEL,
    RNG,
    BoundaryCopy,
    RngState,
    Share,
    SmallState,
    Spec,
    seed_all,
)
from elasticzero.values import tensor_names

COMMIT_WAIT_S = 60.0
"""How long rank 0 waits to see files that the other ranks have written: storage may be slow to show
them."""


class Keeper:
    """Reads and writes the training state of one generation on one rank."""

    def __init__(
        self, assignment: Assignment, strategy_name: str, strategy: Strategy, small: SmallState
    ) -> None:
        self.strategy = strategy
        self.small = small
        self.copy: BoundaryCopy | None = None
        """Of the last boundary; None before the state is in place."""
        self.saving = assignment.checkpoint_dir is not None
        """Whether checkpoints are written; the same on all ranks."""
        self._assignment = assignment
        self._name = strategy_name
        self._saved_step = 0

    def restore(self) -> tuple[BoundaryCopy, int]:
        """Put the state in place that the assignment says; returns its copy and the bytes read."""
        resume = self._assignment.resume
        if resume.tier == "fresh":
            return self.capture(0, Position()), 0
        checkpoint = open_source(self._assignment)
        position = load(checkpoint, self.strategy, self.small, self._assignment.rank)
        step = checkpoint.manifest.step
        if resume.tier == "storage":
            self._saved_step = step
        return self.capture(step, position), checkpoint.bytes_read

    def capture(self, step: int, position: Position) -> BoundaryCopy:
        """Copy the small mutable state, at a boundary."""
        self.copy = self.small.capture(step, position)
        return self.copy

    def checkpoint(self, agree: Callable[[int], int]) -> Callable[[], Written] | None:
        """What writes this boundary's checkpoint; None where it is written, or wanted nowhere.

        agree: gives every rank the greatest number of all.
        """
        assignment, copy = self._assignment, self.copy
        if not self.saving or copy is None or copy.step <= self._saved_step:
            return None
        assert assignment.checkpoint_dir is not None
        manifest, pieces = draft(self.strategy.share(), copy, self._author(complete=False))
        directory = open_directory(assignment.checkpoint_dir)
        replacing = copy.step in assignment.bad_steps
        terms = Terms(agree=agree, wait_s=COMMIT_WAIT_S, replacing=replacing)

        def save() -> Written:
            written = write_checkpoint(directory, manifest, assignment.rank, pieces, terms)
            self._saved_step = manifest.step
            return written

        return save

    def snapshot(self) -> Held:
        """Write this boundary's snapshot in shared memory."""
        assert self.copy is not None
        author = self._author(complete=self.strategy.replicated)
        manifest, pieces = draft(self.strategy.share(), self.copy, author)
        write_snapshot(Path(self._assignment.snapshot_root), manifest, author.rank, pieces)
        return Held(
            step=self.copy.step,
            generation=author.generation,
            rank=author.rank,
            world_size=author.world_size,
        )

    def _author(self, *, complete: bool) -> Author:
        return Author(
            rank=0 if complete else self._assignment.rank,
            world_size=1 if complete else self._assignment.world_size,
            generation=self._assignment.generation,
            token=self._assignment.token,
            strategy=self._name,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Author:
    """Who writes: what names a checkpoint's files and stands in its manifest."""

    rank: int
    world_size: int
    generation: int
    token: str
    strategy: str


def draft(share: Share, copy: BoundaryCopy, author: Author) -> tuple[Manifest, list[Piece]]:
    """The manifest of the state at a boundary and this rank's pieces of it.

    Parameters and optimizer state are as `share` has them now, all else as in `copy`. Buffers are
    rank 0's, which all ranks take over at each boundary: so they are right also where a peer was
    lost before they did.
    """
    rank, world_size = author.rank, author.world_size
    share.add_whole(copy.buffers, (0,) * len(copy.buffers))
    share.add_whole(copy.tensors, (0,) * len(copy.tensors))
    for other in range(world_size):
        kinds = copy.rng.tensors()
        named = {f"{RNG}{kind}/{other}": tensor for kind, tensor in kinds.items()}
        share.add_whole(named, (other,) * len(named))
    layout = Layout(
        world_size=world_size,
        tensors={name: _stored(spec) for name, spec in share.specs.items()},
        groups=tuple(
            Group(p.rule, p.names, tuple(min(r, world_size - 1) for r in p.ranks))
            for p in share.partitions
        ),
    )
    manifest = Manifest(
        step=copy.step,
        generation=author.generation,
        token=author.token,
        strategy=author.strategy,
        layout=layout,
        state={"step": copy.step, "position": encode(copy.position), **copy.json},
    )
    return manifest, list(_pieces(layout.spans(rank), share))


def _pieces(spans: Mapping[str, Span], share: Share) -> Iterator[Piece]:
    for name, span in spans.items():
        held = share.held[name]
        flat = held.tensor.reshape(-1)
        yield Piece(name, flat[span.start - held.start : span.stop - held.start])


def _stored(spec: Spec) -> TensorSpec:
    return TensorSpec(stored_spec_of(torch.empty(0, dtype=spec.dtype)).dtype, spec.shape)


def open_source(assignment: Assignment) -> Checkpoint:
    """The checkpoint or snapshot that the assignment says to go on from."""
    resume = assignment.resume
    if resume.tier == "storage":
        assert assignment.checkpoint_dir is not None
        directory = open_directory(assignment.checkpoint_dir)
        return open_step(directory.step(step_directory(resume.step)))
    own_first = sorted(resume.sources, key=lambda source: source.node != assignment.node)
    places: dict[int, list[Readable]] = {}
    for source in own_first:
        places.setdefault(source.rank, []).append(_place(source, resume, assignment))
    return open_snapshot(places, resume.generation, resume.step)


def _place(source: Source, resume: Resume, assignment: Assignment) -> Readable:
    generation, step = resume.generation, resume.step
    if source.node == assignment.node:
        path = SnapshotStore(Path(assignment.snapshot_root)).path(generation, step)
        return DiskStorage(path, durable=False)
    url = f"http://{source.address}/snapshots/{generation}/{step}"
    return HttpStorage(url, assignment.token)


def load(checkpoint: Checkpoint, strategy: Strategy, small: SmallState, rank: int) -> Position:
    """Put a checkpoint in place, and return where its data stands.

    Raises `CheckpointMismatch` before anything is changed when it does not fit.
    """
    manifest = checkpoint.manifest
    tensors, json = manifest.layout.tensors, manifest.state
    where = f"the checkpoint of step {manifest.step}"
    _check_model(checkpoint, strategy.share(), small)
    small.check(json, where)
    stored = {
        name: Spec(dtype=torch_dtype(spec.dtype), shape=spec.shape)
        for name, spec in tensors.items()
    }
    extra: dict[str, torch.Tensor] = {
        name: torch.empty(stored[name].shape, dtype=stored[name].dtype)
        for name in [*tensor_names(json.get("tracked")), *tensor_names(json.get("groups"))]
    }
    kinds = {n.split("/")[1]: n for n in tensors if n.startswith(RNG) and n.endswith(f"/{rank}")}
    generators = {
        kind: torch.empty(tensors[name].shape, dtype=torch.uint8) for kind, name in kinds.items()
    }
    whole = {MODEL + name: buffer.data for name, buffer in small.buffers.items()} | extra
    whole |= {kinds[kind]: tensor for kind, tensor in generators.items()}
    with strategy.filling(stored) as slots:
        targets = [Target(slot.name, slot.span, slot.tensor) for slot in slots]
        targets += [Target(name, Span(0, t.numel()), t) for name, t in whole.items()]
        checkpoint.load(targets)
    small.apply(json, extra)
    position = decode(Position, json.get("position", {}), f"{where}: position")
    if generators:
        RngState.from_tensors(generators).apply(small.device)
    else:
        seed_all(0, rank, manifest.step)
    return position


def _check_model(checkpoint: Checkpoint, share: Share, small: SmallState) -> None:
    expected = {n: _stored(spec) for n, spec in share.specs.items() if n.startswith(MODEL)}
    expected |= {MODEL + name: stored_spec_of(b) for name, b in small.buffers.items()}
    checkpoint.check(expected, allow_more=True)
    names = checkpoint.manifest.layout.tensors
    unknown = [name for name in names if name.startswith(MODEL) and name not in expected]
    if unknown:
        raise CheckpointMismatch(
            f"the checkpoint of step {checkpoint.manifest.step} does not fit the model, which has "
            f"no {', '.join(name.removeprefix(MODEL) for name in unknown[:5])}"
            + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
        )
