"""Finds the newest good checkpoint in a thread beside the agent's loop.

Storage may be slow, hang or be away, and the agent must answer the others all the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from elasticzero.checkpoint.steps.catalog import step_error_text, steps
from elasticzero.checkpoint.storage.base import open_directory
from elasticzero.errors import ElasticZeroError, one_line
from elasticzero.launcher.protocol.view import DamagedCheckpoint

FRESH_S = 0.3
"""Seconds for which a result counts, or as long as it took to get it if that is longer."""
AGAIN_S = 2.0
"""After an error the directory is looked at again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """One look."""

    step: int | None = None
    """The newest good checkpoint."""
    damage: DamagedCheckpoint | None = None
    """The damage of the newest of all."""
    pending: str | None = None
    """Why there is no answer yet."""


class CheckpointProbe:
    """Looks when it is asked, one look at a time."""

    def __init__(self, checkpoint_dir: str | None, wake: Callable[[], None]) -> None:
        """`wake`: called when there is an answer."""
        self._directory = checkpoint_dir
        self._wake = wake
        self._lock = threading.Lock()
        self._looking = False
        self._seen: CheckpointState | None = None
        self._known: Mapping[int, str] = {}
        """The bad steps that the last look knew of."""
        self._until_s = 0.0
        self._trouble = ""

    @property
    def possible(self) -> bool:
        """True if there is a checkpoint directory."""
        return self._directory is not None

    def invalidate(self) -> None:
        """Discards the last result, which no longer holds."""
        self._until_s = 0.0

    def poll(self, bad: Mapping[int, str]) -> CheckpointState:
        """Returns what is there, or that the answer is to come. bad: why steps are known to be
        damaged."""
        if self._directory is None:
            return CheckpointState()
        with self._lock:
            fresh = time.monotonic() < self._until_s and bad.keys() <= self._known.keys()
            if fresh and self._seen is not None:
                return self._seen
            if not self._looking and not (self._trouble and time.monotonic() < self._until_s):
                self._looking = True
                thread = threading.Thread(
                    target=self._look, args=(dict(bad),), name="elasticzero-look", daemon=True
                )
                thread.start()
            return CheckpointState(
                pending=self._trouble or f"looking at the checkpoints in {self._directory}"
            )

    def _look(self, bad: Mapping[int, str]) -> None:
        began_s = time.monotonic()
        seen: CheckpointState | None = None
        trouble = ""
        try:
            seen = self._read(bad)
        except (ElasticZeroError, OSError) as error:
            trouble = f"the checkpoints cannot be looked at, trying again: {one_line(error)}"
        ended_s = time.monotonic()
        with self._lock:
            self._seen, self._known, self._trouble = seen, bad, trouble
            lasts_s = AGAIN_S if trouble else max(FRESH_S, ended_s - began_s)
            self._until_s = ended_s + lasts_s
            self._looking = False
        self._wake()

    def _read(self, bad: Mapping[int, str]) -> CheckpointState:
        assert self._directory is not None
        damage: DamagedCheckpoint | None = None
        for info in steps(open_directory(self._directory)):
            why = bad[info.step] if info.step in bad else step_error_text(info.storage)
            if why is None:
                return CheckpointState(step=info.step, damage=damage)
            damage = damage or DamagedCheckpoint(info.step, why)
        return CheckpointState(damage=damage)
