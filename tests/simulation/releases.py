"""Documents of the release before and of a later one: what their agents write that others read.

An agent of the release before knows no runs: its documents state none, and nothing binds its writes
to a run. One of a later release writes fields, and words of lists, that this release does not know.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Literal

from elasticzero.launcher.store.watch_cache import (
    ALARM,
    CONTROL,
    DONE,
    MEMBERS,
    NEXT,
    REPORTS,
    WORLD,
)

Release = Literal["", "before", "after"]
"""Of a node; empty: this one."""
KINDS = (WORLD, CONTROL, DONE, ALARM, MEMBERS, REPORTS, NEXT)
NEW_KIND = "eclipse"
RENAMED = ("leave", "grow")
"""Kinds of alarms that the later release divides into others."""


def of_later_release(puts: Mapping[str, bytes]) -> dict[str, bytes]:
    """What an agent of a later release writes in the place of these documents."""
    return {key: _later(key, value) for key, value in puts.items()}


def _later(key: str, value: bytes) -> bytes:
    if not key.startswith(KINDS):
        return value
    document = json.loads(value)
    document["of_later_release"] = {"rows": [1, 2.5, None]}
    if key.startswith(ALARM) and document["kind"] in RENAMED:
        document["kind"] = NEW_KIND
    return json.dumps(document, separators=(",", ":")).encode()
