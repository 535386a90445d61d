"""Finishes a capture in a thread, while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable


class CopyBeside:
    """Finishes captures, one after the other; any thread may wait for them."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def begin(self, finish: Callable[[], None], then: Callable[[], None]) -> None:
        """Begins to finish a capture; none may be running.

        Args:
            finish: Finishes it.
            then: Is called after that, unless `finish` raises.
        """

        def run() -> None:
            try:
                finish()
                then()
            except Exception as error:  # noqa: BLE001 - raised in the thread that trains
                self._error = error

        self._thread = threading.Thread(target=run, name="elasticzero-capture", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises the error of a capture that could not be finished: this rank cannot go on."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Waits until no capture is being finished; raises as `check` does."""
        self.join()
        self.check()

    def join(self, limit_s: float | None = None) -> None:
        """Waits until no capture is being finished, whatever comes of it; for this many seconds at
        most."""
        if (thread := self._thread) is not None:
            thread.join(limit_s)
