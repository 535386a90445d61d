"""Tells a worker what it is to do for a rehearsal, by a file that an environment variable names.

A run of a rehearsal has a directory. Workers write their records into it, and small files by which
they and the command meet: each rank says there that it waits, and the command lets it go on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from elasticzero.serialization import decode, encode

VARIABLE = "ELASTICZERO_REHEARSAL"
"""Environment variable with the path of the plan; without it a worker records nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Says what the workers of one run do."""

    directory: str
    """The directory of records and of the files by which workers and command meet."""
    steps: int
    """Number of steps after which the command stops the job."""
    hold_step: int | None = None
    """In generation 1 all ranks wait at the boundary after this step; None: they do not."""
    nudge_step: int | None = None
    """In this step the gradients are changed by one unit in the last place; None: in none."""
    kill_rank: int | None = None
    """This rank kills its own process at the boundary of `hold_step`, and no rank waits there."""

    looks_around: bool = False
    """Rank 0 looks for tensors of the script that change and that nothing keeps."""

    def write(self, path: Path) -> None:
        """Writes the plan to a file."""
        path.write_text(json.dumps(encode(self)))

    def records(self, generation: int, rank: int) -> Path:
        """Returns the file of one rank's records."""
        return Path(self.directory, f"{generation}-{rank}.jsonl")

    def held(self, rank: int) -> Path:
        """Returns the file by which a rank says that it is at the boundary of `hold_step`."""
        return Path(self.directory, f"held-{rank}")

    def asked(self, rank: int) -> Path:
        """Returns the file by which a rank that waits says that its agent asks for a boundary."""
        return Path(self.directory, f"asked-{rank}")

    @property
    def go(self) -> Path:
        """Returns the file by which the command lets the ranks go on."""
        return Path(self.directory, "go")

    @property
    def unkept(self) -> Path:
        """Returns the file with the names of tensors that nothing keeps, as a list in JSON."""
        return Path(self.directory, "unkept.json")

    @property
    def end(self) -> Path:
        """Returns the file by which a rank whose agent asks for the end tells the others."""
        return Path(self.directory, "end")

    def ending(self, rank: int) -> Path:
        """Returns the file by which a rank says that one step is left, and waits for the stop."""
        return Path(self.directory, f"ending-{rank}")


def read_plan(environment: Mapping[str, str]) -> Plan | None:
    """Returns the plan that the environment names; None: this is no rehearsal."""
    path = environment.get(VARIABLE)
    return decode(Plan, json.loads(Path(path).read_text())) if path else None
