"""Defines `SessionLogger`, by which what a module logs reaches the session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from elasticzero.integrations.session_log import log_numbers
from elasticzero.session import Session


class SessionLogger(Logger):
    """Gives `session.log` the metrics of rank 0: `L.Trainer(logger=SessionLogger())`.

    So `--log-to` writes them, each step once through any faults, and the event log has them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.session: Session | None = None
        """The session of this generation, which the strategy sets; None: none is open."""

    @property
    def name(self) -> str:
        """Returns the name of the folder in which callbacks write."""
        return "elasticzero"

    @property
    def version(self) -> str:
        """Returns no version: a job has one folder."""
        return ""

    @rank_zero_only  # type: ignore[untyped-decorator]
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Logs numbers for the step in which training stands."""
        if self.session is not None:
            log_numbers(self.session, metrics)

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Does nothing."""
