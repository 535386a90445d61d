"""Finds the newest good checkpoint in a thread beside the agent's loop.

Storage may be slow or unreachable, and the agent must answer the other nodes all the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from elasticzero.checkpoint.steps.catalog import step_error_text, steps
from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.errors import ElasticZeroError, one_line
from elasticzero.launcher.protocol.view import DamagedCheckpoint

FRESH_S = 0.3
"""Seconds for which a result is valid; if it took longer to get it, it is valid as long as that."""
AGAIN_S = 2.0
"""Seconds after an error until the directory is read again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """Holds the result of one read of the checkpoint directory."""

    step: int | None = None
    """Step of the newest good checkpoint; None: there is none."""
    damage: DamagedCheckpoint | None = None
    """Damage of the newest checkpoint; None: it is good."""
    pending: str | None = None
    """Reason for which there is no result yet; None: there is one."""


class CheckpointProbe:
    """Reads the checkpoint directory on request, in one thread at a time."""

    def __init__(self, checkpoint_dir: str | None, wake: Callable[[], None]) -> None:
        """Creates a probe that has no result.

        Args:
            checkpoint_dir: Path or URL of the checkpoints; None: there are none.
            wake: Called when there is a result.
        """
        self._directory = checkpoint_dir
        self._wake = wake
        self._lock = threading.Lock()
        self._probing = False
        self._result: CheckpointState | None = None
        self._known_bad: Mapping[int, str] = {}
        """Damaged steps that were known when the last read began, with the reasons."""
        self._until_s = 0.0
        self._error = ""

    @property
    def possible(self) -> bool:
        """Returns whether there is a checkpoint directory."""
        return self._directory is not None

    def invalidate(self) -> None:
        """Discards the last result."""
        self._until_s = 0.0

    def poll(self, bad: Mapping[int, str]) -> CheckpointState:
        """Returns a valid result, or a pending one after it has begun to read the directory.

        Args:
            bad: Steps that are known to be damaged, with the reasons.
        """
        if self._directory is None:
            return CheckpointState()
        with self._lock:
            fresh = time.monotonic() < self._until_s and bad.keys() <= self._known_bad.keys()
            if fresh and self._result is not None:
                return self._result
            if not self._probing and not (self._error and time.monotonic() < self._until_s):
                self._probing = True
                thread = threading.Thread(
                    target=self._probe, args=(dict(bad),), name="elasticzero-probe", daemon=True
                )
                thread.start()
            return CheckpointState(
                pending=self._error or f"looking at the checkpoints in {self._directory}"
            )

    def _probe(self, bad: Mapping[int, str]) -> None:
        began_s = time.monotonic()
        seen: CheckpointState | None = None
        failure = ""
        try:
            seen = self._read(bad)
        except (ElasticZeroError, OSError) as error:
            failure = f"the checkpoints cannot be read, trying again: {one_line(error)}"
        ended_s = time.monotonic()
        with self._lock:
            self._result, self._known_bad, self._error = seen, bad, failure
            lasts_s = AGAIN_S if failure else max(FRESH_S, ended_s - began_s)
            self._until_s = ended_s + lasts_s
            self._probing = False
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
