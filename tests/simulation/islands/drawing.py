"""Draws what a schedule of islands is like from its seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from elasticzero.launcher.protocol.rounds.documents import SampleOrder
from elasticzero.launcher.protocol.rounds.lead import RoundSettings
from elasticzero.options.diloco import DiLoCo

KINDS = ("kill", "kill", "freeze", "join", "drain", "store", "cut", "begin again", "hang")
"""Faults, each as often as it is drawn."""
STREAM_SECTION = 1_000
"""Positions in a section of a stream, of which most have no sample."""
LAST_FAULT = 400
"""Tick before which all faults strike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Holds what a seed decides."""

    islands: int
    speeds: tuple[float, ...]
    """Shares of the ticks in which islands make an inner step; one is drawn for each."""
    diloco: DiLoCo
    settings: RoundSettings
    order: SampleOrder
    ends: tuple[int, ...]
    """Of each section of a stream the position after its last sample; empty: of no stream."""
    ahead: int
    """Number of claims that islands ask for besides the one that they train on."""
    faults: tuple[int, ...]
    """Ticks of the faults."""
    delay: int
    """Most ticks until an island sees a change in the store."""
    fetch: int
    """Most ticks that a fetch takes."""
    pairs: bool
    """Some faults strike two islands at once."""


def draw(seed: int) -> Drawn:
    """Draws a schedule."""
    dice = random.Random(seed)
    every = dice.randint(1, 8)
    fragments = min(every, dice.choice([1, 1, 2, 3]))
    epoch = dice.randint(20, 200)
    missing = dice.choice([0, 0, dice.randint(0, epoch - 1)])
    order = SampleOrder(
        section=epoch,
        total=epoch * dice.randint(1, 3) - missing,
        global_batch=dice.randint(1, 12),
        digest="of the order",
    )
    stream_order, ends = of_stream(random.Random(f"stream of {seed}"), order)
    return Drawn(
        islands=dice.randint(1, 5),
        speeds=dice.choice([(1.0,), (1.0, 1.0, 0.5), (1.0, 0.2)]),
        diloco=DiLoCo(every=every, fragments=fragments, grace=dice.randint(0, 4)),
        settings=RoundSettings(
            every=every,
            quorum=dice.choice([1.0, 1.0, 0.5, 0.75]),
            max_staleness=dice.choice([0, 1, 8]),
        ),
        order=stream_order,
        ends=ends,
        ahead=dice.choice([1, 1, 3]),
        faults=tuple(
            sorted(dice.randint(5, LAST_FAULT) for _ in range(dice.choice([0, 3, 8, 15])))
        ),
        delay=dice.choice([0, 1, 4]),
        fetch=dice.choice([0, 2, 10]),
        pairs=dice.random() < 0.3,
    )


def of_stream(dice: random.Random, order: SampleOrder) -> tuple[SampleOrder, tuple[int, ...]]:
    """Draws an order of a stream in place of another one, for half of the seeds, and the ends of
    its sections, of which some are empty."""
    count = dice.choice([0, 0, 1, 2, 4, 7, 12])
    if not count:
        return order, ()
    ends = tuple(
        number * STREAM_SECTION + dice.choice([0, *[dice.randint(1, 60)] * 9])
        for number in range(count)
    )
    samples = sum(end % STREAM_SECTION for end in ends)
    return (
        replace(
            order,
            section=STREAM_SECTION,
            is_stream=True,
            total=count * STREAM_SECTION,
            limit=dice.choice([None, None, dice.randint(1, 1 + samples)]),
        ),
        ends,
    )
