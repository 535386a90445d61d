"""Notes each test's turn and end in a file as it comes, so that a run that is killed has both.

With `-p tests.gpu.outcomes --outcomes FILE`; the file gets a line of JSON for each event.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", help="file that gets a line of JSON for each test's events")


class Notes:
    """Writes events; a runner of xdist notes the tests that were collected, and no more."""

    def __init__(self, path: Path, is_runner: bool) -> None:
        self._path, self._is_runner = path, is_runner

    def _write(self, event: str, **about: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"event": event, **about}) + "\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self._write("collected", tests=[item.nodeid for item in session.items])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if not self._is_runner:
            self._write("began", test=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not self._is_runner:
            self._write(
                report.when or "",
                test=report.nodeid,
                outcome=report.outcome,
                seconds=round(report.duration, 2),
                reason=reason_of(report),
            )


def reason_of(report: pytest.TestReport) -> str:
    """Returns the line that says why a test failed or was skipped."""
    if report.passed:
        return ""
    match report.longrepr:
        case (_, _, str(reason)):
            return reason
        case None:
            return ""
        case representation:
            crash = getattr(representation, "reprcrash", None)
            text = crash.message if crash else str(representation)
            lines = text.strip().splitlines() or [""]
            return str(lines[0] if crash else lines[-1])


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("outcomes"):
        config.pluginmanager.register(Notes(Path(path), hasattr(config, "workerinput")))
