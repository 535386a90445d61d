"""Leaves out what a page cannot show: lines of a long log, points of a curve, short spans. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from elasticzero.ops.page.charts import Point, Span

_HEAD = re.compile(rb'\{"time": [-+.e\d]+, "event": "(step|log|captured|kept)"')
"""Begin of a line that each step may bring, as `EventLog` writes it."""
_STEP = re.compile(rb'"step": (\d+)')
_CHECKPOINT = b'"checkpoint": true'


def stride(size_bytes: int, most_bytes: int) -> int:
    """Returns the number of steps of a log of which the events of one are read.

    It is a prime number, or 1: so it meets events that come every so many steps as often as others.

    Args:
        size_bytes: bytes of the log.
        most_bytes: bytes of it that may be read line by line.
    """
    least = -(-size_bytes // max(1, most_bytes))
    if least <= 1:
        return 1
    number = least
    while any(number % i == 0 for i in range(2, int(number**0.5) + 1)):
        number += 1
    return number


def sampled(lines: Iterable[bytes], every: int) -> Iterator[bytes]:
    """Yields the lines of a log without those of most steps.

    Kept are the lines of each step whose number `every` divides, of checkpoints, and the first and
    last step between two lines of another kind: so each generation keeps its ends.
    """
    if every == 1:
        yield from lines
        return
    left_out: bytes | None = None
    is_first = True
    for line in lines:
        head = _HEAD.match(line)
        if head is None:
            if left_out is not None:
                yield left_out
            left_out, is_first = None, True
            yield line
            continue
        match = _STEP.search(line, head.end())
        keep = match is None or int(match[1]) % every == 0 or _CHECKPOINT in line
        if head[1] == b"step":
            keep, is_first = keep or is_first, False
            left_out = None if keep else line
        if keep:
            yield line
    if left_out is not None:
        yield left_out


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """Returns at most `most` of the points, which are in the order of their first number.

    Of each of `most` / 4 parts of equal width the first, the last, the lowest and the highest point
    stay, so no peak is lost.
    """
    if len(points) <= most:
        return list(points)
    parts = max(1, most // 4)
    low, high = points[0][0], points[-1][0]
    width = (high - low) / parts or 1.0
    grouped: dict[int, list[int]] = defaultdict(list)
    for index, (x, _) in enumerate(points):
        grouped[min(parts - 1, max(0, int((x - low) / width)))].append(index)
    chosen: set[int] = set()
    for indexes in grouped.values():
        chosen |= {indexes[0], indexes[-1]}
        chosen.add(min(indexes, key=lambda index: points[index][1]))
        chosen.add(max(indexes, key=lambda index: points[index][1]))
    return [points[index] for index in sorted(chosen)]


def coarse(spans: Sequence[Span], whole_s: float, columns: int) -> list[Span]:
    """Returns at most `columns` spans: of each column of time, what takes most of it.

    Fewer spans than that are returned as they are, equal neighbours joined. Time without a span
    stays without one.

    Args:
        spans: in order, without overlaps.
        whole_s: seconds that all columns cover together.
        columns: maximum number of spans that are returned.
    """
    if len(spans) > columns and whole_s > 0:
        width_s = whole_s / columns
        filled: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for start_s, end_s, what in spans:
            for column in range(
                max(0, int(start_s / width_s)), min(columns - 1, int(end_s / width_s)) + 1
            ):
                left_s, right_s = column * width_s, (column + 1) * width_s
                filled[column][what] += max(0.0, min(end_s, right_s) - max(start_s, left_s))
        coarse_spans = []
        for column, seconds in sorted(filled.items()):
            what = max(seconds, key=lambda name: seconds[name])
            if sum(seconds.values()) >= width_s / 2:
                coarse_spans.append((column * width_s, (column + 1) * width_s, what))
        spans = coarse_spans
    return _joined(spans)


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Returns the spans with neighbours joined that are equal and touch."""
    joined: list[Span] = []
    for start_s, end_s, what in spans:
        if joined and joined[-1][2] == what and start_s - joined[-1][1] < 1e-6:
            joined[-1] = (joined[-1][0], end_s, what)
        else:
            joined.append((start_s, end_s, what))
    return joined
