"""Names what ended each generation, and divides the run's time among generations. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from elasticzero.ops.report.life import SeenWorld
from elasticzero.ops.report.model import ChangeKind

FAULTS = frozenset({"failure", "hang", "lapse", "silence"})
"""Kinds of rounds that a fault opens; the others are planned."""
_LOST = re.compile(r"\b(?:is|are) lost\b")
_FAILED = re.compile(r"\brank \d+ on \S+ (?:failed|hung)\b")
_ROUNDING_S = 1e-5
"""Seconds of a class that only come from rounding."""
BEFORE_FIRST = 0
"""Stands for the generation before the first one."""


def change_of(
    round_kind: str | None, cause: str, before: Sequence[str], after: Sequence[str]
) -> tuple[ChangeKind, str]:
    """Returns the kind of the change between two generations, and a name for it.

    Args:
        round_kind: kind of the round between them; None: no log has it.
        cause: the reason of the second one.
        before: names of the first one's nodes.
        after: names of the second one's nodes.
    """
    lost = _LOST.search(cause) is not None
    if round_kind in FAULTS or lost or (round_kind is None and _FAILED.search(cause)):
        return "fault", _fault_name(round_kind, cause)
    gone, new = set(before) - set(after), set(after) - set(before)
    if gone:
        return "left", "node replaced" if new else "node left"
    if new:
        return "joined", "node joined"
    return "planned", "planned change"


def _fault_name(round_kind: str | None, cause: str) -> str:
    if _LOST.search(cause):
        return "node lost"
    if "hung" in cause or round_kind == "hang":
        return "worker hung"
    if "killed by" in cause:
        return "worker killed"
    if round_kind == "lapse":
        return "node silent"
    if round_kind == "silence":
        return "workers stalled"
    return "worker failed"


def seconds_by_generation(
    worlds: Iterable[SeenWorld], whole: Mapping[str, float]
) -> dict[int, dict[str, float]]:
    """Returns the time of each generation by class, from its world to the next one.

    The time before the first world is that of BEFORE_FIRST. The time of generations whose logs are
    missing counts for the one before them. Steps that are done again count where they were done.

    Args:
        worlds: the worlds of the run, in order.
        whole: seconds of the whole run by class.
    """
    marks = [(w.generation, w.spent.seconds) for w in worlds if w.spent is not None]
    parts: list[tuple[int, dict[str, float]]] = []
    owner, before = BEFORE_FIRST, dict[str, float]()
    for generation, seconds in [*marks, (BEFORE_FIRST, whole)]:
        kinds = dict.fromkeys([*seconds, *before])
        part = {kind: seconds.get(kind, 0.0) - before.get(kind, 0.0) for kind in kinds}
        parts.append((owner, part))
        owner, before = generation, dict(seconds)
    owed_s = 0.0
    for _, part in reversed(parts):
        part["productive"] = part.get("productive", 0.0) - owed_s
        part["wasted"] = part.get("wasted", 0.0) + owed_s
        owed_s = max(0.0, -part["productive"])
        part["productive"] += owed_s
        part["wasted"] -= owed_s
    return {
        generation: {kind: s for kind, s in part.items() if s > _ROUNDING_S}
        for generation, part in parts
    }
