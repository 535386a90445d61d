"""Checks that the code has each message that `docs/troubleshooting.md` quotes, word for word."""

from __future__ import annotations

import ast
import re
from pathlib import Path

FOLDERS = ("checkpoint", "elasticzero", "launcher")
VALUE = "…"
"""Stands for a value, in the page and in the texts of the code."""
ETCDS_OWN = ("NOSPACE",)
"""Words of etcd, of which the code has none."""


def texts(path: Path) -> list[str]:
    """Returns every text in a file, with VALUE for each value that is filled in."""
    literals = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = [str(p.value) if isinstance(p, ast.Constant) else VALUE for p in node.values]
            literals.append("".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            literals.append(node.value)
    return literals


def pieces(quote: str) -> list[str]:
    """Returns the pieces of a quoted message between values: VALUE, numbers, names of signals."""
    parts = re.split(rf"{VALUE}|\b\d+\b|\bSIG[A-Z]+\b", quote)
    stripped = [part.strip(" ,;:.()'/") for part in parts]
    return [part for part in stripped if len(part) > 2]


def test_every_message_in_troubleshooting_is_in_the_code(root: Path) -> None:
    """A message that is worded anew is worded anew there, too."""
    code = {
        text for folder in FOLDERS for path in (root / folder).rglob("*.py") for text in texts(path)
    }
    page = (root / "docs" / "troubleshooting.md").read_text()
    symptoms = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    quotes = [quote for cell in symptoms for quote in re.findall(r"`([^`]+)`", cell)]
    quotes = [quote for quote in quotes if quote not in ETCDS_OWN]
    assert len(quotes) > 40
    missing = [
        f"{quote}: {piece}"
        for quote in quotes
        for piece in pieces(quote)
        if not any(piece in text for text in code)
    ]
    assert not missing, "\n".join(missing)
