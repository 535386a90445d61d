"""The table of events has what the agent writes."""

from __future__ import annotations

import ast
import typing
from collections.abc import Iterator
from pathlib import Path

from elasticzero.launcher.observability.events import EVENTS, EventName


def written(root: Path) -> Iterator[tuple[str, set[str]]]:
    """Each event that the agent's code names, with the fields that it names."""
    for path in sorted((root / "launcher" / "agent").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(
                    func=ast.Attribute(attr="note"),
                    args=[ast.Constant(value=str(name))],
                    keywords=keywords,
                ):
                    yield name, {keyword.arg for keyword in keywords if keyword.arg is not None}


def test_the_table_has_each_event_once() -> None:
    assert set(EVENTS) == set(typing.get_args(EventName))


def test_each_event_that_is_written_is_in_the_table(root: Path) -> None:
    found = dict(written(root))
    assert set(found) == set(EVENTS)
    for name, named in written(root):
        assert named - {"time"} <= set(EVENTS[typing.cast(EventName, name)].fields), name
