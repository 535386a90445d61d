"""Estimates for `elasticzero plan --link` what rounds of islands take on a link. Pure.

A round of a fragment has all islands but its owner send a contribution, in the format of `wire`,
and fetch the mean from it. So the owner's link carries the fragment once for each other island, in
each direction one after the other. Different fragments have different owners, as far as there are
islands. Nobody waits for it: it must be over within a part of the time until the next round.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from elasticzero.options.wire import parse_wire
from elasticzero.text import size_text, span_text, table_text

EVERY = (10, 20, 50, 100, 200, 500)
"""Numbers of inner steps of a round that are compared."""
FRAGMENTS = (1, 2, 4, 8)
"""Numbers of fragments that are compared."""
SHARE = 0.5
"""Part of the time of a round that an exchange may take, so that what is averaged is not older."""
WIRES = ("fp32", "bf16", "int8")
"""Formats that are compared, the most exact one first."""
NUMBER_BYTES = 4
"""Bytes of a parameter."""
FILES = 4
"""Numbers that a node keeps of a parameter in its shared memory: outer parameters, momentum, a
contribution and a mean; twice as many while a round is made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSetting:
    """Says how a job's islands average."""

    every: int
    fragments: int
    wire: str = "fp32"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCost(RoundSetting):
    """Says what rounds take with one setting."""

    exchange_s: float
    """Seconds for which the exchange of one fragment takes its owner's link."""
    busy: float
    """Share of the time for which the busiest link carries something."""
    steps: float
    """Inner steps that an island makes between a contribution and its round."""

    @property
    def fits(self) -> bool:
        return self.busy <= SHARE and self.steps <= SHARE * self.every


def round_cost(
    islands: int, elements: int, link: float, step_s: float, setting: RoundSetting
) -> RoundCost:
    """Returns what a setting costs.

    Args:
        islands: Number of islands.
        elements: Number of parameters.
        link: Bits that a node can send in a second.
        step_s: Seconds of an inner step.
        setting: The setting.
    """
    sent_bytes, fragments = parse_wire(setting.wire).sent_bytes or NUMBER_BYTES, setting.fragments
    others, of_fragment_s = islands - 1, 8 * sent_bytes * elements / fragments / link
    # A link takes both directions at a time; an island has the fragments that it owns, and those of
    # others, of which it sends a contribution.
    owned = math.ceil(fragments / islands)
    sent_s = (owned * others + fragments - owned) * of_fragment_s
    return RoundCost(
        **asdict(setting),
        exchange_s=2 * others * of_fragment_s,
        busy=sent_s / (setting.every * step_s),
        steps=2 * others * of_fragment_s / step_s,
    )


def round_costs(islands: int, elements: int, link: float, step_s: float) -> dict[str, Any]:
    """Returns for each number of inner steps the setting that fits of the most exact format and
    fewest fragments, or else the one that sends least, and the first that fits: None where none
    does.

    Args:
        islands: Number of islands.
        elements: Number of parameters.
        link: Bits that a node can send in a second.
        step_s: Seconds of an inner step.
    """
    rows = []
    for every in EVERY:
        settings = [
            round_cost(
                islands,
                elements,
                link,
                step_s,
                RoundSetting(every=every, fragments=fragments, wire=wire),
            )
            for wire in WIRES
            for fragments in FRAGMENTS
            if fragments <= every
        ]
        rows.append(next((one for one in settings if one.fits), settings[-1]))
    first = next((one for one in rows if one.fits), None)
    return {
        "rows": [{**asdict(one), "fits": one.fits} for one in rows],
        "node_memory": FILES * NUMBER_BYTES * elements,
        "recommended": None if first is None else asdict(first),
    }


def rounds_text(rounds: Mapping[str, Any], speed: str) -> str:
    """Returns a table of the settings, and a recommendation.

    Args:
        rounds: What `round_costs` has returned.
        speed: The speed of the link, as the user has written it.
    """
    heads = ("every", "fragments", "wire", "exchange", "steps meanwhile", "link is busy", "fits")
    table = table_text(heads, [*_lines(rounds["rows"])])
    text = (
        "With --strategy diloco each node is an island, and no step waits for others. The exchange "
        f"of one fragment takes so long at {speed}, in the most exact format that fits:\n\n"
        f"{table}\n"
    )
    best, memory = rounds["recommended"], size_text(rounds["node_memory"])
    if best is None:
        return text + "None fits: what is averaged would be older than half a round.\n"
    setting = f"every={best['every']}"
    if best["fragments"] > 1:
        setting += f",fragments={best['fragments']}"
    if best["wire"] != WIRES[0]:
        setting += f",wire={best['wire']}"
    return (
        f"{text}Where a step may not wait: --strategy diloco --diloco {setting}, which takes "
        f"{memory} of a node's RAM besides. It is another algorithm than ddp: "
        "docs/slow-networks.md says when it is worth it.\n"
    )


def _lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    for row in rows:
        yield [
            str(row["every"]),
            str(row["fragments"]),
            row["wire"],
            span_text(row["exchange_s"]),
            f"{row['steps']:.1f}",
            f"{min(row['busy'], 99):.0%}",
            "yes" if row["fits"] else "no",
        ]
