"""Estimates for `elasticzero plan --link` how long the messages of a step take between nodes. Pure.

What counts is what a node sends to others, which its link has to carry; within a node nothing is
slow. Messages as they are, and the factors of powersgd, go round all ranks in a ring, in which one
link leads out of each node; other encoded ones go from each rank to each other one. It is taken
that nothing is computed while they are under way, so that a step is rather shorter than estimated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elasticzero.options.wire import EXACT, LEAST_GAIN, VALUE_BYTES, Wire, parse_wire
from elasticzero.text import span_text, table_text

WIRES = ("fp32", "bf16", "int8", "int4", "powersgd:4", "topk:0.01")
"""The formats that are compared, those before others which lose less."""
LONGEST = 1.25
"""A step takes so many times its own computation at most with a format that is recommended."""
BLOCK_MATRICES = 12
"""A block of a transformer has so many times the square of its width of parameters."""
FACTOR_HALVES = 2.5
"""Halves of an all-reduce that the two factors take on average: two, and the left one goes from one
rank to all besides."""
_UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def bits_per_s(text: str) -> float:
    """Parses the speed of a link, as `tc` writes it; raises `ValueError` for other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)bit(?:/s)?", text.strip(), re.IGNORECASE)
    if not match or not float(match[1]):
        raise ValueError(f"{text!r} is not a speed such as 100mbit or 25gbit")
    return float(match[1]) * _UNITS[match[2].lower()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Describes the nodes, and the model that they train."""

    nodes: int
    ranks_per_node: int
    elements: int
    """Number of parameters that are trained."""
    element_bytes: int
    """Size of a parameter, and of its gradient."""
    gathered_bytes: int
    """Size of a parameter as zero3 gathers it."""
    layer: int
    """Parameters of the largest layer."""

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


def sent_bytes(strategy: str, cluster: Cluster, wire: Wire, *, by_node: bool) -> int:
    """Returns the bytes that each node sends to others in a step of one micro-batch.

    Args:
        strategy: The strategy's name.
        cluster: The nodes and the model.
        wire: The format of gradients.
        by_node: Whether each node holds the whole state.
    """
    if cluster.nodes == 1:
        return 0
    whole = cluster.elements * cluster.element_bytes
    if by_node and strategy != "ddp":  # each rank sums its part with those at its place
        return round(2 * _of_gradients(cluster, wire, cluster.nodes, 1))
    ranks, per_node = cluster.ranks, cluster.ranks_per_node
    gradients = _of_gradients(cluster, wire, ranks, per_node)
    ring = (ranks - 1) / ranks
    if strategy == "ddp":
        return round(2 * gradients)
    if strategy == "zero3":
        return round(gradients + 2 * ring * cluster.elements * cluster.gathered_bytes)
    halves = 2 if _factors(cluster, wire) else 1  # it sums all of a matrix on each rank
    return round(halves * gradients + ring * whole)


def is_encoded(cluster: Cluster, wire: Wire) -> bool:
    """Returns whether gradients of such parameters are encoded."""
    if cluster.element_bytes <= 2 or not wire.is_lossy:
        return False
    return wire.format != "powersgd" or _factors(cluster, wire) > 0


def _factors(cluster: Cluster, wire: Wire) -> float:
    """Returns the size of the two factors of a matrix as a share of it, where it is sent so; 0: it
    is not. The matrices are taken to be square."""
    if wire.format != "powersgd":
        return 0.0
    width = math.sqrt(max(cluster.layer, BLOCK_MATRICES) / BLOCK_MATRICES)
    share = 2 * wire.rank / width
    return share if LEAST_GAIN * share <= 1 else 0.0


def _of_gradients(cluster: Cluster, wire: Wire, ranks: int, per_node: int) -> float:
    """Returns the bytes that a node sends in one half of a sum of all gradients.

    Args:
        cluster: The model.
        wire: The format of gradients.
        ranks: The number of ranks that sum together.
        per_node: How many of them a node has.
    """
    elements, ring = cluster.elements, (ranks - 1) / ranks
    if not is_encoded(cluster, wire):
        return elements * cluster.element_bytes * ring
    if factors := _factors(cluster, wire):
        return elements * VALUE_BYTES * FACTOR_HALVES / 2 * factors * ring
    return elements * wire.sent_bytes * per_node * (ranks - per_node) / ranks


def formats(wire: Wire, cluster: Cluster) -> list[Wire]:
    """Returns the formats that are compared: those which encode gradients of such a model, and the
    one that is asked for."""
    compared = [parse_wire(name) for name in dict.fromkeys((*WIRES, str(wire)))]
    return [one for one in compared if one in (EXACT, wire) or is_encoded(cluster, one)]


def costs(
    cases: Sequence[tuple[str, str | None, Wire]],
    cluster: Cluster,
    link: float,
    step_s: float | None,
) -> dict[str, Any]:
    """Returns what each format costs with each strategy, and which one is recommended.

    Args:
        cases: Strategies with their `--shard` and a format of `formats`, which fit together.
        cluster: The nodes and the model.
        link: Bits that a node can send in a second.
        step_s: Seconds that a step computes; None: that is not known, and nothing is recommended.
    """
    rows = [
        {
            "strategy": strategy,
            "shard": shard,
            "wire": str(wire),
            "sent": (sent := sent_bytes(strategy, cluster, wire, by_node=shard == "node")),
            "link_s": 8 * sent / link,
            "step_s": None if step_s is None else step_s + 8 * sent / link,
        }
        for strategy, shard, wire in cases
    ]
    best = None if step_s is None else _recommended(rows, step_s)
    return {"bits_per_s": link, "computed_s": step_s, "rows": rows, "recommended": best}


def _recommended(rows: Sequence[Mapping[str, Any]], step_s: float) -> Mapping[str, Any] | None:
    """Returns the row whose format loses least where a step is short enough, else the one of the
    shortest step; None: there are no rows."""
    for name in dict.fromkeys((*WIRES, *(row["wire"] for row in rows))):
        near = [row for row in rows if row["wire"] == name and row["step_s"] <= LONGEST * step_s]
        if near:
            return min(near, key=lambda row: row["step_s"])
    return min(rows, key=lambda row: row["step_s"], default=None)


def costs_text(link: Mapping[str, Any], speed: str) -> str:
    """Returns a table of the seconds on a link, a line for each strategy, and a recommendation.

    Args:
        link: What `costs` has returned.
        speed: The speed of the link, as the user has written it.
    """
    rows = link["rows"]
    if not rows:
        return "No strategy fits whose messages could be compared.\n"
    present = {row["wire"] for row in rows}
    names = [name for name in dict.fromkeys((*WIRES, *present)) if name in present]
    pairs = list(dict.fromkeys((row["strategy"], row["shard"]) for row in rows))
    seconds = {(row["strategy"], row["shard"], row["wire"]): row["link_s"] for row in rows}
    lines = [
        [strategy, shard or "-", *_cells(seconds, strategy, shard, names)]
        for strategy, shard in pairs
    ]
    text = (
        f"What a node sends to others in a step takes so long at {speed}, by --wire:\n\n"
        f"{table_text(('strategy', 'shard', *names), lines)}\n"
    )
    if link["computed_s"] is None:
        return text + "With --step-time S, what a step computes, plan recommends one.\n"
    best = link["recommended"]
    shard = f" --shard {best['shard']}" if best["shard"] is not None else ""
    many = best["step_s"] / link["computed_s"]
    return (
        f"{text}Recommended: --strategy {best['strategy']}{shard} --wire {best['wire']}. A step "
        f"then takes about {span_text(best['step_s'])}, {many:.1f} times what it computes. What a "
        "format loses, docs/slow-networks.md says.\n"
    )


def _cells(
    seconds: Mapping[tuple[str, str | None, str], float],
    strategy: str,
    shard: str | None,
    names: Sequence[str],
) -> Iterator[str]:
    for name in names:
        one = seconds.get((strategy, shard, name))
        yield "-" if one is None else span_text(one)
