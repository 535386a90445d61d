"""Reads the faults of `elasticzero local`, and decides when each of them is due.

Pure. A fault comes at a step, or at a time. Rules:
 FA1  At a step: once all ranks of the generation wait at the boundary of this step, or of a later
      one where training has begun behind it. The workers know the steps, and wait there until their
      agent says that the fault has come.
 FA2  At a time: so many seconds after the workers of the first generation were started, whatever
      the script is, and wherever its workers are.
 FA3  Faults at steps come in the order of the steps, those at times in the order of the times.
 FA4  A fault that finds no node to strike lets the workers go on, and comes once there is one.
 FA5  Nodes of other machines know of no fault, and their ranks are not waited for.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

from elasticzero.errors import UserError
from elasticzero.text import list_text

FAULTS = ("kill-node", "kill-worker", "drain", "join")
_TEXT = re.compile(r"([^:@]*)(?::([^@]*))?(?:@(.*))?")
_STEP, _TIME = re.compile(r"\d+"), re.compile(r"(\d+(?:\.\d+)?)s")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_EXAMPLES = "kill-node@60 comes at step 60, and kill-node@30s after 30 seconds"


@dataclass(frozen=True, slots=True)
class Fault:
    """Describes a fault that is injected when the job reaches a step, or at a time."""

    kind: str
    step: int | None
    """The step; None: it comes at a time."""
    node: str | None = None
    """Name of the node; None: the last one that trains."""
    after_s: float | None = None
    """Seconds from the start of the first workers; None: it comes at a step."""

    @property
    def text(self) -> str:
        """Returns the text that the user gave."""
        when = f"{self.after_s:.15g}s" if self.after_s is not None else str(self.step)
        return f"{self.kind}{f':{self.node}' if self.node else ''}@{when}"

    @property
    def nodes_gained(self) -> int:
        """Returns how many nodes there are more after it."""
        return {"join": 1, "kill-worker": 0}.get(self.kind, -1)


def parse_fault(text: str) -> Fault:
    """Parses `WHAT@WHEN` or `WHAT:NODE@WHEN`; raises `UserError` for other text."""
    match = _TEXT.fullmatch(text)
    what, node, when = match.groups() if match else (text, None, None)
    if what not in FAULTS:
        expected = f"WHAT@WHEN is expected, WHAT one of {', '.join(FAULTS)}"
        _refuse(text, expected, what, FAULTS)
    if when is None:
        _refuse(text, f"it does not say when; {_EXAMPLES}")
    if node == "":
        _refuse(text, f"a node's name is expected after the colon, as in {what}:node-0@60")
    if node is not None and what == "join":
        _refuse(text, "a node that joins is a new one; write join@WHEN")
    if _STEP.fullmatch(when):
        return Fault(what, int(when), node)
    if (time := _TIME.fullmatch(when)) is not None:
        return Fault(what, None, node, float(time[1]))
    numbers = _NUMBER.findall(when)
    near = [f"{numbers[0]}s", numbers[0].partition(".")[0]] if len(numbers) == 1 else []
    _refuse(text, f"{when!r} is no step and no time; {_EXAMPLES}", when, near)


def check_nodes(faults: Sequence[Fault], nodes: int) -> None:
    """Raises `UserError` for a fault of a node that this cluster will not have.

    Args:
        faults: The faults.
        nodes: Number of nodes at the beginning.
    """
    joined = sum(fault.kind == "join" for fault in faults)
    names = [f"node-{number}" for number in range(nodes + joined)]
    for fault in faults:
        if fault.node is not None and fault.node not in names:
            problem = f"the nodes are {list_text(names, 4)}; only a join brings more"
            _refuse(fault.text, problem, fault.node, names)


def _refuse(text: str, problem: str, word: str = "", choices: Iterable[str] = ()) -> NoReturn:
    """Raises the error about a fault.

    Args:
        text: What the user gave.
        problem: What is wrong with it, and what is expected.
        word: The word that is wrong.
        choices: The words that are right there, of which the nearest is named.

    Raises:
        UserError: Always.
    """
    near = difflib.get_close_matches(word, list(choices), 1)
    raise UserError(f"--fault {text}: {problem}{f'; did you mean {near[0]}?' if near else ''}")


def in_order(faults: Iterable[Fault]) -> tuple[list[Fault], list[Fault]]:
    """Returns the faults at steps, and those at times, each in the order in which they come."""
    everything = list(faults)
    at_steps = [fault for fault in everything if fault.after_s is None]
    at_times = [fault for fault in everything if fault.after_s is not None]
    return (
        sorted(at_steps, key=lambda fault: fault.step or 0),
        sorted(at_times, key=lambda fault: fault.after_s or 0.0),
    )


def most_nodes(nodes: int, faults: Iterable[Fault]) -> int:
    """Returns the largest number of nodes that there may be, if the faults come in their order."""
    return nodes + sum(map(_most_gained, in_order(faults)))


def _most_gained(faults: Sequence[Fault]) -> int:
    gained = most = 0
    for fault in faults:
        gained += fault.nodes_gained
        most = max(most, gained)
    return most


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Says how far the job has come."""

    step: int = 0
    """The newest step that was seen to be done."""
    waits_at: int | None = None
    """Step of the boundary at which every rank of the generation waits; None: not all wait."""
    trained_s: float | None = None
    """Seconds since the first workers were started; None: they were not."""


def is_due(fault: Fault, progress: Progress) -> bool:
    """Returns whether a fault is to be injected now, if it is the next one: FA1 and FA2.

    A step that is past shows that some worker has not waited, or that the fault was put off.
    """
    if fault.after_s is not None:
        return progress.trained_s is not None and progress.trained_s >= fault.after_s
    step = fault.step or 0
    return progress.step > step or (progress.waits_at is not None and progress.waits_at >= step)


@dataclass(frozen=True, slots=True)
class WaitingRanks:
    """Knows which ranks wait for a fault, and at which boundary."""

    steps: Mapping[tuple[int, str], Mapping[int, int]] = field(default_factory=dict)
    """The step at whose boundary each rank waits, by its generation and node, and by rank."""

    def with_rank(self, at: tuple[int, str], rank: int, step: int) -> WaitingRanks:
        """Returns what is known once a rank has said that it waits.

        Args:
            at: Its generation and node.
            rank: The rank.
            step: Step of the boundary.
        """
        return replace(self, steps={**self.steps, at: {**self.steps.get(at, {}), rank: step}})

    def waits_at(self, generation: int, counts: Mapping[str, int | None]) -> int | None:
        """Returns the step at whose boundary all ranks of a generation wait, or have passed it;
        None: not all wait.

        Args:
            generation: Number of the generation.
            counts: The number of ranks of each node of it, None where that is not known yet: FA5.
        """
        first: list[int] = []
        for node, count in counts.items():
            ranks = self.steps.get((generation, node), {})
            if len(ranks) != count:
                return None
            first += ranks.values()
        return min(first, default=None)

    def without(self, step: int) -> WaitingRanks:
        """Returns what is known once those that wait at a step, or before it, may go on."""
        left = {
            at: {rank: there for rank, there in ranks.items() if there > step}
            for at, ranks in self.steps.items()
        }
        return replace(self, steps={at: ranks for at, ranks in left.items() if ranks})


def steps_of(faults: Iterable[Fault]) -> Iterator[int]:
    """Yields the steps at which faults come, once each, in their order."""
    yield from sorted({fault.step for fault in faults if fault.step is not None})


class FaultPlan:
    """Knows which faults are left, and which ranks wait for them."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        """Begins before any rank waits.

        Args:
            faults: The faults.
        """
        self._at_steps, self._at_times = in_order(faults)
        self._waiting = WaitingRanks()
        self._counts: dict[str, int] = {}
        """Number of ranks of each node that has said so."""
        self._released = -1
        """Step up to which no rank waits any more."""

    @property
    def left(self) -> list[Fault]:
        """Returns the faults that were not injected."""
        return [*self._at_steps, *self._at_times]

    @property
    def next_at_step(self) -> Fault | None:
        """Returns the next fault that comes at a step; None: there is none."""
        return self._at_steps[0] if self._at_steps else None

    def must_wait(self, at: tuple[int, str], message: Mapping[str, int]) -> bool:
        """Takes note of a rank that waits; returns False if no fault is to come where it is.

        Args:
            at: Its generation and node.
            message: What its agent has said of it: `waits`, the step; `rank`; `ranks`, the number
                of ranks of the node.
        """
        step = message["waits"]
        if not any(self._released < (fault.step or 0) <= step for fault in self._at_steps):
            return False
        self._waiting = self._waiting.with_rank(at, message["rank"], step)
        self._counts[at[1]] = message["ranks"]
        return True

    def waits_at(self, generation: int, nodes: Iterable[str]) -> int | None:
        """Returns the step at whose boundary all ranks of a generation wait; None: not all do.

        Args:
            generation: Number of the generation.
            nodes: Those of its nodes that know of the faults.
        """
        counts = {node: self._counts.get(node) for node in nodes}
        return self._waiting.waits_at(generation, counts)

    def strike(self, progress: Progress, inject: Callable[[Fault], bool]) -> None:
        """Injects all faults that are due, in their order.

        Args:
            progress: How far the job has come.
            inject: Injects a fault; returns whether it found a node to strike.
        """
        for faults in (self._at_steps, self._at_times):
            while faults and is_due(faults[0], progress) and inject(faults[0]):
                del faults[0]

    def release(self, step: int) -> None:
        """Notes that the ranks that wait at a step, or before it, are told to go on."""
        self._released = max(self._released, step)
        self._waiting = self._waiting.without(self._released)
