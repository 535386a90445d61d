"""The table of docs/training.md that says what holds has a plain word for every strategy."""

from __future__ import annotations

import re
from pathlib import Path

WORDS = ("right", "refused", "not kept", "as `ddp`", "as `zero1`")
"""How a cell begins that needs no other word."""
OTHERS = {
    "any values",
    "another in each world",
    "another world draws others",
    "as far as this table says",
    "made dense",
    "left sparse",
    "sees",
    "statistics of",
    "torch",
    "with",
}
"""How other cells begin; each says what happens in fewer words than a sentence has."""
LONGEST = 120
"""Characters of the longest cell but the first."""


def test_every_row_has_a_short_cell_for_each_strategy(root: Path) -> None:
    page = (root / "docs" / "training.md").read_text()
    section = page.partition("\n## What holds\n")[2].partition("\n## ")[0]
    head, _, rows = section.partition("|---|---|---|---|---|\n")
    assert head.splitlines()[-1].endswith("| `ddp` | `zero1`, `zero2` | `zero3` | one process |")
    cells = [line.strip("|").split(" | ") for line in rows.splitlines() if line.startswith("|")]
    cells = [row for row in cells if not row[0].strip().startswith("**")]
    assert len(cells) > 50
    for first, *others in cells:
        assert len(others) == 4, first
        for cell in map(str.strip, others):
            text = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", cell)
            assert text.startswith((*WORDS, *OTHERS)), (first, cell)
            assert len(text) <= LONGEST, (first, cell)
