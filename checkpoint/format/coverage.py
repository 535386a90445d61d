"""Checks that the parts of a tensor make up the whole of it, each element once.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The (offsets, sizes) of a part."""
_MOST_UNSORTED = 1000
"""Maximum number of parts that no straight cut divides, which are compared pair by pair."""
_MOST_CUTS = 200
"""Maximum number of times that parts are cut again along another dimension."""


def check_cover(name: str, shape: tuple[int, ...], boxes: Sequence[_Box]) -> None:
    """Checks that boxes make up the whole tensor, each element once.

    For every division into rows, columns or tiles the time is that of sorting the boxes.

    Args:
        name: The tensor's name, for messages.
        shape: Its shape.
        boxes: (Offsets, sizes) of each part, both with as many dimensions as the shape.

    Raises:
        ValueError: A part lies outside, two overlap, or an element is in none.
    """
    for offsets, sizes in boxes:
        ends = zip(offsets, sizes, shape, strict=False)
        if {len(offsets), len(sizes)} != {len(shape)} or any(o + s > most for o, s, most in ends):
            raise ValueError(f"a part of {name!r} lies outside of it")
    full = [box for box in boxes if math.prod(box[1])]
    if sum(math.prod(sizes) for _, sizes in full) != math.prod(shape):
        raise ValueError(f"the parts of {name!r} are not the whole of it")
    waiting = [(full, 0, 0)]  # (boxes, the dimension to cut along next, number of cuts so far)
    while waiting:
        group, cuts, in_vain = waiting.pop()
        if len(group) < 2:
            continue
        if in_vain == len(shape) or cuts == _MOST_CUTS:
            _check_pairs(name, group)
            continue
        parts = _divided(group, cuts % len(shape))
        vain = in_vain + 1 if len(parts) == 1 else 0
        waiting += [(part, cuts + 1, vain) for part in parts]


def _divided(boxes: list[_Box], dim: int) -> list[list[_Box]]:
    """Groups the boxes so that a cut along `dim` between two groups divides no box."""
    groups: list[list[_Box]] = []
    reached = -1
    for box in sorted(boxes, key=lambda box: box[0][dim]):
        if not groups or box[0][dim] >= reached:
            groups.append([])
        groups[-1].append(box)
        reached = max(reached, box[0][dim] + box[1][dim])
    return groups


def _check_pairs(name: str, boxes: list[_Box]) -> None:
    if len(boxes) > _MOST_UNSORTED:
        raise ValueError(f"{len(boxes)} parts of {name!r} overlap, or lie without any order")
    for index, (starts, sizes) in enumerate(boxes):
        for others, lengths in boxes[index + 1 :]:
            if all(
                a < c + d and c < a + b
                for a, b, c, d in zip(starts, sizes, others, lengths, strict=True)
            ):
                raise ValueError(f"two parts of {name!r} overlap")
