"""Holds a patch of the user, and refuses it with the file and the line of what is wrong."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from elasticzero.errors import UserError

Path = tuple[str | int, ...]
"""Keys and indices that lead to a value of a document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """Holds one document of a file of patches."""

    file: str
    value: Any
    lines: Mapping[Path, int]
    """Line of each value, by the keys and indices that lead to it; of the document by none."""

    def place(self, path: Path) -> str:
        """Returns the file and the line of a value."""
        while path not in self.lines:
            path = path[:-1]
        return f"{self.file}:{self.lines[path]}"

    def at(self, path: Path) -> Any:
        """Returns a value of the document."""
        value = self.value
        for key in path:
            value = value[key]
        return value

    def refuse(self, path: Path, text: str) -> NoReturn:
        """Says what is wrong with a value.

        Args:
            path: leads to the value.
            text: what is wrong with it.

        Raises:
            UserError: always.
        """
        raise UserError(f"{self.place(path)}: {text}")


def nearest(text: str, names: Iterable[str]) -> str:
    """Returns the question whether another name is meant; empty: none is like it."""
    candidates = list(names)
    close = difflib.get_close_matches(text, candidates, 1, 0.7)
    close += [name for name in candidates if text.startswith(name) and len(name) > 2]
    return f" (is {close[0]} meant?)" if close else ""
