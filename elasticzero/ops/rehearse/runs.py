"""Says which runs a rehearsal makes, and what the workers of each do. Pure.

Each strategy has, in each world, an undisturbed run and a run for each fault. The first strategy
that is not refused also has a second undisturbed run, and one with a nudged gradient. A model with
16-bit parameters has the latter in each strategy, for ddp has no masters. If an undisturbed run is
refused, or fails, its strategy has no other run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from elasticzero.ops.rehearse.results import NUDGED, REPEATED, UNDISTURBED
from elasticzero.rehearsal.plan import Plan
from elasticzero.text import count_text

KILL_WORKER, KILL_NODE, DRAIN, JOIN = "kill-worker", "kill-node", "drain", "join"
FAULTS = (KILL_WORKER, KILL_NODE, DRAIN, JOIN)
"""All faults, in the order in which they are shown."""
LEAVING = frozenset({KILL_NODE, DRAIN})
"""Faults by which the world loses a node, so that it must have two."""
AGREED = frozenset({DRAIN, JOIN})
"""Faults for which the ranks agree on the end of the generation: the fault comes at one boundary,
and the generation ends at the next."""
MIN_STEPS = 4
"""Fewest steps of a run: the fault comes after two of them, and two follow it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Describes one run."""

    strategy: str
    fault: str
    """A fault, or the name of a run without one."""
    world: int
    """Number of ranks at the beginning, each on a node of its own."""
    steps: int
    """Number of steps after which the run ends."""

    @property
    def fault_step(self) -> int:
        """Returns the number of steps after which the fault comes."""
        return self.steps // 2

    @property
    def hold_step(self) -> int | None:
        """Returns the step after which the ranks wait for what is to happen; None: they do not."""
        if self.fault not in FAULTS:
            return None
        return self.fault_step - (self.fault in AGREED)

    def plan(self, directory: str) -> Plan:
        """Returns what the workers do.

        directory: where they leave their records.
        """
        return Plan(
            directory=directory,
            steps=self.steps,
            hold_step=self.hold_step,
            nudge_step=self.fault_step if self.fault == NUDGED else None,
            kill_rank=self.world - 1 if self.fault == KILL_WORKER else None,
            looks_around=self.fault == UNDISTURBED,
        )

    @property
    def text(self) -> str:
        """Returns the run in a few words."""
        what = {UNDISTURBED: "undisturbed", REPEATED: "undisturbed again", NUDGED: "nudged"}
        fault = what.get(self.fault, f"{self.fault} after step {self.fault_step}")
        return f"{self.strategy}, {count_text(self.world, 'rank')}, {fault}"


def undisturbed(strategy: str, world: int, steps: int) -> Run:
    """Returns the first run of a strategy in a world.

    Args:
        strategy: The strategy.
        world: Number of ranks.
        steps: Number of steps.
    """
    return Run(strategy=strategy, fault=UNDISTURBED, world=world, steps=steps)


def following(
    first: Run, faults: Sequence[str], *, is_first: bool, half_parameters: bool
) -> Iterator[Run]:
    """Yields the runs that follow the undisturbed one of a strategy in a world.

    Args:
        first: The undisturbed run.
        faults: The faults, in the order in which they are shown.
        is_first: Whether no strategy before this one has been accepted in this world.
        half_parameters: Whether the model has 16-bit parameters.
    """
    names = [REPEATED] if is_first else []
    names += [NUDGED] if is_first or half_parameters else []
    names += [fault for fault in faults if can_happen(fault, first.world)]
    for name in names:
        yield Run(strategy=first.strategy, fault=name, world=first.world, steps=first.steps)


def can_happen(fault: str, world: int) -> bool:
    """Tells whether a world can go on after a fault: not if its only node is lost."""
    return world > 1 or fault not in LEAVING


def most_runs(strategies: Collection[str], worlds: Collection[int], faults: Sequence[str]) -> int:
    """Returns the number of runs if no strategy is refused and no parameter has 16 bits.

    Args:
        strategies: The strategies.
        worlds: Numbers of ranks with which runs begin.
        faults: The faults.
    """
    of_worlds = [sum(can_happen(fault, world) for fault in faults) for world in worlds]
    return sum(2 + len(strategies) * (1 + count) for count in of_worlds)
