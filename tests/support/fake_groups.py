"""Groups of ranks that have no connections, for tests that replace the collectives."""

from __future__ import annotations

from typing import Any

from elasticzero.rank_groups.group import RankGroup


def fake_group(ranks: int, name: str = "all ranks") -> RankGroup:
    """A group in whose place the replaced collectives get its name."""
    process_group: Any = name
    return RankGroup(name, range(ranks), process_group)
