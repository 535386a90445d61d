"""Cases of a test that `make slow` plays: those for which another case takes the same way."""

from __future__ import annotations

from typing import Any

import pytest

from elasticzero.spans import STRATEGIES


def slow(*values: Any, id: str | None = None) -> Any:
    """A case of a parametrized test that `make slow` plays, and `make test` does not."""
    return pytest.param(*values, id=id, marks=pytest.mark.slow)


def option_text(value: str | tuple[str, ...]) -> str:
    """The name of a parameter of a case: a word, or the options of a command line."""
    return value if isinstance(value, str) else " ".join(value)


def drawn(*strategies: str) -> list[Any]:
    """All strategies, these of them in `make test`, the others in `make slow`."""
    return [name if name in strategies else slow(name) for name in STRATEGIES]
