"""Every fault at every step of the protocol, for every strategy: the table, and how it is drawn."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

FAULTS = (
    "worker",  # SIGKILL
    "freeze",  # SIGSTOP of a worker
    "node",  # SIGKILL of every process
    "leader",  # the same, of the acting leader
    "silent",  # SIGSTOP of every process of a node
    "silent leader",  # the same, of the acting leader, which also commits checkpoints
    "agent",  # SIGSTOP of a node's agent alone; its workers go on
    "cut",  # a node's cable is pulled
    "drain",  # SIGTERM
    "join",  # a new node registers
    "etcd",  # kill -9, and started again on its data
)
STEPS = (
    "forming",  # nodes are registered, the first world is not written
    "regrouping",  # the alarm stands; a rank that does not stop yet keeps the next world waiting
    "written",  # the next world is written just now
    "connecting",  # its ranks set up their process group
    "restoring",  # one rank builds its model, the others are inside session.restore()
    "saving",  # all ranks but one have captured what becomes a checkpoint
    "reducing",  # one rank is inside its backward, the others wait for its buckets of gradients
    "between",  # one rank has all sums and no step yet, the others are beyond theirs
    "gathering",  # one rank has gathered some of the parameters, the others wait for the rest
)
PROVOKED = ("regrouping", "written", "connecting", "restoring")
"""Steps of the protocol to which a job comes by another fault."""
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
SHAPES = {"3 nodes": (1, 1, 1), "5 workers": (2, 2, 1)}
"""By name: how many workers each node has."""
SURVIVORS = ("forked", "kept")
"""What the next generation does with the workers that live: forks them anew, or, with
--keep-workers, lets their processes train on where nothing speaks against it."""
LOSES_A_NODE = ("node", "leader", "drain")
COMES_BACK = ("silent", "silent leader", "agent", "cut")
LEADS = ("leader", "silent leader")
"""Faults of the acting leader."""
STRIKES = ("worker", "freeze")
"""Faults of a worker, for which its node is set aside where no other node has them."""
COSTS_NOTHING = ("drain", "join", "etcd")
"""Faults for which no step is done twice."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One fault, alone, at one step of the protocol."""

    fault: str
    step: str

    def __str__(self) -> str:
        return f"{self.fault} while {self.step}"


def cells_of(fault: str) -> list[Cell]:
    """A fault at each step; before the first world there are no workers."""
    return [
        Cell(fault, step)
        for step in STEPS
        if step != "forming" or fault not in ("worker", "freeze")
    ]


CELLS = tuple(cell for fault in FAULTS for cell in cells_of(fault))


def draw(seed: int, count: int) -> tuple[str, str, str, list[Cell]]:
    """A strategy, a shape, what becomes of survivors, and cells for one job: the first while it
    forms, and then as many different faults as there are, none at the same step as the one
    before."""
    dice = random.Random(seed)
    strategy, shape = dice.choice(STRATEGIES), dice.choice(list(SHAPES))
    drawn = [dice.choice([cell for cell in CELLS if cell.step == "forming"])]
    while len(drawn) < count:
        used = [cell.fault for cell in drawn]
        left = [f for f in FAULTS if used.count(f) == min(map(used.count, FAULTS))]
        steps = [s for s in STEPS if s not in ("forming", drawn[-1].step)]
        drawn.append(dice.choice([Cell(f, s) for f, s in product(left, steps)]))
    return strategy, shape, dice.choice(SURVIVORS), drawn


def parse(text: str) -> list[Cell]:
    """`leader@restoring,cut@saving`: cells, for one that has failed to be played again."""
    cells = [Cell(*word.split("@")) for word in text.split(",")]
    unknown: Sequence[Cell] = [cell for cell in cells if cell not in CELLS]
    if unknown:
        raise ValueError(f"no such cells: {', '.join(map(str, unknown))}")
    return cells
