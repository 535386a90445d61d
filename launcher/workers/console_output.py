"""Decides which output of the workers is repeated on the agent's terminal.

Pure. Rules; the first that applies counts:
 O1  --tee: all of it.
 O2  torchrun's --redirects or --tee STREAMS: all but the streams that are redirected and not teed.
 O3  --log-dir: nothing.
 O4  All of it.
--local-ranks-filter leaves out the workers of other local ranks in each case.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from string import Template

from elasticzero.errors import UserError
from elasticzero.launcher.options.spelling import STREAMS

OUT, ERR = 1, 2
ALL = OUT | ERR
PREFIX = "[${rank}] "
"""Template of the text before each line that is repeated, where none is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleOutput:
    """Says which output is repeated; streams have torchrun's numbers: 0 none, 1 stdout, 2 stderr,
    3 both."""

    tee: bool = False
    tee_streams: str | None = None
    redirects: str | None = None
    ranks: frozenset[int] | None = None
    """Local ranks whose output is repeated; None: all."""
    log_dir: bool = False
    """True if a directory for logs was given."""
    prefix: str = PREFIX
    """Template of the text before each line; it may have torchrun's macros in it."""
    role: str = ""
    """Value of the macro `role_name`."""
    hostname: str = ""
    """Value of the macro of this name."""

    def line_prefix(self, rank: int, local_rank: int) -> str:
        """Returns the text before each line of a worker; a macro that torchrun does not have either
        stays as it is."""
        return Template(self.prefix).safe_substitute(
            rank=rank, local_rank=local_rank, role_name=self.role, hostname=self.hostname
        )

    def repeated_streams(self, local_rank: int) -> int:
        """Returns the streams of this worker that are repeated."""
        if self.ranks is not None and local_rank not in self.ranks:
            return 0
        if self.tee:
            return ALL
        if self.tee_streams is not None or self.redirects is not None:
            hidden = _streams(self.redirects, local_rank) & ~_streams(self.tee_streams, local_rank)
            return ALL & ~hidden
        return 0 if self.log_dir else ALL

    def needs_separate_stdout(self, local_rank: int) -> bool:
        """Returns whether one stream of this worker is repeated without the other, so that each
        needs a file of its own."""
        return self.repeated_streams(local_rank) in (OUT, ERR)

    @property
    def silent(self) -> bool:
        """Returns whether nothing is repeated because --log-dir was given."""
        return not self.tee and self.log_dir and self.tee_streams is None and self.redirects is None


def _streams(text: str | None, local_rank: int) -> int:
    if text is None or not STREAMS.fullmatch(text):
        return 0
    if ":" not in text:
        return int(text)
    by_rank = dict(part.split(":") for part in text.split(","))
    return int(by_rank.get(str(local_rank), "0"))


def check_streams(flag: str, text: str | None) -> str | None:
    """Returns the text; raises `UserError` unless it names streams as torchrun's options do."""
    if text is not None and not STREAMS.fullmatch(text):
        raise UserError(
            f"{flag} {text}: 0 (none), 1 (stdout), 2 (stderr) or 3 (both) is expected, or one for "
            "each local rank as 0:3,1:1"
        )
    return text


def check_ranks(text: str | None) -> frozenset[int] | None:
    """Returns the local ranks of --local-ranks-filter; raises `UserError` for other text."""
    if not text:
        return None
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise UserError(f"--local-ranks-filter {text}: local ranks are expected, such as 0,2")
    return frozenset(int(part) for part in text.split(","))
