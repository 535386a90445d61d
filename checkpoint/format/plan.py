"""Plans a load: it finds the byte ranges that hold the wanted elements.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elasticzero.checkpoint.format.layout import Layout
from elasticzero.errors import CheckpointMismatch
from elasticzero.spans import Span, covering


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Describes elements that one rank's file gives to one wanted span."""

    name: str
    rank: int
    """Rank in the world that wrote the checkpoint."""
    span_in_tensor: Span
    span_in_shard: Span
    """Span of the same elements, where 0 is the first element of the tensor that the file holds."""
    offset_in_target: int
    """Number of elements of the target before these."""


def plan(layout: Layout, targets: Mapping[str, Span]) -> list[Copy]:
    """Returns the copies that fill every target, each element once, in the order of `targets`.

    Args:
        layout: Says which rank wrote which elements.
        targets: The span to fill of each tensor, by name.

    Raises:
        CheckpointMismatch: The checkpoint does not have a tensor, or some of its elements.
    """
    copies = []
    for name, span in targets.items():
        if name not in layout.tensors:
            raise CheckpointMismatch(f"the checkpoint has no tensor {name!r}")
        held = layout.holders(name, span)
        starts = {rank: shard.start for rank, shard in held}
        try:
            alone = span and len(held) == 1 and span == held[0][1]  # as most small tensors are
            parts = held if alone else covering(span, held)
        except ValueError as error:
            raise CheckpointMismatch(f"tensor {name!r}, {layout.tensors[name]}: {error}") from None
        for rank, part in parts:
            start = starts[rank]
            copies.append(
                Copy(
                    name=name,
                    rank=rank,
                    span_in_tensor=part,
                    span_in_shard=Span(part.start - start, part.stop - start),
                    offset_in_target=part.start - span.start,
                )
            )
    return copies
