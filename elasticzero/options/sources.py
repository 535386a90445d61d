"""Says where an option's value comes from: a flag, the environment, a file, or the default."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Origin(IntEnum):
    """Lists the kinds of places that give a value; one with a higher number goes first."""

    DEFAULT = 0
    FILE = 1
    ENVIRONMENT = 2
    COMMAND_LINE = 3


@dataclass(frozen=True, slots=True)
class ValueSource:
    """Says where one value comes from."""

    origin: Origin
    place: str = ""
    """The environment variable, or FILE:LINE; of a flag, the flag of another option that gave the
    value."""

    @property
    def text(self) -> str:
        """Returns the place for people."""
        if self.origin is Origin.COMMAND_LINE:
            return self.place or "flag"
        return self.place or "default"

    @property
    def note(self) -> str:
        """Returns the end of an error about the value, where the command line does not show it."""
        hidden = self.origin in (Origin.FILE, Origin.ENVIRONMENT)
        return f" (from {self.place})" if hidden else ""


DEFAULT = ValueSource(Origin.DEFAULT)
FLAG = ValueSource(Origin.COMMAND_LINE)
