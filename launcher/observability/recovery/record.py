"""Measures the phases of each recovery, from the last step before a round to the first one after.

Pure: every time comes in as an argument, in seconds of one clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elasticzero.ipc.messages import Restored
from elasticzero.launcher.observability.metrics import FIRST, PHASES, Phase

ObservePhase = Callable[[str, Phase, float], None]
"""Called with the cause of the recovery, the phase, and its seconds."""


class RecoveryRecord:
    """Follows one node from the end of each generation to the first step of the next."""

    def __init__(self, observe: ObservePhase) -> None:
        self._observe = observe
        self._round_s: float | None = None
        """Time at which the round was opened that no new generation has closed yet."""
        self._start_s: float | None = None
        """Time at which the workers of the present generation started."""
        self._restored_s: float | None = None
        """Time at which their state was in place; None: it is not, or a step followed."""
        self._lost = 0
        """Number of finished steps that the generation does again."""
        self._recovery: dict[str, Any] | None = None
        """The recovery that is under way: its cause, and the seconds of its phases so far."""

    @property
    def round_is_open(self) -> bool:
        """Returns whether a round is open that was noted here."""
        return self._round_s is not None

    def round_opened(self, kind: str, reason: str, round_s: float, stepped_s: float) -> None:
        """Notes that a round opens.

        Args:
            kind: The kind of cause.
            reason: The cause as a sentence.
            round_s: Time at which the round was opened.
            stepped_s: Time of the last step; 0: there was none.
        """
        self._round_s = round_s
        self._recovery = {"kind": kind, "reason": reason}
        if stepped_s:
            self._add("detect", max(0.0, round_s - stepped_s))

    def starting(self, now_s: float, lost: int) -> None:
        """Notes that the workers of a generation start.

        Args:
            now_s: Present time.
            lost: Number of finished steps that it does again.
        """
        self._start_s, self._restored_s, self._lost = now_s, None, lost
        if self._round_s is not None:
            self._add("regroup", now_s - self._round_s)
        self._round_s = None

    def attached(self, now_s: float) -> None:
        """Notes that a worker has called `elasticzero.run`."""
        self._add("start", 0.0 if self._start_s is None else now_s - self._start_s)

    def restored(self, message: Restored, now_s: float) -> None:
        """Notes that a worker's state is in place."""
        self._add("connect", message.connect_s)
        self._add("build", message.build_s)
        self._add("restore", message.restore_s)
        self._restored_s = now_s

    def stepped(self, at_s: float) -> dict[str, Any] | None:
        """Notes the end of a step; returns the fields of the event `recovery` if it is the first
        one after a round."""
        if self._restored_s is None:
            return None
        self._add("first_step", max(0.0, at_s - self._restored_s))
        self._restored_s = None
        recovery, self._recovery = self._recovery, None
        if recovery is None:
            return None
        phases = {f"{phase}_s": recovery.get(f"{phase}_s") for phase in PHASES}
        whole_s = sum(seconds for seconds in phases.values() if seconds is not None)
        causes = {"kind": recovery["kind"], "reason": recovery["reason"]}
        return {**causes, "steps_lost": self._lost, "seconds": round(whole_s, 6), **phases}

    def _add(self, phase: Phase, seconds: float) -> None:
        cause = FIRST if self._recovery is None else self._recovery["kind"]
        self._observe(cause, phase, seconds)
        if self._recovery is not None:
            self._recovery[f"{phase}_s"] = round(seconds, 6)
