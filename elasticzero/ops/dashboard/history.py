"""Keeps what a screen shows of a job's past, in bounded memory: curves, generations, events.

Pure: it is made of the events of one agent's log, which carry their time. However long a job runs,
a history holds at most `2 * POINTS` points of each curve, `GENERATIONS` generations and `LINES`
events, which is less than 1 MB.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from elasticzero.text import count_text

POINTS = 256
"""Least number of points that a long curve has; at twice as many, pairs of points are joined."""
GENERATIONS = 100
"""Maximum number of generations that are kept."""
LINES = 40
"""Maximum number of events that are kept."""
MAX_TEXT = 240
"""Maximum number of characters of an event or a reason."""
DIGITS = 6
"""Significant digits of a curve's values."""

Level = Literal["info", "warning", "error"]
"""Weight of an event for a reader."""


@dataclass(slots=True)
class Point:
    """Holds the values of a curve within one interval of its axis."""

    first: float
    """Place on the axis of the first value."""
    last: float
    total: float
    count: int
    least: float
    most: float

    def join(self, other: Point) -> None:
        """Takes in the point that follows."""
        self.last = other.last
        self.total += other.total
        self.count += other.count
        self.least, self.most = min(self.least, other.least), max(self.most, other.most)


class Curve:
    """Downsamples values along an axis: intervals of equal width, which doubles when they are too
    many."""

    def __init__(self, width: float = 1.0, points: int = POINTS) -> None:
        """Begins an empty curve.

        Args:
            width: interval of the axis that becomes one point at first.
            points: least number of points that a long curve has.
        """
        self.width = width
        self._most = 2 * points
        self._points: list[Point] = []

    def add(self, at: float, value: float) -> None:
        """Adds a value; one that is not finite, or lies before the last one, is left out."""
        points = self._points
        if not math.isfinite(value) or (points and at < points[-1].last):
            return
        self._append(points, Point(at, at, value, 1, value, value))
        while len(points) > self._most:
            self.width *= 2
            joined: list[Point] = []
            for point in points:
                self._append(joined, point)
            self._points = points = joined

    def _append(self, points: list[Point], point: Point) -> None:
        if points and points[-1].first // self.width == point.first // self.width:
            points[-1].join(point)
        else:
            points.append(point)

    def cut(self, at: float) -> None:
        """Removes the values after `at`. Where an interval has values on both sides, its mean
        stays."""
        points = self._points
        while points and points[-1].first > at:
            points.pop()
        if points:
            points[-1].last = min(points[-1].last, at)

    def rows(self) -> list[list[float]]:
        """Returns for each point its place on the axis, its mean, its least and its greatest
        value."""
        return [
            [round(p.last, 1), *map(_rounded, (p.total / p.count, p.least, p.most))]
            for p in list(self._points)
        ]


@dataclass(slots=True, kw_only=True)
class GenerationRecord:
    """Says when a generation began, trained and ended, in Unix time."""

    generation: int
    at: float
    """Time at which this agent read of it."""
    nodes: int
    ranks: int
    resume_step: int
    tier: str
    reason: str
    trained_at: float | None = None
    """End of its first step; None: it has made none that this agent saw."""
    ended_at: float | None = None
    """Time at which its round opened, or the job ended; None: it goes on."""
    kind: str = ""
    """Kind of the round that ended it."""


class JobHistory:
    """Takes in the events of an agent's log as they are written, and the job's goodput."""

    def __init__(self, node: str) -> None:
        """Begins an empty history. node: name of the agent's node, for events that are about it."""
        self._node = node
        self._since: float | None = None
        self._loss = Curve()
        self._goodput = Curve()
        self._generations: deque[GenerationRecord] = deque(maxlen=GENERATIONS)
        self._lines: deque[tuple[float, Level, str]] = deque(maxlen=LINES)
        self._repeated = 0
        """Number of times that the last event has come in a row."""
        self._rank = 0
        """Rank whose loss is kept: that of the node's first worker."""
        self._checkpoint: tuple[int, float] | None = None
        self._snapshot: tuple[int, float] | None = None
        self._earlier: Mapping[str, Any] = {}
        """The memory of another agent when this one joined, as `values` returns it."""

    def continues(self, earlier: Mapping[str, Any]) -> None:
        """Takes over what another agent remembers of the time before this one joined."""
        self._earlier = earlier

    def goodput(self, at: float, value: float | None) -> None:
        """Notes the job's goodput at a Unix time; None: it is not known."""
        if value is not None:
            self._goodput.add(at, value)

    def take(self, event: Mapping[str, Any]) -> None:
        """Takes in one event, with its name as `event` and its Unix time as `time`."""
        at = event["time"]
        self._since = at if self._since is None else self._since
        match event["event"]:
            case "world":
                self._world(event, at)
            case "start":
                self._rank = min(event["ranks"], default=0)
            case "step":
                self._stepped(event["generation"], at)
            case "log" if event["rank"] == self._rank and "loss" in event:
                self._loss.add(event["step"], event["loss"])
            case "round":
                self._ended(at, event["kind"])
            case "kept" if event["error"] is None:
                self._snapshot = (event["step"], at)
            case "saved" if event["error"] is None:
                self._checkpoint = (event["step"], at)
            case "exit" if event["outcome"] is not None:
                self._ended(at, event["outcome"])
            case _:
                pass
        line = news_line(event, self._node)
        if line is not None:
            self._note(at, *line)

    def _world(self, event: Mapping[str, Any], at: float) -> None:
        self._ended(at, "")
        self._loss.cut(event["resume_step"])
        self._generations.append(
            GenerationRecord(
                generation=event["generation"],
                at=at,
                nodes=len(event["members"]),
                ranks=event["world_size"],
                resume_step=event["resume_step"],
                tier=event["tier"],
                reason=_clipped(event["reason"]),
            )
        )

    def _stepped(self, generation: int, at: float) -> None:
        last = self._generations[-1] if self._generations else None
        if last is not None and last.generation == generation and last.trained_at is None:
            last.trained_at = at

    def _ended(self, at: float, kind: str) -> None:
        last = self._generations[-1] if self._generations else None
        if last is not None and last.ended_at is None:
            last.ended_at, last.kind = at, kind

    def _note(self, at: float, level: Level, text: str) -> None:
        text = _clipped(text)
        if self._lines and self._lines[-1][2].partition(REPEATED)[0] == text:
            self._repeated += 1
            self._lines[-1] = (at, level, f"{text}{REPEATED}{self._repeated} times)")
        else:
            self._repeated = 1
            self._lines.append((at, level, text))

    def values(self) -> dict[str, Any]:
        """Returns the history as plain values: curves, generations and events, oldest first.

        It may be called by another thread than the one that takes events in.
        """
        history: dict[str, Any] = {
            "since": self._since,
            "loss": self._loss.rows(),
            "goodput": self._goodput.rows(),
            "generations": [
                {name: getattr(record, name) for name in GenerationRecord.__slots__}
                for record in list(self._generations)
            ],
            "events": [list(line) for line in list(self._lines)],
            "checkpoint": _step_at(self._checkpoint),
            "snapshot": _step_at(self._snapshot),
        }
        return joined_histories(self._earlier, history) if self._earlier else history


REPEATED = " (again, "
"""Beginning of the note on an event that has come several times in a row."""


def news_line(event: Mapping[str, Any], node: str) -> tuple[Level, str] | None:
    """Returns an event as a line for people, with its weight; None: a reader need not see it.

    node: name of the node whose agent wrote it.
    """
    match event["event"]:
        case "world":
            size, nodes = event["world_size"], len(event["members"])
            return "info", (
                f"generation {event['generation']}: {count_text(size, 'rank')} on "
                f"{count_text(nodes, 'node')}, from step {event['resume_step']}: {event['reason']}"
            )
        case "recovery":
            lost = event["steps_lost"]
            again = f", {count_text(lost, 'step')} done again" if lost else ""
            return "info", f"training goes on after {event['seconds']:.2f} s{again}"
        case "saved" if event["error"] is None:
            return "info", f"checkpoint of step {event['step']} saved in {event['seconds']:.2f} s"
        case "saved":
            text = f"the checkpoint of step {event['step']} was not saved: {event['error']}"
            return "warning", text
        case "save_failed":
            text = f"step {event['step']} could not be saved, and is tried again: {event['error']}"
            return "warning", text
        case "failed" if event["blame"] not in ("peer", "checkpoint", "rollback"):
            return "error", f"{node}: rank {event['rank']} failed: {event['message']}"
        case "looked" if event["blame"] == "hung":
            return "error", f"{node}: rank {event['rank']} hangs: {event['message']}"
        case "data_changed" | "shares_changed":
            return "info", str(event["message"])
        case "residual_lost":
            return "warning", str(event["message"])
        case "tracker" if event["error"] is not None:
            return "warning", str(event["error"])
        case "notice":
            return "warning", f"{node} leaves: {event['reason']}"
        case "control":
            return _requested(event)
        case "memory_short":
            return "warning", f"{node}: shared memory is short of room for snapshots"
        case "store_trouble" | "store_recovery":
            return "warning", f"{node}: {event['message']}"
        case "exit" if event["outcome"] is not None:
            level: Level = "error" if event["outcome"] == "failed" else "info"
            return level, f"{event['outcome']}: {event['reason']}"
        case _:
            return None


def _requested(event: Mapping[str, Any]) -> tuple[Level, str] | None:
    """Returns what operators ask of the whole job, as a line."""
    if event["stop"]:
        return "warning", "an operator stops the job"
    if event["nnodes"] is not None:
        return "info", "an operator asks for {}:{} nodes".format(*event["nnodes"])
    return None


def downsampled(values: list[float], most: int) -> list[float]:
    """Returns at most `most` values that stand for these in order: means of neighbours."""
    if len(values) <= most:
        return values
    ends = [round(i * len(values) / most) for i in range(most + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(ends)]


def joined_histories(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the history of one agent, with what another one remembered of the time before it.

    Args:
        earlier: what the other agent remembered, as `JobHistory.values` returns it.
        later: what the agent itself remembers, in the same form.
    """
    first = later["generations"][0]["generation"] if later["generations"] else math.inf
    began = later["since"] if later["since"] is not None else math.inf
    generations = [g for g in earlier["generations"] if g["generation"] < first]
    events = [line for line in earlier["events"] if line[0] < began]
    return {
        "since": earlier["since"],
        "loss": _joined_rows(earlier["loss"], later["loss"]),
        "goodput": _joined_rows(earlier["goodput"], later["goodput"]),
        "generations": [*generations, *later["generations"]][-GENERATIONS:],
        "events": [*events, *later["events"]][-LINES:],
        "checkpoint": later["checkpoint"] or earlier["checkpoint"],
        "snapshot": later["snapshot"] or earlier["snapshot"],
    }


def _joined_rows(earlier: list[list[float]], later: list[list[float]]) -> list[list[float]]:
    """Returns the rows of two curves, those of the second from where it begins; pairs of rows are
    joined where there are too many."""
    rows = [row for row in earlier if not later or row[0] < later[0][0]] + later
    if len(rows) <= 2 * POINTS:
        return rows
    halves = [
        [b[0], _rounded((a[1] + b[1]) / 2), min(a[2], b[2]), max(a[3], b[3])]
        for a, b in zip(rows[::2], rows[1::2], strict=False)
    ]
    return halves if len(rows) % 2 == 0 else [*halves, rows[-1]]


def _step_at(saved: tuple[int, float] | None) -> dict[str, float] | None:
    return {"step": saved[0], "at": saved[1]} if saved is not None else None


def _clipped(text: str) -> str:
    line = " ".join(str(text).split())
    return line if len(line) <= MAX_TEXT else f"{line[: MAX_TEXT - 1]}…"


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
