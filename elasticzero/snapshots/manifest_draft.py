"""Describes the training state as a manifest, with the pieces of it that this rank writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from elasticzero.checkpoint.format.dtypes import spelling_of
from elasticzero.checkpoint.format.layout import Group, Layout, TensorSpec
from elasticzero.checkpoint.format.manifest import Manifest
from elasticzero.checkpoint.io.writer import TensorPiece
from elasticzero.data.tag_requests import tags_of
from elasticzero.ipc.assignment import Assignment
from elasticzero.serialization import encode
from elasticzero.spans import Span
from elasticzero.state.auxiliary import BoundaryCopy
from elasticzero.state.model import FACTOR, OUTER, RNG, RankState, Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterInfo:
    """Identifies the writer of a checkpoint in its manifest and its files' names."""

    rank: int
    world_size: int
    generation: int
    token: str
    strategy: str
    run: int = 1
    """Number of the job's run."""
    replicas: int = 1
    """Number of rows of ranks that hold the whole state each, and divide the writing."""

    @classmethod
    def of(
        cls, assignment: Assignment, strategy: str, shards: int, *, complete: bool
    ) -> WriterInfo:
        """Returns the writer of an assignment.

        Args:
            assignment: That of this rank.
            strategy: The strategy's name.
            shards: Number of ranks that hold the whole state together.
            complete: Whether these alone write it; else all ranks write a part.
        """
        world_size = assignment.world_size
        return cls(
            rank=assignment.rank % shards if complete else assignment.rank,
            world_size=shards if complete else world_size,
            generation=assignment.generation,
            token=assignment.token,
            strategy=strategy,
            run=assignment.run,
            replicas=1 if complete or shards == 1 else world_size // shards,
        )


def draft(
    share: RankState, copy: BoundaryCopy, writer: WriterInfo, before: Layout | None = None
) -> tuple[Manifest, list[TensorPiece]]:
    """Describes the state at a boundary.

    Parameters and optimizer state are as `share` has them now, all else as in `copy`. Buffers are
    rank 0's, which all ranks take over at each boundary: so they are right also where a peer was
    lost before they did.

    Args:
        share: This rank's parameters and optimizer state; all else of the state is added to it.
        copy: The small state at the boundary.
        writer: The rank that writes.
        before: A layout that is likely to be this one's too, and then serves again; None: there is
            none.

    Returns:
        The manifest, and this rank's pieces of the state.
    """
    rank, world_size = writer.rank, writer.world_size
    share.add_residual(share.residual, rank, world_size, writer.replicas)
    share.add_even({FACTOR + name: factor for name, factor in share.factors.items()})
    share.add_even({OUTER + name: tensor for name, tensor in share.outer.items()})
    buffers = copy.stored_buffers()
    share.add_whole(buffers, (0,) * len(buffers))
    share.add_whole(copy.tensors, (0,) * len(copy.tensors))
    kinds = copy.rng.tensors()
    for other in range(world_size):
        named = {f"{RNG}{kind}/{other}": tensor for kind, tensor in kinds.items()}
        share.add_whole(named, (other,) * len(named))
    layout = Layout(
        world_size=world_size,
        tensors={name: stored(spec) for name, spec in share.specs.items()},
        groups=tuple(
            Group(p.rule, p.names, tuple(min(r, world_size - 1) for r in p.ranks))
            for p in share.partitions
        ),
        replicas=writer.replicas,
    )
    if before == layout:
        layout = before
    asked = copy.position.tagging
    others = tuple(request for request in asked if request.step != copy.step)
    position = replace(copy.position, tagging=others)  # its own are in the manifest
    optimizers = {"optimizers": share.optimizers} if share.optimizers else {}
    manifest = Manifest(
        step=copy.step,
        generation=writer.generation,
        token=writer.token,
        strategy=writer.strategy,
        layout=layout,
        state={"step": copy.step, "position": encode(position), **copy.json, **optimizers},
        tags=tags_of(asked, copy.step),
        run=writer.run,
    )
    return manifest, list(_pieces(layout.spans(rank), share))


def _pieces(spans: Mapping[str, Span], share: RankState) -> Iterator[TensorPiece]:
    for name, span in spans.items():
        held = share.held[name]
        flat = held.tensor.reshape(-1)
        part = flat[span.start - held.start : span.stop - held.start]
        yield TensorPiece(name, part, frozen=name in share.frozen)


def as_changed(pieces: list[TensorPiece]) -> list[TensorPiece]:
    """Returns the pieces without a mark that some are likely to be as they were."""
    return [replace(piece, frozen=False) for piece in pieces]


def stored(spec: Spec) -> TensorSpec:
    """Returns a tensor's description in a checkpoint's format."""
    return TensorSpec(spelling_of(spec.dtype), spec.shape)
