"""The table of events has what the agent writes."""

from __future__ import annotations

import ast
import typing
from collections.abc import Iterator
from pathlib import Path

from elasticzero.launcher.agent.reporter import DECISIONS
from elasticzero.launcher.observability.events import EVENTS, EventName

WRITTEN_BY_THE_LOG = {"events_lost"}
"""Events that `EventLog` writes itself; `test_event_log.py` has their fields."""


def written(root: Path) -> Iterator[tuple[str, set[str], bool]]:
    """Yields each event that the agent's code writes, the fields that it names, and whether a
    message gives further fields."""
    agent = (root / "launcher" / "agent").rglob("*.py")
    for path in (*agent, root / "elasticzero" / "ops" / "trackers" / "feed.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(
                    func=ast.Attribute(attr="note" | "_note"),
                    args=[ast.Constant(value=str(name))],
                    keywords=keywords,
                ):
                    named = {keyword.arg for keyword in keywords if keyword.arg is not None}
                    yield name, named, any(keyword.arg is None for keyword in keywords)


def test_the_table_has_each_event_once() -> None:
    assert set(EVENTS) == set(typing.get_args(EventName))


def test_each_written_event_has_its_documented_fields(root: Path) -> None:
    """The events that take their fields from a message are in `test_reporter.py`."""
    occurrences = [*written(root), *((name, set[str](), True) for name in DECISIONS.values())]
    assert {name for name, _, _ in occurrences} | WRITTEN_BY_THE_LOG == set(EVENTS)
    for name, named, has_others in occurrences:
        documented = set(EVENTS[typing.cast(EventName, name)].fields)
        assert named <= documented if has_others else named == documented, name
