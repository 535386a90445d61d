"""Finds the ranks that differ from the others in values that must be equal on all of them. Pure.

Each rank gives a table: values, or digests of them, by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NAMES_SHOWN = 3
RANKS_SHOWN = 8
ABSENT = "nothing"
"""Text that stands for a name that a rank's table lacks."""

Table = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Holds the result of a comparison of all ranks' tables."""

    odd: tuple[int, ...]
    """The ranks whose tables are not the accepted one; empty if no table is accepted."""
    accepted: int | None
    """A rank that has the accepted table; None: no table is that of a majority."""
    names: tuple[str, ...]
    """The names whose values are not the same on all ranks, in the order of the tables."""


def by_majority(tables: Sequence[Table]) -> Verdict:
    """Accepts the table that more than half of the ranks have."""
    groups = _groups(tables)
    most = max(groups, key=len)
    names = _different(tables)
    if 2 * len(most) <= len(tables):
        return Verdict(odd=(), accepted=None, names=names)
    odd = tuple(rank for rank in range(len(tables)) if rank not in most)
    return Verdict(odd=odd, accepted=most[0], names=names)


def by_trained(tables: Sequence[Table], trained: Collection[int]) -> Verdict:
    """Accepts the table of the ranks that have trained in an earlier generation.

    If these differ, the most frequent of their tables is accepted and, of equally frequent ones,
    that of the lowest rank. If no rank has trained, the table of rank 0 is accepted.
    """
    judges = sorted(trained) or [0]
    groups = _groups([tables[rank] for rank in judges])
    accepted = judges[max(groups, key=lambda group: (len(group), -group[0]))[0]]
    odd = tuple(rank for rank, table in enumerate(tables) if table != tables[accepted])
    return Verdict(odd=odd, accepted=accepted, names=_different(tables))


def _groups(tables: Sequence[Table]) -> list[list[int]]:
    """Groups the indices of equal tables."""
    groups: list[list[int]] = []
    for index, table in enumerate(tables):
        same = next((group for group in groups if tables[group[0]] == table), None)
        if same is None:
            groups.append([index])
        else:
            same.append(index)
    return groups


def _different(tables: Sequence[Table]) -> tuple[str, ...]:
    names = dict.fromkeys(name for table in tables for name in table)
    first = tables[0]
    return tuple(
        name
        for name in names
        if any(table.get(name, ABSENT) != first.get(name, ABSENT) for table in tables)
    )


def difference(rank: int, tables: Sequence[Table], nodes: Sequence[str], accepted: int) -> str:
    """Returns a sentence with the differences between the table of `rank` and the accepted one.

    Args:
        rank: The rank that differs.
        tables: The table of each rank.
        nodes: The node of each rank.
        accepted: The rank whose table is accepted.
    """
    differing, expected = tables[rank], tables[accepted]
    names = list(_different([differing, expected]))
    shown = [f"{name} {_value(differing, name)}" for name in names[:NAMES_SHOWN]]
    others = [_value(expected, name) for name in names[:NAMES_SHOWN]]
    unnamed = f" (and {len(names) - NAMES_SHOWN} more differ)" if len(names) > NAMES_SHOWN else ""
    alike = sum(table == expected for table in tables)
    whose = "the other ranks have" if alike == len(tables) - 1 else f"rank {accepted} has"
    if alike == 1:
        whose = f"rank {accepted} on {nodes[accepted]} has"
    return f"rank {rank} on {nodes[rank]} has {_listed(shown)}, {whose} {_listed(others)}{unnamed}"


def _value(table: Table, name: str) -> str:
    return str(table.get(name, ABSENT))


def _listed(items: Sequence[str]) -> str:
    return ", ".join(items[:-1]) + (" and " if len(items) > 1 else "") + items[-1]


def split(rank_tables: Sequence[Table], nodes: Sequence[str], name: str) -> str:
    """Returns the ranks that have each value of `name`, such as "rank 0 on node-a has 5d1c…, rank 1
    on node-b has 77a0…".

    Args:
        rank_tables: The table of each rank.
        nodes: The node of each rank.
        name: The name whose values are told; it may be missing in a table.
    """
    counted = Counter(_value(table, name) for table in rank_tables)
    parts = []
    for value in counted:
        ranks = [r for r, table in enumerate(rank_tables) if _value(table, name) == value]
        where = [f"rank {rank} on {nodes[rank]}" for rank in ranks[:RANKS_SHOWN]]
        if len(ranks) > RANKS_SHOWN:
            where.append(f"{len(ranks) - RANKS_SHOWN} more ranks")
        parts.append(f"{_listed(where)} {'has' if len(ranks) == 1 else 'have'} {value}")
    return "; ".join(parts)
