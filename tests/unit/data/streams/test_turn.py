"""The order of an epoch, compared with one that is written down place by place."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticzero.data.position import UNKNOWN
from elasticzero.data.streams.turn import ReadProgress

totals = st.lists(st.integers(0, 9), min_size=1, max_size=7)


def order(samples: list[int]) -> list[int]:
    """The readers at all places of the order."""
    return [v for turn in range(max(samples)) for v, total in enumerate(samples) if turn < total]


@given(samples=totals, data=st.data())
@settings(max_examples=500)
def test_places_are_decided_once_all_before_them_are(
    samples: list[int], data: st.DataObject
) -> None:
    read = [data.draw(st.integers(0, total)) for total in samples]
    ended = [data.draw(st.booleans()) and r == t for r, t in zip(read, samples, strict=True)]
    progress = ReadProgress(
        np.array(read),
        np.array([t if e else UNKNOWN for t, e in zip(samples, ended, strict=True)]),
    )
    places = order([*samples])
    decided, taken = 0, [0] * len(samples)
    for turn in range(max(samples) + 1):
        for v in range(len(samples)):
            if ended[v] and turn >= samples[v]:
                continue
            if turn >= read[v]:
                break
            taken[v] += 1
            decided += 1
        else:
            continue
        break
    assert progress.decided == decided
    assert progress.whole == all(ended)
    for count in range(decided + 1):
        expected = [places[:count].count(v) for v in range(len(samples))]
        assert progress.drawn(count).tolist() == expected
