"""The pictures of states in docs are those of the tables of transitions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.state_pictures import MACHINES, Machine, picture, with_pictures


def drawn(text: str) -> Iterator[tuple[str, str]]:
    """The pairs of states that a picture's arrows and notes join; a note's first is empty."""
    for line in text.splitlines():
        before, arrow, rest = line.strip().partition(" --> ")
        if arrow and before != "[*]":
            yield before, rest.partition(":")[0]
        if line.strip().startswith("note right of "):
            yield "", line.strip().removeprefix("note right of ").partition(":")[0]


@pytest.mark.parametrize("machine", MACHINES.values(), ids=list(MACHINES))
def test_a_picture_has_every_transition_and_no_other(machine: Machine) -> None:
    pairs = set(drawn(picture(machine)))
    moves = {
        (before.name, after.name)
        for (before, _), after in machine.transitions.items()
        if before is not after
    }
    assert {pair for pair in pairs if pair[0]} <= moves
    noted = {after for before, after in pairs if not before}
    assert {pair for pair in moves - pairs if pair[1] not in noted} == set()


@pytest.mark.parametrize("machine", MACHINES.values(), ids=list(MACHINES))
def test_the_parts_of_a_picture_share_no_name(machine: Machine) -> None:
    """Mermaid would draw two states of one name as one."""
    kinds = {type(state) for state, _ in machine.transitions}
    names = [state.name for kind in kinds for state in kind]
    assert len(names) == len(set(names))


def test_every_picture_is_in_a_page_and_a_stale_one_is_drawn_anew(root: Path) -> None:
    pages = [path.read_text() for path in (root / "docs").rglob("*.md")]
    for name in MACHINES:
        assert sum(f"The states of {name}, which" in page for page in pages) == 1, name
    for page in pages:
        assert with_pictures(page) == page, "run make reference"
        assert with_pictures(page.replace("--> RESTORED", "--> LOST")) == page
