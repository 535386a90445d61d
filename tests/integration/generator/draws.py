"""Draws a script, a strategy and a sequence of worlds from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from elasticzero.spans import STRATEGIES
from tests.integration.generator.buffers import BUFFERS, EXTRA
from tests.integration.generator.calls import CALLS, LOSSES, MEAN
from tests.integration.generator.changes import CHANGES
from tests.integration.generator.elements import Element
from tests.integration.generator.optimizers import OPTIMIZERS
from tests.integration.generator.parameters import CHANGED_IN_FORWARDS, KINDS
from tests.integration.generator.schedules import NONE, SCHEDULES

GLOBAL_BATCH = 8
ROWS = (40, 36, 34)
"""Numbers of samples: the last global batch of an epoch is whole, half, or smaller than a world."""
EPOCHS = 2
STEPS = EPOCHS * 5
"""Global batches of each script."""
NARROW_TOLERANCE = {"float64": 0.0, "float32": 5e-3, "bfloat16": 0.05}
"""Difference that the rounding of sums of a dtype may make in `STEPS` steps."""
NETWORK = [*BUFFERS, *EXTRA, *KINDS, *CHANGED_IN_FORWARDS]

End = Literal["kill", "drain", "finish"]
Place = Literal["begin", "forward", "backward", "stepped", "changed"]
"""Where in a step a rank is killed: before its forward, in it, after its backward, after
`session.step()`, or after what the script does then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One generation, and how it ends."""

    ranks: int
    end: End = "finish"
    step: int = STEPS
    """The step at which it ends."""
    rank: int = 0
    """The rank that is killed, or told to leave."""
    place: Place = "begin"
    """Where it is killed."""

    def __str__(self) -> str:
        if self.end == "kill":
            return f"{self.ranks} (rank {self.rank} is killed in step {self.step}, {self.place})"
        return f"{self.ranks} ({self.end} at step {self.step})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One script, one strategy, one sequence of worlds."""

    seed: int
    strategy: str
    worlds: tuple[World, ...]
    elements: tuple[Element, ...]
    """What the network has, what the script does, and its calls."""
    optimizer: Element
    schedule: Element = NONE
    loss: Element = MEAN
    dtype: str = "float64"
    rows: int = ROWS[0]
    micro: int | None = None
    weighted: bool = False
    """True if samples have weights, some of them 0."""
    clip: float | None = None
    """What `session.step` gets as `max_grad_norm`."""
    since: int = 0
    """The step after which the script's changes begin."""
    each_epoch: bool = False
    """True if each epoch is a loop of its own."""
    nested: bool = False
    """True if each element of the network is a module of its own."""
    on_storage: bool = False
    """True if worlds go on from checkpoints, and not from memory."""
    mirrored: bool = False
    """True if each rank keeps a live copy of the next one's part of divided state."""
    bucket_bytes: int | None = None
    verify_every: int | None = None

    @property
    def pieces(self) -> tuple[Element, ...]:
        """Returns all elements of the script."""
        return (*self.elements, self.optimizer, self.schedule, self.loss)

    @property
    def tolerance(self) -> float:
        """Returns the difference that is no fault, for numbers about 1."""
        return max(NARROW_TOLERANCE[self.dtype], *(p.tolerance for p in self.pieces))

    def __str__(self) -> str:
        names = ", ".join(p.name for p in self.pieces if p not in (NONE, MEAN))
        worlds = ", then ".join(str(world) for world in self.worlds)
        mirrors = " with mirrors" if self.mirrored else ""
        return (
            f"seed {self.seed}: {self.strategy}{mirrors}, {self.dtype}; {names}; worlds of {worlds}"
        )


def draw(seed: int, strategy: str | None = None) -> Draw:
    """Returns what a seed draws, for a strategy or for one of all.

    Args:
        seed: Decides everything.
        strategy: The strategy; None: the seed decides.
    """
    chance = random.Random(f"script {seed}")
    strategy = strategy or chance.choice(STRATEGIES)
    dtype = chance.choices(list(NARROW_TOLERANCE), [16, 3, 3])[0]
    since = chance.choice((0, 0, 0, 2))

    def choose(table: Sequence[Element]) -> Element:
        possible = [
            element
            for element in table
            if element.limit(strategy) is None and (dtype != "bfloat16" or element.narrow)
        ]
        return chance.choices(possible, [element.odds for element in possible])[0]

    def several(table: Sequence[Element], odds: Sequence[int]) -> dict[str, Element]:
        count = chance.choices(range(len(odds)), odds)[0]
        return {element.name: element for element in (choose(table) for _ in range(count))}

    network = several(NETWORK, (1, 4, 4, 2))
    changes = several(CHANGES, (6, 5, 2))
    calls = several(CALLS, (5, 3, 1))
    elements = tuple((network | changes | calls).values())
    optimizer, schedule, loss = choose(OPTIMIZERS), choose(SCHEDULES), choose(LOSSES)
    excluded = {name for element in (*elements, optimizer) for name in element.excludes}
    elements = tuple(element for element in elements if element.name not in excluded)
    if any(element.twice for element in (*elements, loss)):  # torch refuses such a backward
        elements = tuple(e for e in elements if e not in CHANGED_IN_FORWARDS)
    may_divide = not any(e.whole for e in (*elements, optimizer, schedule, loss))
    micro = chance.choice((None, 1, 2)) if may_divide else None
    worlds = _worlds(chance, since)
    has_finish = any(world.end == "finish" for world in worlds[:-1])
    return Draw(
        seed=seed,
        strategy=strategy,
        worlds=worlds,
        elements=elements,
        optimizer=optimizer,
        schedule=schedule,
        loss=loss,
        dtype=dtype,
        rows=chance.choice(ROWS),
        micro=micro,
        weighted=chance.random() < 0.25,
        clip=chance.choice((None, None, 0.1)),
        since=since,
        each_epoch=not has_finish and chance.random() < 0.3,
        nested=chance.random() < 0.5,
        on_storage=chance.random() < 0.3,
        mirrored=strategy != "ddp" and chance.random() < 0.25,
        bucket_bytes=chance.choice((None, 300)),
        verify_every=chance.choice((None, 1)),
    )


def _worlds(chance: random.Random, since: int) -> tuple[World, ...]:
    """Returns two worlds or three of different sizes; in the first one a rank is killed.

    Args:
        chance: What draws.
        since: The step after which the script's changes begin, which comes before the kill.
    """
    sizes = [chance.choices((1, 2, 3), (1, 6, 3))[0]]
    for _ in range(chance.choice((1, 2))):
        sizes.append(chance.choice([size for size in (1, 2, 3) if size != sizes[-1]]))
    places: tuple[Place, ...] = ("begin", "forward", "backward", "stepped", "changed")
    killed = World(
        ranks=sizes[0],
        end="kill",
        step=chance.randint(since + 2, since + 3),
        rank=chance.randrange(sizes[0]),
        place=chance.choice(places),
    )
    worlds = [killed]
    if len(sizes) == 3:
        end: End = chance.choice(("drain", "finish", "kill"))
        rank, place = chance.randrange(sizes[1]), chance.choice(places)
        worlds.append(
            World(
                ranks=sizes[1], end=end, step=since + chance.choice((5, 6)), rank=rank, place=place
            )
        )
    return (*worlds, World(ranks=sizes[-1]))
