"""Defines what the examination of a machine finds.

Pure. A problem stops a job, or will sooner or later; a note is for a person to judge. Each finding
says what to do, unless nothing is to be done.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Holds one judgement."""

    topic: str
    level: Level
    text: str
    advice: str = ""
    """The step that the user can take; empty: nothing is to be done."""


def release_of(version: str) -> tuple[int, ...]:
    """Returns the numbers at the front of a version; empty if there are none."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()
