"""Feeds the process that writes to a tracker, and replaces it when it has failed.

Rows wait here until the process has said that they are written, so none is lost with it. Nothing of
this stops training: a tracker that is away for long loses the oldest rows.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from elasticzero.launcher.options.trackers import TrackerTarget
from elasticzero.ops.trackers.averages import Row

RESTART_S = 10.0
"""Seconds from the failure of a process to the start of the next one."""
MOST_ROWS = 50_000
"""Maximum number of rows that wait."""
AT_ONCE = 500
"""Maximum number of rows in a request."""


class TrackerFailed(Exception):
    """Reports that the process has failed, or is gone."""


class TrackerProcess:
    """Holds one tracker's process, in a thread that waits for its answers."""

    def __init__(
        self,
        target: TrackerTarget,
        job: str,
        *,
        begins: bool,
        log: Path,
        tell: Callable[[str, bool], object],
    ) -> None:
        """Starts the process.

        Args:
            target: the kind of tracker, and its place.
            job: the job's name.
            begins: whether the job begins anew, as for `open_tracker`.
            log: file for what the process prints.
            tell: receives what people should know, and whether something has failed.
        """
        self._target = target
        self._spec = {"kind": target.kind, "place": target.place, "job": job}
        self._begins = begins
        self._log = log
        self._tell = tell
        self._last_failure = ""
        self._rows: deque[Row] = deque()
        self._dropped = 0
        self._changed = threading.Condition()
        self._closing = False
        self._outcome: str | None = None
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(
            target=self._run, name=f"elasticzero-{target.kind}", daemon=True
        )
        self._thread.start()

    def write(self, rows: Sequence[Row]) -> None:
        """Takes rows to write, in the order of their steps; returns at once."""
        with self._changed:
            self._rows.extend(rows)
            while len(self._rows) > MOST_ROWS:
                self._rows.popleft()
                self._dropped += 1
            self._changed.notify()

    def close(self, outcome: str | None, timeout_s: float, *, discard: bool = False) -> None:
        """Ends the process once it has written what is left, or after `timeout_s`.

        Args:
            outcome: outcome of the job; None: the job goes on.
            timeout_s: seconds after which the process is killed.
            discard: whether the rows that wait are dropped, because another node writes them.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            self._closing, self._outcome = True, outcome
            if discard:
                self._rows.clear()
            self._changed.notify()
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._thread.is_alive() and self._process is not None:
            self._process.kill()
        if self._rows:
            self._say_failure(f"has ended, and {len(self._rows)} steps are not written")

    def _run(self) -> None:
        while True:
            try:
                self._serve()
                return
            except (TrackerFailed, OSError, ValueError, KeyError, TypeError) as error:
                self._say_failure(str(error))
            finally:
                self._end_process()
            with self._changed:
                if self._closing or self._changed.wait_for(lambda: self._closing, RESTART_S):
                    return

    def _serve(self) -> None:
        """Starts a process and gives it what there is to write, until the end."""
        spec = json.dumps({**self._spec, "begins": self._begins})
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "elasticzero.ops.trackers.writer", spec],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                start_new_session=True,
            )
        where = self._answer()["where"]
        self._begins = False
        self._tell(f"--log-to {self._target.kind} writes to {where}", False)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._rows or self._closing)
                batch = [self._rows[i] for i in range(min(AT_ONCE, len(self._rows)))]
                if self._dropped:
                    self._say_failure(f"was away too long: {self._dropped} steps are left out")
                    self._dropped = 0
            if not batch:
                self._ask({"outcome": self._outcome})
                return
            written = self._ask({"rows": [[r.step, r.at, dict(r.scalars)] for r in batch]})
            with self._changed:
                while self._rows and self._rows[0].step <= written["written"]:
                    self._rows.popleft()
            self._last_failure = ""

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        """Returns the process's answer; raises `TrackerFailed` for an error, and for none."""
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise TrackerFailed(f"its process ended with {self._process.wait()}; see {self._log}")
        answer: dict[str, Any] = json.loads(line)
        if not isinstance(answer, dict):
            raise TrackerFailed(f"its process answers {line:.80}; see {self._log}")
        if "error" in answer:
            raise TrackerFailed(f"{answer['error']}; it is tried again, see {self._log}")
        return answer

    def _end_process(self) -> None:
        process = self._process
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        process.kill()
        process.wait()

    def _say_failure(self, text: str) -> None:
        """Tells of a failure, unless it is the last one again."""
        if text != self._last_failure:
            self._tell(f"--log-to {self._target.kind} {text}", True)
        self._last_failure = text
